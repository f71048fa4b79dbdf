#include "backend/fusion.h"

#include <optional>
#include <utility>

namespace omnikv {
namespace {

// Whether `linear` reads, as it is, what `op`, an attention or a gated product, writes.
bool Reads(const LinearArgs& linear, const Op& op) {
  const auto reads = [&](const float* out, int32_t n_rows, int64_t width) {
    return linear.x == out && linear.n_rows == n_rows && linear.w.n_in == width;
  };
  if (const auto* a = std::get_if<AttendArgs>(&op)) {
    return a->Heads() == a->n_heads && reads(a->o, a->n_rows, int64_t{a->n_heads} * a->kv.dv);
  }
  if (const auto* a = std::get_if<NormGatedFfnArgs>(&op)) {
    return reads(a->out, a->n_rows, a->gate.n_out);
  }
  return false;
}

bool LeavesBf16(const Op& op, const FusionRules& rules) {
  const bool may =
      std::holds_alternative<AttendArgs>(op) || std::holds_alternative<NormGatedFfnArgs>(op);
  return may && rules.leaves_bf16(op);
}

}  // namespace

Residual* ResidualOf(Op& op) {
  if (auto* a = std::get_if<NormQkvRopeAppendArgs>(&op)) return &a->in;
  if (auto* a = std::get_if<NormGatedFfnArgs>(&op)) return &a->in;
  if (auto* a = std::get_if<NormLogitsArgs>(&op)) return &a->in;
  return nullptr;
}

int32_t ResidualRows(const Op& op) {
  if (const auto* a = std::get_if<NormQkvRopeAppendArgs>(&op)) return a->n_rows;
  if (const auto* a = std::get_if<NormGatedFfnArgs>(&op)) return a->n_rows;
  if (const auto* a = std::get_if<NormLogitsArgs>(&op)) return a->n_rows;
  return 0;
}

bool AwaitsNext(const Op& op, const FusionRules& rules) {
  return std::holds_alternative<LinearArgs>(op) || LeavesBf16(op, rules);
}

FusedOp Fuse(const Op& op, Op* next, const FusionRules& rules) {
  FusedOp fused{.op = op};
  if (next == nullptr) return fused;
  if (const auto* linear = std::get_if<LinearArgs>(&op)) {
    Residual* in = ResidualOf(*next);
    const bool adds = in != nullptr && in->y == linear->y && in->post_norm == nullptr &&
                      in->d == linear->w.n_out && ResidualRows(*next) == linear->n_rows;
    if (!adds) return fused;
    fused.residual = in->x;
    fused.scale = in->scale;
    in->y = nullptr;
    return fused;
  }
  const auto* linear = std::get_if<LinearArgs>(next);
  fused.to_bf16 =
      linear != nullptr && LeavesBf16(op, rules) && rules.reads_bf16(*linear) && Reads(*linear, op);
  return fused;
}

std::vector<FusedOp> Fuse(std::span<const Op> ops, const FusionRules& rules) {
  std::vector<FusedOp> fused;
  std::optional<Op> held;
  for (Op next : ops) {
    if (held) fused.push_back(Fuse(*std::exchange(held, std::nullopt), &next, rules));
    if (AwaitsNext(next, rules)) {
      held = next;
    } else {
      fused.push_back(Fuse(next, nullptr, rules));
    }
  }
  if (held) fused.push_back(Fuse(*held, nullptr, rules));
  return fused;
}

}  // namespace omnikv
