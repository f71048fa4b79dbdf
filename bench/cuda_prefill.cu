// Prefill on the card: AttendPrefill and AttendHopper (FlashInfer's kernel, in builds that have it)
// against a plain kernel on small ragged shapes, then their speed and that of cuBLASLt's products.
// Usage: cuda_prefill [--json | --chunks]. --chunks: chunks of few rows over a long past only.
// Fails where an error is larger than what rounding explains.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "backend/cuda/cublaslt.h"
#include "backend/cuda/kernels/common.cuh"
#include "backend/kv_format.h"
#include "cuda_bench.cuh"

namespace omnikv::cuda {

namespace {

bool failed = false;

// Uniform in [-1, 1).
__global__ void FillNoise(DType type, std::byte* out, int64_t n, uint32_t seed) {
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n;
       i += int64_t{gridDim.x} * blockDim.x) {
    uint32_t h = static_cast<uint32_t>(i) * 2654435761u + seed;
    h = (h ^ h >> 16) * 0x85ebca6bu;
    h = (h ^ h >> 13) * 0xc2b2ae35u;
    StoreValue(type, out, i, static_cast<float>((h ^ h >> 16) >> 8) / 8388608.0f - 1.0f);
  }
}

Memory Noise(DType type, int64_t n, uint32_t seed) {
  Memory m = Allocate(DTypeBytes(type, static_cast<size_t>(n)));
  FillNoise<<<1024, 256>>>(type, m.get(), n, seed);
  return m;
}

// One block for a row and head, one thread for each value of it.
__global__ void AttendPlainly(const __grid_constant__ AttendArgs a, float* o, float* lse) {
  __shared__ float shared[32];
  const int64_t at = blockIdx.x;
  const int d = static_cast<int>(threadIdx.x);
  const RowMeta row = a.rows[at / a.n_heads];
  const auto kv_head = static_cast<int32_t>(at % a.n_heads / (a.n_heads / a.kv.n_kv_heads));
  double top = -1e30, sum = 0, out = 0;
  for (int i = 0; i < a.plan.n_segments; ++i) {
    const PlanSegment& s = a.plan.segments[i];
    const int low = max(s.begin, s.window > 0 ? row.pos + 1 - s.window : 0);
    for (int t = low; t < min(s.end, row.pos + 1); ++t) {
      const int64_t at_row = a.kv.RowIndex(a.seqs[row.seq].table_off, t);
      const std::byte* k = a.kv.k.Head(at_row, kv_head);
      const std::byte* v = a.kv.v.Head(at_row, kv_head);
      const float qk = a.q[at * a.kv.dk + d] * LoadValue(a.kv.k.dtype, k, d);
      const double logit = Softcap(a.scale * BlockSum(qk, shared), a.softcap);
      __syncthreads();
      const double best = max(top, logit);
      const double keep = exp(top - best), p = exp(logit - best);
      sum = sum * keep + p;
      out = out * keep + p * LoadValue(a.kv.v.dtype, v, d);
      top = best;
    }
  }
  o[at * a.kv.dv + d] = static_cast<float>(sum > 0 ? out / sum : 0);
  if (d == 0) lse[at] = static_cast<float>(sum > 0 ? top + log(sum) : -INFINITY);
}

struct Case {
  int32_t n_heads = 32, n_kv_heads = 8, d = 128;
  DType dtype = DType::kF16;
  int32_t block_tokens = 64;
  std::vector<int32_t> q_len = {}, kv_len = {};
  AttnPlan plan = AttnPlan::Dense();
  float softcap = 0;
  int32_t busy_seqs = 0;
};

// Attention over noise, with blocks in shuffled order and values that are not to be read as NaN.
class Attention {
 public:
  Attention(const Case& c, const Device& device) : device_(device) {
    const auto n_seqs = static_cast<int32_t>(c.q_len.size());
    std::vector<int32_t> table;
    for (int32_t s = 0; s < n_seqs; ++s) {
      const size_t i = static_cast<size_t>(s);
      seqs_.push_back({static_cast<int32_t>(rows_.size()), c.q_len[i], c.kv_len[i],
                       static_cast<int32_t>(table.size()), 0});
      for (int32_t r = 0; r < c.q_len[i]; ++r) {
        rows_.push_back({s, c.kv_len[i] - c.q_len[i] + r});
      }
      for (int64_t b = 0; b < CeilDiv(c.kv_len[i], c.block_tokens); ++b) {
        table.push_back(static_cast<int32_t>(table.size()));
      }
    }
    uint32_t state = 1;
    for (size_t i = table.size(); i > 1; --i) {
      state = state * 1664525u + 1013904223u;
      std::swap(table[i - 1], table[(state >> 8) % i]);
    }
    const int64_t values =
        int64_t{2} * c.n_kv_heads * c.d * c.block_tokens * static_cast<int64_t>(table.size());
    const auto n_rows = static_cast<int32_t>(rows_.size());
    const int64_t outputs = int64_t{n_rows} * c.n_heads * c.d;
    buffers_.push_back(Noise(c.dtype, values, 7));
    buffers_.push_back(Upload(table));
    buffers_.push_back(Noise(DType::kF32, outputs, 8));
    buffers_.push_back(Allocate(static_cast<size_t>(outputs) * 4));
    buffers_.push_back(Allocate(static_cast<size_t>(outputs / c.d) * 4));
    buffers_.push_back(Upload(rows_));
    buffers_.push_back(Upload(seqs_));
    const auto at = [&](size_t i) { return buffers_[i].get(); };
    args = {.q = reinterpret_cast<float*>(at(2)),
            .o = reinterpret_cast<float*>(at(3)),
            .lse = reinterpret_cast<float*>(at(4)),
            .kv = MakeKvView(at(0), reinterpret_cast<int32_t*>(at(1)), c.block_tokens, c.dtype,
                             c.n_kv_heads, c.d, c.d),
            .plan = c.plan,
            .rows = reinterpret_cast<RowMeta*>(at(5)),
            .seqs = reinterpret_cast<SeqMeta*>(at(6)),
            .n_rows = n_rows,
            .n_seqs = n_seqs,
            .n_heads = c.n_heads,
            .scale = 3 / std::sqrt(static_cast<float>(c.d)),
            .softcap = c.softcap,
            .busy_seqs = c.busy_seqs};
    hopper = CanAttendHopper(args, device);
    scratch_ = Allocate(std::max(AttendPrefillScratch(args, device),
                                 hopper ? AttendHopperScratch(args, device) : 0));
  }

