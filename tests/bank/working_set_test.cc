// The reference of WorkingSetArgs against a model whose slots say when and how often they were
// read.
#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "backend/ref/ref_backend.h"

namespace omnikv::working_set_test {
namespace {

constexpr int32_t kContext = 400;

// Tokens that a step selects, ascending, the last `recent` of them as a range; and a wider list.
struct Chosen {
  std::vector<int32_t> tokens;
  int32_t recent = 0;
  int32_t kv_len = 0;
  std::vector<int32_t> wider = {};
  bool ahead = false;
};

class Op {
 public:
  explicit Op(int32_t n_slots)
      : slot_of_(kContext, -1),
        owner_(static_cast<size_t>(n_slots), -1),
        used_(static_cast<size_t>(n_slots), 0) {}

  void Step(const Chosen& chosen) {
    const auto n = static_cast<int32_t>(chosen.tokens.size());
    const SeqMeta seq{.q_len = 1, .kv_len = chosen.kv_len};
    const int32_t count = n - chosen.recent;
    const int32_t bounds[2] = {chosen.kv_len - chosen.recent, chosen.kv_len};
    const auto wider_count = static_cast<int32_t>(chosen.wider.size());
    const int32_t block_table = 0;
    std::vector<int32_t> slots(kContext), miss_slot(kContext);
    missed.resize(kContext);
    int32_t own, own_row, n_own, n_miss, span[2];
    SeqMeta slot_seq;
    backend_->Enqueue(WorkingSetArgs{.seqs = &seq,
                                     .index = chosen.tokens.data(),
                                     .count = &count,
                                     .bounds = bounds,
                                     .block_table = &block_table,
                                     .block_tokens = kContext,
                                     .wider = chosen.wider.data(),
                                     .wider_count = &wider_count,
                                     .capacity = kContext,
                                     .n_slots = static_cast<int32_t>(owner_.size()),
                                     .max_tokens = kContext,
                                     .ahead = chosen.ahead,
                                     .slot_of = slot_of_.data(),
                                     .owner = owner_.data(),
                                     .used = used_.data(),
                                     .clock = &clock_,
                                     .slots = slots.data(),
                                     .miss_row = missed.data(),
                                     .miss_slot = miss_slot.data(),
                                     .n_miss = &n_miss,
                                     .own = &own,
                                     .own_row = &own_row,
                                     .n_own = &n_own,
                                     .span = span,
                                     .slot_seqs = &slot_seq,
                                     .counters = counters});
    missed.resize(static_cast<size_t>(n_miss));
    for (int32_t i = 0; i < n; ++i) {
      ASSERT_EQ(owner_[static_cast<size_t>(slots[static_cast<size_t>(i)])],
                chosen.tokens[static_cast<size_t>(i)]);
    }
  }
  const std::vector<int32_t>& owner() const { return owner_; }  // [slots]: tokens; -1: none

  std::vector<int32_t> missed;  // rows of the last step: tokens
  uint64_t counters[2] = {0, 0};

 private:
  std::unique_ptr<Backend> backend_ = MakeRefBackend();
  std::vector<int32_t> slot_of_, owner_;
  std::vector<uint32_t> used_;
  uint32_t clock_ = 0;
};

// Each slot with all that its age is made of.
class Model {
 public:
  explicit Model(int32_t n_slots) : slots_(static_cast<size_t>(n_slots)) {}

  void Step(const Chosen& chosen) {
    ++step_;
    const std::set<int32_t> wanted(chosen.tokens.begin(), chosen.tokens.end());
    const std::set<int32_t> wider(chosen.wider.begin(), chosen.wider.end());
    std::set<int32_t> present;
    std::vector<Slot*> order;  // the first is the next to go
    for (Slot& slot : slots_) {
      if (wider.count(slot.token) > 0) slot.read = step_ - 0.5;
      if (wanted.count(slot.token) > 0) {
        present.insert(slot.token);
        slot.read = step_;
        slot.found = std::min(slot.found + 1, 8);
      } else {
        order.push_back(&slot);
      }
    }
    std::stable_sort(order.begin(), order.end(), [](const Slot* a, const Slot* b) {
      const auto worth = [](const Slot& s) { return s.token < 0 ? -1 : s.read + 2 * s.found; };
      return worth(*a) < worth(*b);
    });
    std::vector<int32_t> absent;
    std::set_difference(wanted.begin(), wanted.end(), present.begin(), present.end(),
                        std::back_inserter(absent));
    order.resize(absent.size());
    std::sort(order.begin(), order.end());
    for (size_t i = 0; i < absent.size(); ++i) {
      *order[i] = {.token = absent[i], .read = static_cast<double>(step_)};
    }
    const int32_t own = chosen.kv_len - 1;
    missed = absent;
    missed.erase(std::remove(missed.begin(), missed.end(), own), missed.end());
    for (Slot& slot : slots_) {
      if (slot.token == own && wanted.count(own) == 0) slot = {};
    }
  }
  std::vector<int32_t> owner() const {
    std::vector<int32_t> tokens;
    for (const Slot& s : slots_) tokens.push_back(s.token);
    return tokens;
  }

  std::vector<int32_t> missed;

 private:
  struct Slot {
    int32_t token = -1;
    double read = 0;  // in which step, last
    int32_t found = 0;
  };

