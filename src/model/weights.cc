#include "model/weights.h"

#include <fmt/format.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <system_error>
#include <thread>

#include "base/check.h"
#include "model/loader.h"
#include "model/weight_plan.h"

namespace omnikv {
namespace {

constexpr size_t kPieceBytes = size_t{4} << 20;        // uploaded at once
constexpr size_t kThreadsPayFrom = size_t{128} << 20;  // below, one thread is as fast
constexpr unsigned kMaxThreads = 4;

// Rows of a tensor that are uploaded at once.
struct Piece {
  const TensorCopy* copy = nullptr;
  int64_t first = 0;
  int64_t n_rows = 0;

  size_t bytes() const { return static_cast<size_t>(n_rows * copy->row_bytes); }
};

std::vector<Piece> CutIntoPieces(const std::vector<TensorCopy>& copies) {
  std::vector<Piece> pieces;
  for (const TensorCopy& copy : copies) {
    const int64_t rows_a_piece =
        std::max<int64_t>(1, static_cast<int64_t>(kPieceBytes) / copy.row_bytes);
    for (int64_t row = 0; row < copy.n_rows; row += rows_a_piece) {
      pieces.push_back({&copy, row, std::min(rows_a_piece, copy.n_rows - row)});
    }
  }
  return pieces;
}

// Bytes of `n` values of a tensor; n is whole blocks.
size_t SourceBytes(const TensorView& tensor, int64_t n) {
  return static_cast<size_t>(n) / BlockValues(tensor.type) * BlockBytes(tensor.type);
}

// Norms and biases. Small, so that parts of one are converted with all of it.
void PrepareVector(const Piece& piece, std::byte* out) {
  const TensorCopy& copy = *piece.copy;
  std::vector<float> values(copy.source->NumValues());
  ConvertRows(*copy.source, 0, values.size(), DType::kF32, values.data());
  auto* floats = reinterpret_cast<float*>(out);
  for (int64_t i = 0; i < piece.n_rows; ++i) {
    floats[i] = values[static_cast<size_t>(copy.rows(piece.first + i))] + copy.add;
  }
}

void PrepareRows(const Piece& piece, std::byte* out) {
  const TensorCopy& copy = *piece.copy;
  const TensorView& source = *copy.source;
  const bool native = NativeDType(source.type) == copy.format;
  const size_t row_bytes = SourceBytes(source, copy.n_values);
  for (int64_t i = 0; i < piece.n_rows; ++i) {
    const int64_t row = copy.rows(piece.first + i);
    std::byte* to = out + i * copy.row_bytes;
    if (native) {
      std::memcpy(to, source.data + static_cast<size_t>(row) * row_bytes, row_bytes);
    } else {
      ConvertRows(source, static_cast<size_t>(row * copy.n_values),
                  static_cast<size_t>(copy.n_values), copy.format, to);
    }
  }
}

// The bytes of a piece as they are uploaded: the file's own where they fit, else made in `staging`.
const std::byte* Prepare(const Piece& piece, std::vector<std::byte>& staging) {
  const TensorCopy& copy = *piece.copy;
  if (copy.verbatim()) {
    return copy.source->data + SourceBytes(*copy.source, copy.rows(piece.first) * copy.n_values);
  }
  staging.assign(piece.bytes(), std::byte{0});  // zeros between rows that are padded
  if (copy.vector) {
    PrepareVector(piece, staging.data());
  } else {
    PrepareRows(piece, staging.data());
  }
  return staging.data();
}

// Brings a span of a mapped file into memory.
void Touch(const std::byte* data, size_t bytes) {
  constexpr size_t kPage = 4096;
  const volatile std::byte* at = data;
  for (size_t i = 0; i < bytes; i += kPage) static_cast<void>(at[i]);
}

// Prepares pieces ahead of the thread that uploads them, on threads of its own: the disk is read,
// and values are converted, while the backend copies.
class ReadAhead {
 public:
  ReadAhead(const std::vector<Piece>& pieces, unsigned n_threads)
      : pieces_(pieces), slots_(std::max(1u, 2 * n_threads)) {
    try {
      for (unsigned i = 0; i < n_threads; ++i) threads_.emplace_back([this] { Work(); });
    } catch (const std::system_error&) {
      // As many as there are; without any, Take prepares.
    }
  }
  ~ReadAhead() {
    {
      const std::lock_guard lock(mutex_);
      claimed_ = pieces_.size();
      taken_ = pieces_.size();
    }
    changed_.notify_all();
    for (std::thread& t : threads_) t.join();
  }
  ReadAhead(const ReadAhead&) = delete;
  ReadAhead& operator=(const ReadAhead&) = delete;

