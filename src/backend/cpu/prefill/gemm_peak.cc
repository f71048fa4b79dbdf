#include "backend/cpu/prefill/gemm_peak.h"

#include <dlfcn.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <functional>

#include "backend/cpu/prefill/amx_kernels.h"
#include "backend/cpu/prefill/gemm.h"
#include "backend/cpu/prefill/onednn.h"

namespace omnikv {
namespace {

using prefill::OneDnn;

constexpr int64_t kRows = 512;  // of a thread
constexpr int64_t kColumns = 2048;
constexpr int64_t kInner = 2048;

// The part of the BLAS interface that is used here, as every BLAS has it.
using Sgemm = void (*)(int order, int trans_a, int trans_b, int m, int n, int k, float alpha,
                       const float* a, int lda, const float* b, int ldb, float beta, float* c,
                       int ldc);
constexpr int kRowMajor = 101;
constexpr int kNoTrans = 111;
constexpr int kTrans = 112;

struct Contender {
  Contender(std::string by, std::function<void()> body) : run(std::move(body)) {
    rate.by = std::move(by);
  }

  GemmRate rate;
  std::function<void()> run;
};

// Operands of all threads. Small values of both signs: sums stay finite, and nothing is zero.
struct Operands {
  Operands(int n_threads, DType of) : type(of), bytes(of == DType::kBF16 ? 2 : 4) {
    x.resize(static_cast<size_t>(n_threads * kRows * kInner));
    w.resize(static_cast<size_t>(kColumns * kInner));
    y.resize(static_cast<size_t>(n_threads * kRows * kColumns));
    uint32_t state = 1;
    const auto next = [&state] {
      state = state * 1664525u + 1013904223u;
      return static_cast<float>(state >> 8) / 8388608.0f - 1.0f;
    };
    for (float& v : x) v = next();
    for (float& v : w) v = next();
    x_typed.resize(x.size() * bytes);
    w_typed.resize(w.size() * bytes);
    for (size_t i = 0; i < x.size(); ++i) StoreFromF32(type, x_typed.data(), i, x[i]);
    for (size_t i = 0; i < w.size(); ++i) StoreFromF32(type, w_typed.data(), i, w[i]);
  }

  DType type;
  size_t bytes;                             // of a value of `type`
  std::vector<float> x, w, y;               // [threads, kRows, kInner] | [kColumns, kInner] | ...
  std::vector<std::byte> x_typed, w_typed;  // the same as `type`
};

void AddOwn(ThreadPool& pool, PrefillGemm& gemm, Operands& o, std::vector<Contender>& out) {
  const WeightRef w{.format = o.type,
                    .data = o.w_typed.data(),
                    .n_out = kColumns,
                    .n_in = kInner,
                    .row_bytes = static_cast<int64_t>(o.bytes) * kInner};
  if (!gemm.Reserve(pool.size() * kRows, w).ok()) return;
  out.push_back({"omnikv " + gemm.Describe(o.type), [&pool, &gemm, &o, w] {
                   gemm.Linear(o.x.data(), pool.size() * kRows, kInner, w, nullptr, o.y.data(),
                               kColumns);
                 }});
}

void AddOneDnn(ThreadPool& pool, OneDnn& dnn, Operands& o, std::vector<Contender>& out) {
  const OneDnn::Product* product = dnn.Prepare({.type = o.type,
                                                .packed_w = true,
                                                .m = kRows,
                                                .n = kColumns,
                                                .k = kInner,
                                                .ldx = kInner,
                                                .ldw = kInner,
                                                .ldy = kColumns});
  if (product == nullptr) return;
  o.w_typed.resize(std::max(o.w_typed.size(), OneDnn::WeightBytes(*product)));
  const char* name = o.type == DType::kBF16 ? "oneDNN bf16" : "oneDNN f32";
  out.push_back({name, [&pool, &dnn, &o, product] {
                   pool.Run([&](int t) {
                     dnn.Run(*product, t,
                             o.x_typed.data() + static_cast<size_t>(t * kRows * kInner) * o.bytes,
                             o.w_typed.data(), o.y.data() + t * kRows * kColumns);
                   });
                 }});
}

void AddOpenBlas(ThreadPool& pool, Operands& o, std::vector<Contender>& out) {
  void* library = dlopen("libopenblas.so.0", RTLD_NOW | RTLD_LOCAL);  // stays open: it has threads
  if (library == nullptr) return;
  const auto sgemm = reinterpret_cast<Sgemm>(dlsym(library, "cblas_sgemm"));
  const auto set_threads =
      reinterpret_cast<void (*)(int)>(dlsym(library, "openblas_set_num_threads"));
  if (sgemm == nullptr || set_threads == nullptr) return;
  set_threads(1);
  out.push_back({"OpenBLAS f32", [&pool, &o, sgemm] {
                   pool.Run([&](int t) {
                     sgemm(kRowMajor, kNoTrans, kTrans, kRows, kColumns, kInner, 1,
                           o.x.data() + t * kRows * kInner, kInner, o.w.data(), kInner, 0,
                           o.y.data() + t * kRows * kColumns, kColumns);
                   });
                 }});
}

}  // namespace

struct GemmMeter::Impl {
  Impl(ThreadPool& threads, DType type)
      : pool(threads), gemm(threads), operands(threads.size(), TypeFor(gemm, type)) {
    AddOwn(pool, gemm, operands, contenders);
    auto opened = OneDnn::Open(pool.size());
    if (opened.ok()) {
      dnn = std::move(*opened);
      AddOneDnn(pool, *dnn, operands, contenders);
    }
    if (operands.type == DType::kF32) AddOpenBlas(pool, operands, contenders);
  }

