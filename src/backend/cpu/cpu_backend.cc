#include "backend/cpu/cpu_backend.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "backend/cpu/attend.h"
#include "backend/cpu/expected.h"
#include "backend/cpu/isa.h"
#include "backend/cpu/kept_rows.h"
#include "backend/cpu/matvec.h"
#include "backend/cpu/merge_states.h"
#include "backend/cpu/prefill/attend.h"
#include "backend/cpu/prefill/gemm.h"
#include "backend/cpu/rows.h"
#include "backend/cpu/score.h"
#include "backend/cpu/select.h"
#include "backend/cpu/values.h"
#include "backend/locate_rows.h"
#include "backend/slots_on_host.h"
#include "base/check.h"
#include "base/memory.h"
#include "base/round.h"

namespace omnikv {
namespace {

constexpr int64_t kLastBytes = 64 << 10;  // of weights: the least that a thread takes at a time
constexpr int64_t kRowGrain = 8 << 10;    // values of a row op that are worth a thread's start

// From so many rows on, weights and K/V are worth converting a panel at a time (prefill/).
constexpr int32_t kPrefillRows = 16;

// From so many on, rounding to bf16 saves time (GemmPrecision::kFast). Fewer rows wait for the
// weights more than for the products, and so a short prompt is as exact as decoding.
constexpr int32_t kFastRows = 64;

int64_t Padded(int64_t n) {
  return RoundUp(n, kPackMultiple);
}

// Scratch is carved from the front: what an op takes is counted when it is reserved.
class Carver {
 public:
  explicit Carver(float* base) : base_(base) {}

  float* Take(int64_t n) {
    float* p = base_ + used_;
    used_ += RoundUp(n, 16);
    return p;
  }
  int64_t used() const { return used_; }

 private:
  float* base_;
  int64_t used_ = 0;
};

// The scratch of each op: the same carving with no memory behind it gives its size.
struct QkvScratch {
  QkvScratch(const NormQkvRopeAppendArgs& a, Carver& c)
      : h(c.Take(a.n_rows * Padded(a.in.d))),
        pairs(c.Take(a.n_rows * Padded(a.in.d))),
        k(c.Take(a.n_rows * a.wk.n_out)),
        v(c.Take(a.n_rows * a.wv.n_out)) {}
  float *h, *pairs, *k, *v;
};

struct InputScratch {
  InputScratch(int64_t n_rows, int64_t n_in, Carver& c)
      : h(c.Take(n_rows * Padded(n_in))), pairs(c.Take(n_rows * Padded(n_in))) {}
  float *h, *pairs;
};

struct LogitsScratch {
  LogitsScratch(const NormLogitsArgs& a, int threads, Carver& c)
      : unused(c.Take(threads * Padded(a.in.d))), in(a.n_out, a.in.d, c) {}
  float* unused;
  InputScratch in;
};

}  // namespace

struct CpuBackend::Impl {
  explicit Impl(const CpuOptions& options)
      : isa(FindIsa(options.isa)),
        pool(options.threads > 0 ? options.threads : PhysicalCores(), options.pin, options.spin),
        rows(GetRowKernels(isa)),
        matvec(GetMatvecKernels(isa)),
        sum_values(GetSumValuesKernel(isa)),
        attend(pool, isa),
        select(pool, isa),
        score(pool, isa),
        expected(pool, isa),
        many{PrefillGemm(pool, options.precision), PrefillAttention(pool, options.precision)},
        few{PrefillGemm(pool, GemmPrecision::kFull), PrefillAttention(pool, GemmPrecision::kFull)} {
  }

  const Isa isa;
  ThreadPool pool;
  const RowKernels& rows;
  const MatvecKernels& matvec;
  const SumValuesKernel sum_values;
  CpuAttend attend;
  CpuSelect select;
  CpuScore score;
  CpuExpected expected;
  struct Prefill {
    PrefillGemm gemm;
    PrefillAttention attend;
  };
  Prefill many;  // kFastRows and more
  Prefill few;
  Prefill& For(int64_t n_rows) { return n_rows >= kFastRows ? many : few; }
  Pages scratch;
  Status lacking;  // the first of what an op could not be given

  void Lacks(const Status& status) {
    if (lacking.ok()) lacking = status;
  }
  float* Scratch() { return reinterpret_cast<float*>(scratch.data()); }

