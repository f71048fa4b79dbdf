// Files of our own (checked_file.h), read once from the front to the back, one after another.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "io/checked_header.h"
#include "io/checksum.h"
#include "io/disk_reader.h"

namespace omnikv {

// The checksum grows with what is given out, and is known at the end of a file alone: whoever uses
// a piece before undoes that where the end is an error. Thread-compatible.
class CheckedReader {
 public:
  struct Source {
    std::string path;
    FileKind kind;
  };

  // Reads as far as the text of the first file goes. Errors: those of CheckedFile::Peek and of
  // DiskReader. REQUIRES a file.
  static Result<std::unique_ptr<CheckedReader>> Open(std::vector<Source> sources,
                                                     const DiskReaderOptions& options);

  const std::string& text() const { return text_; }
  size_t size() const { return header_.data_bytes; }  // bytes behind the text
  // The next of the bytes behind the text; nothing at their end, where the checksum was right.
  // kCorrupt where it was not; else as DiskReader::Next. REQUIRES HasPiece().
  Result<std::optional<DiskReader::Piece>> Next();
  // To the next file, as far as its text goes; false: this was the last one. Errors: those of Open.
  // REQUIRES that Next was at the end, and HasPiece().
  Result<bool> NextFile();
  // Whether there is a buffer for the next one.
  bool HasPiece() const { return rest_ || disk_->HasBuffer(); }
  void GiveBack(int32_t buffer) { disk_->GiveBack(buffer); }  // of a piece, in any order
  const DiskReader& disk() const { return *disk_; }

 private:
  CheckedReader() = default;
  Status ReadText();  // of a file that has just begun

  std::unique_ptr<DiskReader> disk_;
  std::vector<Source> sources_;
  size_t source_ = 0;
  CheckedHeader header_ = {};
  std::string text_;
  Checksum sum_;
  std::optional<DiskReader::Piece> rest_;  // of the piece in which the text ends
};

}  // namespace omnikv
