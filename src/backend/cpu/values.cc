#include "backend/cpu/values.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/values.cc"
#include <hwy/foreach_target.h>  // IWYU pragma: keep

#include <hwy/highway.h>

#include <array>
#include <cmath>
#include <limits>

#include "backend/cpu/simd-inl.h"
#include "backend/kv_format.h"

// Of all targets.
#ifndef OMNIKV_BACKEND_CPU_VALUES_CC_
#define OMNIKV_BACKEND_CPU_VALUES_CC_
namespace omnikv {
constexpr int32_t kSumHeads = 8;    // query heads whose sums are made together
constexpr int32_t kSumTokens = 64;  // tokens whose weights are made together
constexpr int32_t kSumRows = 4;     // rows that are added together
// Rows that are on their way: of 256 bytes, 2 to 8 were as fast, and 16 slower by half.
constexpr int64_t kSumAhead = 4;
inline int64_t SumStride(const SumValuesArgs& a) {
  return (a.kv.dv + 63) / 64 * 64;
}
// Behind the sums.
inline const std::byte** SumRows(const SumValuesArgs& a, float* scratch) {
  return reinterpret_cast<const std::byte**>(scratch + kSumHeads * SumStride(a));
}
}  // namespace omnikv
#endif

HWY_BEFORE_NAMESPACE();
namespace omnikv {
namespace HWY_NAMESPACE {

constexpr float kNegInf = -std::numeric_limits<float>::infinity();

// Log of the sum of e^logit, of n logits.
float LogSumOf(const float* logits, int32_t n) {
  const DF d;
  if (n == 0) return kNegInf;
  VF top = hn::Set(d, kNegInf);
  const auto each = [&](const auto& body) {
    for (int32_t i = 0; i < n; i += static_cast<int32_t>(kLanes)) {
      const auto left = static_cast<size_t>(n - i);
      VF v = LoadFloats(logits + i, left);
      if (left < kLanes) v = hn::IfThenElse(hn::FirstN(d, left), v, hn::Set(d, kNegInf));
      body(v);
    }
  };
  each([&](VF v) { top = hn::Max(top, v); });
  const float most = Max(top);
  if (most == kNegInf) return kNegInf;
  VF sum = hn::Zero(d);
  each([&](VF v) { sum = hn::Add(sum, Exp(hn::Sub(v, hn::Set(d, most)))); });
  return most + std::log(Sum(sum));
}

template <DType kType>
class ValueSums {
 public:
  ValueSums(const SumValuesArgs& a, float* scratch)
      : a_(a), stride_(SumStride(a)), o_(scratch), rows_(SumRows(a, scratch)) {}

  void Run(int64_t begin, int64_t end) {
    List lists[2] = {Find(begin, end, 0)};
    for (int64_t at = begin; at < end; ++at) {
      const List& list = lists[(at - begin) % 2];
      List& next = lists[(at - begin + 1) % 2];
      next = Find(at + 1, end, (at - begin + 1) % 2);
      if (at == begin) {
        for (int64_t i = 0; i < std::min<int64_t>(kSumAhead, list.n); ++i) Prefetch(list, i);
      }
      const int64_t first = at / a_.kv.n_kv_heads * a_.n_heads + int64_t{list.kv_head} * a_.Group();
      for (int32_t g = 0; g < a_.Group(); g += kSumHeads) {
        Heads(list, g == 0 ? &next : nullptr, first + g, std::min(kSumHeads, a_.Group() - g));
      }
    }
  }

 private:
  // The rows that a row of the step reads for a KV head.
  struct List {
    const std::byte* const* row = nullptr;
    int32_t n = 0;
    int32_t kv_head = 0;
    int64_t to_scales = 0;
  };

