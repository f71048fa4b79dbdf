#include "backend/cuda/pinned_memory.h"

#include <cuda_runtime.h>
#include <fmt/format.h>
#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cctype>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "base/log.h"
#include "base/memory.h"

#ifndef MADV_POPULATE_WRITE  // Linux 5.14
#define MADV_POPULATE_WRITE 23
#endif

namespace omnikv::cuda {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kPage = 4096;  // no machine with such a card has smaller ones
constexpr int kMostThreads = 16;
constexpr unsigned kFlags = cudaHostRegisterPortable | cudaHostRegisterMapped;

using Clock = std::chrono::steady_clock;

double Seconds(Clock::time_point since) {
  return std::chrono::duration<double>(Clock::now() - since).count();
}

// The NUMA node that a card hangs on, or -1.
int NodeOf(int device) {
  std::array<char, 32> id{};
  if (cudaDeviceGetPCIBusId(id.data(), static_cast<int>(id.size()), device) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return -1;
  }
  for (char& c : id) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  std::ifstream file(fmt::format("/sys/bus/pci/devices/{}/numa_node", id.data()));
  int node = -1;
  return file >> node ? node : -1;
}

// Asks for pages of that node, of another where it has none left. Costs speed only when it fails.
void Prefer(int node, const Pages& pages) {
  constexpr int kBits = 64;
  if (node < 0 || node >= kBits - 1) return;
  const uint64_t mask = uint64_t{1} << node;
  static_cast<void>(
      syscall(SYS_mbind, pages.data(), pages.size(), MPOL_PREFERRED, &mask, kBits, 0));
}

// Takes physical memory for a span, zeroed as such memory is; false when there is none.
bool FaultIn(std::byte* data, size_t bytes) {
  if (madvise(data, bytes, MADV_POPULATE_WRITE) == 0) return true;
  if (errno == ENOMEM) return false;
  for (size_t at = 0; at < bytes; at += kPage) {  // an old kernel
    *reinterpret_cast<volatile std::byte*>(data + at) = std::byte{0};
  }
  return true;
}

bool FaultInByThreads(const Pages& pages) {
  const auto n = static_cast<size_t>(std::clamp(PhysicalCores(), 1, kMostThreads));
  const size_t share = (pages.size() / kHugePage + n - 1) / n * kHugePage;
  std::atomic<bool> ok = true;
  std::vector<std::thread> threads;
  for (size_t begin = 0; begin < pages.size(); begin += share) {
    threads.emplace_back([&, begin] {
      if (!FaultIn(pages.data() + begin, std::min(share, pages.size() - begin))) ok = false;
    });
  }
  for (std::thread& thread : threads) thread.join();
  return ok;
}

// Whether memory of the host's own making can be pinned, and has one address on both sides.
bool CanRegister(int device) {
  int same = 0;
  auto page = Pages::Reserve(kPage);
  if (!page.ok() ||
      cudaDeviceGetAttribute(&same, cudaDevAttrCanUseHostPointerForRegisteredMem, device) !=
          cudaSuccess ||
      same == 0 || cudaHostRegister(page->data(), kPage, kFlags) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return false;
  }
  void* seen = nullptr;
  const bool ok =
      cudaHostGetDevicePointer(&seen, page->data(), 0) == cudaSuccess && seen == page->data();
  cudaHostUnregister(page->data());
  static_cast<void>(cudaGetLastError());
  return ok;
}

Status Refused(size_t bytes, std::string_view what, size_t available, std::string_view reason) {
  rlimit locked{};
  const bool limited = !reason.empty() && getrlimit(RLIMIT_MEMLOCK, &locked) == 0 &&
                       locked.rlim_cur != RLIM_INFINITY;
  return ResourceExhausted(
      fmt::format("{} of pinned host memory for {} cannot be had ({} available{}){}{}",
                  HumanBytes(bytes), what, HumanBytes(available),
                  limited ? fmt::format(", {} by ulimit -l", HumanBytes(locked.rlim_cur)) : "",
                  reason.empty() ? "" : ": ", reason));
}

// By the driver, in one go.
Result<Buffer> AllocateByDriver(size_t bytes, std::string_view what) {
  if (const size_t available = AvailableMemory(); bytes > available) {
    return Refused(bytes, what, available, "");
  }
  void* data = nullptr;
  const cudaError_t error =
      cudaHostAlloc(&data, std::max<size_t>(bytes, 1), cudaHostAllocMapped | cudaHostAllocPortable);
  if (error != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return Refused(bytes, what, AvailableMemory(), cudaGetErrorString(error));
  }
  std::memset(data, 0, bytes);
  return Buffer(data, bytes, [](void* p) {
    if (p != nullptr) cudaFreeHost(p);
  });
}

}  // namespace

