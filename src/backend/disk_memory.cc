#include "backend/disk_memory.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "base/check.h"
#include "base/log.h"
#include "base/printable.h"

namespace omnikv {
namespace {

// Bytes of one read of a long copy: enough for the rate of a disk, and few enough that all readers
// have some of a layer.
constexpr size_t kPart = size_t{1} << 20;
// Neighbours that one call reads to several places: less than IOV_MAX.
constexpr size_t kRun = 64;

}  // namespace

// Of the files that are in use, by address.
struct DiskMemory::Files {
  std::mutex mutex;
  std::map<const std::byte*, std::shared_ptr<MappedFile>> by_begin;
};

class DiskMemory::Job {
 public:
  // `together`: neighbours go in one call.
  Job(std::shared_ptr<const MappedFile> of, std::vector<Piece> all, bool together)
      : file(std::move(of)), pieces(std::move(all)) {
    for (size_t i = 0; i < pieces.size(); ++i) {
      const bool joins = together && i > 0 && i - runs.back() < kRun &&
                         pieces[i].from == pieces[i - 1].from + pieces[i - 1].bytes;
      if (!joins) runs.push_back(i);
    }
    take = std::clamp<size_t>(runs.size() / (4 * kReaders), 1, 16);
  }
  size_t End(size_t run) const { return run + 1 < runs.size() ? runs[run + 1] : pieces.size(); }
  bool Taken() const { return next == runs.size(); }
  bool Done() const { return done == runs.size(); }