  void GrowScratch(int64_t floats) {
    const auto bytes = static_cast<size_t>(floats) * sizeof(float);
    if (bytes <= scratch.size()) return;
    auto pages = Pages::Reserve(bytes);
    if (pages.ok()) {
      scratch = std::move(*pages);
    } else {
      Lacks(pages.status());
    }
  }

  // Rows of activations as matvec kernels want them, packed for bf16 weights at most once.
  class Inputs {
   public:
    Inputs(Impl& impl, const float* x, int64_t n_rows, int64_t n_in, float* padded, float* pairs)
        : impl_(impl), x_(x), n_rows_(n_rows), n_in_(n_in), padded_(padded), pairs_(pairs) {}

    PackedRows For(DType format) {
      const bool bf16 = format == DType::kBF16;
      const int64_t ld = Padded(n_in_);
      const auto m = static_cast<int32_t>(n_rows_);
      if (!bf16 && ld == n_in_) return {.x = x_, .ld = ld, .m = m};
      float* out = bf16 ? pairs_ : padded_;
      bool& done = bf16 ? packed_pairs_ : packed_;
      if (!done) {
        const auto pack = [&](int64_t begin, int64_t end, int) {
          for (int64_t r = begin; r < end; ++r) {
            impl_.matvec.pack(format, x_ + r * n_in_, n_in_, ld, out + r * ld);
          }
        };
        impl_.pool.ParallelFor(n_rows_, std::max<int64_t>(1, 2 * kRowGrain / ld), pack);
      }
      done = true;
      return {.x = out, .ld = ld, .m = m};
    }

   private:
    Impl& impl_;
    const float* x_;
    int64_t n_rows_;
    int64_t n_in_;
    float* padded_;  // must not overlap x: rows widen
    float* pairs_;
    bool packed_ = false;
    bool packed_pairs_ = false;
  };

  // Calls body(begin, end) for pieces of [0, n) rows of weights: large ones first, for long streams
  // of memory, then smaller ones, for threads to end together.
  template <typename Body>
  void ForWeights(int64_t n, int64_t row_bytes, const Body& body) {
    const int64_t least = RoundUp(std::max<int64_t>(1, kLastBytes / row_bytes), 4);
    const int64_t threads = pool.size();
    if (threads == 1 || n * row_bytes < kLastBytes) return body(0, n);
    std::atomic<int64_t> next{0};
    pool.Share([&](int) {
      int64_t begin = next.load(std::memory_order_relaxed);
      while (begin < n) {
        const int64_t part = RoundUp((n - begin) * 2 / (3 * threads), 4);
        const int64_t end =
            std::min(n, begin + std::clamp(part, std::min(least, n / threads + 1), n));
        if (!next.compare_exchange_weak(begin, end, std::memory_order_relaxed)) continue;
        body(begin, end);
        begin = next.load(std::memory_order_relaxed);
      }
    });
  }

  // Runs the prologue of rows [0, n_rows); h [n_rows, d].
  void Prologue(const Residual& in, int32_t n_rows, float* h) {
    pool.ParallelFor(n_rows, std::max<int64_t>(1, kRowGrain / in.d),
                     [&](int64_t begin, int64_t end, int) {
                       for (int64_t r = begin; r < end; ++r) {
                         rows.prologue(in, static_cast<int32_t>(r), h + r * in.d);
                       }
                     });
  }

  void Execute(const EmbedArgs& a) {
    pool.ParallelFor(a.n_rows, std::max<int64_t>(1, 2 * kRowGrain / a.table.n_in),
                     [&](int64_t begin, int64_t end, int) {
                       for (int64_t r = begin; r < end; ++r) rows.embed(a, static_cast<int32_t>(r));
                     });
  }

  void Execute(const RopeTableArgs& a) {
    const int64_t grain = std::max<int64_t>(1, 256 / std::max(a.n_freq, 1));
    pool.ParallelFor(a.n_rows, grain, [&](int64_t begin, int64_t end, int) {
      for (int64_t r = begin; r < end; ++r) {
        for (int32_t i = 0; i < a.n_freq; ++i) {
          const float angle = static_cast<float>(a.rows[r].pos) * a.inv_freq[i];
          float* out = a.cos_sin + (r * a.n_freq + i) * 2;
          out[0] = static_cast<float>(std::cos(static_cast<double>(angle))) * a.magnitude;
          out[1] = static_cast<float>(std::sin(static_cast<double>(angle))) * a.magnitude;
        }
      }
    });
  }

