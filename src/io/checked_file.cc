#include "io/checked_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <random>
#include <system_error>
#include <utility>
#include <vector>

#include "base/printable.h"
#include "io/checked_header.h"
#include "io/checksum.h"

namespace omnikv {
namespace {

namespace fs = std::filesystem;

constexpr size_t kPiece = size_t{4} << 20;  // bytes that are read at once

}  // namespace

struct CheckedFileWriter::State {
  std::string path;    // as given
  std::string target;  // what Commit replaces: where links lead
  std::string beside;
  int fd = -1;
  int error = 0;  // errno of the first failure
  CheckedHeader header = {};
  Checksum sum;

  ~State() {
    if (fd < 0) return;
    ::close(fd);
    ::unlink(beside.c_str());
  }
  void Put(const void* data, size_t bytes) {
    for (const auto* at = static_cast<const char*>(data); bytes > 0 && error == 0;) {
      const ssize_t n = ::write(fd, at, bytes);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) {
        error = errno;
        return;
      }
      at += n;
      bytes -= static_cast<size_t>(n);
    }
  }
};

CheckedFileWriter::CheckedFileWriter(std::unique_ptr<State> state) : state_(std::move(state)) {}
CheckedFileWriter::~CheckedFileWriter() = default;

Result<std::unique_ptr<CheckedFileWriter>> CheckedFileWriter::Create(const std::string& path,
                                                                     FileKind kind,
                                                                     std::string_view text) {
  const auto refuse = [&](const std::string& why) {
    return NotFound(fmt::format("{}: {} cannot be written there ({})", path, kind.name, why));
  };
  if (text.size() > CheckedFile::kMaxText) return refuse("its description is too long");
  auto state = std::make_unique<State>();
  state->path = path;
  std::error_code error;
  const fs::file_type type = fs::status(path, error).type();
  if (type != fs::file_type::regular && type != fs::file_type::not_found) {
    return refuse("there is something that is no file");
  }
  state->target = fs::weakly_canonical(path, error);
  if (error || state->target.empty()) return refuse(error ? error.message() : "no name");
  std::random_device random;
  const fs::path target = state->target;
  state->beside = target.parent_path() / fmt::format(".{:08x}{:08x}.saving", random(), random());
  state->fd = ::open(state->beside.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (state->fd < 0) return refuse(ErrorText(errno));
  std::memcpy(state->header.magic, kind.magic, sizeof(state->header.magic));
  state->header.version = kind.version;
  state->header.text_bytes = static_cast<uint32_t>(text.size());
  state->Put(&state->header, sizeof(CheckedHeader));  // the place for it
  state->Put(text.data(), text.size());
  state->sum.Add(text.data(), text.size());
  return std::unique_ptr<CheckedFileWriter>(new CheckedFileWriter(std::move(state)));
}

void CheckedFileWriter::Write(const void* data, size_t bytes) {
  state_->Put(data, bytes);
  state_->sum.Add(data, bytes);
  state_->header.data_bytes += bytes;
}

Status CheckedFileWriter::Commit() {
  State& s = *state_;
  s.sum.Add(&s.header, CheckedHeader::kSummed);
  s.header.checksum = s.sum.Value();
  if (s.error == 0 && ::lseek(s.fd, 0, SEEK_SET) != 0) s.error = errno;
  s.Put(&s.header, sizeof(CheckedHeader));
  // Before the name: a power cut leaves the old file or the new one.
  if (s.error == 0 && ::fsync(s.fd) != 0) s.error = errno;
  if (s.error == 0 && ::rename(s.beside.c_str(), s.target.c_str()) != 0) s.error = errno;
  if (s.error != 0) {
    return Failed(fmt::format("{}: writing to it failed ({})", s.path, ErrorText(s.error)));
  }
  ::close(std::exchange(s.fd, -1));
  return {};
}

Status CheckHeader(const std::string& path, size_t size, FileKind kind,
                   const CheckedHeader& header) {
  const auto corrupt = [&](const std::string& why) {
    return Corrupt(fmt::format("{}: {}", path, why));
  };
  if (size < sizeof(header.magic) ||
      std::memcmp(header.magic, kind.magic, sizeof(header.magic)) != 0) {
    return corrupt(fmt::format("is not {}", kind.name));
  }
  if (size < sizeof(header)) return corrupt("ends inside its header");
  if (header.version != kind.version) {
    return Unsupported(fmt::format("{}: is {} of version {}, expected {}", path, kind.name,
                                   header.version, kind.version));
  }
  const size_t behind = size - sizeof(header);
  if (header.text_bytes > CheckedFile::kMaxText || header.text_bytes > behind ||
      header.data_bytes != behind - header.text_bytes) {
    return corrupt(fmt::format("has {} bytes, but its header tells of {} and {} behind it", size,
                               header.text_bytes, header.data_bytes));
  }
  return {};
}

Status Damaged(const std::string& path) {
  return Corrupt(fmt::format("{}: is damaged: its checksum is not that of what it holds", path));
}

Result<CheckedFile> CheckedFile::Open(InputFile file, FileKind kind) {
  OKV_ASSIGN_OR_RETURN(CheckedFile checked, Peek(std::move(file), kind));
  OKV_RETURN_IF_ERROR(checked.CheckSum());
  return checked;
}

Result<CheckedFile> CheckedFile::Peek(InputFile file, FileKind kind) {
  CheckedHeader header;
  const size_t there = std::min(file.size(), sizeof(header));
  OKV_RETURN_IF_ERROR(file.Read(0, there, &header));
  OKV_RETURN_IF_ERROR(CheckHeader(file.path(), file.size(), kind, header));
  CheckedFile checked;
  checked.text_.resize(header.text_bytes);
  OKV_RETURN_IF_ERROR(file.Read(sizeof(header), header.text_bytes, checked.text_.data()));
  checked.begin_ = sizeof(header) + header.text_bytes;
  checked.size_ = header.data_bytes;
  checked.summed_.assign(reinterpret_cast<const char*>(&header), CheckedHeader::kSummed);
  checked.checksum_ = header.checksum;
  checked.file_ = std::move(file);
  return checked;
}

Status CheckedFile::CheckSum() const {
  Checksum sum;
  sum.Add(text_.data(), text_.size());
  std::vector<char> piece(std::min(kPiece, size_));
  for (size_t at = 0; at < size_; at += piece.size()) {
    const size_t n = std::min(piece.size(), size_ - at);
    OKV_RETURN_IF_ERROR(Read(at, n, piece.data()));
    sum.Add(piece.data(), n);
  }
  sum.Add(summed_.data(), summed_.size());
  if (sum.Value() == checksum_) return {};
  return Damaged(path());
}

}  // namespace omnikv
