// Which kernels served an engine's ops.
#pragma once

#include <fmt/format.h>

#include <compare>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "backend/trace/trace_backend.h"

namespace omnikv {

// What distinguishes the ops of a model's steps, as far as the choice of a kernel goes.
struct OpShape {
  std::string name;
  int32_t rows = 0;   // 0: none that matter
  int64_t width = 0;  // of a Linear's input
  bool window = false;

  auto operator<=>(const OpShape&) const = default;
  std::string ToString() const {
    return fmt::format("{} x {}{}{}", name, rows, width > 0 ? fmt::format(" of {}", width) : "",
                       window ? ", window" : "");
  }
};

inline OpShape ShapeOf(const Op& op) {
  OpShape shape{.name = std::string(OpName(op))};
  if (const auto* a = std::get_if<AttendArgs>(&op)) {
    shape.rows = a->n_rows;
    shape.window = a->plan.segments[0].window > 0;
  } else if (const auto* linear = std::get_if<LinearArgs>(&op)) {
    shape.rows = linear->n_rows;
    shape.width = linear->w.n_in;
  } else if (const auto* qkv = std::get_if<NormQkvRopeAppendArgs>(&op)) {
    shape.rows = qkv->n_rows;
  } else if (const auto* ffn = std::get_if<NormGatedFfnArgs>(&op)) {
    shape.rows = ffn->n_rows;
  } else if (const auto* logits = std::get_if<NormLogitsArgs>(&op)) {
    shape.rows = logits->n_out;
  }
  return shape;
}

// Forwards everything to another backend, which it owns, and keeps the first op of each shape, to
// ask for its kernels later.
class KernelLog : public TraceBackend {
 public:
  explicit KernelLog(std::unique_ptr<Backend> inner)
      : TraceBackend(*inner), inner_(std::move(inner)) {
    set_logging(false);
  }
  void Enqueue(const Op& op, Lane lane = Lane::kMain) override {
    ops_.emplace(ShapeOf(op), op);
    TraceBackend::Enqueue(op, lane);
  }

  std::map<OpShape, std::vector<std::string>> Kernels() {
    std::map<OpShape, std::vector<std::string>> kernels;
    for (const auto& [shape, op] : ops_) kernels[shape] = inner_->KernelsOf(op);
    return kernels;
  }

 private:
  std::unique_ptr<Backend> inner_;
  std::map<OpShape, Op> ops_;
};

}  // namespace omnikv