  void Execute(const NormQkvRopeAppendArgs& a) {
    Carver carver(Scratch());
    const QkvScratch s(a, carver);
    Prologue(a.in, a.n_rows, s.h);
    if (a.n_rows >= kPrefillRows) {
      const LinearOut outs[3] = {{a.wq, a.bq, a.q, a.wq.n_out},
                                 {a.wk, a.bk, s.k, a.wk.n_out},
                                 {a.wv, a.bv, s.v, a.wv.n_out}};
      For(a.n_rows).gemm.Linear(s.h, a.n_rows, a.in.d, outs);
    } else {
      DecodeQkv(a, s, carver);
    }
    const int64_t total = a.wq.n_out + a.wk.n_out + a.wv.n_out;
    pool.ParallelFor(
        a.n_rows, std::max<int64_t>(1, kRowGrain / total), [&](int64_t begin, int64_t end, int) {
          for (int64_t r = begin; r < end; ++r) {
            rows.finish_qkv(a, static_cast<int32_t>(r), s.k + r * a.wk.n_out, s.v + r * a.wv.n_out);
          }
        });
  }

  void DecodeQkv(const NormQkvRopeAppendArgs& a, const QkvScratch& s, Carver& carver) {
    float* padded = carver.Take(a.n_rows * Padded(a.in.d));
    Inputs inputs(*this, s.h, a.n_rows, a.in.d, padded, s.pairs);
    // The three matrices one under the other.
    struct Part {
      const WeightRef& w;
      const float* bias;
      float* y;
      PackedRows x;
    };
    const Part parts[3] = {{a.wq, a.bq, a.q, inputs.For(a.wq.format)},
                           {a.wk, a.bk, s.k, inputs.For(a.wk.format)},
                           {a.wv, a.bv, s.v, inputs.For(a.wv.format)}};
    const int64_t total = a.wq.n_out + a.wk.n_out + a.wv.n_out;
    ForWeights(total, a.wq.row_bytes, [&](int64_t begin, int64_t end) {
      for (const Part& p : parts) {
        if (begin < std::min(end, p.w.n_out)) {
          matvec.rows(p.w, p.x, p.bias, begin, std::min(end, p.w.n_out), p.y, p.w.n_out);
        }
        begin = std::max<int64_t>(0, begin - p.w.n_out);
        end -= p.w.n_out;
        if (end <= 0) return;
      }
    });
  }

  void Execute(const AttendArgs& a) {
    if (a.n_rows >= kPrefillRows && PrefillAttendSupports(a)) {
      for (int32_t r = 0; r < a.n_rows;) {  // rows of a sequence follow one another
        const SeqMeta& seq = a.seqs[a.rows[r].seq];
        if (seq.q_len >= kPrefillRows) {
          For(seq.q_len).attend.Run(a, a.rows[r].seq);
        } else {
          attend.Run(a, r, r + seq.q_len, Scratch());
        }
        r += seq.q_len;
      }
      return;
    }
    attend.Run(a, 0, a.n_rows, Scratch());
    if (a.score != ScoreKind::kHeadMax) return;
    // Tokens outside the range were not scored.
    const PlanSegment& range = a.plan.segments[0];
    for (int32_t r = 0; r < a.n_rows; ++r) {
      const RowMeta row = a.rows[r];
      const int32_t begin = range.bounds != nullptr ? range.bounds[2 * row.seq] : range.begin;
      const int32_t end = range.bounds != nullptr ? range.bounds[2 * row.seq + 1] : range.end;
      float* scores = a.scores + r * a.score_stride;
      const float none = -std::numeric_limits<float>::infinity();
      std::fill(scores, scores + std::min(begin, row.pos + 1), none);
      if (end <= row.pos) std::fill(scores + std::max(end, 0), scores + row.pos + 1, none);
    }
  }

