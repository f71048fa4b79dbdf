#include "base/memory.h"

#include <fmt/format.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <limits>
#include <set>
#include <string>
#include <utility>

namespace omnikv {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;

size_t PageSize() {
  return static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

// The first unsigned number of a one-line file, or `fallback` (missing file, or "max").
size_t ReadNumber(const std::string& path, size_t fallback) {
  std::ifstream file(path);
  unsigned long long value = 0;
  return file >> value ? static_cast<size_t>(value) : fallback;
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

size_t AvailableMemory() {
  size_t available = std::numeric_limits<size_t>::max();
  std::ifstream meminfo("/proc/meminfo");
  for (std::string key, unit; meminfo >> key;) {
    unsigned long long kib = 0;
    if (!(meminfo >> kib)) break;
    if (key == "MemAvailable:") available = static_cast<size_t>(kib) << 10;
    std::getline(meminfo, unit);
  }
  constexpr size_t kNone = std::numeric_limits<size_t>::max();
  const size_t limit = ReadNumber("/sys/fs/cgroup/memory.max", kNone);
  if (limit != kNone) {
    const size_t used = ReadNumber("/sys/fs/cgroup/memory.current", 0);
    available = std::min(available, limit > used ? limit - used : 0);
  }
  return available;
}

size_t ResidentMemory() {
  std::ifstream statm("/proc/self/statm");
  size_t total = 0;
  size_t resident = 0;
  return statm >> total >> resident ? resident * PageSize() : 0;
}

int PhysicalCores() {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  if (sched_getaffinity(0, sizeof(mask), &mask) != 0) return 1;
  std::set<std::string> cores;  // sibling lists: equal for the logical CPUs of one core
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &mask)) continue;
    std::ifstream file(
        fmt::format("/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list", cpu));
    std::string siblings;
    cores.insert(file >> siblings ? siblings : std::to_string(cpu));
  }
  int n = std::max<int>(1, static_cast<int>(cores.size()));
  std::ifstream quota_file("/sys/fs/cgroup/cpu.max");
  double quota = 0;
  double period = 0;
  if (quota_file >> quota >> period && period > 0) {
    n = std::min(n, std::max(1, static_cast<int>(std::ceil(quota / period))));
  }
  return n;
}

}  // namespace omnikv
