// Ctrl-C while the model reads or answers.
#pragma once

#include <csignal>

#include "omnikv/engine.h"

namespace omnikv::tools {

// While alive, the first Ctrl-C cancels `session`; the second one ends the program. Where SIGINT
// was ignored (nohup, a command that a script runs in the background), it stays so. One at a time.
class CancelOnInterrupt {
 public:
  explicit CancelOnInterrupt(Session& session);
  ~CancelOnInterrupt();
  CancelOnInterrupt(const CancelOnInterrupt&) = delete;
  CancelOnInterrupt& operator=(const CancelOnInterrupt&) = delete;

  // kCancelled where Ctrl-C cut this answer.
  Status CutStatus(const GenerateResult& answer) const;

 private:
  struct sigaction before_ {};
};

// While alive, Ctrl-C does nothing but what a CancelOnInterrupt makes of it: one that comes just
// after the last token of an answer must not end the conversation. Where SIGINT was ignored, it
// stays so. One at a time.
class OutliveInterrupts {
 public:
  OutliveInterrupts();
  ~OutliveInterrupts();
  OutliveInterrupts(const OutliveInterrupts&) = delete;
  OutliveInterrupts& operator=(const OutliveInterrupts&) = delete;

 private:
  struct sigaction before_ {};
};

}  // namespace omnikv::tools
