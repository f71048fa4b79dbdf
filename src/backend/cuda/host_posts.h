// What a card posts to a thread of the host: the card's side of PostedJobs.
//
// The two meet in pinned memory. A kernel copies to the host what a job reads and counts it there;
// the thread, which waits for that count, does the job and counts what is done; another kernel
// waits for that. So a recorded step that is replayed needs no word from the thread that drives the
// backend.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "backend/backend.h"
#include "backend/cuda/launch.h"
#include "backend/cuda/memory.h"
#include "backend/cuda/pinned_memory.h"
#include "backend/posted_jobs.h"

namespace omnikv::cuda {

// One thread drives it. Posts come one after another on the card: from one stream, or from streams
// that wait for each other. Must be destroyed when nothing runs on the card any more.
class HostPosts {
 public:
  // Without its thread.
  static Result<std::unique_ptr<HostPosts>> Create(DeviceMemory& memory, PinnedMemory& pinned);

  // Throws OutOfMemory where threads cannot be had. Before the first Post; does nothing later.
  void Start();
  // Pinned memory of at least `bytes` that no post since the last Await has. Throws OutOfMemory.
  std::shared_ptr<Buffer> Room(size_t bytes);
  // Enqueues the copy of the post's pieces, and its count. A job for it is to be given to Run.
  void Post(HostPost post, const Launch& launch);
  // Enqueues the wait for all jobs that were posted.
  void Await(const Launch& launch);
  // The jobs of posts that were enqueued, in their order: as often as they run on the card.
  void Run(std::span<const PostedJobs::Job> jobs) { jobs_->Run(jobs); }
  // Returns when all jobs are done.
  void Drain() { jobs_->Drain(); }
  // Ends the thread.
  void Stop() { jobs_.reset(); }

 private:
  explicit HostPosts(PinnedMemory& pinned) : pinned_(pinned) {}

  PinnedMemory& pinned_;
  Buffer counts_;  // PostedJobs::Counts
  Buffer posted_;  // uint64 [1], the card's: posts so far
  // Of the posts since the last Await: what comes after it runs when those have been read.
  std::vector<std::shared_ptr<Buffer>> rooms_;
  size_t next_room_ = 0;
  // That were too small. To give pinned memory back waits for the card, which a thread that the
  // card waits for must not do.
  std::vector<std::shared_ptr<Buffer>> old_rooms_;
  bool started_ = false;
  std::unique_ptr<PostedJobs> jobs_;
};

// Pieces of a post behind one another in a room, each at the begin of a line.
class PostPieces {
 public:
  static size_t InLines(size_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

  explicit PostPieces(std::byte* room) : to_(room) {}
  // Adds a piece of n values, and returns where it goes.
  template <typename T>
  T* Add(const T* from, int64_t n) {
    return static_cast<T*>(AddBytes(from, sizeof(T) * static_cast<size_t>(n)));
  }
  const HostPost& post() const { return post_; }

 private:
  static constexpr size_t kLine = 64;
  void* AddBytes(const void* from, size_t bytes);

  std::byte* to_;
  HostPost post_;
};

}  // namespace omnikv::cuda
