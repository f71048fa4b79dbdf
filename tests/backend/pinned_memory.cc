#include "pinned_memory.h"

#include <cuda_runtime.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>

namespace omnikv {
namespace {

constexpr size_t kPage = 64 << 10;  // blocks of a page have one size
constexpr size_t kGuard = 16;       // bytes before and behind an allocation that nobody may write
constexpr size_t kUnknownSize = ~size_t{0};

// Blocks of powers of two in one region. Freed ones wait in a list of their size.
class Region {
 public:
  void Use(std::byte* base, size_t bytes) {
    page_block_ = static_cast<uint8_t*>(std::calloc(bytes / kPage, 1));
    begin_ = next_ = base;
    end_.store(base + bytes, std::memory_order_release);
  }
  bool InUse() const { return end_.load(std::memory_order_acquire) != nullptr; }
  bool Has(const void* p) const { return InUse() && p >= begin_ && p < end_.load(); }
  size_t used() const { return static_cast<size_t>(next_ - begin_); }

  // REQUIRES align <= kPage / 2.
  void* Take(size_t bytes, size_t align) {
    // Round sizes are aligned as the engine's memory is, others as little as is promised: kernels
    // choose their path by it, and both kinds of paths are to run.
    if (bytes % 512 == 0) align = std::max(align, size_t{256});
    const size_t front = std::max(align, kGuard);
    const size_t block = std::bit_ceil(front + bytes + kGuard);
    const auto log = static_cast<size_t>(std::countr_zero(block));
    std::byte* p = nullptr;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (free_[log] == nullptr) AddPages(block, log);
      p = reinterpret_cast<std::byte*>(free_[log]);
      free_[log] = free_[log]->next;
    }
    std::memset(p, kFreshByte, block);
    return p + front;
  }

  // `bytes` as they were asked for, or kUnknownSize: the guard behind them is not looked at.
  void Give(void* data, size_t bytes) {
    auto* p = static_cast<std::byte*>(data);
    const auto offset = static_cast<size_t>(p - begin_);
    const size_t log = page_block_[offset / kPage];
    const size_t block = size_t{1} << log;
    std::byte* start = begin_ + offset / kPage * kPage + offset % kPage / block * block;
    const auto fresh = [](const std::byte* from, size_t n) {
      return std::all_of(from, from + n, [](std::byte b) { return b == std::byte{kFreshByte}; });
    };
    const size_t behind =
        bytes == kUnknownSize ? 0 : static_cast<size_t>(start + block - p) - bytes;
    const bool whole = fresh(start, static_cast<size_t>(p - start)) &&
                       (behind == 0 || fresh(p + bytes, std::min(behind, size_t{4096})));
    if (auto* handler = on_overrun.load(); !whole && handler != nullptr) handler(bytes);
    const std::lock_guard<std::mutex> lock(mutex_);
    free_[log] = new (start) Free{free_[log]};
  }

  std::atomic<void (*)(size_t)> on_overrun{nullptr};

 private:
  struct Free {
    Free* next;
  };

  void AddPages(size_t block, size_t log) {
    const size_t bytes = std::max(block, kPage);
    if (bytes > static_cast<size_t>(end_.load() - next_)) {
      std::fprintf(stderr, "pinned memory: %zu bytes do not fit in what is left of the region\n",
                   block);
      std::abort();
    }
    for (size_t at = 0; at < bytes; at += block) free_[log] = new (next_ + at) Free{free_[log]};
    std::fill_n(page_block_ + static_cast<size_t>(next_ - begin_) / kPage, bytes / kPage,
                static_cast<uint8_t>(log));
    next_ += bytes;
  }

  std::mutex mutex_;
  std::byte* begin_ = nullptr;
  std::byte* next_ = nullptr;             // pages from here on were never used
  std::atomic<std::byte*> end_{nullptr};  // null: not in use
  uint8_t* page_block_ = nullptr;         // of each page: the logarithm of its blocks' size
  std::array<Free*, 64> free_{};
};

constinit Region region;

void* New(size_t bytes, size_t align) {
  if (region.InUse()) return region.Take(bytes, align);
  if (align <= alignof(std::max_align_t)) return std::malloc(std::max<size_t>(bytes, 1));
  return std::aligned_alloc(align, (bytes + align - 1) / align * align + (bytes == 0 ? align : 0));
}

void Delete(void* p, size_t bytes = kUnknownSize) {
  if (p == nullptr) return;
  if (region.Has(p)) {
    region.Give(p, bytes);
  } else {
    std::free(p);  // from before UsePinnedMemory
  }
}

}  // namespace

