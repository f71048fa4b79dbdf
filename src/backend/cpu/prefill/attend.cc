#include "backend/cpu/prefill/attend.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "backend/cpu/prefill/amx_kernels.h"
#include "backend/cpu/prefill/bf16_kernels.h"
#include "backend/kv_format.h"
#include "base/check.h"

namespace omnikv {
namespace {

using prefill::AttendKernels;
using prefill::AttendRows;
using prefill::AttendTile;
using prefill::DivUp;

constexpr int64_t kMinQueries = 64;
constexpr int64_t kBatch = 32;  // panels that a kernel takes at once
constexpr float kLog2E = 1.44269504f;
constexpr float kLn2 = 0.693147181f;
// Where a running maximum starts: below any logit, and finite, so that -inf - top is -inf.
constexpr float kNoTop = -1e30f;

}  // namespace

// Where a thread's scratch holds what, in words of 4 bytes.
struct PrefillAttention::Layout {
  Layout(const AttendKernels& kernels, const AttendArgs& a)
      : lanes(kernels.lanes),
        group(a.n_heads / a.kv.n_kv_heads),
        q_words(RoundUp(a.kv.dk / kernels.pack, kernels.unit)),
        block_rows(std::max<int64_t>(1, std::clamp(kernels.query_words / (q_words + a.kv.dv),
                                                   kMinQueries, kernels.max_queries) /
                                            group)),
        panels(DivUp(block_rows * group, lanes)),
        ld_row(std::max<int64_t>({a.kv.dk, a.kv.dv, q_words})),
        ld_k(q_words + 16),  // no power of two: rows of a tile in different cache sets
        ld_v(a.kv.dv + 16) {
    int64_t at = 0;
    const auto take = [&](int64_t n) {
      const int64_t begin = at;
      at += RoundUp(n, 16);
      return begin;
    };
    q = take(panels * q_words * lanes);
    o = take(panels * a.kv.dv * lanes);
    top = take(panels * lanes);
    sum = take(panels * lanes);
    norm = take(panels * lanes);
    pos = take(panels * lanes);
    if (kernels.pack_rows != nullptr) {
      ld_k = q_words;
      ld_v = RoundUp(a.kv.dv, 32) / 2;
    }
    k = take(kernels.tile_tokens * ld_k);
    v = take(kernels.tile_tokens * ld_v);
    logits = take(kernels.scratch > 0 ? kernels.scratch : kernels.tile_tokens * lanes);
    rows = take(lanes * ld_row);
    if (kernels.pack_rows != nullptr && InBlocks(a.kv.k.dtype)) {
      tokens = take(AttendRows::kMost * (a.kv.dk + a.kv.dv) / 2);
    }
    words = RoundUp(at, 1024);
  }

  int64_t lanes, group, q_words, block_rows, panels, ld_row, ld_k, ld_v;
  int64_t q, o, top, sum, norm, pos, k, v, logits;
  int64_t rows;        // [lanes, ld_row]: query or result rows of one panel
  int64_t tokens = 0;  // [kMost, dk + dv], bf16: rows of K and V for pack_rows, where not their own
  int64_t words;       // of all
};

// One block of rows of one KV head.
class PrefillAttention::Task {
 public:
  Task(const PrefillAttention& owner, const AttendArgs& args, const AttendKernels& kernels,
       const Layout& layout, float* scratch)
      : vector_(owner.vector_), a_(args), kernels_(kernels), at_(layout), scratch_(scratch) {}

  void Run(int32_t seq, int64_t first_row, int64_t n_rows, int32_t kv_head) {
    seq_ = seq;
    first_row_ = first_row;
    queries_ = n_rows * at_.group;
    panels_ = DivUp(queries_, at_.lanes);
    kv_head_ = kv_head;
    place_ = a_.kv.Place(kv_head);
    Start();
    if (kernels_.begin != nullptr) kernels_.begin();
    const float* packed = nullptr;
    for (int32_t s = 0; s < a_.plan.n_segments; ++s) {
      const PlanSegment& segment = a_.plan.segments[static_cast<size_t>(s)];
      const float* q = segment.q != nullptr ? segment.q : a_.q;
      if (q != packed) PackQueries(q);
      packed = q;
      Walk(segment);
    }
    if (kernels_.end != nullptr) kernels_.end();
    Finish();
  }

