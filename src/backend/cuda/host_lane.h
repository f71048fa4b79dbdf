// Lane::kHost of a card: a thread of its own runs the ops that the card posts to it
// (host_posts.h).
#pragma once

#include <functional>
#include <memory>
#include <mutex>

#include "backend/backend.h"
#include "backend/cuda/host_posts.h"

namespace omnikv::cuda {

// One thread drives it. Must be destroyed when nothing runs on the card any more.
class HostLane {
 public:
  // `make_host` makes what runs the attentions, before the first.
  using MakeHost = std::function<Result<std::unique_ptr<Backend>>()>;
  static Result<std::unique_ptr<HostLane>> Create(MakeHost make_host, DeviceMemory& memory,
                                                  PinnedMemory& pinned);
  ~HostLane();

  // Enqueues the copy of what `op`, one of Lane::kHost, reads. The job is to be given to
  // posts().Run, once for each time that the copy runs. Throws OutOfMemory, also where threads
  // cannot be had.
  PostedJobs::Job Post(const Op& op, const Launch& launch);
  HostPosts& posts() { return *posts_; }
  // What went wrong since the last call, once.
  Status TakeFailure();

 private:
  explicit HostLane(MakeHost make_host) : make_host_(std::move(make_host)) {}
  void Start();
  void Run(const Op& op);

  MakeHost make_host_;
  std::unique_ptr<HostPosts> posts_;
  std::unique_ptr<Backend> host_;  // null: nothing was posted so far
  std::mutex mutex_;
  Status failure_;
};

}  // namespace omnikv::cuda
