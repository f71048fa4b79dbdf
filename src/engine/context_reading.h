// A context on its way from a file to the bank, while the engine goes on (docs/decisions/082).
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

// A thread of its own reads the file into pieces of memory, as many as DiskReaderOptions says. The
// thread of the engine moves them to the bank, where nothing uses the sequence until all of it is
// there and the checksum was right. All but what `ready` says is for the engine's thread.
class ContextReading {
 public:
  // `ready` is called each time that Advance has more to do, on the thread that reads.
  ContextReading(EngineCore& core, std::string path, FileKind kind,
                 const DiskReaderOptions& options, std::function<void()> ready);
  // Once the thread has ended, which takes no longer than the reads that are on their way. A
  // sequence that was not taken goes.
  ~ContextReading();
  ContextReading(const ContextReading&) = delete;
  ContextReading& operator=(const ContextReading&) = delete;

  const std::string& path() const { return path_; }
  // Whether the bank has room for it already; if not, whether Advance will now ask for that.
  bool placed() const { return rows_.has_value(); }
  bool AwaitsRoom() const;
  // Moves what was read to the bank, between two steps. True: all of it is there, and the file was
  // whole. kResourceExhausted where the bank has no room for it: it may be called again. Any other
  // error is its end: the file cannot be read, is damaged, or has a sequence that this bank cannot
  // have.
  Result<bool> Advance();
  // Once Advance has returned true: the sequence of the bank, which is the caller's from now on.
  int32_t TakeSequence() { return std::exchange(seq_, -1); }
  // Once Advance has returned true: bytes of the file, and how they were read.
  size_t bytes() const { return file_->disk().size(); }
  bool direct() const { return file_->disk().direct(); }
  std::string how() const { return file_->disk().how(); }

 private:
  Status Read();  // the thread's
  Status Place();

  EngineCore& core_;
  std::string path_;
  FileKind kind_;
  DiskReaderOptions options_;
  std::function<void()> ready_;
  std::unique_ptr<CheckedReader> file_;  // the thread's, while it runs
  int32_t seq_ = -1;
  std::optional<IncomingRows> rows_;

  mutable std::mutex mutex_;  // of what follows
  std::condition_variable changed_;
  std::optional<SequenceImage> image_;
  size_t row_bytes_ = 0;
  std::vector<DiskReader::Piece> pieces_;  // that were read
  std::vector<int32_t> given_back_;        // buffers of those that the bank has
  std::optional<Status> end_;              // of the thread
  bool stop_ = false;

  std::thread thread_;
};

}  // namespace omnikv
