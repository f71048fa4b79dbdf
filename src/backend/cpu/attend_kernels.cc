#include "backend/cpu/attend_kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/attend_kernels.cc"
#include <hwy/foreach_target.h>  // IWYU pragma: keep

#include <hwy/highway.h>

#include <cmath>
#include <limits>

#include "backend/cpu/attend_scores-inl.h"
#include "backend/cpu/simd-inl.h"
#include "backend/kv_format.h"

HWY_BEFORE_NAMESPACE();
namespace omnikv {
namespace HWY_NAMESPACE {

// Tokens scored before their values are summed, and fetched while the chunk before is worked on: so
// few that both chunks stay in the second-level cache with room to spare (on Sapphire Rapids rows
// of 2 to 4 KB reach 62 to 69 % of the read bandwidth with chunks of 128, 71 to 97 % with 64 KB; on
// a Zen 3 rows of 512 bytes take 12.3 ms with 32 KB where they take 13.9 with 64). Lists are short,
// and a thread's first chunk is fetched while nothing else is to be done: a smaller one.
constexpr int64_t kChunkBytes = OKV_MANY_REGISTERS ? 64 << 10 : 32 << 10;
constexpr int kListChunk = 32;
constexpr float kNegInf = -std::numeric_limits<float>::infinity();
constexpr float kLog2E = 1.44269504f;

// Consecutive tokens of one segment.
struct Chunk {
  int n = 0;
  int segment = 0;
  // K and V of head 0. The last one again: scores are made kLanes at a time.
  const std::byte* k[kChunk + kLanes];
  const std::byte* v[kChunk + kLanes];
  int32_t token[kChunk];
};

// Walks [begin, end) of an axis chunk by chunk.
class TokenWalker {
 public:
  TokenWalker(const AttendArgs& a, const AttendGroup& group, const AttendAxis& axis,
              const AttendItem& item, int64_t begin, int64_t end)
      : a_(a),
        axis_(axis),
        table_off_(a.seqs[group.seq].table_off),
        last_(a.rows[group.row + group.n_rows - 1].pos),
        seq_(group.seq),
        kv_head_(a.KvHead(item.first)),
        chunk_(ChunkOf(a.kv, item.n_kv_heads)),
        at_(begin),
        end_(end) {}

  // Fills the next chunk; false when there is none.
  bool Next(Chunk& chunk) {
    chunk.n = 0;
    while (chunk.n == 0 && at_ < end_) {
      while (at_ >= segment_begin_ + axis_.tokens[segment_]) {
        segment_begin_ += axis_.tokens[segment_++];
      }
      const int64_t from = at_ - segment_begin_;
      const int64_t to = std::min(axis_.tokens[segment_], end_ - segment_begin_);
      chunk.segment = segment_;
      const PlanSegment& s = a_.plan.segments[static_cast<size_t>(segment_)];
      at_ +=
          s.kind == SegmentKind::kRange ? FillRange(from, to, chunk) : FillList(s, from, to, chunk);
    }
    if (chunk.n == 0) return false;
    std::fill_n(chunk.k + chunk.n, kLanes, chunk.k[chunk.n - 1]);
    return true;
  }

 private:
  // Tokens of a chunk of ranges: whole vectors of scores.
  static int64_t ChunkOf(const KvView& kv, int32_t n_kv_heads) {
    const int64_t bytes =
        n_kv_heads * (KvHeadBytes(kv.k.dtype, kv.dk) + KvHeadBytes(kv.v.dtype, kv.dv));
    return std::clamp<int64_t>(kChunkBytes / bytes / 16 * 16, 16, kChunk);
  }

  int64_t FillRange(int64_t from, int64_t to, Chunk& chunk) const {
    const auto n = static_cast<int>(std::min(chunk_, to - from));
    FillRun(axis_.first[chunk.segment] + from, n, chunk);
    return n;
  }

