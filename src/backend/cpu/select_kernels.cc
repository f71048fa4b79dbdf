#include "backend/cpu/select_kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/select_kernels.cc"
#include <hwy/foreach_target.h>  // IWYU pragma: keep

#include <hwy/highway.h>

#include <bit>
#include <cmath>
#include <limits>

#include "backend/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace omnikv {
namespace HWY_NAMESPACE {

constexpr float kNegInf = -std::numeric_limits<float>::infinity();

void ScoreReduce(const ScoreReduceArgs& a, int32_t row, int32_t l, int64_t begin, int64_t end) {
  const DF d;
  const RowMeta meta = a.Row(row);
  const float* logits = a.logits + int64_t{row} * a.n_heads * a.stride;
  const float* lse = a.lse != nullptr ? a.lse + int64_t{row} * a.n_heads : nullptr;
  const int32_t list_heads = a.n_heads / a.lists;
  const bool sum = a.heads == HeadReduce::kSum;
  const int64_t list = int64_t{meta.seq} * a.lists + l;
  float* out = a.out + (list * a.ring + meta.pos % a.ring) * a.stride;
  // Of a vector of tokens; `load` gives logits of a head.
  const auto reduce = [&](const auto& load) {
    VF score = hn::Set(d, sum ? 0.0f : kNegInf);
    for (int32_t h = l * list_heads; h < (l + 1) * list_heads; ++h) {
      if (!a.Takes(h)) continue;
      VF v = load(h);
      if (lse != nullptr) v = hn::Sub(v, hn::Set(d, lse[h]));
      if (sum && lse != nullptr) v = Exp(v);
      score = sum ? hn::Add(score, v) : hn::Max(score, v);
    }
    // The exponential is monotone: one of the maximum is the maximum of them.
    return !sum && lse != nullptr ? Exp(score) : score;
  };
  if (a.only.index != nullptr) {
    const SomeTokens::Of tokens(a.only, meta, a.lists, l);
    for (int64_t i = begin; i < end; i += static_cast<int64_t>(kLanes)) {
      const auto n = static_cast<size_t>(std::min(end - i, static_cast<int64_t>(kLanes)));
      int32_t token[kLanes];
      for (size_t j = 0; j < n; ++j)
        token[j] = tokens.At(static_cast<int32_t>(i) + static_cast<int32_t>(j));
      alignas(64) float scores[kLanes] = {};
      const VF reduced = reduce([&](int32_t h) {
        for (size_t j = 0; j < n; ++j) {
          scores[j] = a.logits[LogitAt(a, row, h, token[j])];
        }
        return hn::Load(d, scores);
      });
      hn::Store(reduced, d, scores);
      for (size_t j = 0; j < n; ++j) {
        out[a.ScoreAt(i + static_cast<int64_t>(j), token[j])] =
            token[j] < a.sinks ? kChosenFirst : scores[j];
      }
    }
    return;
  }
  for (int64_t t = begin; t < end; t += static_cast<int64_t>(kLanes)) {
    const auto left = static_cast<size_t>(end - t);
    const auto load = [&](int32_t h) { return LoadFloats(logits + h * a.stride + t, left); };
    StoreFloats(reduce(load), out + t, left);
  }
  const auto sinks = std::min<int64_t>(a.sinks, end);
  if (begin < sinks) std::fill(out + begin, out + sinks, kChosenFirst);
}

// Bigger floats give bigger keys; both zeros the same, NaN that of -inf.
inline uint32_t KeyOf(float v) {
  const auto bits = std::bit_cast<uint32_t>(std::isnan(v) ? kNegInf : v + 0.0f);
  return bits ^ ((bits >> 31) != 0 ? 0xffffffffu : 0x80000000u);
}

HWY_INLINE hn::Vec<DU> KeyOf(VF v) {
  const DU du;
  const DI di;
  const DF d;
  v = hn::IfThenElse(hn::IsNaN(v), hn::Set(d, kNegInf), hn::Add(v, hn::Zero(d)));
  const auto sign = hn::BitCast(du, hn::BroadcastSignBit(hn::BitCast(di, v)));
  return hn::Xor(hn::BitCast(du, v), hn::Or(sign, hn::Set(du, 0x80000000u)));
}

void ScoreKeys(const TopKArgs& a, int32_t list, int64_t begin, int64_t end, uint32_t* keys) {
  const int64_t p = int64_t{a.seqs[list / a.lists].kv_len} - 1;
  const float* const scores = a.ScoresOf(list);
  const auto row_of = [&](int64_t age) { return scores + (p - age) % a.window * a.stride; };
  const int64_t ages = std::min<int64_t>(a.window, p + 1);
  const auto key_of = [&](int64_t t) {
    double sum = 0;
    for (int64_t age = 0; age < ages && t <= p - age; ++age) {
      sum += static_cast<double>(a.weights[age]) * row_of(age)[t];
    }
    return KeyOf(static_cast<float>(sum));
  };
  int64_t t = begin;
  if (a.Gathers()) {
    for (int64_t i = begin; i < end; ++i) {
      keys[i] = key_of(a.Candidate(list, static_cast<int32_t>(i)));
    }
    return;
  }
  // Not on EMU128, whose DemoteTo makes infinities finite.
#if HWY_HAVE_FLOAT64 && HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
  // Sums in double, so that the choice does not depend on the vector length or on FMA. Tokens in
  // reach of every age only: the last few are left to the loop below.
  const int64_t common = std::min(end, p - ages + 2);
  const DF d;
  const DU du;
  const hn::RepartitionToWide<DF> dd;
  const hn::Half<DF> dh;
  for (; t + static_cast<int64_t>(kLanes) <= common; t += static_cast<int64_t>(kLanes)) {
    VF sum;
    if (ages == 1) {
      sum = hn::Mul(hn::LoadU(d, row_of(0) + t), hn::Set(d, a.weights[0]));
    } else {
      auto low = hn::Zero(dd);
      auto high = hn::Zero(dd);
      for (int64_t age = 0; age < ages; ++age) {
        const float* from = row_of(age) + t;
        const auto w = hn::Set(dd, static_cast<double>(a.weights[age]));
        low = hn::MulAdd(hn::PromoteTo(dd, hn::LoadU(dh, from)), w, low);
        high = hn::MulAdd(hn::PromoteTo(dd, hn::LoadU(dh, from + kLanes / 2)), w, high);
      }
      sum = hn::Combine(d, hn::DemoteTo(dh, high), hn::DemoteTo(dh, low));
    }
    hn::StoreU(KeyOf(sum), du, keys + t);
  }
#endif
  for (; t < end; ++t) keys[t] = key_of(t);
}

int64_t Collect(const uint32_t* keys, int64_t begin, int64_t end, uint32_t threshold, int64_t ties,
                int32_t* out) {
  int32_t* const first = out;
  int64_t t = begin;
#if HWY_TARGET != HWY_SCALAR
  const DU du;
  const DI di;
  // Unsigned order by a signed comparison.
  const auto flip = hn::Set(du, 0x80000000u);
  const auto bound = hn::BitCast(di, hn::Xor(hn::Set(du, threshold), flip));
  for (; t + static_cast<int64_t>(kLanes) <= end; t += static_cast<int64_t>(kLanes)) {
    const auto key = hn::BitCast(di, hn::Xor(hn::LoadU(du, keys + t), flip));
    const auto above = hn::Gt(key, bound);
    const auto equal = hn::Eq(key, bound);
    const auto candidates = ties > 0 ? hn::Or(above, equal) : above;
    if (hn::AllFalse(di, candidates)) continue;
    const auto n_equal = ties > 0 ? static_cast<int64_t>(hn::CountTrue(di, equal)) : 0;
    if (n_equal <= ties) {
      alignas(64) int32_t found[kLanes];
      const auto index = hn::Iota(di, static_cast<int32_t>(t));
      const size_t n = hn::CompressStore(index, candidates, di, found);
      std::memcpy(out, found, n * sizeof(int32_t));
      out += n;
      ties -= n_equal;
      continue;
    }
    for (int64_t i = t; i < t + static_cast<int64_t>(kLanes); ++i) {
      if (keys[i] > threshold || (keys[i] == threshold && ties-- > 0)) {
        *out++ = static_cast<int32_t>(i);
      }
    }
  }
#endif
  for (; t < end; ++t) {
    if (keys[t] > threshold || (keys[t] == threshold && ties-- > 0)) {
      *out++ = static_cast<int32_t>(t);
    }
  }
  return out - first;
}

int64_t GroupTops(const uint32_t* keys, int64_t n, int64_t group, uint32_t* out) {
  const DU du;
  int64_t groups = 0;
  for (int64_t begin = 0; begin < n; begin += group) {
    const int64_t end = std::min(n, begin + group);
    auto tops = hn::Zero(du);
    int64_t t = begin;
    for (; t + static_cast<int64_t>(kLanes) <= end; t += static_cast<int64_t>(kLanes)) {
      tops = hn::Max(tops, hn::LoadU(du, keys + t));
    }
    uint32_t top = hn::GetLane(hn::MaxOfLanes(du, tops));
    for (; t < end; ++t) top = std::max(top, keys[t]);
    out[groups++] = top;
  }
  return groups;
}

const SelectKernels* SelectTable() {
  static constexpr SelectKernels kTable = {ScoreReduce, ScoreKeys, Collect, GroupTops};
  return &kTable;
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace omnikv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace omnikv {
HWY_EXPORT(SelectTable);
const SelectKernels& GetSelectKernels(const Isa& isa) {
  return *IsaEntry(HWY_DISPATCH_TABLE(SelectTable), isa)();
}
}  // namespace omnikv
#endif  // HWY_ONCE
