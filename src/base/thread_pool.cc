#include "base/thread_pool.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <set>
#include <string>

#include "base/check.h"

namespace omnikv {
namespace {

using Clock = std::chrono::steady_clock;

// How long a worker looks for the next job before it parks: longer than the gaps between the ops of
// a step and between most steps, short enough to leave an idle process idle.
constexpr auto kSpin = std::chrono::microseconds(60);
// How long a thread waits for its peers before it offers its core to others.
constexpr auto kYieldAfter = std::chrono::microseconds(20);

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

// Spins, then yields, until ready(): for waits that are short unless the machine is overloaded.
template <typename Ready>
void WaitUntil(bool spin, const Ready& ready) {
  if (ready() || (spin && SpinFor(kYieldAfter, ready))) return;
  while (!ready()) sched_yield();
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

// A job is published by raising `epoch`; workers count down `running` when they are through. The
// words that different threads write lie on different cache lines.
struct ThreadPool::Impl {
  int n_threads = 1;
  bool spin = true;  // false where threads outnumber CPUs: a spinning thread would hold up the rest
  FunctionRef<void(int)>* job = nullptr;
  bool stop = false;

  alignas(64) std::atomic<uint64_t> epoch{0};
  alignas(64) std::atomic<int> running{0};
  alignas(64) std::atomic<int64_t> next{0};  // ParallelFor: first index not taken yet
  alignas(64) std::atomic<int> arrived{0};
  alignas(64) std::atomic<uint32_t> phase{0};  // barriers passed

  // A worker that parks says so in `parked` before it looks at `epoch` a last time, and the caller
  // raises `epoch` before it looks at `parked`, both sequentially consistent: one of them sees the
  // other, so no wake-up is lost and the lock is taken only when somebody sleeps.
  alignas(64) std::atomic<int> parked{0};
  std::mutex mutex;
  std::condition_variable wake;
  std::vector<std::thread> workers;

  void Publish() {
    epoch.fetch_add(1, std::memory_order_seq_cst);
    if (parked.load(std::memory_order_seq_cst) == 0) return;
    { std::lock_guard<std::mutex> lock(mutex); }
    wake.notify_all();
  }

  void Await(uint64_t seen) {
    const auto changed = [&] { return epoch.load(std::memory_order_acquire) != seen; };
    if (spin && SpinFor(kSpin, changed)) return;
    std::unique_lock<std::mutex> lock(mutex);
    parked.fetch_add(1, std::memory_order_seq_cst);
    wake.wait(lock, [&] { return epoch.load(std::memory_order_seq_cst) != seen; });
    parked.fetch_sub(1, std::memory_order_seq_cst);
  }

  void Work(int thread, int cpu) {
    if (cpu >= 0) PinSelf(cpu);
    for (uint64_t seen = 0;; ++seen) {
      Await(seen);
      if (stop) return;
      (*job)(thread);
      running.fetch_sub(1, std::memory_order_release);
    }
  }
};

ThreadPool::ThreadPool(int n_threads, bool pin) : impl_(std::make_unique<Impl>()) {
  OKV_CHECK(n_threads >= 1, "{} threads", n_threads);
  const std::vector<int> cpus = CpusByCore();
  impl_->n_threads = n_threads;
  impl_->spin = static_cast<size_t>(n_threads) <= std::max<size_t>(cpus.size(), 1);
  // The caller keeps its affinity: what it starts later would inherit a single CPU. The workers
  // leave the first one to it.
  for (int t = 1; t < n_threads; ++t) {
    const int cpu = pin && impl_->spin && !cpus.empty() ? cpus[static_cast<size_t>(t)] : -1;
    impl_->workers.emplace_back([this, t, cpu] { impl_->Work(t, cpu); });
  }
}

ThreadPool::~ThreadPool() {
  impl_->stop = true;
  impl_->Publish();
  for (std::thread& worker : impl_->workers) worker.join();
}

int ThreadPool::size() const { return impl_->n_threads; }

void ThreadPool::Run(FunctionRef<void(int)> body) {
  if (impl_->n_threads == 1) {
    body(0);
    return;
  }
  OKV_CHECK(impl_->job == nullptr, "jobs do not nest");
  impl_->job = &body;
  impl_->running.store(impl_->n_threads - 1, std::memory_order_relaxed);
  impl_->Publish();
  body(0);
  WaitUntil(impl_->spin,
            [this] { return impl_->running.load(std::memory_order_acquire) == 0; });
  impl_->job = nullptr;
}

void ThreadPool::ParallelFor(int64_t n, int64_t grain,
                             FunctionRef<void(int64_t, int64_t, int)> body) {
  grain = std::max<int64_t>(grain, 1);
  if (impl_->n_threads == 1 || n <= grain) {
    for (int64_t begin = 0; begin < n; begin += grain) body(begin, std::min(n, begin + grain), 0);
    return;
  }
  impl_->next.store(0, std::memory_order_relaxed);
  Run([&](int thread) {
    for (;;) {
      const int64_t begin = impl_->next.fetch_add(grain, std::memory_order_relaxed);
      if (begin >= n) return;
      body(begin, std::min(n, begin + grain), thread);
    }
  });
}

void ThreadPool::Barrier() {
  if (impl_->n_threads == 1) return;
  const uint32_t phase = impl_->phase.load(std::memory_order_acquire);
  if (impl_->arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == impl_->n_threads) {
    impl_->arrived.store(0, std::memory_order_relaxed);
    impl_->phase.store(phase + 1, std::memory_order_release);
    return;
  }
  WaitUntil(impl_->spin,
            [&] { return impl_->phase.load(std::memory_order_acquire) != phase; });
}

}  // namespace omnikv
