#include "engine/context_store.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <utility>

#include "base/log.h"
#include "base/memory.h"
#include "base/printable.h"
#include "engine/context_file.h"
#include "io/checksum.h"

namespace omnikv {
namespace {

namespace fs = std::filesystem;

constexpr FileKind kStoredFile = {.magic = "omnikvst", .version = 1, .name = "a stored context"};
constexpr const char* kSuffix = ".ctx";
constexpr const char* kPin = ".pin";

fs::path PinOf(const fs::path& path) {
  return fs::path(path).replace_extension(kPin);
}

// Of a context, and that it was pinned.
void RemoveFile(const fs::path& path) {
  std::error_code error;
  fs::remove(path, error);
  fs::remove(PinOf(path), error);
}

// What a context is worth: to compute it takes a time that grows with the square of its tokens, and
// its file grows with them; so a byte is worth a token's number, less the longer it is not used.
double Worth(const fs::path& path, int64_t tokens) {
  std::error_code error;
  const fs::file_time_type used = fs::last_write_time(path, error);
  const double age =
      error ? 1e9 : std::chrono::duration<double>(fs::file_time_type::clock::now() - used).count();
  return static_cast<double>(tokens) / (60 + std::max(0.0, age));
}

}  // namespace

std::string StoredContext::id() const {
  return fs::path(path).stem().string();
}

ContextStore::ContextStore(EngineCore& core, ContextStoreOptions options)
    : core_(core), options_(std::move(options)), marks_(ModelMarks(core)) {}

Result<std::unique_ptr<ContextStore>> ContextStore::Open(EngineCore& core,
                                                         ContextStoreOptions options) {
  std::error_code error;
  fs::create_directories(options.folder, error);
  if (error || !fs::is_directory(options.folder, error)) {
    return InvalidArgument(fmt::format("`store` is '{}', which cannot be made a folder ({})",
                                       options.folder,
                                       error ? error.message() : "something else is there"));
  }
  fs::permissions(options.folder, fs::perms::owner_all, fs::perm_options::replace, error);
  std::unique_ptr<ContextStore> store(new ContextStore(core, std::move(options)));
  OKV_RETURN_IF_ERROR(store->ReadFolder());
  store->writer_ = std::thread([raw = store.get()] { raw->Write(); });
  return store;
}

ContextStore::~ContextStore() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    changed_.notify_all();
  }
  if (writer_.joinable()) writer_.join();
}

Status ContextStore::ReadFolder() {
  std::error_code error;
  fs::directory_iterator files(options_.folder, error);
  if (error) {
    return InvalidArgument(fmt::format("`store` is '{}', which cannot be read ({})",
                                       options_.folder, error.message()));
  }
  std::vector<fs::path> pins;
  for (const fs::directory_entry& file : files) {
    if (file.path().extension() == kPin) pins.push_back(file.path());
    if (file.path().extension() != kSuffix) continue;
    auto found = Peek(file.path().string());
    if (found.ok() && *found) {
      stats_.bytes += (**found).bytes;
      contexts_.push_back(std::move(**found));
    } else if (found.status().code() == StatusCode::kCorrupt) {
      LogInfo("{}: it is deleted", found.status().message());
      ++stats_.failed;
      RemoveFile(file.path());
    }
  }
  for (const fs::path& pin : pins) {  // of a file that went without it
    if (!fs::exists(fs::path(pin).replace_extension(kSuffix), error)) fs::remove(pin, error);
  }
  MakeRoom(0);
  return {};
}

