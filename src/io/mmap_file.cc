#include "io/mmap_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string_view>
#include <system_error>
#include <utility>

#include "base/check.h"

namespace omnikv {
namespace {

// What a model's repository holds in place of its large files when it was cloned without them.
constexpr std::string_view kLfsPointer = "version https://git-lfs.github.com/spec/";

std::string ErrorText(int error) {
  return std::generic_category().message(error);
}

struct Fd {
  int value;
  ~Fd() {
    if (value >= 0) ::close(value);
  }
};

}  // namespace

MmapFile::MmapFile(MmapFile&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

MmapFile& MmapFile::operator=(MmapFile&& other) noexcept {
  if (this != &other) {
    Unmap();
    data_ = std::exchange(other.data_, nullptr);
    size_ = std::exchange(other.size_, 0);
  }
  return *this;
}

Result<MmapFile> MmapFile::Open(const std::string& path) {
  // O_NONBLOCK: opening a FIFO must not wait for its writer.
  const Fd fd{::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
  if (fd.value < 0) {
    const int error = errno;
    if (error == ENOENT || error == ENOTDIR) {
      return NotFound(fmt::format("{}: no such file", path));
    }
    return Failed(fmt::format("{}: cannot be opened for reading ({})", path, ErrorText(error)));
  }
  struct stat info;
  if (::fstat(fd.value, &info) != 0) {
    return Failed(fmt::format("{}: cannot be examined ({})", path, ErrorText(errno)));
  }
  if (S_ISDIR(info.st_mode)) {
    return InvalidArgument(fmt::format("{}: is a directory, expected a file", path));
  }
  if (!S_ISREG(info.st_mode)) {
    return InvalidArgument(fmt::format("{}: is a device or a pipe, expected a file", path));
  }
  if (info.st_size == 0) return Corrupt(fmt::format("{}: is empty (0 bytes)", path));

  MmapFile file;
  file.size_ = static_cast<size_t>(info.st_size);
  void* data = ::mmap(nullptr, file.size_, PROT_READ, MAP_PRIVATE, fd.value, 0);
  if (data == MAP_FAILED) {
    const int error = errno;
    file.size_ = 0;
    return Failed(fmt::format("{}: its {} bytes cannot be mapped into memory ({})", path,
                              info.st_size, ErrorText(error)));
  }
  file.data_ = static_cast<std::byte*>(data);
  if (std::string_view(static_cast<const char*>(data), file.size_).starts_with(kLfsPointer)) {
    return Corrupt(
        fmt::format("{}: is a Git LFS pointer of {} bytes, expected the file it stands "
                    "for (git lfs pull fetches it)",
                    path, file.size_));
  }
  return file;
}

void MmapFile::Release(size_t offset, size_t bytes) const {
  OKV_CHECK(offset <= size_ && bytes <= size_ - offset, "{} + {} of {}", offset, bytes, size_);
  const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  const size_t begin = (offset + page - 1) / page * page;
  // The last page of the file is nobody else's: its rest is padding.
  const size_t end = offset + bytes == size_ ? size_ : (offset + bytes) / page * page;
  // Only a hint: a kernel that refuses it keeps the pages a little longer.
  if (begin < end) ::madvise(data_ + begin, end - begin, MADV_DONTNEED);
}

void MmapFile::Unmap() {
  if (data_ != nullptr) ::munmap(data_, size_);
  data_ = nullptr;
  size_ = 0;
}

}  // namespace omnikv
