#include "policy/omnikv/budget.h"

#include <fmt/format.h>

#include <algorithm>

namespace omnikv {
namespace {

// Either `budget` tokens or, from mem = (dense * n + sparse * budget) / (layers * n), the share of
// the n tokens in context that a sparse layer reads.
Status ResolveTokens(const PolicyContext& context, const FilterLayers& layers,
                     const PolicySettings& settings, OmnikvBudget& budget) {
  const double mem = settings.Float("mem");
  budget.tokens = budget.capacity = static_cast<int32_t>(context.max_context);
  if (mem == 0) {
    budget.tokens = static_cast<int32_t>(settings.Int("budget"));
    budget.capacity = std::min(budget.tokens, budget.capacity);
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
  budget.share = mem < 1 ? (mem * n_layers - n_dense) / (n_layers - n_dense) * (1 - 1e-12) : 1;
  return {};
}

}  // namespace

Result<OmnikvBudget> OmnikvBudget::Resolve(const PolicyContext& context, const FilterLayers& layers,
                                           const PolicySettings& settings) {
  OmnikvBudget budget;
  OKV_RETURN_IF_ERROR(ResolveTokens(context, layers, settings, budget));
  budget.cache = settings.IsAuto("cache") ? 0 : settings.Int("cache");
  const int64_t most = budget.At(context.max_context);
  if (budget.cache == 0 || budget.cache >= most) return budget;
  return InvalidArgument(
      fmt::format("policy omnikv: cache is {}, expected at least the budget of {} tokens, or auto",
                  budget.cache, most));
}

}  // namespace omnikv
