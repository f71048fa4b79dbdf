// Memory for K/V that lies in files, and the reads of it: a page fault at a time reaches
// a small part of a disk's rate, many reads at once reach it.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "backend/backend.h"
#include "io/nameless_file.h"
#include "omnikv/status.h"

namespace omnikv {

// Any thread, but for Begin, begun and Await, which are one thread's. Buffers may outlive it.
class DiskMemory {
 public:
  // Reads that are under way at once, at most: a disk of NVMe needs as many, one behind a network
  // more.
  static constexpr int kReaders = 16;
  // Beside a card: bytes of a copy that pass through pinned memory together, of which there are two
  // parts in each direction. Readers share a part.
  static constexpr size_t kPartIn = size_t{16} << 20;
  static constexpr size_t kPartOut = size_t{4} << 20;

  // Bytes that are copied together. Those of one call lie in one buffer of this memory.
  struct Piece {
    const std::byte* from = nullptr;  // in this memory
    std::byte* to = nullptr;          // null: the system is told that they will be read
    size_t bytes = 0;
  };

  // `folder`: of the files. kInvalidArgument where none can be made there, kResourceExhausted where
  // the system gives no threads.
  static Result<std::unique_ptr<DiskMemory>> Create(const std::string& folder);
  ~DiskMemory();

  // Zeroed. kResourceExhausted, with the figures and `what`, where the disk has no room.
  Result<Buffer> Allocate(size_t bytes, std::string_view what);
  // Whether some memory is part of it.
  bool Holds(const void* p) const { return FileOf(p) != nullptr; }

  // Reads the pieces and returns when all are there.
  void Read(std::vector<Piece> pieces);
  // The same of one long piece, which all readers share.
  void ReadLong(Piece copy);
  // Begins to read the pieces, after those of earlier calls of Begin, and returns. `from` and `to`
  // stay as they are until Await. A copy of many bytes is as many pieces as readers like.
  void Begin(Piece copy);
  // Has the pieces brought to the page cache behind other work: later reads of them wait less.
  void Expect(std::vector<Piece> pieces);
  // What was begun so far, as a point to wait for.
  uint64_t begun() const { return begun_; }
  // Returns when what was begun up to there has been read.
  void Await(uint64_t point);
  // Writes to this memory, as a copy there does, with errors instead of signals.
  void Write(std::byte* to, const void* from, size_t bytes);

  // The first error of the disk since the last call; what was read since then is undefined.
  Status TakeFailure();
  // Bytes that Read and Begin brought, whether the page cache had them or not.
  uint64_t bytes_read() const;

 private:
  struct Files;
  // A call whose pieces are read in any order.
  class Job;

  explicit DiskMemory(std::string folder);
  Status Start();
  // Null where it is not of this memory.
  std::shared_ptr<const MappedFile> FileOf(const void* p) const;
  void Serve();
  // A job of which something is left to take; null: there is none. REQUIRES the lock.
  std::shared_ptr<Job> NextJob();
  // Does a part of the job that nobody has taken. REQUIRES the lock, and that there is one.
  void Take(const std::shared_ptr<Job>& job, std::unique_lock<std::mutex>& lock);
  void Do(const Job& job, size_t run);
  // Before all that was begun or expected; returns when it is done.
  void DoNow(const std::shared_ptr<Job>& job);
  static std::vector<Piece> PartsOf(const Piece& copy);
  void Fail(int error, const char* what);

  std::string folder_;
  std::shared_ptr<Files> files_;
  mutable std::mutex mutex_;
  std::condition_variable work_;               // for readers
  std::condition_variable done_;               // for who waits
  std::deque<std::shared_ptr<Job>> urgent_;    // of Read
  std::deque<std::shared_ptr<Job>> in_order_;  // of Begin: one after another
  std::deque<std::shared_ptr<Job>> expected_;  // of Expect
  uint64_t begun_ = 0;                         // jobs of Begin
  uint64_t finished_ = 0;                      // of them
  uint64_t bytes_read_ = 0;
  Status failure_;
  bool stops_ = false;
  std::vector<std::thread> readers_;
};

}  // namespace omnikv
