// Contexts that outlive their engine, and files that are not what they should be.
#include "engine/context_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "store_house.h"

namespace omnikv::context_store_test {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

using ContextStoreTest = StoreTest;

TEST_F(ContextStoreTest, AnotherEngineGoesOnWhereOneEnded) {
  const std::vector<int32_t> text = Numbers(500, 1);
  std::vector<int32_t> answer;
  {
    House house(folder_);
    answer = house.Ask(With(text, {5}), kSparse).tokens;
    EXPECT_EQ(house.store().stats().written, 1);
  }
  // The prompt's rows for any policy, the answer's for the one that made them.
  const std::vector<int32_t> other = With(text, {9, 8});
  const std::vector<int32_t> turn = With(With(text, {5}), With(answer, {7}));
  {
    House house(folder_);
    EXPECT_EQ(house.store().stats().contexts, 1);
    const House::Got got = house.Ask(other);
    EXPECT_EQ(got.stats->stored_tokens, 500);
    EXPECT_EQ(got.tokens, Right(other));
    const House::Got third = house.Ask(turn, kSparse);
    EXPECT_EQ(third.stats->cached_tokens, std::ssize(turn) - 2);
  }
  House house(folder_);
  const House::Got again = house.Ask(turn, kSparse);
  EXPECT_GE(again.stats->stored_tokens, 508);
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
  const auto flip = [&](std::streamoff at) { Flip(file, at); };
  flip(size - 100);  // of the K/V: the checksum finds it when it is read
  {
    House house(folder_);
    EXPECT_EQ(house.store().stats().contexts, 1);
    const House::Got got = house.Ask(prompt);
    EXPECT_EQ(got.stats->stored_tokens, 0);
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
      EXPECT_EQ(got.stats->stored_tokens, 0) << at;
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
    House other(folder_, {.kv_dtype = "f16"});
    EXPECT_EQ(other.store().stats().contexts, 0);
    EXPECT_EQ(other.Ask(Numbers(400, 3)).stats->stored_tokens, 0);
  }
  EXPECT_EQ(Files().size(), 2u);
  House house(folder_);
  EXPECT_EQ(house.Ask(Numbers(400, 3)).stats->stored_tokens, 399);
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
  House house(folder_, {.bytes = most});
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
  EXPECT_EQ(two.Ask(Numbers(300, 30)).stats->stored_tokens, 0);  // it came after `two` looked
  House three(folder_);
  for (const fs::path& file : Files()) fs::remove(file);  // as another process may
  const House::Got got = three.Ask(Numbers(300, 30));
  EXPECT_EQ(got.stats->stored_tokens, 0);
  EXPECT_EQ(got.tokens, one.Ask(Numbers(300, 30)).tokens);
}

TEST_F(ContextStoreTest, PinnedFilesStayAndOutliveTheirServer) {
  uint64_t one = 0;
  std::string pinned;
  std::vector<int32_t> whole = Numbers(300, 40);
  {
    House house(folder_);
    whole = With(whole, house.Ask(whole).tokens);
    one = Bytes();
    pinned = house.Id(ListedContext::Where::kStored);
    ASSERT_TRUE(house.scheduler().PinContext(pinned, true).ok());
  }
  const uint64_t most = 2 * one + one / 2;
  {
    House house(folder_, {.bytes = most});
    for (size_t i = 41; i < 46; ++i) house.Ask(Numbers(600, i));  // each worth more, and too large
    for (size_t i = 51; i < 56; ++i) house.Ask(Numbers(300, i));
    EXPECT_TRUE(house.store().Find(pinned));
    EXPECT_LE(house.store().stats().bytes, most);
    // A longer one does not take its place.
    const int64_t written = house.store().stats().written;
    house.Ask(With(whole, Numbers(20, 7)));
    EXPECT_EQ(house.store().stats().written, written + 1);
    EXPECT_TRUE(house.store().Find(pinned));
  }
  {
    // Nothing else fits: it stays alone, and others are not stored.
    House house(folder_, {.bytes = one + one / 2});
    EXPECT_EQ(house.store().stats().contexts, 1);
    const int64_t failed = house.store().stats().failed;
    house.Ask(Numbers(300, 60));
    EXPECT_EQ(house.store().stats().contexts, 1);
    EXPECT_EQ(house.store().stats().failed, failed + 1);
    EXPECT_EQ(house.Ask(With(Numbers(300, 40), {9})).stats->stored_tokens, 300);
    house.Ask(Numbers(280, 61));
    EXPECT_THAT(house.Save(house.Id(ListedContext::Where::kKept)).status().message(),
                HasSubstr("that are pinned leave no room"));
    ASSERT_TRUE(house.scheduler().PinContext(pinned, false).ok());
    house.Ask(Numbers(300, 62));
    EXPECT_FALSE(house.store().Find(pinned));
  }
  std::ofstream(folder_ / "0123456789abcdef.pin");  // of a file that is gone
  House house(folder_);
  for (const fs::path& file : Files()) EXPECT_EQ(file.extension(), ".ctx");
}

TEST_F(ContextStoreTest, PinnedContextsStayInMemory) {
  House house(folder_);
  const std::vector<int32_t> text = Numbers(500, 70);
  house.Ask(text);
  const std::string pinned = house.Id(ListedContext::Where::kKept);
  ASSERT_TRUE(house.scheduler().PinContext(pinned, true).ok());
  const auto there = [&](const std::string& id) {
    for (const ListedContext& c : house.scheduler().Contexts()) {
      if (c.id == id) return true;
    }
    return false;
  };
  for (size_t i = 71; i < 80; ++i) house.Ask(Numbers(500, i));
  EXPECT_TRUE(there(pinned));
  const House::Got got = house.Ask(With(text, {9}));
  EXPECT_EQ(got.stats->cached_tokens, 500);
  EXPECT_EQ(got.stats->stored_tokens, 0);
  EXPECT_TRUE(there(pinned));  // beside the longer one
  // As many as are kept: requests have the other sequences.
  const auto pin = [&] {
    return house.scheduler().PinContext(house.Id(ListedContext::Where::kKept), true);
  };
  house.Ask(Numbers(600, 95));
  ASSERT_TRUE(pin().ok());
  EXPECT_EQ(house.scheduler().stats().pinned_contexts, 1);  // as of the last turn
  house.Ask(Numbers(300, 80));
  EXPECT_EQ(house.scheduler().stats().pinned_contexts, 2);
  EXPECT_THAT(pin().message(), HasSubstr("cannot be pinned: 2 are, expected at most the 2 of"));
  house.Ask(Numbers(300, 81));
  // One whose blocks are those of pinned ones is refused, rather than waits for ever.
  std::string refused;
  Request large{.prompt = Numbers(1000, 82),
                .policy = {.name = "full"},
                .generate = {.max_tokens = 8, .ignore_eos = true}};
  large.on_end = [&](const Result<RequestEnd>& end) {
    refused = end.ok() ? "" : end.status().message();
  };
  Request other = large;
  other.prompt = Numbers(1000, 83);
  house.scheduler().Submit(std::move(large));
  house.scheduler().Submit(std::move(other));
  while (house.scheduler().Turn()) {
  }
  EXPECT_THAT(refused, HasSubstr(", 2 pinned contexts among it"));
  EXPECT_TRUE(there(pinned));
  // One that is unpinned or dropped makes room.
  ASSERT_TRUE(house.scheduler().DropContext(pinned).ok());
  EXPECT_FALSE(there(pinned));
  EXPECT_EQ(house.scheduler().DropContext(pinned).code(), StatusCode::kNotFound);
}

TEST_F(ContextStoreTest, LoadsAndSavesWhatItIsAskedFor) {
  std::string stored;
  {
    House house(folder_);
    house.Ask(Numbers(100, 90));  // too short to be stored by itself
    EXPECT_EQ(Files().size(), 0u);
    const std::string kept = house.Id(ListedContext::Where::kKept);
    const auto save = [&](const std::string& id) { return house.Save(id); };
    const auto first = save(kept);
    ASSERT_TRUE(first.ok()) << first.status().message();
    stored = *first;
    EXPECT_EQ(*save(kept), stored);
    EXPECT_EQ(*save(stored), stored);
    EXPECT_EQ(save("ctx-99").status().code(), StatusCode::kNotFound);
    EXPECT_EQ(save("x").status().code(), StatusCode::kNotFound);
  }
  House house(folder_);
  EXPECT_EQ(house.Id(ListedContext::Where::kStored), stored);
  const auto loaded = house.Load(stored);
  ASSERT_TRUE(loaded.ok()) << loaded.status().message();
  EXPECT_EQ(*house.Load(stored), *loaded);
  EXPECT_EQ(*house.Load(*loaded), *loaded);
  EXPECT_EQ(house.Kept(), 1);
  EXPECT_EQ(house.store().stats().read, 1);
  EXPECT_EQ(house.Ask(With(Numbers(100, 90), {9})).stats->cached_tokens, 100);
  ASSERT_TRUE(house.scheduler().DropContext(stored).ok());
  EXPECT_EQ(Files().size(), 0u);
  EXPECT_EQ(house.Load(stored).status().code(), StatusCode::kNotFound);
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
}  // namespace omnikv::context_store_test
