// Work that a device posts to a thread of the host while it runs recorded steps.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <span>
#include <thread>

#include "omnikv/status.h"

namespace omnikv {

// A thread that does jobs in the order in which they are given to Run, each once the device has
// counted its post, and counts what is done. One thread drives it.
class PostedJobs {
 public:
  // What the device and the thread count, in memory of both, a line of it each. The device writes
  // `posted` and reads `done`.
  struct Counts {
    alignas(64) std::atomic<uint64_t> posted{0};
    alignas(64) std::atomic<uint64_t> done{0};
  };
  using Job = std::function<void()>;

  // `counts` outlive it. A thread that waits for a post looks for `look` and then naps.
  explicit PostedJobs(Counts& counts, std::chrono::microseconds look = std::chrono::milliseconds(5))
      : counts_(counts), look_(look) {}
  // Jobs whose posts have not come are left out.
  ~PostedJobs();
  PostedJobs(const PostedJobs&) = delete;

  // Before the first Run. kResourceExhausted where the system gives no thread.
  Status Start();
  // The jobs of the next posts, in their order.
  void Run(std::span<const Job> jobs);
  // Returns when all jobs are done. REQUIRES that all were posted, or will be.
  void Drain();

 private:
  void Work();
  // Whether the device has counted the post of that number; false where the thread is to end.
  bool AwaitPost(uint64_t number) const;

  Counts& counts_;
  std::chrono::microseconds look_;
  std::mutex mutex_;  // of what follows
  std::condition_variable changed_;
  std::deque<Job> jobs_;
  bool idle_ = true;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace omnikv
