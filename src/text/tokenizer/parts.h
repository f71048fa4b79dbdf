// What the loaders of tokenizer.json and GGUF files build, and Tokenizer runs.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "omnikv/status.h"
#include "text/tokenizer/added_tokens.h"
#include "text/tokenizer/decoder.h"
#include "text/tokenizer/model.h"
#include "text/tokenizer/normalizer.h"
#include "text/tokenizer/pre_tokenizer.h"
#include "text/tokenizer/tokenizer.h"
#include "text/tokenizer/vocab.h"

namespace omnikv::tok {

// What the decoder gets for a token.
enum class TokenBytes {
  kText,           // its text
  kByteLevel,      // the bytes that its text stands for
  kSentencePiece,  // its text with U+2581 as spaces; byte tokens as their byte
};

struct TokenizerParts {
  std::string what;  // the file, for messages
  Vocab vocab;       // of the model
  AddedTokens added;
  std::vector<NamedStep<Normalizer>> normalizers;
  std::vector<NamedStep<PreTokenizer>> pre_tokenizers;
  std::unique_ptr<const Model> model;
  std::vector<int32_t> prefix, suffix;  // around a text with add_special
  Decoder decoder;
  TokenBytes token_bytes = TokenBytes::kText;
  std::vector<bool> special;  // [size]
  int32_t size = 0;           // largest id + 1, added tokens included
  std::optional<int32_t> bos, eos;

  // Runs the normalizers.
  void Normalize(NormText* text, Work* work) const {
    for (const auto& step : normalizers) {
      work->At(step.name);
      step.run->Apply(text, work);
      work->Draw(text->text.size() + 16);
    }
    work->At({});
  }
};

Result<std::unique_ptr<TokenizerParts>> LoadTokenizerJson(std::string_view json);
Result<std::unique_ptr<TokenizerParts>> LoadGgufVocab(const GgufVocab& vocab);

// The regular expressions that the pre-tokenizer `name` of a GGUF file cuts by, one after the
// other, and what else the name implies.
struct GgufPreTokenizer {
  std::vector<std::string_view> patterns;  // in Oniguruma's syntax
  bool ignore_merges = false;
  bool add_bos = false;
};
Result<GgufPreTokenizer> FindGgufPreTokenizer(std::string_view name);

}  // namespace omnikv::tok
