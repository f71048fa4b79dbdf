// The ops that score tokens and units of tokens on the card: time and bandwidth of each. Results
// are compared by parity_cuda_test.
// Usage: cuda_score.
#include <algorithm>
#include <cstdio>
#include <numeric>
#include <type_traits>
#include <vector>

#include "backend/kv_format.h"
#include "cuda_bench.cuh"

namespace omnikv::cuda {
namespace {

constexpr int kLaunches = 20;  // in a graph
constexpr int32_t kBlock = 64;
constexpr int32_t kHeads = 32, kDim = 128;
constexpr int32_t kWindowRows = 64;
constexpr int32_t kMaxRows = 2048;

// Everything over one bank of random K and V.
class Bench {
 public:
  explicit Bench(int32_t n_kv_heads) : n_kv_heads_(n_kv_heads) {
    CheckLaunch(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream");
    std::vector<int32_t> table(kTokens / kBlock);
    std::iota(table.begin(), table.end(), 0);
    table_ = Upload(table);
    const int64_t row = KvRowBytes(DType::kBF16, n_kv_heads, kDim, kDim);
    bank_ = Noise(kTokens * row / 2);
    kv_ =
        MakeKvView(bank_.get(), As<int32_t>(table_), kBlock, DType::kBF16, n_kv_heads, kDim, kDim);
    std::vector<float> q(size_t{kMaxRows} * kHeads * kDim);
    for (size_t i = 0; i < q.size(); ++i) q[i] = static_cast<float>(i % 17) / 8 - 1;
    q_ = Upload(q);
    lse_ = Upload(std::vector<float>(size_t{kMaxRows} * kHeads, 12.0f));
    out_ = Allocate(4 * kTokens * static_cast<size_t>(n_kv_heads));
    pooled_ = Allocate(4 * kTokens * static_cast<size_t>(n_kv_heads));
  }
  Bench(const Bench&) = delete;
  ~Bench() { cudaStreamDestroy(stream_); }

  void Score(int n, int n_rows, int32_t unit, bool per_head) {
    const ScoreArgs args{.q = As<float>(q_),
                         .lse = As<float>(lse_),
                         .kv = kv_,
                         .out = As<float>(out_),
                         .stride = n / unit,
                         .n_rows = n_rows,
                         .n_seqs = 1,
                         .n_heads = kHeads,
                         .lists = per_head ? n_kv_heads_ : 1,
                         .unit = unit,
                         .queries = n_rows > 1 ? QueryReduce::kSum : QueryReduce::kLast,
                         .scale = 0.088f};
    Run("Score", args, n, n_rows, unit, per_head, &cuda::Score);
    if (!CanScoreHopper(args, device_)) return;
    scratch_ = Allocate(ScoreHopperScratch(args));
    Run("Score, rounded", args, n, n_rows, unit, per_head, &cuda::ScoreHopper);
  }

  void Summaries(int n, int32_t unit, SummaryKind kind, bool per_head) {
    const DType format = SummaryFormat(kind, DType::kBF16);
    const int64_t rows = kTokens / std::min(unit, kBlock);
    const size_t values = static_cast<size_t>(rows) * static_cast<size_t>(SummaryArrays(kind)) *
                          static_cast<size_t>(n_kv_heads_) * kDim;
    const Memory memory = Allocate(4 * values);
    CheckLaunch(cudaMemset(memory.get(), 0, 4 * values), "fill");
    const StateView summaries{
        .base = As<std::byte>(memory),
        .block_table = As<int32_t>(table_),
        .block_units = std::max(1, kBlock / unit),
        .unit_blocks = std::max(1, unit / kBlock),
        .row_bytes = static_cast<int64_t>(DTypeBytes(
            format, size_t{kDim} * static_cast<size_t>(SummaryArrays(kind) * n_kv_heads_)))};
    for (const int n_rows : {1, 512}) {
      if (per_head || n_rows > n) continue;  // the same in both
      const BlockSummaryArgs args{.kv = kv_,
                                  .out = summaries,
                                  .n_rows = n_rows,
                                  .n_seqs = 1,
                                  .unit = unit,
                                  .kind = kind,
                                  .format = format};
      Run(kind == SummaryKind::kMeanStd ? "BlockSummary mean std" : "BlockSummary", args, n, n_rows,
          unit, per_head, &cuda::BlockSummary);
    }
    if (kind == SummaryKind::kMeanStd) return;  // scores as kMinMax
    const BlockScoreArgs args{.q = As<float>(q_),
                              .summaries = summaries,
                              .out = As<float>(out_),
                              .stride = kTokens / unit,
                              .n_seqs = 1,
                              .n_heads = kHeads,
                              .n_kv_heads = n_kv_heads_,
                              .dk = kDim,
                              .lists = per_head ? n_kv_heads_ : 1,
                              .unit = unit,
                              .kind = kind,
                              .format = format};
    Run(kind == SummaryKind::kMinMax ? "BlockScore bound" : "BlockScore", args, n, 1, unit,
        per_head, &cuda::BlockScore);
  }

  void Pool(int n) {
    const std::vector<int32_t> scores = {n};
    const Memory count = Upload(scores);
    PoolArgs args{.in = As<float>(out_),
                  .out = As<float>(pooled_),
                  .n = As<int32_t>(count),
                  .stride = n,
                  .lists = n_kv_heads_,
                  .n_seqs = 1,
                  .kernel = 7,
                  .kind = PoolKind::kMax};
    const double us = Time([&](int) { cuda::Pool(args, Here()); });
    args.n = scores.data();
    Print("Pool of 7", CostOf(args), us, n, 1, 1, true);
  }

  // One list of each KV head.
  void TopK(int n, int32_t k) {
    const std::vector<int32_t> counts = {n, k};
    const Memory device_counts = Upload(counts);
    const Memory weight = Upload(std::vector<float>{1});
    const Memory seqs = Upload(std::vector<SeqMeta>{{0, 1, n, 0, 0}});
    const auto lists = static_cast<size_t>(n_kv_heads_);
    const Memory index = Allocate(4 * lists * static_cast<size_t>(k));
    const Memory count = Allocate(4 * lists);
    const Memory scores = Noise(2 * kTokens * n_kv_heads_);
    TopKArgs args{.scores = As<float>(scores),
                  .weights = As<float>(weight),
                  .seqs = As<SeqMeta>(seqs),
                  .n_candidates = As<int32_t>(device_counts),
                  .n_pick = As<int32_t>(device_counts) + 1,
                  .index = As<int32_t>(index),
                  .count = As<int32_t>(count),
                  .stride = n,
                  .lists = n_kv_heads_,
                  .capacity = k,
                  .n_seqs = 1};
    const double us = Time([&](int) { cuda::TopK(args, Here()); });
    args.n_candidates = counts.data();
    args.n_pick = counts.data() + 1;
    Print("TopK", CostOf(args), us, n, 1, 1, true);
  }

 private:
  static constexpr int64_t kTokens = 1 << 17;

  Memory Noise(int64_t n) {
    Memory values = Allocate(2 * static_cast<size_t>(n));
    FillNoise(As<uint16_t>(values), n, Here());
    CheckLaunch(cudaStreamSynchronize(stream_), "fill");
    return values;
  }

  Launch Here() const {
    return {.device = &device_, .stream = stream_, .scratch = As<std::byte>(scratch_)};
  }
  double Time(const std::function<void(int)>& launch) {
    return Microseconds(stream_, kLaunches, launch);
  }

  // The last n_rows of n tokens of one sequence.
  template <typename Args>
  void Run(const char* name, Args args, int n, int n_rows, int32_t unit, bool per_head,
           void (*launch)(const Args&, const Launch&)) {
    const std::vector<SeqMeta> seqs = {{0, n_rows, n, 0, 0}};
    const Memory device_seqs = Upload(seqs);
    args.seqs = As<SeqMeta>(device_seqs);
    // Other tokens each time, so that those of a short context are not in the cache.
    const double us = Time([&](int i) {
      Args here = args;
      const int64_t first = i % (kTokens / n) * n;
      if constexpr (std::is_same_v<Args, BlockScoreArgs>) {
        here.summaries.base +=
            first / kBlock * args.summaries.block_units * args.summaries.row_bytes;
      } else {
        here.kv = here.kv.MovedTo(here.kv.k.Head(first, 0));
      }
      launch(here, Here());
    });
    args.seqs = seqs.data();
    Print(name, CostOf(args), us, n, n_rows, unit, per_head);
  }

  void Print(const char* name, const Cost& cost, double us, int n, int n_rows, int32_t unit,
             bool per_head) const {
    const double gb_s = 1e-3 * static_cast<double>(cost.bytes_read) / us;
    std::printf(
        "%-16s %2d KV heads n %7d rows %4d unit %3d %s  %8.2f us  %8.2f MB  %6.0f GB/s %5.1f %%  "
        "%6.1f TFLOP/s\n",
        name, n_kv_heads_, n, n_rows, unit, per_head ? "lists a head" : "one list    ", us,
        1e-6 * static_cast<double>(cost.bytes_read), gb_s,
        1e11 * gb_s / device_.memory_bytes_per_second, 1e-6 * static_cast<double>(cost.flops) / us);
  }

  const Device device_ = BenchCard().device;
  int32_t n_kv_heads_;
  cudaStream_t stream_ = nullptr;
  Memory table_, bank_, q_, lse_, out_, pooled_, scratch_;
  KvView kv_;
};

void RunAll() {
  std::printf("%s; %% of its bandwidth by the clock\n", BenchCard().name.c_str());
  for (const int32_t n_kv_heads : {8, 4}) {
    Bench bench(n_kv_heads);
    for (const int n : {1 << 12, 1 << 15, 1 << 17}) {
      for (const bool per_head : {false, true}) {
        for (const int32_t unit : {1, 16, 128}) bench.Score(n, 1, unit, per_head);
        bench.Score(n, 16, 1, per_head);
        for (const int32_t n_rows : {kWindowRows, kMaxRows}) bench.Score(n, n_rows, 1, per_head);
        for (const int32_t unit : {16, 128}) {
          bench.Summaries(n, unit, SummaryKind::kMean, per_head);
          bench.Summaries(n, unit, SummaryKind::kMinMax, per_head);
          bench.Summaries(n, unit, SummaryKind::kMeanStd, per_head);
        }
      }
      bench.Pool(n);
      bench.TopK(n, 1024);
    }
  }
}

}  // namespace
}  // namespace omnikv::cuda

int main() {
  omnikv::cuda::RunAll();
  return 0;
}
