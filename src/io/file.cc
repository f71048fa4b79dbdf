#include "io/file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string_view>
#include <utility>

#include "base/check.h"
#include "base/printable.h"
#include "io/open_file.h"

namespace omnikv {
namespace {

// What a model's repository holds in place of its large files when it was cloned without them.
constexpr std::string_view kLfsPointer = "version https://git-lfs.github.com/spec/";

constexpr size_t kHeadStep = size_t{1} << 20;  // bytes of a head that come in at once, at least

}  // namespace

InputFile::InputFile(InputFile&& other) noexcept {
  *this = std::move(other);
}

InputFile& InputFile::operator=(InputFile&& other) noexcept {
  if (this != &other) {
    Close();
    path_ = std::move(other.path_);
    fd_ = std::exchange(other.fd_, -1);
    data_ = std::exchange(other.data_, nullptr);
    size_ = std::exchange(other.size_, 0);
  }
  return *this;
}

void InputFile::Close() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

InputFile InputFile::FromMemory(std::string name, const std::byte* data, size_t size) {
  InputFile file;
  file.path_ = std::move(name);
  file.data_ = data;
  file.size_ = size;
  return file;
}

OpenedFile::~OpenedFile() {
  if (fd_ >= 0) ::close(fd_);
}

OpenedFile::OpenedFile(OpenedFile&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)), size_(std::exchange(other.size_, 0)) {}

OpenedFile& OpenedFile::operator=(OpenedFile&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(size_, other.size_);
  return *this;
}

Result<OpenedFile> OpenedFile::Open(const std::string& path) {
  OpenedFile file;
  // O_NONBLOCK: opening a FIFO must not wait for its writer.
  file.fd_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file.fd_ < 0) {
    const int error = errno;
    if (error == ENOENT || error == ENOTDIR) {
      return NotFound(fmt::format("{}: {}", path,
                                  MayExist(path) ? "is a link to a file that is not there (is its "
                                                   "download complete?)"
                                                 : "no such file"));
    }
    return Failed(fmt::format("{}: cannot be opened for reading ({})", path, ErrorText(error)));
  }
  struct stat info;
  if (::fstat(file.fd_, &info) != 0) {
    return Failed(fmt::format("{}: cannot be examined ({})", path, ErrorText(errno)));
  }
  if (S_ISDIR(info.st_mode)) {
    return InvalidArgument(fmt::format("{}: is a directory, expected a file", path));
  }
  if (!S_ISREG(info.st_mode)) {
    return InvalidArgument(fmt::format("{}: is a device or a pipe, expected a file", path));
  }
  file.size_ = static_cast<size_t>(info.st_size);
  return file;
}

Result<InputFile> InputFile::Open(const std::string& path) {
  OKV_ASSIGN_OR_RETURN(OpenedFile opened, OpenedFile::Open(path));
  if (opened.size() == 0) return Corrupt(fmt::format("{}: is empty (0 bytes)", path));
  InputFile file;
  file.path_ = path;
  file.size_ = opened.size();
  file.fd_ = opened.Release();

  char start[kLfsPointer.size()];
  const size_t n = std::min(sizeof(start), file.size_);
  OKV_RETURN_IF_ERROR(file.Read(0, n, start));
  if (std::string_view(start, n) == kLfsPointer) {
    return Corrupt(
        fmt::format("{}: is a Git LFS pointer of {} bytes, expected the file it stands "
                    "for (git lfs pull fetches it)",
                    path, file.size_));
  }
  return file;
}

Status InputFile::Read(size_t offset, size_t bytes, void* to) const {
  OKV_CHECK(offset <= size_ && bytes <= size_ - offset, "{} + {} of {}", offset, bytes, size_);
  if (fd_ < 0) {
    if (bytes != 0) std::memcpy(to, data_ + offset, bytes);
    return {};
  }
  for (auto* out = static_cast<char*>(to); bytes > 0;) {
    const ssize_t n = ::pread(fd_, out, bytes, static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      return Failed(
          fmt::format("{}: cannot be read at byte {} ({})", path_, offset, ErrorText(errno)));
    }
    if (n == 0) {
      return Failed(fmt::format("{}: ends at byte {}, but had {} bytes when it was opened", path_,
                                offset, size_));
    }
    out += n;
    offset += static_cast<size_t>(n);
    bytes -= static_cast<size_t>(n);
  }
  return {};
}

Result<std::string> InputFile::ReadAll(size_t max_bytes) const {
  if (size_ > max_bytes) {
    return Corrupt(fmt::format("{}: has {} bytes, expected at most {}", path_, size_, max_bytes));
  }
  std::string text(size_, '\0');
  OKV_RETURN_IF_ERROR(Read(0, size_, text.data()));
  return text;
}

bool MayExist(const std::string& path) {
  struct stat info;
  return ::lstat(path.c_str(), &info) == 0 || (errno != ENOENT && errno != ENOTDIR);
}

Result<std::string> ReadWholeFile(const std::string& path, size_t max_bytes) {
  OKV_ASSIGN_OR_RETURN(const InputFile file, InputFile::Open(path));
  return file.ReadAll(max_bytes);
}

Result<FileHead> FileHead::Open(const InputFile& file, size_t max_bytes) {
  FileHead head(nullptr, file.size());
  head.file_ = &file;
  head.fetched_ = 0;
  head.max_bytes_ = std::min(max_bytes, file.size());
  auto pages = Pages::Reserve(head.max_bytes_);
  if (!pages.ok()) return pages.status().Prefixed(file.path());
  head.pages_ = std::move(*pages);
  head.data_ = head.pages_.data();
  return head;
}

bool FileHead::FetchMore(size_t end) {
  if (!status_.ok()) return false;
  if (end > max_bytes_) {
    status_ =
        Corrupt(fmt::format("{}: describes itself in more than {} bytes, expected at most that",
                            file_->path(), max_bytes_));
    return false;
  }
  const size_t to = std::min(max_bytes_, std::max(end, fetched_ + kHeadStep));
  status_ = file_->Read(fetched_, to - fetched_, pages_.data() + fetched_);
  if (status_.ok()) fetched_ = to;
  return status_.ok();
}

}  // namespace omnikv
