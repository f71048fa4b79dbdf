// The reference of WorkingSetArgs against a list of slots that is kept in the order of reading.
#include <gtest/gtest.h>

#include <algorithm>
#include <list>
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

// The first slot is the next to go. Slots that were read by one step stand by their numbers.
class Model {
 public:
  explicit Model(int32_t n_slots) {
    for (int32_t s = 0; s < n_slots; ++s) slots_.push_back({s, -1});
  }

  void Step(const Chosen& chosen) {
    const std::set<int32_t> wanted(chosen.tokens.begin(), chosen.tokens.end());
    Touch({chosen.wider.begin(), chosen.wider.end()});
    Touch(wanted);
    std::vector<int32_t> absent;
    for (const int32_t t : chosen.tokens) {
      if (std::none_of(slots_.begin(), slots_.end(), [&](const Slot& s) { return s.token == t; })) {
        absent.push_back(t);
      }
    }
    std::vector<Slot*> given;
    for (auto s = slots_.begin(); given.size() < absent.size(); ++s) given.push_back(&*s);
    std::sort(given.begin(), given.end(), [](Slot* a, Slot* b) { return a->number < b->number; });
    for (size_t i = 0; i < absent.size(); ++i) given[i]->token = absent[i];
    Touch(wanted);
    const int32_t own = chosen.kv_len - 1;
    missed = absent;
    missed.erase(std::remove(missed.begin(), missed.end(), own), missed.end());
    if (wanted.count(own) == 0) Forget(own);
  }
  std::vector<int32_t> owner() const {
    std::vector<int32_t> tokens(slots_.size());
    for (const Slot& s : slots_) tokens[static_cast<size_t>(s.number)] = s.token;
    return tokens;
  }

  std::vector<int32_t> missed;

 private:
  struct Slot {
    int32_t number, token;
  };

  // The slots of these tokens go last, by number.
  void Touch(const std::set<int32_t>& tokens) {
    std::list<Slot> touched;
    for (auto s = slots_.begin(); s != slots_.end();) {
      const auto slot = s++;
      if (tokens.count(slot->token) > 0) touched.splice(touched.end(), slots_, slot);
    }
    touched.sort([](const Slot& a, const Slot& b) { return a.number < b.number; });
    slots_.splice(slots_.end(), touched);
  }
  void Forget(int32_t token) {
    const auto slot =
        std::find_if(slots_.begin(), slots_.end(), [&](const Slot& s) { return s.token == token; });
    if (slot == slots_.end()) return;
    slot->token = -1;
    const auto place = std::find_if(slots_.begin(), slots_.end(), [&](const Slot& s) {
      return s.token >= 0 || s.number >= slot->number;
    });
    slots_.splice(place, slots_, slot);
  }

  std::list<Slot> slots_;
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

TEST(WorkingSet, GivesUpWhatWasReadLongestAgo) {
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
}

// Ages end at 511 steps, and slots of no token still go before all.
TEST(WorkingSet, SlotsOfLongAgoAreAlike) {
  for (const auto& [steps, gone] : {std::pair<int32_t, int32_t>{500, 6}, {520, 5}}) {
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
