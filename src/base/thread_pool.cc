#include "base/thread_pool.h"

#include <fmt/format.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <new>
#include <set>
#include <string>
#include <system_error>

#include "base/check.h"

namespace omnikv {
namespace {

using Clock = std::chrono::steady_clock;

// How long the caller looks for its workers to finish before it sleeps. Waking it takes some ten
// microseconds, so the ends of uneven jobs are better watched.
constexpr auto kSpinForPeers = std::chrono::microseconds(200);

inline void Pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

// Spins until ready() or until `limit` has passed; gives ready().
template <typename Ready>
bool SpinFor(Clock::duration limit, const Ready& ready) {
  const auto start = Clock::now();
  do {
    for (int i = 0; i < 32; ++i) {
      if (ready()) return true;
      Pause();
    }
  } while (Clock::now() - start < limit);
  return ready();
}

// The logical CPUs of the affinity mask: one of each physical core first, then their siblings.
std::vector<int> CpusByCore() {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  std::vector<int> first;
  std::vector<int> rest;
  if (sched_getaffinity(0, sizeof(mask), &mask) != 0) return first;
  std::set<std::string> seen;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &mask)) continue;
    std::ifstream file("/sys/devices/system/cpu/cpu" + std::to_string(cpu) +
                       "/topology/thread_siblings_list");
    std::string siblings;
    if (!(file >> siblings)) siblings = std::to_string(cpu);
    (seen.insert(siblings).second ? first : rest).push_back(cpu);
  }
  first.insert(first.end(), rest.begin(), rest.end());
  return first;
}

void PinSelf(int cpu) {
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(cpu, &one);
  sched_setaffinity(0, sizeof(one), &one);  // a refusal costs speed only
}

}  // namespace

// The state of the pool is one word, so that entering a job and closing it cannot miss each other:
// its generation, raised by each job; whether it is closed to workers; how many of them have
// entered it, and how many of those are through.
struct ThreadPool::Impl {
  static constexpr uint64_t kLeft = 1;
  static constexpr uint64_t kEntered = uint64_t{1} << 15;
  static constexpr uint64_t kClosed = uint64_t{1} << 30;
  static constexpr uint64_t kGeneration = uint64_t{1} << 31;
  static constexpr uint64_t kCount = kEntered - 1;
  static uint64_t Left(uint64_t gate) { return gate & kCount; }
  static uint64_t Entered(uint64_t gate) { return gate / kEntered & kCount; }
  static uint64_t Generation(uint64_t gate) { return gate / kGeneration; }

  ~Impl() { EndWorkers(); }

  void EndWorkers() {
    stop = true;
    Open();
    for (std::thread& worker : workers) worker.join();
    workers.clear();
    n_threads = 1;
  }

  int n_threads = 1;
  Status status;
  bool spin = true;  // false where threads outnumber CPUs: a spinning thread would hold up the rest
  Clock::duration spin_time = kSpin;
  FunctionRef<void(int)>* job = nullptr;
  bool stop = false;

  alignas(64) std::atomic<uint64_t> gate{kClosed};
  alignas(64) std::atomic<int64_t> next{0};  // ParallelFor: first index not taken yet
  std::vector<std::thread> workers;

  // The gate once ready(gate) holds: looks for it, then sleeps.
  template <typename Ready>
  uint64_t Await(Clock::duration limit, const Ready& ready) {
    uint64_t now = gate.load(std::memory_order_acquire);
    if (spin) {
      SpinFor(limit, [&] { return ready(now = gate.load(std::memory_order_acquire)); });
    }
    while (!ready(now)) {
      gate.wait(now, std::memory_order_acquire);
      now = gate.load(std::memory_order_acquire);
    }
    return now;
  }

  void Open() {
    const uint64_t generation = Generation(gate.load(std::memory_order_relaxed)) + 1;
    gate.store(generation * kGeneration, std::memory_order_release);
    gate.notify_all();
  }

