// Files that are read once, from the front to the back, as fast as their disk gives them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/memory.h"
#include "io/open_file.h"
#include "omnikv/status.h"

namespace omnikv {

struct DiskReaderOptions {
  size_t piece = size_t{512} << 10;  // bytes of one, a multiple of DiskReader::kAlignment
  int32_t pieces = 64;               // buffers: of those on their way, and of those given out
  int32_t on_their_way = 16;         // pieces at most
  // Past the page cache by io_uring, where the system allows both; else, and where this is false,
  // by pread.
  bool direct = true;
};

// Several pieces are on their way at a time, where the system has io_uring and the file's disk
// takes O_DIRECT. Where one of the two is refused, as by the rules of many containers, pread brings
// one piece after another through the page cache. Thread-compatible; what a piece holds may be read
// by any thread until it is given back.
class DiskReader {
 public:
  static constexpr size_t kAlignment = 4096;
  struct Piece {
    std::span<const std::byte> bytes;
    int32_t buffer = 0;
  };

  // Errors: those of OpenedFile::Open; kResourceExhausted where there is no memory for the buffers.
  // An empty file has no pieces.
  static Result<std::unique_ptr<DiskReader>> Open(const std::string& path,
                                                  const DiskReaderOptions& options);
  ~DiskReader();  // once nothing is on its way; what pieces hold goes with it
  DiskReader(const DiskReader&) = delete;
  DiskReader& operator=(const DiskReader&) = delete;

  // The next piece, or nothing at the end of the file. Each has a buffer until it is given back.
  // kFailed, with the file and the reason, where the system cannot read it; kCorrupt where the file
  // has become shorter. REQUIRES HasBuffer().
  Result<std::optional<Piece>> Next();
  // Of a piece that is of no use any more; in any order.
  void GiveBack(int32_t buffer);
  // Whether fewer than all pieces are given out.
  bool HasBuffer() const { return !free_.empty() || !begun_.empty(); }

  const std::string& path() const { return path_; }
  size_t size() const { return file_.size(); }  // bytes, as it was when the file was opened
  // How it reads, so far as it has: past the page cache, and for people.
  bool direct() const { return refused_.empty(); }
  std::string how() const;

 private:
  struct Ring;

  DiskReader(std::string path, const DiskReaderOptions& options);
  std::byte* Buffer(int32_t buffer) const {
    return memory_.data() + static_cast<size_t>(buffer) * options_.piece;
  }
  // Bytes of the piece at `offset`.
  size_t BytesAt(size_t offset) const { return std::min(options_.piece, file_.size() - offset); }
  // Begins as many reads as there are buffers for.
  void Begin();
  // Until the read into that buffer has ended, well or not.
  void Await(int32_t buffer);
  // From now on by pread, which also does what the ring has not done.
  void GiveUpRing(std::string why);
  Status ReadPlainly(size_t offset, size_t bytes, std::byte* to) const;

  std::string path_;
  DiskReaderOptions options_;
  OpenedFile file_;
  Pages memory_;
  std::vector<int32_t> free_;    // buffers
  std::deque<int32_t> begun_;    // buffers of the reads that the ring has, in the file's order
  std::vector<int64_t> got_;     // by buffer, bytes or a negated errno; kOnItsWay
  size_t begin_ = 0, next_ = 0;  // offsets of the read to begin, and of the piece to give out
  std::unique_ptr<Ring> ring_;   // null: pread
  std::string refused_;          // why there is none
};

}  // namespace omnikv
