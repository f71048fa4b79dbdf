// A context on its way from its files to the bank, while the engine goes on (docs/decisions/082).
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/core.h"
#include "io/checked_reader.h"

namespace omnikv {

// The files that a context is read from, in their order.
struct ContextFiles {
  struct Segment {
    std::string path;
    std::string name;  // by which the file must know itself
  };
  std::vector<Segment> segments;
  int64_t segment_tokens = 0;
  // With the tokens behind them, and all that is in no segment; empty: the segments alone, which
  // are the beginning of a context that has nothing else of those tokens.
  CheckedReader::Source own = {};
  // Where the others are not to be had, those segments before them will do that are.
  bool can_be_cut = false;
};

// A thread of its own reads the files into pieces of memory, as many as DiskReaderOptions says. The
// thread of the engine moves them to the bank, where nothing uses the sequence until all of it is
// there and the checksums were right. All but what `ready` says is for the engine's thread.
class ContextReading {
 public:
  // `ready` is called each time that Advance has more to do, on the thread that reads.
  ContextReading(EngineCore& core, ContextFiles files, const DiskReaderOptions& options,
                 std::function<void()> ready);
  // Once the thread has ended, which takes no longer than the reads that are on their way. A
  // sequence that was not taken goes.
  ~ContextReading();
  ContextReading(const ContextReading&) = delete;
  ContextReading& operator=(const ContextReading&) = delete;

  const ContextFiles& files() const { return files_; }
  // Whether the bank has room for it already; if not, whether Advance will now ask for that.
  bool placed() const { return seq_ >= 0; }
  bool AwaitsRoom() const;
  // Moves what was read to the bank, between two steps. True: all of it is there, and the files
  // were whole, or a beginning is (damage()). kResourceExhausted where the bank has no room for it:
  // it may be called again. Any other error is its end: the files cannot be read, are damaged, or
  // have a sequence that this bank cannot have.
  Result<bool> Advance();
  // Once Advance has returned true: the sequence of the bank, which is the caller's from now on,
  // and its tokens.
  int32_t TakeSequence() { return std::exchange(seq_, -1); }
  int64_t length() const { return length_; }
  // The error that was the end of the reading, or that left no more than that of it; and the number
  // of the file that it is of: of a segment, or ContextFiles::segments.size().
  const Status& damage() const { return damage_; }
  size_t failed() const;
  // Once Advance has returned true: bytes of the files, and how they were read.
  size_t bytes() const { return bytes_; }
  bool direct() const { return reader_->disk().direct(); }
  std::string how() const { return reader_->disk().how(); }

 private:
  struct Piece {
    DiskReader::Piece read;
    size_t file = 0;
  };

  // The thread's.
  Status Read();
  Status ReadFile(size_t file);
  Status CheckText(size_t file) const;
  bool HasOwn() const { return !files_.own.path.empty(); }
  RowRange RowsOf(size_t file) const;
  Status Place();
  // Keeps the first files where `end` is what became of the next one; false: it cannot.
  bool Cut(const Status& end);

  EngineCore& core_;
  ContextFiles files_;
  DiskReaderOptions options_;
  std::function<void()> ready_;
  std::unique_ptr<CheckedReader> reader_;  // the thread's, while it runs
  std::string own_text_;                   // the thread's
  int32_t seq_ = -1;
  int64_t length_ = 0;
  Status damage_;
  std::vector<IncomingRows> rows_;  // by file, once it is placed

  mutable std::mutex mutex_;  // of what follows
  std::condition_variable changed_;
  std::optional<SequenceImage> image_;
  std::vector<Piece> pieces_;        // that were read
  std::vector<int32_t> given_back_;  // buffers of those that the bank has
  size_t whole_ = 0;                 // files that were read, and had the right checksum
  size_t bytes_ = 0;                 // of those
  std::optional<Status> end_;        // of the thread
  bool stop_ = false;

  std::thread thread_;
};

}  // namespace omnikv
