// Contexts that go to the store while the engine goes on with others.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "store_house.h"

namespace omnikv::store_writing_test {
namespace {

using ::testing::HasSubstr;
using Where = ListedContext::Where;

// What a turn can copy in these tests: a context goes in many of them.
constexpr WritingOptions kSlow = {.piece = 4096, .pieces = 2};
constexpr size_t kPerTurn = 2 * 4096;

class StoreWritingTest : public StoreTest {
 protected:
  // Until the request has ended, and by far not all of its context is written.
  static void End(House& house, const House::Got& got) {
    while (!got.ended) ASSERT_TRUE(house.scheduler().Turn());
    ASSERT_TRUE(house.store().Writes());
  }
};

TEST_F(StoreWritingTest, OthersDecodeMeanwhile) {
  const std::vector<int32_t> right = Right(Numbers(500, 1));
  std::vector<int32_t> alone;
  {
    House house(folder_);
    House::Got got;
    house.Submit(got, Numbers(20, 9), 900);
    house.Drain();
    alone = got.tokens;
  }
  for (const auto& file : Files()) std::filesystem::remove(file);
  {
    House house(folder_, {.segment_tokens = 128, .writing = kSlow});
    House::Got other;
    house.Submit(other, Numbers(20, 9), 900);
    while (other.tokens.empty()) ASSERT_TRUE(house.scheduler().Turn());
    House::Got got;
    house.Submit(got, Numbers(500, 1));
    End(house, got);
    EXPECT_EQ(got.tokens, right);
    const size_t before = other.tokens.size();
    while (house.store().Writes() && !other.ended) ASSERT_TRUE(house.scheduler().Turn());
    ASSERT_FALSE(other.ended);
    EXPECT_EQ(house.store().stats().written, 1);
    // A token in each turn.
    EXPECT_GE(other.tokens.size() - before, Bytes() / kPerTurn);
    house.Drain();
    EXPECT_EQ(other.tokens, alone);
  }
  House house(folder_, {.segment_tokens = 128});
  const House::Got again = house.Ask(Numbers(500, 1));
  EXPECT_EQ(again.stats->stored_tokens, 499);
  EXPECT_EQ(again.tokens, right);
}

TEST_F(StoreWritingTest, WhatWaitsIsWrittenAtTheEnd) {
  {
    House house(folder_, {.segment_tokens = 128, .writing = kSlow});
    House::Got one, two;
    house.Submit(one, Numbers(500, 1));
    house.Submit(two, Numbers(400, 2));
    while (!one.ended || !two.ended) ASSERT_TRUE(house.scheduler().Turn());
    ASSERT_TRUE(house.store().Writes());
  }
  House house(folder_, {.segment_tokens = 128});
  EXPECT_EQ(house.store().stats().contexts, 2);
  EXPECT_EQ(house.Ask(Numbers(500, 1)).stats->stored_tokens, 499);
  EXPECT_EQ(house.Ask(Numbers(400, 2)).stats->stored_tokens, 399);
}

TEST_F(StoreWritingTest, RequestsGoBeforeWhatIsToBeWritten) {
  House house(folder_, {.segment_tokens = 128, .writing = kSlow, .kv_tokens = int64_t{16} * 64});
  House::Got got;
  house.Submit(got, Numbers(500, 1));
  End(house, got);
  EXPECT_EQ(house.Kept(), 1);
  House::Got large;
  house.Submit(large, Numbers(900, 2), 20);
  while (large.tokens.empty()) ASSERT_TRUE(house.scheduler().Turn());
  EXPECT_EQ(house.Kept(), 0);
  house.Drain();
  const ContextStoreStats stats = house.store().stats();
  EXPECT_EQ(stats.given_up, 1);
  EXPECT_EQ(stats.failed, 0);
  EXPECT_EQ(stats.written, 1);  // the large one
  EXPECT_EQ(stats.contexts, 1);
  // What it was is computed.
  EXPECT_EQ(house.Ask(Numbers(500, 1)).tokens, got.tokens);
  EXPECT_EQ(house.store().stats().bytes, Bytes());
}

TEST_F(StoreWritingTest, WhatIsSavedByItsIdIsWrittenFirst) {
  House house(folder_, {.segment_tokens = 128, .writing = kSlow, .kv_tokens = int64_t{16} * 64});
  House::Got got;
  house.Submit(got, Numbers(200, 1));
  house.Drain();
  House::Got next;
  house.Submit(next, Numbers(500, 3));
  End(house, next);
  const std::string id = house.Id(Where::kKept);
  std::optional<Result<std::string>> saved;
  house.scheduler().SaveContext(id, [&](const Result<std::string>& of) { saved = of; });
  EXPECT_TRUE(house.store().Saves());
  House::Got large;
  house.Submit(large, Numbers(900, 2), 20);
  // The request waits for it, not it for the request.
  while (large.tokens.empty()) {
    ASSERT_TRUE(house.scheduler().Turn());
    ASSERT_TRUE(large.tokens.empty() || !house.store().Saves());
  }
  house.Drain();
  ASSERT_TRUE(saved);
  ASSERT_TRUE(saved->ok()) << saved->status().message();
  EXPECT_TRUE(house.store().Find(**saved));
  EXPECT_EQ(house.store().stats().given_up, 0);
}

TEST_F(StoreWritingTest, AContextThatIsDeletedIsNotWritten) {
  House house(folder_, {.writing = kSlow});
  House::Got got;
  house.Submit(got, Numbers(500, 1));
  End(house, got);
  const std::string id = house.Id(Where::kKept);
  std::optional<Result<std::string>> saved;
  house.scheduler().SaveContext(id, [&](const Result<std::string>& of) { saved = of; });
  ASSERT_TRUE(house.scheduler().DropContext(id).ok());
  house.Drain();
  ASSERT_TRUE(saved);
  EXPECT_EQ(saved->status().code(), StatusCode::kNotFound);
  EXPECT_THAT(saved->status().message(), HasSubstr("was deleted before it was written"));
  EXPECT_EQ(house.store().stats().given_up, 1);
  EXPECT_EQ(Files().size(), 0u);
}

// The next turn of a conversation takes the place of one that is being written.
TEST_F(StoreWritingTest, ALongerContextTakesThePlaceOfOneOnItsWay) {
  House house(folder_, {.segment_tokens = 128, .writing = kSlow});
  House::Got got;
  house.Submit(got, Numbers(500, 1));
  End(house, got);
  House::Got next;
  house.Submit(next, With(With(Numbers(500, 1), got.tokens), Numbers(10, 5)));
  house.Drain();
  const ContextStoreStats stats = house.store().stats();
  EXPECT_EQ(stats.contexts, 1);
  EXPECT_EQ(stats.given_up + stats.written, 2);
  EXPECT_EQ(Files(".ctx").size(), 1u);
  EXPECT_EQ(stats.bytes, Bytes());
  EXPECT_EQ(house.Stored(Numbers(500, 1)).tokens.size(), 500u + 8 + 10 + 7);
}

TEST_F(StoreWritingTest, NothingWaitsForAStepWhereNoneIsTaken) {
  House house(folder_, {.segment_tokens = 128, .writing = kSlow});
  House::Got got;
  house.Submit(got, Numbers(500, 1));
  End(house, got);
  house.store().Flush();
  EXPECT_EQ(house.store().stats().written, 1);
  EXPECT_FALSE(house.store().Writes());
}

}  // namespace
}  // namespace omnikv::store_writing_test
