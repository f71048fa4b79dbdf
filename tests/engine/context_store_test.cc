// Contexts that outlive their engine, and files that are not what they should be.
#include "engine/context_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "../test_data.h"
#include "engine/scheduler.h"

namespace omnikv {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

std::vector<int32_t> Numbers(size_t n, size_t seed) {
  std::vector<int32_t> tokens(n);
  for (size_t i = 0; i < n; ++i) tokens[i] = static_cast<int32_t>((i * 37 + seed * 11) % 125) + 3;
  return tokens;
}

// An engine with a scheduler and a store, and what a request gets from them.
class House {
 public:
  explicit House(const fs::path& folder, uint64_t bytes = 1 << 30, const char* kv_dtype = "f32") {
    auto engine = Engine::Load({.model = TestData("tests/golden/policy_model"),
                                .device = "cpu",
                                .threads = 2,
                                .context = 1024,
                                .kv_dtype = kv_dtype,
                                .precision = "full",
                                .max_sessions = 2,
                                .kept_contexts = 2});
    EXPECT_TRUE(engine.ok()) << engine.status().message();
    engine_ = std::move(*engine);
    auto store = ContextStore::Open(CoreOf(*engine_), {.folder = folder.string(), .bytes = bytes});
    EXPECT_TRUE(store.ok()) << store.status().message();
    store_ = std::move(*store);
    scheduler_ = std::move(*Scheduler::Create(CoreOf(*engine_), {.seats = 2}, store_.get()));
  }
  struct Got {
    std::vector<int32_t> tokens;
    RequestStats stats;
  };
  Got Ask(std::vector<int32_t> prompt, PolicyOptions policy = {.name = "full"}) {
    Got got;
    Request request{.prompt = std::move(prompt),
                    .policy = std::move(policy),
                    .generate = {.max_tokens = 8, .ignore_eos = true}};
    request.on_piece = [&](const AnswerPiece& piece) { got.tokens.push_back(piece.token); };
    request.on_end = [&](const Result<RequestEnd>& end) {
      EXPECT_TRUE(end.ok()) << end.status().message();
      if (end.ok()) got.stats = end->stats;
    };
    scheduler_->Submit(std::move(request));
    while (scheduler_->Turn()) {
    }
    store_->Flush();
    return got;
  }
  ContextStore& store() { return *store_; }

 private:
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<ContextStore> store_;
  std::unique_ptr<Scheduler> scheduler_;
};

class ContextStoreTest : public testing::Test {
 protected:
  ContextStoreTest() {
    std::string name = (fs::temp_directory_path() / "omnikv_store_XXXXXX").string();
    folder_ = mkdtemp(name.data());
  }
  ~ContextStoreTest() override { fs::remove_all(folder_); }

  std::vector<fs::path> Files() const {
    std::vector<fs::path> files;
    for (const auto& file : fs::directory_iterator(folder_)) files.push_back(file.path());
    std::sort(files.begin(), files.end());
    return files;
  }
  uint64_t Bytes() const {
    uint64_t bytes = 0;
    for (const fs::path& file : Files()) bytes += fs::file_size(file);
    return bytes;
  }

