// How an attention over few rows is divided among warps, and which tokens a row reads: what its two
// kernels (tensor cores, and CUDA cores for the other shapes) and the merge of their parts share.
//
// A tile is 16 tokens of one segment of one row's plan. The tiles of all rows of a launch, row
// after row, are cut into strands of equal length; a unit is the query heads of one KV head that a
// warp takes together. One warp takes one strand of one unit. So the work is even whatever the
// lengths of the rows, and depends on nothing but their counts. A row that lies in one strand is
// written by it; of the others, each strand leaves a partial, which MergeKernel puts together.
#pragma once

#include <algorithm>

#include "backend/cuda/kernels/common.cuh"

namespace omnikv::cuda {

inline constexpr int kTileTokens = 16;
inline constexpr int32_t kRowsALaunch = 32;  // a lane counts the tiles of a row
inline constexpr int32_t kMaxStrands = 2048;
inline constexpr float kInf = __builtin_huge_valf();
inline constexpr float kLn2 = 0.693147181f;

// --- Who takes what.

// Warps of all CTAs take strand after strand, and of each strand its units one after the other:
// warps beside one another read the same tokens, and none is idle whatever the number of units.
struct Division {
  int32_t unit_heads;  // query heads of a unit, at most
  Divisor parts;       // units that share a KV head
  Divisor units;       // of all KV heads that take part
  int32_t warps;       // of a CTA
  int32_t ctas;
  Divisor share;    // strands that a CTA has whole, at least; 1 where units fill it
  int32_t strands;  // a multiple of `share`

  __device__ int32_t Unit(int32_t cta, int32_t warp) const { return (cta * warps + warp) % units; }
  // Not below `strands`: the warp has nothing to do. Strands of one CTA lie apart, so that the
  // first ones, which alone have tiles where a row is short, are spread over all CTAs.
  __device__ int32_t Strand(int32_t cta, int32_t warp) const {
    const int32_t i = (cta * warps + warp) / units;
    return i < strands ? i % share * (strands / share) + i / share : strands;
  }
};

// For about `ctas` CTAs of `warps` warps.
inline Division Divide(const AttendArgs& args, int32_t unit_heads, int32_t warps, int32_t ctas) {
  const auto ceil_div = [](int32_t a, int32_t b) { return (a + b - 1) / b; };
  Division d{};
  d.unit_heads = unit_heads;
  d.parts = ceil_div(args.n_heads / args.kv.n_kv_heads, unit_heads);
  d.units = args.KvHeads() * d.parts;
  d.warps = warps;
  d.share = std::max(1, warps / d.units);
  const int32_t most = std::min(std::max(1, ctas * warps / d.units), kMaxStrands);
  d.strands = most / d.share * d.share;
  d.ctas = ceil_div(d.strands * d.units, warps);
  return d;
}

// The same value, but not one that the compiler knows not to change: what follows from it is then
// computed where it is used, where it would otherwise be kept in registers all through a loop.
__device__ __forceinline__ uint32_t Fresh(uint32_t v) {
  asm volatile("" : "+r"(v));
  return v;
}

// Partials, in scratch. A strand has two slots: for a row that it does not begin, which can only be
// its first, and for one that it begins and does not end, its last.
struct Partials {
  float* o;         // [2 * strands, n_heads, dv]: sum of 2^(logit - top) v, logits times log2(e)
  float2* sums;     // [2 * strands, n_heads]: (top, sum of 2^(logit - top))
  int32_t n_heads;  // query heads that take part

  // Of the i-th of these heads.
  __device__ int64_t At(int32_t slot, int32_t i) const { return int64_t{slot} * n_heads + i; }
};

inline size_t PartialHeads(const AttendArgs& args, const Division& d) {
  return 2 * static_cast<size_t>(d.strands) * static_cast<size_t>(args.Heads());
}

inline size_t PartialBytes(const AttendArgs& args, const Division& d) {
  return PartialHeads(args, d) * (static_cast<size_t>(args.kv.dv) * sizeof(float) + sizeof(float2));
}

inline Partials PartialsAt(std::byte* scratch, const AttendArgs& args, const Division& d) {
  const size_t o_bytes = PartialHeads(args, d) * static_cast<size_t>(args.kv.dv) * sizeof(float);
  return {reinterpret_cast<float*>(scratch), reinterpret_cast<float2*>(scratch + o_bytes),
          args.Heads()};
}

// The other shapes' kernel: `args` has at most kRowsALaunch rows.
Division DivideGeneric(const AttendArgs& args, const Device& device);
void AttendGeneric(const AttendArgs& args, const Division& division, const Partials& partials,
                   const Launch& launch);

// The tiles of a launch, cut into strands: the first `longer` have one tile more. Where there are
// fewer than two tiles for each, fewer strands: a partial of one tile takes the merge longer than
// it saves (4K tokens, four KV heads of 128, 28 layers: 3.767 -> 3.643 ms a step).
struct Strands {
  static constexpr int32_t kFew = 128;  // partials that the merge has at once
  int32_t n;                            // that have tiles: the first of all
  int32_t length;
  int32_t longer;

