// The references of WorkingSetArgs and AverageScoresArgs against a model whose slots say when and
// how often they were read, or what their tokens scored.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
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

// Tokens that a step selects, ascending, the last `recent` of them as a range; and what all before
// these scored, if slots go by that.
struct Chosen {
  std::vector<int32_t> tokens;
  int32_t recent = 0;
  int32_t kv_len = 0;
  std::vector<float> scores = {};
  int32_t max_ahead = 0;  // with scores
};

class Op {
 public:
  explicit Op(int32_t n_slots)
      : slot_of_(kContext, -1),
        owner_(static_cast<size_t>(n_slots), -1),
        used_(static_cast<size_t>(n_slots), 0),
        average_(kContext, 0) {}

  void Step(const Chosen& chosen) {
    const auto n = static_cast<int32_t>(chosen.tokens.size());
    const SeqMeta seq{.q_len = 1, .kv_len = chosen.kv_len};
    const int32_t count = n - chosen.recent;
    const int32_t bounds[2] = {chosen.kv_len - chosen.recent, chosen.kv_len};
    const int32_t block_table = 0;
    const bool scored = !chosen.scores.empty();
    if (scored) Average(chosen, seq);
    std::vector<int32_t> slots(kContext), miss_slot(kContext);
    missed.resize(kContext);
    int32_t own, own_row, n_own, n_miss, n_ahead, span[2];
    std::vector<int32_t> ahead_row(kContext), ahead_slot(kContext);
    SeqMeta slot_seq;
    backend_->Enqueue(WorkingSetArgs{.seqs = &seq,
                                     .index = chosen.tokens.data(),
                                     .count = &count,
                                     .bounds = bounds,
                                     .block_table = &block_table,
                                     .block_tokens = kContext,
                                     .capacity = kContext,
                                     .n_slots = static_cast<int32_t>(owner_.size()),
                                     .max_tokens = kContext,
                                     .ahead = scored ? ahead.data() : nullptr,
                                     .max_ahead = chosen.max_ahead,
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
                                     .ahead_row = ahead_row.data(),
                                     .ahead_slot = ahead_slot.data(),
                                     .n_ahead = &n_ahead,
                                     .counters = counters});
    missed.resize(static_cast<size_t>(n_miss));
    for (int32_t i = 0; i < n; ++i) {
      ASSERT_EQ(owner_[static_cast<size_t>(slots[static_cast<size_t>(i)])],
                chosen.tokens[static_cast<size_t>(i)]);
    }
    if (!scored) return;
    std::vector<int32_t> came = ahead;
    came.erase(std::remove(came.begin(), came.end(), -1), came.end());
    ASSERT_EQ(static_cast<size_t>(n_ahead), came.size());
    for (size_t i = 0; i < came.size(); ++i) {
      EXPECT_EQ(ahead_row[i], came[i]);
      EXPECT_EQ(owner_[static_cast<size_t>(ahead_slot[i])], came[i]);
    }
  }
  const std::vector<int32_t>& owner() const { return owner_; }  // [slots]: tokens; -1: none

  std::vector<int32_t> missed;  // rows of the last step: tokens
  std::vector<int32_t> ahead;   // tokens; -1: none
  uint64_t counters[3] = {0, 0, 0};

 private:
  void Average(const Chosen& chosen, const SeqMeta& seq) {
    const auto n_candidates = static_cast<int32_t>(chosen.scores.size());
    const auto count = static_cast<int32_t>(chosen.tokens.size()) - chosen.recent;
    ahead.assign(static_cast<size_t>(chosen.max_ahead), -7);
    backend_->Enqueue(AverageScoresArgs{.seqs = &seq,
                                        .scores = chosen.scores.data(),
                                        .n_candidates = &n_candidates,
                                        .index = chosen.tokens.data(),
                                        .count = &count,
                                        .stride = kContext,
                                        .max_ahead = chosen.max_ahead,
                                        .n_slots = static_cast<int32_t>(owner_.size()),
                                        .max_tokens = kContext,
                                        .slot_of = slot_of_.data(),
                                        .clock = &clock_,
                                        .average = average_.data(),
                                        .used = used_.data(),
                                        .ahead = ahead.data()});
  }

