#include "engine/kcache_model.h"

#include <algorithm>

namespace omnikv {
namespace {

// Of K, or of V, of all KV heads of one layer.
double BytesOf(const KcacheLoad& load, double tokens) {
  return load.batch * tokens * load.kv_heads * load.head_dim * load.value_bytes;
}

KcacheStep Timed(const CardRates& card, const KcacheLoad& load, KcacheStep step) {
  step.seconds = (step.weights + step.k + step.v_card) / card.read_bytes_s;
  if (step.v_bus > 0) step.seconds += step.v_bus / card.from_host_bytes_s;
  if (card.flops > 0) step.flop_seconds = 2 * load.parameters * load.batch / card.flops;
  step.tokens_s = load.batch / std::max(step.seconds, step.flop_seconds);
  return step;
}

}  // namespace

KcacheStep FullStep(const CardRates& card, const KcacheLoad& load) {
  const double all = load.layers * BytesOf(load, static_cast<double>(load.context));
  return Timed(card, load, {.weights = load.weight_bytes, .k = all, .v_card = all});
}

KcacheStep KcacheStepOf(const CardRates& card, const KcacheLoad& load) {
  const double layer = BytesOf(load, static_cast<double>(load.context));
  const int32_t first = std::min(load.first_layers, load.layers);
  const int32_t others = load.layers - first;
  const double chosen =
      others * BytesOf(load, static_cast<double>(std::min(load.top, load.context)));
  KcacheStep step{.weights = load.weight_bytes, .k = load.layers * layer, .v_card = first * layer};
  (card.from_host_bytes_s > 0 ? step.v_bus : step.v_card) += chosen;
  return Timed(card, load, step);
}

double BreakEven(const CardRates& card) {
  return card.from_host_bytes_s > 0 ? card.read_bytes_s / card.from_host_bytes_s : 0;
}

int64_t MostSequences(const CardRates& card, const KcacheLoad& load, bool kcache) {
  KcacheLoad one = load;
  one.batch = 1;
  const double layer = BytesOf(one, static_cast<double>(load.context));
  const double held = (load.layers + (kcache ? load.first_layers : load.layers)) * layer;
  return std::max<int64_t>(0, static_cast<int64_t>((card.memory_bytes - load.weight_bytes) / held));
}

CardRates PaperCard() {
  return {.memory_bytes = 64e9, .read_bytes_s = 1e12, .from_host_bytes_s = 32e9, .flops = 180e12};
}

KcacheLoad PaperLoad(int32_t batch, int64_t context, int64_t top) {
  constexpr double kParameters = 6.738e9;
  return {.weight_bytes = 2 * kParameters,
          .parameters = kParameters,
          .layers = 32,
          .kv_heads = 32,
          .head_dim = 128,
          .batch = batch,
          .context = context,
          .top = top};
}

}  // namespace omnikv
