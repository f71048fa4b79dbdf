// What control groups leave to a process, from made-up /proc and /sys.
#include "base/memory.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

namespace omnikv::memory_test {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMiB = size_t{1} << 20;

class ControlGroup : public ::testing::Test {
 protected:
  void SetUp() override {
    root_ = fs::temp_directory_path() / ("omnikv_memory_" + std::to_string(getpid()));
    Write("/proc/meminfo", "MemTotal: 9000000 kB\nMemAvailable: 4096000 kB\n");
  }
  void TearDown() override { fs::remove_all(root_); }
  void Write(const std::string& path, const std::string& text) {
    const fs::path file = root_.string() + path;
    fs::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }
  size_t Available() const { return AvailableMemory(root_.string()); }
  int Cores() const { return PhysicalCores(root_.string()); }

  fs::path root_;
};

TEST_F(ControlGroup, WithoutOneTheMachineIsTheLimit) {
  EXPECT_EQ(Available(), 4000 * kMiB);
  EXPECT_GE(Cores(), 1);
}

TEST_F(ControlGroup, Version2CountsFilePagesAsFree) {
  Write("/sys/fs/cgroup/memory.max", std::to_string(1000 * kMiB));
  Write("/sys/fs/cgroup/memory.current", std::to_string(900 * kMiB));
  EXPECT_EQ(Available(), 100 * kMiB);
  Write("/sys/fs/cgroup/memory.stat",
        "anon 5\ninactive_file " + std::to_string(600 * kMiB) + "\nactive_file 7\n");
  EXPECT_EQ(Available(), 700 * kMiB);
  Write("/sys/fs/cgroup/memory.max", "max");
  EXPECT_EQ(Available(), 4000 * kMiB);
}

TEST_F(ControlGroup, Version1CountsFilePagesAsFree) {
  Write("/proc/self/cgroup", "4:memory:/outside/name\n1:cpu,cpuacct:/\n");
  Write("/sys/fs/cgroup/memory/memory.limit_in_bytes", std::to_string(1000 * kMiB));
  Write("/sys/fs/cgroup/memory/memory.usage_in_bytes", std::to_string(900 * kMiB));
  Write("/sys/fs/cgroup/memory/memory.stat",
        "inactive_file 1\ntotal_inactive_file " + std::to_string(600 * kMiB) + "\n");
  EXPECT_EQ(Available(), 700 * kMiB);
  Write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712");  // none
  EXPECT_EQ(Available(), 4000 * kMiB);
}

TEST_F(ControlGroup, GroupsInsideGroupsLimitToo) {
  Write("/proc/self/cgroup", "0::/slice/unit\n");
  Write("/sys/fs/cgroup/slice/memory.max", std::to_string(2000 * kMiB));
  Write("/sys/fs/cgroup/slice/unit/memory.max", "max");
  EXPECT_EQ(Available(), 2000 * kMiB);
  Write("/sys/fs/cgroup/slice/unit/memory.max", std::to_string(1000 * kMiB));
  EXPECT_EQ(Available(), 1000 * kMiB);
  Write("/proc/self/cgroup", "torn\n0:\n0::\n0::x\n");
  EXPECT_EQ(Available(), 4000 * kMiB);
}

TEST_F(ControlGroup, QuotasLimitCores) {
  const int all = Cores();
  Write("/sys/fs/cgroup/cpu.max", "max 100000");
  EXPECT_EQ(Cores(), all);
  Write("/sys/fs/cgroup/cpu.max", "50000 100000");
  EXPECT_EQ(Cores(), 1);
  fs::remove(root_ / "sys/fs/cgroup/cpu.max");
  Write("/sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000");
  Write("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1");
  EXPECT_EQ(Cores(), all);
  Write("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "50000");
  EXPECT_EQ(Cores(), 1);
}

TEST(AvailableMemory, IsWithinTheLimitOfAddressSpace) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers need the address space";
#endif
  const auto limited = [] {
    const struct rlimit limit = {size_t{1} << 30, size_t{1} << 30};
    ::setrlimit(RLIMIT_AS, &limit);
    const size_t available = AvailableMemory();
    ::_exit(available > 0 && available < size_t{1} << 30 ? 0 : 1);
  };
  EXPECT_EXIT(limited(), testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace omnikv::memory_test
