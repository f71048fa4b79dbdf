// Attention of few rows on the card, Llama-3-8B geometry: checked against a plain kernel, then
// timed as a graph of launches over several layers' K/V, more than the cache holds.
// Usage: cuda_attend [--json]. Needs 5 GB of the card. Fails where a result is wrong.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <iterator>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "backend/cuda/kernels/common.cuh"
#include "backend/cuda/launch.h"
#include "backend/kv_format.h"
#include "cuda_bench.cuh"

namespace omnikv::cuda {

namespace {

constexpr int kHeads = 32, kKvHeads = 8, kDim = 128;
constexpr int kContext = 128 * 1024;
constexpr int kBlock = 64;  // tokens
constexpr int kSeqs = 8;    // for one row: as many layers
constexpr int kBlocks = kContext / kBlock;
constexpr int kChosen = 2048;
constexpr int kLaunches = 16;  // in a graph
constexpr int kListSets = 2;   // that launches take in turn
constexpr int kLong = 4;       // contexts that one long context takes, after one another
constexpr double kRowBytes = 2.0 * 2 * kKvHeads * kDim;
constexpr float kScale = 0.088388348f;

std::vector<float> Download(const float* data, size_t n) {
  std::vector<float> values(n);
  CheckLaunch(cudaMemcpy(values.data(), data, 4 * n, cudaMemcpyDefault), "download");
  return values;
}

// Values in [-2, 2).
__global__ void Fill(DType type, std::byte* data, int64_t n) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += step) {
    uint32_t h = static_cast<uint32_t>(i) * 2654435761u;
    h = (h ^ (h >> 15)) * 2246822519u;
    StoreValue(type, data, i, static_cast<float>(static_cast<int32_t>(h) >> 8) * 0x1p-22f);
  }
}

// logits[h][i] of token list[i], or i, for one row. Grid: tokens; a thread a head.
__global__ void PlainLogits(KvView kv, int32_t table_off, const float* q, const int32_t* list,
                            double* logits) {
  const auto i = static_cast<int32_t>(blockIdx.x), h = static_cast<int32_t>(threadIdx.x);
  const std::byte* k = kv.k.Head(kv.RowIndex(table_off, list == nullptr ? i : list[i]), h / 4);
  double dot = 0;
  for (int d = 0; d < kDim; ++d) {
    dot += static_cast<double>(q[h * kDim + d]) * LoadValue(kv.k.dtype, k, d);
  }
  logits[int64_t{h} * gridDim.x + i] = dot * kScale;
}

// Grid: heads; a thread a value of the output.
__global__ void PlainOutput(KvView kv, int32_t table_off, const int32_t* list, int32_t n,
                            const double* logits, float* o, float* lse) {
  const auto h = static_cast<int32_t>(blockIdx.x), d = static_cast<int32_t>(threadIdx.x);
  logits += int64_t{h} * n;
  double top = logits[0], sum = 0, total = 0;
  for (int32_t i = 1; i < n; ++i) top = max(top, logits[i]);
  for (int32_t i = 0; i < n; ++i) {
    const std::byte* v = kv.v.Head(kv.RowIndex(table_off, list == nullptr ? i : list[i]), h / 4);
    const double p = exp(logits[i] - top);
    sum += p;
    total += p * LoadValue(kv.v.dtype, v, d);
  }
  o[h * kDim + d] = static_cast<float>(total / sum);
  if (d == 0) lse[h] = static_cast<float>(top + log(sum));
}

// max |difference| / max |reference|.
double Error(const std::vector<float>& got, const std::vector<float>& want) {
  double worst = 0, top = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    const double delta = std::fabs(static_cast<double>(got[i]) - want[i]);
    worst = delta <= worst ? worst : delta;  // NaN counts
    top = std::max(top, std::fabs(static_cast<double>(want[i])));
  }
  return worst / top;
}

