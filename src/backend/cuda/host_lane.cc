#include "backend/cuda/host_lane.h"

#include <string>
#include <type_traits>
#include <utility>
#include <variant>

#include "backend/attend_inputs.h"

namespace omnikv::cuda {
namespace {

// ForInputs of an op of Lane::kHost.
template <typename Visit>
void ForInputsOf(Op& op, const Visit& visit) {
  if (auto* sum = std::get_if<SumValuesArgs>(&op)) return ForInputs(*sum, visit);
  ForInputs(std::get<AttendArgs>(op), visit);
}

}  // namespace

Result<std::unique_ptr<HostLane>> HostLane::Create(MakeHost make_host, DeviceMemory& memory,
                                                   PinnedMemory& pinned) {
  std::unique_ptr<HostLane> lane(new HostLane(std::move(make_host)));
  OKV_ASSIGN_OR_RETURN(lane->posts_, HostPosts::Create(memory, pinned));
  return lane;
}

HostLane::~HostLane() {
  if (posts_ != nullptr) posts_->Stop();  // before what its jobs use
}

void HostLane::Start() {
  if (host_ != nullptr) return;
  auto host = make_host_();
  if (!host.ok()) throw OutOfMemory(std::string(host.status().message()));
  posts_->Start();
  host_ = std::move(*host);
}

PostedJobs::Job HostLane::Post(const Op& op, const Launch& launch) {
  Start();
  Op there = op;
  size_t bytes = 0;
  ForInputsOf(there, [&](const auto* array, int64_t n) {
    bytes += PostPieces::InLines(sizeof(*array) * static_cast<size_t>(n));
  });
  const std::shared_ptr<Buffer> room = posts_->Room(bytes);
  PostPieces pieces(room->as<std::byte>());
  ForInputsOf(there, [&](auto*& from, int64_t n) { from = pieces.Add(from, n); });
  posts_->Post(pieces.post(), launch);
  return [this, there, room] { Run(there); };
}

void HostLane::Run(const Op& op) {
  host_->Enqueue(op);
  const Status failure = host_->TakeFailure();
  if (failure.ok()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  failure_ = failure;
}

Status HostLane::TakeFailure() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(failure_, {});
}

}  // namespace omnikv::cuda
