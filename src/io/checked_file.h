// Files of our own: a text that describes them, then bytes, behind a header with their sizes and
// their checksum. Such a file is there whole or as it was before, and is read whole or not at all.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "io/file.h"
#include "omnikv/status.h"

namespace omnikv {

// What a file is: eight characters that it begins with, the version of its format, and the words
// for it in messages ("a saved context").
struct FileKind {
  char magic[9] = {};
  uint32_t version = 0;
  const char* name = "";
};

// Writes one beside its place, under an unpredictable name, readable for its owner alone; Commit
// moves it there. One that goes without a Commit leaves nothing. One thread.
class CheckedFileWriter {
 public:
  // kNotFound, with the reason, when `path` cannot be written: a folder, a device, no such folder.
  static Result<std::unique_ptr<CheckedFileWriter>> Create(const std::string& path, FileKind kind,
                                                           std::string_view text);
  ~CheckedFileWriter();
  CheckedFileWriter(const CheckedFileWriter&) = delete;
  CheckedFileWriter& operator=(const CheckedFileWriter&) = delete;

  // Adds to the bytes. A failure is kept for Commit.
  void Write(const void* data, size_t bytes);
  // Replaces `path` once all is on the disk; kFailed, with the reason, when that or a Write failed.
  Status Commit();

 private:
  struct State;
  explicit CheckedFileWriter(std::unique_ptr<State> state);

  std::unique_ptr<State> state_;
};

// One that was found whole.
class CheckedFile {
 public:
  static constexpr size_t kMaxText = size_t{16} << 20;  // bytes

  // Reads all of `file`. kCorrupt, with the file and what is wrong, unless it is of this kind and
  // is what a writer committed; kUnsupported for another version.
  static Result<CheckedFile> Open(InputFile file, FileKind kind);

  // The same by its header and its size alone: it reads the text and no more, and finds no damage.
  static Result<CheckedFile> Peek(InputFile file, FileKind kind);

  const std::string& path() const { return file_.path(); }
  const std::string& text() const { return text_; }
  size_t size() const { return size_; }  // bytes behind the text
  // As InputFile::Read, counted from the first byte behind the text.
  Status Read(size_t offset, size_t bytes, void* to) const {
    return file_.Read(begin_ + offset, bytes, to);
  }

 private:
  // Reads all of it, against the checksum in its header.
  Status CheckSum() const;

  InputFile file_;
  std::string text_;
  std::string summed_;  // of the header
  uint64_t checksum_ = 0;
  size_t begin_ = 0;
  size_t size_ = 0;
};

}  // namespace omnikv
