// Which ops a backend computes together. A function of the ops alone, so that it is tested without
// a device.
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "backend/ops.h"

namespace omnikv {

// What the kernels of a backend can do.
struct FusionRules {
  // Whether an attention or a gated product can leave what it computes as bf16.
  std::function<bool(const Op& op)> leaves_bf16;
  // Whether a product reads x as bf16.
  std::function<bool(const LinearArgs& linear)> reads_bf16;
};

// An op as it is launched.
struct FusedOp {
  Op op;  // a y that is still in its residual is added first, by a kernel of its own
  // Linear: residual += scale * y, and y is not written; null: y is written.
  float* residual = nullptr;
  float scale = 1;
  // Attend, NormGatedFfn: the result is x of the next op, as bf16, and not written.
  bool to_bf16 = false;
};

// Whether the op that follows has a say in how `op` is launched.
bool AwaitsNext(const Op& op, const FusionRules& rules);

// How `op` is launched where `next` follows it; null: nothing does. What it does of `next` is taken
// out of that.
FusedOp Fuse(const Op& op, Op* next, const FusionRules& rules);

// The same of ops that follow each other.
std::vector<FusedOp> Fuse(std::span<const Op> ops, const FusionRules& rules);

// The residual that an op reads first, and its rows; null and 0 where it reads none.
Residual* ResidualOf(Op& op);
int32_t ResidualRows(const Op& op);

}  // namespace omnikv
