// kascade: lists in the order of the heads that read them, on every backend.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "on_backend.h"
#include "policy/kascade/map_lists.h"

namespace omnikv::kascade_test {
namespace {

class MapListsOn : public OnBackend {};

// Just behind the op that chooses them, among so many tokens that it takes a while. Later rounds
// launch kernels that are loaded by then.
TEST_P(MapListsOn, GivesEachHeadTheListItReads) {
  constexpr int32_t kSeqs = 2, kLists = 4, kTokens = 131072, kCapacity = 300, kPicks = 257;
  constexpr size_t kAll = size_t{kSeqs} * kLists;
  const std::vector<int32_t> list_of = {2, 0, 0, 3};
  std::mt19937 random(3);
  std::uniform_real_distribution<float> uniform(0, 1);
  for (int round = 0; round < 4; ++round) {
    SCOPED_TRACE(round);
    std::vector<float> scores(kAll * kTokens);
    for (float& score : scores) score = uniform(random);
    std::vector<int32_t> index(kAll * kCapacity, -1);
    std::vector<int32_t> mapped(index.size(), -7);
    const TopKArgs choice = {
        .scores = OnDevice(scores),
        .weights = OnDevice(std::vector<float>{1}),
        .seqs = OnDevice(std::vector<SeqMeta>(kSeqs, {.q_len = 1, .kv_len = kTokens + 1})),
        .n_candidates = OnDevice(std::vector<int32_t>(kSeqs, kTokens)),
        .n_pick = OnDevice(std::vector<int32_t>(kSeqs, kPicks)),
        .index = OnDevice(index),
        .count = OnDevice(std::vector<int32_t>(kAll, 0)),
        .stride = kTokens,
        .lists = kLists,
        .capacity = kCapacity,
        .n_seqs = kSeqs};
    int32_t* const out = OnDevice(mapped);
    int32_t* const on_list_of = OnDevice(list_of);
    backend_->Enqueue(choice);
    backend_->Enqueue(MapLists({.index = choice.index,
                                .count = choice.count,
                                .list_of = on_list_of,
                                .out = out,
                                .n_seqs = kSeqs,
                                .lists = kLists,
                                .capacity = kCapacity}));
    backend_->Download(index.data(), choice.index, index.size() * sizeof(int32_t));
    backend_->Download(mapped.data(), out, mapped.size() * sizeof(int32_t));
    for (size_t list = 0; list < kAll; ++list) {
      SCOPED_TRACE(list);
      const size_t from = list / kLists * kLists + static_cast<size_t>(list_of[list % kLists]);
      std::vector<int32_t> expected(kCapacity, -7);  // what lies behind a list stays as it is
      std::copy_n(index.begin() + static_cast<ptrdiff_t>(from * kCapacity), kPicks,
                  expected.begin());
      const auto begin = mapped.begin() + static_cast<ptrdiff_t>(list * kCapacity);
      EXPECT_EQ(std::vector<int32_t>(begin, begin + kCapacity), expected);
      EXPECT_TRUE(std::is_sorted(expected.begin(), expected.begin() + kPicks));
      EXPECT_GE(expected[0], 0);
    }
    buffers_.clear();
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, MapListsOn, ::testing::Values("ref", "cpu", "cuda"),
                         [](const auto& of) { return of.param; });

}  // namespace
}  // namespace omnikv::kascade_test