 private:
  float* Floats(int64_t offset) const { return scratch_ + offset; }
  uint32_t* Words(int64_t offset) const { return reinterpret_cast<uint32_t*>(scratch_ + offset); }
  int32_t* Pos() const { return reinterpret_cast<int32_t*>(scratch_ + at_.pos); }

  // Query i of the block is head i % group of row i / group, so that a panel spans few positions.
  int64_t QueryRow(int64_t query) const {  // in [n_rows, n_heads]
    return (first_row_ + query / at_.group) * a_.n_heads + kv_head_ * at_.group + query % at_.group;
  }

  void Start() {
    const int64_t n = panels_ * at_.lanes;
    std::fill_n(Floats(at_.o), n * a_.kv.dv, 0.0f);
    std::fill_n(Floats(at_.top), n, kNoTop);
    std::fill_n(Floats(at_.sum), n, 0.0f);
    std::fill_n(Floats(at_.norm), n, 0.0f);
    for (int64_t i = 0; i < n; ++i) {  // lanes past the last query repeat its position
      Pos()[i] = a_.rows[first_row_ + std::min(i, queries_ - 1) / at_.group].pos;
    }
  }

  void PackQueries(const float* q) {
    const int64_t dk = a_.kv.dk;
    const float scale = a_.softcap > 0 ? a_.scale : a_.scale * kLog2E;
    for (int64_t p = 0; p < panels_; ++p) {
      const int64_t n = std::min(at_.lanes, queries_ - p * at_.lanes);
      for (int64_t i = 0; i < n; ++i) {
        float* row = Floats(at_.rows + i * at_.ld_row);
        vector_.scale(q + QueryRow(p * at_.lanes + i) * dk, dk, scale, row);
        if (kernels_.pack == 2) vector_.to_bf16(row, dk, reinterpret_cast<Bf16*>(row));
        std::fill(row + dk / kernels_.pack, row + at_.q_words, 0.0f);
      }
      vector_.transpose(Words(at_.rows), at_.ld_row, n, at_.q_words,
                        Words(at_.q + p * at_.q_words * at_.lanes), at_.lanes);
    }
  }

  void Walk(const PlanSegment& segment) {
    const int32_t min_pos = Pos()[0];
    const int32_t max_pos = Pos()[queries_ - 1];
    const int64_t begin =
        std::max(0, segment.bounds != nullptr ? segment.bounds[2 * seq_] : segment.begin);
    const int64_t limit = segment.bounds != nullptr ? segment.bounds[2 * seq_ + 1] : segment.end;
    const int64_t end = std::min<int64_t>(limit, int64_t{max_pos} + 1);
    const int64_t size = kernels_.tile_tokens;
    int64_t low = begin;
    if (segment.window > 0) low = std::max(low, int64_t{min_pos} + 1 - segment.window);
    if (low >= end) return;
    for (int64_t tile = low / size; tile * size < end; ++tile) {
      const int64_t first = std::max(begin, tile * size);
      const int64_t last = std::min(end, (tile + 1) * size);
      if (first >= last) continue;
      LoadTile(first, last, low);
      const int64_t next = std::min(end - last, size);
      AttendTile tiles[kBatch];
      for (int64_t p = 0; p < panels_;) {
        const int64_t from = p;
        int64_t n = 0;
        for (; p < panels_ && n < kBatch; ++p)
          n += MakeTile(segment.window, p, first, last, tiles[n]);
        if (n == 0) continue;
        const int64_t of = p - from;
        kernels_.attend(tiles, n, [&](int64_t i) {
          const int64_t a = from + of * i / n;
          const int64_t b = from + of * (i + 1) / n;
          Fetch(last + next * a / panels_, last + next * b / panels_);
        });
      }
    }
  }

