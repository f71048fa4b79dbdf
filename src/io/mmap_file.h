// A whole file, read-only, mapped into memory: its pages come from the page cache on first touch.
#pragma once

#include <cstddef>
#include <string>

#include "omnikv/status.h"

namespace omnikv {

// Movable; the mapping ends with the object, and with it every view into data(). Const methods may
// be called from several threads. The file must not be truncated while it is mapped: reading a page
// that no longer exists is SIGBUS, which no check of ours can turn into a Status.
class MmapFile {
 public:
  MmapFile() = default;
  ~MmapFile() { Unmap(); }
  MmapFile(MmapFile&& other) noexcept;
  MmapFile& operator=(MmapFile&& other) noexcept;
  MmapFile(const MmapFile&) = delete;
  MmapFile& operator=(const MmapFile&) = delete;

  // kNotFound: no such file. kInvalidArgument: a directory, or not a regular file. kCorrupt: empty,
  // or a Git LFS pointer in place of the file. kFailed: the system refuses to open or map it, with
  // its reason.
  static Result<MmapFile> Open(const std::string& path);

  const std::byte* data() const { return data_; }  // page-aligned
  size_t size() const { return size_; }            // bytes

  bool Contains(const std::byte* p) const { return p >= data_ && p < data_ + size_; }

  // Takes the pages wholly inside [offset, offset + bytes) out of this process's memory. They stay
  // in the page cache for as long as the kernel has room, and come back when they are read again.
  void Release(size_t offset, size_t bytes) const;

 private:
  void Unmap();

  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace omnikv