  static DType TypeFor(const PrefillGemm& gemm, DType type) {
    return gemm.Describe(type) == gemm.Describe(DType::kF32) ? DType::kF32 : type;
  }

  ThreadPool& pool;
  PrefillGemm gemm;
  Operands operands;
  std::unique_ptr<OneDnn> dnn;
  std::vector<Contender> contenders;
};

GemmMeter::GemmMeter(ThreadPool& pool, DType type) : impl_(std::make_unique<Impl>(pool, type)) {}
GemmMeter::~GemmMeter() = default;

void GemmMeter::Round() {
  const int n_threads = impl_->pool.size();
  for (Contender& c : impl_->contenders) {
    const double start = BenchSeconds(n_threads);
    c.run();
    const double took = BenchSeconds(n_threads) - start;
    c.rate.flops = std::max(c.rate.flops, 2.0 * kRows * kColumns * kInner * n_threads / took);
  }
}

std::vector<GemmRate> GemmMeter::Rates() const {
  std::vector<GemmRate> rates;
  for (const Contender& c : impl_->contenders) rates.push_back(c.rate);
  std::stable_sort(rates.begin(), rates.end(),
                   [](const GemmRate& a, const GemmRate& b) { return a.flops > b.flops; });
  return rates;
}

GemmRate MeasureGemmPeak(ThreadPool& pool, DType type, double seconds) {
  GemmMeter meter(pool, type);
  const auto stop = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  do {
    meter.Round();
  } while (std::chrono::steady_clock::now() < stop);
  return meter.Rates().front();
}

double MeasureAmxPeak(ThreadPool& pool) {
  if (!prefill::AmxBf16Usable()) return 0;
  constexpr int64_t kRounds = 20000;
  double best = 0;
  for (int i = 0; i < 20; ++i) {
    const double start = BenchSeconds(pool.size());
    pool.Run([](int) { prefill::AmxSpin(kRounds); });
    const double took = BenchSeconds(pool.size()) - start;
    best = std::max(best, prefill::kAmxSpinFlops * kRounds * pool.size() / took);
  }
  return best;
}

double BenchSeconds(int n_threads) {
  timespec now{};
  clock_gettime(n_threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

}  // namespace omnikv