// A piece that a thread of its own makes ready. One faults in and one pins at a time: each of the
// two keeps the machine busy.
class PinnedMemory::Region {
 public:
  Region(Pages pages, std::string what, int device)
      : pages_(std::move(pages)), what_(std::move(what)), device_(device) {
    worker_ = std::thread([this] { Prepare(); });
  }
  ~Region() {
    static_cast<void>(Wait());
    if (!pinned_) return;
    int current = 0;
    cudaGetDevice(&current);
    cudaSetDevice(device_);
    cudaDeviceSynchronize();  // the card may still be using it
    cudaHostUnregister(pages_.data());
    cudaSetDevice(current);
    static_cast<void>(cudaGetLastError());
  }
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  static Buffer BufferOf(const std::shared_ptr<Region>& region, size_t bytes) {
    return Buffer(region->pages_.data(), bytes, [held = region](void*) mutable { held.reset(); });
  }
  Status Wait() {
    if (worker_.joinable()) worker_.join();
    return status_;
  }

 private:
  void Prepare() {
    static std::mutex faulting;
    static std::mutex pinning;
    const size_t bytes = pages_.size();
    const int node = NodeOf(device_);
    double faulting_seconds = 0;
    {
      const std::lock_guard<std::mutex> lock(faulting);
      const auto start = Clock::now();
      Prefer(node, pages_);
      if (!FaultInByThreads(pages_)) {
        status_ = Refused(bytes, what_, AvailableMemory(), "the system has no more");
        return;
      }
      faulting_seconds = Seconds(start);
    }
    const std::lock_guard<std::mutex> lock(pinning);
    const auto start = Clock::now();
    cudaError_t error = cudaSetDevice(device_);
    if (error == cudaSuccess) error = cudaHostRegister(pages_.data(), bytes, kFlags);
    pinned_ = error == cudaSuccess;
    if (pinned_) {
      LogVerbose("{}: {} of the host, near node {}, faulted in in {:.3f} s and pinned in {:.3f} s",
                 what_, HumanBytes(bytes), node, faulting_seconds, Seconds(start));
      return;
    }
    static_cast<void>(cudaGetLastError());
    status_ = Refused(bytes, what_, AvailableMemory(), cudaGetErrorString(error));
  }

  Pages pages_;
  std::string what_;
  int device_;
  std::thread worker_;
  // The worker's until it is joined.
  Status status_;
  bool pinned_ = false;
};

bool PinnedMemory::TakesRegion(size_t bytes) {
  if (bytes < 2 * kHugePage) return false;
  if (!registers_) registers_ = CanRegister(device_);
  return *registers_;
}

Result<std::shared_ptr<PinnedMemory::Region>> PinnedMemory::Start(size_t bytes,
                                                                  std::string_view what) {
  std::erase_if(started_, [](const auto& region) { return region.expired(); });
  if (started_.empty()) left_ = AvailableMemory();
  // Asked for here: past what there is, the system ends the process rather than refuse a page.
  if (bytes > left_) return Refused(bytes, what, left_, "");
  OKV_ASSIGN_OR_RETURN(Pages pages, Pages::Reserve(bytes));
  // A child of this process has no use for it, and would be given a copy of all that is pinned.
  madvise(pages.data(), pages.size(), MADV_DONTFORK);
  left_ -= bytes;
  return std::make_shared<Region>(std::move(pages), std::string(what), device_);
}

Result<Buffer> PinnedMemory::AllocateLater(size_t bytes, std::string_view what) {
  if (!TakesRegion(bytes)) return AllocateByDriver(bytes, what);
  OKV_ASSIGN_OR_RETURN(const std::shared_ptr<Region> region, Start(bytes, what));
  started_.push_back(region);
  return Region::BufferOf(region, bytes);
}

Result<Buffer> PinnedMemory::Allocate(size_t bytes, std::string_view what) {
  if (!TakesRegion(bytes)) return AllocateByDriver(bytes, what);
  OKV_ASSIGN_OR_RETURN(const std::shared_ptr<Region> region, Start(bytes, what));
  OKV_RETURN_IF_ERROR(region->Wait());
  return Region::BufferOf(region, bytes);
}

Status PinnedMemory::Await() {
  Status status;
  for (const std::weak_ptr<Region>& started : std::exchange(started_, {})) {
    const std::shared_ptr<Region> region = started.lock();
    if (region == nullptr) continue;
    const Status one = region->Wait();
    if (status.ok()) status = one;
  }
  return status;
}

}  // namespace omnikv::cuda
