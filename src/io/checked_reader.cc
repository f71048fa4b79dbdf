#include "io/checked_reader.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace omnikv {

Result<std::unique_ptr<CheckedReader>> CheckedReader::Open(std::vector<Source> sources,
                                                           const DiskReaderOptions& options) {
  std::vector<std::string> paths;
  for (const Source& source : sources) paths.push_back(source.path);
  std::unique_ptr<CheckedReader> file(new CheckedReader);
  file->sources_ = std::move(sources);
  OKV_ASSIGN_OR_RETURN(file->disk_, DiskReader::Open(std::move(paths), options));
  OKV_RETURN_IF_ERROR(file->ReadText());
  return file;
}

Status CheckedReader::ReadText() {
  const Source& source = sources_[source_];
  header_ = {};
  text_.clear();
  sum_ = Checksum();
  OKV_ASSIGN_OR_RETURN(auto piece, disk_->Next());
  std::span<const std::byte> bytes;
  if (piece) bytes = piece->bytes;
  const size_t there = std::min(bytes.size(), sizeof(header_));
  if (there > 0) std::memcpy(&header_, bytes.data(), there);
  OKV_RETURN_IF_ERROR(CheckHeader(source.path, disk_->size(), source.kind, header_));
  bytes = bytes.subspan(there);
  const size_t text_bytes = header_.text_bytes;
  while (true) {
    const size_t n = std::min(bytes.size(), text_bytes - text_.size());
    text_.append(reinterpret_cast<const char*>(bytes.data()), n);
    bytes = bytes.subspan(n);
    if (text_.size() == text_bytes) break;
    disk_->GiveBack(piece->buffer);
    OKV_ASSIGN_OR_RETURN(piece, disk_->Next());
    bytes = piece->bytes;  // the file is as long as its header says
  }
  sum_.Add(text_.data(), text_.size());
  rest_ = {.bytes = bytes, .buffer = piece->buffer};
  return {};
}

Result<bool> CheckedReader::NextFile() {
  OKV_ASSIGN_OR_RETURN(const bool more, disk_->NextFile());
  if (!more) return false;
  ++source_;
  OKV_RETURN_IF_ERROR(ReadText());
  return true;
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
