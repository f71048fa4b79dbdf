#include "bank/block_table.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "base/check.h"

namespace omnikv {

BlockTable::BlockTable(int32_t n_blocks, int32_t max_seqs, int32_t max_blocks)
    : max_blocks_(max_blocks),
      table_(Index(max_seqs) * Index(max_blocks), -1),
      references_(Index(n_blocks), 0),
      free_(Index(n_blocks)),
      sequences_(Index(max_seqs)) {
  for (int32_t i = 0; i < n_blocks; ++i) free_[Index(i)] = i;  // ascending is a min-heap
}

int32_t BlockTable::Take() {
  std::pop_heap(free_.begin(), free_.end(), std::greater<>());
  const int32_t block = free_.back();
  free_.pop_back();
  references_[Index(block)] = 1;
  return block;
}

void BlockTable::Drop(int32_t block) {
  if (block < 0) return;
  OKV_CHECK(references_[Index(block)] > 0);
  if (--references_[Index(block)] > 0) return;
  free_.push_back(block);
  std::push_heap(free_.begin(), free_.end(), std::greater<>());
}

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
    if (block >= 0) ++references_[Index(block)];
  }
  sequences_[Index(fork)].n_blocks = n;
  return fork;
}

void BlockTable::Free(int32_t seq) {
  Shrink(seq, 0);
  sequences_[Index(seq)].in_use = false;
}

bool BlockTable::Grow(int32_t seq, int32_t n_blocks, int32_t first) {
  OKV_CHECK(in_use(seq));
  Sequence& s = sequences_[Index(seq)];
  if (n_blocks > max_blocks_ || n_blocks - std::max(s.n_blocks, first) > free_blocks())
    return false;
  for (; s.n_blocks < n_blocks; ++s.n_blocks) {
    table_[Index(Offset(seq) + s.n_blocks)] = s.n_blocks < first ? -1 : Take();
  }
  return true;
}

void BlockTable::Shrink(int32_t seq, int32_t n_blocks) {
  OKV_CHECK(in_use(seq));
  Sequence& s = sequences_[Index(seq)];
  while (s.n_blocks > n_blocks) Drop(table_[Index(Offset(seq) + --s.n_blocks)]);
}

void BlockTable::Release(int32_t seq, int32_t first, int32_t last) {
  OKV_CHECK(first >= 0 && last <= n_blocks(seq));
  for (int32_t i = last - 1; i >= first; --i) {
    int32_t& entry = table_[Index(Offset(seq) + i)];
    if (entry < 0) return;
    Drop(std::exchange(entry, -1));
  }
}

BlockTable::Owned BlockTable::MakeOwn(int32_t seq, int32_t i) {
  OKV_CHECK(i < n_blocks(seq));
  int32_t& entry = table_[Index(Offset(seq) + i)];
  OKV_CHECK(entry >= 0, "block {} was given back", i);
  if (references_[Index(entry)] == 1) return {entry, entry};
  if (free_.empty()) return {-1, -1};
  const int32_t from = entry;
  entry = Take();
  Drop(from);
  return {from, entry};
}

}  // namespace omnikv
