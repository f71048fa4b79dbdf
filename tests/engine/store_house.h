// Engines with a scheduler and a store, in a folder of their own, for tests of the store.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../test_data.h"
#include "engine/scheduler.h"

namespace omnikv {

inline std::vector<int32_t> Numbers(size_t n, size_t seed) {
  std::vector<int32_t> tokens(n);
  for (size_t i = 0; i < n; ++i) tokens[i] = static_cast<int32_t>((i * 37 + seed * 11) % 125) + 3;
  return tokens;
}

inline std::vector<int32_t> With(std::vector<int32_t> prompt, const std::vector<int32_t>& more) {
  prompt.insert(prompt.end(), more.begin(), more.end());
  return prompt;
}

inline const PolicyOptions kSparse = {
    .name = "omnikv", .settings = {{"dense_below", "0"}, {"filters", "1,4"}, {"budget", "24"}}};

struct HouseOptions {
  uint64_t bytes = uint64_t{1} << 30;
  const char* kv_dtype = "f32";
  const char* model = "tests/golden/policy_model";
  int64_t segment_tokens = 0;
  WritingOptions writing = {};
  int64_t kv_tokens = 0;
};

// An engine with a scheduler and a store, and what a request gets from them.
class House {
 public:
  struct Got {
    std::vector<int32_t> tokens;
    std::optional<RequestStats> stats;
    bool ended = false;
  };

  explicit House(const std::filesystem::path& folder, const HouseOptions& options = {}) {
    auto engine = Engine::Load({.model = TestData(options.model),
                                .device = "cpu",
                                .threads = 2,
                                .context = 1024,
                                .kv_dtype = options.kv_dtype,
                                .precision = "full",
                                .max_sessions = 2,
                                .kv_tokens = options.kv_tokens,
                                .kept_contexts = 2});
    EXPECT_TRUE(engine.ok()) << engine.status().message();
    engine_ = std::move(*engine);
    auto store = ContextStore::Open(CoreOf(*engine_), {.folder = folder.string(),
                                                       .bytes = options.bytes,
                                                       .segment_tokens = options.segment_tokens,
                                                       .writing = options.writing});
    EXPECT_TRUE(store.ok()) << store.status().message();
    store_ = std::move(*store);
    scheduler_ = std::move(*Scheduler::Create(CoreOf(*engine_), {.seats = 2}, store_.get()));
  }
  // What `got` becomes in the turns that follow.
  void Submit(Got& got, std::vector<int32_t> prompt, int64_t max_tokens = 8,
              PolicyOptions policy = {.name = "full"}) {
    Request request{.prompt = std::move(prompt),
                    .policy = std::move(policy),
                    .generate = {.max_tokens = max_tokens, .ignore_eos = true}};
    request.on_piece = [&got](const AnswerPiece& piece) { got.tokens.push_back(piece.token); };
    request.on_end = [&got](const Result<RequestEnd>& end) {
      EXPECT_TRUE(end.ok()) << end.status().message();
      if (end.ok()) got.stats = end->stats;
      got.ended = true;
    };
    scheduler_->Submit(std::move(request));
  }
  void Drain() {
    while (scheduler_->Turn()) {
    }
  }
  // Until all is answered and written.
  Got Ask(std::vector<int32_t> prompt, PolicyOptions policy = {.name = "full"},
          int64_t max_tokens = 8) {
    Got got;
    Submit(got, std::move(prompt), max_tokens, std::move(policy));
    Drain();
    if (!got.stats) got.stats.emplace();
    return got;
  }
  // What one in memory, or of the store, is called: the one that was there last.
  std::string Id(ListedContext::Where where) const {
    std::string id;
    for (const ListedContext& c : scheduler_->Contexts()) {
      if (c.where == where) id = c.id;
    }
    return id;
  }
  int64_t Kept() const {
    const auto contexts = scheduler_->Contexts();
    return std::ranges::count(contexts, ListedContext::Where::kKept, &ListedContext::where);
  }
  // What saving the context of that id comes to.
  Result<std::string> Save(const std::string& id) {
    std::optional<Result<std::string>> saved;
    scheduler_->SaveContext(id, [&](const Result<std::string>& of) { saved = of; });
    Drain();
    EXPECT_TRUE(saved);
    return *saved;
  }
  // What loading it comes to.
  Result<std::string> Load(const std::string& id) {
    std::optional<Result<std::string>> loaded;
    scheduler_->LoadContext(id, [&](const Result<std::string>& of) { loaded = of; });
    Drain();
    EXPECT_TRUE(loaded);
    return *loaded;
  }
  // The one of the store that begins with these tokens.
  StoredContext Stored(const std::vector<int32_t>& tokens) const {
    std::optional<StoredContext> found;
    store_->ForEach([&](const StoredContext& c) {
      if (CommonTokens(c.tokens, tokens) == std::ssize(tokens)) found = c;
    });
    EXPECT_TRUE(found);
    return found.value_or(StoredContext());
  }
  ContextStore& store() { return *store_; }
  Scheduler& scheduler() { return *scheduler_; }
  const EngineCore& core() { return CoreOf(*engine_); }

 private:
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<ContextStore> store_;
  std::unique_ptr<Scheduler> scheduler_;
};

class StoreTest : public testing::Test {
 protected:
  StoreTest() {
    std::string name = (std::filesystem::temp_directory_path() / "omnikv_store_XXXXXX").string();
    folder_ = mkdtemp(name.data());
  }
  ~StoreTest() override { std::filesystem::remove_all(folder_); }

  // All that are there, or those of a kind.
  std::vector<std::filesystem::path> Files(const std::string& suffix = "") const {
    std::vector<std::filesystem::path> files;
    for (const auto& file : std::filesystem::directory_iterator(folder_)) {
      if (suffix.empty() || file.path().extension() == suffix) files.push_back(file.path());
    }
    std::sort(files.begin(), files.end());
    return files;
  }
  uint64_t Bytes() const {
    uint64_t bytes = 0;
    for (const auto& file : Files()) bytes += std::filesystem::file_size(file);
    return bytes;
  }
  // The answer of a server that has nothing stored.
  std::vector<int32_t> Right(const std::vector<int32_t>& prompt, const HouseOptions& options = {},
                             const PolicyOptions& policy = {.name = "full"}) const {
    const std::filesystem::path nowhere = folder_.string() + "_nowhere";
    const House::Got got = House(nowhere, options).Ask(prompt, policy);
    EXPECT_EQ(got.stats->cached_tokens, 0);
    std::filesystem::remove_all(nowhere);
    return got.tokens;
  }
  static void Flip(const std::filesystem::path& file, std::streamoff at) {
    std::fstream bytes(file, std::ios::in | std::ios::out | std::ios::binary);
    bytes.seekg(at);
    const char was = static_cast<char>(bytes.get());
    bytes.seekp(at);
    bytes.put(static_cast<char>(was ^ 4));
  }
  // As if it was changed last an hour ago.
  static void Age(const std::filesystem::path& file) {
    std::filesystem::last_write_time(
        file, std::filesystem::file_time_type::clock::now() - std::chrono::hours(1));
  }

  std::filesystem::path folder_;
};

}  // namespace omnikv
