// cuda_matvec_bench [ROWS...]
//
// The decode products of Llama-3-8B on a card, in bf16 and Q8_0, for 1 to 16 rows (or as many as
// the arguments say): outputs against sums in double, then GB/s of each product and of a chain of
// four layers and the logits, beside what reading the same weights takes.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#include "backend/cuda/kernels/common.cuh"
#include "backend/kv_format.h"
#include "cuda_bench.cuh"

namespace omnikv::cuda {

namespace {

constexpr int kLayers = 4;
constexpr int64_t kWidth = 4096, kFfn = 14336, kVocab = 128256;
constexpr int32_t kHeads = 32, kKvHeads = 8, kHead = 128, kBlockTokens = 16;

Device device;
Launch launch;

// An array on the device.
template <typename T>
struct Array {
  T* data = nullptr;
  size_t n = 0;

  explicit Array(size_t size) : n(size) {
    CheckLaunch(cudaMalloc(&data, n * sizeof(T)), "memory");
    CheckLaunch(cudaMemset(data, 0, n * sizeof(T)), "memory");
  }
  explicit Array(const std::vector<T>& from) : Array(from.size()) { Set(from); }
  void Set(const std::vector<T>& from) {
    CheckLaunch(cudaMemcpy(data, from.data(), n * sizeof(T), cudaMemcpyDefault), "copy");
  }
  std::vector<T> Get() const {
    std::vector<T> out(n);
    CheckLaunch(cudaMemcpy(out.data(), data, n * sizeof(T), cudaMemcpyDefault), "copy");
    return out;
  }
};

std::vector<float> Noise(size_t n) {
  static uint32_t state = 1;
  std::vector<float> out(n);
  for (float& v : out) {
    state = state * 1664525u + 1013904223u;
    v = static_cast<float>(state >> 8) / 8388608.0f - 1.0f;
  }
  return out;
}

// Small scales; the values are noise already.
__global__ void SetScales(std::byte* blocks, int64_t n) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < n) {
    *reinterpret_cast<__half*>(blocks + i * int64_t{kQ8BlockBytes}) =
        __float2half_rn(0.004f + 0.0001f * static_cast<float>(i % 37));
  }
}

// *out = W[o] h, h = norm(x) of row r.
__global__ void Expect(Product p, int part, int32_t r, int64_t o, double* out) {
  const WeightRef& w = p.parts[part].w;
  const float* x = p.x + r * w.n_in;
  const std::byte* row = static_cast<const std::byte*>(w.data) + o * w.row_bytes;
  double sum = 0;
  double square = 0;
  for (int64_t i = threadIdx.x; i < w.n_in; i += 32) {
    square += double{x[i]} * x[i];
    sum += double{LoadValue(w.format, row, i)} * x[i] * (p.norm != nullptr ? p.norm[i] : 1.0f);
  }
  for (int lane = 16; lane > 0; lane /= 2) {
    sum += __shfl_xor_sync(kAllLanes, sum, lane);
    square += __shfl_xor_sync(kAllLanes, square, lane);
  }
  const double scale =
      p.norm != nullptr ? 1 / sqrt(square / static_cast<double>(w.n_in) + p.eps) : 1;
  *out = sum * scale;
}

double Dot(const Product& p, int part, int32_t r, int64_t o) {
  static Array<double> out(1);
  Expect<<<1, 32>>>(p, part, r, o, out.data);
  return out.Get()[0];
}

// Seconds of each of `times` bodies, one after the other in one graph.
double Seconds(int times, const std::function<void()>& body) {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t run = nullptr;
  CheckLaunch(cudaStreamBeginCapture(launch.stream, cudaStreamCaptureModeThreadLocal), "capture");
  for (int i = 0; i < times; ++i) body();
  CheckLaunch(cudaStreamEndCapture(launch.stream, &graph), "capture");
  CheckLaunch(cudaGraphInstantiate(&run, graph, 0), "graph");
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  cudaEventCreate(&begin);
  cudaEventCreate(&end);
  float best = 1e30f;
  for (int i = 0; i < 12; ++i) {
    cudaEventRecord(begin, launch.stream);
    CheckLaunch(cudaGraphLaunch(run, launch.stream), "graph");
    cudaEventRecord(end, launch.stream);
    CheckLaunch(cudaEventSynchronize(end), "run");
    float ms = 0;
    cudaEventElapsedTime(&ms, begin, end);
    if (i > 1) best = std::min(best, ms);
  }
  cudaGraphExecDestroy(run);
  cudaGraphDestroy(graph);
  return best / 1e3 / times;
}