  // Of the pair `at`; none from `end` on. One of two places holds them.
  List Find(int64_t at, int64_t end, int64_t place) const {
    if (at >= end) return {};
    const auto kv_head = static_cast<int32_t>(at % a_.kv.n_kv_heads);
    const int32_t seq = a_.rows[at / a_.kv.n_kv_heads].seq;
    const int64_t of = a_.ListOf(seq, kv_head);
    const int32_t* const index = a_.index + of * a_.capacity;
    const int32_t head = a_.kv.Place(kv_head);
    const int32_t n = a_.count[of];
    const std::byte** const row = rows_ + place * a_.capacity;
    const int32_t table_off = a_.seqs[seq].table_off;
    for (int32_t i = 0; i < n; ++i) {
      row[i] = a_.kv.v.Head(a_.kv.RowIndex(table_off, index[i]), head);
    }
    return {.row = row, .n = n, .kv_head = kv_head, .to_scales = a_.kv.v.ToScales(head)};
  }

  void Prefetch(const List& list, int64_t i) const {
    const std::byte* const v = list.row[i];
    const int64_t bytes = KvHeadBytes(kType, a_.kv.dv);
    for (int64_t at = 0; at < bytes; at += 64) PrefetchRow(v + at, /*second_level=*/false);
    PrefetchRow(v + bytes - 1, /*second_level=*/false);
    if constexpr (InBlocks(kType)) PrefetchRow(v + list.to_scales, /*second_level=*/false);
  }

  // Of `n_heads` query heads from `row_head` on. `next`: what is read after the list, to be on its
  // way; null: the rows have come already.
  void Heads(const List& list, const List* next, int64_t row_head, int32_t n_heads) {
    const DF d;
    const int32_t n = list.n;
    std::array<float, kSumHeads> norm{};
    for (int32_t h = 0; h < n_heads; ++h) {
      float& sum = norm[static_cast<size_t>(h)];
      if (a_.lse != nullptr || a_.lse_in == nullptr) {
        sum = LogSumOf(a_.logits + (row_head + h) * a_.capacity, n);
      }
      if (a_.lse != nullptr) a_.lse[row_head + h] = sum;
      if (a_.lse_in != nullptr) sum = a_.lse_in[row_head + h];
    }
    std::fill_n(o_, n_heads * stride_, 0.0f);
    alignas(64) float weights[kSumHeads][kSumTokens];
    for (int32_t begin = 0; begin < n; begin += kSumTokens) {
      const int32_t m = std::min(kSumTokens, n - begin);
      for (int32_t h = 0; h < n_heads; ++h) {
        Weigh(a_.logits + (row_head + h) * a_.capacity + begin, m, norm[static_cast<size_t>(h)],
              weights[h]);
      }
      for (int32_t i = 0; i < m; i += kSumRows) {
        const std::byte* v[kSumRows];
        for (int32_t j = 0; j < kSumRows; ++j) {
          // Where fewer are left, the last one again, with a weight of 0.
          v[j] = list.row[begin + std::min(i + j, m - 1)];
          if (next == nullptr) continue;
          const int64_t ahead = begin + i + j + kSumAhead;
          if (ahead < n) {
            Prefetch(list, ahead);
          } else if (ahead - n < next->n) {
            Prefetch(*next, ahead - n);
          }
        }
        for (int32_t h = 0; h < n_heads; ++h) {
          Add(v, list.to_scales, weights[h] + i, o_ + h * stride_);
        }
      }
    }
    for (int32_t h = 0; h < n_heads; ++h) {
      const auto dv = static_cast<size_t>(a_.kv.dv);
      float* out = a_.o + (row_head + h) * a_.kv.dv;
      for (size_t at = 0; at < dv; at += kStep) {
        const float* o = o_ + h * stride_ + at;
        StoreStep<kType>(hn::LoadU(d, o), hn::LoadU(d, o + kLanes), out + at, dv - at);
      }
    }
  }

  // weights [kSumTokens] of m tokens, zeros behind them.
  static void Weigh(const float* logits, int32_t m, float norm, float* weights) {
    const DF d;
    for (int32_t i = 0; i < kSumTokens; i += static_cast<int32_t>(kLanes)) {
      const auto left = static_cast<size_t>(std::max(0, m - i));
      const VF weight = Exp(hn::Sub(LoadFloats(logits + std::min(i, m), left), hn::Set(d, norm)));
      hn::Store(left >= kLanes ? weight : hn::IfThenElseZero(hn::FirstN(d, left), weight), d,
                weights + i);
    }
  }

