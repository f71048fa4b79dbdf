#include <fmt/format.h>

#include <chrono>
#include <cstring>
#include <limits>

#include "backend/backend.h"
#include "backend/kv_format.h"
#include "base/check.h"
#include "base/log.h"
#include "base/memory.h"

namespace omnikv {
namespace {

class OpList : public Recording {
 public:
  explicit OpList(std::vector<Op> list) : ops(std::move(list)) {}
  std::vector<Op> ops;
};

}  // namespace

Support SupportsKv(const Op& op) {
  return std::visit(
      [](const auto& args) -> Support {
        if constexpr (requires { args.kv; }) {
          for (const auto& [plane, dim] :
               {std::pair{args.kv.k, args.kv.dk}, {args.kv.v, args.kv.dv}}) {
            if (KvFits(plane.dtype, dim)) continue;
            return {false, fmt::format("K or V in {} have heads of {} values, no multiple of {}",
                                       DTypeName(plane.dtype), dim, kBlockValues)};
          }
        }
        return {};
      },
      op);
}

double Backend::TimeAlone(const Op& op) {
  Synchronize();
  const auto start = std::chrono::steady_clock::now();
  Enqueue(op);
  Synchronize();
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  return seconds.count();
}

Result<Buffer> HostBackend::Allocate(size_t bytes, std::string_view what) {
  auto pages = Pages::Reserve(bytes);
  if (!pages.ok()) {
    return ResourceExhausted(fmt::format("{} of host memory for {} cannot be had ({} available)",
                                         HumanBytes(bytes), what, HumanBytes(AvailableMemory())));
  }
  auto owner = std::make_shared<Pages>(std::move(*pages));
  void* data = owner->data();
  return Buffer(data, bytes, [owner](void*) mutable { owner.reset(); });
}

size_t HostBackend::AvailableMemory() const {
  return omnikv::AvailableMemory();
}

void HostBackend::Upload(void* dst, const void* src, size_t bytes) {
  if (bytes != 0) std::memcpy(dst, src, bytes);
}

void HostBackend::Download(void* dst, const void* src, size_t bytes) {
  if (bytes != 0) std::memcpy(dst, src, bytes);
}

void HostBackend::Enqueue(const Op& op, Lane) {
  if (failure_.ok()) failure_ = Reserve(op);
  if (!failure_.ok()) return;
  if (recording_ != nullptr) {
    recording_->push_back(op);
  } else {
    Run(op);
  }
}

std::unique_ptr<Recording> HostBackend::Record(const std::function<void()>& body) {
  OKV_CHECK(recording_ == nullptr);
  std::vector<Op> ops;
  recording_ = &ops;
  body();
  recording_ = nullptr;
  if (!failure_.ok()) return nullptr;
  return std::make_unique<OpList>(std::move(ops));
}

void HostBackend::Replay(const Recording& recording) {
  for (const Op& op : static_cast<const OpList&>(recording).ops) Run(op);
}

}  // namespace omnikv
