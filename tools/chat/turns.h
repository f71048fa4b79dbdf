// Where the turns of a conversation come from: a person at a terminal, or a file or a pipe.
#pragma once

#include <memory>
#include <string>

#include "omnikv/status.h"

namespace omnikv::tools {

struct Turn {
  enum class Kind { kText, kCommand, kEnd };
  Kind kind = Kind::kEnd;
  std::string text;  // of a command, its name without the slash
};

class TurnReader {
 public:
  virtual ~TurnReader() = default;
  // The next turn, empty ones passed over. kInvalidArgument when a line holds more than
  // Tokenizer::kMaxTextBytes.
  virtual Result<Turn> Next() = 0;
  // Whether a person types, who goes on after a turn that failed.
  virtual bool interactive() const = 0;
};

// At a terminal: lines that can be edited, with a history of earlier ones. "/name" is a command,
// "//" begins a text that begins with a slash; a line that begins with """ opens a text of several
// lines, which """ at a line's end closes; pasted line breaks are part of the text. Ctrl-C gives a
// fresh prompt, Ctrl-D ends. Elsewhere: a text per line, whatever it says.
std::unique_ptr<TurnReader> OpenTurns();

// The forms that OpenTurns chooses from. Typed ones are lines as they are, too, where there is
// nothing to show them on.
std::unique_ptr<TurnReader> MakePipedTurns();
std::unique_ptr<TurnReader> MakeTypedTurns();

}  // namespace omnikv::tools
