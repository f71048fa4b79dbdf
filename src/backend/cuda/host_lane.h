// Lane::kHost of a card: a thread of its own runs the attention that the card posts to it.
//
// The card and the thread meet in pinned memory. A kernel of the main lane copies what an attention
// reads to the host (all but K/V) and counts it there; the thread, which waits for that count, runs
// the attention and counts what is done; another kernel waits for that. So a recorded step that is
// replayed needs no word from the thread that drives the backend.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "backend/backend.h"
#include "backend/cuda/launch.h"
#include "backend/cuda/memory.h"
#include "backend/cuda/pinned_memory.h"

namespace omnikv::cuda {

// One thread drives it. Must be destroyed when nothing runs on the card any more.
class HostLane {
 public:
  // An attention that the card posts, with its inputs in `room`.
  struct Job {
    AttendArgs attend;
    std::shared_ptr<Buffer> room;
  };
  using Jobs = std::vector<Job>;

  // `make_host` makes what runs the attentions, before the first.
  using MakeHost = std::function<Result<std::unique_ptr<Backend>>()>;
  static Result<std::unique_ptr<HostLane>> Create(MakeHost make_host, DeviceMemory& memory,
                                                  PinnedMemory& pinned);
  ~HostLane();

  // Enqueues the copy of what `attend` reads. The job is the thread's once it is given to Run.
  // Throws OutOfMemory, also where threads cannot be had.
  Job Post(const AttendArgs& attend, const Launch& launch);
  // Enqueues the wait for all that was posted.
  void Await(const Launch& launch);
  // The jobs of posts that were enqueued, in their order: as often as they run on the card.
  void Run(const Jobs& jobs);
  // Returns when all jobs have run.
  void Drain();
  // What went wrong since the last call, once.
  Status TakeFailure();

 private:
  // What the card and the thread count, in pinned memory, a line of it each.
  struct Counts {
    alignas(64) std::atomic<uint64_t> posted{0};
    alignas(64) std::atomic<uint64_t> done{0};
  };

  HostLane(MakeHost make_host, PinnedMemory& pinned)
      : make_host_(std::move(make_host)), pinned_(pinned) {}
  void Start();
  void Work();
  // Whether the card has posted the job of that number; false where the lane ends before.
  bool AwaitPost(uint64_t number) const;
  std::shared_ptr<Buffer> Room(size_t bytes);

  MakeHost make_host_;
  std::unique_ptr<Backend> host_;  // null: nothing was posted so far
  PinnedMemory& pinned_;
  Buffer counts_;  // Counts
  Buffer posted_;  // uint64 [1], the card's: posts so far
  // Inputs of the posts since the last Await: what comes after it runs when those have been read.
  std::vector<std::shared_ptr<Buffer>> rooms_;
  size_t next_room_ = 0;

  std::mutex mutex_;  // of what follows
  std::condition_variable changed_;
  std::deque<Job> jobs_;
  bool idle_ = true;
  Status failure_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace omnikv::cuda
