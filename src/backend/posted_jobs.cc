#include "backend/posted_jobs.h"

#include <fmt/format.h>

#include <system_error>
#include <utility>

namespace omnikv {
namespace {

constexpr auto kNap = std::chrono::microseconds(50);

}  // namespace

Status PostedJobs::Start() {
  try {
    thread_ = std::thread([this] { Work(); });
  } catch (const std::system_error& error) {
    return ResourceExhausted(
        fmt::format("the system gives no thread to work beside the device ({})", error.what()));
  }
  return {};
}

PostedJobs::~PostedJobs() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void PostedJobs::Run(std::span<const Job> jobs) {
  if (jobs.empty()) return;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    jobs_.insert(jobs_.end(), jobs.begin(), jobs.end());
    idle_ = false;
  }
  changed_.notify_all();
}

void PostedJobs::Drain() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return idle_; });
}

bool PostedJobs::AwaitPost(uint64_t number) const {
  const auto start = std::chrono::steady_clock::now();
  while (counts_.posted.load(std::memory_order_acquire) < number) {
    if (stop_) return false;
    if (std::chrono::steady_clock::now() - start > look_) std::this_thread::sleep_for(kNap);
  }
  return true;
}

void PostedJobs::Work() {
  for (uint64_t number = 1;; ++number) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (jobs_.empty()) {
      idle_ = true;
      changed_.notify_all();
      changed_.wait(lock, [&] { return stop_ || !jobs_.empty(); });
    }
    if (stop_) return;
    const Job job = std::move(jobs_.front());
    jobs_.pop_front();
    lock.unlock();
    if (!AwaitPost(number)) return;
    job();
    counts_.done.store(number, std::memory_order_release);  // whatever came of it: it is waited for
  }
}

}  // namespace omnikv
