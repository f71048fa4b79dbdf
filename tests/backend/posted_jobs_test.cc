#include "backend/posted_jobs.h"

#include <gtest/gtest.h>

#include <vector>

namespace omnikv::posted_jobs_test {
namespace {

using Job = PostedJobs::Job;

// A device that posts and waits as a stream of it would.
struct Device {
  PostedJobs::Counts counts;
  void Post() { counts.posted.fetch_add(1, std::memory_order_release); }
  void Await(uint64_t number) const {
    while (counts.done.load(std::memory_order_acquire) < number) std::this_thread::yield();
  }
};

TEST(PostedJobs, EachRunsAfterItsPostAndBeforeItsCount) {
  Device device;
  PostedJobs jobs(device.counts);
  ASSERT_TRUE(jobs.Start().ok());
  std::vector<uint64_t> ran;  // the thread's, until counts say otherwise
  std::vector<Job> step;
  for (uint64_t i = 0; i < 3; ++i) {
    step.push_back([&ran, &device, i] {
      EXPECT_GT(device.counts.posted.load(), ran.size()) << "before its post";
      EXPECT_EQ(device.counts.done.load(), ran.size()) << "counted before it ran";
      ran.push_back(i);
    });
  }
  jobs.Run(step);
  jobs.Run(step);  // a replay
  EXPECT_EQ(device.counts.done.load(), 0u);
  for (uint64_t n = 1; n <= 6; ++n) {
    device.Post();
    device.Await(n);
    ASSERT_EQ(ran.size(), n);
  }
  EXPECT_EQ(ran, (std::vector<uint64_t>{0, 1, 2, 0, 1, 2}));
  // Posts that come before their jobs.
  device.Post();
  device.Post();
  jobs.Run({step.data(), 2});
  jobs.Drain();
  EXPECT_EQ(device.counts.done.load(), 8u);
  EXPECT_EQ(ran.size(), 8u);
}

TEST(PostedJobs, EndsWhileAPostIsAwaited) {
  Device device;
  bool ran = false;
  {
    PostedJobs jobs(device.counts, std::chrono::microseconds(10));
    ASSERT_TRUE(jobs.Start().ok());
    const Job never = [&] { ran = true; };
    jobs.Run({&never, 1});
  }
  EXPECT_FALSE(ran);
  EXPECT_EQ(device.counts.done.load(), 0u);
}

}  // namespace
}  // namespace omnikv::posted_jobs_test
