// Which rows of a sequence were computed together, where a policy chooses for a chunk of a prompt
// at once (Policy::PromptStepRows): none of them is right without the others.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace omnikv {

class PromptChunks {
 public:
  // Of so many rows each, but for the last one of a run; 0: rows do not depend on later ones.
  explicit PromptChunks(int64_t chunk = 0) : chunk_(chunk) {}
  PromptChunks(int64_t chunk, std::vector<std::pair<int64_t, int64_t>> runs)
      : chunk_(chunk), runs_(std::move(runs)) {}

  // Rows [begin, end) were computed, in chunks from `begin` on. REQUIRES that they are the last.
  void Add(int64_t begin, int64_t end) {
    if (chunk_ == 0 || begin == end) return;
    const bool goes_on = !runs_.empty() && runs_.back().second == begin &&
                         (begin - runs_.back().first) % chunk_ == 0;
    if (!goes_on) runs_.emplace_back(begin, begin);
    runs_.back().second = end;
  }
  // Rows from `length` on are gone.
  void Cut(int64_t length) {
    while (!runs_.empty() && runs_.back().first >= length) runs_.pop_back();
    if (!runs_.empty()) runs_.back().second = std::min(runs_.back().second, length);
  }
  // The most of the first `length` rows that stand without the others.
  int64_t WholeUpTo(int64_t length) const {
    for (const auto& [begin, end] : runs_) {
      if (begin < length && length < end) return length - (length - begin) % chunk_;
    }
    return length;
  }
  // [begin, end) of each run, ascending.
  const std::vector<std::pair<int64_t, int64_t>>& runs() const { return runs_; }

 private:
  int64_t chunk_;
  std::vector<std::pair<int64_t, int64_t>> runs_;
};

}  // namespace omnikv