  // Adds `n` consecutive tokens.
  void FillRun(int64_t first, int n, Chunk& chunk) const {
    for (int i = 0; i < n;) {
      const int64_t token = first + i;
      const auto run = static_cast<int>(
          std::min<int64_t>(n - i, a_.kv.block_tokens - token % a_.kv.block_tokens));
      const int64_t row = a_.kv.RowIndex(table_off_, token);
      const std::byte* k = a_.kv.k.Head(row, 0);
      const std::byte* v = a_.kv.v.Head(row, 0);
      for (int j = 0; j < run; ++j, ++i, ++chunk.n) {
        chunk.k[chunk.n] = k + j * a_.kv.k.row_bytes;
        chunk.v[chunk.n] = v + j * a_.kv.v.row_bytes;
        chunk.token[chunk.n] = static_cast<int32_t>(token + j);
      }
    }
  }

  // Gives the axis positions consumed, all that are left when the rest is past the last row.
  int64_t FillList(const PlanSegment& s, int64_t from, int64_t to, Chunk& chunk) const {
    const int64_t list = s.ListOf(seq_, kv_head_);
    const int32_t* index = s.index + list * s.capacity;
    if (s.unit > 1) return FillUnits(s.unit, index, from, to, chunk);
    const auto n = static_cast<int>(std::min<int64_t>(kListChunk, to - from));
    for (int i = 0; i < n; ++i) {
      const int64_t at = from + i;
      const int64_t token = index[at];
      if (token > last_) {
        chunk.n = i;
        return to - from;
      }
      const int64_t row = a_.kv.RowIndex(table_off_, token);
      chunk.k[i] = a_.kv.k.Head(row, 0);
      chunk.v[i] = a_.kv.v.Head(row, 0);
      chunk.token[i] = static_cast<int32_t>(token);
    }
    chunk.n = n;
    return n;
  }

  // The same of a list of units, which are runs of tokens as ranges are.
  int64_t FillUnits(int32_t unit, const int32_t* index, int64_t from, int64_t to,
                    Chunk& chunk) const {
    const int64_t end = from + std::min(chunk_, to - from);
    for (int64_t at = from; at < end;) {
      const int64_t token = int64_t{index[at / unit]} * unit + at % unit;
      const int64_t run = std::min(end - at, unit - at % unit);
      const int64_t seen = std::clamp<int64_t>(last_ + 1 - token, 0, run);
      FillRun(token, static_cast<int>(seen), chunk);
      if (seen < run) return to - from;
      at += run;
    }
    return end - from;
  }

  const AttendArgs& a_;
  const AttendAxis& axis_;
  int32_t table_off_;
  int64_t last_;
  int32_t seq_;
  int32_t kv_head_;
  int64_t chunk_;
  int64_t at_;
  int64_t end_;
  int segment_ = 0;
  int64_t segment_begin_ = 0;
};

// Whether softmax weights are multiplied by the scales of V, once for a pass of SumValues, so that
// values need none. With few registers passes are too many for that.
template <DType kType>
constexpr bool kScaledWeights = InBlocks(kType) && OKV_MANY_REGISTERS;

// What a pass of SumValues multiplies the values of `kBlocks` blocks by: p, and, where
// kScaledWeights, the scale of each block.
template <DType kType, int G, size_t kBlocks>
class Weights {
 public:
  HWY_INLINE Weights(const HeadPass& pass, const float (*p)[kChunk], size_t block) : p_(p) {
    if constexpr (kScaledWeights<kType>) {
      alignas(64) F16 scales[kBlocks][kChunk];
      for (int t = 0; t < pass.n; ++t) {
        const std::byte* from = pass.v[t] + pass.v_scales + block * sizeof(F16);
        for (size_t b = 0; b < kBlocks; ++b) {
          std::memcpy(&scales[b][t], from + b * sizeof(F16), sizeof(F16));
        }
      }
      const DF d;
      const hn::Rebind<hwy::float16_t, DF> d16;
      for (size_t b = 0; b < kBlocks; ++b) {
        for (int t = 0; t < pass.n; t += static_cast<int>(kLanes)) {
          const VF scale = hn::PromoteTo(
              d, hn::Load(d16, reinterpret_cast<const hwy::float16_t*>(scales[b] + t)));
          for (int g = 0; g < G; ++g) {
            hn::Store(hn::Mul(scale, hn::Load(d, p[g] + t)), d, scaled_[b][g] + t);
          }
        }
      }
    }
  }

