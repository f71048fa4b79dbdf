#include "backend/cpu/prefill/onednn_gemm.h"

#include <algorithm>

#include "base/check.h"

namespace omnikv::prefill {
namespace {

constexpr int64_t kPanelRows = 256;  // weight rows of a task, of both factors of a gated product
constexpr int64_t kMinPanelRows = 64;
constexpr int64_t kMinRows = 128;
// The library compiles a kernel for every number of rows and keeps it: few numbers, then.
constexpr int64_t kRowMultiple = 32;

struct Tile {
  alignas(64) float sums[kWindowRows * kPanelRows];  // [rows, kPanelRows]
};

// Whether a task's product goes straight to y: not where two are to be combined, nor where padding
// rows would be written.
bool Direct(const TaskGrid::Task& task) {
  return task.product->up == nullptr && task.rows % kRowMultiple == 0;
}

// `w` is the task's weight or its second one.
OneDnnShape ShapeOf(const WeightRef& w, const TaskGrid::Task& task) {
  const bool direct = w.format == DType::kBF16;
  return {.type = DType::kBF16,
          .m = RoundUp(task.rows, kRowMultiple),
          .n = task.n,
          .k = w.n_in,
          .ldx = w.n_in,
          .ldw = direct ? w.row_bytes / static_cast<int64_t>(sizeof(Bf16)) : w.n_in,
          .ldy = Direct(task) ? task.product->ldy : kPanelRows};
}

}  // namespace

OneDnnGemm::OneDnnGemm(ThreadPool& pool) : pool_(pool), vector_(BestVectorKernels()) {}

Status OneDnnGemm::Reserve(int64_t max_rows, const WeightRef& w) {
  const int64_t rows = RoundUp(std::min(max_rows, kWindowRows), kRowMultiple);
  const auto packed = static_cast<size_t>(rows * w.n_in) * sizeof(Bf16);
  if (packed > packed_.size()) {
    OKV_ASSIGN_OR_RETURN(packed_, Pages::Reserve(packed));
  }
  // Two sums, then weights that are stored in another format, converted, and one row of them in
  // f32 on the way.
  const auto row = static_cast<size_t>(RoundUp(w.n_in, 32));
  const size_t bytes = 2 * sizeof(Tile) + kPanelRows * row * sizeof(Bf16) + row * sizeof(float);
  if (bytes > scratch_bytes_) {
    scratch_bytes_ = bytes;
    OKV_ASSIGN_OR_RETURN(scratch_, Pages::Reserve(bytes * static_cast<size_t>(pool_.size())));
  }
  return {};
}

bool OneDnnGemm::Run(const float* x, int64_t m, int64_t ldx,
                     std::span<const GemmProduct> products) {
  if (!tried_) {
    tried_ = true;
    auto opened = OneDnn::Open(pool_.size());
    if (opened.ok()) library_ = std::move(*opened);
  }
  if (library_ == nullptr) return false;
  const int64_t n_in = products[0].w->n_in;
  OKV_CHECK(
      static_cast<size_t>(RoundUp(std::min(m, kWindowRows), kRowMultiple) * n_in) * sizeof(Bf16) <=
          packed_.size(),
      "{} rows of {} values were not reserved", m, n_in);
  auto* packed = reinterpret_cast<Bf16*>(packed_.data());
  for (int64_t window = 0; window < m; window += kWindowRows) {
    const int64_t rows = std::min(kWindowRows, m - window);
    const TaskGrid grid(products, rows, pool_.size(), kPanelRows, kMinPanelRows, kMinRows);
    // Every shape there will be, compiled before the threads look them up.
    for (int64_t task = 0; task < grid.size(); ++task) {
      const TaskGrid::Task t = grid.At(task);
      for (int64_t f = 0; f < t.product->factors(); ++f) {
        if (library_->Prepare(ShapeOf(t.product->Weight(f), t)) == nullptr) return false;
      }
    }
    pool_.ParallelFor(rows, 16, [&](int64_t begin, int64_t end, int) {
      for (int64_t r = begin; r < end; ++r) {
        vector_.to_bf16(x + (window + r) * ldx, n_in, packed + r * n_in);
      }
    });
    std::fill(packed + rows * n_in, packed + RoundUp(rows, kRowMultiple) * n_in, Bf16{0});
    pool_.ParallelFor(grid.size(), 1, [&](int64_t begin, int64_t end, int thread) {
      for (int64_t task = begin; task < end; ++task) RunTask(grid.At(task), window, thread);
    });
  }
  return true;
}

void OneDnnGemm::RunTask(const TaskGrid::Task& task, int64_t window, int thread) {
  const GemmProduct& p = *task.product;
  std::byte* scratch = scratch_.data() + static_cast<size_t>(thread) * scratch_bytes_;
  auto* tiles = reinterpret_cast<Tile*>(scratch);
  auto* weights = reinterpret_cast<Bf16*>(tiles + 2);
  auto* f32 = reinterpret_cast<float*>(weights + kPanelRows * RoundUp(p.w->n_in, 32));
  const auto* x = reinterpret_cast<const Bf16*>(packed_.data()) + task.first * p.w->n_in;
  float* y = p.y + (window + task.first) * p.ldy + task.row;

  for (int64_t f = 0; f < p.factors(); ++f) {
    const WeightRef& w = p.Weight(f);
    const void* data = w.Row(task.row);
    if (w.format != DType::kBF16) {
      for (int64_t r = 0; r < task.n; ++r) {
        vector_.to_f32(w.format, w.Row(task.row + r), w.n_in, f32);
        vector_.to_bf16(f32, w.n_in, weights + r * w.n_in);
      }
      data = weights;
    }
    float* out = Direct(task) ? y : tiles[f].sums;
    const int64_t ld = Direct(task) ? p.ldy : kPanelRows;
    library_->Run(*library_->Find(ShapeOf(w, task)), thread, x, data, out);
    const float* bias = p.Bias(f);
    for (int64_t r = 0; bias != nullptr && r < task.rows; ++r) {
      for (int64_t i = 0; i < task.n; ++i) out[r * ld + i] += bias[task.row + i];
    }
  }
  for (int64_t r = 0; !Direct(task) && r < task.rows; ++r) {
    float* sums = tiles[0].sums + r * kPanelRows;
    if (p.up != nullptr) {
      vector_.gate(p.act == Activation::kGeluTanh, sums, tiles[1].sums + r * kPanelRows,
                   RoundUp(task.n, 16));
    }
    std::copy_n(sums, task.n, y + r * p.ldy);
  }
}

}  // namespace omnikv::prefill
