// Prefill kernels against the machine: linear layers of a 1B model (16 layers, d 2048, 32/8 heads
// of 64, FFN 8192) and causal attention, each in turns with the fastest products that any library
// here reaches, so that a busy machine disturbs both alike. Usage: prefill_kernels [threads]
#include <fmt/format.h>

#include <cmath>
#include <cstdlib>
#include <numeric>
#include <vector>

#include "backend/cpu/prefill/attend.h"
#include "backend/cpu/prefill/gemm.h"
#include "backend/cpu/prefill/gemm_peak.h"
#include "backend/kv_format.h"

namespace omnikv {
namespace {

// Uniform in [-1, 1), the same in every run.
class Noise {
 public:
  float Next() {
    state_ = state_ * 1664525u + 1013904223u;
    return static_cast<float>(state_ >> 8) / 8388608.0f - 1.0f;
  }
  std::vector<float> Values(int64_t n) {
    std::vector<float> out(static_cast<size_t>(n));
    for (float& v : out) v = Next();
    return out;
  }
  std::vector<std::byte> Stored(DType type, int64_t n) {
    std::vector<std::byte> out(DTypeBytes(type, static_cast<size_t>(n)));
    if (type == DType::kQ8_0) {
      for (size_t i = 0; i < out.size(); ++i) {
        state_ = state_ * 1664525u + 1013904223u;
        const bool scale_top = i % kQ8BlockBytes == 1;
        out[i] = scale_top ? std::byte{0x1c} : static_cast<std::byte>(state_ >> 24);
      }
      return out;
    }
    for (size_t i = 0; i < static_cast<size_t>(n); ++i) {
      StoreFromF32(type, out.data(), i, Next() / 32);
    }
    return out;
  }