  void Execute(const LinearArgs& a) {
    if (a.n_rows >= kPrefillRows) {
      return For(a.n_rows).gemm.Linear(a.x, a.n_rows, a.w.n_in, a.w, a.bias, a.y, a.w.n_out);
    }
    Carver carver(Scratch());
    const InputScratch s(a.n_rows, a.w.n_in, carver);
    Inputs inputs(*this, a.x, a.n_rows, a.w.n_in, s.h, s.pairs);
    const PackedRows x = inputs.For(a.w.format);
    ForWeights(a.w.n_out, a.w.row_bytes, [&](int64_t begin, int64_t end) {
      matvec.rows(a.w, x, a.bias, begin, end, a.y, a.w.n_out);
    });
  }

  void Execute(const NormGatedFfnArgs& a) {
    Carver carver(Scratch());
    const InputScratch s(a.n_rows, a.in.d, carver);
    Prologue(a.in, a.n_rows, s.h);
    if (a.n_rows >= kPrefillRows) {
      return For(a.n_rows).gemm.GatedFfn(s.h, a.n_rows, a.in.d, a.gate, a.up, a.gate_bias,
                                         a.up_bias, a.act, a.out, a.gate.n_out);
    }
    float* padded = carver.Take(a.n_rows * Padded(a.in.d));
    Inputs inputs(*this, s.h, a.n_rows, a.in.d, padded, s.pairs);
    const PackedRows gate = inputs.For(a.gate.format);
    const PackedRows up = inputs.For(a.up.format);
    ForWeights(a.gate.n_out, a.gate.row_bytes + a.up.row_bytes,
               [&](int64_t begin, int64_t end) { matvec.gated(a, gate, up, begin, end); });
  }

  void Execute(const NormLogitsArgs& a) {
    Carver carver(Scratch());
    const LogitsScratch s(a, pool.size(), carver);
    float* padded = carver.Take(a.n_out * Padded(a.in.d));
    if (a.out_rows == nullptr) {
      Prologue(a.in, a.n_rows, s.in.h);
    } else {
      // Every row's residual is updated, the chosen rows are normed.
      Residual chosen = a.in;
      if (a.in.y != nullptr) {
        pool.ParallelFor(a.n_rows, std::max<int64_t>(1, kRowGrain / a.in.d),
                         [&](int64_t begin, int64_t end, int thread) {
                           for (int64_t r = begin; r < end; ++r) {
                             rows.prologue(a.in, static_cast<int32_t>(r),
                                           s.unused + thread * Padded(a.in.d));
                           }
                         });
        chosen.y = nullptr;
      }
      for (int32_t o = 0; o < a.n_out; ++o) {
        rows.prologue(chosen, a.out_rows[o], s.in.h + int64_t{o} * a.in.d);
      }
    }
    if (a.n_out == 0) return;
    const int64_t vocab = a.head.n_out;
    if (a.n_out >= kPrefillRows) {
      For(a.n_out).gemm.Linear(s.in.h, a.n_out, a.in.d, a.head, a.bias, a.logits, vocab);
      if (a.scale == 1 && a.softcap <= 0) return;
      pool.ParallelFor(a.n_out, 1, [&](int64_t begin, int64_t end, int) {
        rows.scale_softcap(a.logits + begin * vocab, (end - begin) * vocab, a.scale, a.softcap);
      });
      return;
    }
    Inputs inputs(*this, s.in.h, a.n_out, a.in.d, padded, s.in.pairs);
    const PackedRows x = inputs.For(a.head.format);
    ForWeights(vocab, a.head.row_bytes, [&](int64_t begin, int64_t end) {
      matvec.rows(a.head, x, a.bias, begin, end, a.logits, vocab);
      if (a.scale == 1 && a.softcap <= 0) return;
      for (int32_t o = 0; o < a.n_out; ++o) {
        rows.scale_softcap(a.logits + o * vocab + begin, end - begin, a.scale, a.softcap);
      }
    });
  }

