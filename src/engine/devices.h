// Backends by the name of --device.
#pragma once

#include <memory>
#include <string>

#include "backend/backend.h"
#include "omnikv/options.h"
#include "omnikv/status.h"

namespace omnikv {

// "auto" and "cpu": the CPU; "ref": the reference. kUnsupported for devices this build lacks,
// kInvalidArgument for names it does not know. Reads `device`, `threads` and `precision`.
Result<std::unique_ptr<Backend>> MakeBackend(const EngineOptions& options);

}  // namespace omnikv