  Strands() = default;
  __device__ Strands(int32_t n_tiles, int32_t at_most)
      : n(max(1, min(min(n_tiles, at_most), max(n_tiles / 2, kFew)))),
        length(n_tiles / n),
        longer(n_tiles % n) {}
  __device__ int32_t Begin(int32_t strand) const { return strand * length + min(strand, longer); }
  // The strand of a tile. REQUIRES n_tiles > 0.
  __device__ int32_t Of(int32_t tile) const {
    const int32_t in_longer = longer * (length + 1);
    return tile < in_longer ? tile / (length + 1) : longer + (tile - in_longer) / length;
  }
};

// --- What a row reads.

// Metadata of a step. Before GridWait it is read past the first-level cache, which may still hold
// what another kernel found there.
template <bool kBeforeWait>
__device__ __forceinline__ int32_t LoadMeta(const int32_t* p) {
  if constexpr (kBeforeWait) return __ldcg(p);
  return *p;
}

// The tokens of one segment that a row reads for a KV head: i = 0 .. n - 1.
struct SegmentTokens {
  int32_t n;
  int32_t begin;        // of a range: token i is begin + i
  const int32_t* list;  // null for a range. Token i is in unit list[i / unit], but not read when
  Divisor unit;         // it is before `low` or after the row's position.
  int32_t low;

  __device__ int32_t Tiles() const { return (n + kTileTokens - 1) / kTileTokens; }
};

// What memory says of a segment: the units of a list, or the ends of a range.
template <bool kBeforeWait = false>
__device__ __forceinline__ int2 LoadEnds(const AttendArgs& args, int segment, int32_t seq,
                                         int32_t kv_head) {
  const PlanSegment& s = args.plan.segments[static_cast<size_t>(segment)];
  if (s.kind == SegmentKind::kList) {
    return {0, LoadMeta<kBeforeWait>(s.count + s.ListOf(seq, kv_head))};
  }
  if (s.bounds == nullptr) return {s.begin, s.end};
  const int32_t* bounds = s.bounds + 2 * int64_t{seq};
  return {LoadMeta<kBeforeWait>(bounds), LoadMeta<kBeforeWait>(bounds + 1)};
}

__device__ __forceinline__ SegmentTokens SegmentTokensOf(const AttendArgs& args, int segment,
                                                         int2 ends, RowMeta row, int32_t kv_head) {
  const PlanSegment& s = args.plan.segments[static_cast<size_t>(segment)];
  SegmentTokens tokens{};
  tokens.low = s.window > 0 ? max(row.pos + 1 - s.window, 0) : 0;
  if (s.kind == SegmentKind::kList) {
    tokens.list = s.index + s.ListOf(row.seq, kv_head) * s.capacity;
    tokens.unit = s.unit;
    tokens.n = ends.y * s.unit;
  } else {
    tokens.begin = max(ends.x, tokens.low);
    tokens.n = max(min(ends.y, row.pos + 1) - tokens.begin, 0);
  }
  return tokens;
}

// What memory says of the rows of a launch for a KV head: of one row a lane.
struct RowFacts {
  RowMeta meta{};
  int32_t table_off = 0;
  int2 ends[kMaxSegments]{};