  void Work(int thread, int cpu) {
    if (cpu >= 0) PinSelf(cpu);
    uint64_t seen = 0;  // generations
    for (;;) {
      uint64_t now = Await(spin_time, [&](uint64_t g) { return Generation(g) != seen; });
      while ((now & kClosed) == 0 &&
             !gate.compare_exchange_weak(now, now + kEntered, std::memory_order_acq_rel)) {
      }
      seen = Generation(now);
      if ((now & kClosed) != 0) continue;  // too late for this one
      if (stop) return;
      (*job)(thread);
      gate.fetch_add(kLeft, std::memory_order_acq_rel);
      gate.notify_all();
    }
  }

  // Runs `body` on the caller, and on all workers or on those that come before the caller is
  // through.
  void Run(FunctionRef<void(int)> body, bool all) {
    OKV_CHECK(job == nullptr, "jobs do not nest");
    job = &body;
    Open();
    body(0);
    const auto everyone = static_cast<uint64_t>(n_threads - 1);
    if (all) Await(kSpinForPeers, [&](uint64_t g) { return Left(g) == everyone; });
    gate.fetch_or(kClosed, std::memory_order_acq_rel);
    Await(kSpinForPeers, [](uint64_t g) { return Left(g) == Entered(g); });
    job = nullptr;
  }
};

ThreadPool::ThreadPool(int n_threads, bool pin, std::chrono::microseconds spin)
    : impl_(std::make_unique<Impl>()) {
  static_assert(kMaxThreads <= Impl::kCount);
  OKV_CHECK(n_threads >= 1 && n_threads <= kMaxThreads, "{} threads", n_threads);
  const std::vector<int> cpus = CpusByCore();
  impl_->spin_time = spin;
  impl_->spin = static_cast<size_t>(n_threads) <= std::max<size_t>(cpus.size(), 1);
  // The caller keeps its affinity: what it starts later would inherit a single CPU. The workers
  // leave the first one to it. A pool of part of the machine is not pinned: others have such pools.
  const bool pinned = pin && static_cast<size_t>(n_threads) == cpus.size();
  int started = 1;
  std::error_code why = std::make_error_code(std::errc::not_enough_memory);
  try {
    for (; started < n_threads; impl_->n_threads = ++started) {
      const int t = started;
      const int cpu = pinned ? cpus[static_cast<size_t>(t)] : -1;
      impl_->workers.emplace_back([this, t, cpu] { impl_->Work(t, cpu); });
    }
    return;
  } catch (const std::system_error& e) {
    why = e.code();
  } catch (const std::bad_alloc&) {
  }
  impl_->EndWorkers();  // first: they may have left no memory to say so
  impl_->status =
      ResourceExhausted(fmt::format("{} threads are asked for, but the system starts only {} ({})",
                                    n_threads, started, why.message()));
}

ThreadPool::~ThreadPool() = default;

int ThreadPool::size() const {
  return impl_->n_threads;
}

const Status& ThreadPool::status() const {
  return impl_->status;
}

void ThreadPool::Run(FunctionRef<void(int)> body) {
  if (impl_->n_threads == 1) return body(0);
  impl_->Run(body, true);
}

void ThreadPool::Share(FunctionRef<void(int)> body) {
  if (impl_->n_threads == 1) return body(0);
  impl_->Run(body, false);
}

void ThreadPool::ParallelFor(int64_t n, int64_t grain,
                             FunctionRef<void(int64_t, int64_t, int)> body) {
  grain = std::max<int64_t>(grain, 1);
  if (impl_->n_threads == 1 || n <= grain) {
    for (int64_t begin = 0; begin < n; begin += grain) body(begin, std::min(n, begin + grain), 0);
    return;
  }
  impl_->next.store(0, std::memory_order_relaxed);
  Share([&](int thread) {
    for (;;) {
      const int64_t begin = impl_->next.fetch_add(grain, std::memory_order_relaxed);
      if (begin >= n) return;
      body(begin, std::min(n, begin + grain), thread);
    }
  });
}

}  // namespace omnikv