  // That of token t for query head g, in every lane.
  HWY_INLINE VF Of(size_t block, int g, int t) const {
    if constexpr (kScaledWeights<kType>) return hn::Set(DF(), scaled_[block][g][t]);
    return hn::Set(DF(), p_[g][t]);
  }

 private:
  const float (*p_)[kChunk];
  alignas(64) float scaled_[kScaledWeights<kType> ? kBlocks : 1][G][kChunk];
};

// values[g] = scale[g] * values[g] + sum of p[g][t] v[t], for P steps from value `at`.
template <DType kType, int G, int P>
HWY_INLINE void SumValues(const HeadPass& pass, const float (*p)[kChunk], const float* scale,
                          size_t at, size_t tail) {
  using E = Elements<kType>;
  const DF d;
  const int64_t stride = pass.job->state_stride;
  VF sum[G][P][2];
  for (int g = 0; g < G; ++g) {
    const float* from = pass.state + g * stride + kAttendStateHead + at;
    const VF s = hn::Set(d, scale[g]);
    for (int j = 0; j < P; ++j) {
      sum[g][j][0] = hn::Mul(hn::LoadU(d, from + j * kStep), s);
      sum[g][j][1] = hn::Mul(hn::LoadU(d, from + j * kStep + kLanes), s);
    }
  }
  constexpr bool kQ4 = kType == DType::kQ4_0;
  int64_t offset = pass.v_offset;
  if constexpr (!kQ4) offset += static_cast<int64_t>(at / kStep * E::kStepBytes);
  constexpr size_t kSteps = InBlocks(kType) ? std::max<size_t>(kBlockValues / kStep, 1) : P;
  constexpr size_t kBlocks = (P + kSteps - 1) / kSteps;
  const Weights<kType, G, kBlocks> weights(pass, p, at / kBlockValues);
  const std::byte* const* v = pass.v;
  const int64_t scales = pass.v_scales + static_cast<int64_t>(at / kBlockValues * sizeof(F16));
  const auto add = [&](int t) HWY_ATTR {
    for (size_t block = 0; block < kBlocks; ++block) {
      VF weight[G];
      for (int g = 0; g < G; ++g) weight[g] = weights.Of(block, g, t);
      for (size_t j = block * kSteps; j < std::min<size_t>((block + 1) * kSteps, P); ++j) {
        VF a;
        VF b;
        if constexpr (kQ4) {
          E::LoadStep(v[t] + offset, at + j * kStep, a, b);
        } else if (InBlocks(kType) || tail == 0) {
          E::LoadStep(v[t] + offset + j * E::kStepBytes, a, b);
        } else {
          E::LoadTail(v[t] + offset, tail, a, b);
        }
        if constexpr (InBlocks(kType) && !kScaledWeights<kType>) {
          const VF s = LoadScale(v[t] + scales + block * sizeof(F16));
          a = hn::Mul(a, s);
          b = hn::Mul(b, s);
        }
        for (int g = 0; g < G; ++g) {
          sum[g][j][0] = hn::MulAdd(a, weight[g], sum[g][j][0]);
          sum[g][j][1] = hn::MulAdd(b, weight[g], sum[g][j][1]);
        }
      }
    }
  };
  // With few registers there are many passes, and each looks ahead seldom.
  constexpr int kTokens = OKV_MANY_REGISTERS ? 1 : 16;
  const int32_t share =
      pass.ahead->Share(kTokens, P * kStep, static_cast<size_t>(pass.job->args->kv.dv));
  for (int t = 0; t < pass.n;) {
    pass.ahead->Advance(share);
    for (const int end = std::min(t + kTokens, pass.n); t < end; ++t) add(t);
  }
  for (int g = 0; g < G; ++g) {
    float* to = pass.state + g * stride + kAttendStateHead + at;
    for (int j = 0; j < P; ++j) {
      hn::StoreU(sum[g][j][0], d, to + j * kStep);
      hn::StoreU(sum[g][j][1], d, to + j * kStep + kLanes);
    }
  }
}

// Where scores go, of the first of some query heads: either may be null.
struct ScoreOut {
  float* logits = nullptr;    // [G, score_stride]
  float* head_max = nullptr;  // [kChunk]: the maximum so far
};

// Takes one chunk into the states of G query heads.
template <DType kType, int G, bool kTail>
HWY_NOINLINE void Heads(const HeadPass& pass, const ScoreOut& out) {
  const DF d;
  const AttendArgs& a = *pass.job->args;
  const int n = pass.n;
  alignas(64) float p[G][kChunk];  // logits, then their exponentials
  const VF scale = hn::Set(d, a.scale * kLogitScale<kType>);
  const VF none = hn::Set(d, kNegInf);
  const bool plain = a.softcap <= 0 && out.logits == nullptr && out.head_max == nullptr;
  VF top[G];
  std::fill_n(top, G, none);
  for (int i = 0; i < n; i += static_cast<int>(kLanes)) {
    VF logit[G];
    ScoreTile<kType, G, kTail>(pass, i, logit);
    const auto left = static_cast<size_t>(n - i);
    for (int g = 0; g < G; ++g) {
      logit[g] = hn::Mul(logit[g], scale);
      if (left < kLanes) logit[g] = hn::IfThenElse(hn::FirstN(d, left), logit[g], none);
      if (!plain) {
        if (a.softcap > 0) {
          logit[g] = Softcap(logit[g], hn::Set(d, a.softcap), hn::Set(d, 1.0f / a.softcap));
          if (left < kLanes) logit[g] = hn::IfThenElse(hn::FirstN(d, left), logit[g], none);
        }
        if (out.logits != nullptr) {
          StoreFloats(logit[g], out.logits + g * a.score_stride + i, left);
        }
        if (out.head_max != nullptr) {
          float* to = out.head_max + i;
          hn::StoreU(hn::Max(hn::LoadU(d, to), logit[g]), d, to);
        }
      }
      hn::StoreU(logit[g], d, p[g] + i);
      top[g] = hn::Max(top[g], logit[g]);
    }
  }
  float rescale[G];
  const VF log2e = hn::Set(d, kLog2E);
  for (int g = 0; g < G; ++g) {
    float* state = pass.state + g * pass.job->state_stride;
    const float highest = Max(top[g]) * kLog2E;
    rescale[g] = 1;
    if (highest > state[0]) {
      rescale[g] = hn::GetLane(Exp2(hn::Set(d, state[0] - highest)));
      state[0] = highest;
    }
    const VF m = hn::Set(d, state[0] == kNegInf ? 0.0f : state[0]);
    VF sum = hn::Zero(d);
    for (int i = 0; i < n; i += static_cast<int>(kLanes)) {
      const VF e = Exp2(hn::MulSub(hn::LoadU(d, p[g] + i), log2e, m));
      hn::StoreU(e, d, p[g] + i);
      sum = hn::Add(sum, e);
    }
    state[1] = state[1] * rescale[g] + Sum(sum);
  }
  if (a.o != nullptr) {
    const auto dv = static_cast<size_t>(a.kv.dv);
    size_t at = 0;
    if constexpr (G <= kRegisterRows) {
      for (; at + 2 * kStep <= dv; at += 2 * kStep) {
        SumValues<kType, G, 2>(pass, p, rescale, at, 0);
      }
    }
    for (; at + kStep <= dv; at += kStep) SumValues<kType, G, 1>(pass, p, rescale, at, 0);
    if (at < dv) SumValues<kType, G, 1>(pass, p, rescale, at, dv - at);
  }
}

template <DType kType, bool kTail>
HWY_INLINE void HeadsOf(int g, const HeadPass& pass, const ScoreOut& out) {
  if (g == 1) return Heads<kType, 1, kTail>(pass, out);
  if (g == 2) return Heads<kType, 2, kTail>(pass, out);
  if (g == 3) return Heads<kType, 3, kTail>(pass, out);
  return Heads<kType, 4, kTail>(pass, out);
}

// Where the bytes of an item's tokens lie.
Ahead::Rows RowsOf(const AttendArgs& a, const AttendItem& item) {
  const KvView& kv = a.kv;
  // From the first of the heads to the last: others may lie between.
  const int32_t place = kv.Place(a.KvHead(item.first));
  const int32_t places = kv.Place(a.KvHead(item.first + item.n_kv_heads - 1)) + 1 - place;
  Ahead::Rows rows;
  rows.second_level = PrefetchesToSecondLevel();
  rows.offset = place * kv.k.head_bytes;
  if (kv.ByHead()) {  // a row of each head; those of one follow one another, for the second level
    rows.second_level = true;
    rows.units = places;
    rows.stride = kv.k.head_bytes;
    rows.bytes = kv.k.row_bytes;
    return rows;
  }
  const int64_t k_bytes = places * kv.k.head_bytes;
  const int64_t v_offset = place * kv.v.head_bytes;
  const int64_t v_bytes = a.o != nullptr ? places * kv.v.head_bytes : 0;
  const bool together =
      kv.v.base + v_offset == kv.k.base + rows.offset + k_bytes && kv.k.row_bytes == kv.v.row_bytes;
  rows.bytes = k_bytes + v_bytes;
  if (v_bytes > 0 && !together) {  // two parts: K's, then V's
    rows.units = 2;
    rows.stride = v_offset - rows.offset;
    rows.apart =
        offsetof(Chunk, v) / sizeof(Chunk::v[0]) - offsetof(Chunk, k) / sizeof(Chunk::k[0]);
    rows.bytes = std::max(k_bytes, v_bytes);
  }
  return rows;
}

// How many parts the work of `n_rows` rows on a token has: its scores and its values, of the heads
// that are taken together.
int32_t WorksOf(const AttendArgs& a, const AttendItem& item, int32_t n_rows) {
  const int32_t passes = (a.Group() + kMaxHeads - 1) / kMaxHeads;
  return n_rows * item.n_kv_heads * passes * (a.o != nullptr ? 2 : 1);
}

// Pieces begin at multiples of 16 tokens.
TokenWalker WalkerOf(const AttendArgs& a, const AttendAxis& axis, const AttendItem& item) {
  const AttendGroup& group = *item.group;
  const auto bound = [&](int64_t piece) {
    return piece == group.pieces ? axis.total : axis.total * piece / group.pieces / 16 * 16;
  };
  return {a, group, axis, item, bound(item.piece), bound(item.piece + 1)};
}

template <DType kType>
void PieceOf(const AttendJob& job, const AttendItem& item, const AttendItem* after) {
  const AttendArgs& a = *job.args;
  const AttendGroup& group = *item.group;
  const int32_t heads_per_kv = a.n_heads / a.kv.n_kv_heads;
  const int32_t end_of_heads = item.first + item.n_kv_heads;
  for (int32_t r = 0; r < group.n_rows; ++r) {
    for (int32_t i = item.first; i < end_of_heads; ++i) {
      float* state = job.State(group, item.piece, r, a.KvHead(i) * heads_per_kv);
      std::fill_n(state, heads_per_kv * job.state_stride, 0.0f);
      for (int32_t h = 0; h < heads_per_kv; ++h) state[h * job.state_stride] = kNegInf;
    }
  }
  const AttendAxis axis = MakeAttendAxis(a, group, a.KvHead(item.first));
  const bool tail = static_cast<size_t>(a.kv.dk) % kTileValues<kType> != 0;
  const Ahead::Rows rows = RowsOf(a, item);
  const int32_t works = WorksOf(a, item, group.n_rows);
  TokenWalker walker = WalkerOf(a, axis, item);
  Chunk chunks[2];
  bool more = walker.Next(chunks[0]);
  for (int turn = 0; more; turn ^= 1) {
    const Chunk& chunk = chunks[turn];
    Chunk& next = chunks[turn ^ 1];
    more = walker.Next(next);
    Ahead::Rows of_next = rows;
    if (!more && after != nullptr) {  // no piece but a thread's first begins with cold rows
      const AttendAxis other = MakeAttendAxis(a, *after->group, a.KvHead(after->first));
      if (WalkerOf(a, other, *after).Next(next)) of_next = RowsOf(a, *after);
    }
    Ahead ahead(of_next, next.k, next.k + next.n, works);
    const PlanSegment& s = a.plan.segments[static_cast<size_t>(chunk.segment)];
    for (int32_t r = 0; r < group.n_rows; ++r) {
      const int32_t row = group.row + r;
      const int32_t pos = a.rows[row].pos;
      // Tokens ascend within a chunk: what the row sees of it is one run.
      const int32_t* begin = chunk.token;
      const int32_t* end = chunk.token + chunk.n;
      if (s.window > 0) begin = std::upper_bound(begin, end, pos - s.window);
      if (end[-1] > pos) end = std::upper_bound(begin, end, pos);
      const auto low = static_cast<int>(begin - chunk.token);
      const auto n = static_cast<int>(end - begin);
      if (n <= 0) continue;
      HeadPass pass{.job = &job,
                    .k = chunk.k + low,
                    .v = chunk.v + low,
                    .n = n,
                    .ahead = &ahead,
                    .k_offset = 0,
                    .v_offset = 0,
                    .k_scales = 0,
                    .v_scales = 0,
                    .q = nullptr,
                    .state = nullptr};
      alignas(64) float head_max[kChunk];
      if (a.score == ScoreKind::kHeadMax) std::fill_n(head_max, kChunk, kNegInf);
      for (int32_t i = item.first; i < end_of_heads; ++i) {
        const int32_t kv = a.KvHead(i);
        const int32_t place = a.kv.Place(kv);
        pass.k_offset = place * a.kv.k.head_bytes;
        pass.v_offset = place * a.kv.v.head_bytes;
        pass.k_scales = pass.k_offset + a.kv.k.ToScales(place);
        pass.v_scales = pass.v_offset + a.kv.v.ToScales(place);
        for (int32_t h = 0; h < heads_per_kv; h += kMaxHeads) {
          const int32_t head = kv * heads_per_kv + h;
          const int64_t row_head = int64_t{row - job.first_row} * a.n_heads + head;
          pass.q = job.q[chunk.segment] + row_head * PackedQueryFloats(a.kv.dk);
          pass.state = job.State(group, item.piece, r, head);
          ScoreOut out;
          if (a.score == ScoreKind::kLogits) {
            out.logits = a.scores + (int64_t{row} * a.n_heads + head) * a.score_stride + *begin;
          } else if (a.score == ScoreKind::kHeadMax) {
            out.head_max = head_max;
          }
          const int g = std::min(kMaxHeads, heads_per_kv - h);
          if (tail) {
            HeadsOf<kType, true>(g, pass, out);
          } else {
            HeadsOf<kType, false>(g, pass, out);
          }
        }
      }
      if (a.score == ScoreKind::kHeadMax) {
        std::memcpy(a.scores + row * a.score_stride + *begin, head_max,
                    static_cast<size_t>(n) * sizeof(float));
      }
    }
  }
}

void Piece(const AttendJob& job, const AttendItem& item, const AttendItem* after) {
  switch (job.args->kv.k.dtype) {
    case DType::kF32:
      return PieceOf<DType::kF32>(job, item, after);
    case DType::kF16:
      return PieceOf<DType::kF16>(job, item, after);
    case DType::kBF16:
      return PieceOf<DType::kBF16>(job, item, after);
    case DType::kQ8_0:
      return PieceOf<DType::kQ8_0>(job, item, after);
    case DType::kQ4_0:
      return PieceOf<DType::kQ4_0>(job, item, after);
  }
}

void Merge(const AttendJob& job, const AttendGroup& group, int32_t row, int32_t begin,
           int32_t end) {
  const DF d;
  const AttendArgs& a = *job.args;
  const auto dv = static_cast<size_t>(a.kv.dv);
  for (int32_t h = begin; h < end; ++h) {
    float top = kNegInf;
    for (int32_t p = 0; p < group.pieces; ++p) top = std::max(top, job.State(group, p, row, h)[0]);
    // The first state takes the others in: values become sums relative to `top`.
    float* into = job.State(group, 0, row, h);
    float sum = 0;
    for (int32_t p = 0; p < group.pieces && top != kNegInf; ++p) {
      const float* from = job.State(group, p, row, h);
      if (from[0] == kNegInf) continue;
      const VF weight = Exp2(hn::Set(d, from[0] - top));
      sum += hn::GetLane(weight) * from[1];
      if (a.o == nullptr || (p == 0 && from[0] == top)) continue;
      for (size_t i = kAttendStateHead; i < static_cast<size_t>(job.state_stride); i += kLanes) {
        const VF v = hn::Mul(weight, hn::LoadU(d, from + i));
        hn::StoreU(p == 0 ? v : hn::Add(v, hn::LoadU(d, into + i)), d, into + i);
      }
    }
    const int64_t row_head = int64_t{group.row + row} * a.n_heads + h;
    if (a.lse != nullptr) {
      const double ln2 = 0.6931471805599453;
      a.lse[row_head] =
          sum > 0 ? static_cast<float>(top * ln2 + std::log(static_cast<double>(sum))) : kNegInf;
    }
    if (a.o == nullptr) continue;
    float* o = a.o + row_head * a.kv.dv;
    float factor = sum > 0 ? 1.0f / sum : 0.0f;
    if (sum > 0 && a.lse_in != nullptr) factor = std::exp2(top - a.lse_in[row_head] * kLog2E);
    const VF inverse = hn::Set(d, factor);
    for (size_t i = 0; i < dv; i += kStep) {
      const VF v0 = hn::Mul(hn::LoadU(d, into + kAttendStateHead + i), inverse);
      const VF v1 = hn::Mul(hn::LoadU(d, into + kAttendStateHead + i + kLanes), inverse);
      if (a.kv.k.dtype == DType::kBF16) {
        StoreStep<DType::kBF16>(v0, v1, o + i, dv - i);
      } else {
        StoreStep<DType::kF32>(v0, v1, o + i, dv - i);
      }
    }
  }
}

template <DType kType>
void PackHeads(const float* q, size_t dk, size_t heads, float* out) {
  for (size_t g = 0; g < heads; ++g) PackQuery<kType>(q + g * dk, dk, g, heads, out);
}

void PackQueries(const KvView& kv, const float* q, int32_t heads, float* out) {
  const auto dk = static_cast<size_t>(kv.dk);
  for (int32_t h = 0; h < heads; h += kMaxHeads) {  // as Heads takes them
    const auto g = static_cast<size_t>(std::min(kMaxHeads, heads - h));
    const float* from = q + h * kv.dk;
    float* into = out + h * PackedQueryFloats(kv.dk);
    switch (kv.k.dtype) {
      case DType::kF32:
        PackHeads<DType::kF32>(from, dk, g, into);
        break;
      case DType::kF16:
        PackHeads<DType::kF16>(from, dk, g, into);
        break;
      case DType::kBF16:
        PackHeads<DType::kBF16>(from, dk, g, into);
        break;
      case DType::kQ8_0:
        PackHeads<DType::kQ8_0>(from, dk, g, into);
        break;
      case DType::kQ4_0:
        PackHeads<DType::kQ4_0>(from, dk, g, into);
        break;
    }
  }
}

const AttendKernels* AttendTable() {
  static constexpr AttendKernels kTable = {PackQueries, Piece, Merge};
  return &kTable;
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace omnikv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace omnikv {
HWY_EXPORT(AttendTable);
const AttendKernels& GetAttendKernels(const Isa& isa) {
  return *IsaEntry(HWY_DISPATCH_TABLE(AttendTable), isa)();
}
}  // namespace omnikv
#endif  // HWY_ONCE
