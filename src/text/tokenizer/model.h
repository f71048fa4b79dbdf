// What turns a piece of text into tokens.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "text/tokenizer/hash.h"
#include "text/tokenizer/work.h"

namespace omnikv::tok {

// The words of one Encode call and where in its output their tokens are: natural text repeats its
// words. Words are short, so the cache copies them.
class WordCache {
 public:
  static constexpr size_t kMaxWordBytes = 64;

  // The tokens of `word` as a range of the output, or nullptr; then Insert may follow.
  struct Entry {
    uint64_t hash;
    uint32_t text_begin;  // in text_
    uint32_t text_size;   // 0: free
    uint32_t ids_begin;   // in the output
    uint32_t ids_size;
  };
  const Entry* Find(std::string_view word, uint64_t hash) const {
    for (size_t k = 0; k < kProbes && !entries_.empty(); ++k) {
      const Entry& e = entries_[(hash + k) & (entries_.size() - 1)];
      if (e.text_size == 0) return nullptr;
      if (e.hash == hash && std::string_view(text_).substr(e.text_begin, e.text_size) == word) {
        return &e;
      }
    }
    return nullptr;
  }
  void Insert(std::string_view word, uint64_t hash, size_t ids_begin, size_t ids_size);

 private:
  static constexpr size_t kProbes = 8;  // then a word evicts another: no chain grows long
  static constexpr size_t kMaxEntries = size_t{1} << 17;

  void Place(const Entry& entry);

  std::vector<Entry> entries_;  // power of two
  size_t used_ = 0;
  std::string text_;
};

// A symbol of a word that BPE is merging; a doubly linked list in an array.
struct Symbol {
  int32_t id;
  uint32_t begin;  // bytes of the word
  uint32_t end;    // begin == end: merged into the symbol before it
  int32_t prev;
  int32_t next;
  uint32_t rank;   // of merging with the next symbol; kNoRank: cannot
  int32_t merged;  // what that gives
};

// Memory that encoding needs: one for each call.
struct ModelScratch {
  explicit ModelScratch(Work* w) : work(w) {}
  Work* work;
  WordCache cache;
  std::vector<Symbol> symbols;
  std::vector<uint64_t> heap;
  std::string text;
  struct Node {
    double score;
    uint32_t size;  // bytes of the last token; 0: not reached
    int32_t id;
  };
  std::vector<Node> nodes;
};

// Immutable.
class Model {
 public:
  virtual ~Model() = default;

  // Appends the tokens of `piece`, which is not empty. REQUIRES the same *out for one scratch, only
  // ever appended to.
  virtual void Encode(std::string_view piece, ModelScratch* scratch,
                      std::vector<int32_t>* out) const = 0;

 protected:
  // Appends the tokens of `word` from the cache, or else by encode(), which appends them.
  template <typename Fn>
  static void EncodeCached(std::string_view word, ModelScratch* scratch, std::vector<int32_t>* out,
                           const Fn& encode) {
    if (word.size() > WordCache::kMaxWordBytes) return encode();
    const uint64_t hash = HashBytes(word);
    const size_t begin = out->size();
    if (const WordCache::Entry* e = scratch->cache.Find(word, hash)) {
      for (size_t i = 0; i < e->ids_size; ++i) {
        const int32_t id = (*out)[e->ids_begin + i];
        out->push_back(id);
      }
      return;
    }
    encode();
    scratch->cache.Insert(word, hash, begin, out->size() - begin);
  }
};

}  // namespace omnikv::tok
