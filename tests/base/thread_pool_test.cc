#include "base/thread_pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <numeric>

namespace omnikv::thread_pool_test {
namespace {

// One thread, as many as the machine has, and more.
class ThreadPoolTest : public testing::TestWithParam<int> {};

TEST_P(ThreadPoolTest, RunsOnceOnEveryThread) {
  ThreadPool pool(GetParam());
  EXPECT_EQ(pool.size(), GetParam());
  std::vector<int> calls(static_cast<size_t>(GetParam()), 0);
  for (int job = 0; job < 200; ++job) {
    pool.Run([&](int thread) { ++calls[static_cast<size_t>(thread)]; });
  }
  EXPECT_EQ(calls, std::vector<int>(static_cast<size_t>(GetParam()), 200));
}

TEST_P(ThreadPoolTest, ParallelForTakesEachIndexOnce) {
  ThreadPool pool(GetParam(), false);
  for (int64_t n : {0, 1, 2, 7, 1000}) {
    for (int64_t grain : {0, 1, 3, 2000}) {
      std::vector<std::atomic<int>> seen(static_cast<size_t>(n));
      std::atomic<bool> fits{true};
      pool.ParallelFor(n, grain, [&](int64_t begin, int64_t end, int thread) {
        if (thread < 0 || thread >= GetParam() || end - begin > std::max<int64_t>(grain, 1)) {
          fits = false;
        }
        for (int64_t i = begin; i < end; ++i) ++seen[static_cast<size_t>(i)];
      });
      EXPECT_TRUE(fits);
      EXPECT_TRUE(std::all_of(seen.begin(), seen.end(), [](const auto& s) { return s == 1; }))
          << n << " in pieces of " << grain;
    }
  }
}

// Whoever comes takes part, the caller always; late threads never run a body that has returned.
TEST_P(ThreadPoolTest, SharesWithThoseThatCome) {
  ThreadPool pool(GetParam());
  for (int job = 0; job < 2000; ++job) {
    std::vector<std::atomic<int>> calls(static_cast<size_t>(GetParam()));
    std::atomic<int> left{16};
    pool.Share([&](int thread) {
      ++calls[static_cast<size_t>(thread)];
      while (left.fetch_sub(1) > 0) {
      }
    });
    ASSERT_EQ(calls[0], 1);
    ASSERT_TRUE(std::all_of(calls.begin(), calls.end(), [](const auto& n) { return n <= 1; }));
    if (job % 7 == 0) pool.Run([&](int thread) { ++calls[static_cast<size_t>(thread)]; });
  }
}

// With every core taken, work that is shared goes on: nothing waits for a worker without a core.
TEST(ThreadPoolTest, SharesOnABusyMachine) {
  std::atomic<bool> stop{false};
  std::vector<std::thread> busy;
  for (unsigned i = 0; i < 2 * std::max(1u, std::thread::hardware_concurrency()); ++i) {
    busy.emplace_back([&] {
      while (!stop) {
      }
    });
  }
  ThreadPool pool(2);
  std::atomic<int64_t> sum{0};
  for (int job = 0; job < 3000; ++job) {
    pool.ParallelFor(8, 1, [&](int64_t begin, int64_t, int) { sum += begin; });
  }
  stop = true;
  for (std::thread& t : busy) t.join();
  EXPECT_EQ(sum, 3000 * 28);
}

TEST_P(ThreadPoolTest, WakesParkedThreads) {
  ThreadPool pool(GetParam());
  std::atomic<int> calls{0};
  for (int i = 0; i < 5; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(3));  // longer than any spin
    pool.Run([&](int) { ++calls; });
  }
  EXPECT_EQ(calls, 5 * GetParam());
}

TEST_P(ThreadPoolTest, PublishesTheJobsWritesToTheCaller) {
  ThreadPool pool(GetParam());
  std::vector<int64_t> data(10000, 0);
  for (int64_t round = 1; round <= 20; ++round) {
    pool.ParallelFor(10000, 100, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) data[static_cast<size_t>(i)] += i;
    });
    ASSERT_EQ(std::accumulate(data.begin(), data.end(), int64_t{0}), round * 10000 * 9999 / 2);
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, ThreadPoolTest, testing::Values(1, 2, 3, 8));

TEST(ThreadPoolTest, LeavesTheCallersAffinityAlone) {
  cpu_set_t before;
  cpu_set_t after;
  ASSERT_EQ(sched_getaffinity(0, sizeof(before), &before), 0);
  ThreadPool pool(2, true);
  pool.Run([](int) {});
  ASSERT_EQ(sched_getaffinity(0, sizeof(after), &after), 0);
  EXPECT_TRUE(CPU_EQUAL(&before, &after));
}

}  // namespace
}  // namespace omnikv::thread_pool_test
