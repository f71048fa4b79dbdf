#include "engine/context_reading.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "engine/context_file.h"
#include "engine/context_segments.h"

namespace omnikv {

ContextReading::ContextReading(EngineCore& core, ContextFiles files,
                               const DiskReaderOptions& options, std::function<void()> ready)
    : core_(core),
      files_(std::move(files)),
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

RowRange ContextReading::RowsOf(size_t file) const {
  const int64_t begin = static_cast<int64_t>(file) * files_.segment_tokens;
  if (file < files_.segments.size()) return {.begin = begin, .end = begin + files_.segment_tokens};
  return {.begin = begin, .end = image_->length, .others = true};
}

Status ContextReading::Read() {
  const BankConfig& bank = core_.bank->config();
  const int64_t in_segments = std::ssize(files_.segments) * files_.segment_tokens;
  SequenceImage image = WholeImage(bank, in_segments);
  std::vector<CheckedReader::Source> sources;
  for (const ContextFiles::Segment& s : files_.segments) sources.push_back({s.path, kSegmentFile});
  if (HasOwn()) {
    const std::string& path = files_.own.path;
    OKV_ASSIGN_OR_RETURN(InputFile input, InputFile::Open(path));
    OKV_ASSIGN_OR_RETURN(const CheckedFile own,
                         CheckedFile::Peek(std::move(input), files_.own.kind));
    const Result<SavedContext> saved = ParseSavedContext(own.text());
    if (!saved.ok()) return saved.status().Prefixed(path);
    image = saved->image;
    const Status fits = CheckImage(bank, image);
    if (!fits.ok()) return fits.Prefixed(path);
    if (in_segments > 0 && (image.length < in_segments || !IsWhole(bank, image))) {
      return Corrupt(
          fmt::format("{}: has no rows of all {} tokens of its segments", path, in_segments));
    }
    own_text_ = own.text();
    sources.push_back(files_.own);
  } else {
    OKV_RETURN_IF_ERROR(CheckImage(bank, image));
  }
  {
    const std::lock_guard lock(mutex_);
    image_ = std::move(image);
  }
  ready_();
  OKV_ASSIGN_OR_RETURN(reader_, CheckedReader::Open(std::move(sources), options_));
  for (size_t file = 0;; ++file) {
    OKV_RETURN_IF_ERROR(ReadFile(file));
    {
      std::unique_lock lock(mutex_);
      ++whole_;
      bytes_ += reader_->disk().size();
      changed_.wait(lock, [&] { return stop_ || !given_back_.empty() || reader_->HasPiece(); });
      for (const int32_t buffer : given_back_) reader_->GiveBack(buffer);
      given_back_.clear();
      if (stop_) return Failed("it is not wanted any more");
    }
    OKV_ASSIGN_OR_RETURN(const bool more, reader_->NextFile());
    if (!more) return {};
  }
}

Status ContextReading::CheckText(size_t file) const {
  const std::string& path = reader_->disk().path();
  if (file == files_.segments.size()) {
    if (reader_->text() == own_text_) return {};
    return Corrupt(fmt::format("{}: was written over while it was read", path));
  }
  if (reader_->text() == TextOfSegment(files_.segments[file].name)) return {};
  return Corrupt(fmt::format("{}: is another segment than its name says", path));
}

Status ContextReading::ReadFile(size_t file) {
  OKV_RETURN_IF_ERROR(CheckText(file));
  // Nothing but this thread changes the image, and it does no more.
  const bool is_own = file == files_.segments.size();
  size_t tokens = is_own ? static_cast<size_t>(image_->length) * sizeof(int32_t) : 0;  // bytes
  const size_t expected = tokens + BytesOf(core_.bank->config(), *image_, RowsOf(file));
  if (reader_->size() != expected) {
    return Corrupt(fmt::format("{}: its tokens and K/V take {} bytes, expected {}",
                               reader_->disk().path(), reader_->size(), expected));
  }
  while (true) {
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return stop_ || !given_back_.empty() || reader_->HasPiece(); });
      if (stop_) return Failed("it is not wanted any more");
      for (const int32_t buffer : given_back_) reader_->GiveBack(buffer);
      given_back_.clear();
    }
    OKV_ASSIGN_OR_RETURN(auto piece, reader_->Next());
    if (!piece) return {};
    const size_t skipped = std::min(tokens, piece->bytes.size());
    tokens -= skipped;
    piece->bytes = piece->bytes.subspan(skipped);
    if (piece->bytes.empty()) {
      reader_->GiveBack(piece->buffer);
      continue;
    }
    {
      const std::lock_guard lock(mutex_);
      pieces_.push_back({*piece, file});
    }
    ready_();
  }
}

bool ContextReading::AwaitsRoom() const {
  const std::lock_guard lock(mutex_);
  return image_ && seq_ < 0;
}

size_t ContextReading::failed() const {
  const std::lock_guard lock(mutex_);
  // Without a reader the file of the context itself was not what it should be.
  return image_ ? whole_ : files_.segments.size();
}

Status ContextReading::Place() {
  SequenceImage image;
  {
    const std::lock_guard lock(mutex_);
    image = *image_;
  }
  OKV_ASSIGN_OR_RETURN(seq_, core_.bank->NewSequence());
  const Status placed = core_.bank->Place(seq_, image);
  if (!placed.ok()) {
    core_.bank->Free(std::exchange(seq_, -1));
    return placed;
  }
  length_ = image.length;
  const size_t files = files_.segments.size() + (HasOwn() ? 1 : 0);
  for (size_t file = 0; file < files; ++file) {
    rows_.push_back(core_.bank->BeginImport(seq_, RowsOf(file)));
  }
  return {};
}

bool ContextReading::Cut(const Status& end) {
  const std::lock_guard lock(mutex_);
  const bool damaged = end.code() == StatusCode::kCorrupt || end.code() == StatusCode::kNotFound;
  if (!damaged || !files_.can_be_cut || seq_ < 0 || whole_ == 0) return false;
  length_ = static_cast<int64_t>(whole_) * files_.segment_tokens;
  core_.bank->Truncate(seq_, length_);
  return true;
}

Result<bool> ContextReading::Advance() {
  if (AwaitsRoom()) OKV_RETURN_IF_ERROR(Place());
  std::vector<Piece> pieces;
  std::optional<Status> end;
  {
    const std::lock_guard lock(mutex_);
    if (seq_ >= 0) pieces.swap(pieces_);
    end = end_;
  }
  for (const Piece& piece : pieces) rows_[piece.file].Take(piece.read.bytes);
  {
    const std::lock_guard lock(mutex_);
    for (const Piece& piece : pieces) given_back_.push_back(piece.read.buffer);
    changed_.notify_all();
  }
  if (!end) return false;
  if (!end->ok()) {
    damage_ = *end;
    if (!Cut(*end)) return *end;
  }
  // Of rows that came behind the look above, the next call has the rest.
  const auto there = static_cast<size_t>(damage_.ok() ? rows_.size() : whole_);
  return seq_ >= 0 && std::all_of(rows_.begin(), rows_.begin() + static_cast<ptrdiff_t>(there),
                                  [](const IncomingRows& rows) { return rows.left() == 0; });
}

}  // namespace omnikv
