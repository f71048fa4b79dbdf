#include "io/scratch.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "base/printable.h"
#include "io/nameless_file.h"

namespace omnikv {
Result<Scratch> Scratch::Create(const std::string& folder) {
  Scratch scratch;
  if (folder.empty()) return scratch;
  scratch.folder_ = folder;
  const auto file = OpenNameless(folder);
  if (!file.ok()) return Failed(file.status().message());
  scratch.file_ = *file;
  return scratch;
}

Scratch::~Scratch() {
  if (file_ >= 0) close(file_);
}

Scratch::Scratch(Scratch&& other) noexcept
    : folder_(std::move(other.folder_)),
      file_(std::exchange(other.file_, -1)),
      memory_(std::move(other.memory_)),
      size_(std::exchange(other.size_, 0)),
      status_(std::move(other.status_)) {}

Scratch& Scratch::operator=(Scratch&& other) noexcept {
  std::swap(folder_, other.folder_);
  std::swap(file_, other.file_);
  std::swap(memory_, other.memory_);
  std::swap(size_, other.size_);
  std::swap(status_, other.status_);
  return *this;
}

void Scratch::Append(const void* data, size_t bytes) {
  if (!status_.ok()) return;
  const auto* from = static_cast<const std::byte*>(data);
  if (file_ < 0) {
    memory_.insert(memory_.end(), from, from + bytes);
    size_ += bytes;
    return;
  }
  while (bytes > 0) {
    const ssize_t n = pwrite(file_, from, bytes, static_cast<off_t>(size_));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      status_ = Failed(fmt::format("{}: bytes cannot be put away there ({})", folder_,
                                   ErrorText(n < 0 ? errno : ENOSPC)));
      return;
    }
    from += n;
    bytes -= static_cast<size_t>(n);
    size_ += static_cast<size_t>(n);
  }
}

Status Scratch::Read(size_t offset, size_t bytes, void* to) const {
  OKV_CHECK(offset <= size_ && bytes <= size_ - offset, "{} + {} of {} bytes", offset, bytes,
            size_);
  if (bytes == 0) return {};
  if (file_ < 0) {
    std::memcpy(to, memory_.data() + offset, bytes);
    return {};
  }
  auto* at = static_cast<std::byte*>(to);
  while (bytes > 0) {
    const ssize_t n = pread(file_, at, bytes, static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      return Failed(fmt::format("{}: bytes that were put away cannot be read ({})", folder_,
                                n < 0 ? ErrorText(errno) : "the file ends too early"));
    }
    at += n;
    offset += static_cast<size_t>(n);
    bytes -= static_cast<size_t>(n);
  }
  return {};
}

}  // namespace omnikv
