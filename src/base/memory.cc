#include "base/memory.h"

#include <fmt/format.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <limits>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace omnikv {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kNone = std::numeric_limits<size_t>::max();

size_t PageSize() {
  return static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

// The first unsigned number of a one-line file, or `fallback` (missing file, or "max").
size_t ReadNumber(const std::string& path, size_t fallback) {
  std::ifstream file(path);
  unsigned long long value = 0;
  return file >> value ? static_cast<size_t>(value) : fallback;
}

// The number after `key` in a file of lines "key number ...", or `fallback`.
size_t ReadField(const std::string& path, const std::string& key, size_t fallback) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    std::istringstream fields(line);
    std::string name;
    unsigned long long value = 0;
    if (fields >> name >> value && name == key) return static_cast<size_t>(value);
  }
  return fallback;
}

// Folders that may hold the limits of `controller` for this process: those of its control group
// and of all around it, which limit it too. Version 2 has one hierarchy, version 1 one for each
// controller. Inside a container the names may be those outside; then only the mounts exist.
std::vector<std::string> ControlGroups(const std::string& root, const std::string& controller) {
  const std::string v2 = root + "/sys/fs/cgroup";
  const std::string v1 = v2 + "/" + controller;
  std::vector<std::string> folders = {v2, v1};
  std::ifstream file(root + "/proc/self/cgroup");  // lines "id:controller,...:/path"
  for (std::string line; std::getline(file, line);) {
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (second == std::string::npos || line.compare(second, 2, ":/") != 0) continue;
    const std::string controllers = fmt::format(",{},", line.substr(first + 1, second - first - 1));
    const bool unified = controllers == ",,";
    if (!unified && controllers.find(fmt::format(",{},", controller)) == std::string::npos)
      continue;
    for (std::string path = line.substr(second + 1); path.size() > 1;
         path.erase(path.find_last_of('/'))) {
      folders.push_back((unified ? v2 : v1) + path);
    }
  }
  return folders;
}

}  // namespace

Pages::Pages(Pages&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

Pages& Pages::operator=(Pages&& other) noexcept {
  if (this != &other) {
    Release();
    data_ = std::exchange(other.data_, nullptr);
    size_ = std::exchange(other.size_, 0);
  }
  return *this;
}

void Pages::Release() {
  if (data_ != nullptr) munmap(data_, size_);
  data_ = nullptr;
  size_ = 0;
}

Result<Pages> Pages::Reserve(size_t bytes) {
  Pages pages;
  if (bytes == 0) return pages;
  // Spans of a huge page and more are aligned to one, so that the first touch can take it whole.
  const size_t align = bytes >= kHugePage ? kHugePage : PageSize();
  if (bytes > std::numeric_limits<size_t>::max() / 2) {
    return ResourceExhausted(fmt::format("cannot reserve {} bytes of memory", bytes));
  }
  const size_t size = (bytes + align - 1) / align * align;
  const size_t slack = align == kHugePage ? kHugePage : 0;
  void* p = mmap(nullptr, size + slack, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) {
    return ResourceExhausted(fmt::format("cannot reserve {} bytes of memory", size));
  }
  auto* begin = static_cast<std::byte*>(p);
  if (slack != 0) {  // trim to the alignment
    const auto address = reinterpret_cast<uintptr_t>(begin);
    const size_t head = (align - address % align) % align;
    if (head != 0) munmap(begin, head);
    if (slack != head) munmap(begin + head + size, slack - head);
    begin += head;
    madvise(begin, size, MADV_HUGEPAGE);  // advice: a refusal costs speed only
  }
  pages.data_ = begin;
  pages.size_ = size;
  return pages;
}

size_t AvailableMemory(const std::string& root) {
  size_t available = ReadField(root + "/proc/meminfo", "MemAvailable:", kNone >> 10) << 10;
  const auto cap = [&](size_t limit, size_t used, size_t reclaimable) {
    used -= std::min(used, reclaimable);
    available = std::min(available, limit - std::min(limit, used));
  };
  for (const std::string& group : ControlGroups(root, "memory")) {
    const std::string stat = group + "/memory.stat";
    cap(ReadNumber(group + "/memory.max", kNone), ReadNumber(group + "/memory.current", 0),
        ReadField(stat, "inactive_file", 0));
    cap(ReadNumber(group + "/memory.limit_in_bytes", kNone),
        ReadNumber(group + "/memory.usage_in_bytes", 0), ReadField(stat, "total_inactive_file", 0));
  }
  // What the process itself may map (ulimit -v).
  struct rlimit space;
  if (root.empty() && getrlimit(RLIMIT_AS, &space) == 0 && space.rlim_cur != RLIM_INFINITY) {
    cap(static_cast<size_t>(space.rlim_cur), ReadNumber("/proc/self/statm", 0) * PageSize(), 0);
  }
  return available;
}

size_t ResidentMemory() {
  std::ifstream statm("/proc/self/statm");
  size_t total = 0;
  size_t resident = 0;
  return statm >> total >> resident ? resident * PageSize() : 0;
}

int PhysicalCores(const std::string& root) {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  if (sched_getaffinity(0, sizeof(mask), &mask) != 0) return 1;
  std::set<std::string> cores;  // sibling lists: equal for the logical CPUs of one core
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &mask)) continue;
    std::ifstream file(
        fmt::format("{}/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list", root, cpu));
    std::string siblings;
    cores.insert(file >> siblings ? siblings : std::to_string(cpu));
  }
  int n = std::max<int>(1, static_cast<int>(cores.size()));
  const auto cap = [&](double quota, double period) {
    if (quota <= 0 || period <= 0) return;  // none
    n = std::min(n, std::max(1, static_cast<int>(std::ceil(quota / period))));
  };
  for (const std::string& group : ControlGroups(root, "cpu")) {
    double quota = 0;
    double period = 0;
    std::ifstream(group + "/cpu.max") >> quota >> period;
    cap(quota, period);
    std::ifstream(group + "/cpu.cfs_quota_us") >> quota;
    std::ifstream(group + "/cpu.cfs_period_us") >> period;
    cap(quota, period);
  }
  return n;
}

}  // namespace omnikv
