// The hardware interface: memory, a queue of ops, and recorded steps.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
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

// Queues of one backend. Ops of a lane run in order; lanes run side by side, where the device can,
// but for what Join says. Uploads, downloads and marks are the main lane's.
enum class Lane {
  kMain,
  kIn,   // brings K/V from the host
  kOut,  // takes K/V to the host
  // The host's processor, beside a device: attention over K/V that live in its memory. It takes
  // AttendArgs and SumValuesArgs alone. K/V that it reads, the block table, logits and what is
  // written are shared memory (AllocateShared). What else is read may lie in the backend's, and is
  // taken before the main lane goes on: a Join with the main lane comes before each op, and before
  // what was written is read.
  kHost,
};
inline constexpr size_t kLanes = 4;

// Whether an op runs here, and if not, why: one clause for a sentence to a person.
struct Support {
  bool ok = true;
  std::string reason;
};

// Whether the heads of the K and V that `op` reads or writes can have their format.
Support SupportsKv(const Op& op);

// The largest step and the widest arrays of a model: what a backend sizes its own memory by.
struct StepLimits {
  int32_t max_rows = 0;
  int32_t n_heads = 0;
  int32_t n_kv_heads = 0;
  int32_t head_dim = 0;
  int64_t widest = 0;   // values of the widest row of activations
  int64_t largest = 0;  // values of the largest matrix that a prompt's rows are multiplied with
  std::optional<DType> weights;  // the format of all those matrices; none where they differ
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
  // Bytes that Allocate may still give.
  virtual size_t AvailableMemory() const = 0;
  // Whether that is memory of a device of its own: then --gpu-memory caps it, not --host-memory.
  virtual bool OnDevice() const { return false; }
  // Bytes that the backend itself takes, at most, to run steps within `limits`.
  virtual size_t WorkBytes(const StepLimits& limits) const {
    static_cast<void>(limits);
    return 0;
  }
  // Bytes of K/V that a decode step reads in the time that choosing tokens takes, once (scores
  // reduced and the best of them found): a choice that saves fewer makes a step slower.
  virtual size_t SelectionBytes() const { return 0; }
  // Rows of a prefill step from which on more of them bring little.
  virtual int32_t PrefillRows() const { return 512; }
  // Host to device and back. Ordered with ops; the host memory may be reused on return. The source
  // of an Upload may also be the backend's own memory.
  virtual void Upload(void* dst, const void* src, size_t bytes) = 0;
  virtual void Download(void* dst, const void* src, size_t bytes) = 0;

  // Memory that ops reach as they do Allocate's, and the host too: it sees what ops wrote once it
  // has waited for them. Slow for ops on a device.
  virtual Result<Buffer> AllocateShared(size_t bytes, std::string_view what) = 0;
  // The same, made ready in the background where it is large: nothing may use it before AwaitShared
  // has returned ok. That gives kResourceExhausted, with the figures, when some of it could not be
  // had.
  virtual Result<Buffer> AllocateSharedLater(size_t bytes, std::string_view what) {
    return AllocateShared(bytes, what);
  }
  virtual Status AwaitShared() { return {}; }

  // From now on AllocateOnDisk gives memory in files without a name in `folder`, which threads of
  // its own read, many reads at once. kInvalidArgument where no files can be made there. A disk
  // that fails later ends in TakeFailure.
  virtual Status KeepOnDisk(const std::string& folder);
  // Zeroed memory for K/V on that disk, whose room is taken at once. Copies, uploads, downloads and
  // FetchRows reach it, in both directions; where OnDevice, no other op does (in_place.h).
  // kResourceExhausted, with the figures and `what`, where the disk has no room.
  virtual Result<Buffer> AllocateOnDisk(size_t bytes, std::string_view what);
  // Bytes that were read from there so far.
  virtual uint64_t BytesFromDisk() const { return 0; }
  // A point in the queue, after what is enqueued so far; Await returns when it is reached. At most
  // kMarks are kept: an older one is as good as the oldest of those.
  using Mark = uint64_t;
  static constexpr Mark kMarks = 8;
  virtual Mark SetMark() = 0;
  virtual void Await(Mark mark) = 0;

  // Whether Enqueue takes `op`. The engine asks it of the ops of all steps before it opens a group
  // of sequences (engine/supported.h). Only the plain arguments count, not what they point at.
  virtual Support Supports(const Op& op) const = 0;

