// Contexts of the store that have segments in common (docs/decisions/085).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "engine/context_file.h"
#include "store_house.h"

namespace omnikv::store_segments_test {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using Where = ListedContext::Where;

constexpr HouseOptions kCut = {.segment_tokens = 128};

class StoreSegmentsTest : public StoreTest {
 protected:
  // Two questions about one text of 420 tokens, answered by one server: three segments of 128.
  void AskTwo() {
    House house(folder_, kCut);
    for (const auto& question : {first_, second_}) house.Ask(question);
    ASSERT_EQ(house.store().stats().contexts, 2);
    ASSERT_EQ(Files(".seg").size(), 3u);
  }
  void ExpectAnswers(int64_t first_stored, int64_t second_stored) {
    House one(folder_, kCut);
    const House::Got first = one.Ask(first_);
    EXPECT_EQ(first.stats->stored_tokens, first_stored);
    EXPECT_EQ(first.tokens, right_first_);
    House two(folder_, kCut);
    const House::Got second = two.Ask(second_);
    EXPECT_EQ(second.stats->stored_tokens, second_stored);
    EXPECT_EQ(second.tokens, right_second_);
  }
  static std::vector<std::string> Names(const House& house, const std::vector<int32_t>& tokens) {
    return house.Stored(tokens).segments;
  }