  std::unique_ptr<Backend> backend_ = MakeRefBackend();
  std::vector<int32_t> slot_of_, owner_;
  std::vector<uint32_t> used_, average_;
  uint32_t clock_ = 0;
};

// Each slot with all that its age is made of.
class Model {
 public:
  explicit Model(int32_t n_slots) : slots_(static_cast<size_t>(n_slots)) {}

  void Step(const Chosen& chosen) {
    ++step_;
    const std::set<int32_t> wanted(chosen.tokens.begin(), chosen.tokens.end());
    const bool scored = !chosen.scores.empty();
    for (int32_t t = 0; scored && t < chosen.kv_len; ++t) Score(t, chosen.scores);
    std::set<int32_t> present;
    std::vector<Slot*> order;  // the first is the next to go
    for (Slot& slot : slots_) {
      if (wanted.count(slot.token) > 0) {
        present.insert(slot.token);
        slot.read = step_;
        slot.found = std::min(slot.found + 1, 8);
      } else {
        order.push_back(&slot);
      }
    }
    std::stable_sort(order.begin(), order.end(), [&](const Slot* a, const Slot* b) {
      const auto worth = [&](const Slot& s) {
        if (s.token < 0) return -1.0;
        return scored ? Sixteenths(s.token) : s.read + 2 * s.found;
      };
      return worth(*a) < worth(*b);
    });
    std::vector<int32_t> absent;
    std::set_difference(wanted.begin(), wanted.end(), present.begin(), present.end(),
                        std::back_inserter(absent));
    missed = absent;
    const int32_t own = chosen.kv_len - 1;
    ahead.assign(static_cast<size_t>(chosen.max_ahead), -1);
    for (int32_t t = 0; t < std::min(own, chosen.kv_len - chosen.recent); ++t) {
      const auto has = [&](const Slot& slot) { return slot.token == t; };
      if (chosen.max_ahead == 0 || wanted.count(t) > 0) continue;
      if (std::any_of(slots_.begin(), slots_.end(), has)) continue;
      int32_t& best = ahead[static_cast<size_t>(t / 32 % chosen.max_ahead)];
      if (best < 0 || Average(t) > Average(best)) best = t;
    }
    std::copy_if(ahead.begin(), ahead.end(), std::back_inserter(absent),
                 [](int32_t t) { return t >= 0; });
    ASSERT_LE(absent.size(), order.size());
    order.resize(absent.size());
    std::sort(order.begin(), order.end());
    for (size_t i = 0; i < absent.size(); ++i) {
      *order[i] = {.token = absent[i], .read = static_cast<double>(step_)};
    }
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

  std::vector<int32_t> missed, ahead;

 private:
  struct Slot {
    int32_t token = -1;
    double read = 0;  // in which step, last
    int32_t found = 0;
  };

  // Seven parts of what was, and one of this step.
  void Score(int32_t t, const std::vector<float>& scores) {
    const auto i = static_cast<size_t>(t);
    const double bits = std::bit_cast<uint32_t>(i < scores.size() ? scores[i] : 1.0f);
    double& average = Average(t);
    average = average < 0 ? bits : average + std::floor((bits - average) / 8);
  }
  double& Average(int32_t t) { return averages_[static_cast<size_t>(t)]; }
  // The average's logarithm, a straight line between powers of two: 0 of those below 2^-64.
  double Sixteenths(int32_t t) {
    const double one = std::bit_cast<uint32_t>(1.0f);
    const double below = (one - Average(t)) / (1 << 19);
    return std::max(0.0, 16.0 * 64 - std::floor(below));
  }

  std::vector<Slot> slots_;
  std::vector<double> averages_ = std::vector<double>(kContext, -1);
  int32_t step_ = 0;
};

// Steps whose tokens have scores that drift: what scored high is likely to come.
class Text {
 public:
  explicit Text(uint32_t seed) : random_(seed) {
    for (int32_t t = 0; t < kContext; ++t) scores_.push_back(3 * noise_(random_));
  }
  Chosen Next(int32_t listed, bool scored, int32_t kv_len, int32_t recent, int32_t max_ahead) {
    for (float& score : scores_) score += 0.3f * noise_(random_);
    std::vector<int32_t> order(static_cast<size_t>(kv_len - recent));
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
      return scores_[static_cast<size_t>(a)] > scores_[static_cast<size_t>(b)];
    });
    Chosen chosen{{order.begin(), order.begin() + listed}, recent, kv_len};
    std::sort(chosen.tokens.begin(), chosen.tokens.end());
    for (int32_t t = 0; scored && t < kv_len - recent; ++t) {
      chosen.max_ahead = max_ahead;
      chosen.scores.push_back(1 / (1 + std::exp(10 - scores_[static_cast<size_t>(t)])));
    }
    for (int32_t t = kv_len - recent; t < kv_len; ++t) chosen.tokens.push_back(t);
    return chosen;
  }

 private:
  std::mt19937 random_;
  std::normal_distribution<float> noise_;
  std::vector<float> scores_;
};