  std::shared_ptr<const MappedFile> file;
  std::vector<Piece> pieces;
  std::vector<size_t> runs;  // the first piece of each
  size_t take = 1;           // runs that a reader takes at once
  size_t next = 0;           // run that no reader has taken
  size_t done = 0;           // runs
};

DiskMemory::DiskMemory(std::string folder)
    : folder_(std::move(folder)), files_(std::make_shared<Files>()) {}

Result<std::unique_ptr<DiskMemory>> DiskMemory::Create(const std::string& folder) {
  OKV_ASSIGN_OR_RETURN(const int file, OpenNameless(folder));
  close(file);
  std::unique_ptr<DiskMemory> memory(new DiskMemory(folder));
  OKV_RETURN_IF_ERROR(memory->Start());
  return memory;
}

Status DiskMemory::Start() {
  try {
    for (int i = 0; i < kReaders; ++i) readers_.emplace_back([this] { Serve(); });
  } catch (const std::system_error& error) {
    if (readers_.empty()) {
      return ResourceExhausted(fmt::format("{}: the system gives no thread to read from there ({})",
                                           folder_, error.what()));
    }
  }
  return {};
}

DiskMemory::~DiskMemory() {
  {
    const std::lock_guard lock(mutex_);
    stops_ = true;
  }
  work_.notify_all();
  for (std::thread& reader : readers_) reader.join();
}

Result<Buffer> DiskMemory::Allocate(size_t bytes, std::string_view what) {
  if (bytes == 0) return Buffer();
  auto made = MappedFile::Create(folder_, bytes);
  if (!made.ok()) return made.status().Prefixed(fmt::format("{} on the disk", what));
  auto file = std::make_shared<MappedFile>(std::move(*made));
  std::byte* const data = file->data();
  const std::lock_guard lock(files_->mutex);
  files_->by_begin[data] = std::move(file);
  return Buffer(data, bytes, [files = files_](void* p) {
    std::shared_ptr<MappedFile> last;  // goes without the lock
    const std::lock_guard lock_files(files->mutex);
    const auto at = files->by_begin.find(static_cast<std::byte*>(p));
    if (at == files->by_begin.end()) return;
    last = std::move(at->second);
    files->by_begin.erase(at);
  });
}

std::shared_ptr<const MappedFile> DiskMemory::FileOf(const void* p) const {
  const auto* const at = static_cast<const std::byte*>(p);
  const std::lock_guard lock(files_->mutex);
  auto after = files_->by_begin.upper_bound(at);
  if (after == files_->by_begin.begin()) return nullptr;
  const auto& file = std::prev(after)->second;
  return at < file->data() + file->size() ? file : nullptr;
}

void DiskMemory::Fail(int error, const char* what) {
  const std::lock_guard lock(mutex_);
  if (!failure_.ok()) return;
  failure_ = Failed(fmt::format("{}: K/V cannot be {} there ({})", folder_, what,
                                error != 0 ? ErrorText(error) : "the file ends too early"));
}

void DiskMemory::Do(const Job& job, size_t run) {
  const size_t begin = job.runs[run];
  const size_t end = job.End(run);
  auto offset = static_cast<off_t>(job.pieces[begin].from - job.file->data());
  size_t left = 0;
  std::vector<iovec> to;
  for (size_t i = begin; i < end; ++i) {
    left += job.pieces[i].bytes;
    to.push_back({.iov_base = job.pieces[i].to, .iov_len = job.pieces[i].bytes});
  }
  if (job.pieces[begin].to == nullptr) {
    // Advice: a refusal costs speed only.
    posix_fadvise(job.file->descriptor(), offset, static_cast<off_t>(left), POSIX_FADV_WILLNEED);
    return;
  }
  iovec* next = to.data();
  while (left > 0) {
    const auto count = static_cast<int>(to.data() + to.size() - next);
    const ssize_t n = preadv(job.file->descriptor(), next, count, offset);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return Fail(n < 0 ? errno : 0, "read");
    offset += n;
    left -= static_cast<size_t>(n);
    for (auto got = static_cast<size_t>(n); got > 0;) {
      const size_t part = std::min(got, next->iov_len);
      next->iov_base = static_cast<std::byte*>(next->iov_base) + part;
      next->iov_len -= part;
      got -= part;
      if (next->iov_len == 0) ++next;
    }
  }
}

std::shared_ptr<DiskMemory::Job> DiskMemory::NextJob() {
  while (!urgent_.empty() && urgent_.front()->Taken()) urgent_.pop_front();
  if (!urgent_.empty()) return urgent_.front();
  // The first one ends before the next begins.
  if (!in_order_.empty() && !in_order_.front()->Taken()) return in_order_.front();
  while (!expected_.empty() && expected_.front()->Taken()) expected_.pop_front();
  return expected_.empty() ? nullptr : expected_.front();
}

void DiskMemory::Take(const std::shared_ptr<Job>& job, std::unique_lock<std::mutex>& lock) {
  const size_t begin = job->next;
  const size_t end = job->next = std::min(begin + job->take, job->runs.size());
  lock.unlock();
  for (size_t run = begin; run < end; ++run) Do(*job, run);
  lock.lock();
  job->done += end - begin;
  if (!job->Done()) return;
  if (!in_order_.empty() && in_order_.front() == job) {
    in_order_.pop_front();
    ++finished_;
    work_.notify_all();
  }
  done_.notify_all();
}

void DiskMemory::Serve() {
  std::unique_lock lock(mutex_);
  while (true) {
    std::shared_ptr<Job> job;
    work_.wait(lock, [&] { return stops_ || (job = NextJob()) != nullptr; });
    if (stops_) return;
    Take(job, lock);
  }
}

void DiskMemory::Read(std::vector<Piece> pieces) {
  if (pieces.empty()) return;
  auto file = FileOf(pieces.front().from);
  DoNow(std::make_shared<Job>(std::move(file), std::move(pieces), /*together=*/true));
}

void DiskMemory::ReadLong(Piece copy) {
  if (copy.bytes == 0) return;
  DoNow(std::make_shared<Job>(FileOf(copy.from), PartsOf(copy), /*together=*/false));
}

void DiskMemory::DoNow(const std::shared_ptr<Job>& job) {
  size_t bytes = 0;
  for (const Piece& piece : job->pieces) bytes += piece.bytes;
  std::unique_lock lock(mutex_);
  bytes_read_ += bytes;
  urgent_.push_back(job);
  if (job->runs.size() > job->take) work_.notify_all();
  while (!job->Taken()) Take(job, lock);
  done_.wait(lock, [&] { return job->Done(); });
}

std::vector<DiskMemory::Piece> DiskMemory::PartsOf(const Piece& copy) {
  std::vector<Piece> parts;
  for (size_t at = 0; at < copy.bytes; at += kPart) {
    parts.push_back(
        {.from = copy.from + at, .to = copy.to + at, .bytes = std::min(kPart, copy.bytes - at)});
  }
  return parts;
}

void DiskMemory::Begin(Piece copy) {
  std::vector<Piece> parts = PartsOf(copy);
  if (parts.empty()) return;
  const auto job = std::make_shared<Job>(FileOf(copy.from), std::move(parts), /*together=*/false);
  const std::lock_guard lock(mutex_);
  bytes_read_ += copy.bytes;
  in_order_.push_back(job);
  ++begun_;
  work_.notify_all();
}

void DiskMemory::Expect(std::vector<Piece> pieces) {
  if (pieces.empty()) return;
  auto file = FileOf(pieces.front().from);
  const auto job = std::make_shared<Job>(std::move(file), std::move(pieces), /*together=*/true);
  const std::lock_guard lock(mutex_);
  expected_.push_back(job);
  work_.notify_all();
}

void DiskMemory::Await(uint64_t point) {
  std::unique_lock lock(mutex_);
  done_.wait(lock, [&] { return finished_ >= point; });
}

void DiskMemory::Write(std::byte* to, const void* from, size_t bytes) {
  const auto file = FileOf(to);
  OKV_CHECK(file != nullptr);
  auto offset = static_cast<off_t>(to - file->data());
  const auto* data = static_cast<const std::byte*>(from);
  while (bytes > 0) {
    const ssize_t n = pwrite(file->descriptor(), data, bytes, offset);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return Fail(n < 0 ? errno : ENOSPC, "written");
    data += n;
    offset += n;
    bytes -= static_cast<size_t>(n);
  }
}

Status DiskMemory::TakeFailure() {
  const std::lock_guard lock(mutex_);
  return std::exchange(failure_, {});
}

uint64_t DiskMemory::bytes_read() const {
  const std::lock_guard lock(mutex_);
  return bytes_read_;
}

}  // namespace omnikv
