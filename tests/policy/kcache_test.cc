// kcache: the union of a group's lists on every backend, and attention to all tokens by it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <tuple>
#include <vector>

#include "on_backend.h"
#include "policy/kcache/union.h"
#include "step_fixture.h"

namespace omnikv::kcache_test {
namespace {

using Lists = std::vector<std::vector<int32_t>>;

class UnionOn : public OnBackend {
 protected:
  // Of `lists` [n_seqs, n_kv_heads, group]. Sequence `idle` has no row: its lists keep what they
  // have, one token of -7.
  Lists Run(const Lists& lists, int32_t n_kv_heads, int32_t group, int32_t capacity,
            int32_t to_capacity, int32_t idle) {
    std::vector<int32_t> index(lists.size() * static_cast<size_t>(capacity), -1);
    std::vector<int32_t> count;
    for (size_t list = 0; list < lists.size(); ++list) {
      std::copy(lists[list].begin(), lists[list].end(),
                index.begin() + static_cast<ptrdiff_t>(list * static_cast<size_t>(capacity)));
      count.push_back(static_cast<int32_t>(lists[list].size()));
    }
    const size_t unions = lists.size() / static_cast<size_t>(group);
    std::vector<SeqMeta> seqs(unions / static_cast<size_t>(n_kv_heads), SeqMeta{.q_len = 1});
    if (idle >= 0) seqs[static_cast<size_t>(idle)].q_len = 0;
    std::vector<int32_t> to(unions * static_cast<size_t>(to_capacity), -7);
    std::vector<int32_t> to_count(unions, 1);
    int32_t* const on_to = OnDevice(to);
    int32_t* const on_count = OnDevice(to_count);
    backend_->Enqueue(
        MakeCustomArgs(kUnion, UnionArgs{.seqs = OnDevice(seqs),
                                         .index = OnDevice(index),
                                         .count = OnDevice(count),
                                         .work = OnDevice(std::vector<int32_t>(index.size())),
                                         .to_index = on_to,
                                         .to_count = on_count,
                                         .to_capacity = to_capacity,
                                         .n_seqs = static_cast<int32_t>(seqs.size()),
                                         .n_kv_heads = n_kv_heads,
                                         .group = group,
                                         .capacity = capacity}));
    backend_->Download(to.data(), on_to, to.size() * sizeof(int32_t));
    backend_->Download(to_count.data(), on_count, to_count.size() * sizeof(int32_t));
    Lists found;
    for (size_t i = 0; i < unions; ++i) {
      const auto begin = to.begin() + static_cast<ptrdiff_t>(i * static_cast<size_t>(to_capacity));
      found.emplace_back(begin, begin + to_count[i]);
    }
    buffers_.clear();
    return found;
  }
};

TEST_P(UnionOn, HasEachTokenOfAnyListOnce) {
  std::mt19937 random(5);
  // Sequences, KV heads, heads of a group, room of a list, tokens.
  for (const auto& [n_seqs, n_kv_heads, group, capacity, n_tokens] :
       std::vector<std::tuple<int32_t, int32_t, int32_t, int32_t, int32_t>>{{1, 1, 2, 1, 3},
                                                                            {1, 2, 4, 128, 1000},
                                                                            {3, 8, 4, 128, 131072},
                                                                            {2, 1, 7, 700, 900},
                                                                            {1, 1, 7, 5000, 20000},
                                                                            {2, 2, 3, 300, 300}}) {
    for (const bool full : {true, false}) {
      SCOPED_TRACE(::testing::Message()
                   << n_seqs << " " << group << " " << capacity << " " << full);
      const int32_t idle = n_seqs > 1 ? 1 : -1;
      const int32_t unions = n_seqs * n_kv_heads;
      Lists lists, expected;
      for (int32_t i = 0; i < unions; ++i) {
        std::vector<bool> chosen(static_cast<size_t>(n_tokens));
        for (int32_t g = 0; g < group; ++g) {
          std::vector<int32_t> order(static_cast<size_t>(n_tokens));
          for (int32_t t = 0; t < n_tokens; ++t) order[static_cast<size_t>(t)] = t;
          std::shuffle(order.begin(), order.end(), random);
          const auto n =
              full ? static_cast<size_t>(capacity) : random() % (static_cast<size_t>(capacity) + 1);
          order.resize(n);
          std::sort(order.begin(), order.end());
          for (const int32_t t : order) chosen[static_cast<size_t>(t)] = true;
          lists.push_back(std::move(order));
        }
        expected.emplace_back();
        for (int32_t t = 0; t < n_tokens; ++t) {
          if (chosen[static_cast<size_t>(t)]) expected.back().push_back(t);
        }
        if (i / n_kv_heads == idle) expected.back() = {-7};
      }
      EXPECT_EQ(Run(lists, n_kv_heads, group, capacity, std::min(group * capacity, n_tokens), idle),
                expected);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, UnionOn, ::testing::Values("ref", "cpu", "cuda"),
                         [](const auto& of) { return of.param; });

// Probabilities of all tokens sum to 1 but for rounding, with renormalise=off too.
TEST(KCache, AllTokensAreFullAttention) {
  const auto full_backend = MakeRefBackend();
  const auto own_backend = MakeRefBackend();
  StepFixture full(*full_backend, "full", {});
  StepFixture own(*own_backend, "kcache",
                  {{"budget", "64"}, {"first_layers", "0"}, {"renormalise", "off"}});
  EXPECT_EQ(own.Prompt(40), full.Prompt(40));
  for (int32_t step = 0; step < 8; ++step) {
    const std::vector<float> logits = own.Decode(), expected = full.Decode();
    float top = 0, error = 0;
    for (size_t i = 0; i < expected.size(); ++i) {
      top = std::max(top, std::abs(expected[i]));
      error = std::max(error, std::abs(logits[i] - expected[i]));
    }
    EXPECT_LE(error, 1e-6f * top) << step;
  }
}

}  // namespace
}  // namespace omnikv::kcache_test
