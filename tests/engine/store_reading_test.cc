// Contexts that come from the store while the engine goes on with others.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <deque>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

#include "store_house.h"

namespace omnikv::store_reading_test {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

// What a turn can take from the store in these tests: a context comes in many of them.
constexpr DiskReaderOptions kSlow = {.piece = 4096, .pieces = 2, .on_their_way = 2};
constexpr size_t kPerTurn = 2 * 4096;

class StoreReadingTest : public testing::Test {
 protected:
  struct Asked {
    Scheduler::Id id = 0;
    std::vector<int32_t> tokens;
    std::optional<Result<RequestEnd>> end;
    int64_t stored() const { return (*end)->stats.stored_tokens; }
  };

  StoreReadingTest() {
    // Beside the program, which is on a disk more often than /tmp is.
    const fs::path here = fs::read_symlink("/proc/self/exe").parent_path();
    std::string name = (here / "store_reading_XXXXXX").string();
    folder_ = mkdtemp(name.data());
    auto engine = Engine::Load({.model = TestData("tests/golden/policy_model"),
                                .device = "cpu",
                                .threads = 2,
                                .context = 1024,
                                .kv_dtype = "f32",
                                .precision = "full",
                                .max_sessions = 3,
                                .kv_tokens = int64_t{30} * 64,
                                .kept_contexts = 2});
    EXPECT_TRUE(engine.ok()) << engine.status().message();
    engine_ = std::move(*engine);
    // What the tests look for, and the answers that are right.
    Open({});
    for (size_t seed : {1, 2}) right_.push_back(Ask(Numbers(500, seed)).tokens);
    store_->Flush();
    for (const auto& file : fs::directory_iterator(folder_)) bytes_ = file.file_size();
  }
  ~StoreReadingTest() override {
    Close();
    fs::remove_all(folder_);
  }

  // A scheduler that has nothing in memory, with what is in the folder.
  void Open(const DiskReaderOptions& reading, SchedulerOptions options = {.seats = 3}) {
    Close();
    store_ = std::move(*ContextStore::Open(
        CoreOf(*engine_),
        {.folder = folder_.string(), .bytes = uint64_t{1} << 30, .reading = reading}));
    scheduler_ = std::move(*Scheduler::Create(CoreOf(*engine_), options, store_.get()));
  }
  void Close() {
    scheduler_.reset();
    store_.reset();
  }
  Asked& Submit(std::vector<int32_t> prompt, int64_t max_tokens = 8, int32_t priority = 0) {
    Asked& asked = asked_.emplace_back();
    Request request{.prompt = std::move(prompt),
                    .policy = {.name = "full"},
                    .generate = {.max_tokens = max_tokens, .ignore_eos = true},
                    .priority = priority};
    request.on_piece = [&asked](const AnswerPiece& p) { asked.tokens.push_back(p.token); };
    request.on_end = [&asked](const Result<RequestEnd>& end) { asked.end = end; };
    asked.id = scheduler_->Submit(std::move(request));
    return asked;
  }
  void Drain() {
    while (scheduler_->Turn()) {
    }
  }
  Asked& Ask(std::vector<int32_t> prompt) {
    Asked& asked = Submit(std::move(prompt));
    Drain();
    return asked;
  }
  // Until some of the context is in the bank, and by far not all of it.
  void Begin() {
    const int64_t before = scheduler_->stats().blocks_used;
    while (scheduler_->stats().blocks_used < before + 500 / 64) ASSERT_TRUE(scheduler_->Turn());
  }
  fs::path FileOf(const std::vector<int32_t>& prompt) const {
    fs::path path;
    store_->ForEach([&](const StoredContext& c) {
      if (CommonTokens(c.tokens, prompt) == std::ssize(prompt)) path = c.path;
    });
    return path;
  }
  void ExpectAnswer(const Asked& asked, size_t which) {
    ASSERT_TRUE(asked.end);
    ASSERT_TRUE(asked.end->ok()) << asked.end->status().message();
    EXPECT_EQ(asked.tokens, right_[which]);
  }

