#include "policy/blocks/block_ops.h"

#include <algorithm>
#include <vector>

#include "policy/blocks/host_forms.h"

namespace omnikv {
namespace {

template <typename For>
void RunHold(const HoldChoiceArgs& a, const For&) {
  for (int32_t s = 0; s < a.n_seqs; ++s) {
    const SeqMeta seq = a.seqs[s];
    if (a.own_seqs != nullptr) {
      a.own_seqs[s] = seq;
      a.own_seqs[s].table_off = s * a.own_stride;
    }
    a.keep[s] = 1;
    if (seq.q_len == 0) continue;
    const int32_t last = UnitsOf(seq.kv_len, a.rule.block) - a.n_candidates[s];
    a.n_pick[s] = a.rule.BlocksRead(seq.kv_len, seq.prompt_len) - last;
    a.keep[s] = 0;
    if (a.made == nullptr) continue;
    int32_t* const first = a.made + s;
    int32_t* const second = a.made + a.n_seqs + s;
    const HoldStep step = HoldStepOf(a.rule, seq, *first, *second);
    a.keep[s] = step.keep;
    *first = step.first;
    *second = step.second;
    if (step.move == HoldMove::kNothing) continue;
    const bool back = step.move == HoldMove::kToFirst;
    for (int64_t c = 0; c < a.choices; ++c) {
      const auto copy = [&](int32_t* of, int64_t words) {
        int32_t* const one = of + (c * a.n_seqs + s) * words;
        int32_t* const two = one + int64_t{a.choices} * a.n_seqs * words;
        std::copy_n(back ? two : one, words, back ? one : two);
      };
      copy(a.index, a.list_words);
      copy(a.count, a.lists);
    }
  }
}

// The tokens of [first, last) with the `best` highest scores, the lower one of equals.
std::vector<int32_t> BestTokens(const float* scores, int32_t first, int32_t last, int32_t best) {
  std::vector<int32_t> tokens;
  for (int32_t t = first; t < last; ++t) tokens.push_back(t);
  std::stable_sort(tokens.begin(), tokens.end(),
                   [&](int32_t x, int32_t y) { return scores[x] > scores[y]; });
  tokens.resize(static_cast<size_t>(std::min(best, last - first)));
  return tokens;
}

// What stands for one unit and head, into low and, of bounds, high.
void KeysOfUnit(const BlockKeysArgs& a, const SeqMeta& seq, int32_t u, int32_t head, float* low,
                float* high) {
  const int32_t first = u * a.unit;
  const int32_t last = std::min(first + a.unit, seq.kv_len);
  const int32_t kv_head =
      a.keys == BlockKeys::kBoundsQuest ? head : head / (a.heads / a.n_kv_heads);
  std::vector<int32_t> tokens;
  const bool by_score = a.keys == BlockKeys::kBest || a.keys == BlockKeys::kBoundsBest;
  if (by_score && last - first == a.unit) {
    tokens = BestTokens(a.scores + int64_t{head} * a.stride, first, last, a.best);
  } else if (kv_head < a.n_kv_heads) {
    for (int32_t t = first; t < last; t += a.every) tokens.push_back(t);
  }
  std::vector<float> key(static_cast<size_t>(a.dk));
  std::vector<double> sum(key.size());
  const float inf = std::numeric_limits<float>::infinity();
  std::vector<float> least(key.size(), inf), most(key.size(), -inf);
  for (const int32_t t : tokens) {
    LoadKey(a.k, seq.table_off, t, kv_head, a.dk, key.data());
    for (size_t i = 0; i < key.size(); ++i) {
      sum[i] += key[i];
      least[i] = std::min(least[i], key[i]);
      most[i] = std::max(most[i], key[i]);
    }
  }
  const auto n = static_cast<double>(tokens.size());
  for (size_t i = 0; i < key.size(); ++i) {
    const auto mean = static_cast<float>(sum[i] / n);
    const auto all = static_cast<float>(sum[i]);
    switch (a.keys) {
      case BlockKeys::kMean:
      case BlockKeys::kBest:
        low[i] = mean;
        break;
      case BlockKeys::kBoundsMean:
        low[i] = high[i] = mean;
        break;
      case BlockKeys::kBoundsMax:
        low[i] = high[i] = std::max(most[i], 0.0f);
        break;
      case BlockKeys::kBoundsOf:
        low[i] = least[i];
        high[i] = most[i];
        break;
      case BlockKeys::kBoundsQuest:
        low[i] = tokens.empty() ? 0 : least[i];
        high[i] = std::max(most[i], 0.0f);
        break;
      case BlockKeys::kBoundsBest:
        low[i] = a.best == 1 ? all : std::min(all, 0.0f);
        high[i] = a.best == 1 ? all : std::max(all, 0.0f);
        break;
    }
  }
}

template <typename For>
void RunKeys(const BlockKeysArgs& a, const For& for_each) {
  const int64_t arrays = HasBounds(a.keys) ? 2 : 1;
  const int64_t width = int64_t{a.heads} * a.dk;
  for (int32_t s = 0; s < a.n_seqs; ++s) {
    const SeqMeta seq = a.seqs[s];
    const UnitRange units = UnitsMade(a, seq);
    for_each(int64_t{units.end - units.begin} * a.heads, [&](int64_t i) {
      const auto u = static_cast<int32_t>(units.begin + i / a.heads);
      const auto head = static_cast<int32_t>(i % a.heads);
      float* const low = a.out + (int64_t{s} * a.units + u) * arrays * width + int64_t{head} * a.dk;
      KeysOfUnit(a, seq, u, head, low, low + width);
    });
  }
}

template <typename For>
void RunListScores(const ListScoresArgs& a, const For&) {
  const int32_t rows = a.n_in / a.lists;
  for (int32_t s = 0; s < a.n_seqs; ++s) {
    const SeqMeta seq = a.seqs[s];
    if (seq.q_len == 0) continue;
    for (int32_t l = 0; l < a.lists; ++l) {
      const int64_t at = (int64_t{s} * a.lists + l) * a.stride;
      for (int32_t u = 0; u < UnitsOf(seq.kv_len, a.block); ++u) {
        float& out = a.out[at + u];
        if (u < a.sinks) {
          out = kChosenFirst;
        } else if (a.bias != nullptr && a.bias[at + u] < 0) {
          out = -std::numeric_limits<float>::infinity();
        } else if (a.prompt_alone != 0 && u >= seq.prompt_len / a.block) {
          out = -std::numeric_limits<float>::max();
        } else {
          double sum = 0;
          for (int32_t h = l * rows; h < (l + 1) * rows; ++h) {
            sum += a.in[(int64_t{s} * a.n_in + h) * a.stride + u];
          }
          out = static_cast<float>(sum);
        }
      }
    }
  }
}

template <typename For>
void RunBlockWeights(const BlockWeightsArgs& a, const For& for_each) {
  const BlockRule& rule = a.rule;
  const int32_t n = std::max(0, UnitsOf(a.seqs[0].kv_len, rule.block) - rule.recent);
  const int32_t rows = a.n_in / a.lists;
  a.n_candidates[0] = n;
  a.n_pick[0] = std::min(n, rule.sinks + rule.preselect);
  for_each(int64_t{n} * a.lists, [&](int64_t i) {
    const auto u = static_cast<int32_t>(i % n);
    const int64_t l = i / n;
    const int32_t begin = std::max(0, u * rule.block - a.widen);
    const int32_t end = std::min(n * rule.block, (u + 1) * rule.block + a.widen);
    double sum = 0;
    for (int64_t h = l * rows; h < (l + 1) * rows; ++h) {
      for (int32_t t = begin; t < end; ++t) sum += a.in[h * a.in_stride + t];
    }
    a.out[l * a.stride + u] = u < rule.sinks ? kChosenFirst : static_cast<float>(sum);
  });
}

template <typename For>
void RunExclude(const ExcludeArgs& a, const For&) {
  for (int32_t l = 0; l < a.lists; ++l) {
    float* const bias = a.bias + int64_t{l} * a.stride;
    const int32_t c = a.chosen == 1 ? 0 : l;
    std::fill_n(bias, a.stride, 0.0f);
    std::fill_n(bias, a.n_candidates[0], -std::numeric_limits<float>::infinity());
    for (int32_t i = 0; i < a.count[c]; ++i) bias[a.index[int64_t{c} * a.capacity + i]] = 0;
  }
}

OMNIKV_BLOCK_OP(kHold, "BlocksHold", HoldChoiceArgs, RunHold, HoldChoiceCuda, HoldChoiceCost);
OMNIKV_BLOCK_OP(kKeys, "BlocksKeys", BlockKeysArgs, RunKeys, BlockKeysCuda, BlockKeysCost);
OMNIKV_BLOCK_OP(kListScores, "BlocksListScores", ListScoresArgs, RunListScores, ListScoresCuda,
                ListScoresCost);
OMNIKV_BLOCK_OP(kBlockWeights, "BlocksWeights", BlockWeightsArgs, RunBlockWeights, BlockWeightsCuda,
                BlockWeightsCost);
OMNIKV_BLOCK_OP(kExclude, "BlocksExclude", ExcludeArgs, RunExclude, ExcludeCuda, ExcludeCost);

}  // namespace

CustomArgs HoldChoice(const HoldChoiceArgs& args) {
  return MakeCustomArgs(kHold, args);
}
CustomArgs MakeBlockKeys(const BlockKeysArgs& args) {
  return MakeCustomArgs(kKeys, args);
}
CustomArgs ListScores(const ListScoresArgs& args) {
  return MakeCustomArgs(kListScores, args);
}
CustomArgs BlockWeights(const BlockWeightsArgs& args) {
  return MakeCustomArgs(kBlockWeights, args);
}
CustomArgs Exclude(const ExcludeArgs& args) {
  return MakeCustomArgs(kExclude, args);
}

}  // namespace omnikv
