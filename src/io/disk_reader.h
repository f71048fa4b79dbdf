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

// Files one after another, as one stream of pieces: reads of the next file begin before those of
// the one before it have ended, so that many files take no longer than one. Several pieces are on
// their way at a time, where the system has io_uring and the files' disk takes O_DIRECT. Where one
// of the two is refused, as by the rules of many containers, pread brings one piece after another
// through the page cache. Thread-compatible; what a piece holds may be read by any thread until it
// is given back.
class DiskReader {
 public:
  static constexpr size_t kAlignment = 4096;
  struct Piece {
    std::span<const std::byte> bytes;
    int32_t buffer = 0;
  };

  // At the first of the files, which must be there; the others may come later. Errors: those of
  // OpenedFile::Open; kResourceExhausted where there is no memory for the buffers. An empty file
  // has no pieces. REQUIRES a file.
  static Result<std::unique_ptr<DiskReader>> Open(std::vector<std::string> paths,
                                                  const DiskReaderOptions& options);
  ~DiskReader();  // once nothing is on its way; what pieces hold goes with it
  DiskReader(const DiskReader&) = delete;
  DiskReader& operator=(const DiskReader&) = delete;

  // The next piece of the file, or nothing at its end. Each has a buffer until it is given back.
  // kFailed, with the file and the reason, where the system cannot read it; kCorrupt where the file
  // has become shorter. REQUIRES HasBuffer().
  Result<std::optional<Piece>> Next();
  // To the next file; false: this was the last one. Errors: those of OpenedFile::Open. REQUIRES
  // that Next was at the end.
  Result<bool> NextFile();
  // Of a piece that is of no use any more; in any order.
  void GiveBack(int32_t buffer);
  // Whether fewer than all pieces are given out.
  bool HasBuffer() const { return !free_.empty() || !begun_.empty(); }

  const std::string& path() const { return paths_[first_]; }
  // Bytes, as it was when the file was opened.
  size_t size() const { return open_.front().size(); }
  // How it reads, so far as it has: past the page cache, and for people.
  bool direct() const { return refused_.empty(); }
  std::string how() const;

 private:
  struct Ring;

  DiskReader(std::vector<std::string> paths, const DiskReaderOptions& options);
  std::byte* Buffer(int32_t buffer) const {
    return memory_.data() + static_cast<size_t>(buffer) * options_.piece;
  }
  // Bytes of the piece of a file at `offset`.
  size_t BytesAt(const OpenedFile& file, size_t offset) const {
    return std::min(options_.piece, file.size() - offset);
  }
  // The file behind those that are open.
  Status OpenOne();
  // Begins as many reads as there are buffers for.
  void Begin();
  void Submit(int32_t prepared);
  // Until the read into that buffer has ended, well or not.
  void Await(int32_t buffer);
  // From now on by pread, which also does what the ring has not done.
  void GiveUpRing(std::string why);
  Status ReadPlainly(size_t offset, size_t bytes, std::byte* to) const;

  std::vector<std::string> paths_;
  DiskReaderOptions options_;
  size_t first_ = 0;             // of paths_: the file that is given out
  std::deque<OpenedFile> open_;  // it, and those behind it of which reads have begun
  Status next_opens_;            // what the one behind these cannot be opened for
  Pages memory_;
  std::vector<int32_t> free_;   // buffers
  std::deque<int32_t> begun_;   // buffers of the reads that the ring has, in the files' order
  std::vector<int64_t> got_;    // by buffer, bytes or a negated errno; kOnItsWay
  size_t next_ = 0;             // offset of the piece to give out
  size_t begin_ = 0;            // offset of the read to begin, in the last of open_
  std::unique_ptr<Ring> ring_;  // null: pread
  std::string refused_;         // why there is none
};

}  // namespace omnikv