// A step of n_rows sequences, each at its own position.
struct Step {
  DType format;
  int32_t n_rows;
  std::byte* weights;
  int64_t used = 0;
  Array<float> x{Noise(U(n_rows * kWidth))}, norm{Noise(kWidth)}, q{U(n_rows * kWidth)};
  Array<float> ffn{U(n_rows * kFfn)}, logits{U(n_rows * kVocab)}, cos_sin{Noise(U(n_rows * kHead))};
  Array<int32_t> table{U(n_rows)};
  Array<RowMeta> rows{U(n_rows)};
  Array<SeqMeta> seqs{U(n_rows)};
  int64_t row_bytes = KvRowBytes(DType::kF32, kKvHeads, kHead, kHead);
  Array<std::byte> bank{U(n_rows * kBlockTokens * row_bytes)};
  std::vector<NormQkvRopeAppendArgs> qkv;
  std::vector<Product> products;  // four of each layer, then the logits
  std::vector<int64_t> bytes;     // of their weights

  static size_t U(int64_t n) { return static_cast<size_t>(n); }

  WeightRef Take(int64_t n_out, int64_t n_in) {
    const auto row = static_cast<int64_t>(DTypeBytes(format, U(n_in)));
    const WeightRef w{format, weights + used, n_out, n_in, row};
    used += n_out * row;
    return w;
  }
  void Add(Finish finish, const Array<float>& in, const Array<float>& out,
           const std::vector<WeightRef>& parts) {
    Product p;
    p.x = in.data;
    p.norm = finish == Finish::kAdd ? nullptr : norm.data;
    p.eps = 1e-5f;
    p.n_rows = n_rows;
    p.n_parts = static_cast<int32_t>(parts.size());
    p.finish = finish;
    p.scale = finish == Finish::kAdd ? 1e-5f : 1;
    int64_t sum = 0;
    for (size_t i = 0; i < parts.size(); ++i) {
      p.parts[i].w = parts[i];
      sum += parts[i].n_out * parts[i].row_bytes;
    }
    p.parts[0].y = out.data;
    products.push_back(p);
    bytes.push_back(sum);
  }

  Step(DType type, int32_t n, std::byte* from) : format(type), n_rows(n), weights(from) {
    std::vector<int32_t> blocks;
    std::vector<RowMeta> row;
    std::vector<SeqMeta> seq;
    for (int32_t r = 0; r < n; ++r) {
      blocks.push_back(n - 1 - r);
      row.push_back({r, r % kBlockTokens});
      seq.push_back({r, 1, r % kBlockTokens + 1, r, 0});
    }
    table.Set(blocks);
    rows.Set(row);
    seqs.Set(seq);
    qkv.resize(kLayers);
    for (NormQkvRopeAppendArgs& a : qkv) {
      a.cos_sin = cos_sin.data;
      a.n_freq = kHead / 2;
      a.q = q.data;
      a.n_heads = kHeads;
      a.kv = MakeKvView(bank.data, table.data, kBlockTokens, DType::kF32, kKvHeads, kHead, kHead);
      a.rows = rows.data;
      a.seqs = seqs.data;
      a.n_rows = n;
      Add(Finish::kRope, x, q,
          {Take(kWidth, kWidth), Take(kKvHeads * kHead, kWidth), Take(kKvHeads * kHead, kWidth)});
      products.back().qkv = &a;
      Add(Finish::kAdd, q, x, {Take(kWidth, kWidth)});
      Add(Finish::kGated, x, ffn, {Take(kFfn, kWidth), Take(kFfn, kWidth)});
      Add(Finish::kAdd, ffn, x, {Take(kWidth, kFfn)});
    }
    Add(Finish::kLogits, x, logits, {Take(kVocab, kWidth)});
  }

