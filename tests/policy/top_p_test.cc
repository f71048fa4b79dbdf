// The op of omnikv's top_p on every backend: exactly the fewest tokens that hold a share of all.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>

#include "on_backend.h"
#include "policy/omnikv/top_p.h"

namespace omnikv::top_p_test {
namespace {

// Lists of a case: scores [n_seqs, lists, window, stride] of so many candidates in each sequence,
// and how many of the best TopK has chosen in each.
struct Case {
  std::vector<float> scores;
  std::vector<float> weights = {1};
  std::vector<int32_t> n_candidates;
  std::vector<int32_t> kv_len;
  int64_t stride = 0;
  int32_t lists = 1;
  int32_t chosen = 0;
  double share = 0;
};

using Lists = std::vector<std::vector<int32_t>>;

// Scores as the documentation says them: sums in double, then one rounding.
float ScoreOf(const Case& c, size_t list, int32_t t) {
  const auto window = static_cast<int32_t>(c.weights.size());
  const int32_t p = c.kv_len[list / static_cast<size_t>(c.lists)] - 1;
  double sum = 0;
  for (int32_t age = 0; age < window && t <= p - age; ++age) {
    const size_t row = list * static_cast<size_t>(window) + static_cast<size_t>((p - age) % window);
    sum += static_cast<double>(c.weights[static_cast<size_t>(age)]) *
           c.scores[row * static_cast<size_t>(c.stride) + static_cast<size_t>(t)];
  }
  return static_cast<float>(sum);
}

std::vector<int32_t> InOrder(const Case& c, size_t list) {
  std::vector<int32_t> order(
      static_cast<size_t>(c.n_candidates[list / static_cast<size_t>(c.lists)]));
  std::iota(order.begin(), order.end(), 0);
  const auto key = [&](int32_t t) {
    const float s = ScoreOf(c, list, t);
    return std::isnan(s) ? -std::numeric_limits<float>::infinity() : s;
  };
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t x, int32_t y) { return key(x) > key(y); });
  return order;
}

// The fewest in order whose sum reaches the share, in numbers that round nothing away.
Lists Expected(const Case& c) {
  Lists lists(c.n_candidates.size() * static_cast<size_t>(c.lists));
  for (size_t list = 0; list < lists.size(); ++list) {
    const auto counts = [&](int32_t t) {
      const float s = ScoreOf(c, list, t);
      return s > 0 && s < kChosenFirst
                 ? static_cast<uint64_t>(std::ldexp(static_cast<double>(s), 40))
                 : 0;
    };
    const std::vector<int32_t> order = InOrder(c, list);
    uint64_t total = 0;
    for (const int32_t t : order) total += counts(t);
    const auto wanted = static_cast<uint64_t>(std::ceil(c.share * static_cast<double>(total)));
    uint64_t sum = 0;
    for (const int32_t t : order) {
      if (static_cast<int32_t>(lists[list].size()) == c.chosen) break;
      if (sum >= std::min(wanted, total) && !(ScoreOf(c, list, t) >= kChosenFirst)) break;
      sum += counts(t);
      lists[list].push_back(t);
    }
    std::sort(lists[list].begin(), lists[list].end());
  }
  return lists;
}

class TopPOn : public OnBackend {
 protected:
  // What TopP leaves of the lists that TopK, just ahead of it, has chosen.
  Lists Run(const Case& c) {
    const size_t n_seqs = c.n_candidates.size();
    const size_t n_lists = n_seqs * static_cast<size_t>(c.lists);
    const auto capacity = static_cast<size_t>(c.chosen);
    std::vector<int32_t> index(n_lists * capacity, -1);
    std::vector<int32_t> count(n_lists, -1);
    std::vector<SeqMeta> seqs;
    for (const int32_t n : c.kv_len) seqs.push_back({.q_len = 1, .kv_len = n});
    const TopKArgs choice = {.scores = OnDevice(c.scores),
                             .weights = OnDevice(c.weights),
                             .seqs = OnDevice(seqs),
                             .n_candidates = OnDevice(c.n_candidates),
                             .n_pick = OnDevice(std::vector<int32_t>(n_seqs, c.chosen)),
                             .index = OnDevice(index),
                             .count = OnDevice(count),
                             .stride = c.stride,
                             .window = static_cast<int32_t>(c.weights.size()),
                             .lists = c.lists,
                             .capacity = c.chosen,
                             .n_seqs = static_cast<int32_t>(n_seqs)};
    backend_->Enqueue(choice);
    backend_->Enqueue(MakeCustomArgs(kTopP, TopPArgs{.scores = choice.scores,
                                                     .weights = choice.weights,
                                                     .seqs = choice.seqs,
                                                     .n_candidates = choice.n_candidates,
                                                     .index = choice.index,
                                                     .count = choice.count,
                                                     .stride = choice.stride,
                                                     .share = std::bit_cast<uint64_t>(c.share),
                                                     .window = choice.window,
                                                     .lists = choice.lists,
                                                     .capacity = choice.capacity,
                                                     .n_seqs = choice.n_seqs}));
    backend_->Download(index.data(), choice.index, index.size() * sizeof(int32_t));
    backend_->Download(count.data(), choice.count, count.size() * sizeof(int32_t));
    Lists left;
    for (size_t list = 0; list < n_lists; ++list) {
      const auto begin = index.begin() + static_cast<ptrdiff_t>(list * capacity);
      left.emplace_back(begin, begin + count[list]);
    }
    buffers_.clear();
    return left;
  }
};

