#include "backend/cpu/select.h"

#include <algorithm>
#include <functional>
#include <numeric>

namespace omnikv {
namespace {

constexpr int64_t kSplitTokens = 32 << 10;  // fewer are selected by one thread
constexpr int64_t kFew = 16;                // SelectFew: one of so many is chosen, at most
constexpr int64_t kReduceGrain = 16 << 10;  // tokens

// A digit of a key: bits [shift, shift + width).
struct Digit {
  int shift;
  uint32_t mask;
};
constexpr Digit kDigits[3] = {{21, 0x7ff}, {10, 0x7ff}, {0, 0x3ff}};

}  // namespace

CpuSelect::CpuSelect(ThreadPool& pool, const Isa& isa)
    : pool_(pool), kernels_(GetSelectKernels(isa)), parts_(static_cast<size_t>(pool.size())) {}

size_t CpuSelect::ScratchWords(const TopKArgs& a) const {
  return static_cast<size_t>(a.n_seqs * a.lists * a.room());
}

template <typename Body>
void CpuSelect::ForParts(int n_parts, const Body& body) {
  pool_.ParallelFor(n_parts, 1, [&](int64_t part, int64_t, int) { body(static_cast<int>(part)); });
}

// Of n keys k in their order, where k is a small share: the highest keys of 4 k groups or more
// bound the key of rank k from below, and few keys reach that bound.
bool CpuSelect::SelectFew(const uint32_t* keys, int64_t n, int64_t k, KeyPart& part,
                          int32_t* index) const {
  constexpr int64_t kTogether = 4096;  // keys
  uint32_t* const tops = part.tops;
  const auto top = [&](int64_t n_tops) {  // of rank k
    std::nth_element(tops, tops + k - 1, tops + n_tops, std::greater<>());
    return tops[k - 1];
  };
  const uint32_t bound = top(kernels_.group_tops(keys, n, n / (4 * k), tops));
  int64_t found = 0;
  for (int64_t t = 0; t < n; t += kTogether) {
    if (found + kTogether > kFewKeys) return false;
    found +=
        kernels_.collect(keys, t, std::min(n, t + kTogether), bound - 1, 0, part.reach + found);
  }
  for (int64_t i = 0; i < found; ++i) tops[i] = keys[part.reach[i]];
  const uint32_t threshold = top(found);
  int64_t ties = k - std::count_if(tops, tops + k, [&](uint32_t key) { return key > threshold; });
  for (int64_t i = 0; i < found; ++i) {
    const uint32_t key = keys[part.reach[i]];
    if (key > threshold || (key == threshold && ties-- > 0)) *index++ = part.reach[i];
  }
  return true;
}

// Radix selection: finds the key of rank n_pick digit by digit, then collects what lies above it
// and the first few equal to it. Each part writes its tokens where the counts of the earlier
// parts say, so the result is ascending.
void CpuSelect::Select(const TopKArgs& a, int32_t list, int n_parts, KeyPart* parts,
                       uint32_t* keys) {
  const int32_t seq = list / a.lists;
  if (a.keep != nullptr && a.keep[seq] != 0) return;
  const int64_t n = a.CandidatesOf(list);
  const int64_t k = a.Picks(a.n_pick[seq], static_cast<int32_t>(n));
  int32_t* index = a.index + int64_t{list} * a.capacity;
  a.Finish(list, static_cast<int32_t>(k));
  // Of numbers of candidates, the last one first: a unit takes the places of those behind it.
  const auto name_tokens = [&] {
    if (a.among.index == nullptr && a.unit == 1) return;
    for (auto i = static_cast<int32_t>(k) - 1; i >= 0; --i) a.Put(list, i, index[i]);
  };
  if (k == n) {
    std::iota(index, index + k, 0);
    name_tokens();
  }
  if (k == 0 || k == n) return;

  if (n_parts == 1 && kFew * k <= n && 8 * k < kFewKeys) {
    kernels_.score_keys(a, list, 0, n, keys);
    if (SelectFew(keys, n, k, parts[0], index)) return name_tokens();
  }
  const int64_t width = (n / n_parts + 63) / 64 * 64;
  for (int p = 0; p < n_parts; ++p) {
    parts[p].begin = std::min(n, p * width);
    parts[p].end = p + 1 == n_parts ? n : std::min(n, (p + 1) * width);
  }
  ForParts(n_parts, [&](int p) {
    KeyPart& part = parts[p];
    std::fill_n(part.bins[0], kKeyBins, 0u);
    kernels_.score_keys(a, list, part.begin, part.end, keys);
    for (int64_t t = part.begin; t < part.end; ++t) ++part.bins[0][keys[t] >> kDigits[0].shift];
  });
  int64_t rank = k;  // of the key sought, among the keys that share the digits found
  uint32_t threshold = 0;
  for (int digit = 0; digit < 3; ++digit) {
    if (digit > 0) {
      const Digit at = kDigits[digit];
      const int above = kDigits[digit - 1].shift;
      ForParts(n_parts, [&](int p) {
        KeyPart& part = parts[p];
        std::fill_n(part.bins[digit], kKeyBins, 0u);
        for (int64_t t = part.begin; t < part.end; ++t) {
          if (keys[t] >> above == threshold >> above) {
            ++part.bins[digit][(keys[t] >> at.shift) & at.mask];
          }
        }
      });
    }
    auto bin = static_cast<int64_t>(kDigits[digit].mask);
    for (;; --bin) {
      int64_t here = 0;
      for (int p = 0; p < n_parts; ++p) here += parts[p].bins[digit][bin];
      if (here >= rank) break;
      rank -= here;
    }
    threshold |= static_cast<uint32_t>(bin) << kDigits[digit].shift;
  }
  ForParts(n_parts, [&](int p) {
    int64_t offset = 0;
    int64_t ties = rank;
    for (int q = 0; q < p; ++q) {
      int64_t above = 0;
      for (int digit = 0; digit < 3; ++digit) {
        const uint32_t bin = (threshold >> kDigits[digit].shift) & kDigits[digit].mask;
        const uint32_t* bins = parts[q].bins[digit];
        above = std::accumulate(bins + bin + 1, bins + kDigits[digit].mask + 1, above);
      }
      const int64_t equal = std::min<int64_t>(ties, parts[q].bins[2][threshold & kDigits[2].mask]);
      ties -= equal;
      offset += above + equal;
    }
    kernels_.collect(keys, parts[p].begin, parts[p].end, threshold, ties, index + offset);
  });
  name_tokens();
}

void CpuSelect::Run(const TopKArgs& a, uint32_t* scratch) {
  int64_t longest = 0;
  for (int32_t list = 0; list < a.n_seqs * a.lists; ++list) {
    longest = std::max<int64_t>(longest, a.CandidatesOf(list));
  }
  if (longest >= kSplitTokens && a.n_seqs * a.lists < 2 * pool_.size()) {
    for (int32_t list = 0; list < a.n_seqs * a.lists; ++list) {
      const bool split = a.CandidatesOf(list) >= kSplitTokens;
      Select(a, list, split ? pool_.size() : 1, parts_.data(), scratch + list * a.room());
    }
    return;
  }
  pool_.ParallelFor(a.n_seqs * a.lists, 1, [&](int64_t begin, int64_t end, int thread) {
    for (int64_t list = begin; list < end; ++list) {
      Select(a, static_cast<int32_t>(list), 1, &parts_[static_cast<size_t>(thread)],
             scratch + list * a.room());
    }
  });
}

void CpuSelect::Run(const ScoreReduceArgs& a) {
  for (int32_t r = 0; r < a.n_rows; ++r) {
    for (int32_t l = 0; l < a.lists; ++l) {
      const int64_t n = SomeTokens::Of(a.only, a.Row(r), a.lists, l).size();
      pool_.ParallelFor(n, kReduceGrain / a.lists, [&](int64_t begin, int64_t end, int) {
        kernels_.score_reduce(a, r, l, begin, end);
      });
    }
  }
}

void CpuPlanRange(const PlanRangeArgs& a) {
  for (int32_t s = 0; s < a.n_seqs; ++s) WriteRange(a, s);
}

void CpuNextToken(const NextTokenArgs& a, std::span<SampleCandidate> scratch) {
  for (int32_t r = 0; r < a.n_rows; ++r) {
    const float* logits = a.logits + r * a.vocab;
    const bool finite = AllFinite(logits, a.vocab);
    int32_t token = 0;
    if (a.sample != nullptr) {
      uint32_t* seen = a.seen + r * SeenWords(a.vocab);
      if (finite) token = SampleToken(logits, a.vocab, a.sample[r], seen, scratch);
      TakeSample(token, a.sample[r], seen);
    } else if (finite) {
      for (int32_t t = 1; t < a.vocab; ++t) token = logits[t] > logits[token] ? t : token;
    }
    const auto slot = static_cast<int32_t>(*a.step % static_cast<uint32_t>(a.ring));
    a.out[slot * a.n_rows + r] = finite ? token : -1;
    a.tokens[r] = token;
    ++a.rows[r].pos;
    if (a.group_rows != nullptr) ++a.group_rows[r].pos;
    ++a.seqs[a.rows[r].seq].kv_len;
  }
  ++*a.step;
}

}  // namespace omnikv
