// One product as the engines of PrefillGemm see it, and small arithmetic they share.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "backend/ops.h"
#include "base/round.h"

namespace omnikv::prefill {

// y = x · wᵀ + bias, or y = act(x · wᵀ + bias) * (x · upᵀ + up_bias).
struct GemmProduct {
  const WeightRef* w = nullptr;
  const WeightRef* up = nullptr;  // null: a plain product
  const float* bias = nullptr;    // [n_out]; null: none
  const float* up_bias = nullptr;
  Activation act = Activation::kSilu;
  float* y = nullptr;  // [m, ldy]
  int64_t ldy = 0;

  int64_t factors() const { return up != nullptr ? 2 : 1; }
  const WeightRef& Weight(int64_t factor) const { return factor == 0 ? *w : *up; }
  const float* Bias(int64_t factor) const { return factor == 0 ? bias : up_bias; }
};

// Rows of x that are packed at a time: bounds the scratch, and amortises a weight's conversion.
inline constexpr int64_t kWindowRows = 512;

inline int64_t DivUp(int64_t n, int64_t d) {
  return (n + d - 1) / d;
}

// How a window of `rows` rows is cut into tasks: panels of `width` weight rows (of both factors
// together) by `rows` rows of x. Small products are cut finer, so that every thread has a few
// tasks to balance with.
struct TaskGrid {
  TaskGrid(std::span<const GemmProduct> products, int64_t rows, int threads, int64_t max_width,
           int64_t min_width, int64_t min_rows)
      : products_(products), rows_(rows), width_(max_width), row_step_(kWindowRows) {
    const int64_t wanted = threads == 1 ? 1 : 4 * threads;
    while (size() < wanted && width_ / 2 >= min_width) width_ /= 2;
    while (size() < wanted && row_step_ / 2 >= min_rows) row_step_ /= 2;
  }

  struct Task {
    const GemmProduct* product;
    int64_t row, n;       // weight rows
    int64_t first, rows;  // of the window
  };

  int64_t size() const {
    int64_t n = 0;
    for (const GemmProduct& p : products_) n += DivUp(p.w->n_out, Step(p));
    return n * DivUp(rows_, row_step_);
  }
  int64_t Step(const GemmProduct& p) const { return width_ / p.factors(); }
  int64_t row_step() const { return row_step_; }

  Task At(int64_t index) const {
    const int64_t row_blocks = DivUp(rows_, row_step_);
    const int64_t first = index % row_blocks * row_step_;
    index /= row_blocks;
    const GemmProduct* p = products_.data();
    for (; index >= DivUp(p->w->n_out, Step(*p)); ++p) index -= DivUp(p->w->n_out, Step(*p));
    const int64_t row = index * Step(*p);
    return {p, row, std::min(Step(*p), p->w->n_out - row), first,
            std::min(row_step_, rows_ - first)};
  }

 private:
  std::span<const GemmProduct> products_;
  int64_t rows_, width_, row_step_;
};

}  // namespace omnikv::prefill
