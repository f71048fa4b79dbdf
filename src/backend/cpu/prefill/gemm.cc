#include "backend/cpu/prefill/gemm.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "backend/cpu/prefill/amx_kernels.h"
#include "backend/cpu/prefill/bf16_kernels.h"
#include "base/check.h"

namespace omnikv {
namespace {

using prefill::Ahead;
using prefill::DivUp;
using prefill::GemmKernels;
using prefill::GemmProduct;
using prefill::kRowUnit;
using prefill::kWindowRows;
using prefill::TaskGrid;

// A task multiplies a panel of at most kPanelRows weight rows by a window of at most kWindowRows
// rows of x, kBlockWords words of n_in at a time. The sums (192 KiB) and the converted weights
// (96 KiB) stay in the second-level cache, one panel of x (32 KiB) in the first.
constexpr int64_t kPanelRows = 96;
constexpr int64_t kBlockWords = 256;
constexpr int64_t kWeightStride = kBlockWords + 16;  // no power of two: rows in different sets
constexpr int64_t kSumStride = kWindowRows + 16;
constexpr int64_t kMinPanelRows = 24;  // of both factors of a gated product
static_assert(kMinPanelRows == 2 * kRowUnit && kPanelRows % kMinPanelRows == 0);

struct Scratch {
  alignas(64) float sums[kPanelRows * kSumStride];
  alignas(64) uint32_t weights[kPanelRows * kWeightStride];
  alignas(64) float values[2 * kBlockWords];
};
constexpr size_t kMaxProducts = 8;

// Values [first, first + n) of weight rows [row, row + rows), to be fetched.
Ahead Block(const WeightRef& w, int64_t row, int64_t rows, int64_t first, int64_t n) {
  const auto bytes = [&w](int64_t values) {
    return static_cast<int64_t>(DTypeBytes(w.format, static_cast<size_t>(values)));
  };
  return {w.Row(row) + bytes(first), rows, w.row_bytes, bytes(n)};
}

}  // namespace

// Rows of x that are packed together.
struct PrefillGemm::Window {
  const GemmKernels& kernels;
  int64_t first;   // row of x
  int64_t rows;    // at most kWindowRows
  int64_t panels;  // of kernels.lanes rows
};

PrefillGemm::PrefillGemm(ThreadPool& pool, GemmPrecision precision, GemmLibrary library)
    : pool_(pool),
      precision_(precision),
      vector_(prefill::BestVectorKernels()),
      bf16_(prefill::Bf16GemmKernels()) {
  const bool wanted = library == GemmLibrary::kAlways ||
                      (library == GemmLibrary::kAuto && prefill::AmxBf16Usable());
  if (wanted && precision == GemmPrecision::kFast) {
    library_ = std::make_unique<prefill::OneDnnGemm>(pool);
  }
}

PrefillGemm::Engine PrefillGemm::EngineFor(DType format) const {
  if (precision_ == GemmPrecision::kFull || format == DType::kF32) return Engine::kF32;
  if (library_ != nullptr) return Engine::kLibrary;
  return bf16_ != nullptr ? Engine::kBf16 : Engine::kF32;
}

const GemmKernels& PrefillGemm::KernelsFor(Engine engine) const {
  return engine != Engine::kF32 && bf16_ != nullptr ? *bf16_ : vector_.gemm;
}

Status PrefillGemm::Reserve(int64_t max_rows, const WeightRef& w) {
  const Engine engine = EngineFor(w.format);
  if (engine == Engine::kLibrary) OKV_RETURN_IF_ERROR(library_->Reserve(max_rows, w));
  const GemmKernels& kernels = KernelsFor(engine);
  const auto bytes =
      static_cast<size_t>(RoundUp(std::min(max_rows, kWindowRows), kernels.lanes) *
                          DivUp(w.n_in, kernels.pack) * static_cast<int64_t>(sizeof(uint32_t)));
  if (bytes > packed_.size()) {
    OKV_ASSIGN_OR_RETURN(packed_, Pages::Reserve(bytes));
  }
  if (scratch_.size() == 0) {
    OKV_ASSIGN_OR_RETURN(scratch_,
                         Pages::Reserve(static_cast<size_t>(pool_.size()) * sizeof(Scratch)));
  }
  return {};
}

std::string PrefillGemm::Describe(DType format) const {
  switch (EngineFor(format)) {
    case Engine::kLibrary:
      return "oneDNN bf16";
    case Engine::kBf16:
      return bf16_->name;
    case Engine::kF32:
      break;
  }
  return fmt::format("f32 ({})", vector_.name);
}

void PrefillGemm::Linear(const float* x, int64_t m, int64_t ldx, const WeightRef& w,
                         const float* bias, float* y, int64_t ldy) {
  const LinearOut out{w, bias, y, ldy};
  Linear(x, m, ldx, std::span(&out, 1));
}

void PrefillGemm::Linear(const float* x, int64_t m, int64_t ldx, std::span<const LinearOut> outs) {
  OKV_CHECK(outs.size() <= kMaxProducts, "{} products", outs.size());
  std::array<Engine, kMaxProducts> engines;  // chosen once: a run may find the library missing
  for (size_t i = 0; i < outs.size(); ++i) engines[i] = EngineFor(outs[i].w.format);
  for (const Engine engine : {Engine::kF32, Engine::kBf16, Engine::kLibrary}) {
    std::array<GemmProduct, kMaxProducts> products;
    size_t n = 0;
    for (size_t i = 0; i < outs.size(); ++i) {
      const LinearOut& out = outs[i];
      if (engines[i] != engine) continue;
      products[n++] = {.w = &out.w, .bias = out.bias, .y = out.y, .ldy = out.ldy};
    }
    if (n > 0) Run(engine, x, m, ldx, std::span(products.data(), n));
  }
}

void PrefillGemm::GatedFfn(const float* x, int64_t m, int64_t ldx, const WeightRef& gate,
                           const WeightRef& up, const float* gate_bias, const float* up_bias,
                           Activation act, float* out, int64_t ldo) {
  OKV_CHECK(gate.n_out == up.n_out && gate.n_in == up.n_in, "gate {}x{}, up {}x{}", gate.n_out,
            gate.n_in, up.n_out, up.n_in);
  const GemmProduct product{&gate, &up, gate_bias, up_bias, act, out, ldo};
  const bool full = gate.format == DType::kF32 || up.format == DType::kF32;
  Run(EngineFor(full ? DType::kF32 : gate.format), x, m, ldx, std::span(&product, 1));
}

void PrefillGemm::Run(Engine engine, const float* x, int64_t m, int64_t ldx,
                      std::span<const GemmProduct> products) {
  if (engine == Engine::kLibrary && library_ != nullptr) {
    if (library_->Run(x, m, ldx, products)) return;
    library_.reset();  // our own kernels from here on
  }
  const GemmKernels& kernels = KernelsFor(engine);
  const int64_t n_in = products[0].w->n_in;
  const int64_t words = DivUp(n_in, kernels.pack);
  OKV_CHECK(RoundUp(std::min(m, kWindowRows), kernels.lanes) * words * 4 <=
                static_cast<int64_t>(packed_.size()),
            "{} rows of {} values were not reserved", m, n_in);
  for (int64_t first = 0; first < m; first += kWindowRows) {
    const int64_t rows = std::min(kWindowRows, m - first);
    const Window window{kernels, first, rows, DivUp(rows, kernels.lanes)};
    pool_.ParallelFor(window.panels, 1, [&](int64_t begin, int64_t end, int thread) {
      for (int64_t p = begin; p < end; ++p) PackPanel(window, x, ldx, n_in, p, thread);
    });
    const TaskGrid grid(products, rows, pool_.size(), kPanelRows, kMinPanelRows, 2 * kernels.lanes);
    pool_.ParallelFor(grid.size(), 1, [&](int64_t begin, int64_t end, int thread) {
      for (int64_t task = begin; task < end; ++task) RunTask(window, grid.At(task), thread);
    });
  }
}

// Blocks of kBlockWords words follow each other, and in each the panels of the window do: what is
// multiplied by one block of weights lies in one piece, spread evenly over the sets of the caches.
uint32_t* PrefillGemm::Packed(const Window& window, int64_t word, int64_t block_words,
                              int64_t panel) const {
  const int64_t before = word * window.panels + block_words * panel;
  return reinterpret_cast<uint32_t*>(packed_.data()) + before * window.kernels.lanes;
}

void PrefillGemm::PackPanel(const Window& window, const float* x, int64_t ldx, int64_t n_in,
                            int64_t panel, int thread) {
  auto& scratch = reinterpret_cast<Scratch*>(scratch_.data())[thread];
  const GemmKernels& kernels = window.kernels;
  const int64_t first = panel * kernels.lanes;
  const int64_t rows = std::min(kernels.lanes, window.rows - first);
  const int64_t words = DivUp(n_in, kernels.pack);
  x += (window.first + first) * ldx;
  for (int64_t word = 0; word < words; word += kBlockWords) {
    const int64_t n = std::min(kBlockWords, words - word);
    uint32_t* out = Packed(window, word, n, panel);
    if (kernels.pack == 1) {
      vector_.transpose(reinterpret_cast<const uint32_t*>(x + word), ldx, rows, n, out,
                        kernels.lanes);
      continue;
    }
    const int64_t values = std::min(2 * n, n_in - 2 * word);
    for (int64_t r = 0; r < rows; ++r) {
      uint32_t* pairs = scratch.weights + r * kWeightStride;
      pairs[n - 1] = 0;  // an odd last value is paired with zero
      vector_.to_bf16(x + r * ldx + 2 * word, values, reinterpret_cast<Bf16*>(pairs));
    }
    vector_.transpose(scratch.weights, kWeightStride, rows, n, out, kernels.lanes);
  }
}

// Rows of weights that pad a task to a multiple of kRowUnit are zero.
void PrefillGemm::LoadWeights(const GemmKernels& kernels, const WeightRef& w, int64_t row,
                              int64_t n, int64_t first, int64_t values, float* f32,
                              uint32_t* out) const {
  const auto skipped = static_cast<int64_t>(DTypeBytes(w.format, static_cast<size_t>(first)));
  for (int64_t r = 0; r < n; ++r, out += kWeightStride) {
    const std::byte* src = w.Row(row + r) + skipped;
    if (kernels.pack == 1) {
      vector_.to_f32(w.format, src, values, reinterpret_cast<float*>(out));
      continue;
    }
    if (values % 2 != 0) out[values / 2] = 0;
    if (w.format == DType::kBF16) {
      std::memcpy(out, src, static_cast<size_t>(values) * sizeof(Bf16));
    } else {
      vector_.to_f32(w.format, src, values, f32);
      vector_.to_bf16(f32, values, reinterpret_cast<Bf16*>(out));
    }
  }
  for (; n % kRowUnit != 0; ++n, out += kWeightStride) {
    std::memset(out, 0, kBlockWords * sizeof(uint32_t));
  }
}

void PrefillGemm::RunTask(const Window& window, const TaskGrid::Task& task, int thread) {
  auto& scratch = reinterpret_cast<Scratch*>(scratch_.data())[thread];
  const GemmKernels& kernels = window.kernels;
  const GemmProduct& product = *task.product;
  const int64_t n_in = product.w->n_in;
  const int64_t words = DivUp(n_in, kernels.pack);
  const int64_t padded = RoundUp(task.n, kRowUnit);
  const int64_t lanes = RoundUp(task.rows, kernels.lanes);

  for (int64_t f = 0; f < product.factors(); ++f) {
    const float* bias = product.Bias(f);
    for (int64_t i = 0; i < padded; ++i) {
      std::fill_n(scratch.sums + (f * padded + i) * kSumStride, lanes,
                  bias != nullptr && i < task.n ? bias[task.row + i] : 0.0f);
    }
  }
  for (int64_t word = 0; word < words; word += kBlockWords) {
    const int64_t n = std::min(kBlockWords, words - word);
    const int64_t first = kernels.pack * word;
    const int64_t next = std::min(first + kernels.pack * n, n_in);
    const int64_t next_values = std::min(kernels.pack * kBlockWords, n_in - next);
    for (int64_t f = 0; f < product.factors(); ++f) {
      LoadWeights(kernels, product.Weight(f), task.row, task.n, first, next - first, scratch.values,
                  scratch.weights + f * padded * kWeightStride);
    }
    for (int64_t r = 0; r < lanes; r += kernels.lanes) {
      // The next block of weights is fetched from memory meanwhile, a part beside each panel.
      Ahead ahead[2];
      for (int64_t f = 0; f < product.factors() && next_values > 0; ++f) {
        const int64_t begin = task.n * r / lanes;
        const int64_t end = task.n * (r + kernels.lanes) / lanes;
        ahead[f] = Block(product.Weight(f), task.row + begin, end - begin, next, next_values);
      }
      kernels.multiply(scratch.weights, kWeightStride, product.factors() * padded,
                       Packed(window, word, n, (task.first + r) / kernels.lanes), task.rows - r, n,
                       ahead, scratch.sums + r, kSumStride);
    }
  }
  if (product.up != nullptr) {
    for (int64_t i = 0; i < task.n; ++i) {
      vector_.gate(product.act == Activation::kGeluTanh, scratch.sums + i * kSumStride,
                   scratch.sums + (padded + i) * kSumStride, lanes);
    }
  }
  float* y = product.y + (window.first + task.first) * product.ldy + task.row;
  vector_.transpose(reinterpret_cast<const uint32_t*>(scratch.sums), kSumStride, task.n, task.rows,
                    reinterpret_cast<uint32_t*>(y), product.ldy);
}

}  // namespace omnikv
