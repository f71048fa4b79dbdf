#include "engine/devices.h"

#include <fmt/format.h>

#include "backend/cpu/cpu_backend.h"
#include "backend/ref/ref_backend.h"

namespace omnikv {

Result<std::unique_ptr<Backend>> MakeBackend(const EngineOptions& options) {
  const std::string& device = options.device;
  if (options.precision != "fast" && options.precision != "full") {
    return InvalidArgument(
        fmt::format("--precision is '{}', expected fast or full", options.precision));
  }
  if (device == "auto" || device == "cpu") {
    return std::unique_ptr<Backend>(MakeCpuBackend(
        {.threads = options.threads,
         .precision = options.precision == "full" ? GemmPrecision::kFull : GemmPrecision::kFast}));
  }
  if (device == "ref") return MakeRefBackend();
  if (device == "cuda" || device.rfind("cuda:", 0) == 0) {
    return Unsupported(
        fmt::format("--device is '{}', but this build has no CUDA: expected auto or cpu", device));
  }
  return InvalidArgument(fmt::format("--device is '{}', expected auto or cpu", device));
}

}  // namespace omnikv
