// Byte-pair encoding: a word starts as characters (or bytes), and the best pair of neighbours
// merges until none can.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "text/tokenizer/model.h"
#include "text/tokenizer/vocab.h"

namespace omnikv::tok {

// Pairs of characters that some merge may join, as a Bloom filter with one hash: where it says no,
// a text can be cut and its parts encoded apart, exactly. `x` ends the left part of a merge and `y`
// starts the right one.
class JoinFilter {
 public:
  void Reset(size_t expected_pairs);
  void Add(char32_t x, char32_t y) { bits_[Index(x, y)] = true; }
  bool MayJoin(char32_t x, char32_t y) const { return bits_[Index(x, y)]; }

 private:
  size_t Index(char32_t x, char32_t y) const {
    return HashPair(static_cast<uint32_t>(x), static_cast<uint32_t>(y)) & (bits_.size() - 1);
  }
  std::vector<bool> bits_;  // power of two
};

struct BpeOptions {
  // The text is bytes, and tokens are spelt in the byte-level alphabet.
  bool byte_level = false;
  // A character without a token becomes the tokens <0xHH> of its bytes, where all exist; else `unk`
  // (-1: nothing), consecutive ones as one with fuse_unk.
  bool byte_fallback = false;
  bool fuse_unk = false;
  int32_t unk = -1;
  bool ignore_merges = false;  // a piece that is a token is that token
  std::string continuing_subword_prefix;
  std::string end_of_word_suffix;
};

// BPE by a list of merges, best first ("BPE" of tokenizer.json, "gpt2" of GGUF).
class Bpe final : public Model {
 public:
  struct Merge {
    int32_t left;
    int32_t right;
    int32_t merged;  // -1: never merge
  };
  // `vocab` must outlive the model. Tokens flagged in `blocked` [vocab->size()] are never produced
  // from text, except as `unk` or by byte fallback. A pair listed twice has its last rank.
  Bpe(const Vocab* vocab, BpeOptions options, std::vector<Merge> merges,
      const std::vector<bool>& blocked);

  void Encode(std::string_view piece, ModelScratch* scratch,
              std::vector<int32_t>* out) const override;

 private:
  struct PairSlot {
    uint64_t key;   // left << 32 | right; kFree
    uint32_t rank;  // index into merges_
  };

  void EncodeWord(std::string_view word, ModelScratch* scratch, std::vector<int32_t>* out) const;
  void BuildFilter();
  // What one character (a byte: as the character that stands for it) is: its token, else -1.
  int32_t FindUsable(std::string_view text) const;
  void AddSymbols(std::string_view word, ModelScratch* scratch) const;
  // The byte tokens of `text`; false when one is missing.
  bool AddByteTokens(std::string_view text, uint32_t begin, uint32_t end,
                     std::vector<Symbol>* symbols) const;
  uint32_t Rank(int32_t left, int32_t right) const;

  const Vocab* vocab_;
  BpeOptions o_;
  std::vector<Merge> merges_;          // by rank
  std::vector<PairSlot> pairs_;        // power of two, at most half full
  std::vector<bool> blocked_;          // [vocab size]
  std::array<int32_t, 256> single_;    // token of a byte (byte_level) or an ASCII character; -1
  std::array<int32_t, 256> byte_ids_;  // token <0xHH>; -1
  bool can_cut_ = false;
  JoinFilter joins_;
};

// BPE by scores: any two neighbours whose text is a token may merge, the highest score first
// (sentencepiece's BPE; "llama" of GGUF).
class ScoreBpe final : public Model {
 public:
  struct Options {
    int32_t unk = -1;                     // for a byte without a token of its own; -1: nothing
    std::array<int32_t, 256> byte_ids{};  // token of each byte; -1
  };
  // `scores` and `usable` are [vocab->size()]: only usable tokens come out of merges.
  ScoreBpe(const Vocab* vocab, Options options, const std::vector<float>& scores,
           std::vector<bool> usable);

  void Encode(std::string_view piece, ModelScratch* scratch,
              std::vector<int32_t>* out) const override;

 private:
  int32_t FindUsable(std::string_view text) const;
  void EncodeWord(std::string_view word, ModelScratch* scratch, std::vector<int32_t>* out) const;

  const Vocab* vocab_;
  Options o_;
  std::vector<uint32_t> rank_;  // [vocab size], 0: best; equal scores share a rank
  std::vector<bool> usable_;    // [vocab size]
  size_t max_bytes_ = 0;        // of a usable token
  JoinFilter joins_;
};

}  // namespace omnikv::tok