  // The bytes of piece i; valid until the next call. Called for each piece, in order.
  const std::byte* Take(size_t i) {
    if (threads_.empty()) return Prepare(pieces_[i], slots_.front().staging);
    std::unique_lock lock(mutex_);
    taken_ = i;
    changed_.notify_all();
    Slot& slot = slots_[i % slots_.size()];
    changed_.wait(lock, [&] { return slot.piece == i; });
    return slot.data;
  }

 private:
  static constexpr size_t kNone = SIZE_MAX;

  struct Slot {
    size_t piece = kNone;  // that is ready in it
    const std::byte* data = nullptr;
    std::vector<std::byte> staging;
  };

  void Work() {
    std::unique_lock lock(mutex_);
    while (claimed_ < pieces_.size()) {
      const size_t i = claimed_++;
      // The slot is free once the piece before it in the slot was taken, and the next after it.
      changed_.wait(lock, [&] { return i < taken_ + slots_.size(); });
      if (taken_ == pieces_.size()) return;
      lock.unlock();
      Slot& slot = slots_[i % slots_.size()];
      const std::byte* data = Prepare(pieces_[i], slot.staging);
      if (pieces_[i].copy->verbatim()) Touch(data, pieces_[i].bytes());
      lock.lock();
      slot.data = data;
      slot.piece = i;
      changed_.notify_all();
    }
  }

  const std::vector<Piece>& pieces_;
  std::vector<Slot> slots_;  // piece i is prepared in slot i modulo their number
  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable changed_;
  size_t claimed_ = 0;  // pieces given to threads
  size_t taken_ = 0;    // the piece that Take gave last
};

}  // namespace

Result<Weights> LoadWeights(const ModelFiles& files, Backend& backend,
                            const std::function<void(size_t done, size_t total)>& progress) {
  OKV_ASSIGN_OR_RETURN(const size_t bytes, WeightBytes(files));
  OKV_ASSIGN_OR_RETURN(Buffer memory, backend.Allocate(bytes, "weights"));
  OKV_ASSIGN_OR_RETURN(WeightPlan plan, PlanWeights(files, memory.as<std::byte>()));

  const std::vector<Piece> pieces = CutIntoPieces(plan.copies);
  std::map<const TensorView*, int> unread;  // pieces of a tensor still to come
  for (const Piece& piece : pieces) ++unread[piece.copy->source];

  const unsigned n_threads =
      bytes < kThreadsPayFrom ? 0 : std::min(kMaxThreads, std::thread::hardware_concurrency());
  ReadAhead ahead(pieces, n_threads);
  size_t done = 0;
  for (size_t i = 0; i < pieces.size(); ++i) {
    const Piece& piece = pieces[i];
    std::byte* to =
        memory.as<std::byte>() + piece.copy->offset + piece.first * piece.copy->row_bytes;
    backend.Upload(to, ahead.Take(i), piece.bytes());
    if (--unread[piece.copy->source] == 0) files.tensors->Release(*piece.copy->source);
    done += piece.bytes();
    if (progress) progress(std::min(done, bytes), bytes);
  }
  backend.Synchronize();
  plan.weights.memory.push_back(std::move(memory));
  return std::move(plan.weights);
}

}  // namespace omnikv