  HWY_INLINE void Add(const std::byte* const* v, int64_t to_scales, const float* weights,
                      float* o) const {
    const DF d;
    const auto dv = static_cast<size_t>(a_.kv.dv);
    VF w[kSumRows];
    for (int32_t j = 0; j < kSumRows; ++j) w[j] = hn::Set(d, weights[j]);
    for (size_t at = 0; at < dv; at += kStep) {
      VF a = hn::LoadU(d, o + at);
      VF b = hn::LoadU(d, o + at + kLanes);
      for (int32_t j = 0; j < kSumRows; ++j) {
        VF x;
        VF y;
        LoadHeadStep<kType>(v[j], to_scales, at, dv, x, y);
        a = hn::MulAdd(w[j], x, a);
        b = hn::MulAdd(w[j], y, b);
      }
      hn::StoreU(a, d, o + at);
      hn::StoreU(b, d, o + at + kLanes);
    }
  }

  const SumValuesArgs& a_;
  int64_t stride_;
  float* o_;                // [kSumHeads, stride_], in packed order
  const std::byte** rows_;  // [2, capacity]
};

void SumValues(const SumValuesArgs& a, int64_t begin, int64_t end, float* scratch) {
  switch (a.kv.v.dtype) {
    case DType::kF32:
      return ValueSums<DType::kF32>(a, scratch).Run(begin, end);
    case DType::kF16:
      return ValueSums<DType::kF16>(a, scratch).Run(begin, end);
    case DType::kBF16:
      return ValueSums<DType::kBF16>(a, scratch).Run(begin, end);
    case DType::kQ8_0:
      return ValueSums<DType::kQ8_0>(a, scratch).Run(begin, end);
    case DType::kQ4_0:
      return ValueSums<DType::kQ4_0>(a, scratch).Run(begin, end);
    default:
      return;
  }
}

SumValuesKernel SumValuesEntry() {
  return SumValues;
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace omnikv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace omnikv {
namespace {
constexpr int64_t kPieceBytes = 16 << 10;  // of V: below, a thread's start costs more than it saves
constexpr int64_t kPiecesPerThread = 16;
}  // namespace

HWY_EXPORT(SumValuesEntry);
SumValuesKernel GetSumValuesKernel(const Isa& isa) {
  return IsaEntry(HWY_DISPATCH_TABLE(SumValuesEntry), isa)();
}

int64_t SumScratchFloats(const SumValuesArgs& a) {
  constexpr int64_t kRowFloats = sizeof(const std::byte*) / sizeof(float);
  return kSumHeads * SumStride(a) + kRowFloats * 2 * int64_t{a.capacity};
}

void CpuSumValues(const SumValuesArgs& a, SumValuesKernel kernel, ThreadPool& pool,
                  float* scratch) {
  const int64_t pairs = int64_t{a.n_rows} * a.kv.n_kv_heads;
  const int64_t list_bytes = std::max<int64_t>(1, a.capacity * KvHeadBytes(a.kv.v.dtype, a.kv.dv));
  const int64_t pieces = pool.size() * kPiecesPerThread;
  const int64_t grain = std::max((pairs + pieces - 1) / pieces, kPieceBytes / list_bytes);
  pool.ParallelFor(pairs, std::max<int64_t>(1, grain), [&](int64_t begin, int64_t end, int thread) {
    kernel(a, begin, end, scratch + thread * SumScratchFloats(a));
  });
}

void CpuPickLogits(const PickLogitsArgs& a, ThreadPool& pool) {
  constexpr int64_t kGrain = 4 << 10;  // tokens
  pool.ParallelFor(
      int64_t{a.n_rows} * a.n_heads, std::max<int64_t>(1, kGrain / std::max(a.capacity, 1)),
      [&](int64_t begin, int64_t end, int) {
        for (int64_t at = begin; at < end; ++at) {
          const int64_t list =
              a.ListOf(a.rows[at / a.n_heads].seq, static_cast<int32_t>(at % a.n_heads));
          const int32_t* index = a.index + list * a.capacity;
          const float* logits = a.logits + at * a.stride;
          float* out = a.out + at * a.capacity;
          for (int32_t i = 0; i < a.count[list]; ++i) out[i] = logits[index[i]];
        }
      });
}

}  // namespace omnikv
#endif  // HWY_ONCE
