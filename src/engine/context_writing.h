// A context on its way from the bank to files, while the engine goes on (docs/decisions/085).
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <vector>

#include "bank/bank.h"
#include "io/checked_file.h"
#include "omnikv/status.h"

namespace omnikv {

// The memory that rows pass through on their way.
struct WritingOptions {
  size_t piece = size_t{4} << 20;  // bytes
  int32_t pieces = 8;              // buffers of so many
};

// The engine's thread copies pieces of the rows to buffers between two steps, and the thread that
// writes takes them from there. The sequence has to stay as it is until all of it is copied, or
// until GiveUp.
class ContextWriting {
 public:
  // `ready` is called on the thread that writes, each time that Advance has more to do.
  ContextWriting(const Bank& bank, int32_t seq, const WritingOptions& options,
                 std::function<void()> ready);

  // --- The engine's thread.
  int32_t seq() const { return seq_; }
  // Copies as much as there are buffers for. Those rows that Begin asks for go one after another.
  void Advance();
  // Whether the sequence is not needed any more.
  bool Copied() const;
  // The sequence goes. What is left of the file is not written.
  void GiveUp();

  // --- The thread that writes.
  // Says which rows are wanted, in their order. Buffers take memory from now on.
  void Begin(std::vector<RowRange> ranges, size_t bytes);
  // Writes the rows of the next of these. kCancelled after GiveUp.
  Status Write(CheckedFileWriter& file);

 private:
  struct Piece {
    int32_t buffer = -1;  // -1: nothing, the range is empty
    size_t bytes = 0;
    bool last = false;  // of its range
  };

  const Bank& bank_;
  int32_t seq_;
  WritingOptions options_;
  std::function<void()> ready_;
  // The engine's, once they are there.
  std::vector<RowRange> ranges_;
  size_t range_ = 0;
  std::optional<OutgoingRows> rows_;  // of that one
  std::vector<std::vector<std::byte>> buffers_;

  mutable std::mutex mutex_;  // of what follows
  std::condition_variable changed_;
  bool begun_ = false;
  bool copied_ = false;
  bool given_up_ = false;
  std::vector<int32_t> free_;  // buffers
  std::deque<Piece> pieces_;   // that were copied
};

}  // namespace omnikv
