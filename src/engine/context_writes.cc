// How contexts come from the bank to the files of a store: what the engine's thread copies, and
// what the store's thread writes.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <utility>

#include "base/log.h"
#include "engine/context_file.h"
#include "engine/context_store.h"
#include "engine/stored_names.h"
#include "io/checked_header.h"
#include "io/checksum.h"

namespace omnikv {
namespace {

namespace fs = std::filesystem;

uint64_t SizeOf(const std::string& path) {
  std::error_code error;
  const uint64_t bytes = fs::file_size(path, error);
  return error ? 0 : bytes;
}

Status Gone() {
  return NotFound("the context was deleted before it was written");
}

}  // namespace

ContextStore::~ContextStore() {
  if (!writer_.joinable()) return;
  Flush();
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    changed_.notify_all();
  }
  writer_.join();
}

void ContextStore::Put(int32_t seq, std::vector<int32_t> tokens, int64_t dense_rows,
                       std::string made_by) {
  if (std::ssize(tokens) < options_.least_tokens) return;
  Store(seq, std::move(tokens), dense_rows, std::move(made_by), {});
}

void ContextStore::Store(int32_t seq, std::vector<int32_t> tokens, int64_t dense_rows,
                         std::string made_by, Done done) {
  const Bank& bank = *core_.bank;
  Waiting waiting{.context = {.tokens = std::move(tokens),
                              .dense_rows = dense_rows,
                              .made_by = std::move(made_by)},
                  .image = bank.Image(seq)};
  StoredContext& context = waiting.context;
  const size_t bytes = omnikv::BytesOf(bank.config(), waiting.image,
                                       {.begin = 0, .end = waiting.image.length, .others = true});
  const auto covers = [&](const StoredContext& there) {
    return Covers(there.Rows(), context.Rows());
  };
  std::optional<Result<std::string>> known;
  {
    const std::lock_guard lock(mutex_);
    if (const auto there = std::ranges::find_if(contexts_, covers); there != contexts_.end()) {
      known = there->id();
    } else if (const auto waits = std::ranges::find_if(
                   queue_, [&](const Waiting& w) { return !w.gone && covers(w.context); });
               waits != queue_.end()) {
      if (done) waits->done.push_back(std::move(done));
      return;
    } else if (bytes > options_.bytes) {
      known = ResourceExhausted(fmt::format(
          "the context takes {} bytes, but the store holds {} in all", bytes, options_.bytes));
    }
  }
  if (known) {
    if (done) done(*known);
    return;
  }
  if (done) waiting.done.push_back(std::move(done));
  core_.backend->Synchronize();
  Checksum name;
  name.Add(shape_.root.data(), shape_.root.size());
  name.Add(context.made_by.data(), context.made_by.size());
  name.Add(context.tokens.data(), context.tokens.size() * sizeof(int32_t));
  context.path =
      (fs::path(options_.folder) / fmt::format("{:016x}{}", name.Value(), kContextSuffix)).string();
  waiting.writing =
      std::make_shared<ContextWriting>(bank, seq, options_.writing, [this] { Ready(); });
  const std::lock_guard lock(mutex_);
  queue_.push_back(std::move(waiting));
  changed_.notify_all();
}

void ContextStore::Advance() {
  std::shared_ptr<ContextWriting> writing;
  {
    const std::lock_guard lock(mutex_);
    more_ = false;
    if (!queue_.empty()) writing = queue_.front().writing;
  }
  if (writing != nullptr) writing->Advance();
}

void ContextStore::set_ready(std::function<void()> ready) {
  const std::lock_guard lock(ready_mutex_);
  ready_ = std::move(ready);
}

void ContextStore::Ready() {
  {
    const std::lock_guard lock(mutex_);
    more_ = true;
    changed_.notify_all();
  }
  const std::lock_guard lock(ready_mutex_);
  if (ready_) ready_();
}

ContextStore::Hold ContextStore::HoldOf(int32_t seq) const {
  const std::lock_guard lock(mutex_);
  for (const Waiting& w : queue_) {
    if (w.writing->seq() != seq || w.writing->Copied()) continue;
    return w.done.empty() ? Hold::kGivesWay : Hold::kStays;
  }
  return Hold::kNone;
}

bool ContextStore::Saves() const {
  const std::lock_guard lock(mutex_);
  return std::ranges::any_of(
      queue_, [](const Waiting& w) { return !w.done.empty() && !w.writing->Copied(); });
}

bool ContextStore::Writes() const {
  const std::lock_guard lock(mutex_);
  return !queue_.empty();
}

void ContextStore::GiveUp(int32_t seq) {
  std::vector<Done> calls;
  {
    const std::lock_guard lock(mutex_);
    for (auto w = queue_.begin(); w != queue_.end();) {
      const auto one = w++;
      if (one->writing->seq() != seq || one->writing->Copied()) continue;
      one->gone = true;
      one->writing->GiveUp();
      if (one->begun) continue;  // its thread counts it
      ++stats_.given_up;
      std::ranges::move(one->done, std::back_inserter(calls));
      queue_.erase(one);
    }
    changed_.notify_all();
  }
  for (const Done& done : calls) done(Gone());
}