  // Runs `op` after everything enqueued before it on its lane; while recording, keeps it instead.
  virtual void Enqueue(const Op& op, Lane lane = Lane::kMain) = 0;
  // Copies between the host's and the backend's memory, in any direction. Not while recording.
  // Memory of the host must be AllocateShared's, and is used until the lane is waited for.
  virtual void Copy(void* dst, const void* src, size_t bytes, Lane lane) = 0;
  // What is enqueued on `waits` from now on runs after all that was enqueued on `for_`; while
  // recording, after all of the recording.
  virtual void Join(Lane waits, Lane for_) = 0;
  // The same in two parts: what is enqueued on a lane after WaitFor runs after all that was
  // enqueued on the other before the last Signal of that number. Numbers from 0; not while
  // recording.
  virtual void Signal(size_t number, Lane lane) = 0;
  virtual void WaitFor(size_t number, Lane lane) = 0;

  // Runs `op` alone, after everything enqueued, and returns the seconds it took: by the device's
  // clock where it has one, else by the host's. Slow, for measurements. Not while recording.
  virtual double TimeAlone(const Op& op);

  // Names of the kernels that the device launches for `op`, enqueued alone, with the template
  // arguments that tell variants apart; those of a library begin with "library". Empty where an op
  // is one function of the host. Runs nothing. Slow, for tests. Not while recording.
  virtual std::vector<std::string> KernelsOf(const Op& op) {
    static_cast<void>(op);
    return {};
  }

  // Calls `body`, which enqueues ops, without running them. The recording replays them with the
  // same arguments; what they point at may change in between.
  virtual std::unique_ptr<Recording> Record(const std::function<void()>& body) = 0;
  virtual void Replay(const Recording& recording) = 0;
  // What went wrong since the last call, once: kResourceExhausted when an op, a recording or its
  // replay found no memory. Results since then are undefined, and recordings null.
  virtual Status TakeFailure() { return {}; }

  // Returns when everything enqueued has run.
  virtual void Synchronize() = 0;
};

class DiskMemory;

// What ref and cpu share: memory of the host, ops that run when they are enqueued, recordings that
// are lists of ops.
class HostBackend : public Backend {
 public:
  HostBackend();
  ~HostBackend() override;

  // Copies on Lane::kIn do not wait for what they read there. All ops reach it, in place.
  Status KeepOnDisk(const std::string& folder) override;
  Result<Buffer> AllocateOnDisk(size_t bytes, std::string_view what) override;
  uint64_t BytesFromDisk() const override;
  Result<Buffer> Allocate(size_t bytes, std::string_view what) override;
  size_t AvailableMemory() const override;
  Result<Buffer> AllocateShared(size_t bytes, std::string_view what) override {
    return Allocate(bytes, what);
  }
  Mark SetMark() override { return 0; }
  void Await(Mark) override {}
  void Upload(void* dst, const void* src, size_t bytes) override;
  void Download(void* dst, const void* src, size_t bytes) override;
  void Enqueue(const Op& op, Lane lane = Lane::kMain) override;
  void Copy(void* dst, const void* src, size_t bytes, Lane lane) override;
  void Join(Lane waits, Lane for_) override;
  void Signal(size_t number, Lane lane) override;
  void WaitFor(size_t number, Lane lane) override;
  std::unique_ptr<Recording> Record(const std::function<void()>& body) override;
  void Replay(const Recording& recording) override;
  Status TakeFailure() override;
  void Synchronize() override;

 protected:
  // Executes one op.
  virtual void Run(const Op& op) = 0;
  // Called once for each op when it is recorded: the place to allocate what Run will need, since a
  // replay must not.
  virtual Status Reserve(const Op& op) {
    static_cast<void>(op);
    return {};
  }

 private:
  // Runs an op, with what it reads of a disk on its way.
  void RunHere(const Op& op);
  // Has the rows brought nearer that layers of a recording will fetch for the selection that its op
  // `chosen` put in slots, if it did.
  void ExpectFetches(const std::vector<Op>& ops, size_t chosen);

  std::vector<Op>* recording_ = nullptr;
  Status failure_;
  std::unique_ptr<DiskMemory> disk_;  // null: all is in memory
  std::vector<uint64_t> signals_;     // DiskMemory::begun, by number
};

}  // namespace omnikv
