#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "base/log.h"
#include "chat/turns.h"
#include "text/tokenizer/tokenizer.h"

namespace omnikv::tools {
namespace {

class PipedTurns : public TurnReader {
 public:
  Result<Turn> Next() override {
    Turn turn{.kind = Turn::Kind::kText, .text = {}};
    while (turn.text.empty()) {
      int c = 0;
      while ((c = getc_unlocked(stdin)) != EOF && c != '\n') {
        if (turn.text.size() == Tokenizer::kMaxTextBytes) {
          return InvalidArgument(fmt::format("a line of standard input holds more than {}",
                                             HumanBytes(Tokenizer::kMaxTextBytes)));
        }
        turn.text.push_back(static_cast<char>(c));
      }
      if (turn.text.ends_with('\r')) turn.text.pop_back();  // of a file from Windows
      if (c != EOF) continue;
      if (std::ferror(stdin) != 0) {
        return Failed(fmt::format("standard input cannot be read: {}", std::strerror(errno)));
      }
      if (turn.text.empty()) return Turn{};
    }
    return turn;
  }
  bool interactive() const override { return false; }
};

}  // namespace

std::unique_ptr<TurnReader> MakePipedTurns() {
  return std::make_unique<PipedTurns>();
}

std::unique_ptr<TurnReader> OpenTurns() {
  return isatty(STDIN_FILENO) != 0 ? MakeTypedTurns() : MakePipedTurns();
}

}  // namespace omnikv::tools
