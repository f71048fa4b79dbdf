#include "engine/context_writing.h"

#include <algorithm>
#include <utility>

namespace omnikv {

ContextWriting::ContextWriting(const Bank& bank, int32_t seq, const WritingOptions& options,
                               std::function<void()> ready)
    : bank_(bank), seq_(seq), options_(options), ready_(std::move(ready)) {}

void ContextWriting::Begin(std::vector<RowRange> ranges, size_t bytes) {
  // No more than there is to be written.
  const size_t n = std::min(static_cast<size_t>(options_.pieces), bytes / options_.piece + 1);
  const size_t piece = std::min(options_.piece, std::max(bytes, size_t{1}));
  std::vector<std::vector<std::byte>> buffers(n, std::vector<std::byte>(piece));
  {
    const std::lock_guard lock(mutex_);
    ranges_ = std::move(ranges);
    buffers_ = std::move(buffers);
    for (size_t buffer = n; buffer-- > 0;) free_.push_back(static_cast<int32_t>(buffer));
    begun_ = true;
    copied_ = ranges_.empty();
  }
  ready_();
}

void ContextWriting::Advance() {
  // Not for as long as the writer gives buffers back: steps wait.
  for (int32_t copies = 0; copies < options_.pieces; ++copies) {
    Piece piece;
    {
      const std::lock_guard lock(mutex_);
      if (!begun_ || copied_ || given_up_) return;
      if (!rows_) rows_ = bank_.BeginExport(seq_, ranges_[range_]);
      if (rows_->left() > 0) {
        if (free_.empty()) return;
        piece.buffer = free_.back();
        free_.pop_back();
      }
    }
    if (piece.buffer >= 0) {
      piece.bytes = rows_->Copy(buffers_[static_cast<size_t>(piece.buffer)]);
    }
    piece.last = rows_->left() == 0;
    if (piece.last) {
      rows_.reset();
      ++range_;
    }
    const std::lock_guard lock(mutex_);
    pieces_.push_back(piece);
    copied_ = range_ == ranges_.size();
    changed_.notify_all();
  }
}

bool ContextWriting::Copied() const {
  const std::lock_guard lock(mutex_);
  return copied_ || given_up_;
}

void ContextWriting::GiveUp() {
  const std::lock_guard lock(mutex_);
  if (copied_) return;
  given_up_ = true;
  changed_.notify_all();
}

Status ContextWriting::Write(CheckedFileWriter& file) {
  while (true) {
    Piece piece;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return given_up_ || !pieces_.empty(); });
      if (given_up_) return Cancelled("its rows are gone");
      piece = pieces_.front();
      pieces_.pop_front();
    }
    if (piece.buffer >= 0) {
      file.Write(buffers_[static_cast<size_t>(piece.buffer)].data(), piece.bytes);
      {
        const std::lock_guard lock(mutex_);
        free_.push_back(piece.buffer);
      }
      ready_();
    }
    if (piece.last) return {};
  }
}

}  // namespace omnikv
