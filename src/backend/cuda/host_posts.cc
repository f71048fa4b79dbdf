#include "backend/cuda/host_posts.h"

#include <new>
#include <string>
#include <utility>

#include "base/check.h"

namespace omnikv::cuda {

Result<std::unique_ptr<HostPosts>> HostPosts::Create(DeviceMemory& memory, PinnedMemory& pinned) {
  std::unique_ptr<HostPosts> posts(new HostPosts(pinned));
  OKV_ASSIGN_OR_RETURN(posts->counts_,
                       pinned.Allocate(sizeof(PostedJobs::Counts), "counts of the host's work"));
  auto* const counts = new (posts->counts_.as<void>()) PostedJobs::Counts();
  // Here rather than before the first post: a recording would zero it at each replay.
  OKV_ASSIGN_OR_RETURN(posts->posted_, memory.Allocate(sizeof(uint64_t), "the host's work"));
  posts->jobs_ = std::make_unique<PostedJobs>(*counts);
  return posts;
}

void HostPosts::Start() {
  if (std::exchange(started_, true)) return;
  if (const Status status = jobs_->Start(); !status.ok()) {
    started_ = false;
    throw OutOfMemory(std::string(status.message()));
  }
}

std::shared_ptr<Buffer> HostPosts::Room(size_t bytes) {
  if (next_room_ == rooms_.size()) rooms_.emplace_back();
  std::shared_ptr<Buffer>& room = rooms_[next_room_++];
  if (room != nullptr && room->size() >= bytes) return room;
  auto taken = pinned_.Allocate(bytes, "what the host works on");
  if (!taken.ok()) throw OutOfMemory(std::string(taken.status().message()));
  if (room != nullptr) old_rooms_.push_back(std::move(room));
  room = std::make_shared<Buffer>(std::move(*taken));
  return room;
}

void HostPosts::Post(HostPost post, const Launch& launch) {
  OKV_CHECK(started_);
  post.count = posted_.as<uint64_t>();
  post.flag = reinterpret_cast<uint64_t*>(&counts_.as<PostedJobs::Counts>()->posted);
  PostToHost(post, launch);
}

void HostPosts::Await(const Launch& launch) {
  next_room_ = 0;
  const auto& done = counts_.as<PostedJobs::Counts>()->done;
  AwaitHost(posted_.as<uint64_t>(), reinterpret_cast<const uint64_t*>(&done), launch);
}

void* PostPieces::AddBytes(const void* from, size_t bytes) {
  OKV_CHECK(post_.n_pieces < HostPost::kMaxPieces && bytes % sizeof(uint32_t) == 0);
  void* const to = to_;
  post_.pieces[post_.n_pieces++] = {from, to, bytes};
  to_ += InLines(bytes);
  return to;
}

}  // namespace omnikv::cuda