  void Execute(const ScoreReduceArgs& a) { select.Run(a); }
  void Execute(const ScoreArgs& a) { score.Run(a, Scratch()); }
  void Execute(const BlockSummaryArgs& a) { score.Run(a); }
  void Execute(const BlockScoreArgs& a) { score.Run(a); }
  void Execute(const KeyScoreArgs& a) { score.Run(a, Scratch()); }
  void Execute(const IndexKeysArgs& a) { score.Run(a); }
  void Execute(const IndexScoreArgs& a) { score.Run(a, Scratch()); }
  void Execute(const RescoreArgs& a) { score.Run(a, Scratch()); }
  void Execute(const QueryMomentsArgs& a) { expected.Run(a, Scratch()); }
  void Execute(const ExpectedScoreArgs& a) { expected.Run(a, Scratch()); }
  void Execute(const AgedScoresArgs& a) { score.Run(a); }
  void Execute(const PoolArgs& a) { score.Run(a); }
  void Execute(const PlanRangeArgs& a) { CpuPlanRange(a); }
  void Execute(const NextTokenArgs& a) {
    const auto n = static_cast<size_t>(a.sample != nullptr ? a.vocab : 0);
    CpuNextToken(a, {reinterpret_cast<SampleCandidate*>(Scratch()), n});
  }
  void Execute(const WorkingSetArgs& a) { WorkingSetOnHost(a); }
  void Execute(const AverageScoresArgs& a) { AverageScoresOnHost(a); }
  void Execute(const FetchRowsArgs& a) { FetchRowsOnHost(a); }
  void Execute(const ListPiecesArgs& a) { ListPiecesOnHost(a); }
  void Execute(const PieceTableArgs& a) { PieceTableOnHost(a); }
  void Execute(const TopKArgs& a) { select.Run(a, reinterpret_cast<uint32_t*>(Scratch())); }
  void Execute(const MergeStatesArgs& a) { CpuMergeStates(a, pool); }
  void Execute(const PickLogitsArgs& a) { CpuPickLogits(a, pool); }
  void Execute(const SumValuesArgs& a) { CpuSumValues(a, sum_values, pool, Scratch()); }
  void Execute(const PickHeadsArgs& a) { CpuPickHeads(a, pool); }
  void Execute(const StoreRowsArgs& a) { CpuStoreRows(a, pool); }
  void Execute(const LocateRowsArgs& a) { LocateRowsOnHost(a); }
  void Execute(const CompactArgs& a) { CpuCompact(a, pool); }
  void Execute(const EvictArgs& a) { CpuEvict(a, pool); }
  void Execute(const UndoEvictArgs& a) { CpuUndoEvict(a); }
  void Execute(const CustomArgs& a) { a.kernels->cpu(a.args.data(), pool); }

  // Weights that a product of so many rows needs memory for.
  void ReserveGemm(int32_t n_rows, std::initializer_list<const WeightRef*> weights) {
    if (n_rows < kPrefillRows) return;
    for (const WeightRef* w : weights) {
      Lacks(For(n_rows).gemm.Reserve(n_rows, *w));
    }
  }