  // The largest error of some outputs of product i, as a share of the largest of them.
  double Error(size_t i) {
    const Product& p = products[i];
    const std::vector<float> before = x.Get();
    const std::vector<float> rotation = cos_sin.Get();
    std::vector<double> want;
    for (int32_t r = 0; r < n_rows; ++r) {
      for (int64_t o = 7; o < 4000; o += 501) {
        double v = Dot(p, 0, r, o);
        if (p.finish == Finish::kAdd) v = before[U(r * kWidth + o)] + double{p.scale} * v;
        if (p.finish == Finish::kGated) v = v / (1 + std::exp(-v)) * Dot(p, 1, r, o);
        if (p.finish == Finish::kRope) {
          const int64_t half = kHead / 2;
          const bool low = o % kHead < half;
          const double other = Dot(p, 0, r, low ? o + half : o - half);
          const float* cs = rotation.data() + r * kHead + o % half * 2;
          v = v * cs[0] + (low ? -other : other) * cs[1];
        }
        want.push_back(v);
      }
    }
    Multiply(p, launch);
    CheckLaunch(cudaStreamSynchronize(launch.stream), "run");
    const Array<float>* outs[] = {&q, &x, &ffn, &x, &logits};
    const std::vector<float> got = outs[i % 4 + (i == 4 * kLayers ? 4 : 0)]->Get();
    double top = 0;
    double error = 0;
    size_t at = 0;
    for (int32_t r = 0; r < n_rows; ++r) {
      for (int64_t o = 7; o < 4000; o += 501, ++at) {
        const double v = got[U(r) * (got.size() / U(n_rows)) + U(o)];
        top = std::max(top, std::abs(want[at]));
        error = std::max(error, std::isnan(v) ? 1e30 : std::abs(v - want[at]));
      }
    }
    return error / top;
  }
};

void Measure(DType format, int32_t n_rows, std::byte* weights, double ceiling) {
  Step step(format, n_rows, weights);
  std::printf("%s, %d rows:", format == DType::kQ8_0 ? "q8_0" : "bf16", n_rows);
  for (size_t i = 0; i < 4; ++i) std::printf(" %.1e", step.Error(i));
  std::printf(" %.1e of the largest output\n", step.Error(step.products.size() - 1));
  const auto report = [&](const char* name, double bytes, double seconds) {
    std::printf("  %-8s %8.1f us %7.0f GB/s %5.1f %%\n", name, seconds * 1e6, bytes / seconds / 1e9,
                100 * bytes / seconds / ceiling);
  };
  const char* names[] = {"qkv", "o", "gate/up", "down"};
  for (size_t i = 0; i < 4; ++i) {
    const double seconds = Seconds(4, [&] {
      for (size_t layer = 0; layer < kLayers; ++layer)
        Multiply(step.products[4 * layer + i], launch);
    });
    report(names[i], static_cast<double>(step.bytes[i]), seconds / kLayers);
  }
  report("logits", static_cast<double>(step.bytes.back()),
         Seconds(4, [&] { Multiply(step.products.back(), launch); }));
  report("chain", static_cast<double>(step.used), Seconds(4, [&] {
           for (const Product& p : step.products) Multiply(p, launch);
         }));
}

void Main(const std::vector<int32_t>& chosen) {
  device = BenchDevice();
  launch.device = &device;
  CheckLaunch(cudaStreamCreateWithFlags(&launch.stream, cudaStreamNonBlocking), "stream");
  const int64_t layer = 2 * kWidth * (2 * kWidth + 2 * kKvHeads * kHead + 3 * kFfn);
  const int64_t n_bytes = kLayers * layer + 2 * kWidth * kVocab;
  Array<std::byte> weights(static_cast<size_t>(n_bytes));
  Array<uint32_t> sink(1);
  FillNoise(reinterpret_cast<uint16_t*>(weights.data), n_bytes / 2, launch);
  double ceiling = 0;
  for (const bool together : {false, true}) {
    const double seconds =
        Seconds(4, [&] { ReadAll(weights.data, n_bytes, together, sink.data, launch); });
    ceiling = std::max(ceiling, static_cast<double>(n_bytes) / seconds);
  }
  std::printf("reading %.0f GB/s\n", ceiling / 1e9);
  const std::vector<int32_t> rows = chosen.empty() ? std::vector<int32_t>{1, 2, 4, 8, 9, 12, 16} : chosen;
  for (int32_t n_rows : rows) Measure(DType::kBF16, n_rows, weights.data, ceiling);
  const int64_t blocks = n_bytes / int64_t{kQ8BlockBytes};
  SetScales<<<static_cast<unsigned>(CeilDiv(blocks, 256)), 256>>>(weights.data, blocks);
  CheckLaunch(cudaDeviceSynchronize(), "scales");
  for (int32_t n_rows : rows) Measure(DType::kQ8_0, n_rows, weights.data, ceiling);
}

}  // namespace
}  // namespace omnikv::cuda

int main(int argc, char** argv) {
  std::vector<int32_t> rows;
  for (int i = 1; i < argc; ++i) rows.push_back(std::atoi(argv[i]));
  omnikv::cuda::Main(rows);
  return 0;
}
