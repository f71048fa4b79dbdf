// The contexts in the folder. How they are written is in context_writes.cc.
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
#include "engine/stored_names.h"

namespace omnikv {
namespace {

namespace fs = std::filesystem;

constexpr const char* kPin = ".pin";
constexpr const char* kWriting = ".saving";  // CheckedFileWriter's

fs::path PinOf(const fs::path& path) {
  return fs::path(path).replace_extension(kPin);
}

double SecondsSince(fs::file_time_type time) {
  return std::chrono::duration<double>(fs::file_time_type::clock::now() - time).count();
}

bool IsOld(const fs::path& path) {
  std::error_code error;
  const fs::file_time_type changed = fs::last_write_time(path, error);
  return !error && fs::file_time_type::clock::now() - changed >= kMayBeNamed;
}

// What a byte is worth that goes with a context. To compute a context takes a time that grows with
// the square of its tokens. If others have the first `shared` of them, that time is
// tokens^2 - shared^2, and the bytes are those of tokens - shared. So a byte is worth the sum of
// the two numbers, less the longer it is not used.
double Worth(const fs::path& path, int64_t tokens, int64_t shared) {
  std::error_code error;
  const fs::file_time_type used = fs::last_write_time(path, error);
  const double age = error ? 1e9 : SecondsSince(used);
  return static_cast<double>(tokens + shared) / (60 + std::max(0.0, age));
}

}  // namespace

void RemoveContextFile(const fs::path& path) {
  std::error_code error;
  fs::remove(path, error);
  fs::remove(PinOf(path), error);
}

std::string StoredContext::id() const {
  return fs::path(path).stem().string();
}

ContextStore::ContextStore(EngineCore& core, ContextStoreOptions options)
    : core_(core),
      options_(std::move(options)),
      marks_(ModelMarks(core)),
      shape_(ShapeOf(core.bank->config(), marks_, options_.segment_tokens)),
      segments_(options_.folder) {}

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

Status ContextStore::ReadFolder() {
  std::error_code error;
  fs::directory_iterator files(options_.folder, error);
  if (error) {
    return InvalidArgument(fmt::format("`store` is '{}', which cannot be read ({})",
                                       options_.folder, error.message()));
  }
  std::vector<fs::path> pins;
  std::vector<std::string> segments;  // names
  int64_t other_versions = 0;
  const auto damaged = [&](const fs::path& path, const std::string& why) {
    LogInfo("{}: it is deleted", why);
    ++stats_.failed;
    RemoveContextFile(path);
  };
  for (const fs::directory_entry& file : files) {
    const fs::path& path = file.path();
    const fs::path kind = path.extension();
    if (kind == kPin) pins.push_back(path);
    const std::string name = path.stem().string();
    if (kind == SegmentFiles::kSuffix && IsSegmentName(name)) segments.push_back(name);
    // What a process that was killed has left.
    if (kind == kWriting && IsOld(path)) fs::remove(path, error);
    if (kind != kContextSuffix) continue;
    auto found = Peek(path.string());
    if (found.ok() && found->tokens.empty()) {
      of_others_[path.string()] = std::move(found->segments);
    } else if (found.ok()) {
      segments_.Need(found->segments);
      bytes_ += found->bytes;
      contexts_.push_back(std::move(*found));
    } else if (found.status().code() == StatusCode::kCorrupt) {
      damaged(path, found.status().message());
    } else if (found.status().code() == StatusCode::kUnsupported) {
      ++other_versions;
    }
  }
  if (other_versions > 0) {
    LogInfo("{} has {} contexts of another version of the store, which are left alone",
            options_.folder, other_versions);
  }
  for (auto c = contexts_.begin(); c != contexts_.end();) {
    const auto one = c++;
    const auto there = [&](const std::string& name) { return segments_.BytesOf({&name, 1}) > 0; };
    // The beginning will do where there is one.
    const auto missing = std::ranges::find_if_not(one->segments, there);
    if (missing == one->segments.end() || (missing != one->segments.begin() && !shape_.others)) {
      continue;
    }
    damaged(one->path, fmt::format("{}: its segment {} is missing", one->path, *missing));
    Erase(one);
  }
  std::unordered_set<std::string> of_others;
  for (const auto& [path, names] : of_others_) of_others.insert(names.begin(), names.end());
  for (const std::string& name : segments) {
    if (!of_others.contains(name)) segments_.Found(name);
  }
  for (const fs::path& pin : pins) {  // of a file that went without it
    if (!fs::exists(fs::path(pin).replace_extension(kContextSuffix), error)) fs::remove(pin, error);
  }
  Sweep();
  MakeRoom(0);
  return {};
}

Result<StoredContext> ContextStore::Peek(const std::string& path) const {
  OKV_ASSIGN_OR_RETURN(InputFile input, InputFile::Open(path));
  StoredContext context{.path = path, .bytes = input.size()};
  OKV_ASSIGN_OR_RETURN(const CheckedFile file, CheckedFile::Peek(std::move(input), kStoredFile));
  const Result<SavedContext> saved = ParseSavedContext(file.text());
  if (!saved.ok()) return saved.status().Prefixed(path);
  Result<SegmentList> segments = ParseSegments(file.text());
  if (!segments.ok()) return segments.status().Prefixed(path);
  context.segments = std::move(segments->names);
  if (!CheckModelMarks(marks_, saved->model).ok() ||
      !CheckImage(core_.bank->config(), saved->image).ok() || segments->tokens != shape_.tokens) {
    return context;
  }
  OKV_ASSIGN_OR_RETURN(context.tokens, TokensOf(file, *saved));
  context.dense_rows = saved->dense_rows;
  context.made_by = saved->resolved;
  if (context.segments != SegmentNames(shape_, core_.bank->config(), saved->image, context.tokens,
                                       context.dense_rows, context.made_by)) {
    return Corrupt(fmt::format("{}: names other segments than its tokens have", path));
  }
  return context;
}

std::optional<std::unordered_set<std::string>> ContextStore::LookAgain() {
  std::unordered_set<std::string> known;
  {
    const std::lock_guard lock(mutex_);
    for (const StoredContext& c : contexts_) known.insert(c.path);
    for (const auto& [path, names] : of_others_) known.insert(path);
  }
  std::error_code error;
  fs::directory_iterator files(options_.folder, error);
  if (error) return {};
  std::unordered_set<std::string> here;
  std::vector<StoredContext> found;
  for (const fs::directory_entry& file : files) {
    if (file.path().extension() != kContextSuffix) continue;
    const std::string path = file.path().string();
    here.insert(path);
    if (known.contains(path)) continue;
    auto context = Peek(path);
    if (context.ok()) found.push_back(std::move(*context));
  }
  const std::lock_guard lock(mutex_);
  for (StoredContext& context : found) {
    if (context.tokens.empty()) {
      of_others_[context.path] = std::move(context.segments);
      continue;
    }
    const auto same = [&](const StoredContext& c) { return c.path == context.path; };
    if (std::ranges::any_of(contexts_, same)) continue;  // written just now
    segments_.Need(context.segments);
    bytes_ += context.bytes;
    contexts_.push_back(std::move(context));
  }
  const auto is_gone = [&](const std::string& path) {
    return known.contains(path) && !here.contains(path);
  };
  for (auto c = contexts_.begin(); c != contexts_.end();) c = is_gone(c->path) ? Erase(c) : ++c;
  std::erase_if(of_others_, [&](const auto& of) { return is_gone(of.first); });
  std::unordered_set<std::string> named;
  for (const auto& [path, names] : of_others_) named.insert(names.begin(), names.end());
  return named;
}

void ContextStore::Sweep() {
  const std::lock_guard files(files_mutex_);
  std::vector<std::string> unneeded;
  {
    const std::lock_guard lock(mutex_);
    unneeded = segments_.Unneeded();
  }
  if (unneeded.empty()) return;
  const auto named = LookAgain();
  if (!named) return;
  std::vector<std::string> paths;
  {
    const std::lock_guard lock(mutex_);
    paths = segments_.GiveUp(unneeded, *named);
  }
  std::error_code error;
  for (const std::string& path : paths) fs::remove(path, error);
}

std::list<StoredContext>::iterator ContextStore::Erase(std::list<StoredContext>::iterator context) {
  bytes_ -= context->bytes;
  segments_.Release(context->segments);
  return contexts_.erase(context);
}

std::list<StoredContext>::iterator ContextStore::Least() {
  auto least = contexts_.end();
  double worth = 0;
  for (auto c = contexts_.begin(); c != contexts_.end(); ++c) {
    if (Pinned(*c)) continue;
    const int64_t shared =
        std::ranges::count_if(
            c->segments, [&](const std::string& name) { return segments_.NeededByOthers(name); }) *
        shape_.tokens;
    const double of = Worth(c->path, std::ssize(c->tokens), shared);
    if (least != contexts_.end() && worth <= of) continue;
    least = c;
    worth = of;
  }
  return least;
}

bool ContextStore::MakeRoom(uint64_t bytes) {
  const auto fits = [&] {
    const std::lock_guard lock(mutex_);
    return BytesHere() + bytes <= options_.bytes;
  };
  if (fits()) return true;
  Sweep();
  while (!fits()) {
    std::string path;
    {
      const std::lock_guard lock(mutex_);
      const auto least = Least();
      if (least == contexts_.end()) return false;
      path = least->path;
      ++stats_.dropped;
      Erase(least);
    }
    RemoveContextFile(path);
    Sweep();
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

uint64_t ContextStore::BytesOf(const StoredContext& context) const {
  return context.bytes + context.segments.size() * shape_.file_bytes;
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
  RemoveContextFile(context->path);
  Sweep();
  std::error_code error;
  if (!fs::exists(context->path, error)) return {};
  return Failed(fmt::format("{}: cannot be removed", context->path));
}

void ContextStore::Forget(const std::string& path) {
  const std::lock_guard lock(mutex_);
  const auto found = std::ranges::find(contexts_, path, &StoredContext::path);
  if (found != contexts_.end()) Erase(found);
}

int64_t ContextStore::TokensToRead(const StoredContext& context, int64_t tokens) const {
  const int64_t segments = (tokens + shape_.tokens - 1) / shape_.tokens;
  const bool cut = !shape_.others && segments <= std::ssize(context.segments);
  return cut ? segments * shape_.tokens : std::ssize(context.tokens);
}

std::unique_ptr<ContextReading> ContextStore::Read(const StoredContext& context, int64_t tokens,
                                                   std::function<void()> ready) {
  ContextFiles files{.segment_tokens = shape_.tokens, .can_be_cut = !shape_.others};
  std::span<const std::string> names = context.segments;
  if (tokens < std::ssize(context.tokens)) {
    names = names.first(static_cast<size_t>(tokens / shape_.tokens));
  } else {
    files.own = {context.path, kStoredFile};
  }
  {
    const std::lock_guard lock(mutex_);
    segments_.Need(names);
    for (const std::string& name : names) {
      files.segments.push_back({segments_.PathOf(name), name});
    }
  }
  return std::make_unique<ContextReading>(core_, std::move(files), options_.reading,
                                          std::move(ready));
}

void ContextStore::Ended(const StoredContext& context, const ContextReading& reading,
                         const Status& status) {
  std::vector<std::string> names;
  for (const ContextFiles::Segment& s : reading.files().segments) names.push_back(s.name);
  {
    const std::lock_guard lock(mutex_);
    segments_.Release(names);
    if (status.ok()) {
      ++stats_.read;
      if (reading.direct()) ++stats_.read_direct;
      stats_.read_bytes += reading.bytes();
    }
  }
  if (status.ok()) {
    LogVerbose("{}: {} read by {}", context.path, HumanBytes(reading.bytes()), reading.how());
  }
  const Status& damage = reading.damage();
  const StatusCode code = damage.code();
  if (damage.ok() && status.ok()) {
    std::error_code error;  // it is used now
    fs::last_write_time(context.path, fs::file_time_type::clock::now(), error);
  } else if (!damage.ok() && code != StatusCode::kResourceExhausted) {
    Forget(context.path);
    const bool of_segment = reading.failed() < names.size();
    if (code == StatusCode::kCorrupt || (of_segment && code == StatusCode::kNotFound)) {
      LogInfo("{}: {} is deleted", damage.message(),
              of_segment ? fmt::format("context {}", context.id()) : "it");
      if (of_segment) {
        const std::lock_guard files(files_mutex_);
        const std::lock_guard lock(mutex_);
        segments_.Remove(names[reading.failed()]);
      }
      RemoveContextFile(context.path);
      const std::lock_guard lock(mutex_);
      ++stats_.failed;
    }
  }
}

ContextStoreStats ContextStore::stats() const {
  const std::lock_guard lock(mutex_);
  ContextStoreStats stats = stats_;
  stats.contexts = static_cast<int64_t>(contexts_.size());
  stats.segments = segments_.size();
  stats.bytes = BytesHere();
  return stats;
}

}  // namespace omnikv
