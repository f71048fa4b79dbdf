// Sampling on the card: NextToken against a choice made on the host, then its time.
// Usage: cuda_sample. Fails where a token is wrong.
#include <cstdio>
#include <random>
#include <vector>

#include "cuda_bench.cuh"

namespace omnikv::cuda {
namespace {

constexpr int kLaunches = 20;  // in a graph

struct Setting {
  const char* name;
  bool greedy;
  SampleMeta meta;
};

const Setting kSettings[] = {
    {"greedy", true, {}},
    {"greedy, penalty", false, {.repeat_penalty = 1.1f}},
    {"temperature", false, {.temperature = 1}},
    {"top-k 40, top-p", false, {.temperature = 0.8, .top_p = 0.95, .top_k = 40}},
    {"top-p", false, {.temperature = 1, .top_p = 0.95}},
    {"flat top-p, penalty", false, {.temperature = 8, .top_p = 0.9, .repeat_penalty = 1.1f}},
    {"all", false, {8, 0.9, 1e-5, 1.1f, 50000, 0}},
};

// Whether all tokens are right; prints the time of a launch.
bool RunCase(const Device& device, cudaStream_t stream, const Setting& setting, int64_t vocab,
             int32_t n_rows) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal(0, 3);
  std::vector<float> logits(static_cast<size_t>(n_rows * vocab));
  for (float& v : logits) v = normal(random);
  const std::vector<uint32_t> seen(static_cast<size_t>(n_rows * SeenWords(vocab)), 0x10010);
  std::vector<SampleMeta> metas(static_cast<size_t>(n_rows), setting.meta);
  for (SampleMeta& m : metas) m.random = random();
  std::vector<RowMeta> rows;
  for (int32_t r = 0; r < n_rows; ++r) rows.push_back({r, 0});
  const Memory device_logits = Upload(logits);
  const Memory device_seen = Upload(seen);
  const Memory device_metas = Upload(metas);
  const Memory device_rows = Upload(rows);
  const Memory seqs = Upload(std::vector<SeqMeta>(rows.size()));
  const Memory tokens = Allocate(4 * rows.size());
  const Memory out = Allocate(4 * rows.size() * kLaunches);
  const Memory step = Upload(std::vector<uint32_t>{0});
  const NextTokenArgs args{.logits = As<float>(device_logits),
                           .tokens = As<int32_t>(tokens),
                           .rows = As<RowMeta>(device_rows),
                           .seqs = As<SeqMeta>(seqs),
                           .sample = setting.greedy ? nullptr : As<SampleMeta>(device_metas),
                           .seen = setting.greedy ? nullptr : As<uint32_t>(device_seen),
                           .out = As<int32_t>(out),
                           .step = As<uint32_t>(step),
                           .vocab = vocab,
                           .ring = kLaunches,
                           .n_rows = n_rows};
  const Memory scratch = Allocate(NextTokenScratch(args, device));
  const Launch launch{.device = &device, .stream = stream, .scratch = scratch.get()};
  // The first launches, which the host repeats.
  for (int i = 0; i < kLaunches; ++i) NextToken(args, launch);
  std::vector<int32_t> got(rows.size() * kLaunches);
  CheckLaunch(cudaStreamSynchronize(stream), "NextToken");
  CheckLaunch(cudaMemcpy(got.data(), args.out, got.size() * 4, cudaMemcpyDeviceToHost), "tokens");
  bool right = true;
  std::vector<SampleCandidate> candidates(static_cast<size_t>(vocab));
  for (int32_t r = 0; r < n_rows; ++r) {
    SampleMeta meta = metas[static_cast<size_t>(r)];
    std::vector<uint32_t> mine(seen.begin() + r * SeenWords(vocab),
                               seen.begin() + (r + 1) * SeenWords(vocab));
    for (int i = 0; i < kLaunches; ++i) {
      const int32_t token =
          SampleToken(logits.data() + r * vocab, vocab, meta, mine.data(), candidates);
      TakeSample(token, meta, mine.data());
      right &= got[static_cast<size_t>(i * n_rows + r)] == token;
    }
  }
  const double us = Microseconds(stream, kLaunches, [&](int) { NextToken(args, launch); });
  std::printf("NextToken %-20s vocab %7lld rows %2d  %7.2f us  %s\n", setting.name,
              static_cast<long long>(vocab), n_rows, us, right ? "right" : "WRONG");
  return right;
}

bool RunAll() {
  const Device device = BenchDevice();
  cudaStream_t stream = nullptr;
  CheckLaunch(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  bool right = true;
  for (const Setting& setting : kSettings) {
    for (const int64_t vocab : {32000, 128256, 262208}) {
      for (const int32_t n_rows : {1, 8}) right &= RunCase(device, stream, setting, vocab, n_rows);
    }
  }
  cudaStreamDestroy(stream);
  return right;
}

}  // namespace
}  // namespace omnikv::cuda

int main() {
  return omnikv::cuda::RunAll() ? 0 : 1;
}
