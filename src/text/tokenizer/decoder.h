// How tokens become text again. The rules of tokenizer.json are defined on the whole list of
// tokens; here they run as a stream that lets text out as soon as nothing later can change it, so
// that decoding at once and token by token cannot differ.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "text/tokenizer/regex.h"
#include "text/tokenizer/work.h"

namespace omnikv::tok {

std::string ReplaceAll(std::string_view text, std::string_view from, std::string_view to);

// The byte that a token <0xHH> stands for, or -1.
int ByteOfToken(std::string_view token);

struct DecoderStep {
  enum class Kind {
    kByteLevel,     // byte-level characters to bytes to text, in one piece
    kBytes,         // bytes to text, in one piece
    kReplace,       // `pattern` by `content`
    kByteFallback,  // runs of tokens <0xHH> to text; a run that is none, to a U+FFFD a token
    kFuse,          // all tokens to one
    kStrip,         // up to `start` and `stop` characters `content` at the ends
    kMetaspace,     // `content` to space; in the first token to nothing, with `flag`
    kWordPiece,     // words start anew without the prefix `content`; `flag`: mends punctuation
    kBpe,           // the suffix `content` to space, in the last token to nothing
    kJoin,          // a space between tokens
  };
  Kind kind;
  std::string content;
  size_t start = 0;
  size_t stop = 0;
  bool flag = false;
  // kReplace: text, not empty, or a regular expression.
  std::string pattern_text;
  std::shared_ptr<const Regex> pattern;
  std::string name;  // where its file says so, for messages
};

// Immutable.
class Decoder {
 public:
  explicit Decoder(std::vector<DecoderStep> steps);
  Decoder() : Decoder(std::vector<DecoderStep>()) {}

 private:
  friend class DecoderStream;
  // How a step takes its input: token by token; as one token that grows; as one token, which is
  // only complete at the end.
  enum class Input { kTokens, kGrowing, kComplete };
  std::vector<DecoderStep> steps_;
  std::vector<Input> inputs_;  // [steps]
};

// One text being decoded. `decoder` must outlive it.
class DecoderStream {
 public:
  explicit DecoderStream(const Decoder* decoder);

  // Appends to *out the text that is final once `token` has followed the tokens before it. Throws
  // WorkError, after which only destruction is allowed, when a step makes more than the budget of
  // the tokens so far allows.
  void Push(std::string_view token, std::string* out);
  // Appends the rest, and starts over. Throws as Push.
  void Flush(std::string* out);
  // The name of the step at work, for a WorkError.
  std::string_view step() const { return work_->step(); }

 private:
  struct State {
    bool started = false;  // a token has come
    bool left_done = false;
    size_t count = 0;
    std::string held;
  };

  void Feed(size_t step, std::string_view token, std::string* out);
  void FeedToken(size_t step, std::string_view token, std::string* out);
  void FeedGrowing(size_t step, std::string_view text, std::string* out);
  void Finish(size_t step, std::string* out);
  void FlushByteRun(size_t step, std::string* out);
  std::string Replaced(const DecoderStep& step, std::string_view text);

  const Decoder* decoder_;
  std::vector<State> states_;  // [steps]
  std::unique_ptr<Work> work_;
};

}  // namespace omnikv::tok