  // Calls body(index in the tile, K, V) for tokens [first, last): those of the task's head. Tokens
  // before `low` have no weight and may lie nowhere: token `low` stands for them.
  template <typename Body>
  void ForEachRow(int64_t first, int64_t last, int64_t low, const Body& body) const {
    const KvView& kv = a_.kv;
    const int32_t table = a_.seqs[seq_].table_off;
    for (int64_t t = first; t < last;) {
      const bool before = t < low;
      const int64_t stop =
          std::min(last, before ? low : (t / kv.block_tokens + 1) * kv.block_tokens);
      const int64_t row = kv.RowIndex(table, std::max(t, low));
      const std::byte* k = kv.k.Head(row, place_);
      const std::byte* v = kv.v.Head(row, place_);
      for (; t < stop; ++t) {
        body(t - first, k, v);
        if (before) continue;
        k += kv.k.row_bytes;
        v += kv.v.row_bytes;
      }
    }
  }

  // Asks for K and V of tokens [first, last), which the next tile reads.
  void Fetch(int64_t first, int64_t last) const {
    const KvView& kv = a_.kv;
    ForEachRow(first, last, first, [&](int64_t, const std::byte* k, const std::byte* v) {
      const int64_t k_bytes = KvHeadBytes(kv.k.dtype, kv.dk);
      const int64_t v_bytes = KvHeadBytes(kv.v.dtype, kv.dv);
      for (int64_t b = 0; b < k_bytes; b += 64) __builtin_prefetch(k + b, 0, 2);
      for (int64_t b = 0; b < v_bytes; b += 64) __builtin_prefetch(v + b, 0, 2);
    });
  }

  // n values of K or V as f32.
  void ToF32(const KvPlane& plane, const std::byte* from, int64_t n, float* out) const {
    if (InBlocks(plane.dtype)) {
      vector_.blocks_to_f32(plane.dtype, from, from + plane.ToScales(place_), n, out);
    } else {
      vector_.to_f32(plane.dtype, from, n, out);
    }
  }

  // The same as bf16.
  void ToBf16(const KvPlane& plane, const std::byte* from, int64_t n, uint32_t* out) const {
    if (plane.dtype == DType::kBF16) {
      std::memcpy(out, from, static_cast<size_t>(n) * sizeof(Bf16));
      return;
    }
    float* f32 = Floats(at_.rows + 2 * at_.ld_row);
    ToF32(plane, from, n, f32);
    vector_.to_bf16(f32, n, reinterpret_cast<Bf16*>(out));
  }