  // Before the wait, what an earlier step left may be there: also a sequence that this one has not.
  template <bool kBeforeWait = false>
  static __device__ __forceinline__ RowFacts Load(const AttendArgs& args, int32_t kv_head) {
    RowFacts facts;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if (lane >= args.n_rows) return facts;
    // What follows from it is then asked for together with the row.
    if (args.n_seqs > 1) facts.meta.seq = LoadMeta<kBeforeWait>(&args.rows[lane].seq);
    if (kBeforeWait) facts.meta.seq = min(facts.meta.seq, args.n_seqs - 1);
    facts.meta.pos = LoadMeta<kBeforeWait>(&args.rows[lane].pos);
    facts.table_off = LoadMeta<kBeforeWait>(&args.seqs[facts.meta.seq].table_off);
#pragma unroll
    for (int s = 0; s < kMaxSegments; ++s) {  // all loads are under way together
      if (s >= args.plan.n_segments) continue;
      facts.ends[s] = LoadEnds<kBeforeWait>(args, s, facts.meta.seq, kv_head);
    }
    return facts;
  }

  // Whether it is the same in all lanes.
  __device__ __forceinline__ bool operator==(const RowFacts& other) const {
    int32_t different = meta.seq ^ other.meta.seq;
    different |= (meta.pos ^ other.meta.pos) | (table_off ^ other.table_off);
#pragma unroll
    for (int s = 0; s < kMaxSegments; ++s) {
      different |= (ends[s].x ^ other.ends[s].x) | (ends[s].y ^ other.ends[s].y);
    }
    return !__any_sync(kAllLanes, different != 0);
  }

  // The ends of a segment for a row.
  __device__ __forceinline__ int2 EndsOf(int segment, int32_t row) const {
    int2 found = ends[0];
#pragma unroll
    for (int s = 1; s < kMaxSegments; ++s) {
      if (s == segment) found = ends[s];
    }
    return {__shfl_sync(kAllLanes, found.x, row), __shfl_sync(kAllLanes, found.y, row)};
  }
};

// The rows of a launch, one a lane, and where their tiles stand for a KV head.
struct RowTiles {
  RowFacts facts;
  int32_t tiles = 0;
  int32_t start = 0;
  int32_t total = 0;  // of all rows, in every lane

  RowTiles() = default;
  __device__ RowTiles(const AttendArgs& args, const RowFacts& of, int32_t kv_head) : facts(of) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if (lane < args.n_rows) {
#pragma unroll
      for (int s = 0; s < kMaxSegments; ++s) {
        if (s >= args.plan.n_segments) continue;
        tiles += SegmentTokensOf(args, s, facts.ends[s], facts.meta, kv_head).Tiles();
      }
    }
    int32_t sum = tiles;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int32_t before = __shfl_up_sync(kAllLanes, sum, step);
      if (lane >= step) sum += before;
    }
    start = sum - tiles;
    total = __shfl_sync(kAllLanes, sum, 31);
  }
};

// What a strand takes of a row.
struct RowPart {
  int32_t row;  // of the launch
  RowMeta meta;
  int32_t table_off;
  int32_t from, to;  // tiles of the row
  bool last;         // of the strand's parts
  int32_t slot;      // of its partial; < 0: it is the whole row
};

// Calls body(part) for each row that has tiles in the strand. All lanes call it together.
template <typename Body>
__device__ __forceinline__ void ForEachRowPart(const AttendArgs& args, const RowTiles& rows,
                                               const Strands& strands, int32_t strand,
                                               Body&& body) {
  if (strand >= strands.n) return;
  const int32_t begin = strands.Begin(strand);
  const int32_t end = strands.Begin(strand + 1);
  for (int32_t r = 0; r < args.n_rows; ++r) {
    const int32_t start = __shfl_sync(kAllLanes, rows.start, r);
    const int32_t tiles = __shfl_sync(kAllLanes, rows.tiles, r);
    const int32_t from = max(begin, start);
    const int32_t to = min(end, start + tiles);
    if (from >= to) continue;
    RowPart part;
    part.row = r;
    part.meta.seq = __shfl_sync(kAllLanes, rows.facts.meta.seq, r);
    part.meta.pos = __shfl_sync(kAllLanes, rows.facts.meta.pos, r);
    part.table_off = __shfl_sync(kAllLanes, rows.facts.table_off, r);
    part.from = from - start;
    part.to = to - start;
    part.last = to == end;
    part.slot = to - from == tiles ? -1 : 2 * strand + (start > begin ? 1 : 0);
    body(part);
  }
}

