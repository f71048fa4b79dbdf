#include "policy/index_recall.h"

#include <algorithm>
#include <array>
#include <iterator>

#include "base/check.h"

namespace omnikv {

Status IndexRecall::Prepare(const PolicyContext& context, PolicySettings& settings) {
  static_cast<void>(settings);
  context_ = context;
  stride_ = (context.max_context + 15) / 16 * 16;
  for (const RecallOf& of : wanted_) capacity_ = std::max({capacity_, of.best, of.rescored});
  found_.assign(static_cast<size_t>(context.n_layers) * wanted_.size(), 0);
  if (context.backend == nullptr) return {};
  OKV_CHECK(LastRows() <= context.max_rows, "{} rows, of {} in a step", LastRows(),
            context.max_rows);
  OKV_RETURN_IF_ERROR(memory_.Take(*context.backend, "scores of an index",
                                   {{logits_, context.n_heads * stride_},
                                    {lse_, context.n_heads},
                                    {scores_, stride_},
                                    {weight_, 1},
                                    {index_, 2 * int64_t{capacity_}},
                                    {count_, 2},
                                    {numbers_, 2}}));
  const float one = 1;
  context.backend->Upload(weight_.as(), &one, sizeof(one));
  return {};
}

std::vector<StateSpec> IndexRecall::States() const {
  std::vector<StateSpec> states;
  for (int32_t layer = 0; layer < context_.n_layers; ++layer) {
    states.push_back({layer, 1, IndexRowBytes(context_.n_kv_heads, context_.dk), "int4 K"});
  }
  return states;
}

void IndexRecall::MakeStates(int32_t layer, const AttendArgs& attend) {
  context_.backend->Enqueue(IndexKeysArgs{.kv = attend.kv,
                                          .seqs = attend.seqs,
                                          .out = states_[static_cast<size_t>(layer)],
                                          .n_rows = attend.n_rows,
                                          .n_seqs = attend.n_seqs});
}

void IndexRecall::Plan(const LayerStep& step, AttendArgs& attend) {
  MakeStates(step.layer, attend);
}

void IndexRecall::Observe(const LayerStep& step, const AttendArgs& attend) {
  if (!step.prefill || step.first_pos + attend.n_rows != step.prompt_end) return;
  for (int32_t i = 0, r = attend.n_rows - 1; i < rows_ && r >= 0; ++i, r -= step_) {
    AttendArgs row = attend;
    row.q += int64_t{r} * attend.n_heads * context_.dk;
    row.rows += r;
    row.n_rows = 1;
    row.o = nullptr;
    row.lse = lse_.as<float>();
    row.score = ScoreKind::kLogits;
    row.scores = logits_.as<float>();
    row.score_stride = stride_;
    const auto tokens = static_cast<int32_t>(step.first_pos) + r + 1;
    const std::array<int32_t, 2> numbers = {tokens, 0};
    context_.backend->Upload(numbers_.as(), numbers.data(), sizeof(numbers));
    Measure(step.layer, row);
  }
}

std::vector<int32_t> IndexRecall::Best(const AttendArgs& row, int32_t n, const SomeTokens& among) {
  Backend& backend = *context_.backend;
  int32_t* const index = index_.as<int32_t>() + (among.index != nullptr ? capacity_ : 0);
  int32_t* const count = count_.as<int32_t>() + (among.index != nullptr ? 1 : 0);
  backend.Upload(numbers_.as<int32_t>() + 1, &n, sizeof(n));
  backend.Enqueue(ScoreReduceArgs{.logits = logits_.as<float>(),
                                  .lse = lse_.as<float>(),
                                  .out = scores_.as<float>(),
                                  .rows = row.rows,
                                  .stride = stride_,
                                  .n_heads = row.n_heads,
                                  .n_rows = 1,
                                  .only = among});
  backend.Enqueue(TopKArgs{.scores = scores_.as<float>(),
                           .weights = weight_.as<float>(),
                           .seqs = row.seqs,
                           .n_candidates = numbers_.as<int32_t>(),
                           .n_pick = numbers_.as<int32_t>() + 1,
                           .index = index,
                           .count = count,
                           .stride = stride_,
                           .capacity = capacity_,
                           .n_seqs = 1,
                           .among = among});
  int32_t n_best = 0;
  backend.Download(&n_best, count, sizeof(n_best));
  std::vector<int32_t> best(static_cast<size_t>(n_best));
  backend.Download(best.data(), index, best.size() * sizeof(int32_t));
  return best;
}

void IndexRecall::Measure(int32_t layer, const AttendArgs& row) {
  Backend& backend = *context_.backend;
  backend.Enqueue(row);
  std::vector<std::vector<int32_t>> exact;
  for (const RecallOf& of : wanted_) exact.push_back(Best(row, of.best));
  for (size_t i = 0; i < wanted_.size(); ++i) {
    backend.Enqueue(IndexScoreArgs{.q = row.q,
                                   .index = states_[static_cast<size_t>(layer)],
                                   .rows = row.rows,
                                   .seqs = row.seqs,
                                   .logits = row.scores,
                                   .lse = row.lse,
                                   .stride = stride_,
                                   .n_rows = 1,
                                   .n_heads = row.n_heads,
                                   .n_kv_heads = context_.n_kv_heads,
                                   .dk = context_.dk,
                                   .scale = row.scale,
                                   .softcap = row.softcap});
    Best(row, wanted_[i].rescored);
    const SomeTokens rescored = {
        .index = index_.as<int32_t>(), .count = count_.as<int32_t>(), .capacity = capacity_};
    backend.Enqueue(RescoreArgs{.q = row.q,
                                .kv = row.kv,
                                .rows = row.rows,
                                .seqs = row.seqs,
                                .tokens = rescored,
                                .logits = row.scores,
                                .lse = row.lse,
                                .stride = stride_,
                                .n_rows = 1,
                                .n_seqs = 1,
                                .n_heads = row.n_heads,
                                .scale = row.scale,
                                .softcap = row.softcap});
    const std::vector<int32_t> chosen = Best(row, wanted_[i].best, rescored);
    std::vector<int32_t> both;
    std::set_intersection(exact[i].begin(), exact[i].end(), chosen.begin(), chosen.end(),
                          std::back_inserter(both));
    found_[static_cast<size_t>(layer) * wanted_.size() + i] +=
        static_cast<double>(both.size()) /
        static_cast<double>(std::max<size_t>(1, exact[i].size()));
  }
  if (layer + 1 == context_.n_layers) ++measured_;
}

std::vector<double> IndexRecall::recalls() const {
  std::vector<double> recalls = found_;
  for (double& recall : recalls) recall /= static_cast<double>(std::max<int64_t>(1, measured_));
  return recalls;
}

}  // namespace omnikv
