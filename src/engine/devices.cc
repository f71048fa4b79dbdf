#include "engine/devices.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <optional>
#include <string_view>

#include "backend/cpu/cpu_backend.h"
#include "backend/ref/ref_backend.h"
#include "base/log.h"
#include "base/memory.h"
#include "engine/placement.h"
#ifdef OMNIKV_HAVE_CUDA
#include "backend/cuda/cuda_backend.h"
#endif

namespace omnikv {

namespace {

Result<std::unique_ptr<Backend>> MakeCuda(const EngineOptions& options, int device) {
#ifdef OMNIKV_HAVE_CUDA
  // One core is left to the thread that drives the card. Between two layers the card works for less
  // time than workers look for their next op.
  const int threads = options.threads > 0 ? options.threads : std::max(1, PhysicalCores() - 1);
  const auto make_host = [threads]() -> Result<std::unique_ptr<Backend>> {
    auto cpu = std::make_unique<CpuBackend>(
        CpuOptions{.threads = threads, .spin = std::chrono::milliseconds(2)});
    OKV_RETURN_IF_ERROR(cpu->pool().status());
    return std::unique_ptr<Backend>(std::move(cpu));
  };
  return MakeCudaBackend({.device = device,
                          .memory = options.gpu_memory,
                          .full_precision = options.precision == "full",
                          .make_host = make_host});
#else
  static_cast<void>(options);
  static_cast<void>(device);
  return Unsupported("this build has no CUDA");
#endif
}

// With a disk beside the backend's memory, if the options say so.
Result<std::unique_ptr<Backend>> WithDisk(std::unique_ptr<Backend> backend,
                                          const EngineOptions& options) {
  if (!options.kv_folder.empty()) {
    const Status made = backend->KeepOnDisk(options.kv_folder);
    if (!made.ok()) return made.Prefixed("`kv_folder`");
  }
  return backend;
}

// The N of "cuda:N", 0 for "cuda", nothing for other names.
std::optional<int> CudaDevice(std::string_view name) {
  if (name == "cuda") return 0;
  if (name.rfind("cuda:", 0) != 0) return std::nullopt;
  int device = 0;
  const char* end = name.data() + name.size();
  const auto [at, error] = std::from_chars(name.data() + 5, end, device);
  if (error != std::errc() || at != end || device < 0) return std::nullopt;
  return device;
}

}  // namespace

Result<std::unique_ptr<Backend>> MakeBackend(const EngineOptions& options) {
  const std::string& name = options.device;
  OKV_RETURN_IF_ERROR(CheckOptions(options));
  if (const std::optional<int> device = CudaDevice(name)) {
    auto backend = MakeCuda(options, *device);
    if (backend.ok()) return WithDisk(std::move(*backend), options);
    return backend.status().Prefixed(fmt::format("`device` is '{}'", name));
  }
  if (name == "auto") {
    auto backend = MakeCuda(options, 0);
    if (backend.ok()) return WithDisk(std::move(*backend), options);
    if (backend.status().code() != StatusCode::kUnsupported) return backend;
    LogVerbose("running on the CPU: {}", backend.status().message());
  }
  if (name == "auto" || name == "cpu") {
    auto cpu = std::make_unique<CpuBackend>(CpuOptions{
        .threads = options.threads,
        .precision = options.precision == "full" ? GemmPrecision::kFull : GemmPrecision::kFast});
    OKV_RETURN_IF_ERROR(cpu->pool().status());
    return WithDisk(std::move(cpu), options);
  }
  if (name == "ref") return WithDisk(MakeRefBackend(), options);
  return InvalidArgument(fmt::format("`device` is '{}', expected auto, cpu, cuda or cuda:N", name));
}

}  // namespace omnikv