  // Floats of scratch.
  int64_t Need(const EmbedArgs&) { return 0; }
  int64_t Need(const RopeTableArgs&) { return 0; }
  int64_t Need(const NormQkvRopeAppendArgs& a) {
    ReserveGemm(a.n_rows, {&a.wq, &a.wk, &a.wv});
    Carver carver(nullptr);
    const QkvScratch s(a, carver);
    carver.Take(a.n_rows * Padded(a.in.d));
    return carver.used();
  }
  int64_t Need(const AttendArgs& a) {
    if (a.n_rows >= kPrefillRows && PrefillAttendSupports(a)) {
      Lacks(few.attend.Reserve(a));
      if (a.n_rows >= kFastRows) Lacks(many.attend.Reserve(a));
    }
    return static_cast<int64_t>(attend.Reserve(a));
  }
  int64_t Need(const LinearArgs& a) {
    ReserveGemm(a.n_rows, {&a.w});
    return NeedInput(a.n_rows, a.w.n_in);
  }
  int64_t Need(const NormGatedFfnArgs& a) {
    ReserveGemm(a.n_rows, {&a.gate, &a.up});
    return NeedInput(a.n_rows, a.in.d);
  }
  int64_t Need(const NormLogitsArgs& a) {
    ReserveGemm(a.n_out, {&a.head});
    return NeedInput(a.n_out, a.in.d) + pool.size() * Padded(a.in.d) + 64;
  }
  int64_t Need(const ScoreReduceArgs&) { return 0; }
  int64_t Need(const ScoreArgs& a) { return score.ScratchFloats(a); }
  int64_t Need(const BlockSummaryArgs&) { return 0; }
  int64_t Need(const BlockScoreArgs&) { return 0; }
  int64_t Need(const KeyScoreArgs& a) { return score.ScratchFloats(a); }
  int64_t Need(const IndexKeysArgs&) { return 0; }
  int64_t Need(const IndexScoreArgs& a) { return score.ScratchFloats(a); }
  int64_t Need(const RescoreArgs& a) { return score.ScratchFloats(a); }
  int64_t Need(const QueryMomentsArgs& a) { return expected.ScratchFloats(a); }
  int64_t Need(const ExpectedScoreArgs& a) { return expected.ScratchFloats(a); }
  int64_t Need(const AgedScoresArgs&) { return 0; }
  int64_t Need(const PoolArgs&) { return 0; }
  int64_t Need(const PlanRangeArgs&) { return 0; }
  int64_t Need(const NextTokenArgs& a) {
    return a.sample != nullptr ? a.vocab * int64_t{sizeof(SampleCandidate) / sizeof(float)} : 0;
  }
  int64_t Need(const WorkingSetArgs&) { return 0; }
  int64_t Need(const AverageScoresArgs&) { return 0; }
  int64_t Need(const FetchRowsArgs&) { return 0; }
  int64_t Need(const ListPiecesArgs&) { return 0; }
  int64_t Need(const PieceTableArgs&) { return 0; }
  int64_t Need(const TopKArgs& a) { return static_cast<int64_t>(select.ScratchWords(a)); }
  int64_t Need(const MergeStatesArgs&) { return 0; }
  int64_t Need(const PickLogitsArgs&) { return 0; }
  int64_t Need(const SumValuesArgs& a) { return pool.size() * SumScratchFloats(a); }
  int64_t Need(const PickHeadsArgs&) { return 0; }
  int64_t Need(const StoreRowsArgs&) { return 0; }
  int64_t Need(const LocateRowsArgs&) { return 0; }
  int64_t Need(const CompactArgs&) { return 0; }
  int64_t Need(const EvictArgs&) { return 0; }
  int64_t Need(const UndoEvictArgs&) { return 0; }
  int64_t Need(const CustomArgs&) { return 0; }

  int64_t NeedInput(int64_t n_rows, int64_t n_in) { return 3 * n_rows * Padded(n_in) + 64; }
};

CpuBackend::CpuBackend(const CpuOptions& options) : impl_(std::make_unique<Impl>(options)) {}
CpuBackend::~CpuBackend() = default;

std::string CpuBackend::Describe() const {
  return fmt::format("{}, {} thread{}, prefill in {}", impl_->isa.name, impl_->pool.size(),
                     impl_->pool.size() == 1 ? "" : "s", impl_->many.gemm.Describe(DType::kBF16));
}

Support CpuBackend::Supports(const Op& op) const {
  if (const Support kv = SupportsKv(op); !kv.ok) return kv;
  if (const auto* a = std::get_if<AttendArgs>(&op)) {
    if (a->kv.k.dtype != a->kv.v.dtype) return {false, "K and V in different formats"};
    if (a->score != ScoreKind::kNone &&
        (a->plan.n_segments != 1 || a->plan.segments[0].kind != SegmentKind::kRange ||
         a->plan.segments[0].window != 0)) {
      return {false, "scores need a plan of one range without a window"};
    }
  }
  if (const auto* a = std::get_if<CustomArgs>(&op)) {
    if (a->kernels->cpu == nullptr) {
      return {false, fmt::format("{} has no CPU kernel", a->kernels->name)};
    }
  }
  return {};
}

ThreadPool& CpuBackend::pool() {
  return impl_->pool;
}

void CpuBackend::Run(const Op& op) {
  std::visit([this](const auto& args) { impl_->Execute(args); }, op);
}

Status CpuBackend::Reserve(const Op& op) {
  impl_->GrowScratch(std::visit([this](const auto& args) { return impl_->Need(args); }, op));
  return std::exchange(impl_->lacking, {});
}

std::unique_ptr<Backend> MakeCpuBackend(const CpuOptions& options) {
  return std::make_unique<CpuBackend>(options);
}

std::vector<std::string> CpuIsas() {
  std::vector<std::string> names;
  for (const Isa& isa : AvailableIsas()) names.emplace_back(isa.name);
  return names;
}

}  // namespace omnikv
