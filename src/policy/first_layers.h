// The check of a setting that policies share whose first layers read everything.
#pragma once

#include <fmt/format.h>

#include <string_view>

#include "policy/policy.h"

namespace omnikv {

// kInvalidArgument where no layer is left to the policy: it would be `full` by another name.
inline Status CheckFirstLayers(std::string_view policy, std::string_view key, int32_t layers,
                               const PolicyContext& context) {
  if (layers < context.n_layers) return {};
  return InvalidArgument(
      fmt::format("policy {}: {} is {}, expected fewer than the model's {} layers of global "
                  "attention",
                  policy, key, layers, context.n_layers));
}

}  // namespace omnikv