  std::vector<Slot> slots_;
  int32_t step_ = 0;
};

// Steps whose tokens have scores that drift: what ranks below a choice is likely to come.
class Text {
 public:
  explicit Text(uint32_t seed) : random_(seed) {
    for (int32_t t = 0; t < kContext; ++t) scores_.push_back(3 * noise_(random_));
  }
  Chosen Next(int32_t listed, int32_t below, int32_t kv_len, int32_t recent) {
    for (float& score : scores_) score += 0.3f * noise_(random_);
    std::vector<int32_t> order(static_cast<size_t>(kv_len - recent));
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
      return scores_[static_cast<size_t>(a)] > scores_[static_cast<size_t>(b)];
    });
    Chosen chosen{{order.begin(), order.begin() + listed}, recent, kv_len};
    if (below > 0) chosen.wider.assign(order.begin(), order.begin() + listed + below);
    std::sort(chosen.tokens.begin(), chosen.tokens.end());
    std::sort(chosen.wider.begin(), chosen.wider.end());
    for (int32_t t = kv_len - recent; t < kv_len; ++t) chosen.tokens.push_back(t);
    return chosen;
  }

 private:
  std::mt19937 random_;
  std::normal_distribution<float> noise_;
  std::vector<float> scores_;
};

TEST(WorkingSet, GivesUpWhatWasReadLongestAgoAndSeldomFound) {
  constexpr int32_t kSteps = 250;
  constexpr int32_t kListed = 20;
  constexpr int32_t kRecent = 4;
  for (const int32_t n_slots : {24, 25, 36, 48, 120, kContext}) {
    uint64_t missed_without = 0;
    for (const int32_t below : {0, 10}) {
      SCOPED_TRACE(testing::Message() << n_slots << " slots, " << below << " below");
      Op op(n_slots);
      Model model(n_slots);
      Text text(7);
      for (int32_t step = 0; step < kSteps; ++step) {
        // Every seventh step makes the last row anew, and every other of them selects few tokens,
        // hardly ever that one.
        const int32_t kv_len = 100 + step - step % 7 / 6;
        const bool few = step % 14 == 13;
        const Chosen chosen = text.Next(few ? 3 : kListed, below, kv_len, few ? 0 : kRecent);
        op.Step(chosen);
        model.Step(chosen);
        ASSERT_EQ(op.owner(), model.owner()) << "step " << step;
        ASSERT_EQ(op.missed, model.missed) << "step " << step;
      }
      EXPECT_GT(op.counters[1], 0u);
      EXPECT_LT(op.counters[1], op.counters[0]);
      // Between no choice of what goes and nothing that must.
      const bool some_go = n_slots == 36 || n_slots == 48;
      if (below == 0) missed_without = op.counters[1];
      EXPECT_TRUE(below == 0 || !some_go || op.counters[1] < missed_without);
    }
  }
}

// Rows that come ahead are as old as tokens that rank below a choice, and what is there already
// stays as old as it was.
TEST(WorkingSet, RowsThatComeAheadChangeNoAge) {
  Op op(3);
  op.Step({{5}, 0, 100});
  op.Step({.tokens = {5, 6}, .kv_len = 100, .ahead = true});
  EXPECT_EQ(op.missed, std::vector<int32_t>{6});
  op.Step({{7}, 0, 101});
  op.Step({{8}, 0, 102});
  EXPECT_EQ(op.owner(), (std::vector<int32_t>{5, 8, 7}));
  op.Step({{9}, 0, 103});
  EXPECT_EQ(op.owner(), (std::vector<int32_t>{9, 8, 7}));
}

// Two steps for each time, which end when nothing finds it any more.
TEST(WorkingSet, WhatWasFoundOftenStaysLonger) {
  Op op(3);
  for (int32_t step = 0; step < 3; ++step) op.Step({{5}, 0, 100});  // found twice: until step 7
  int32_t next = 6;
  for (const std::vector<int32_t>& owner : std::vector<std::vector<int32_t>>{
           {5, 6, -1}, {5, 6, 7}, {5, 8, 7}, {5, 8, 9}, {5, 10, 9}, {11, 10, 9}}) {
    op.Step({{next++}, 0, 100});
    EXPECT_EQ(op.owner(), owner);
  }
}

// Ages end at 511 steps, and slots of no token still go before all.
TEST(WorkingSet, SlotsOfLongAgoAreAlike) {
  for (const auto& [steps, gone] : {std::pair<int32_t, int32_t>{490, 6}, {520, 5}}) {
    Op op(3);
    op.Step({{5}, 0, 100});
    op.Step({{6}, 0, 101});
    op.Step({{5}, 0, 102});
    op.Step({{7}, 0, 103});  // in the last slot
    for (int32_t step = 0; step < steps; ++step) op.Step({{7}, 0, 104});
    ASSERT_EQ(op.owner(), (std::vector<int32_t>{5, 6, 7}));
    op.Step({{8}, 0, 104});
    const std::vector<int32_t> left = gone == 6 ? std::vector{5, 8, 7} : std::vector{8, 6, 7};
    ASSERT_EQ(op.owner(), left) << steps;
  }
  Op op(3);
  op.Step({{5, 6}, 0, 100});
  for (int32_t step = 0; step < 520; ++step) op.Step({{6}, 0, 101});
  op.Step({{8}, 0, 104});
  EXPECT_EQ(op.owner(), (std::vector<int32_t>{5, 6, 8}));
}

}  // namespace
}  // namespace omnikv::working_set_test
