#include "bank/block_table.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "base/check.h"

namespace omnikv {

BlockPool::BlockPool(int32_t n_blocks) : references_(Index(n_blocks), 0), free_(Index(n_blocks)) {
  for (int32_t i = 0; i < n_blocks; ++i) free_[Index(i)] = i;  // ascending is a min-heap
}

int32_t BlockPool::Take() {
  std::pop_heap(free_.begin(), free_.end(), std::greater<>());
  const int32_t block = free_.back();
  free_.pop_back();
  references_[Index(block)] = 1;
  return block;
}

void BlockPool::Drop(int32_t block) {
  if (block < 0) return;
  OKV_CHECK(references_[Index(block)] > 0);
  if (--references_[Index(block)] > 0) return;
  free_.push_back(block);
  std::push_heap(free_.begin(), free_.end(), std::greater<>());
}

BlockTable::BlockTable(std::shared_ptr<BlockPool> pool, int32_t max_seqs, int32_t max_blocks)
    : pool_(std::move(pool)),
      max_blocks_(max_blocks),
      table_(Index(max_seqs) * Index(max_blocks), -1),
      sequences_(Index(max_seqs)) {}

int32_t BlockTable::NewSequence() {
  for (size_t i = 0; i < sequences_.size(); ++i) {
    if (sequences_[i].in_use) continue;
    sequences_[i] = {.in_use = true, .n_blocks = 0};
    return static_cast<int32_t>(i);
  }
  return -1;
}

int32_t BlockTable::Fork(int32_t seq) {
  OKV_CHECK(in_use(seq));
  const int32_t fork = NewSequence();
  if (fork < 0) return -1;
  const int32_t n = n_blocks(seq);
  for (int32_t i = 0; i < n; ++i) {
    const int32_t block = table_[Index(Offset(seq) + i)];
    table_[Index(Offset(fork) + i)] = block;
    if (block >= 0) pool_->Refer(block);
  }
  sequences_[Index(fork)].n_blocks = n;
  return fork;
}

void BlockTable::Free(int32_t seq) {
  Shrink(seq, 0);
  sequences_[Index(seq)].in_use = false;
}

bool BlockTable::Grow(int32_t seq, int32_t n_blocks) {
  OKV_CHECK(in_use(seq));
  Sequence& s = sequences_[Index(seq)];
  if (n_blocks > max_blocks_ || n_blocks - s.n_blocks > free_blocks()) return false;
  for (; s.n_blocks < n_blocks; ++s.n_blocks)
    table_[Index(Offset(seq) + s.n_blocks)] = pool_->Take();
  return true;
}

bool BlockTable::Place(int32_t seq, const std::vector<bool>& held) {
  OKV_CHECK(in_use(seq) && n_blocks(seq) == 0 && held.size() <= Index(max_blocks_));
  if (std::count(held.begin(), held.end(), true) > free_blocks()) return false;
  Sequence& s = sequences_[Index(seq)];
  for (const bool block : held) {
    table_[Index(Offset(seq) + s.n_blocks++)] = block ? pool_->Take() : -1;
  }
  return true;
}

void BlockTable::Shrink(int32_t seq, int32_t n_blocks) {
  OKV_CHECK(in_use(seq));
  Sequence& s = sequences_[Index(seq)];
  while (s.n_blocks > n_blocks) pool_->Drop(table_[Index(Offset(seq) + --s.n_blocks)]);
}

void BlockTable::Release(int32_t seq, int32_t first, int32_t last) {
  OKV_CHECK(first >= 0 && last <= n_blocks(seq));
  for (int32_t i = last - 1; i >= first; --i) {
    int32_t& entry = table_[Index(Offset(seq) + i)];
    if (entry < 0) return;
    pool_->Drop(std::exchange(entry, -1));
  }
}

BlockTable::Owned BlockTable::MakeOwn(int32_t seq, int32_t i) {
  OKV_CHECK(i < n_blocks(seq));
  int32_t& entry = table_[Index(Offset(seq) + i)];
  OKV_CHECK(entry >= 0, "block {} was given back", i);
  if (!pool_->IsShared(entry)) return {entry, entry};
  if (free_blocks() == 0) return {-1, -1};
  const int32_t from = entry;
  entry = pool_->Take();
  pool_->Drop(from);
  return {from, entry};
}

}  // namespace omnikv
