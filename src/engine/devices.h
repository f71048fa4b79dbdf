// Backends by the name of EngineOptions::device.
#pragma once

#include <memory>
#include <string>

#include "backend/backend.h"
#include "omnikv/options.h"
#include "omnikv/status.h"

namespace omnikv {

// "auto": a card where one can be used, else the CPU; "cpu", "cuda" and "cuda:N": just that; "ref":
// the reference. kUnsupported for devices that this build or machine lacks, kInvalidArgument for
// names it does not know and for options out of range; kResourceExhausted when the system has too
// few threads or too little memory. Reads `device`, `threads`, `gpu_memory`, `precision` and
// `kv_folder`.
Result<std::unique_ptr<Backend>> MakeBackend(const EngineOptions& options);

}  // namespace omnikv
