// Files that have no name and go with the process.
#pragma once

#include <cstddef>
#include <string>
#include <utility>

#include "omnikv/status.h"

namespace omnikv {

// A new file without a name on the disk of `folder`, open for reading and writing: its descriptor,
// which is the caller's. kInvalidArgument, with the system's reason, where none can be made there.
Result<int> OpenNameless(const std::string& folder);

// Bytes of the disk of `folder` that a file may still take; kInvalidArgument where the system does
// not say.
Result<size_t> FreeRoom(const std::string& folder);

// A file without a name, as memory of this process: zero until written. Its room on the disk is
// taken at once, so that no write to it can find the disk full. Movable. Thread-compatible; its
// bytes are shared memory.
class MappedFile {
 public:
  // kInvalidArgument as OpenNameless; kResourceExhausted, with the figures, where the disk has no
  // room for `bytes`, which are more than 0.
  static Result<MappedFile> Create(const std::string& folder, size_t bytes);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }
  int descriptor() const { return file_; }

 private:
  MappedFile() = default;

  int file_ = -1;
  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace omnikv
