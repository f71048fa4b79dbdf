// Files as the system opens them: what InputFile and DiskReader have in common.
#pragma once

#include <cstddef>
#include <string>
#include <utility>

#include "omnikv/status.h"

namespace omnikv {

// An open descriptor, which closes with it. Movable.
class OpenedFile {
 public:
  OpenedFile() = default;
  ~OpenedFile();
  OpenedFile(OpenedFile&& other) noexcept;
  OpenedFile& operator=(OpenedFile&& other) noexcept;
  OpenedFile(const OpenedFile&) = delete;
  OpenedFile& operator=(const OpenedFile&) = delete;

  // A regular file, for reading. kNotFound: no such file. kInvalidArgument: a directory, or not a
  // regular file. kFailed: the system refuses to open it, with its reason.
  static Result<OpenedFile> Open(const std::string& path);

  int fd() const { return fd_; }                    // -1: none
  size_t size() const { return size_; }             // bytes, as it was when the file was opened
  int Release() { return std::exchange(fd_, -1); }  // whose owner closes it

 private:
  int fd_ = -1;
  size_t size_ = 0;
};

}  // namespace omnikv
