// The tokens that an attention reads, whatever its plan looks like: for tests and measurements.
#pragma once

#include <cstdint>
#include <vector>

#include "backend/backend.h"

namespace omnikv {

// Positions by row and KV head, [n_rows * n_kv_heads], ascending: those that `attend` reads by what
// its plan holds in the backend's memory now, none for KV heads that take no part. Waits for
// the backend.
std::vector<std::vector<int32_t>> ResolvePlan(Backend& backend, const AttendArgs& attend);

}  // namespace omnikv