  void Run() {
    const Launch launch{&device_, nullptr, scratch_.get()};
    hopper ? AttendHopper(args, nullptr, launch) : AttendPrefill(args, launch);
  }

  void Check(const char* what, double tolerance) {
    CheckLaunch(cudaMemset(args.o, 0xff,
                           static_cast<size_t>(args.n_rows) *
                               static_cast<size_t>(args.n_heads * args.kv.dv) * 4),
                "memory");
    Run();
    const size_t n_lse = static_cast<size_t>(args.n_rows) * static_cast<size_t>(args.n_heads);
    const size_t n = n_lse * static_cast<size_t>(args.kv.dv);
    const Memory plain_o = Allocate(n * 4), plain_lse = Allocate(n_lse * 4);
    AttendPlainly<<<static_cast<unsigned>(n_lse), static_cast<unsigned>(args.kv.dv)>>>(
        args, reinterpret_cast<float*>(plain_o.get()), reinterpret_cast<float*>(plain_lse.get()));
    const double o = Error(args.o, plain_o.get(), n), lse = Error(args.lse, plain_lse.get(), n_lse);
    const bool ok = o <= tolerance && lse <= tolerance;
    failed |= !ok;
    std::printf(
        "%-22s %-10s heads %d/%d of %3d %-4s blocks of %3d: o %.1e, lse %.1e of the largest%s\n",
        what, Kernel(), args.n_heads, args.kv.n_kv_heads, args.kv.dk,
        args.kv.k.dtype == DType::kF16 ? "f16" : "bf16", int32_t{args.kv.block_tokens}, o, lse,
        ok ? "" : "  TOO MUCH");
  }

