#include "engine/context_reading.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "engine/context_file.h"

namespace omnikv {

ContextReading::ContextReading(EngineCore& core, std::string path, FileKind kind,
                               const DiskReaderOptions& options, std::function<void()> ready)
    : core_(core),
      path_(std::move(path)),
      kind_(kind),
      options_(options),
      ready_(std::move(ready)),
      thread_([this] {
        Status end = Read();
        {
          const std::lock_guard lock(mutex_);
          end_ = std::move(end);
        }
        ready_();
      }) {}

ContextReading::~ContextReading() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    changed_.notify_all();
  }
  thread_.join();
  if (seq_ >= 0) core_.bank->Free(seq_);
}

Status ContextReading::Read() {
  OKV_ASSIGN_OR_RETURN(file_, CheckedReader::Open(path_, kind_, options_));
  const Result<SavedContext> saved = ParseSavedContext(file_->text());
  if (!saved.ok()) return saved.status().Prefixed(path_);
  const Status fits = CheckImage(core_.bank->config(), saved->image);
  if (!fits.ok()) return fits.Prefixed(path_);
  size_t tokens = static_cast<size_t>(saved->image.length) * sizeof(int32_t);  // bytes
  if (tokens > file_->size()) {
    return Corrupt(fmt::format("{}: ends inside its tokens", path_));
  }
  {
    const std::lock_guard lock(mutex_);
    image_ = saved->image;
    row_bytes_ = file_->size() - tokens;
  }
  ready_();
  while (true) {
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return stop_ || !given_back_.empty() || file_->HasPiece(); });
      if (stop_) return Failed(fmt::format("{}: is not wanted any more", path_));
      for (const int32_t buffer : given_back_) file_->GiveBack(buffer);
      given_back_.clear();
    }
    OKV_ASSIGN_OR_RETURN(auto piece, file_->Next());
    if (!piece) return {};
    const size_t skipped = std::min(tokens, piece->bytes.size());
    tokens -= skipped;
    piece->bytes = piece->bytes.subspan(skipped);
    if (piece->bytes.empty()) {
      file_->GiveBack(piece->buffer);
      continue;
    }
    {
      const std::lock_guard lock(mutex_);
      pieces_.push_back(*piece);
    }
    ready_();
  }
}

bool ContextReading::AwaitsRoom() const {
  const std::lock_guard lock(mutex_);
  return image_ && !rows_;
}

Status ContextReading::Place() {
  SequenceImage image;
  size_t bytes = 0;
  {
    const std::lock_guard lock(mutex_);
    image = *image_;
    bytes = row_bytes_;
  }
  OKV_ASSIGN_OR_RETURN(seq_, core_.bank->NewSequence());
  auto rows = core_.bank->BeginImport(seq_, image, {}, bytes);
  if (rows.ok()) {
    rows_ = std::move(*rows);
    return {};
  }
  core_.bank->Free(std::exchange(seq_, -1));
  return rows.status().Prefixed(path_);
}

Result<bool> ContextReading::Advance() {
  if (AwaitsRoom()) OKV_RETURN_IF_ERROR(Place());
  std::vector<DiskReader::Piece> pieces;
  std::optional<Status> end;
  {
    const std::lock_guard lock(mutex_);
    if (rows_) pieces.swap(pieces_);
    end = end_;
  }
  for (const DiskReader::Piece& piece : pieces) rows_->Take(piece.bytes);
  {
    const std::lock_guard lock(mutex_);
    for (const DiskReader::Piece& piece : pieces) given_back_.push_back(piece.buffer);
    changed_.notify_all();
  }
  if (end) OKV_RETURN_IF_ERROR(*end);
  // Of rows that came behind the look above, the next call has the rest.
  return end && rows_ && rows_->left() == 0;
}

}  // namespace omnikv
