#include "io/nameless_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <limits>

#include "base/log.h"
#include "base/printable.h"

namespace omnikv {
namespace {

// Where the file system has no files without a name: one that loses it at once.
int OpenAndUnlink(const std::string& folder) {
  std::string path = folder + "/omnikv-XXXXXX";
  const int file = mkostemp(path.data(), O_CLOEXEC);
  if (file >= 0) unlink(path.c_str());
  return file;
}

}  // namespace

Result<int> OpenNameless(const std::string& folder) {
  int file = open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (file < 0 && (errno == EOPNOTSUPP || errno == EISDIR)) file = OpenAndUnlink(folder);
  if (file >= 0) return file;
  return InvalidArgument(
      fmt::format("{}: no file can be made there ({})", folder, ErrorText(errno)));
}

Result<size_t> FreeRoom(const std::string& folder) {
  struct statvfs room;
  if (statvfs(folder.c_str(), &room) == 0) return size_t{room.f_bavail} * room.f_frsize;
  return InvalidArgument(
      fmt::format("{}: the free room of its disk is not known ({})", folder, ErrorText(errno)));
}

Result<MappedFile> MappedFile::Create(const std::string& folder, size_t bytes) {
  MappedFile mapped;
  OKV_ASSIGN_OR_RETURN(mapped.file_, OpenNameless(folder));
  const auto no_room = [&](int error) {
    const auto free = FreeRoom(folder);
    return ResourceExhausted(fmt::format("{}: no room for a file of {} ({}; {} free)", folder,
                                         HumanBytes(bytes), ErrorText(error),
                                         free.ok() ? HumanBytes(*free) : "unknown"));
  };
  if (bytes > static_cast<size_t>(std::numeric_limits<off_t>::max())) return no_room(EFBIG);
  // A write to a hole of a mapped file would end the process where the disk is full.
  if (const int error = posix_fallocate(mapped.file_, 0, static_cast<off_t>(bytes)); error != 0) {
    return no_room(error);
  }
  void* const data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, mapped.file_, 0);
  if (data == MAP_FAILED) return no_room(errno);
  mapped.data_ = static_cast<std::byte*>(data);
  mapped.size_ = bytes;
  // Rows that are read one by one bring no others along, which would cost memory and time. These
  // are advice: a refusal costs speed only.
  madvise(data, bytes, MADV_RANDOM);
  posix_fadvise(mapped.file_, 0, 0, POSIX_FADV_RANDOM);
  return mapped;
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) munmap(data_, size_);
  if (file_ >= 0) close(file_);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : file_(std::exchange(other.file_, -1)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(file_, other.file_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

}  // namespace omnikv
