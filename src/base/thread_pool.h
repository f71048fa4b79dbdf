// A persistent pool for data-parallel work: spins for a short while between jobs, so that the
// dozens of ops of a decode step cost a microsecond each to start, then parks.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

#include "omnikv/status.h"

namespace omnikv {

// A reference to a callable that outlives the call: no allocation, one indirect call.
template <typename Signature>
class FunctionRef;
template <typename R, typename... Args>
class FunctionRef<R(Args...)> {
 public:
  template <typename F, typename = std::enable_if_t<!std::is_same_v<std::decay_t<F>, FunctionRef>>>
  FunctionRef(F&& f)  // NOLINT: implicit by design
      : object_(const_cast<void*>(static_cast<const void*>(&f))),
        call_([](void* o, Args... args) -> R {
          return (*static_cast<std::remove_reference_t<F>*>(o))(std::forward<Args>(args)...);
        }) {}
  R operator()(Args... args) const { return call_(object_, std::forward<Args>(args)...); }

 private:
  void* object_;
  R (*call_)(void*, Args...);
};

// `n_threads` threads, the caller being thread 0. When `pin` is set and there are as many threads
// as the process has physical cores, each has its own. One caller at a time; jobs do not nest.
class ThreadPool {
 public:
  static constexpr int kMaxThreads = 1024;
  // How long a worker looks for the next job before it parks: longer than the gaps between the ops
  // of a step and between most steps, short enough to leave an idle process idle.
  static constexpr std::chrono::microseconds kSpin{60};

  // Starts the threads, or as many as the system gives. REQUIRES 1 <= n_threads <= kMaxThreads.
  explicit ThreadPool(int n_threads, bool pin = true, std::chrono::microseconds spin = kSpin);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const;  // threads that there are
  // kResourceExhausted, with both numbers, when the system gave fewer threads than were asked for.
  const Status& status() const;

  // Calls body(thread) once on every thread, and returns when all calls have.
  void Run(FunctionRef<void(int)> body);

  // The same on the caller and on those other threads that come before the caller's own call has
  // returned: for bodies that take pieces of work until none is left. Returns when all calls have.
  // On a busy machine nobody waits for a thread that has no core.
  void Share(FunctionRef<void(int)> body);

  // Calls body(begin, end, thread) for disjoint pieces of [0, n) of about `grain`, taken in
  // ascending order as threads become free.
  void ParallelFor(int64_t n, int64_t grain, FunctionRef<void(int64_t, int64_t, int)> body);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace omnikv
