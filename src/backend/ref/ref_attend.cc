#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "backend/kv_format.h"
#include "backend/ref/ref_backend.h"
#include "backend/ref/ref_dots.h"

namespace omnikv {
namespace {

constexpr double kNegInf = -std::numeric_limits<double>::infinity();

struct PlannedToken {
  int64_t token;
  int32_t segment;
};

// The tokens that a row reads for KV head `kv_head`, in the plan's order.
std::vector<PlannedToken> TokensOf(const AttendArgs& a, RowMeta row, int32_t kv_head) {
  std::vector<PlannedToken> tokens;
  for (int32_t si = 0; si < a.plan.n_segments; ++si) {
    const PlanSegment& s = a.plan.segments[static_cast<size_t>(si)];
    const int64_t low = s.window > 0 ? row.pos + 1 - static_cast<int64_t>(s.window) : 0;
    const auto add = [&](int64_t begin, int64_t end) {
      begin = std::max({begin, low, int64_t{0}});
      end = std::min<int64_t>(end, int64_t{row.pos} + 1);
      for (int64_t t = begin; t < end; ++t) tokens.push_back({t, si});
    };
    if (s.kind == SegmentKind::kRange) {
      add(s.bounds != nullptr ? s.bounds[2 * row.seq] : s.begin,
          s.bounds != nullptr ? s.bounds[2 * row.seq + 1] : s.end);
      continue;
    }
    const int64_t list = s.ListOf(row.seq, kv_head);
    for (int32_t i = 0; i < s.count[list]; ++i) {
      const int64_t unit = s.index[list * s.capacity + i];
      add(unit * s.unit, (unit + 1) * s.unit);
    }
  }
  return tokens;
}

// Stores what a row's head has read, of AttendArgs or SumValuesArgs: the sum of weights
// exp(logit - top), and `o`, V by these weights.
template <typename Args>
void StoreSums(const Args& a, int64_t row_head, double top, double sum,
               const std::vector<double>& o) {
  if (a.lse != nullptr) {
    a.lse[row_head] = static_cast<float>(sum > 0 ? top + std::log(sum) : kNegInf);
  }
  if (a.o == nullptr) return;
  const double norm = a.lse_in != nullptr ? std::exp(a.lse_in[row_head] - top) : sum;
  for (size_t d = 0; d < o.size(); ++d) {
    a.o[row_head * a.kv.dv + static_cast<int64_t>(d)] =
        static_cast<float>(sum > 0 ? o[d] / norm : 0.0);
  }
}

// K or V of a KV head, of a sequence's first n_tokens, as f32: each loaded when first read.
class LoadedHead {
 public:
  LoadedHead(const KvView& kv, const KvPlane& plane, int32_t d, int32_t table_off, int32_t kv_head,
             size_t n_tokens)
      : kv_(kv),
        plane_(plane),
        d_(static_cast<size_t>(d)),
        table_off_(table_off),
        place_(kv.Place(kv_head)),
        loaded_(n_tokens),
        values_(n_tokens * d_) {}

  const float* Token(int64_t token) {
    const auto t = static_cast<size_t>(token);
    float* const values = values_.data() + t * d_;
    if (!loaded_[t]) {
      loaded_[t] = true;
      const std::byte* from = plane_.Head(kv_.RowIndex(table_off_, token), place_);
      for (size_t i = 0; i < d_; ++i) values[i] = LoadKvValue(plane_, place_, from, i);
    }
    return values;
  }