  void LoadTile(int64_t first, int64_t last, int64_t low) {
    const KvView& kv = a_.kv;
    if (kernels_.pack_rows != nullptr) {
      AttendRows rows;
      const bool blocks = InBlocks(kv.k.dtype);
      rows.dtype = blocks ? DType::kBF16 : kv.k.dtype;
      rows.dk = kv.dk;
      rows.dv = kv.dv;
      ForEachRow(first, last, low, [&](int64_t j, const std::byte* k, const std::byte* v) {
        if (blocks) {
          uint32_t* to = Words(at_.tokens + rows.n * (kv.dk + kv.dv) / 2);
          ToBf16(kv.k, k, kv.dk, to);
          ToBf16(kv.v, v, kv.dv, to + kv.dk / 2);
          k = reinterpret_cast<const std::byte*>(to);
          v = reinterpret_cast<const std::byte*>(to + kv.dk / 2);
        }
        rows.k[rows.n] = k;
        rows.v[rows.n] = v;
        if (++rows.n < rows.kMost && first + j != last - 1) return;
        kernels_.pack_rows(rows, j + 1 - rows.n, Words(at_.k), Words(at_.v));
        rows.n = 0;
      });
      return;
    }
    if (kernels_.pack == 2) {
      const Bf16* even = nullptr;  // V of the last token, when it is not paired yet
      ForEachRow(first, last, low, [&](int64_t j, const std::byte* k, const std::byte* values) {
        uint32_t* key = Words(at_.k + j * at_.ld_k);
        ToBf16(kv.k, k, kv.dk, key);
        std::fill(key + kv.dk / 2, key + at_.q_words, 0u);
        const auto* v = reinterpret_cast<const Bf16*>(values);
        if (kv.v.dtype != DType::kBF16) {
          uint32_t* converted = Words(at_.rows + j % 2 * at_.ld_row);
          ToBf16(kv.v, values, kv.dv, converted);
          v = reinterpret_cast<const Bf16*>(converted);
        }
        if (j % 2 != 0) {
          vector_.pair(even, v, kv.dv, Words(at_.v + j / 2 * at_.ld_v));
        } else if (first + j == last - 1) {  // no partner: its weight is zero
          vector_.pair(v, v, kv.dv, Words(at_.v + j / 2 * at_.ld_v));
        }
        even = v;
      });
      return;
    }
    ForEachRow(first, last, low, [&](int64_t j, const std::byte* k, const std::byte* v) {
      ToF32(kv.k, k, kv.dk, Floats(at_.k) + j * at_.ld_k);
      ToF32(kv.v, v, kv.dv, Floats(at_.v) + j * at_.ld_v);
    });
  }

  // A panel's part of tokens [first, last); false when it reads none of them.
  bool MakeTile(int32_t window, int64_t panel, int64_t first, int64_t last,
                AttendTile& tile) const {
    const int64_t lane = panel * at_.lanes;
    const int64_t min_pos = Pos()[lane];
    const int64_t max_pos = Pos()[lane + at_.lanes - 1];
    last = std::min(last, max_pos + 1);
    if (first >= last) return false;
    if (window > 0 && last - 1 <= min_pos - window) return false;
    tile = {
        .q = Words(at_.q + lane * at_.q_words),
        .o = Floats(at_.o + lane * a_.kv.dv),
        .top = Floats(at_.top + lane),
        .sum = Floats(at_.sum + lane),
        .norm = Floats(at_.norm + lane),
        .pos = Pos() + lane,
        .k = Words(at_.k),
        .v = Words(at_.v),
        .logits = Floats(at_.logits),
        .ld_k = at_.ld_k,
        .ld_v = at_.ld_v,
        .dk = a_.kv.dk,
        .dv = a_.kv.dv,
        .first = static_cast<int32_t>(first),
        .tokens = static_cast<int32_t>(last - first),
        .window = window,
        .lse = a_.lse != nullptr,
        .masked = last - 1 > min_pos || (window > 0 && first <= max_pos - window),
        .cap = a_.softcap,
    };
    return true;
  }

  void Finish() {
    const int64_t dv = a_.kv.dv;
    for (int64_t p = 0; p < panels_; ++p) {
      const int64_t n = std::min(at_.lanes, queries_ - p * at_.lanes);
      float* rows = Floats(at_.rows);
      vector_.transpose(Words(at_.o + p * at_.lanes * dv), at_.lanes, dv, n,
                        reinterpret_cast<uint32_t*>(rows), dv);
      for (int64_t i = 0; i < n; ++i) {
        const int64_t query = p * at_.lanes + i;
        const float sum = Floats(at_.sum)[query];
        const float norm = kernels_.norm ? Floats(at_.norm)[query] : sum;
        vector_.scale(rows + i * dv, dv, norm > 0 ? 1 / norm : 0.0f, a_.o + QueryRow(query) * dv);
        if (a_.lse == nullptr) continue;
        a_.lse[QueryRow(query)] = sum > 0 ? (Floats(at_.top)[query] + std::log2(sum)) * kLn2
                                          : -std::numeric_limits<float>::infinity();
      }
    }
  }

