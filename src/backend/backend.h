// The hardware interface: memory, a queue of ops, and recorded steps.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "backend/ops.h"
#include "omnikv/status.h"

namespace omnikv {

// Memory of a backend, given back when destroyed. Zeroed when allocated.
class Buffer {
 public:
  using Deleter = std::function<void(void*)>;

  Buffer() = default;
  Buffer(void* data, size_t size, Deleter deleter) : data_(data, std::move(deleter)), size_(size) {}

  template <typename T = void>
  T* as() const {
    return static_cast<T*>(data_.get());
  }
  size_t size() const { return size_; }

 private:
  std::unique_ptr<void, Deleter> data_{nullptr, [](void*) {}};
  size_t size_ = 0;
};

// A step that was recorded. Valid for the backend that made it, while the memory it names lives.
class Recording {
 public:
  virtual ~Recording() = default;
};

// Whether an op runs here, and if not, why: one clause for a sentence to a person.
struct Support {
  bool ok = true;
  std::string reason;
};

// One device. Not thread-safe: one thread drives a backend at a time.
class Backend {
 public:
  virtual ~Backend() = default;

  virtual std::string_view Name() const = 0;  // "ref", "cpu", "cuda:0"
  virtual std::string Describe() const = 0;   // for people: instruction sets, threads, card

  // Zeroed memory for this backend. kResourceExhausted, with the figures and `what`, when there is
  // none left.
  virtual Result<Buffer> Allocate(size_t bytes, std::string_view what) = 0;
  // Host to device and back. Ordered with ops; the host memory may be reused on return.
  virtual void Upload(void* dst, const void* src, size_t bytes) = 0;
  virtual void Download(void* dst, const void* src, size_t bytes) = 0;

  // Whether Enqueue takes `op`: for callers with a choice of ops. The engine has none, and enqueues
  // only what every backend takes.
  virtual Support Supports(const Op& op) const = 0;

  // Runs `op` after everything enqueued before it; while recording, keeps it instead.
  virtual void Enqueue(const Op& op) = 0;

  // Calls `body`, which enqueues ops, without running them. The recording replays them with the
  // same arguments; what they point at may change in between.
  virtual std::unique_ptr<Recording> Record(const std::function<void()>& body) = 0;
  virtual void Replay(const Recording& recording) = 0;

  // Returns when everything enqueued has run.
  virtual void Synchronize() = 0;
};

// What ref and cpu share: memory of the host, ops that run when they are enqueued, recordings that
// are lists of ops.
class HostBackend : public Backend {
 public:
  Result<Buffer> Allocate(size_t bytes, std::string_view what) override;
  void Upload(void* dst, const void* src, size_t bytes) override;
  void Download(void* dst, const void* src, size_t bytes) override;
  void Enqueue(const Op& op) override;
  std::unique_ptr<Recording> Record(const std::function<void()>& body) override;
  void Replay(const Recording& recording) override;
  void Synchronize() override {}

 protected:
  // Executes one op.
  virtual void Run(const Op& op) = 0;
  // Called once for each op when it is recorded: the place to allocate what Run will need, since a
  // replay must not.
  virtual void Reserve(const Op& op) { static_cast<void>(op); }

 private:
  std::vector<Op>* recording_ = nullptr;
};

}  // namespace omnikv