class Bench {
 public:
  Bench(const Device& device, DType type) : device_(device) {
    CheckLaunch(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream");
    std::mt19937 random(1);
    std::vector<int32_t> table(kSeqs * kBlocks);
    std::iota(table.begin(), table.end(), 0);
    std::shuffle(table.begin(), table.end(), random);
    table_ = Upload(table);
    bank_bytes_ = static_cast<size_t>(kRowBytes) * kContext * kSeqs;
    bank_ = Allocate(bank_bytes_);
    Fill<<<1024, 256>>>(type, bank_.get(), static_cast<int64_t>(bank_bytes_ / 2));
    kv_ = MakeKvView(bank_.get(), As<int32_t>(table_), kBlock, type, kKvHeads, kDim, kDim);

    std::vector<SeqMeta> seqs;
    for (int s = 0; s < kSeqs; ++s) seqs.push_back({s, 1, kContext, s * kBlocks, 0});
    for (int s = 0; s < kSeqs; s += kLong) {
      seqs.push_back({s, 1, kLong * kContext, s * kBlocks, 0});
    }
    seqs_ = Upload(seqs);
    std::vector<float> q(kSeqs * kHeads * kDim);
    for (float& v : q) v = std::normal_distribution<float>()(random);
    q_ = Upload(q);
    std::vector<int32_t> lists, all(kContext);
    std::iota(all.begin(), all.end(), 0);
    for (int i = 0; i < kListSets * kSeqs; ++i) {
      std::sample(all.begin(), all.end(), std::back_inserter(lists), kChosen, random);  // in order
    }
    lists_ = Upload(lists);
    counts_ = Upload(std::vector<int32_t>(kSeqs, kChosen));
    rows_ = Allocate(kSeqs * sizeof(RowMeta));
    o_ = Allocate(4 * q.size());
    lse_ = Allocate(4 * kSeqs * kHeads);
    scores_ = Allocate(size_t{4} * kHeads * kContext);
    plain_logits_ = Allocate(size_t{8} * kHeads * kLong * kContext);
    plain_o_ = Allocate(4 * kHeads * kDim);
    plain_lse_ = Allocate(4 * kHeads);
    CheckLaunch(cudaDeviceSynchronize(), "data");
  }
  ~Bench() { cudaStreamDestroy(stream_); }

  // The card's own speed in GB/s: a plain read of all K/V.
  double Ceiling() {
    ceiling_ = 0;
    for (const bool together : {false, true}) {
      const double us = Microseconds(stream_, kLaunches, [&](int) {
        ReadAll(bank_.get(), static_cast<int64_t>(bank_bytes_), together, As<uint32_t>(lse_),
                {.device = &device_, .stream = stream_});
      });
      ceiling_ = std::max(ceiling_, 1e-3 * static_cast<double>(bank_bytes_) / us);
    }
    return ceiling_;
  }

  struct Timing {
    double us = 0, gb_s = 0, error = 0;
    bool right() const { return error < 5e-5; }
  };

  // n tokens of the context (list: n chosen ones) for each of n_rows rows of different sequences.
  // More than kContext tokens: of a long one, for one row.
  Timing Measure(int n_rows, int n, bool list, ScoreKind score = ScoreKind::kNone) {
    const int n_firsts = n > kContext ? kSeqs / kLong : kSeqs;
    std::vector<RowMeta> rows;
    for (int s = 0; s < n_firsts; ++s) {
      rows.push_back({n > kContext ? kSeqs + s : s, (list ? kContext : n) - 1});
    }
    CheckLaunch(
        cudaMemcpy(rows_.get(), rows.data(), rows.size() * sizeof(RowMeta), cudaMemcpyDefault),
        "rows");
    AttendArgs args{.o = As<float>(o_),
                    .lse = As<float>(lse_),
                    .kv = kv_,
                    .plan = AttnPlan::Dense(),
                    .seqs = As<SeqMeta>(seqs_),
                    .n_rows = n_rows,
                    .n_seqs = kSeqs + kSeqs / kLong,
                    .n_heads = kHeads,
                    .scale = kScale,
                    .score = score,
                    .scores = As<float>(scores_),
                    .score_stride = kContext};
    const Memory scratch = Allocate(AttendScratch(args, device_));
    const auto launch = [&](int i) {
      const int first = n_rows == 1 ? i % n_firsts : 0;
      args.q = As<float>(q_) + first * kHeads * kDim;
      args.rows = As<RowMeta>(rows_) + first;
      if (list) {
        args.plan.segments[0] = {
            .kind = SegmentKind::kList,
            .capacity = kChosen,
            .index = As<int32_t>(lists_) + i / kSeqs % kListSets * kSeqs * kChosen,
            .count = As<int32_t>(counts_)};
      }
      Attend(args, {.device = &device_, .stream = stream_, .scratch = scratch.get()});
    };
    const double us = Microseconds(stream_, kLaunches, launch);
    launch(0);
    CheckLaunch(cudaStreamSynchronize(stream_), "attend");
    return {us, 1e-3 * kRowBytes * n * n_rows / us, Check(n, list, score)};
  }

  bool Run(const char* name, int n_rows, int n, bool list, ScoreKind score = ScoreKind::kNone) {
    const Timing r = Measure(n_rows, n, list, score);
    std::printf("%-22s rows %d  %8.2f us  %5.0f GB/s of K/V  %5.1f %%  error %.1e%s\n", name,
                n_rows, r.us, r.gb_s, 100 * r.gb_s / ceiling_, r.error, r.right() ? "" : "  WRONG");
    return r.right();
  }

 private:
  // Of the first row.
  double Check(int n, bool list, ScoreKind score) {
    const int32_t* tokens = list ? As<int32_t>(lists_) : nullptr;
    PlainLogits<<<n, kHeads>>>(kv_, 0, As<float>(q_), tokens, As<double>(plain_logits_));
    PlainOutput<<<kHeads, kDim>>>(kv_, 0, tokens, n, As<double>(plain_logits_), As<float>(plain_o_),
                                  As<float>(plain_lse_));
    CheckLaunch(cudaDeviceSynchronize(), "the plain kernels");
    double error = std::max(
        Error(Download(As<float>(o_), kHeads * kDim), Download(As<float>(plain_o_), kHeads * kDim)),
        Error(Download(As<float>(lse_), kHeads), Download(As<float>(plain_lse_), kHeads)));
    if (score == ScoreKind::kNone) return error;
    const auto tokens_read = static_cast<size_t>(n);
    std::vector<double> logits(kHeads * tokens_read);
    CheckLaunch(
        cudaMemcpy(logits.data(), plain_logits_.get(), 8 * logits.size(), cudaMemcpyDefault),
        "download");
    std::vector<float> want(logits.begin(), logits.end());
    if (score == ScoreKind::kHeadMax) {
      for (size_t i = tokens_read; i < want.size(); ++i) {
        want[i % tokens_read] = std::max(want[i % tokens_read], want[i]);
      }
      want.resize(tokens_read);
    }
    const std::vector<float> got = Download(As<float>(scores_), kHeads * size_t{kContext});
    for (size_t h = 0; h < want.size() / tokens_read; ++h) {
      const auto part = [&](const std::vector<float>& v, size_t stride) {
        const auto begin = v.begin() + static_cast<std::ptrdiff_t>(h * stride);
        return std::vector<float>(begin, begin + n);
      };
      error = std::max(error, Error(part(got, kContext), part(want, tokens_read)));
    }
    return error;
  }

  Device device_;
  cudaStream_t stream_ = nullptr;
  size_t bank_bytes_ = 0;
  KvView kv_;
  Memory bank_, table_, seqs_, rows_, q_, lists_, counts_, o_, lse_, scores_;
  Memory plain_logits_, plain_o_, plain_lse_;
  double ceiling_ = 0;
};

// One row over dense K/V in bf16, the shapes of scripts/gpu_attention_peer.py.
bool RunJson() {
  const NamedDevice card = BenchCard();
  Bench bench(card.device, DType::kBF16);
  const double ceiling = bench.Ceiling();
  std::printf("{\"card\": \"%s\", \"read_gb_s\": %.1f, \"cases\": [", card.name.c_str(), ceiling);
  bool right = true;
  for (const int n : {4096, 32768, kContext, kLong * kContext}) {
    const Bench::Timing r = bench.Measure(1, n, false);
    std::printf(
        "%s{\"kind\": \"decode\", \"context\": %d, \"us\": %.3f, \"gb_s\": %.1f, "
        "\"share_of_read\": %.4f, \"error\": %.2e}",
        n == 4096 ? "" : ", ", n, r.us, r.gb_s, r.gb_s / ceiling, r.error);
    right &= r.right();
  }
  std::printf("]}\n");
  return right;
}

bool RunAll() {
  const Device device = BenchDevice();
  Bench bench(device, DType::kF16);
  std::printf("%d SMs, a plain read: %.0f GB/s\n", device.sm_count, bench.Ceiling());
  bool right = true;
  for (int rows : {1, kSeqs}) {
    for (int n : {4096, 32768, kContext}) {
      right &= bench.Run(("dense " + std::to_string(n)).c_str(), rows, n, false);
    }
    right &= bench.Run("2048 chosen of 131072", rows, kChosen, true);
  }
  right &= bench.Run("dense, maxima", 1, kContext, false, ScoreKind::kHeadMax);
  right &= bench.Run("dense, logits", 1, kContext, false, ScoreKind::kLogits);
  return right;
}

}  // namespace
}  // namespace omnikv::cuda

int main(int argc, char** argv) {
  const bool json = omnikv::cuda::WantsJson(argc, argv);
  return (json ? omnikv::cuda::RunJson() : omnikv::cuda::RunAll()) ? 0 : 1;
}