Result<std::optional<StoredContext>> ContextStore::Peek(const std::string& path) const {
  OKV_ASSIGN_OR_RETURN(InputFile input, InputFile::Open(path));
  StoredContext context{.path = path, .bytes = input.size()};
  OKV_ASSIGN_OR_RETURN(const CheckedFile file, CheckedFile::Peek(std::move(input), kStoredFile));
  const Result<SavedContext> saved = ParseSavedContext(file.text());
  if (!saved.ok()) return saved.status().Prefixed(path);
  if (!CheckModelMarks(marks_, saved->model).ok() ||
      !CheckImage(core_.bank->config(), saved->image).ok()) {
    return std::optional<StoredContext>();
  }
  OKV_ASSIGN_OR_RETURN(context.tokens, TokensOf(file, *saved));
  context.dense_rows = saved->dense_rows;
  context.made_by = saved->resolved;
  return std::optional<StoredContext>(std::move(context));
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
                              .made_by = std::move(made_by)}};
  StoredContext& context = waiting.context;
  const size_t bytes =
      Bank::BytesPerToken(bank.config()) * context.tokens.size();  // about, windows apart
  const auto covers = [&](const StoredContext& there) {
    return Covers(there.Rows(), context.Rows());
  };
  std::optional<Result<std::string>> known;
  {
    const std::lock_guard lock(mutex_);
    if (const auto there = std::find_if(contexts_.begin(), contexts_.end(), covers);
        there != contexts_.end()) {
      known = there->id();
    } else if (const auto waits = std::find_if(queue_.begin(), queue_.end(),
                                               [&](const Waiting& w) { return covers(w.context); });
               waits != queue_.end()) {
      if (done) waits->done.push_back(std::move(done));
      return;
    } else if (bytes > options_.bytes) {
      known = ResourceExhausted(fmt::format(
          "the context takes some {} bytes, but the store holds {} in all", bytes, options_.bytes));
    } else if (queued_ + bytes > options_.queue_bytes &&
               (queued_ > 0 || bytes > AvailableMemory() / 2)) {
      known = ResourceExhausted(
          fmt::format("a context of {} bytes waits for memory to be written from, and {} bytes of "
                      "others wait already",
                      bytes, queued_));
    }
  }
  if (known) {
    if (done) done(*known);
    return;
  }
  if (done) waiting.done.push_back(std::move(done));
  core_.backend->Synchronize();
  SavedContext saved{.model = marks_,
                     .resolved = context.made_by,
                     .image = bank.Image(seq),
                     .dense_rows = dense_rows};
  waiting.text = TextOf(saved);
  Checksum name;
  const std::string model = marks_.dump();
  name.Add(model.data(), model.size());
  name.Add(context.made_by.data(), context.made_by.size());
  name.Add(context.tokens.data(), context.tokens.size() * sizeof(int32_t));
  context.path =
      (fs::path(options_.folder) / fmt::format("{:016x}{}", name.Value(), kSuffix)).string();
  waiting.rows.reserve(bytes);
  bank.Export(seq, {}, [&](const void* data, size_t n) {
    const auto* from = static_cast<const std::byte*>(data);
    waiting.rows.insert(waiting.rows.end(), from, from + n);
  });
  const std::lock_guard lock(mutex_);
  queued_ += waiting.rows.size();
  queue_.push_back(std::move(waiting));
  changed_.notify_all();
}

void ContextStore::Write() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return stop_ || !queue_.empty(); });
    if (queue_.empty()) return;
    // It stays in the queue, where Put finds it, until it is among the contexts.
    Waiting& waiting = queue_.front();
    const bool fits = MakeRoom(waiting.rows.size());
    lock.unlock();
    const Status written = fits ? WriteOne(waiting)
                                : ResourceExhausted(fmt::format(
                                      "the contexts that are pinned leave no room in the store for "
                                      "one of {} bytes",
                                      waiting.rows.size()));
    lock.lock();
    queued_ -= waiting.rows.size();
    const Result<std::string> id =
        written.ok() ? Result<std::string>(waiting.context.id()) : written;
    if (written.ok()) {
      // What is the beginning of it is there with it.
      for (auto c = contexts_.begin(); c != contexts_.end();) {
        const auto one = c++;
        if (!Covers(waiting.context.Rows(), one->Rows())) continue;
        if (one->path != waiting.context.path) {
          if (Pinned(*one)) continue;
          RemoveFile(one->path);
        }
        stats_.bytes -= one->bytes;
        contexts_.erase(one);
      }
      stats_.bytes += waiting.context.bytes;
      ++stats_.written;
      contexts_.push_back(std::move(waiting.context));
    } else {
      ++stats_.failed;
    }
    const std::vector<Done> calls = std::move(waiting.done);
    queue_.pop_front();
    changed_.notify_all();
    lock.unlock();
    for (const Done& done : calls) done(id);
    lock.lock();
  }
}