void ContextStore::Write() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return stop_ || !queue_.empty(); });
    if (queue_.empty()) return;
    // It stays in the queue, where Store finds it, until it is among the contexts.
    Waiting& waiting = queue_.front();
    waiting.begun = true;
    lock.unlock();
    Status written = WriteOne(waiting);
    const bool gave_up = written.code() == StatusCode::kCancelled;
    if (gave_up) written = Gone();
    const Result<std::string> id =
        written.ok() ? Result<std::string>(waiting.context.id()) : written;
    if (written.ok()) Add(waiting.context);
    lock.lock();
    ++(written.ok() ? stats_.written : gave_up ? stats_.given_up : stats_.failed);
    const std::vector<Done> calls = std::move(waiting.done);
    queue_.pop_front();
    lock.unlock();
    for (const Done& done : calls) done(id);
    Ready();
    lock.lock();
  }
}

Status ContextStore::WriteOne(Waiting& waiting) {
  StoredContext& context = waiting.context;
  const BankConfig& bank = core_.bank->config();
  context.segments = SegmentNames(shape_, bank, waiting.image, context.tokens, context.dense_rows,
                                  context.made_by);
  std::vector<size_t> missing;
  {
    const std::lock_guard files(files_mutex_);
    for (size_t s = 0; s < context.segments.size(); ++s) {
      const std::string& name = context.segments[s];
      const bool claimed = segments_.Claim(name);  // a disk may take long: not under mutex_
      const std::lock_guard lock(mutex_);
      if (!segments_.Claimed(name, claimed)) missing.push_back(s);
    }
    const std::lock_guard lock(mutex_);
    segments_.Need(context.segments);
  }
  const std::string text = WithSegments(TextOf({.model = marks_,
                                                .resolved = context.made_by,
                                                .image = waiting.image,
                                                .dense_rows = context.dense_rows}),
                                        {.tokens = shape_.tokens, .names = context.segments});
  const Status written = WriteFiles(waiting, missing, text);
  if (written.ok()) return written;
  {
    const std::lock_guard lock(mutex_);
    segments_.Release(context.segments);
  }
  // Those segments that were written stay where the next context may begin with them.
  if (written.code() == StatusCode::kCancelled) return written;
  LogInfo("a context is not stored: {}", written.message());
  Sweep();
  return written;
}

Status ContextStore::WriteFiles(Waiting& waiting, const std::vector<size_t>& missing,
                                const std::string& text) {
  StoredContext& context = waiting.context;
  const BankConfig& bank = core_.bank->config();
  const auto row_range = [&](size_t segment) {
    const int64_t begin = static_cast<int64_t>(segment) * shape_.tokens;
    const bool own = segment == context.segments.size();
    return RowRange{
        .begin = begin, .end = own ? waiting.image.length : begin + shape_.tokens, .others = own};
  };
  const RowRange rest = row_range(context.segments.size());
  const size_t own_rows = omnikv::BytesOf(bank, waiting.image, rest);
  const size_t rows = missing.size() * shape_.bytes + own_rows;
  const uint64_t bytes = missing.size() * shape_.file_bytes + sizeof(CheckedHeader) + text.size() +
                         context.tokens.size() * sizeof(int32_t) + own_rows;
  if (!MakeRoom(bytes)) {
    return ResourceExhausted(fmt::format(
        "the contexts that are pinned leave no room in the store for one of {} bytes", bytes));
  }
  std::vector<RowRange> ranges;
  for (const size_t segment : missing) ranges.push_back(row_range(segment));
  ranges.push_back(rest);
  waiting.writing->Begin(std::move(ranges), rows);
  for (const size_t segment : missing) {
    const std::string& name = context.segments[segment];
    const std::string path = segments_.PathOf(name);
    OKV_ASSIGN_OR_RETURN(const auto file,
                         CheckedFileWriter::Create(path, kSegmentFile, TextOfSegment(name)));
    OKV_RETURN_IF_ERROR(waiting.writing->Write(*file));
    OKV_RETURN_IF_ERROR(file->Commit());
    const std::lock_guard lock(mutex_);
    segments_.Wrote(name);
    stats_.written_bytes += segments_.BytesOf({&name, 1});
  }
  OKV_ASSIGN_OR_RETURN(const auto file, CheckedFileWriter::Create(context.path, kStoredFile, text));
  file->Write(context.tokens.data(), context.tokens.size() * sizeof(int32_t));
  OKV_RETURN_IF_ERROR(waiting.writing->Write(*file));
  OKV_RETURN_IF_ERROR(file->Commit());
  context.bytes = SizeOf(context.path);
  const std::lock_guard lock(mutex_);
  stats_.written_bytes += context.bytes;
  return {};
}

void ContextStore::Add(StoredContext context) {
  std::vector<std::string> gone;
  {
    const std::lock_guard lock(mutex_);
    for (auto c = contexts_.begin(); c != contexts_.end();) {
      const auto one = c++;
      // What is the beginning of it is there with it.
      if (!Covers(context.Rows(), one->Rows())) continue;
      if (one->path != context.path) {
        if (Pinned(*one)) continue;
        gone.push_back(one->path);
      }
      Erase(one);
    }
    bytes_ += context.bytes;
    contexts_.push_back(std::move(context));
  }
  for (const std::string& path : gone) RemoveContextFile(path);
  if (!gone.empty()) Sweep();
}

void ContextStore::Flush() {
  while (true) {
    Advance();
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return queue_.empty() || more_; });
    if (queue_.empty()) return;
  }
}

void ContextStore::AwaitWritten() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return queue_.empty(); });
}

}  // namespace omnikv
