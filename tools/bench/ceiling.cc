#include "bench/ceiling.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>
#include <random>
#include <thread>
#include <vector>

#include "base/memory.h"
#include "base/printable.h"
#include "io/nameless_file.h"

namespace omnikv::tools {
namespace {

constexpr int kPasses = 4;

// A vector of the compiler's; wider than the registers is fine, it is split into them.
typedef uint64_t Wide __attribute__((vector_size(64)));  // NOLINT: attribute needs typedef

// The sum of `n` vectors in `kStreams` streams, asking for those kAhead bytes on.
template <size_t kStreams, size_t kAhead>
uint64_t ReadAll(const std::byte* data, size_t bytes) {
  const size_t n = bytes / kStreams / sizeof(Wide);
  const auto* wide = reinterpret_cast<const Wide*>(data);
  Wide sum[kStreams] = {};
  for (size_t i = 0; i < n; ++i) {
    for (size_t s = 0; s < kStreams; ++s) {
      const Wide* at = wide + s * n + i;
      if constexpr (kAhead > 0) __builtin_prefetch(reinterpret_cast<const std::byte*>(at) + kAhead);
      sum[s] += *at;
    }
  }
  Wide total = {};
  for (const Wide& s : sum) total += s;
  return total[0] + total[3] + total[7];
}

// Which way of reading a machine likes best differs; the ceiling is the best of them.
using Reader = uint64_t (*)(const std::byte*, size_t);
constexpr Reader kReaders[] = {ReadAll<1, 0>, ReadAll<4, 0>, ReadAll<1, 2048>, ReadAll<2, 1024>,
                               ReadAll<4, 1024>};

template <typename F>
double BestSeconds(const F& pass) {
  double best = 1e30;
  for (int i = 0; i < kPasses; ++i) {
    const auto start = std::chrono::steady_clock::now();
    pass();
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    best = std::min(best, seconds.count());
  }
  return best;
}

}  // namespace

Result<MemoryCeiling> MeasureMemory(ThreadPool& pool, size_t bytes) {
  OKV_ASSIGN_OR_RETURN(const Pages pages, Pages::Reserve(bytes));
  const auto threads = static_cast<size_t>(pool.size());
  const size_t share = pages.size() / threads / 4096 * 4096;
  pool.Run(
      [&](int t) { std::memset(pages.data() + static_cast<size_t>(t) * share, t + 1, share); });
  std::vector<uint64_t> sinks(threads * 8);  // a cache line each: keeps the reads alive
  MemoryCeiling ceiling;
  double read = 1e30;
  for (const Reader reader : kReaders) {
    read = std::min(read, BestSeconds([&] {
                      pool.Run([&](int t) {
                        const auto i = static_cast<size_t>(t);
                        sinks[8 * i] += reader(pages.data() + i * share, share);
                      });
                    }));
  }
  const double copy = BestSeconds([&] {
    pool.Run([&](int t) {
      std::byte* mine = pages.data() + static_cast<size_t>(t) * share;
      std::memcpy(mine, mine + share / 2, share / 2);
    });
  });
  uint64_t kept = 0;
  for (uint64_t s : sinks) kept += s;
  const auto total = static_cast<double>(threads * share);
  // `kept` cannot be this value by chance often enough to matter; the compiler does not know.
  ceiling.read_gb_s = total / read / 1e9 + (kept == 0x123456789abcdefu ? 1e-9 : 0);
  ceiling.copy_gb_s = total / copy / 1e9;
  return ceiling;
}

Result<DiskCeiling> MeasureDisk(const std::string& folder, size_t bytes) {
  constexpr size_t kFile = size_t{1} << 30;
  constexpr size_t kPart = size_t{4} << 20;
  constexpr size_t kAlign = 4096;
  constexpr size_t kReads = 16384;
  OKV_ASSIGN_OR_RETURN(const int file, OpenNameless(folder));
  const auto no = [&](const char* what) {
    const Status status = Failed(fmt::format("{}: {} ({})", folder, what, ErrorText(errno)));
    close(file);
    return status;
  };
  std::mt19937_64 random(1);
  OKV_ASSIGN_OR_RETURN(const Pages part, Pages::Reserve(kPart));
  for (size_t i = 0; i < kPart / 8; ++i) reinterpret_cast<uint64_t*>(part.data())[i] = random();
  for (size_t at = 0; at < kFile; at += kPart) {
    if (pwrite(file, part.data(), kPart, static_cast<off_t>(at)) != ssize_t{kPart}) {
      return no("the file of a measurement cannot be written");
    }
  }
  fdatasync(file);
  const int direct = open(fmt::format("/proc/self/fd/{}", file).c_str(), O_RDONLY | O_DIRECT);
  if (direct < 0) return no("the file of a measurement cannot be read past the page cache");
  std::atomic<bool> failed{false};
  // Seconds in which `n` reads of `size` at places of `at` come, `threads` at once.
  const auto seconds = [&](size_t threads, size_t n, size_t size, const auto& at) {
    std::atomic<size_t> next{0};
    std::vector<std::thread> readers;
    const auto start = std::chrono::steady_clock::now();
    for (size_t t = 0; t < threads; ++t) {
      readers.emplace_back([&] {
        const auto to = Pages::Reserve(size);
        if (!to.ok()) failed = true;
        for (size_t i; to.ok() && (i = next++) < n;) {
          const ssize_t got = pread(direct, to->data(), size, static_cast<off_t>(at(i)));
          if (got != static_cast<ssize_t>(size)) failed = true;
        }
      });
    }
    for (std::thread& reader : readers) reader.join();
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    return took.count();
  };
  DiskCeiling ceiling{.read_bytes = (bytes + kAlign - 1) / kAlign * kAlign};
  std::vector<size_t> places(kReads);
  for (size_t& place : places) place = random() % (kFile / kAlign - 64) * kAlign;
  const size_t size = std::min(ceiling.read_bytes, 64 * kAlign);
  double took = 1e30;
  for (const size_t threads : {16, 64}) {
    took = std::min(took, seconds(threads, kReads, size, [&](size_t i) { return places[i]; }));
  }
  ceiling.random_gb_s = static_cast<double>(kReads * size) / took / 1e9;
  took = seconds(4, kFile / kPart, kPart, [](size_t i) { return i * kPart; });
  ceiling.sequential_gb_s = static_cast<double>(kFile) / took / 1e9;
  close(direct);
  if (failed) return no("the file of a measurement cannot be read");
  close(file);
  return ceiling;
}

uint64_t BytesReadFromDisks() {
  std::ifstream io("/proc/self/io");
  std::string name;
  for (uint64_t value = 0; io >> name >> value;) {
    if (name == "read_bytes:") return value;
  }
  return 0;
}

}  // namespace omnikv::tools
