// Text to token ids and back, for tokenizer.json files of Hugging Face and vocabularies of GGUF
// files, with the ids that the tokenizers library and llama.cpp give.
//
// A tokenizer.json is run as it is written: normalizers, pre-tokenizers with their own regular
// expressions, BPE or unigram model, added tokens, post-processor, decoders. What it asks for and
// is not supported is refused by name. A GGUF file names its pre-tokenizer instead; the names are
// looked up in a table, and one that is not there is refused.
//
// Input that is not well-formed UTF-8 is read as if every maximal ill-formed part were U+FFFD.
// Unicode properties in regular expressions are Unicode 14's, elsewhere Unicode 15's; characters
// assigned later count as unassigned.
//
// **Trust.** Files come from anywhere. What they ask for is bounded: a file is refused, or an
// encoding or a decoding fails with a sentence that names file and step, where the steps together
// make more than 64 times the text that came in (and 16 MiB), or a regular expression backtracks
// more than a text of that size may cost.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "omnikv/status.h"
#include "text/span.h"

namespace omnikv {

// What a GGUF file says about its tokenizer (tokenizer.ggml.*). Views need to live only as long as
// the call that reads them.
struct GgufVocab {
  std::string name;                      // of the file, for messages
  std::string model;                     // "gpt2" (byte-level BPE), "llama" (sentencepiece BPE)
                                         // or "t5" (unigram)
  std::string pre;                       // of "gpt2": the name of its pre-tokenizer
  std::vector<std::string_view> tokens;  // [n]
  std::vector<float> scores;             // [n], or empty: all 0
  std::vector<int32_t> types;            // [n], or empty: all normal; see GgufTokenType
  std::vector<std::string_view> merges;  // of "gpt2": "left right", best first
  std::optional<int32_t> bos, eos, unk;  // ids
  std::optional<bool> add_bos, add_eos;  // absent: what the model usually does
  std::optional<bool> add_space_prefix;  // of "llama" and "t5"; absent: true
  std::optional<bool> remove_extra_whitespaces;  // of "t5"; absent: false
  std::string_view precompiled_charsmap;         // of "t5"; may be empty
};

enum class GgufTokenType : int32_t {
  kNormal = 1,
  kUnknown = 2,
  kControl = 3,      // special: only parsed where special tokens are
  kUserDefined = 4,  // found in any text, before the model sees it; but see HoldBack
  kUnused = 5,
  kByte = 6,
};

struct EncodeOptions {
  // The tokens that the model wants around a text (a beginning-of-sequence token, say).
  bool add_special = true;
  // Special tokens written out in the text become those tokens; otherwise they are plain text.
  bool parse_special = true;
};

namespace tok {
struct TokenizerParts;
}

// Immutable: any number of threads may use one at a time. A MiB of English takes 20 to 50 ms of one
// EPYC core, whatever the model.
class Tokenizer {
 public:
  // `what` names the file in messages. kCorrupt: not a tokenizer.json, or one that contradicts
  // itself; kUnsupported: it asks for something that is not supported.
  static Result<std::unique_ptr<Tokenizer>> FromJson(std::string_view tokenizer_json,
                                                     const std::string& what);
  static Result<std::unique_ptr<Tokenizer>> FromGguf(const GgufVocab& vocab);
  ~Tokenizer();

  // What a caller may hand to Encode and EncodeSpans, all spans together: where text enters, more
  // is refused. (Ill-formed bytes grow threefold, and normalization adds to that.)
  static constexpr size_t kMaxTextBytes = size_t{256} << 20;

  // From now on EncodeSpans does not find in literal spans the added tokens that are written out
  // in `text`, what the chat template can write, although the file does not call them special:
  // users must not type them. Tokens of letters, digits and spaces alone stay ordinary. Not to be
  // called when other threads use the tokenizer. kResourceExhausted past the limits above.
  Status HoldBack(std::string_view text);

  // REQUIRES text of at most kMaxTextBytes, here and below. kResourceExhausted or kFailed past the
  // limits above.
  Result<std::vector<int32_t>> Encode(std::string_view text, EncodeOptions options = {}) const;

  // The tokens of a prompt whose spans come from different hands. The spans are read as one text:
  // normalization, words and merges run over their edges, exactly as in the concatenation. Only
  // the search for special tokens knows of spans: one is found where its text lies wholly in spans
  // that are not literal, so nothing a user writes can become, complete, hide or cut a special
  // token. The same holds for tokens that are held back. (Other added tokens that are not special,
  // such as runs of spaces, are ordinary text to this. The white space that a token with lstrip or
  // rstrip swallows may be a user's.)
  //
  // Special tokens with `normalized` are looked for in the text as given here, not in the
  // normalized text, when any span is literal.
  Result<std::vector<int32_t>> EncodeSpans(const std::vector<TextSpan>& spans,
                                           bool add_special) const;

  // The text of tokens, well-formed UTF-8; ids that do not exist are left out, and special tokens
  // too with skip_special. Fails as Encode.
  Result<std::string> Decode(const std::vector<int32_t>& ids, bool skip_special) const;

  std::optional<int32_t> TokenToId(std::string_view token) const;
  // The token as the vocabulary spells it ("Ġthe", "▁the"); empty where there is none. Valid as
  // long as the tokenizer.
  std::string_view IdToToken(int32_t id) const;
  bool IsSpecial(int32_t id) const;
  int32_t vocab_size() const;  // largest id + 1

  // Where the source says so (GGUF does, tokenizer.json does not).
  std::optional<int32_t> bos() const;
  std::optional<int32_t> eos() const;

 private:
  friend class StreamDecoder;
  explicit Tokenizer(std::unique_ptr<tok::TokenizerParts> parts);

  std::unique_ptr<tok::TokenizerParts> parts_;
};

// Text of tokens as they are generated: what Push and Flush return, joined, is what Decode returns
// for all tokens. Never half a character, never text that a later token changes. Fails as Decode,
// and after that only destruction is allowed. `tokenizer` must outlive it; one thread at a time.
class StreamDecoder {
 public:
  explicit StreamDecoder(const Tokenizer* tokenizer, bool skip_special = true);
  ~StreamDecoder();

  Result<std::string> Push(int32_t id);  // the text that is complete now; may be empty
  Result<std::string> Flush();           // the rest; then a new text may start

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace omnikv
