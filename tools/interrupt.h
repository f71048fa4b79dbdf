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

}  // namespace omnikv::tools
