#include "model/weights.h"

#include <fmt/format.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

#include "base/check.h"
#include "model/loader.h"
#include "model/weight_plan.h"

namespace omnikv {
namespace {

constexpr size_t kBatchBytes = size_t{4} << 20;        // prepared at once
constexpr size_t kThreadsPayFrom = size_t{128} << 20;  // below, one thread is as fast
constexpr unsigned kMaxThreads = 4;

// Rows of a tensor that are prepared, and uploaded, at once.
struct RowBatch {
  const TensorCopy* copy = nullptr;
  int64_t first = 0;
  int64_t n_rows = 0;

  size_t bytes() const { return static_cast<size_t>(n_rows * copy->row_bytes); }
  size_t offset() const { return copy->offset + static_cast<size_t>(first * copy->row_bytes); }
};

std::vector<RowBatch> CutIntoBatches(const std::vector<TensorCopy>& copies) {
  std::vector<RowBatch> batches;
  for (const TensorCopy& copy : copies) {
    const int64_t rows_per_batch =
        std::max<int64_t>(1, static_cast<int64_t>(kBatchBytes) / copy.row_bytes);
    for (int64_t row = 0; row < copy.n_rows; row += rows_per_batch) {
      batches.push_back({&copy, row, std::min(rows_per_batch, copy.n_rows - row)});
    }
  }
  return batches;
}

// Bytes of `n` values of a tensor; n is whole blocks.
size_t SourceBytes(const TensorView& tensor, int64_t n) {
  return static_cast<size_t>(n) / BlockValues(tensor.type) * BlockBytes(tensor.type);
}

// Norms and biases. Small, so that parts of one are converted with all of it.
Status PrepareVector(const TensorSource& tensors, const RowBatch& batch, std::byte* out) {
  const TensorCopy& copy = *batch.copy;
  std::vector<float> values(copy.source->NumValues());
  OKV_RETURN_IF_ERROR(
      tensors.ReadValues(*copy.source, 0, values.size(), DType::kF32, values.data()));
  auto* floats = reinterpret_cast<float*>(out);
  for (int64_t i = 0; i < batch.n_rows; ++i) {
    floats[i] = values[static_cast<size_t>(copy.rows(batch.first + i))] + copy.add;
  }
  return {};
}

// Rows that change their order, their distance or their format. The rows of a head lie together in
// the file, in whatever order, and are read at once; so are all rows where heads follow each other.
Status PrepareRows(const TensorSource& tensors, const RowBatch& batch, std::byte* out,
                   std::vector<std::byte>& stored) {
  const TensorCopy& copy = *batch.copy;
  const TensorView& source = *copy.source;
  const bool native = NativeDType(source.type) == copy.format;
  const size_t row_bytes = SourceBytes(source, copy.n_values);
  const int64_t end = batch.first + batch.n_rows;
  for (int64_t row = batch.first; row < end;) {
    const int64_t head = row / copy.rows.head_dim * copy.rows.head_dim;  // its first row
    const int64_t first = copy.rows(copy.rows.contiguous() ? row : head);
    const int64_t n = copy.rows.contiguous() ? end - row : copy.rows.head_dim;
    stored.resize(static_cast<size_t>(n) * row_bytes);
    OKV_RETURN_IF_ERROR(
        tensors.Read(source, static_cast<size_t>(first) * row_bytes, stored.size(), stored.data()));
    for (const int64_t last = std::min(end, copy.rows.contiguous() ? end : head + n); row < last;
         ++row) {
      const std::byte* from =
          stored.data() + static_cast<size_t>(copy.rows(row) - first) * row_bytes;
      std::byte* to = out + (row - batch.first) * copy.row_bytes;
      if (native) {
        std::memcpy(to, from, row_bytes);
      } else {
        ConvertValues(source.type, from, static_cast<size_t>(copy.n_values), copy.format, to);
      }
    }
  }
  return {};
}

// The bytes of a batch as they will lie in memory, to `out`, whose padding between rows stays as it
// is. `stored`: scratch.
Status Prepare(const TensorSource& tensors, const RowBatch& batch, std::byte* out,
               std::vector<std::byte>& stored) {
  const TensorCopy& copy = *batch.copy;
  if (copy.vector) return PrepareVector(tensors, batch, out);
  if (!copy.verbatim()) return PrepareRows(tensors, batch, out, stored);
  const size_t offset = SourceBytes(*copy.source, copy.rows(batch.first) * copy.n_values);
  return tensors.Read(*copy.source, offset, batch.bytes(), out);
}

// Prepares batches ahead of the thread that takes them, on threads of its own: files are read, and
// values are converted, while the backend copies.
class ReadAhead {
 public:
  // `memory`: where the plan's weights lie, when the host may write there; then batches are
  // prepared in place. Null: each in a slot, from which it is uploaded.
  ReadAhead(const TensorSource& tensors, const std::vector<RowBatch>& batches, std::byte* memory,
            unsigned n_threads)
      : tensors_(tensors), batches_(batches), memory_(memory), slots_(std::max(1u, 2 * n_threads)) {
    try {
      for (unsigned i = 0; i < n_threads; ++i) threads_.emplace_back([this] { Work(); });
    } catch (const std::system_error&) {
      // As many as there are; without any, Take prepares.
    }
  }
  ~ReadAhead() {
    {
      const std::lock_guard lock(mutex_);
      claimed_ = batches_.size();
      taken_ = batches_.size();
    }
    changed_.notify_all();
    for (std::thread& t : threads_) t.join();
  }
  ReadAhead(const ReadAhead&) = delete;
  ReadAhead& operator=(const ReadAhead&) = delete;

