// Files that are read where they are asked for. Nothing is mapped: a disk that fails, or a file
// that becomes shorter while it is read, is a Status and never a signal.
#pragma once

#include <cstddef>
#include <string>

#include "base/memory.h"
#include "omnikv/status.h"

namespace omnikv {

// An open regular file, or bytes in memory that stand for one. Movable. Const methods may be called
// from several threads.
class InputFile {
 public:
  InputFile() = default;
  ~InputFile() { Close(); }
  InputFile(InputFile&& other) noexcept;
  InputFile& operator=(InputFile&& other) noexcept;
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  // kNotFound: no such file. kInvalidArgument: a directory, or not a regular file. kCorrupt: empty,
  // or a Git LFS pointer in place of the file. kFailed: the system refuses to open or to read it,
  // with its reason.
  static Result<InputFile> Open(const std::string& path);

  // Bytes in memory, which must outlive the object; `name` stands in messages for the path.
  static InputFile FromMemory(std::string name, const std::byte* data, size_t size);

  const std::string& path() const { return path_; }
  size_t size() const { return size_; }  // bytes, as it was when the file was opened

  // Bytes [offset, offset + bytes) to `to`. REQUIRES the range inside size(). kFailed, with the
  // file and the reason, when the system cannot read it or the file has become shorter.
  Status Read(size_t offset, size_t bytes, void* to) const;

  // All of it; kCorrupt when it has more than `max_bytes`.
  Result<std::string> ReadAll(size_t max_bytes) const;

 private:
  void Close();

  std::string path_;
  int fd_ = -1;                      // -1: memory
  const std::byte* data_ = nullptr;  // of memory
  size_t size_ = 0;
};

// Whether to open `path` is worth a try: not when there is no such name in its folder. So a link
// that leads nowhere and a folder that cannot be searched come to InputFile::Open, which says what
// is wrong.
bool MayExist(const std::string& path);

// Open, then ReadAll.
Result<std::string> ReadWholeFile(const std::string& path, size_t max_bytes);

// The beginning of a file in memory, as far as it was asked for: what is there never moves. The
// file must outlive it. Thread-compatible.
class FileHead {
 public:
  // Address space for at most `max_bytes` of the file; memory is taken as bytes come in.
  static Result<FileHead> Open(const InputFile& file, size_t max_bytes);
  // Memory that holds all of it.
  FileHead(const std::byte* data, size_t size) : data_(data), size_(size), fetched_(size) {}

  const std::byte* data() const { return data_; }
  size_t size() const { return size_; }  // of the file

  // Whether the first `end` bytes are in memory now. When not, status() has the reason. REQUIRES
  // end <= size().
  bool Fetch(size_t end) { return end <= fetched_ || FetchMore(end); }
  const Status& status() const { return status_; }

  // Takes over the memory, which data() stays valid with.
  Pages TakePages() { return std::move(pages_); }

 private:
  bool FetchMore(size_t end);

  const InputFile* file_ = nullptr;
  Pages pages_;
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
  size_t fetched_ = 0;
  size_t max_bytes_ = 0;
  Status status_;
};

}  // namespace omnikv