  fs::path folder_;
};

std::vector<int32_t> With(std::vector<int32_t> prompt, std::vector<int32_t> more) {
  prompt.insert(prompt.end(), more.begin(), more.end());
  return prompt;
}

const PolicyOptions kSparse = {
    .name = "omnikv", .settings = {{"dense_below", "0"}, {"filters", "1,4"}, {"budget", "24"}}};

TEST_F(ContextStoreTest, AnotherEngineGoesOnWhereOneEnded) {
  const std::vector<int32_t> text = Numbers(500, 1);
  std::vector<int32_t> answer;
  {
    House house(folder_);
    answer = house.Ask(With(text, {5}), kSparse).tokens;
    EXPECT_EQ(house.store().stats().written, 1);
  }
  fs::path nowhere = folder_ / "nowhere";
  const auto fresh = [&](const std::vector<int32_t>& prompt, const PolicyOptions& policy) {
    House house(nowhere);
    const House::Got got = house.Ask(prompt, policy);
    EXPECT_EQ(got.stats.cached_tokens, 0);
    fs::remove_all(nowhere);
    return got.tokens;
  };
  // The prompt's rows for any policy, the answer's for the one that made them.
  const std::vector<int32_t> other = With(text, {9, 8});
  const std::vector<int32_t> turn = With(With(text, {5}), With(answer, {7}));
  {
    House house(folder_);
    EXPECT_EQ(house.store().stats().contexts, 1);
    const House::Got got = house.Ask(other);
    EXPECT_EQ(got.stats.stored_tokens, 500);
    EXPECT_EQ(got.tokens, fresh(other, {.name = "full"}));
    const House::Got third = house.Ask(turn, kSparse);
    EXPECT_EQ(third.stats.cached_tokens, std::ssize(turn) - 2);
  }
  House house(folder_);
  const House::Got again = house.Ask(turn, kSparse);
  EXPECT_GE(again.stats.stored_tokens, 508);
}

TEST_F(ContextStoreTest, DamagedFilesGoAndAnswersAreRight) {
  const std::vector<int32_t> prompt = Numbers(400, 2);
  std::vector<int32_t> right;
  {
    House house(folder_);
    right = house.Ask(prompt).tokens;
  }
  ASSERT_EQ(Files().size(), 1u);
  const fs::path file = Files()[0];
  const auto size = static_cast<std::streamoff>(fs::file_size(file));
  const auto flip = [&](std::streamoff at) {
    std::fstream bytes(file, std::ios::in | std::ios::out | std::ios::binary);
    bytes.seekg(at);
    const char was = static_cast<char>(bytes.get());
    bytes.seekp(at);
    bytes.put(static_cast<char>(was ^ 4));
  };
  flip(size - 100);  // of the K/V: the checksum finds it when it is read
  {
    House house(folder_);
    EXPECT_EQ(house.store().stats().contexts, 1);
    const House::Got got = house.Ask(prompt);
    EXPECT_EQ(got.stats.stored_tokens, 0);
    EXPECT_EQ(got.tokens, right);
    EXPECT_EQ(house.store().stats().failed, 1);
  }
  ASSERT_EQ(Files().size(), 1u);  // it is written anew
  for (const std::streamoff at : {std::streamoff{3}, std::streamoff{9}, std::streamoff{40}}) {
    fs::path copy = folder_ / "copy";
    fs::copy_file(file, copy);
    flip(at);
    {
      House house(folder_);
      const House::Got got = house.Ask(prompt);
      EXPECT_EQ(got.stats.stored_tokens, 0) << at;
      EXPECT_EQ(got.tokens, right);
    }
    fs::rename(copy, file);
  }
  fs::resize_file(file, static_cast<uintmax_t>(size) / 2);  // torn: found without reading it
  std::ofstream(folder_ / ".0123.saving") << "half";
  House house(folder_);
  EXPECT_EQ(house.store().stats().contexts, 0);
  EXPECT_FALSE(fs::exists(file));
  EXPECT_EQ(house.Ask(prompt).tokens, right);
}

TEST_F(ContextStoreTest, OfAnotherModelAreLeftAlone) {
  { House(folder_).Ask(Numbers(400, 3)); }
  {
    House other(folder_, 1 << 30, "f16");
    EXPECT_EQ(other.store().stats().contexts, 0);
    EXPECT_EQ(other.Ask(Numbers(400, 3)).stats.stored_tokens, 0);
  }
  EXPECT_EQ(Files().size(), 2u);
  House house(folder_);
  EXPECT_EQ(house.Ask(Numbers(400, 3)).stats.stored_tokens, 399);
}

TEST_F(ContextStoreTest, LongerContextsReplaceTheirBeginnings) {
  House house(folder_);
  house.Ask(Numbers(300, 4));
  house.Ask(Numbers(300, 4));  // is there already
  EXPECT_EQ(house.store().stats().written, 1);
  std::vector<int32_t> longer = Numbers(300, 4);
  const House::Got first = house.Ask(longer);
  longer = With(With(longer, first.tokens), Numbers(200, 9));
  house.Ask(longer);
  EXPECT_EQ(house.store().stats().contexts, 1);
  EXPECT_EQ(Files().size(), 1u);
  house.Ask(Numbers(100, 5));  // too short to be worth a file
  EXPECT_EQ(Files().size(), 1u);
}

TEST_F(ContextStoreTest, KeepsToItsSize) {
  uint64_t one = 0;
  {
    House house(folder_);
    house.Ask(Numbers(300, 10));
    one = Bytes();
  }
  const uint64_t most = 3 * one + one / 2;
  House house(folder_, most);
  for (size_t i = 11; i < 18; ++i) {
    house.Ask(Numbers(300, i));
    EXPECT_LE(Bytes(), most);
  }
  EXPECT_EQ(Files().size(), 3u);
  EXPECT_EQ(house.store().stats().dropped, 5);
  // Of those that are as old, the longer one stays.
  house.Ask(Numbers(600, 20));
  EXPECT_LE(Bytes(), most);
  int64_t longest = 0;
  house.store().ForEach(
      [&](const StoredContext& c) { longest = std::max<int64_t>(longest, std::ssize(c.tokens)); });
  EXPECT_GE(longest, 600);
}

TEST_F(ContextStoreTest, TwoOnOneFolder) {
  House one(folder_);
  House two(folder_);
  one.Ask(Numbers(300, 30));
  EXPECT_EQ(two.Ask(Numbers(300, 30)).stats.stored_tokens, 0);  // it came after `two` looked
  House three(folder_);
  for (const fs::path& file : Files()) fs::remove(file);  // as another process may
  const House::Got got = three.Ask(Numbers(300, 30));
  EXPECT_EQ(got.stats.stored_tokens, 0);
  EXPECT_EQ(got.tokens, one.Ask(Numbers(300, 30)).tokens);
}

TEST_F(ContextStoreTest, NoFolder) {
  std::ofstream(folder_ / "file") << "x";
  auto engine = Engine::Load({.model = TestData("tests/golden/policy_model"), .device = "cpu"});
  ASSERT_TRUE(engine.ok());
  const auto store = ContextStore::Open(CoreOf(**engine),
                                        {.folder = (folder_ / "file").string(), .bytes = 1 << 20});
  EXPECT_THAT(store.status().message(), HasSubstr("`store` is '"));
}

}  // namespace
}  // namespace omnikv