  const prefill::VectorKernels& vector_;
  const AttendArgs& a_;
  const AttendKernels& kernels_;
  const Layout& at_;
  float* const scratch_;
  int32_t seq_ = 0;
  int32_t kv_head_ = 0;
  int32_t place_ = 0;  // where K/V lie
  int64_t first_row_ = 0;
  int64_t queries_ = 0;
  int64_t panels_ = 0;
};

bool PrefillAttendSupports(const AttendArgs& args) {
  const auto* begin = args.plan.segments.data();
  return args.score == ScoreKind::kNone && args.o != nullptr && args.lse_in == nullptr &&
         args.kv.dk % 8 == 0 && args.kv.dv % 8 == 0 && args.n_heads % args.kv.n_kv_heads == 0 &&
         std::all_of(begin, begin + args.plan.n_segments,
                     [](const PlanSegment& s) { return s.kind == SegmentKind::kRange; });
}

PrefillAttention::PrefillAttention(ThreadPool& pool, GemmPrecision precision,
                                   const AttendKernels* kernels)
    : pool_(pool),
      precision_(precision),
      vector_(prefill::BestVectorKernels()),
      amx_(kernels != nullptr ? kernels : prefill::AmxAttendKernels()),
      bf16_(prefill::Bf16AttendKernels()) {}

const AttendKernels& PrefillAttention::KernelsFor(const KvView& kv) const {
  if (precision_ == GemmPrecision::kFull || kv.k.dtype == DType::kF32) return vector_.attend;
  if (amx_ != nullptr && kv.dv % prefill::kAmxSide == 0 && kv.dv <= prefill::kAmxMostValues) {
    return *amx_;
  }
  return bf16_ != nullptr ? *bf16_ : vector_.attend;
}

Status PrefillAttention::Reserve(const AttendArgs& args) {
  const Layout layout(KernelsFor(args.kv), args);
  const size_t bytes = static_cast<size_t>(pool_.size() * layout.words) * sizeof(float);
  if (bytes > scratch_.size()) {
    OKV_ASSIGN_OR_RETURN(scratch_, Pages::Reserve(bytes));
  }
  return {};
}

std::string PrefillAttention::Describe(const KvView& kv) const {
  const AttendKernels& kernels = KernelsFor(kv);
  return &kernels == &vector_.attend ? fmt::format("f32 ({})", vector_.name) : kernels.name;
}

void PrefillAttention::Run(const AttendArgs& args, int32_t seq) {
  const AttendKernels& kernels = KernelsFor(args.kv);
  const Layout layout(kernels, args);
  OKV_CHECK(static_cast<size_t>(pool_.size() * layout.words) * sizeof(float) <= scratch_.size(),
            "attention of {} heads of {} was not reserved", args.n_heads, args.kv.dk);
  const SeqMeta& meta = args.seqs[seq];
  const int32_t n_kv_heads = args.KvHeads();
  // Few rows are cut finer, so that every thread has a few tasks to balance with.
  int64_t block_rows = layout.block_rows;
  const auto cut = [&] {
    const int64_t tasks = DivUp(meta.q_len, block_rows) * n_kv_heads;
    const bool small = block_rows * layout.group < 2 * kernels.min_queries;
    return block_rows * layout.group >= 2 * kMinQueries &&
           tasks < (small ? 1 : 4) * int64_t{pool_.size()};
  };
  while (pool_.size() > 1 && cut()) block_rows /= 2;
  const int64_t blocks = DivUp(meta.q_len, block_rows);
  // The longest tasks (the last rows) first: what is left at the end is short.
  pool_.ParallelFor(blocks * n_kv_heads, 1, [&](int64_t begin, int64_t end, int thread) {
    Task task(*this, args, kernels, layout,
              reinterpret_cast<float*>(scratch_.data()) + thread * layout.words);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = (blocks - 1 - i / n_kv_heads) * block_rows;
      task.Run(seq, meta.q_begin + first, std::min(block_rows, meta.q_len - first),
               args.KvHead(static_cast<int32_t>(i % n_kv_heads)));
    }
  });
}

}  // namespace omnikv
