// Options as names and values, and what they mean for each call.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "capi/status.h"
#include "engine/context_store.h"
#include "engine/scheduler.h"

// NOLINTNEXTLINE(readability-identifier-naming): the C API's
struct omnikv_options {
  std::vector<std::pair<std::string, std::string>> values;  // in the order they were set
};

namespace omnikv::capi {

struct BatchOptions {
  SchedulerOptions scheduler;
  ContextStoreOptions store;
};

// kInvalidArgument for a value that is none, and a name that the call does not read. Null: the
// defaults.
Result<EngineOptions> EngineOptionsOf(const omnikv_options* options);
Result<PolicyOptions> PolicyOptionsOf(const omnikv_options* options);
Result<GenerateOptions> GenerateOptionsOf(const omnikv_options* options);
// A request without its prompt and its calls.
Result<Request> RequestOf(const omnikv_options* options);
// `seats`: the default.
Result<BatchOptions> BatchOptionsOf(const omnikv_options* options, int32_t seats);

}  // namespace omnikv::capi