  fs::path folder_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<ContextStore> store_;
  std::unique_ptr<Scheduler> scheduler_;
  std::deque<Asked> asked_;
  std::vector<std::vector<int32_t>> right_;  // answers
  size_t bytes_ = 0;                         // of a file
};

TEST_F(StoreReadingTest, ByIoUringAndByPread) {
  for (const bool direct : {true, false}) {
    for (DiskReaderOptions reading : {DiskReaderOptions(), kSlow}) {
      reading.direct = direct;
      Open(reading);
      const Asked& asked = Ask(Numbers(500, 1));
      ExpectAnswer(asked, 0);
      EXPECT_EQ(asked.stored(), 499);
      const ContextStoreStats stats = store_->stats();
      EXPECT_EQ(stats.read, 1);
      EXPECT_EQ(stats.read_bytes, bytes_);
      EXPECT_LE(stats.read_direct, direct ? 1 : 0);
      if (direct && stats.read_direct == 0) std::puts("note: io_uring or O_DIRECT is refused here");
    }
  }
}

TEST_F(StoreReadingTest, OthersDecodeMeanwhile) {
  Open(kSlow);
  Asked& other = Submit(Numbers(20, 9), 1000);
  while (other.tokens.empty()) ASSERT_TRUE(scheduler_->Turn());
  const size_t before = other.tokens.size();
  Asked& asked = Submit(Numbers(500, 1));
  while (asked.tokens.empty()) ASSERT_TRUE(scheduler_->Turn());
  // A step in each turn.
  EXPECT_GE(other.tokens.size() - before, bytes_ / kPerTurn);
  Drain();
  ExpectAnswer(asked, 0);
  EXPECT_EQ(asked.stored(), 499);
  EXPECT_EQ(other.tokens.size(), 1000u);
}

TEST_F(StoreReadingTest, ItsSeatIsKept) {
  Open(kSlow, {.seats = 2});
  Asked& running = Submit(Numbers(20, 9), 900);
  while (running.tokens.empty()) ASSERT_TRUE(scheduler_->Turn());
  Asked& asked = Submit(Numbers(500, 1));
  Asked& later = Submit(Numbers(30, 8));
  while (asked.tokens.empty()) {
    ASSERT_TRUE(scheduler_->Turn());
    ASSERT_TRUE(later.tokens.empty() || running.end || !asked.tokens.empty());
  }
  Drain();
  ExpectAnswer(asked, 0);
  EXPECT_EQ(asked.stored(), 499);
  // With one more seat, those behind it do not wait for its rows.
  Open(kSlow, {.seats = 2});
  Asked& again = Submit(Numbers(500, 1));
  Asked& behind = Submit(Numbers(30, 8));
  while (!behind.end) ASSERT_TRUE(scheduler_->Turn());
  EXPECT_TRUE(again.tokens.empty());
  Drain();
  EXPECT_EQ(again.stored(), 499);
}

TEST_F(StoreReadingTest, SeveralRequestsForTheStore) {
  Open(kSlow);
  Asked& one = Submit(Numbers(500, 1));
  Asked& same = Submit(Numbers(500, 1));
  Asked& other = Submit(Numbers(500, 2));
  Drain();
  ExpectAnswer(one, 0);
  ExpectAnswer(same, 0);
  ExpectAnswer(other, 1);
  EXPECT_EQ(one.stored(), 499);
  EXPECT_EQ((*same.end)->stats.cached_tokens, 499);
  EXPECT_EQ(other.stored(), 499);
  EXPECT_EQ(store_->stats().read, 2);
}

TEST_F(StoreReadingTest, IsCancelled) {
  Open(kSlow);
  scheduler_->Turn();
  const int64_t free = scheduler_->stats().blocks_used;
  Asked& asked = Submit(Numbers(500, 1));
  Asked& same = Submit(Numbers(500, 1));
  Begin();
  EXPECT_FALSE(asked.end);
  scheduler_->Cancel(asked.id);
  scheduler_->Cancel(same.id);
  Drain();
  for (const Asked* a : {&asked, &same}) {
    ASSERT_TRUE(a->end && a->end->ok());
    EXPECT_EQ((*a->end)->reason, FinishReason::kCancelled);
    EXPECT_TRUE(a->tokens.empty());
  }
  EXPECT_EQ(scheduler_->stats().blocks_used, free);
  EXPECT_EQ(store_->stats().contexts, 2);
  // One that waited for the same rows has them read anew.
  Asked& first = Submit(Numbers(500, 1));
  Asked& second = Submit(Numbers(500, 1));
  Begin();
  scheduler_->Cancel(first.id);
  Drain();
  ExpectAnswer(second, 0);
  EXPECT_EQ(second.stored(), 499);
}

TEST_F(StoreReadingTest, EndsWithItsScheduler) {
  Open(kSlow);
  Asked& asked = Submit(Numbers(500, 1));
  std::optional<Result<std::string>> loaded;
  scheduler_->LoadContext(store_->Find(FileOf(Numbers(500, 2)).stem().string())->id(),
                          [&](const Result<std::string>& of) { loaded = of; });
  Begin();
  Close();
  ASSERT_TRUE(asked.end && asked.end->ok());
  EXPECT_EQ((*asked.end)->reason, FinishReason::kCancelled);
  ASSERT_TRUE(loaded);
  EXPECT_THAT(loaded->status().message(), HasSubstr("the engine is stopping"));
  Open(kSlow);
  EXPECT_EQ(store_->stats().contexts, 2);
  Asked& again = Submit(Numbers(500, 1));
  Begin();
  scheduler_->Stop(/*drain=*/true);
  scheduler_->Run();
  ExpectAnswer(again, 0);
  EXPECT_EQ(again.stored(), 499);
}

TEST_F(StoreReadingTest, IsDeletedMeanwhile) {
  Open(kSlow);
  const fs::path file = FileOf(Numbers(500, 1));
  Asked& asked = Submit(Numbers(500, 1));
  Begin();
  EXPECT_TRUE(scheduler_->DropContext(file.stem().string()).ok());
  EXPECT_FALSE(fs::exists(file));
  Drain();
  ExpectAnswer(asked, 0);
  EXPECT_EQ(asked.stored(), 0);
  store_->Flush();
  // Under its name by another process: it is read to its end.
  Open(kSlow);
  Asked& other = Submit(Numbers(500, 2));
  Begin();
  fs::remove(FileOf(Numbers(500, 2)));
  Drain();
  ExpectAnswer(other, 1);
  EXPECT_EQ(other.stored(), 499);
}

TEST_F(StoreReadingTest, DamageIsFoundBeforeItsRowsAreUsed) {
  for (const bool torn : {true, false}) {
    Open(kSlow);
    const fs::path file = FileOf(Numbers(500, 1));
    if (!torn) {  // in the middle of the rows
      std::fstream bytes(file, std::ios::in | std::ios::out | std::ios::binary);
      bytes.seekp(static_cast<std::streamoff>(bytes_ / 2));
      bytes.put('?').put('!');
    }
    Asked& other = Submit(Numbers(20, 9), 1000);
    Asked& asked = Submit(Numbers(500, 1));
    while (scheduler_->stats().blocks_used < 500 / 64) ASSERT_TRUE(scheduler_->Turn());
    if (torn) fs::resize_file(file, bytes_ / 2);
    while (!asked.end && scheduler_->Turn()) {
    }
    ExpectAnswer(asked, 0);
    EXPECT_EQ(asked.stored(), 0);
    EXPECT_EQ((*asked.end)->stats.cached_tokens, 0);
    EXPECT_EQ(store_->stats().failed, 1);
    store_->Flush();  // of the request, which computed it anew
    Drain();
    EXPECT_EQ(other.tokens.size(), 1000u);
    Open({});
    const Asked& again = Ask(Numbers(500, 1));
    ExpectAnswer(again, 0);
    EXPECT_EQ(again.stored(), 499);
  }
}

TEST_F(StoreReadingTest, WhatDoesNotFitIsNotRead) {
  // Of the tokens that the engine has room for in all, others have most.
  Open(kSlow);
  Asked& a = Submit(Numbers(200, 11), 800);
  Asked& b = Submit(Numbers(200, 12), 800);
  while (a.tokens.empty() || b.tokens.empty()) ASSERT_TRUE(scheduler_->Turn());
  std::vector<int32_t> longer = Numbers(500, 1);
  longer.insert(longer.end(), right_[0].begin(), right_[0].begin() + 4);
  Asked& asked = Submit(longer, 400);
  Drain();
  for (const Asked* of : {&a, &b, &asked}) {
    ASSERT_TRUE(of->end && of->end->ok());
  }
  EXPECT_EQ(asked.tokens.size(), 400u);
  EXPECT_EQ(asked.tokens[0], right_[0][4]);
}

TEST_F(StoreReadingTest, ItsRequestIsPromisedMemory) {
  // One that comes behind it gets no blocks that it will need, so that it does not wait for that.
  Open(kSlow);
  Asked& asked = Submit(Numbers(500, 1), 500);
  Begin();
  Asked& large = Submit(Numbers(500, 5), 520);
  while (asked.tokens.empty()) {
    ASSERT_TRUE(scheduler_->Turn());
    ASSERT_TRUE(large.tokens.empty() || !asked.tokens.empty());
  }
  Drain();
  ASSERT_TRUE(asked.end && asked.end->ok() && large.end && large.end->ok());
  EXPECT_EQ(asked.stored(), 499);
  EXPECT_EQ(large.tokens.size(), 520u);
}

}  // namespace
}  // namespace omnikv::store_reading_test