TEST(WorkingSet, GivesUpWhatWasReadLongestAgoAndSeldomFoundOrScoredLow) {
  constexpr int32_t kSteps = 250;
  constexpr int32_t kListed = 20;
  constexpr int32_t kRecent = 4;
  for (const int32_t n_slots : {24, 25, 36, 48, 120, kContext}) {
    const int32_t max_ahead = std::min(n_slots - 24, 5);
    uint64_t missed_without = 0;
    for (const bool scored : {false, true}) {
      if (scored && max_ahead == 0) continue;
      SCOPED_TRACE(testing::Message()
                   << n_slots << " slots, " << (scored ? "by scores" : "by age"));
      Op op(n_slots);
      Model model(n_slots);
      Text text(7);
      for (int32_t step = 0; step < kSteps; ++step) {
        // Every seventh step makes the last row anew, and every other of them selects few tokens,
        // hardly ever that one.
        const int32_t kv_len = 100 + step - step % 7 / 6;
        const bool few = step % 14 == 13;
        const Chosen chosen =
            text.Next(few ? 3 : kListed, scored, kv_len, few ? 0 : kRecent, max_ahead);
        op.Step(chosen);
        model.Step(chosen);
        ASSERT_EQ(op.owner(), model.owner()) << "step " << step;
        ASSERT_EQ(op.missed, model.missed) << "step " << step;
        ASSERT_EQ(op.ahead, scored ? model.ahead : std::vector<int32_t>{}) << "step " << step;
      }
      EXPECT_GT(op.counters[1], 0u);
      EXPECT_LT(op.counters[1], op.counters[0]);
      // Between no choice of what goes and nothing that must.
      const bool some_go = n_slots == 36 || n_slots == 48;
      if (!scored) missed_without = op.counters[1];
      EXPECT_TRUE(!scored || !some_go || op.counters[1] < missed_without);
    }
  }
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

// It is yet to be made, so there is nothing to fetch.
TEST(WorkingSet, TheRowOfTheStepDoesNotComeAhead) {
  Op op(3);
  std::vector<float> scores(40, 0.1f);
  scores[7] = 0.5f;
  scores[39] = 0.9f;
  op.Step({.tokens = {5}, .kv_len = 40, .scores = scores, .max_ahead = 1});
  EXPECT_EQ(op.ahead, std::vector<int32_t>{7});
}

// By its scores, a token loses an eighth of the way to a lower one in each step, in logarithms.
TEST(WorkingSet, AveragesOfScoresFollowSlowly) {
  const auto after = [](float first, float then, int steps) {
    uint32_t average = AverageScore(0, std::bit_cast<uint32_t>(first));
    for (int i = 0; i < steps; ++i) average = AverageScore(average, std::bit_cast<uint32_t>(then));
    return std::bit_cast<float>(average);
  };
  EXPECT_EQ(after(0.3f, 0.3f, 50), 0.3f);
  EXPECT_EQ(after(0.5f, 0.5f / 256, 1), 0.25f);
  EXPECT_EQ(after(0.5f / 256, 0.5f, 1), 1.0f / 256);
  EXPECT_NEAR(std::log2(after(0.5f, 0.5f / 256, 60)), -9, 0.01);
  EXPECT_EQ(after(7.0f, 1.0f, 3), 1.0f);
  EXPECT_GT(after(0.0f, 0.0f, 3), 0.0f);  // of a token that scored; 0 is none
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
