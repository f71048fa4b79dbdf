// The unigram language model: of all ways to spell a text in tokens, the one with the largest sum
// of scores.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

#include "text/tokenizer/byte_trie.h"
#include "text/tokenizer/model.h"
#include "text/tokenizer/vocab.h"

namespace omnikv::tok {

struct UnigramOptions {
  int32_t unk = -1;  // -1: a character without a token is left out
  // Unknown text becomes the tokens <0xHH> of its bytes, where all exist.
  bool byte_fallback = false;
  // Unknown text that is the text of a token after all is that token (the tokenizers library's).
  bool look_up_unknown = true;
};

// Characters that no token spells cost the lowest score less 10; neighbouring ones are one `unk`.
class Unigram final : public Model {
 public:
  // `vocab` must outlive the model. `scores` and `usable` are [vocab->size()]; only usable tokens
  // come out of text, except as `unk` or by byte fallback. `min_score` is the lowest that counts.
  Unigram(const Vocab* vocab, UnigramOptions options, std::vector<double> scores,
          std::vector<bool> usable, double min_score);

  void Encode(std::string_view piece, ModelScratch* scratch,
              std::vector<int32_t>* out) const override;

 private:
  void EncodeWord(std::string_view word, ModelScratch* scratch, std::vector<int32_t>* out) const;
  void EncodeUnknown(std::string_view text, std::vector<int32_t>* out) const;

  const Vocab* vocab_;
  UnigramOptions o_;
  std::vector<double> scores_;  // [vocab size]
  std::vector<bool> usable_;    // [vocab size]
  double unk_score_;
  std::array<int32_t, 256> byte_ids_;
  ByteTrie trie_;
};

}  // namespace omnikv::tok