  // The bytes of batch i; valid until the next call. Called for each batch, in order, until one
  // fails.
  Result<const std::byte*> Take(size_t i) {
    Slot& slot = slots_[i % slots_.size()];
    if (threads_.empty()) {
      Fill(i, slot);
    } else {
      std::unique_lock lock(mutex_);
      taken_ = i;
      changed_.notify_all();
      changed_.wait(lock, [&] { return slot.batch == i; });
    }
    if (!slot.status.ok()) return slot.status;
    return slot.data;
  }

 private:
  static constexpr size_t kNone = SIZE_MAX;

  struct Slot {
    size_t batch = kNone;  // that is ready in it
    Status status;         // of reading it
    const std::byte* data = nullptr;
    std::vector<std::byte> staging;
    std::vector<std::byte> stored;
  };

  void Fill(size_t i, Slot& slot) {
    const RowBatch& batch = batches_[i];
    std::byte* out = memory_ == nullptr ? nullptr : memory_ + batch.offset();
    try {
      if (out == nullptr) {
        slot.staging.assign(batch.bytes(), std::byte{0});  // zeros between rows that are padded
        out = slot.staging.data();
      }
      slot.status = Prepare(tensors_, batch, out, slot.stored);
    } catch (const std::bad_alloc&) {
      slot.status =
          ResourceExhausted(fmt::format("host memory ran out while {} was read", tensors_.path()));
    }
    slot.data = out;
  }

  void Work() {
    std::unique_lock lock(mutex_);
    while (claimed_ < batches_.size()) {
      const size_t i = claimed_++;
      // The slot is free once the batch before it in the slot was taken, and the next after it.
      changed_.wait(lock, [&] { return i < taken_ + slots_.size(); });
      if (taken_ == batches_.size()) return;
      lock.unlock();
      Slot& slot = slots_[i % slots_.size()];
      Fill(i, slot);
      lock.lock();
      slot.batch = i;
      changed_.notify_all();
    }
  }

  const TensorSource& tensors_;
  const std::vector<RowBatch>& batches_;
  std::byte* const memory_;
  std::vector<Slot> slots_;  // batch i is prepared in slot i modulo their number
  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable changed_;
  size_t claimed_ = 0;  // batches given to threads
  size_t taken_ = 0;    // the batch that Take gave last
};

}  // namespace

Result<Weights> LoadWeights(const ModelFiles& files, Backend& backend,
                            const std::function<void(size_t done, size_t total)>& progress) {
  OKV_ASSIGN_OR_RETURN(const size_t bytes, WeightBytes(files));
  OKV_ASSIGN_OR_RETURN(Buffer memory, backend.Allocate(bytes, "weights"));
  OKV_ASSIGN_OR_RETURN(WeightPlan plan, PlanWeights(files, memory.as<std::byte>()));

  const std::vector<RowBatch> batches = CutIntoBatches(plan.copies);
  const unsigned n_threads =
      bytes < kThreadsPayFrom ? 0 : std::min(kMaxThreads, std::thread::hardware_concurrency());
  auto* const base = memory.as<std::byte>();
  ReadAhead ahead(*files.tensors, batches, backend.OnDevice() ? nullptr : base, n_threads);
  size_t done = 0;
  for (size_t i = 0; i < batches.size(); ++i) {
    OKV_ASSIGN_OR_RETURN(const std::byte* data, ahead.Take(i));
    if (backend.OnDevice()) backend.Upload(base + batches[i].offset(), data, batches[i].bytes());
    done += batches[i].bytes();
    if (progress) progress(std::min(done, bytes), bytes);
  }
  backend.Synchronize();
  plan.weights.memory.push_back(std::move(memory));
  return std::move(plan.weights);
}

}  // namespace omnikv
