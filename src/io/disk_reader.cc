#include "io/disk_reader.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <liburing.h>
#include <unistd.h>

#include <cerrno>
#include <limits>
#include <utility>

#include "base/check.h"
#include "base/printable.h"

namespace omnikv {
namespace {

constexpr int64_t kOnItsWay = std::numeric_limits<int64_t>::min();

}  // namespace

struct DiskReader::Ring {
  io_uring ring = {};
  int32_t on_their_way = 0;

  ~Ring() { io_uring_queue_exit(&ring); }
};

DiskReader::DiskReader(std::vector<std::string> paths, const DiskReaderOptions& options)
    : paths_(std::move(paths)), options_(options) {}

DiskReader::~DiskReader() {
  if (ring_) GiveUpRing("");
}

Result<std::unique_ptr<DiskReader>> DiskReader::Open(std::vector<std::string> paths,
                                                     const DiskReaderOptions& options) {
  OKV_CHECK(options.piece > 0 && options.piece % kAlignment == 0 && options.pieces > 0 &&
            options.on_their_way > 0 && !paths.empty());
  std::unique_ptr<DiskReader> reader(new DiskReader(std::move(paths), options));
  if (options.direct) {
    auto ring = std::make_unique<Ring>();
    const auto entries = static_cast<unsigned>(std::min(options.pieces, options.on_their_way));
    const int made = io_uring_queue_init(entries, &ring->ring, 0);
    if (made < 0) {
      static_cast<void>(ring.release());  // there is nothing to exit
      reader->refused_ = fmt::format("io_uring: {}", ErrorText(-made));
    } else {
      reader->ring_ = std::move(ring);
    }
  } else {
    reader->refused_ = "not asked for";
  }
  OKV_RETURN_IF_ERROR(reader->OpenOne());
  auto memory = Pages::Reserve(options.piece * static_cast<size_t>(options.pieces));
  if (!memory.ok()) return memory.status().Prefixed(reader->path());
  reader->memory_ = std::move(*memory);
  for (int32_t buffer = options.pieces; buffer-- > 0;) reader->free_.push_back(buffer);
  reader->got_.resize(static_cast<size_t>(options.pieces));
  return reader;
}

Status DiskReader::OpenOne() {
  OKV_ASSIGN_OR_RETURN(OpenedFile file, OpenedFile::Open(paths_[first_ + open_.size()]));
  const int fd = file.fd();
  open_.push_back(std::move(file));
  begin_ = 0;
  if (ring_) {
    const int flags = ::fcntl(fd, F_GETFL);
    // Without O_NONBLOCK, under which a ring may refuse to wait for the disk.
    if (flags >= 0 && ::fcntl(fd, F_SETFL, (flags & ~O_NONBLOCK) | O_DIRECT) == 0) return {};
    GiveUpRing(fmt::format("O_DIRECT: {}", ErrorText(errno)));
  }
  ::posix_fadvise(fd, 0, 0, POSIX_FADV_SEQUENTIAL);
  return {};
}

std::string DiskReader::how() const {
  return direct() ? "io_uring and O_DIRECT" : fmt::format("pread ({})", refused_);
}

void DiskReader::Begin() {
  const int32_t most = std::min(options_.pieces, options_.on_their_way);
  int32_t prepared = 0;
  while (!free_.empty() && ring_->on_their_way + prepared < most) {
    const OpenedFile& file = open_.back();
    if (begin_ == file.size()) {
      if (first_ + open_.size() == paths_.size() || !next_opens_.ok()) break;
      // It gives up the ring only where nothing is prepared.
      if (prepared > 0) {
        Submit(std::exchange(prepared, 0));
        if (!ring_) return;
      }
      next_opens_ = OpenOne();
      if (!ring_) return;
      continue;
    }
    io_uring_sqe* const sqe = io_uring_get_sqe(&ring_->ring);
    if (sqe == nullptr) break;
    const int32_t buffer = free_.back();
    free_.pop_back();
    // All of a piece at the end of a file, too: a read past the page cache is of whole blocks.
    io_uring_prep_read(sqe, file.fd(), Buffer(buffer), static_cast<unsigned>(options_.piece),
                       begin_);
    io_uring_sqe_set_data64(sqe, static_cast<uint64_t>(buffer));
    got_[static_cast<size_t>(buffer)] = kOnItsWay;
    begun_.push_back(buffer);
    begin_ += BytesAt(file, begin_);
    ++prepared;
  }
  if (prepared > 0) Submit(prepared);
}

void DiskReader::Submit(int32_t prepared) {
  const int submitted = io_uring_submit(&ring_->ring);
  ring_->on_their_way += std::max(0, submitted);
  if (submitted < prepared) {
    GiveUpRing(fmt::format("io_uring: {}", submitted < 0 ? ErrorText(-submitted) : "it is full"));
  }
}

void DiskReader::Await(int32_t buffer) {
  while (ring_->on_their_way > 0 && got_[static_cast<size_t>(buffer)] == kOnItsWay) {
    io_uring_cqe* cqe = nullptr;
    const int waited = io_uring_wait_cqe(&ring_->ring, &cqe);
    if (waited == -EINTR || waited == -EAGAIN || waited == -EBUSY) continue;
    OKV_CHECK(waited == 0, "io_uring_wait_cqe: {}", ErrorText(-waited));
    got_[io_uring_cqe_get_data64(cqe)] = cqe->res;
    io_uring_cqe_seen(&ring_->ring, cqe);
    --ring_->on_their_way;
  }
}

void DiskReader::GiveUpRing(std::string why) {
  refused_ = std::move(why);
  // What is on its way ends first: its buffer is the ring's until then.
  for (const int32_t buffer : begun_) Await(buffer);
  ring_.reset();
  for (const OpenedFile& file : open_) {
    const int flags = ::fcntl(file.fd(), F_GETFL);
    ::fcntl(file.fd(), F_SETFL, flags & ~(O_DIRECT | O_NONBLOCK));
    ::posix_fadvise(file.fd(), 0, 0, POSIX_FADV_SEQUENTIAL);
  }
}

Status DiskReader::ReadPlainly(size_t offset, size_t bytes, std::byte* to) const {
  while (bytes > 0) {
    const ssize_t n = ::pread(open_.front().fd(), to, bytes, static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      return Failed(
          fmt::format("{}: cannot be read at byte {} ({})", path(), offset, ErrorText(errno)));
    }
    if (n == 0) {
      return Corrupt(fmt::format("{}: ends at byte {}, but had {} bytes when it was opened", path(),
                                 offset, size()));
    }
    to += n;
    offset += static_cast<size_t>(n);
    bytes -= static_cast<size_t>(n);
  }
  return {};
}

Result<std::optional<DiskReader::Piece>> DiskReader::Next() {
  if (next_ == size()) return std::optional<Piece>();
  OKV_CHECK(HasBuffer(), "{}: all {} pieces are given out", path(), options_.pieces);
  const size_t bytes = BytesAt(open_.front(), next_);
  if (ring_) Begin();
  int32_t buffer = 0;
  bool there = false;
  if (!begun_.empty()) {
    buffer = begun_.front();
    begun_.pop_front();
    if (ring_) Await(buffer);
    const int64_t got = got_[static_cast<size_t>(buffer)];
    there = got >= static_cast<int64_t>(bytes);
    // A disk may refuse to be read so only when it is read; pread then says what is wrong, if
    // anything is.
    if (!there && ring_) {
      GiveUpRing(got < 0 ? fmt::format("a read: {}", ErrorText(static_cast<int>(-got)))
                         : fmt::format("a read gave {} of {} bytes", got, bytes));
    }
  } else {
    buffer = free_.back();
    free_.pop_back();
    begin_ = next_ + bytes;
  }
  if (!there) {
    const Status read = ReadPlainly(next_, bytes, Buffer(buffer));
    if (!read.ok()) {
      free_.push_back(buffer);
      return read;
    }
  }
  next_ += bytes;
  return std::optional(Piece{.bytes = {Buffer(buffer), bytes}, .buffer = buffer});
}

Result<bool> DiskReader::NextFile() {
  OKV_CHECK(next_ == size());
  if (first_ + 1 == paths_.size()) return false;
  if (open_.size() == 1) {
    // What it could not be opened for before may have passed.
    next_opens_ = {};
    OKV_RETURN_IF_ERROR(OpenOne());
  }
  open_.pop_front();
  ++first_;
  next_ = 0;
  return true;
}

void DiskReader::GiveBack(int32_t buffer) {
  free_.push_back(buffer);
}

}  // namespace omnikv