 private:
  const KvView& kv_;
  const KvPlane& plane_;
  const size_t d_;
  const int32_t table_off_;
  const int32_t place_;
  std::vector<bool> loaded_;   // [n_tokens]
  std::vector<float> values_;  // [n_tokens, d]
};

// The products of row r's query of head h with K of the tokens.
std::vector<double> Dots(const AttendArgs& a, int32_t r, int32_t h,
                         const std::vector<PlannedToken>& tokens, LoadedHead& k) {
  std::vector<const float*> rows;
  rows.reserve(tokens.size());
  for (const PlannedToken& t : tokens) rows.push_back(k.Token(t.token));
  std::vector<double> dots(tokens.size());
  for (size_t first = 0, end = 0; first < tokens.size(); first = end) {  // tokens of one segment
    while (end < tokens.size() && tokens[end].segment == tokens[first].segment) ++end;
    const PlanSegment& s = a.plan.segments[static_cast<size_t>(tokens[first].segment)];
    const float* q = (s.q != nullptr ? s.q : a.q) + (int64_t{r} * a.n_heads + h) * a.kv.dk;
    const auto value = [&](int64_t i, int64_t d) {
      return rows[first + static_cast<size_t>(i)][d];
    };
    RefDots(static_cast<int64_t>(end - first), a.kv.dk, value, 1, q, dots.data() + first);
  }
  return dots;
}

// Attention of row r's head h, over K and V of its sequence and KV head.
void AttendRow(const AttendArgs& a, int32_t r, int32_t h, LoadedHead& k, LoadedHead& v) {
  const RowMeta row = a.rows[r];
  const int64_t row_head = static_cast<int64_t>(r) * a.n_heads + h;
  const std::vector<PlannedToken> tokens = TokensOf(a, row, h / a.Group());
  std::vector<double> logits = Dots(a, r, h, tokens, k);
  for (size_t i = 0; i < tokens.size(); ++i) {
    double logit = logits[i] * a.scale;
    if (a.softcap > 0) logit = a.softcap * std::tanh(logit / a.softcap);
    logits[i] = logit;
    if (a.score == ScoreKind::kLogits) {
      a.scores[row_head * a.score_stride + tokens[i].token] = static_cast<float>(logit);
    } else if (a.score == ScoreKind::kHeadMax) {
      float& out = a.scores[r * a.score_stride + tokens[i].token];
      out = std::max(out, static_cast<float>(logit));
    }
  }
  const double top = logits.empty() ? 0 : *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  std::vector<double> o(static_cast<size_t>(a.kv.dv), 0.0);
  for (size_t i = 0; i < tokens.size(); ++i) {
    const double p = std::exp(logits[i] - top);
    sum += p;
    if (a.o == nullptr) continue;
    const float* values = v.Token(tokens[i].token);
    for (size_t d = 0; d < o.size(); ++d) o[d] += p * values[d];
  }
  StoreSums(a, row_head, top, sum, o);
}

}  // namespace

void RefAttend(const AttendArgs& a) {
  for (int32_t r = 0; r < a.n_rows && a.score == ScoreKind::kHeadMax; ++r) {
    std::fill_n(a.scores + r * a.score_stride, a.rows[r].pos + 1,
                -std::numeric_limits<float>::infinity());
  }
  std::optional<LoadedHead> k;
  std::optional<LoadedHead> v;
  std::pair<int32_t, int32_t> loaded;  // sequence and KV head
  size_t n_tokens = 0;
  for (int32_t r = 0; r < a.n_rows; ++r) {
    n_tokens = std::max(n_tokens, static_cast<size_t>(a.rows[r].pos) + 1);
  }
  for (int32_t n = 0; n < a.Heads(); ++n) {
    for (int32_t r = 0; r < a.n_rows; ++r) {
      const std::pair<int32_t, int32_t> wanted(a.rows[r].seq, a.Head(n) / a.Group());
      if (!k || wanted != loaded) {
        const auto [seq, kv_head] = loaded = wanted;
        k.emplace(a.kv, a.kv.k, a.kv.dk, a.seqs[seq].table_off, kv_head, n_tokens);
        v.emplace(a.kv, a.kv.v, a.kv.dv, a.seqs[seq].table_off, kv_head, n_tokens);
      }
      AttendRow(a, r, a.Head(n), *k, *v);
    }
  }
}

void RefPickLogits(const PickLogitsArgs& a) {
  for (int32_t r = 0; r < a.n_rows; ++r) {
    for (int32_t h = 0; h < a.n_heads; ++h) {
      const int64_t row_head = int64_t{r} * a.n_heads + h;
      const int64_t list = a.ListOf(a.rows[r].seq, h);
      for (int32_t i = 0; i < a.count[list]; ++i) {
        a.out[row_head * a.capacity + i] =
            a.logits[row_head * a.stride + a.index[list * a.capacity + i]];
      }
    }
  }
}

void RefSumValues(const SumValuesArgs& a) {
  for (int64_t row_head = 0; row_head < int64_t{a.n_rows} * a.n_heads; ++row_head) {
    const RowMeta row = a.rows[row_head / a.n_heads];
    const auto kv_head = static_cast<int32_t>(row_head % a.n_heads / a.Group());
    const int64_t list = a.ListOf(row.seq, kv_head);
    const int32_t n = a.count[list];
    const float* logits = a.logits + row_head * a.capacity;
    const int32_t place = a.kv.Place(kv_head);
    const double top = n == 0 ? 0 : *std::max_element(logits, logits + n);
    double sum = 0;
    std::vector<double> o(static_cast<size_t>(a.kv.dv), 0.0);
    for (int32_t i = 0; i < n; ++i) {
      const double p = std::exp(logits[i] - top);
      sum += p;
      const int64_t token = a.index[list * a.capacity + i];
      const std::byte* v = a.kv.v.Head(a.kv.RowIndex(a.seqs[row.seq].table_off, token), place);
      for (size_t d = 0; d < o.size(); ++d) o[d] += p * LoadKvValue(a.kv.v, place, v, d);
    }
    StoreSums(a, row_head, top, sum, o);
  }
}

void RefMergeStates(const MergeStatesArgs& a) {
  for (int64_t row_head = 0; row_head < int64_t{a.n_rows} * a.n_heads; ++row_head) {
    double top = kNegInf;
    for (int32_t i = 0; i < a.n_parts; ++i) {
      top = std::max<double>(top, a.parts[static_cast<size_t>(i)].lse[row_head]);
    }
    double sum = 0;
    std::vector<double> o(static_cast<size_t>(a.dv), 0.0);
    for (int32_t i = 0; i < a.n_parts; ++i) {
      const AttendState& part = a.parts[static_cast<size_t>(i)];
      if (part.lse[row_head] == kNegInf) continue;
      const double weight = std::exp(part.lse[row_head] - top);
      sum += weight;
      for (size_t d = 0; d < o.size(); ++d) {
        o[d] += weight * part.o[row_head * a.dv + static_cast<int64_t>(d)];
      }
    }
    for (size_t d = 0; d < o.size(); ++d) {
      a.o[row_head * a.dv + static_cast<int64_t>(d)] =
          static_cast<float>(sum > 0 ? o[d] / sum : 0.0);
    }
    if (a.lse != nullptr) {
      a.lse[row_head] = static_cast<float>(sum > 0 ? top + std::log(sum) : kNegInf);
    }
  }
}

void RefPickHeads(const PickHeadsArgs& a) {
  const int32_t named = a.Named();
  for (int32_t r = 0; r < a.n_rows; ++r) {
    for (int32_t n = 0; n < named; ++n) {
      std::copy_n(a.from + a.From(r, n, named), a.width, a.to + a.To(r, n, named));
    }
  }
}

void RefScoreReduce(const ScoreReduceArgs& a) {
  for (int32_t r = 0; r < a.n_rows; ++r) {
    const RowMeta row = a.Row(r);
    const int32_t list_heads = a.n_heads / a.lists;
    for (int32_t l = 0; l < a.lists; ++l) {
      const int64_t list = int64_t{row.seq} * a.lists + l;
      float* out = a.out + (list * a.ring + row.pos % a.ring) * a.stride;
      const SomeTokens::Of tokens(a.only, row, a.lists, l);
      for (int32_t i = 0; i < tokens.size(); ++i) {
        const int32_t t = tokens.At(i);
        double best = kNegInf;
        double sum = 0;
        for (int32_t h = l * list_heads; h < (l + 1) * list_heads; ++h) {
          if (!a.Takes(h)) continue;
          const int64_t row_head = static_cast<int64_t>(r) * a.n_heads + h;
          const double logit = a.logits[LogitAt(a, r, h, t)];
          const double v = a.lse != nullptr ? std::exp(logit - a.lse[row_head]) : logit;
          best = std::max(best, v);
          sum += v;
        }
        out[a.ScoreAt(i, t)] = t < a.sinks
                                   ? kChosenFirst
                                   : static_cast<float>(a.heads == HeadReduce::kSum ? sum : best);
      }
    }
  }
}

void RefPlanRange(const PlanRangeArgs& a) {
  for (int32_t s = 0; s < a.n_seqs; ++s) {
    const int32_t n = a.seqs[s].kv_len;
    const int32_t units = (n + a.rule.unit - 1) / a.rule.unit;
    const bool all = n <= a.rule.dense_below;
    int32_t left = all ? 0 : BudgetAt(a.rule.budget, a.rule.share, units, a.rule.least);
    int32_t recent = 0;
    for (int32_t u = units - 1; u >= 0; --u) {  // from the last unit back
      const int32_t last = std::min((u + 1) * a.rule.unit, n) - 1;
      const bool in_tail = last >= a.seqs[s].prompt_len && recent < a.rule.tail;
      const bool in_budget = recent < a.rule.min_recent && left > 0;
      if (!all && !in_tail && !in_budget) break;
      if (!all && !in_tail) --left;
      ++recent;
    }
    a.bounds[2 * s] = std::min(n, (units - recent) * a.rule.unit);
    a.bounds[2 * s + 1] = n;
    if (a.n_candidates == nullptr) continue;
    a.n_candidates[s] = units - recent;
    a.n_pick[s] = std::min(left, units - recent);
  }
}

void RefTopK(const TopKArgs& a) {
  for (int32_t list = 0; list < a.n_seqs * a.lists; ++list) {
    const int32_t s = list / a.lists;
    if (a.keep != nullptr && a.keep[s] != 0) continue;
    const int32_t n = a.CandidatesOf(list);
    const int32_t p = a.seqs[s].kv_len - 1;
    const float* const scores = a.ScoresOf(list);
    std::vector<float> score(static_cast<size_t>(n), 0.0f);
    for (int32_t i = 0; i < n; ++i) {
      const int32_t t = a.Gathers() ? a.Candidate(list, i) : i;
      double sum = 0;
      for (int32_t age = 0; age < a.window && t <= p - age; ++age) {
        sum += static_cast<double>(a.weights[age]) * scores[(p - age) % a.window * a.stride + t];
      }
      score[static_cast<size_t>(i)] = static_cast<float>(sum);
    }
    std::vector<int32_t> order(static_cast<size_t>(n));
    std::iota(order.begin(), order.end(), 0);
    // NaN ranks lowest, so that a broken score never breaks the order.
    const auto key = [&](int32_t i) {
      const float v = score[static_cast<size_t>(i)];
      return std::isnan(v) ? -std::numeric_limits<float>::infinity() : v;
    };
    std::stable_sort(order.begin(), order.end(),
                     [&](int32_t x, int32_t y) { return key(x) > key(y); });
    const int32_t k = a.Picks(a.n_pick[s], n);
    std::sort(order.begin(), order.begin() + k);
    for (int32_t i = 0; i < k; ++i) a.Put(list, i, order[static_cast<size_t>(i)]);
    a.Finish(list, k);
  }
}

namespace {

// By the words of sampling.h: everything in order, then the cuts, then one walk.
int32_t RefSample(const float* logits, int64_t vocab, const SampleMeta& meta,
                  const uint32_t* seen) {
  std::vector<SampleCandidate> order;
  for (int32_t t = 0; t < vocab; ++t) {
    const bool was_seen = (seen[t / 32] >> (t % 32) & 1) != 0;
    const float logit = was_seen ? Penalised(logits[t], meta.repeat_penalty) : logits[t];
    if (!std::isnan(logit)) order.push_back({logit, t, 0});
  }
  if (order.empty()) return 0;
  std::stable_sort(order.begin(), order.end(),
                   [](const auto& x, const auto& y) { return x.logit > y.logit; });
  if (meta.temperature == 0) return order[0].token;
  if (meta.top_k > 0) order.resize(std::min(order.size(), static_cast<size_t>(meta.top_k)));
  uint64_t total = 0;
  for (SampleCandidate& c : order) {
    c.weight = SampleWeight(c.logit, order[0].logit, SampleScale(meta.temperature));
    total += c.weight;
  }
  const uint64_t least = SampleMinWeight(meta.min_p);
  std::erase_if(order, [&](const SampleCandidate& c) { return c.weight < least; });
  const uint64_t wanted = meta.top_p < 1 ? SampleTopWeight(meta.top_p, total) : total;
  uint64_t kept = 0;
  for (size_t i = 0; i < order.size() && kept < wanted; ++i) kept += order[i].weight;
  const uint64_t place = SampleRandom(meta.random, kept);
  uint64_t passed = 0;
  for (const SampleCandidate& c : order) {
    passed += c.weight;
    if (passed > place) return c.token;
  }
  return order[0].token;  // never: place < kept
}

}  // namespace

void RefNextToken(const NextTokenArgs& a) {
  for (int32_t r = 0; r < a.n_rows; ++r) {
    const float* logits = a.logits + r * a.vocab;
    const bool finite =
        std::all_of(logits, logits + a.vocab, [](float v) { return std::isfinite(v); });
    int32_t token = 0;
    if (finite && a.sample == nullptr) {
      token = static_cast<int32_t>(std::max_element(logits, logits + a.vocab) - logits);
    }
    if (a.sample != nullptr) {
      uint32_t* seen = a.seen + r * SeenWords(a.vocab);
      if (finite) token = RefSample(logits, a.vocab, a.sample[r], seen);
      TakeSample(token, a.sample[r], seen);
    }
    a.out[static_cast<int32_t>(*a.step % static_cast<uint32_t>(a.ring)) * a.n_rows + r] =
        finite ? token : -1;
    a.tokens[r] = token;
    ++a.rows[r].pos;
    if (a.group_rows != nullptr) ++a.group_rows[r].pos;
    ++a.seqs[a.rows[r].seq].kv_len;
  }
  ++*a.step;
}

}  // namespace omnikv
