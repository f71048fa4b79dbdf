#include <fmt/format.h>

#include "backend/kv_format.h"
#include "base/thread_pool.h"
#include "engine/placement.h"
#include "model/limits.h"

namespace omnikv {

Result<DType> KvDType(const std::string& name, std::optional<DType> weights) {
  if (name == "auto") return weights == DType::kF32 ? DType::kF32 : DType::kF16;
  for (const DType t : {DType::kF16, DType::kBF16, DType::kF32, DType::kQ8_0, DType::kQ4_0}) {
    if (name == DTypeName(t)) return t;
  }
  return InvalidArgument(
      fmt::format("`kv_dtype` is '{}', expected auto, f16, bf16, f32, q8_0 or q4_0", name));
}

Status CheckOptions(const EngineOptions& o) {
  if (o.threads < 0 || o.threads > ThreadPool::kMaxThreads) {
    return InvalidArgument(fmt::format("`threads` is {}, expected 0 (physical cores) to {}",
                                       o.threads, ThreadPool::kMaxThreads));
  }
  if (o.precision != "fast" && o.precision != "full") {
    return InvalidArgument(fmt::format("`precision` is '{}', expected fast or full", o.precision));
  }
  OKV_RETURN_IF_ERROR(KvDType(o.kv_dtype, /*weights=*/{}).status());
  if (o.context < 0 || o.context > ModelLimits::kContext) {
    return InvalidArgument(fmt::format("`context` is {}, expected tokens, 0 (the model's) to {}",
                                       o.context, ModelLimits::kContext));
  }
  if (o.prefill_chunk < 0 || o.prefill_chunk > EngineOptions::kMaxPrefillChunk) {
    return InvalidArgument(
        fmt::format("`prefill_chunk` is {}, expected rows, 0 (the device's) to {}", o.prefill_chunk,
                    EngineOptions::kMaxPrefillChunk));
  }
  if (o.place != "auto" && o.place != "device" && o.place != "host" && o.place != "disk") {
    return InvalidArgument(
        fmt::format("`place` is '{}', expected auto, device, host or disk", o.place));
  }
  if (o.kv_folder.empty() && (o.place == "disk" || o.disk_space != 0)) {
    return InvalidArgument(fmt::format("{} is given, but no `kv_folder`, in which K/V could lie",
                                       o.place == "disk" ? "`place` disk" : "`disk_space`"));
  }
  if (o.host_reads != "auto" && o.host_reads != "fetch" && o.host_reads != "attend") {
    return InvalidArgument(
        fmt::format("`host_reads` is '{}', expected auto, fetch or attend", o.host_reads));
  }
  if (o.working_set < 0 || o.working_set > ModelLimits::kContext) {
    return InvalidArgument(
        fmt::format("`working_set` is {}, expected tokens, 0 (what there is room for) to {}",
                    o.working_set, ModelLimits::kContext));
  }
  if (o.max_sessions < 1 || o.max_sessions > 4096) {
    return InvalidArgument(fmt::format("max_sessions is {}, expected 1 to 4096", o.max_sessions));
  }
  if (o.kept_contexts < 0 || o.kept_contexts > 4096) {
    return InvalidArgument(
        fmt::format("`kept_contexts` is {}, expected 0 to 4096", o.kept_contexts));
  }
  if (o.kv_tokens < EngineOptions::kAsManyAsFit) {
    return InvalidArgument(
        fmt::format("`kv_tokens` is {}, expected a number of tokens, or auto", o.kv_tokens));
  }
  return {};
}

}  // namespace omnikv
