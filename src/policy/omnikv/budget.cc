#include "policy/omnikv/budget.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace omnikv {
namespace {

// Either `budget` tokens or, from mem = (dense * n + sparse * budget) / (layers * n), the share of
// the n tokens in context that a sparse layer selects.
Status ResolveTokens(const PolicyContext& context, const FilterLayers& layers,
                     const PolicySettings& settings, OmnikvBudget& budget) {
  const double mem = settings.Float("mem");
  budget.rule.budget = budget.capacity = static_cast<int32_t>(context.max_context);
  if (mem == 0) {
    budget.rule.budget = static_cast<int32_t>(settings.Int("budget"));
    budget.capacity = std::min(budget.rule.budget, budget.capacity);
    return {};
  }
  if (!settings.IsAuto("budget")) {
    return InvalidArgument(
        fmt::format("policy omnikv: mem is {} and budget is {}, expected only one of them", mem,
                    settings.Text("budget")));
  }
  const double n_layers = context.n_layers;
  const double n_dense = layers.n_dense();
  if (mem < 1 && mem * n_layers <= n_dense) {
    return InvalidArgument(
        fmt::format("policy omnikv: mem is {}, but the {} dense layers of {} alone take {:.3f}",
                    mem, layers.n_dense(), context.n_layers, n_dense / n_layers));
  }
  // Less what rounding may have added, which would make one token more of a whole number of them.
  budget.rule.share = mem < 1 ? (mem * n_layers - n_dense) / (n_layers - n_dense) * (1 - 1e-12) : 1;
  if (budget.rule.share * static_cast<double>(context.max_context) >= 1) return {};
  return InvalidArgument(
      fmt::format("policy omnikv: mem is {}, which leaves a sparse layer less than one token to "
                  "select of a context of {}, expected more than that",
                  mem, context.max_context));
}

// Tokens of context up to which the choices of a step take longer than the reading that they save:
// from n = choices * selection_tokens / sparse layers + At(n). None where layers read everything
// for their scores, or read from the host.
int64_t DenseIsFasterBelow(const PolicyContext& context, const FilterLayers& layers,
                           const RangeRule& rule) {
  const double n_sparse = context.n_layers - layers.n_dense();
  if (context.fetches || layers.every_layer() || n_sparse < 1 || rule.share == 1) return 0;
  // By an index, a layer chooses twice.
  const double choices = layers.n_choices() * (layers.indexed() ? 2.0 : 1.0);
  if (context.selection_tokens == 0) return 0;
  const double saved = choices * static_cast<double>(context.selection_tokens) / n_sparse;
  const double n = rule.share == 0 ? saved + rule.budget : saved / (1 - rule.share);
  return std::llround(std::min(n, static_cast<double>(context.max_context)));
}

// The rows that come ahead in a step are so small a share of the budget: four times as many save
// hardly more misses (docs/decisions/098).
constexpr int64_t kBudgetOfAhead = 32;

Status ResolveAhead(const PolicyContext& context, const FilterLayers& layers,
                    const PolicySettings& settings, OmnikvBudget& budget) {
  if (settings.Text("fetch") != "ahead") return {};
  if (layers.every_layer() || settings.Text("lists") != "one") {
    return InvalidArgument(
        "policy omnikv: fetch is ahead, expected lists=one and select_every_layer=0: other "
        "selections have no working set");
  }
  if (settings.Text("score") != "softmax") {
    return InvalidArgument(
        "policy omnikv: fetch is ahead and score is raw, expected score=softmax: rows come ahead "
        "by weights of past steps");
  }
  const int64_t room = context.max_context - budget.max_tokens;
  budget.max_ahead =
      std::min(room, (budget.At(context.max_context) + kBudgetOfAhead - 1) / kBudgetOfAhead);
  return {};
}

}  // namespace

Result<OmnikvBudget> OmnikvBudget::Resolve(const PolicyContext& context, const FilterLayers& layers,
                                           PolicySettings& settings) {
  OmnikvBudget budget;
  OKV_RETURN_IF_ERROR(ResolveTokens(context, layers, settings, budget));
  RangeRule& rule = budget.rule;
  const bool whole_answer = settings.Text("tail") == "all";
  rule.tail = whole_answer ? kWholeAnswer : static_cast<int32_t>(settings.Int("tail"));
  const auto window = static_cast<int32_t>(settings.Int("window"));
  rule.min_recent = settings.Text("selector") == "last" || window == 1 ? 0 : window;
  // The longest context has the largest budget.
  OKV_RETURN_IF_ERROR(budget.CheckPrompt(context.max_context));
  if (const int64_t sinks = settings.Int("sinks");
      sinks > 0 && sinks >= budget.At(context.max_context)) {
    return InvalidArgument(
        fmt::format("policy omnikv: sinks is {}, expected less than the budget, which is {}", sinks,
                    budget.At(context.max_context)));
  }
  if (settings.IsAuto("dense_below")) {
    settings.Resolve("dense_below", std::to_string(DenseIsFasterBelow(context, layers, rule)));
  }
  if (!context.force_indices) {
    rule.dense_below = static_cast<int32_t>(settings.Int("dense_below"));
  }
  const auto factor = static_cast<double>(settings.Int("rescore"));
  budget.rescored = rule;
  budget.rescored.share = std::min(1.0, factor * rule.share);
  budget.rescored.budget = static_cast<int32_t>(
      std::min(factor * rule.budget, static_cast<double>(context.max_context)));
  budget.rescored_capacity = budget.rescored.budget;
  const int64_t selected = budget.At(context.max_context);
  // A sequence of a batch is below dense_below in steps that select for others.
  const int64_t whole = context.max_seqs > 1 ? rule.dense_below : 0;
  budget.max_tokens = std::min<int64_t>(std::max(selected + rule.tail, whole), context.max_context);
  OKV_RETURN_IF_ERROR(ResolveAhead(context, layers, settings, budget));
  if (!whole_answer || !context.fetches) return budget;
  return InvalidArgument(
      "policy omnikv: tail is all, expected a number of tokens where layers' K/V live on the "
      "host: the device has no room there for an answer of any length");
}

Status OmnikvBudget::CheckPrompt(int64_t prompt) const {
  // Of the first step that is not dense.
  const int64_t length = std::max<int64_t>(prompt, rule.dense_below) + 1;
  if (rule.min_recent == 0 || At(length) > rule.min_recent || At(length) >= prompt) return {};
  return InvalidArgument(
      fmt::format("policy omnikv: the budget at {} tokens of context is {}, all of which a window "
                  "of {} queries takes, expected more than that, to leave some to select: lower "
                  "window, or set dense_below",
                  length, At(length), rule.min_recent));
}

}  // namespace omnikv
