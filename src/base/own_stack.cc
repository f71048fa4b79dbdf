#include "base/own_stack.h"

#include <fmt/format.h>
#include <pthread.h>

#include <cstring>
#include <exception>

namespace omnikv {
namespace {

constexpr size_t kStackBytes = size_t{8} << 20;  // reserved; pages are taken as they are used

struct Job {
  const std::function<void()>& fn;
  std::exception_ptr thrown;
};

void* Run(void* argument) {
  auto* job = static_cast<Job*>(argument);
  try {
    job->fn();
  } catch (...) {
    job->thrown = std::current_exception();
  }
  return nullptr;
}

}  // namespace

Status RunOnOwnStack(const std::function<void()>& fn) {
  Job job{fn, nullptr};
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, kStackBytes);
  pthread_t thread{};
  const int error = pthread_create(&thread, &attributes, Run, &job);
  pthread_attr_destroy(&attributes);
  if (error != 0) {
    return ResourceExhausted(fmt::format("a thread cannot be started: {}", std::strerror(error)));
  }
  pthread_join(thread, nullptr);
  if (job.thrown) std::rethrow_exception(job.thrown);
  return {};
}

}  // namespace omnikv