 private:
  uint32_t state_ = 1;
};

struct Weight {
  Weight(DType type, int64_t n_out, int64_t n_in, Noise& noise)
      : bytes(noise.Stored(type, n_out * n_in)),
        ref{type, bytes.data(), n_out, n_in,
            static_cast<int64_t>(DTypeBytes(type, static_cast<size_t>(n_in)))} {}
  std::vector<std::byte> bytes;
  WeightRef ref;
};

std::string Share(double flops, const std::vector<GemmRate>& rates) {
  std::string out = fmt::format("{:7.1f} GFLOP/s", flops / 1e9);
  for (const GemmRate& r : rates) {
    out += fmt::format(", {:3.0f} % of {} {:.1f}", 100 * flops / r.flops, r.by, r.flops / 1e9);
  }
  return out;
}

constexpr int kRounds = 5;

void BenchLinear(ThreadPool& pool, DType type, GemmPrecision precision) {
  constexpr int64_t kD = 2048, kKv = 512, kFfn = 8192;
  Noise noise;
  const Weight q(type, kD, kD, noise), k(type, kKv, kD, noise), v(type, kKv, kD, noise);
  const Weight o(type, kD, kD, noise), gate(type, kFfn, kD, noise), up(type, kFfn, kD, noise);
  const Weight down(type, kD, kFfn, noise);
  PrefillGemm gemm(pool, precision);
  GemmMeter meter(pool, gemm.Describe(type).ends_with("bf16") ? DType::kBF16 : DType::kF32);
  for (const int64_t m : {64, 128, 512, 2048}) {
    for (const Weight* w : {&q, &k, &v, &o, &gate, &up, &down}) {
      if (!gemm.Reserve(m, w->ref).ok()) return;
    }
    const std::vector<float> x = noise.Values(m * kD);
    const std::vector<float> hidden = noise.Values(m * kFfn);
    std::vector<float> yq(static_cast<size_t>(m * kD)), yk(static_cast<size_t>(m * kKv));
    std::vector<float> yv(yk), yo(yq), yf(hidden);
    const LinearOut qkv[] = {{q.ref, nullptr, yq.data(), kD},
                             {k.ref, nullptr, yk.data(), kKv},
                             {v.ref, nullptr, yv.data(), kKv}};
    const auto flops = [&](std::initializer_list<const Weight*> ws) {
      double n = 0;
      for (const Weight* w : ws) n += 2.0 * static_cast<double>(m * w->ref.n_out * w->ref.n_in);
      return n;
    };
    struct Part {
      const char* name;
      double flops;
      double best = 1e30;
    };
    Part parts[] = {{"q k v", flops({&q, &k, &v})},
                    {"o", flops({&o})},
                    {"gate up", flops({&gate, &up})},
                    {"down", flops({&down})}};
    for (int round = 0; round < kRounds; ++round) {
      meter.Round();
      for (size_t i = 0; i < 4; ++i) {
        const double start = BenchSeconds(pool.size());
        if (i == 0) gemm.Linear(x.data(), m, kD, qkv);
        if (i == 1) gemm.Linear(x.data(), m, kD, o.ref, nullptr, yo.data(), kD);
        if (i == 2) {
          gemm.GatedFfn(x.data(), m, kD, gate.ref, up.ref, nullptr, nullptr, Activation::kSilu,
                        yf.data(), kFfn);
        }
        if (i == 3) gemm.Linear(hidden.data(), m, kFfn, down.ref, nullptr, yo.data(), kD);
        parts[i].best = std::min(parts[i].best, BenchSeconds(pool.size()) - start);
      }
    }
    double all_flops = 0;
    double seconds = 0;
    std::string each;
    for (const Part& p : parts) {
      all_flops += p.flops;
      seconds += p.best;
      each += fmt::format("{}{} {:.0f}", each.empty() ? "" : ", ", p.name, p.flops / p.best / 1e9);
    }
    fmt::print("linear {:5} {:20} m {:4}: {} ({})\n", DTypeName(type), gemm.Describe(type), m,
               Share(all_flops / seconds, meter.Rates()), each);
  }
}

struct AttendCase {
  DType dtype;
  int32_t n_heads, n_kv_heads, head_dim, context, rows;
  int32_t window = 0;
};

void BenchAttend(ThreadPool& pool, const AttendCase& c, GemmPrecision precision, GemmMeter& meter) {
  constexpr int32_t kBlock = 64;
  Noise noise;
  const int64_t row_values = int64_t{2} * c.n_kv_heads * c.head_dim;
  std::vector<std::byte> kv = noise.Stored(c.dtype, c.context * row_values);
  std::vector<int32_t> table(static_cast<size_t>(c.context / kBlock));
  std::iota(table.rbegin(), table.rend(), 0);
  const int64_t values = int64_t{c.rows} * c.n_heads * c.head_dim;
  const std::vector<float> q = noise.Values(values);
  std::vector<float> o(static_cast<size_t>(values));
  std::vector<RowMeta> rows;
  double flops = 0;
  for (int32_t r = 0; r < c.rows; ++r) {
    rows.push_back({0, c.context - c.rows + r});
    const int32_t read =
        c.window > 0 ? std::min(c.window, rows.back().pos + 1) : rows.back().pos + 1;
    flops += 4.0 * c.head_dim * c.n_heads * read;
  }
  const SeqMeta seq{0, c.rows, c.context, 0, c.context};
  AttendArgs a;
  a.q = q.data();
  a.o = o.data();
  a.kv = MakeKvView(kv.data(), table.data(), kBlock, c.dtype, c.n_kv_heads, c.head_dim, c.head_dim);
  a.plan = AttnPlan::Dense(c.window);
  a.rows = rows.data();
  a.seqs = &seq;
  a.n_rows = c.rows;
  a.n_seqs = 1;
  a.n_heads = c.n_heads;
  a.scale = 1 / std::sqrt(static_cast<float>(c.head_dim));
  PrefillAttention attention(pool, precision);
  if (!attention.Reserve(a).ok()) return;
  double best = 1e30;
  for (int round = 0; round < 3; ++round) {
    meter.Round();
    const double start = BenchSeconds(pool.size());
    attention.Run(a, 0);
    best = std::min(best, BenchSeconds(pool.size()) - start);
  }
  fmt::print("attend {:4} {:20} heads {:2}/{} of {:3}, context {:5}, rows {:4}, window {:4}: {}\n",
             DTypeName(c.dtype), attention.Describe(a.kv), c.n_heads, c.n_kv_heads, c.head_dim,
             c.context, c.rows, c.window, Share(flops / best, meter.Rates()));
}

}  // namespace
}  // namespace omnikv

int main(int argc, char** argv) {
  using namespace omnikv;
  ThreadPool pool(argc > 1 ? std::max(1, std::atoi(argv[1])) : 1);
  BenchLinear(pool, DType::kBF16, GemmPrecision::kFast);
  BenchLinear(pool, DType::kQ8_0, GemmPrecision::kFast);
  BenchLinear(pool, DType::kF32, GemmPrecision::kFast);
  BenchLinear(pool, DType::kQ8_0, GemmPrecision::kFull);
  GemmMeter f32(pool, DType::kF32);
  const AttendCase cases[] = {
      {DType::kBF16, 32, 8, 64, 32768, 256},       {DType::kBF16, 32, 8, 128, 32768, 128},
      {DType::kBF16, 8, 8, 64, 32768, 256},        {DType::kBF16, 32, 8, 64, 2048, 2048},
      {DType::kBF16, 32, 8, 64, 32768, 1024, 512},
  };
  for (const GemmPrecision precision : {GemmPrecision::kFast, GemmPrecision::kFull}) {
    for (const AttendCase& c : cases) BenchAttend(pool, c, precision, f32);
  }
  for (AttendCase c : {cases[0], cases[1]}) {
    c.dtype = DType::kF32;
    c.n_heads /= 4, c.n_kv_heads /= 4;
    BenchAttend(pool, c, GemmPrecision::kFull, f32);
  }
  return 0;
}