// The published search starts at the score of token 0: where that is in the middle of 401 keys it
// leaves 202 of the 75 that it takes to hold 85 %.
TEST_P(TopPOn, StartsAtTheHighestScoreWhereverItIs) {
  Case c{.n_candidates = {401}, .kv_len = {402}, .stride = 402, .chosen = 401, .share = 0.85};
  double sum = 0;
  for (int32_t i = 0; i < 401; ++i) c.scores.push_back(static_cast<float>(std::exp(-i / 39.5)));
  std::swap(c.scores[0], c.scores[200]);
  for (const float s : c.scores) sum += s;
  for (float& s : c.scores) s = static_cast<float>(s / sum);
  c.scores.push_back(0);
  const Lists left = Run(c);
  EXPECT_EQ(left, Expected(c));
  EXPECT_EQ(left[0].size(), 75u);
}

TEST_P(TopPOn, LeavesTheFewestThatHoldTheShare) {
  std::mt19937 random(7);
  const auto uniform = [&] { return std::uniform_real_distribution<float>(0, 1)(random); };
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  for (const char* kind : {"few", "flat", "steps", "equal", "zeros", "sinks", "broken", "one"}) {
    for (const double share : {0.01, 0.5, 0.85, 0.999}) {
      for (const size_t window : {1, 4}) {
        for (const auto& [n_candidates, lists, chosen] :
             std::vector<std::tuple<std::vector<int32_t>, int32_t, int32_t>>{
                 {{5}, 1, 3},
                 {{0, 700, 63}, 2, 128},
                 {{2999, 1, 3000}, 1, 3000},
                 {{40000, 20000}, 1, 2048}}) {
          SCOPED_TRACE(std::string(kind) + " " + std::to_string(share) + " " +
                       std::to_string(window) + " " + std::to_string(n_candidates[0]));
          Case c{.n_candidates = n_candidates, .lists = lists, .chosen = chosen, .share = share};
          for (size_t age = 1; age < window; ++age) {
            c.weights.push_back(std::ldexp(1.0f, -static_cast<int>(age)));
          }
          c.stride = *std::max_element(n_candidates.begin(), n_candidates.end()) + 5;
          for (const int32_t n : n_candidates) c.kv_len.push_back(n + 3);
          const size_t rows = n_candidates.size() * static_cast<size_t>(lists) * window;
          for (size_t row = 0; row < rows; ++row) {
            for (int64_t t = 0; t < c.stride; ++t) {
              const float u = uniform();
              const std::string_view k = kind;
              c.scores.push_back(k == "few"     ? std::exp(-30 * u)
                                 : k == "flat"  ? 1e-4f + 1e-6f * u
                                 : k == "steps" ? std::ldexp(1.0f, -static_cast<int>(8 * u))
                                 : k == "equal" ? 0.125f
                                 : k == "zeros" ? (u < 0.99f ? 0 : 1e-14f)
                                 : k == "sinks" ? (t < 4 ? kChosenFirst : u * u * u)
                                 : k == "one"   ? (t == 2 ? 1 : 0)
                                 : u < 0.2f     ? kNaN
                                 : u < 0.3f     ? -u
                                                : u);
            }
          }
          EXPECT_EQ(Run(c), Expected(c));
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, TopPOn, ::testing::Values("ref", "cpu", "cuda"),
                         [](const auto& of) { return of.param; });

}  // namespace
}  // namespace omnikv::top_p_test
