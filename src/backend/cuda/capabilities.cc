#include "backend/cuda/capabilities.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <string>

#include "backend/cuda/many_logits.h"
#include "backend/cuda/memory.h"

namespace omnikv::cuda {
namespace {

constexpr size_t kGraphRoom = size_t{64} << 20;  // bytes that the driver takes for graphs

size_t U(int64_t n) {
  return static_cast<size_t>(n);
}

}  // namespace

Result<NamedDevice> FindDevice(int ordinal) {
  int driver = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0) {
    return Unsupported("no CUDA device: no NVIDIA driver is installed");
  }
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
    const std::string reason = LastError();
    return Unsupported(
        fmt::format("no CUDA device: {}", count == 0 && reason == "no error" ? "none" : reason));
  }
  if (ordinal < 0 || ordinal >= count) {
    return Unsupported(fmt::format("no CUDA device {}, expected 0 to {}", ordinal, count - 1));
  }
  const auto card = cudaSetDevice(ordinal) == cudaSuccess ? ReadDevice(ordinal) : std::nullopt;
  if (!card) {
    return Unsupported(fmt::format("CUDA device {} cannot be used: {}", ordinal, LastError()));
  }
  if (!HasCodeFor(card->device)) {
    return Unsupported(fmt::format(
        "CUDA device {} ({}) is of architecture sm_{}, which this build has no code for", ordinal,
        card->name, card->device.arch));
  }
  return *card;
}

size_t BytesToWork(const StepLimits& limits, const Device& device, bool full_precision) {
  const DType type = full_precision ? DType::kF32 : DType::kBF16;
  // Weights that have the type of products already are not copied to it.
  const bool converts = limits.weights != type && limits.weights != DType::kF32;
  const int32_t few = std::min(limits.max_rows, kMaxDecodeRows);
  const AttendArgs attend{
      .kv = {.n_kv_heads = limits.n_kv_heads, .dk = limits.head_dim, .dv = limits.head_dim},
      .n_rows = few,
      .n_seqs = few,
      .n_heads = limits.n_heads};
  size_t scratch = AttendScratch(attend, device);
  size_t bytes = kGraphRoom;
  if (limits.max_rows > kMaxDecodeRows) {
    AttendArgs prompt = attend;
    prompt.n_seqs = 1;
    for (prompt.n_rows = few; prompt.n_rows <= limits.max_rows; ++prompt.n_rows) {
      scratch = std::max(
          {scratch, AttendHopperScratch(prompt, device), AttendPrefillScratch(prompt, device)});
    }
    const size_t values = U(limits.max_rows) * U(limits.widest);
    bytes += values * DTypeBytes(type, 1) + std::max(4 * values, kLogitsBytes) +
             (converts ? DTypeBytes(type, U(limits.largest)) : 0);
  }
  bytes += scratch;
  return bytes + bytes / 2;  // as GrowingBuffer grows
}

size_t BytesOfSelection(const Device& device) {
  // Kernels of a chain, bound by latency. Measured on an H200 by where steps that choose and dense
  // ones take the same: 27 and 29 us (28 layers with 3,072 values, 32 with 4,096; 3 choices each).
  constexpr double kSeconds = 28e-6;
  constexpr double kAchieved = 0.9;  // of the bandwidth by the clock
  return static_cast<size_t>(kSeconds * kAchieved * device.memory_bytes_per_second);
}

Support SupportsOp(const Op& op, const Device& device) {
  if (const auto* custom = std::get_if<CustomArgs>(&op);
      custom != nullptr && custom->kernels->cuda == nullptr) {
    return {false, fmt::format("{} has no CUDA form", custom->kernels->name)};
  }
  const auto differ = [](const auto* a) { return a != nullptr && a->kv.k.dtype != a->kv.v.dtype; };
  if (differ(std::get_if<AttendArgs>(&op)) || differ(std::get_if<NormQkvRopeAppendArgs>(&op))) {
    return {false, "K and V in different formats"};
  }
  if (const Support kv = SupportsKv(op); !kv.ok) return kv;
  if (const auto* score = std::get_if<ScoreArgs>(&op); score && !CanScore(*score, device)) {
    return {false, fmt::format("scores of {} heads of {} values exceed a block's shared memory",
                               score->n_heads, score->kv.dk)};
  }
  return {};
}

}  // namespace omnikv::cuda