Status ContextStore::WriteOne(Waiting& waiting) {
  StoredContext& context = waiting.context;
  const Status written = [&]() -> Status {
    OKV_ASSIGN_OR_RETURN(const auto file,
                         CheckedFileWriter::Create(context.path, kStoredFile, waiting.text));
    file->Write(context.tokens.data(), context.tokens.size() * sizeof(int32_t));
    file->Write(waiting.rows.data(), waiting.rows.size());
    return file->Commit();
  }();
  if (!written.ok()) {
    LogInfo("a context is not stored: {}", written.message());
    return written;
  }
  std::error_code error;
  context.bytes = fs::file_size(context.path, error);
  return {};
}

bool ContextStore::MakeRoom(uint64_t bytes) {
  while (stats_.bytes + bytes > options_.bytes) {
    auto least = contexts_.end();
    double worth = 0;
    for (auto c = contexts_.begin(); c != contexts_.end(); ++c) {
      if (Pinned(*c)) continue;
      const double of = Worth(c->path, std::ssize(c->tokens));
      if (least != contexts_.end() && worth <= of) continue;
      least = c;
      worth = of;
    }
    if (least == contexts_.end()) return false;
    RemoveFile(least->path);
    stats_.bytes -= least->bytes;
    ++stats_.dropped;
    contexts_.erase(least);
  }
  return true;
}

std::optional<StoredContext> ContextStore::Find(std::string_view id) const {
  const std::lock_guard lock(mutex_);
  for (const StoredContext& c : contexts_) {
    if (c.id() == id) return c;
  }
  return {};
}

bool ContextStore::Pinned(const StoredContext& context) const {
  std::error_code error;
  return fs::exists(PinOf(context.path), error);
}

Status ContextStore::Pin(std::string_view id, bool pinned) {
  const auto context = Find(id);
  if (!context) return NotFound(fmt::format("the store has no context {}", Printable(id)));
  const fs::path pin = PinOf(context->path);
  std::error_code error;
  if (pinned) {
    const bool made = std::ofstream(pin).good();
    fs::permissions(pin, fs::perms::owner_read | fs::perms::owner_write, error);
    if (!made || error) return Failed(fmt::format("{}: cannot be written", pin.string()));
    return {};
  }
  fs::remove(pin, error);
  if (error)
    return Failed(fmt::format("{}: cannot be removed ({})", pin.string(), error.message()));
  return {};
}

Status ContextStore::Delete(std::string_view id) {
  const auto context = Find(id);
  if (!context) return NotFound(fmt::format("the store has no context {}", Printable(id)));
  Forget(context->path);
  RemoveFile(context->path);
  std::error_code error;
  if (!fs::exists(context->path, error)) return {};
  return Failed(fmt::format("{}: cannot be removed", context->path));
}

void ContextStore::Forget(const std::string& path) {
  const std::lock_guard lock(mutex_);
  std::erase_if(contexts_, [&](const StoredContext& c) {
    if (c.path != path) return false;
    stats_.bytes -= c.bytes;
    return true;
  });
}

std::unique_ptr<ContextReading> ContextStore::Read(const std::string& path,
                                                   std::function<void()> ready) {
  return std::make_unique<ContextReading>(core_, path, kStoredFile, options_.reading,
                                          std::move(ready));
}

void ContextStore::Ended(const ContextReading& reading, const Status& status) {
  const std::string& path = reading.path();
  if (status.ok()) {
    LogVerbose("{}: {} read by {}", path, HumanBytes(reading.bytes()), reading.how());
    std::error_code error;
    fs::last_write_time(path, fs::file_time_type::clock::now(), error);  // it is used now
    const std::lock_guard lock(mutex_);
    ++stats_.read;
    if (reading.direct()) ++stats_.read_direct;
    stats_.read_bytes += reading.bytes();
    return;
  }
  if (status.code() == StatusCode::kResourceExhausted || status.code() == StatusCode::kCancelled) {
    return;
  }
  Forget(path);
  if (status.code() == StatusCode::kCorrupt) {
    LogInfo("{}: it is deleted", status.message());
    RemoveFile(path);
    const std::lock_guard lock(mutex_);
    ++stats_.failed;
  }
}

void ContextStore::Flush() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return queue_.empty(); });
}

ContextStoreStats ContextStore::stats() const {
  const std::lock_guard lock(mutex_);
  ContextStoreStats stats = stats_;
  stats.contexts = static_cast<int64_t>(contexts_.size());
  return stats;
}

}  // namespace omnikv