// Calls body(segment, tokens, from, to) for each segment that has tiles [from, to) in the part.
template <typename Body>
__device__ __forceinline__ void ForEachSegment(const AttendArgs& args, const RowFacts& facts,
                                               const RowPart& part, int32_t kv_head, Body&& body) {
  int32_t start = 0;
  for (int s = 0; s < args.plan.n_segments; ++s) {
    const int2 ends = facts.EndsOf(s, part.row);
    const SegmentTokens tokens = SegmentTokensOf(args, s, ends, part.meta, kv_head);
    const int32_t tiles = tokens.Tiles();
    const int32_t from = max(part.from - start, 0);
    const int32_t to = min(part.to - start, tiles);
    if (from < to) body(args.plan.segments[static_cast<size_t>(s)], tokens, from, to);
    start += tiles;
  }
}

// Walks the tokens of a segment 32 at a time, one a lane, and finds where they lie ahead of need:
// an index two batches before, a block one batch before. The first batch comes with a first
// Advance.
class Walk {
 public:
  // From token `first` of the segment; the tokens stay where they are.
  __device__ Walk(const KvView& kv, const SegmentTokens& tokens, int32_t table_off, int32_t pos,
                  int32_t first)
      : tokens_(tokens),
        block_tokens_(kv.block_tokens),
        table_(kv.block_table + table_off),
        block_rows_(static_cast<uint32_t>(kv.BlockRows())),
        pos_(pos),
        i_(first + static_cast<int32_t>(threadIdx.x) % 32) {
    const int32_t unit = Unit(i_);
    next_unit_ = Unit(i_ + 32);
    next_token_ = Token(i_, unit);
    next_block_ = Block(next_token_);
  }

  // This lane's token of the batch; < 0: none.
  __device__ int32_t token() const { return token_; }
  // Its row in the bank; < 0: none. (2^31 rows are more than any memory.)
  __device__ int32_t row() const { return row_; }

  __device__ void Advance() {
    token_ = next_token_;
    row_ =
        token_ < 0 ? -1 : static_cast<int32_t>(next_block_ * block_rows_) + token_ % block_tokens_;
    i_ += 32;
    next_token_ = Token(i_, next_unit_);
    next_block_ = Block(next_token_);
    next_unit_ = Unit(i_ + 32);
  }

 private:
  __device__ int32_t Unit(int32_t i) const {
    if (tokens_.list == nullptr || i >= tokens_.n) return 0;
    return tokens_.list[i / tokens_.unit];
  }
  __device__ int32_t Token(int32_t i, int32_t unit) const {
    if (i >= tokens_.n) return -1;
    if (tokens_.list == nullptr) return tokens_.begin + i;
    const int32_t token = unit * tokens_.unit + i % tokens_.unit;
    return token >= tokens_.low && token <= pos_ ? token : -1;
  }
  __device__ uint32_t Block(int32_t token) const {
    return token < 0 ? 0 : static_cast<uint32_t>(table_[token / block_tokens_]);
  }

  const SegmentTokens& tokens_;
  const Divisor& block_tokens_;
  const int32_t* table_;
  uint32_t block_rows_;
  int32_t pos_;
  int32_t i_;  // of the batch after this one
  int32_t token_, row_;
  int32_t next_token_;
  uint32_t next_block_;
  int32_t next_unit_;  // of the batch after the next
};

// --- Results.

// Raises *max, which holds -inf or such a maximum. The order of calls does not matter: with the
// sign bit apart, floats are ordered as integers are, negative ones the other way round.
__device__ __forceinline__ void AtomicMax(float* max, float v) {
  v += 0.0f;  // -0 becomes +0
  if (v >= 0) {
    atomicMax(reinterpret_cast<int*>(max), __float_as_int(v));
  } else {
    atomicMin(reinterpret_cast<unsigned*>(max), __float_as_uint(v));
  }
}

// What makes o of the sum of 2^(logit - top) v.
__device__ __forceinline__ float OutputFactor(const AttendArgs& args, int64_t row_head, float top,
                                              float sum) {
  if (!(sum > 0)) return 0.0f;
  return args.lse_in == nullptr ? 1.0f / sum : exp2f(top - args.lse_in[row_head] * kLog2E);
}

// log of the sum of e^logit, from base 2.
__device__ __forceinline__ float LogSum(float top, float sum) {
  return sum > 0 ? (top + log2f(sum)) * kLn2 : -kInf;
}

}  // namespace omnikv::cuda