  const std::vector<int32_t> text_ = Numbers(420, 1);
  const std::vector<int32_t> first_ = With(text_, {5, 9});
  const std::vector<int32_t> second_ = With(text_, {8, 100, 7});
  const std::vector<int32_t> right_first_ = Right(first_);
  const std::vector<int32_t> right_second_ = Right(second_);
};

TEST_F(StoreSegmentsTest, BeginningsAreStoredOnce) {
  {
    House house(folder_, kCut);
    house.Ask(first_);
    const uint64_t one = Bytes();
    EXPECT_EQ(Files(".seg").size(), 3u);
    EXPECT_EQ(house.store().stats().written_bytes, one);
    house.Ask(second_);
    // The second one adds what is behind three of its three and a half segments.
    EXPECT_LT(Bytes() - one, one / 3);
    EXPECT_EQ(Files(".seg").size(), 3u);
    const ContextStoreStats stats = house.store().stats();
    EXPECT_EQ(stats.contexts, 2);
    EXPECT_EQ(stats.segments, 3);
    EXPECT_EQ(stats.bytes, Bytes());
    EXPECT_EQ(stats.written_bytes, Bytes());
    EXPECT_EQ(Names(house, first_), Names(house, second_));
    EXPECT_GT(house.store().BytesOf(house.Stored(second_)), one * 9 / 10);
  }
  ExpectAnswers(421, 422);
}

TEST_F(StoreSegmentsTest, ALongerContextWritesWhatIsNew) {
  House house(folder_, kCut);
  const House::Got got = house.Ask(first_);
  const uint64_t before = house.store().stats().written_bytes;
  house.Ask(With(With(first_, got.tokens), Numbers(20, 4)));
  EXPECT_LT(house.store().stats().written_bytes - before, before / 2);
  EXPECT_EQ(house.store().stats().contexts, 1);
  EXPECT_EQ(Files(".ctx").size(), 1u);
  EXPECT_EQ(house.store().stats().bytes, Bytes());
}

TEST_F(StoreSegmentsTest, DeletingOneLeavesTheOther) {
  AskTwo();
  House house(folder_, kCut);
  const uint64_t own = house.Stored(first_).bytes;
  const uint64_t before = Bytes();
  ASSERT_TRUE(house.scheduler().DropContext(house.Stored(first_).id()).ok());
  EXPECT_EQ(Bytes(), before - own);
  EXPECT_EQ(house.store().stats().bytes, Bytes());
  EXPECT_EQ(house.Ask(second_).tokens, right_second_);
  ASSERT_TRUE(house.scheduler().DropContext(house.Stored(second_).id()).ok());
  EXPECT_EQ(Files().size(), 0u);
  EXPECT_EQ(house.store().stats().bytes, 0u);
}

TEST_F(StoreSegmentsTest, WhatMakesRoomIsWhatOthersDoNotNeed) {
  AskTwo();
  {
    // As long as the two: but all that it has goes with it, and it is the first that goes.
    House house(folder_, kCut);
    house.Ask(Numbers(423, 50));
  }
  const uint64_t all = Bytes();
  House house(folder_, {.bytes = all + 1000, .segment_tokens = 128});
  ASSERT_EQ(house.store().stats().contexts, 3);
  house.Ask(Numbers(300, 51));
  EXPECT_EQ(house.store().stats().dropped, 1);
  EXPECT_LE(Bytes(), all + 1000);
  EXPECT_EQ(house.store().stats().bytes, Bytes());
  EXPECT_EQ(Files(".seg").size(), 3u + 2u);
  house.Stored(first_);
  house.Stored(second_);
  // And where those make room that have it all in common, it goes with the last of them.
  House small(folder_, {.bytes = 1, .segment_tokens = 128});
  EXPECT_EQ(Files().size(), 0u);
  EXPECT_EQ(small.store().stats().bytes, 0u);
}

TEST_F(StoreSegmentsTest, TheBeginningIsUsedWhereASegmentIsNotWhole) {
  const auto damage = [&](size_t segment, const std::string& how) {
    std::string name;
    std::string other;
    {
      House house(folder_, kCut);
      name = Names(house, first_)[segment];
      if (how == "foreign") house.Ask(Numbers(300, 60));
      if (how == "foreign") other = Names(house, Numbers(300, 60))[0];
    }
    const fs::path file = folder_ / (name + ".seg");
    const auto size = static_cast<std::streamoff>(fs::file_size(file));
    if (how == "missing") fs::remove(file);
    if (how == "torn") fs::resize_file(file, static_cast<uintmax_t>(size) / 2);
    if (how == "damaged") Flip(file, size / 2);
    if (how == "of another version") Flip(file, 8);
    if (how == "foreign") {
      fs::copy_file(folder_ / (other + ".seg"), file, fs::copy_options::overwrite_existing);
    }
  };
  AskTwo();
  for (const std::string how : {"missing", "torn", "damaged", "foreign"}) {
    for (const size_t segment : {size_t{2}, size_t{0}}) {
      SCOPED_TRACE(how + " " + std::to_string(segment));
      damage(segment, how);
      House house(folder_, kCut);
      const House::Got got = house.Ask(first_);
      EXPECT_EQ(got.tokens, right_first_);
      EXPECT_EQ(got.stats->stored_tokens, static_cast<int64_t>(segment) * 128);
      EXPECT_GE(house.store().stats().failed, 1);
      // It was written anew, for the other one, too.
      EXPECT_EQ(house.store().stats().bytes, Bytes());
      house.Ask(second_);
      ExpectAnswers(421, 422);
    }
  }
  damage(1, "of another version");
  House house(folder_, kCut);
  EXPECT_EQ(house.Ask(first_).tokens, right_first_);
}

TEST_F(StoreSegmentsTest, ADamagedEndLeavesTheSegments) {
  AskTwo();
  {
    House house(folder_, kCut);
    Flip(house.Stored(first_).path, static_cast<std::streamoff>(house.Stored(first_).bytes) - 50);
    const House::Got got = house.Ask(first_);
    EXPECT_EQ(got.tokens, right_first_);
    EXPECT_EQ(got.stats->stored_tokens, 384);
    // Asked for by its id, it is not what was asked for.
    Flip(house.Stored(second_).path, static_cast<std::streamoff>(house.Stored(second_).bytes) - 50);
    EXPECT_THAT(house.Load(house.Stored(second_).id()).status().message(), HasSubstr("is damaged"));
    EXPECT_EQ(house.Ask(second_).tokens, right_second_);
  }
  ExpectAnswers(421, 422);
}

// Its tokens are read at the start, when nothing has looked at the checksum yet.
TEST_F(StoreSegmentsTest, DamagedTokensAreFoundByTheNames) {
  AskTwo();
  fs::path file;
  {
    House house(folder_, kCut);
    file = house.Stored(first_).path;
  }
  std::ifstream in(file, std::ios::binary);
  const std::string bytes((std::istreambuf_iterator<char>(in)), {});
  const std::string tokens(reinterpret_cast<const char*>(first_.data()), 100 * sizeof(int32_t));
  Flip(file, static_cast<std::streamoff>(bytes.find(tokens) + 40 * sizeof(int32_t)));
  House house(folder_, kCut);
  EXPECT_EQ(house.store().stats().contexts, 1);
  EXPECT_EQ(house.store().stats().failed, 1);
  EXPECT_FALSE(fs::exists(file));
  EXPECT_EQ(house.Ask(first_).tokens, right_first_);
}

TEST_F(StoreSegmentsTest, NoMoreIsReadThanIsWanted) {
  const std::vector<int32_t> longer = Numbers(900, 70);
  {
    House house(folder_, kCut);
    house.Ask(longer);
  }
  const uint64_t all = Bytes();
  const std::vector<int32_t> part(longer.begin(), longer.begin() + 300);
  const std::vector<int32_t> right = Right(With(part, {9, 9, 9}));
  House house(folder_, kCut);
  const House::Got got = house.Ask(With(part, {9, 9, 9}));
  EXPECT_EQ(got.stats->stored_tokens, 300);
  EXPECT_EQ(got.tokens, right);
  EXPECT_EQ(house.store().stats().read, 1);
  EXPECT_LT(house.store().stats().read_bytes, all / 2);
  const House::Got whole = house.Ask(longer);
  EXPECT_EQ(whole.stats->cached_tokens, 899);
  EXPECT_EQ(whole.tokens, Right(longer));
}

// A server that was killed before it wrote the file of a context leaves its segments.
TEST_F(StoreSegmentsTest, WithoutAContextTheyAreLeftAloneForAWhile) {
  AskTwo();
  for (const fs::path& file : Files(".ctx")) fs::remove(file);
  {
    House house(folder_, kCut);
    EXPECT_EQ(house.store().stats().contexts, 0);
    EXPECT_EQ(Files(".seg").size(), 3u);
    house.Ask(first_);
    EXPECT_LT(house.store().stats().written_bytes, Bytes() / 2);  // they were there
  }
  ExpectAnswers(421, 420);
  for (const fs::path& file : Files(".ctx")) fs::remove(file);
  for (const fs::path& file : Files(".seg")) Age(file);
  std::ofstream(folder_ / ".0123.saving") << "half";
  std::ofstream(folder_ / ".4567.saving") << "half";
  Age(folder_ / ".4567.saving");
  House house(folder_, kCut);
  EXPECT_EQ(Files(), std::vector<fs::path>{folder_ / ".0123.saving"});
}

TEST_F(StoreSegmentsTest, TwoServersOnOneFolder) {
  House one(folder_, kCut);
  one.Ask(first_);
  House two(folder_, kCut);
  ASSERT_EQ(two.store().stats().contexts, 1);
  one.Ask(second_);  // which `two` does not know
  ASSERT_TRUE(two.scheduler().DropContext(two.Stored(first_).id()).ok());
  EXPECT_EQ(Files(".seg").size(), 3u);
  EXPECT_EQ(two.store().stats().contexts, 1);  // it has looked again
  ExpectAnswers(420, 422);
  // What the other one has deleted is a miss.
  House three(folder_, kCut);
  for (const fs::path& file : Files()) fs::remove(file);
  const House::Got got = three.Ask(second_);
  EXPECT_EQ(got.stats->stored_tokens, 0);
  EXPECT_EQ(got.tokens, right_second_);
}

TEST_F(StoreSegmentsTest, WhatAnotherServerHasClaimedStays) {
  House one(folder_, kCut);
  one.Ask(first_);
  const std::vector<std::string> names = Names(one, first_);
  // As it does before it writes the file that names it.
  fs::last_write_time(folder_ / (names[0] + ".seg"), fs::file_time_type::clock::now());
  ASSERT_TRUE(one.scheduler().DropContext(one.Stored(first_).id()).ok());
  EXPECT_EQ(Files(), std::vector<fs::path>{folder_ / (names[0] + ".seg")});
  Age(folder_ / (names[0] + ".seg"));
  House two(folder_, kCut);
  EXPECT_EQ(Files().size(), 0u);
}

TEST_F(StoreSegmentsTest, OfOtherModelsAndSizesAreLeftAlone) {
  AskTwo();
  for (const fs::path& file : Files(".seg")) Age(file);
  const size_t files = Files().size();
  for (const HouseOptions& options : {HouseOptions{.kv_dtype = "f16", .segment_tokens = 128},
                                      HouseOptions{.segment_tokens = 64}}) {
    House other(folder_, options);
    EXPECT_EQ(other.store().stats().contexts, 0);
    EXPECT_EQ(other.store().stats().bytes, 0u);
    EXPECT_EQ(other.Ask(first_).stats->stored_tokens, 0);
    ASSERT_TRUE(other.scheduler().DropContext(other.Id(Where::kStored)).ok());
    EXPECT_EQ(Files().size(), files);
  }
  ExpectAnswers(421, 422);
}

// Rows of a dense prompt are the same under every policy; all others are of the one that made them.
TEST_F(StoreSegmentsTest, RowsOfOtherPoliciesAreNotShared) {
  constexpr HouseOptions kShort = {.segment_tokens = 64};
  const std::vector<int32_t> prompt = Numbers(280, 80);
  House house(folder_, kShort);
  const House::Got sparse = house.Ask(prompt, kSparse, 150);
  ASSERT_EQ(sparse.tokens.size(), 150u);
  // The same tokens, but for the last ones all of them of a prompt.
  std::vector<int32_t> all =
      With(prompt, std::vector<int32_t>(sparse.tokens.begin(), sparse.tokens.begin() + 145));
  const auto of_sparse = Names(house, all);
  all.back() = all.back() % 100 + 3;
  House other(folder_, kShort);
  const House::Got dense = other.Ask(all);
  EXPECT_EQ(dense.stats->stored_tokens, 280);
  EXPECT_EQ(dense.tokens, Right(all));
  const auto of_dense = Names(other, all);
  ASSERT_EQ(of_sparse.size(), 6u);  // 384 of 429 tokens; the prompt ends in the fifth
  ASSERT_EQ(of_dense.size(), 6u);
  for (size_t segment = 0; segment < 6; ++segment) {
    EXPECT_EQ(of_sparse[segment] == of_dense[segment], segment < 4) << segment;
  }
  EXPECT_EQ(Files(".seg").size(), 8u);
  // Of another policy's rows it has those of the prompt alone.
  PolicyOptions other_budget = kSparse;
  other_budget.settings.back() = {"budget", "32"};
  House third(folder_, kShort);
  const House::Got again = third.Ask(all, other_budget);
  EXPECT_GE(again.stats->stored_tokens, 280);
  EXPECT_EQ(again.tokens, Right(all, {}, other_budget));
}

TEST_F(StoreSegmentsTest, NamesTellContextsApart) {
  House house(folder_, kCut);
  const BankConfig& bank = house.core().bank->config();
  const SegmentShape shape = ShapeOf(bank, ModelMarks(house.core()), 64);
  const std::vector<int32_t> tokens = Numbers(256, 1);
  const SequenceImage image = WholeImage(bank, 256);
  const auto names = [&](int64_t dense, const std::string& made_by) {
    return SegmentNames(shape, bank, image, tokens, dense, made_by);
  };
  const auto dense = names(256, "a");
  EXPECT_EQ(dense.size(), 4u);
  EXPECT_EQ(dense, names(256, "b"));
  EXPECT_EQ(names(128, "a")[1], dense[1]);
  EXPECT_NE(names(128, "a")[2], dense[2]);
  EXPECT_NE(names(128, "a")[2], names(128, "b")[2]);
  EXPECT_NE(names(130, "a")[2], names(131, "a")[2]);
  EXPECT_NE(names(130, "a")[3], names(131, "a")[3]);  // by those before them
  EXPECT_EQ(SegmentNames(shape, bank, image, std::span(tokens).first(255), 255, "").size(), 3u);
  std::vector<int32_t> others = tokens;
  others[0] ^= 1;
  EXPECT_NE(SegmentNames(shape, bank, image, others, 256, "")[3], dense[3]);
  SequenceImage holes = image;
  holes.tables[0].held = {{0, 1}, {2, 4}};
  EXPECT_TRUE(SegmentNames(shape, bank, holes, tokens, 256, "").empty());
  // As many tokens as take 64 MiB, 256 to 1,024 of them.
  EXPECT_EQ(ShapeOf(bank, {}, 0).tokens, 1024);
  EXPECT_EQ(ShapeOf(bank, {}, 100).tokens, 128);  // whole blocks
}

TEST_F(StoreSegmentsTest, WhatFilesSayOfThem) {
  const SegmentList list{.tokens = 64, .names = {std::string(64, 'a'), std::string(64, '0')}};
  const auto parsed = ParseSegments(WithSegments("{\"model\": 1}", list));
  ASSERT_TRUE(parsed.ok());
  EXPECT_EQ(*parsed, list);
  EXPECT_EQ(*ParseSegments("{\"segment_tokens\": 0, \"segments\": []}"), SegmentList());
  for (const char* bad : {"{}", "[]", "{\"segment_tokens\": 1.5, \"segments\": []}",
                          "{\"segment_tokens\": 18446744073709551615, \"segments\": []}",
                          "{\"segment_tokens\": -1, \"segments\": []}",
                          "{\"segment_tokens\": 64, \"segments\": [\"../x\"]}",
                          "{\"segment_tokens\": 64, \"segments\": [7]}"}) {
    EXPECT_EQ(ParseSegments(bad).status().code(), StatusCode::kCorrupt) << bad;
  }
  const std::string name = "\"" + std::string(64, 'a') + "\"";
  EXPECT_FALSE(ParseSegments("{\"segment_tokens\": 0, \"segments\": [" + name + "]}").ok());
}

// Layers with a sliding window have rows of the last tokens alone, which lie in the context's file.
TEST_F(StoreSegmentsTest, OfModelsWithSlidingWindows) {
  constexpr HouseOptions kWindows = {.model = "tests/golden/models/gemma3", .segment_tokens = 128};
  const std::vector<int32_t> right_first = Right(first_, kWindows);
  const std::vector<int32_t> right_second = Right(second_, kWindows);
  {
    House house(folder_, kWindows);
    house.Ask(first_);
    house.Ask(second_);
    EXPECT_EQ(Files(".ctx").size(), 2u);
    EXPECT_EQ(Files(".seg").size(), 3u);
  }
  House one(folder_, kWindows);
  const House::Got first = one.Ask(With(first_, {}));
  EXPECT_GT(first.stats->stored_tokens, 400);
  EXPECT_EQ(first.tokens, right_first);
  House two(folder_, kWindows);
  const House::Got second = two.Ask(second_);
  EXPECT_GT(second.stats->stored_tokens, 400);
  EXPECT_EQ(second.tokens, right_second);
  // The segments alone are of no use.
  Flip(two.Stored(first_).path, static_cast<std::streamoff>(two.Stored(first_).bytes) - 50);
  House three(folder_, kWindows);
  const House::Got got = three.Ask(first_);
  EXPECT_EQ(got.stats->stored_tokens, 0);
  EXPECT_EQ(got.tokens, right_first);
}

}  // namespace
}  // namespace omnikv::store_segments_test
