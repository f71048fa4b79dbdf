#include "io/checked_reader.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace omnikv {

Result<std::unique_ptr<CheckedReader>> CheckedReader::Open(const std::string& path, FileKind kind,
                                                           const DiskReaderOptions& options) {
  std::unique_ptr<CheckedReader> file(new CheckedReader);
  OKV_ASSIGN_OR_RETURN(file->disk_, DiskReader::Open(path, options));
  OKV_ASSIGN_OR_RETURN(auto piece, file->disk_->Next());
  std::span<const std::byte> bytes;
  if (piece) bytes = piece->bytes;
  const size_t there = std::min(bytes.size(), sizeof(file->header_));
  if (there > 0) std::memcpy(&file->header_, bytes.data(), there);
  OKV_RETURN_IF_ERROR(CheckHeader(path, file->disk_->size(), kind, file->header_));
  bytes = bytes.subspan(there);
  const size_t text_bytes = file->header_.text_bytes;
  while (true) {
    const size_t n = std::min(bytes.size(), text_bytes - file->text_.size());
    file->text_.append(reinterpret_cast<const char*>(bytes.data()), n);
    bytes = bytes.subspan(n);
    if (file->text_.size() == text_bytes) break;
    file->disk_->GiveBack(piece->buffer);
    OKV_ASSIGN_OR_RETURN(piece, file->disk_->Next());
    bytes = piece->bytes;  // the file is as long as its header says
  }
  file->sum_.Add(file->text_.data(), file->text_.size());
  file->rest_ = {.bytes = bytes, .buffer = piece->buffer};
  return file;
}

Result<std::optional<DiskReader::Piece>> CheckedReader::Next() {
  std::optional<DiskReader::Piece> piece = std::exchange(rest_, std::nullopt);
  if (!piece) {
    OKV_ASSIGN_OR_RETURN(piece, disk_->Next());
  } else if (piece->bytes.empty()) {
    disk_->GiveBack(piece->buffer);
    OKV_ASSIGN_OR_RETURN(piece, disk_->Next());
  }
  if (piece) {
    sum_.Add(piece->bytes.data(), piece->bytes.size());
    return piece;
  }
  sum_.Add(&header_, CheckedHeader::kSummed);
  if (sum_.Value() != header_.checksum) return Damaged(disk_->path());
  return piece;
}

}  // namespace omnikv
