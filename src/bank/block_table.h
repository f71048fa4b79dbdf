// Which physical block holds which logical block of which sequence. Blocks carry reference counts,
// so that forked sequences share the prefix they have in common.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "omnikv/status.h"

namespace omnikv {

// Physical blocks and how many have a reference to each. Tables may share one.
class BlockPool {
 public:
  explicit BlockPool(int32_t n_blocks);

  // A block that is free, with one reference. REQUIRES that there is one.
  int32_t Take();
  void Refer(int32_t block) { ++references_[Index(block)]; }
  void Drop(int32_t block);
  bool IsShared(int32_t block) const { return references_[Index(block)] > 1; }
  int32_t free() const { return static_cast<int32_t>(free_.size()); }
  int32_t total() const { return static_cast<int32_t>(references_.size()); }

 private:
  static size_t Index(int32_t i) { return static_cast<size_t>(i); }

  std::vector<int32_t> references_;  // [n_blocks]
  std::vector<int32_t> free_;        // a heap: the lowest block first, so that runs stay contiguous
};

// Host-side bookkeeping; no bytes move here. Thread-compatible.
class BlockTable {
 public:
  // Room for `n_blocks` physical blocks, `max_seqs` sequences of at most `max_blocks` blocks.
  BlockTable(int32_t n_blocks, int32_t max_seqs, int32_t max_blocks)
      : BlockTable(std::make_shared<BlockPool>(n_blocks), max_seqs, max_blocks) {}
  // The same with blocks that other tables draw on, too.
  BlockTable(std::shared_ptr<BlockPool> pool, int32_t max_seqs, int32_t max_blocks);

  // A free sequence slot, or -1.
  int32_t NewSequence();
  // A sequence slot that shares all blocks of `seq`, or -1.
  int32_t Fork(int32_t seq);
  void Free(int32_t seq);

  // Grows `seq` to hold `n_blocks`; false (and nothing changed) when blocks run out.
  bool Grow(int32_t seq, int32_t n_blocks);
  // Gives an empty `seq` so many blocks as `held` has places, with holes where it says so; false
  // (and nothing changed) when blocks run out. REQUIRES held.size() <= max_blocks.
  bool Place(int32_t seq, const std::vector<bool>& held);
  // Drops the blocks of `seq` past the first `n_blocks`.
  void Shrink(int32_t seq, int32_t n_blocks);
  // Gives back the logical blocks [first, last) of `seq`, which stay as holes in it. Those of them
  // that lie before one given back earlier are taken to be holes already.
  void Release(int32_t seq, int32_t first, int32_t last);
  // Makes logical block `i` of `seq` its own before a write: returns {old, new} physical blocks,
  // equal when it was not shared, or {-1, -1} when no block is free.
  struct Owned {
    int32_t from, to;
  };
  Owned MakeOwn(int32_t seq, int32_t i);

  int32_t n_blocks(int32_t seq) const { return sequences_[Index(seq)].n_blocks; }
  bool in_use(int32_t seq) const { return sequences_[Index(seq)].in_use; }
  // The table entries of `seq`: physical blocks, [max_blocks], the first n_blocks(seq) valid, -1
  // for a hole.
  const int32_t* entries(int32_t seq) const { return table_.data() + Offset(seq); }
  int32_t Offset(int32_t seq) const { return seq * max_blocks_; }
  int32_t max_blocks() const { return max_blocks_; }
  const std::shared_ptr<BlockPool>& pool() const { return pool_; }
  // Of the pool.
  int32_t free_blocks() const { return pool_->free(); }
  int32_t total_blocks() const { return pool_->total(); }

 private:
  struct Sequence {
    bool in_use = false;
    int32_t n_blocks = 0;
  };
  static size_t Index(int32_t i) { return static_cast<size_t>(i); }

  std::shared_ptr<BlockPool> pool_;
  int32_t max_blocks_;
  std::vector<int32_t> table_;       // [max_seqs, max_blocks]
  std::vector<Sequence> sequences_;  // [max_seqs]
};

}  // namespace omnikv