  struct Speed {
    double ms = 0, tflop_s = 0;
  };
  Speed Measure(int repeats);
  void Time(const char* what, int repeats);
  const char* Kernel() const { return hopper ? "FlashInfer" : "own"; }

  AttendArgs args;
  bool hopper = false;  // runs AttendHopper; at first wherever it can

 private:
  static double Error(const void* got, const void* want, size_t n) {
    std::vector<float> x(n), y(n);
    CheckLaunch(cudaMemcpy(x.data(), got, n * 4, cudaMemcpyDeviceToHost), "results");
    CheckLaunch(cudaMemcpy(y.data(), want, n * 4, cudaMemcpyDeviceToHost), "results");
    double error = 0, largest = 0;
    for (size_t i = 0; i < n; ++i) {
      if (x[i] == y[i]) continue;  // so are two -inf
      const double delta = std::abs(static_cast<double>(x[i]) - y[i]);
      error = std::isnan(delta) ? INFINITY : std::max(error, delta);
    }
    for (float v : y) largest = std::isinf(v) ? largest : std::max<double>(largest, std::abs(v));
    return error / std::max(largest, 1e-30);
  }

  Device device_;
  std::vector<RowMeta> rows_;
  std::vector<SeqMeta> seqs_;
  std::vector<Memory> buffers_;
  Memory scratch_;
};

// Milliseconds a run, the least of `repeats`.
double Milliseconds(int repeats, const std::function<void()>& run) {
  cudaEvent_t begin, end;
  CheckLaunch(cudaEventCreate(&begin), "event");
  CheckLaunch(cudaEventCreate(&end), "event");
  run();
  float best = 1e30f;
  for (int i = 0; i < repeats; ++i) {
    float ms = 0;
    CheckLaunch(cudaEventRecord(begin), "event");
    run();
    CheckLaunch(cudaEventRecord(end), "event");
    CheckLaunch(cudaEventSynchronize(end), "run");
    CheckLaunch(cudaEventElapsedTime(&ms, begin, end), "event");
    best = std::min(best, ms);
  }
  return best;
}

Attention::Speed Attention::Measure(int repeats) {
  double pairs = 0;
  for (const RowMeta& row : rows_) pairs += row.pos + 1;
  const double ms = Milliseconds(repeats, [&] { Run(); });
  return {ms, 4 * pairs * args.n_heads * args.kv.dk / ms / 1e9};
}

void Attention::Time(const char* what, int repeats) {
  const Speed speed = Measure(repeats);
  std::printf("%-34s %-10s heads %d/%d of %3d %-4s %9.3f ms %7.1f TFLOP/s\n", what, Kernel(),
              args.n_heads, args.kv.n_kv_heads, args.kv.dk,
              args.kv.k.dtype == DType::kF16 ? "f16" : "bf16", speed.ms, speed.tflop_s);
}

void CheckAttention(const Device& device) {
  const std::vector<int32_t> q_len = {1, 70, 0, 3, 200}, kv_len = {200, 90, 5, 1500, 5000};
  for (DType dtype : {DType::kF16, DType::kBF16}) {
    const double tolerance = dtype == DType::kF16 ? 2e-3 : 1.5e-2;
    for (int32_t d : {64, 80, 96, 128, 256}) {
      Case c{
          .n_heads = 6, .n_kv_heads = 2, .d = d, .dtype = dtype, .q_len = q_len, .kv_len = kv_len};
      Attention(c, device).Check("ragged", tolerance);
      c.block_tokens = 16;
      c.softcap = 5;
      Attention(c, device).Check("softcap", tolerance);
      c.plan = {};
      c.plan.Add({.end = 4});
      c.plan.Add({.window = 100, .begin = 4});
      Attention(c, device).Check("sinks and window", tolerance);
      c.q_len = c.kv_len = {3000};
      c.n_heads = c.n_kv_heads = 8;
      c.plan = AttnPlan::Dense();
      c.block_tokens = 128;
      Attention(c, device).Check("a whole prompt", tolerance);
    }
  }
}

// Enough heads that few rows fill the card.
void CheckHopper(const Device& device) {
  for (DType dtype : {DType::kF16, DType::kBF16}) {
    for (int32_t d : {64, 128}) {
      for (int32_t block_tokens : {16, 32, 64, 128, 256}) {
        for (const auto& [q_len, kv_len] : {std::pair<int32_t, int32_t>{150, 150},
                                            {193, 257},
                                            {200, 1000},
                                            {700, 5001},
                                            {400, 4096}}) {
          Attention a({.n_heads = 72,
                       .n_kv_heads = 8,
                       .d = d,
                       .dtype = dtype,
                       .block_tokens = block_tokens,
                       .q_len = {q_len, 0, q_len + 3},
                       .kv_len = {kv_len, 7, kv_len + 130}},
                      device);
          if (!a.hopper) {
            std::printf("FlashInfer's kernel is not in this build, or not for this card\n");
            return;
          }
          a.Check("several sequences", dtype == DType::kF16 ? 2e-3 : 1.5e-2);
        }
      }
    }
  }
}

// Few rows of few heads after a long past, which is dealt to several blocks where it is long
// enough.
void CheckParts(const Device& device) {
  for (DType dtype : {DType::kF16, DType::kBF16}) {
    for (int32_t d : {64, 96, 128, 256}) {
      for (const int32_t past : {1000, 1024, 2047, 2048, 5000, 40000}) {
        Attention a({.n_heads = 8,
                     .n_kv_heads = 2,
                     .d = d,
                     .dtype = dtype,
                     .q_len = {0, 193, 0, 130},
                     .kv_len = {7, past + 193, 0, 1200},
                     .busy_seqs = 2},
                    device);
        a.Check("parts of a past", dtype == DType::kF16 ? 2e-3 : 1.5e-2);
      }
    }
  }
}

void TimeAttention(const Device& device) {
  const auto time = [&](const char* what, int32_t rows, int32_t context, int repeats, Case c = {}) {
    c.q_len = {rows};
    c.kv_len = {context};
    Attention a(c, device);
    a.Time(what, repeats);
    if (!std::exchange(a.hopper, false)) return;
    a.Time(what, repeats);
  };
  time("8K x 8K", 8192, 8192, 20);
  time("32K x 32K", 32768, 32768, 5);
  time("4K rows at the end of 32K", 4096, 32768, 10);
  time("4K rows at the end of 128K", 4096, 131072, 5);
  time("8K rows at the end of 128K", 8192, 131072, 3);
  time("4K rows at the end of 1M", 4096, 1048576, 2);
  time("600 rows at the end of 128K", 600, 131072, 5);
  time("50 rows at the end of 128K", 50, 131072, 5);
  time("32K x 32K", 32768, 32768, 5, {.dtype = DType::kBF16});
  time("32K x 32K", 32768, 32768, 5, {.d = 64});
  time("32K x 32K", 32768, 32768, 5, {.d = 96});
  time("32K x 32K", 32768, 32768, 3, {.n_heads = 16, .d = 256});
}

// cuBLASLt on a shape that fits no tile, with pitches, bias and accumulation.
void CheckProduct(CublasLt& lt, DType in, DType out) {
  constexpr int64_t kRows = 37, kIn = 72, kOut = 52, kPitch = 80;
  const auto values = [](DType type, const Memory& m, int64_t n) {
    std::vector<std::byte> bytes(DTypeBytes(type, static_cast<size_t>(n)));
    CheckLaunch(cudaMemcpy(bytes.data(), m.get(), bytes.size(), cudaMemcpyDeviceToHost), "results");
    std::vector<double> v;
    for (int64_t i = 0; i < n; ++i)
      v.push_back(LoadAsF32(type, bytes.data(), static_cast<size_t>(i)));
    return v;
  };
  const Memory x = Noise(in, kRows * kPitch, 1), w = Noise(in, kOut * kPitch, 2);
  const Memory y = Noise(out, kRows * kPitch, 3), bias = Noise(DType::kF32, kOut, 4);
  Gemm gemm{.in = in,
            .out = out,
            .x = x.get(),
            .w = w.get(),
            .y = y.get(),
            .accumulate = true,
            .n_rows = kRows,
            .n_out = kOut,
            .n_in = kIn,
            .x_pitch = kPitch,
            .w_pitch = kPitch,
            .y_pitch = kPitch};
  if (CublasLt::TakesBias(gemm)) gemm.bias = reinterpret_cast<const float*>(bias.get());
  const std::vector<double> xs = values(in, x, kRows * kPitch), ws = values(in, w, kOut * kPitch);
  const std::vector<double> before = values(out, y, kRows * kPitch);
  const std::vector<double> biases = values(DType::kF32, bias, kOut);
  const Status prepared = lt.Prepare(gemm);
  if (!prepared.ok()) {
    std::printf("%s\n", prepared.message().c_str());
    failed = true;
    return;
  }
  lt.Multiply(gemm, nullptr);
  const std::vector<double> after = values(out, y, kRows * kPitch);
  double error = 0, largest = 0;
  for (size_t r = 0; r < kRows; ++r) {
    for (size_t o = 0; o < kPitch; ++o) {
      double want = before[r * kPitch + o];
      for (size_t i = 0; i < kIn && o < kOut; ++i) want += xs[r * kPitch + i] * ws[o * kPitch + i];
      if (gemm.bias != nullptr && o < kOut) want += biases[o];
      error = std::max(error, std::abs(after[r * kPitch + o] - want));
      largest = std::max(largest, std::abs(want));
    }
  }
  const bool ok = error <= largest * (out == DType::kF32 ? 1e-5 : 8e-3);
  failed |= !ok;
  std::printf("product %s -> %s: %.1e of the largest%s\n", DTypeName(in).data(),
              DTypeName(out).data(), error / largest, ok ? "" : "  TOO MUCH");
}

double TimeProduct(CublasLt& lt, DType in, DType out, int64_t rows, int64_t n_in, int64_t n_out,
                   bool add = false) {
  // Other weights each time, so that they are not in the cache.
  const auto bytes = static_cast<int64_t>(DTypeBytes(in, static_cast<size_t>(n_out * n_in)));
  const int64_t matrices = CeilDiv(int64_t{256} << 20, bytes);
  const Memory x = Noise(in, rows * n_in, 1), w = Noise(in, matrices * n_out * n_in, 2);
  const Memory y = Allocate(DTypeBytes(out, static_cast<size_t>(rows * n_out)));
  Gemm gemm{.in = in,
            .out = out,
            .x = x.get(),
            .w = w.get(),
            .y = y.get(),
            .accumulate = add,
            .n_rows = rows,
            .n_out = n_out,
            .n_in = n_in,
            .x_pitch = n_in,
            .w_pitch = n_in,
            .y_pitch = n_out};
  int64_t turn = 0;
  const double ms = Milliseconds(10, [&] {
    gemm.w = w.get() + turn++ % matrices * bytes;
    lt.Multiply(gemm, nullptr);
  });
  std::printf("product %5ld x %5ld x %5ld %-4s -> %-4s %-4s %9.3f ms %7.1f TFLOP/s\n", rows, n_in,
              n_out, DTypeName(in).data(), DTypeName(out).data(), add ? "adds" : "", ms,
              2e-9 * static_cast<double>(rows * n_in) * static_cast<double>(n_out) / ms);
  return ms;
}

// A chunk of a prompt beside eight sequences, in a step of Llama-3-8B: attention as it was divided
// while sequences without rows counted, as our own kernel divides it now, and as it runs now.
void TimeChunks(CublasLt& lt, const Device& device) {
  constexpr DType kBf16 = DType::kBF16, kF32 = DType::kF32;
  constexpr int kLayers = 32;
  for (const int32_t rows : {64, 96, 128, 160, 192, 256, 384, 512}) {
    double products = 0;
    for (const int64_t n_out : {4096, 1024, 1024, 4096}) {
      products += TimeProduct(lt, kBf16, kF32, rows, 4096, n_out);
    }
    products += 2 * TimeProduct(lt, kBf16, kBf16, rows, 4096, 14336);
    products += TimeProduct(lt, kBf16, kF32, rows, 14336, 4096, /*add=*/true);
    for (const int32_t past : {2048, 8192, 16384, 32768}) {
      Case c{.dtype = kBf16, .q_len = std::vector<int32_t>(9), .kv_len = std::vector<int32_t>(9)};
      c.q_len[8] = rows;
      c.kv_len[8] = past + rows;
      const double before = Attention(c, device).Measure(20).ms;
      c.busy_seqs = 1;
      Attention a(c, device);
      const double now = a.Measure(20).ms;
      const char* const kernel = a.Kernel();
      a.hopper = false;
      const double own = a.Measure(20).ms;
      std::printf(
          "chunk of %3d over %5d: attention before %6.3f, own %6.3f, now (%s) %6.3f ms; %d layers "
          "of products %6.3f, with attention %6.3f ms\n",
          rows, past, before, own, kernel, now, kLayers, kLayers * products,
          kLayers * (products + now));
    }
  }
}

// What stands around the products of a chunk of a prompt, in a layer of Llama-3-8B.
void TimeRows(const Device& device) {
  constexpr int64_t kRows = 4096, kDim = 4096, kFfn = 14336;
  const Launch launch{&device, nullptr, nullptr};
  const Memory x = Noise(DType::kF32, kRows * kFfn, 1), y = Noise(DType::kF32, kRows * kFfn, 2);
  const Memory out = Allocate(kRows * kFfn * 4);
  const auto time = [](const char* what, int64_t bytes, const std::function<void()>& run) {
    const double ms = Milliseconds(10, run);
    std::printf("%-46s %9.3f ms %7.0f GB/s\n", what, ms, 1e-6 * static_cast<double>(bytes) / ms);
  };
  const Residual in{.x = As<float>(x), .norm = As<float>(y), .eps = 1e-5f, .d = kDim};
  time("norm, f32 -> bf16", kRows * kDim * 6,
       [&] { NormRows(in, kRows, DType::kBF16, out.get(), launch); });
  time("queries, f32 -> f16", kRows * kDim * 6,
       [&] { ConvertRows(As<float>(x), kRows * kDim, DType::kF16, out.get(), launch); });
  const auto gated = [&](DType from, DType to) {
    GatedRows(Activation::kSilu, from, x.get(), y.get(), to, out.get(), kRows * kFfn, launch);
  };
  time("gated, bf16 -> bf16", kRows * kFfn * 6, [&] { gated(DType::kBF16, DType::kBF16); });
  time("gated, f32 -> f32", kRows * kFfn * 12, [&] { gated(DType::kF32, DType::kF32); });

  constexpr int32_t kHeads = 32, kKvHeads = 8, kHead = 128;
  std::vector<RowMeta> rows;
  std::vector<int32_t> table;
  for (int32_t r = 0; r < kRows; ++r) rows.push_back({0, r});
  for (int32_t b = 0; b < kRows / 64; ++b) table.push_back(b);
  const Memory row_meta = Upload(rows), blocks = Upload(table);
  const Memory seqs = Upload(std::vector<SeqMeta>{{0, kRows, kRows, 0, 0}});
  const NormQkvRopeAppendArgs args{
      .cos_sin = As<float>(y),
      .n_freq = kHead / 2,
      .q = As<float>(x),
      .n_heads = kHeads,
      .kv = MakeKvView(out.get(), As<int32_t>(blocks), 64, DType::kF16, kKvHeads, kHead, kHead),
      .rows = As<RowMeta>(row_meta),
      .seqs = As<SeqMeta>(seqs),
      .n_rows = kRows};
  float* const kv = As<float>(x) + kRows * kDim;
  time("rotation of q and k, append", kRows * kHead * (kHeads * 8 + 2 * kKvHeads * 6 + 4),
       [&] { RopeAppend(args, kv, kv + kRows * kKvHeads * kHead, launch); });
}

// Causal, in bf16, the shapes of scripts/gpu_attention_peer.py.
int JsonMain() {
  const NamedDevice card = BenchCard();
  std::printf("{\"card\": \"%s\", \"cases\": [", card.name.c_str());
  const char* comma = "";
  for (const auto& [rows, context] : {std::pair<int32_t, int32_t>{8192, 8192},
                                      {32768, 32768},
                                      {131072, 131072},
                                      {4096, 32768},
                                      {4096, 131072}}) {
    Case c{.dtype = DType::kBF16, .q_len = {rows}, .kv_len = {context}};
    const Attention::Speed speed = Attention(c, card.device).Measure(rows > 32768 ? 3 : 10);
    std::printf(
        "%s{\"kind\": \"prefill\", \"rows\": %d, \"context\": %d, \"ms\": %.4f, "
        "\"tflop_s\": %.2f}",
        comma, rows, context, speed.ms, speed.tflop_s);
    comma = ", ";
  }
  std::printf("]}\n");
  return 0;
}

int Main(bool chunks) {
  const Device device = BenchDevice();
  if (!chunks) {
    CheckAttention(device);
    CheckHopper(device);
    CheckParts(device);
    TimeAttention(device);
  }

  constexpr size_t kWorkspace = size_t{32} << 20;
  const Memory workspace = Allocate(kWorkspace);
  auto lt = CublasLt::Open(workspace.get(), kWorkspace);
  if (!lt.ok()) {
    std::printf("%s\n", lt.status().message().c_str());
    return failed ? 1 : 0;
  }
  if (chunks) {
    TimeChunks(**lt, device);
    return 0;
  }
  CheckProduct(**lt, DType::kBF16, DType::kF32);
  CheckProduct(**lt, DType::kBF16, DType::kBF16);
  CheckProduct(**lt, DType::kF16, DType::kF32);
  CheckProduct(**lt, DType::kF32, DType::kF32);
  constexpr DType kBf16 = DType::kBF16, kF32 = DType::kF32;
  TimeProduct(**lt, kF32, kF32, 8192, 4096, 14336);
  for (int64_t rows : {4096, 8192}) {
    for (DType out : {kF32, kBf16}) {
      for (int64_t n_out : {1024, 4096, 14336}) TimeProduct(**lt, kBf16, out, rows, 4096, n_out);
    }
    TimeProduct(**lt, kBf16, kF32, rows, 4096, 4096, /*add=*/true);
    TimeProduct(**lt, kBf16, kF32, rows, 14336, 4096, /*add=*/true);
  }
  TimeRows(device);
  return failed ? 1 : 0;
}

}  // namespace
}  // namespace omnikv::cuda

int main(int argc, char** argv) {
  if (omnikv::cuda::WantsJson(argc, argv)) return omnikv::cuda::JsonMain();
  return omnikv::cuda::Main(argc > 1 && std::string_view(argv[1]) == "--chunks");
}