std::string UsePinnedMemory(size_t bytes) {
  bytes = bytes / kPage * kPage;
  // Pages of our own rather than cudaHostAlloc's: they outlive the CUDA runtime, which goes before
  // the last static objects that lie in them do. One page more, to align the first.
  void* p =
      mmap(nullptr, bytes + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) return "memory of the host cannot be reserved";
  size_t room = bytes + kPage;
  p = std::align(kPage, bytes, p, room);
  cudaError_t error = cudaHostRegister(p, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped);
  if (error != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    error = cudaHostAlloc(&p, bytes, cudaHostAllocPortable | cudaHostAllocMapped);
  }
  void* on_device = nullptr;
  if (error == cudaSuccess) error = cudaHostGetDevicePointer(&on_device, p, 0);
  if (error != cudaSuccess) {
    return std::string("memory of the host cannot be pinned: ") + cudaGetErrorString(error);
  }
  if (on_device != p) return "the card sees pinned memory at other addresses than the host";
  region.Use(static_cast<std::byte*>(p), bytes);
  return "";
}

void OnOverrun(void (*handler)(size_t bytes)) {
  region.on_overrun = handler;
}

size_t PinnedBytesUsed() {
  return region.used();
}

}  // namespace omnikv

// Every form of the language; not inlined, as compilers would take one of a pair for a mismatch.
#define OKV_NEW [[gnu::noinline]] void* operator new
#define OKV_NEW_ARRAY [[gnu::noinline]] void* operator new[]
#define OKV_DELETE [[gnu::noinline]] void operator delete
#define OKV_DELETE_ARRAY [[gnu::noinline]] void operator delete[]

namespace {

constexpr size_t kDefaultAlign = __STDCPP_DEFAULT_NEW_ALIGNMENT__;

void* NewOrThrow(size_t bytes, size_t align) {
  if (void* p = omnikv::New(bytes, align)) return p;
  throw std::bad_alloc();
}

size_t Of(std::align_val_t align) {
  return static_cast<size_t>(align);
}

}  // namespace

OKV_NEW(size_t n) {
  return NewOrThrow(n, kDefaultAlign);
}
OKV_NEW_ARRAY(size_t n) {
  return NewOrThrow(n, kDefaultAlign);
}
OKV_NEW(size_t n, std::align_val_t a) {
  return NewOrThrow(n, Of(a));
}
OKV_NEW_ARRAY(size_t n, std::align_val_t a) {
  return NewOrThrow(n, Of(a));
}
OKV_NEW(size_t n, const std::nothrow_t&) noexcept {
  return omnikv::New(n, kDefaultAlign);
}
OKV_NEW_ARRAY(size_t n, const std::nothrow_t&) noexcept {
  return omnikv::New(n, kDefaultAlign);
}
OKV_NEW(size_t n, std::align_val_t a, const std::nothrow_t&) noexcept {
  return omnikv::New(n, Of(a));
}
OKV_NEW_ARRAY(size_t n, std::align_val_t a, const std::nothrow_t&) noexcept {
  return omnikv::New(n, Of(a));
}
OKV_DELETE(void* p) noexcept {
  omnikv::Delete(p);
}
OKV_DELETE_ARRAY(void* p) noexcept {
  omnikv::Delete(p);
}
OKV_DELETE(void* p, size_t n) noexcept {
  omnikv::Delete(p, n);
}
OKV_DELETE_ARRAY(void* p, size_t n) noexcept {
  omnikv::Delete(p, n);
}
OKV_DELETE(void* p, std::align_val_t) noexcept {
  omnikv::Delete(p);
}
OKV_DELETE_ARRAY(void* p, std::align_val_t) noexcept {
  omnikv::Delete(p);
}
OKV_DELETE(void* p, size_t n, std::align_val_t) noexcept {
  omnikv::Delete(p, n);
}
OKV_DELETE_ARRAY(void* p, size_t n, std::align_val_t) noexcept {
  omnikv::Delete(p, n);
}
OKV_DELETE(void* p, const std::nothrow_t&) noexcept {
  omnikv::Delete(p);
}
OKV_DELETE_ARRAY(void* p, const std::nothrow_t&) noexcept {
  omnikv::Delete(p);
}
OKV_DELETE(void* p, std::align_val_t, const std::nothrow_t&) noexcept {
  omnikv::Delete(p);
}
OKV_DELETE_ARRAY(void* p, std::align_val_t, const std::nothrow_t&) noexcept {
  omnikv::Delete(p);
}
