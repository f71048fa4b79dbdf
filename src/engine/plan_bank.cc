// The bank of a memory plan.
#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "backend/kv_format.h"
#include "bank/kept_rows.h"
#include "engine/placement.h"
#include "model/forward.h"

namespace omnikv {

DeclaredReads ReadsByLayer(const ModelConfig& config, DeclaredReads reads) {
  std::vector<int32_t> by_layer(config.layers.size(), -1);
  ForGlobalLayers(config, [&](int32_t layer, int32_t global) {
    const auto n = static_cast<size_t>(global);
    if (n < reads.selection_of.size()) by_layer[static_cast<size_t>(layer)] = reads.selection_of[n];
  });
  reads.selection_of = std::move(by_layer);
  if (std::count(reads.few_values.begin(), reads.few_values.end(), true) == 0) {
    reads.few_values.clear();
    return reads;
  }
  std::vector<bool> few_values(config.layers.size());
  ForGlobalLayers(config, [&](int32_t layer, int32_t global) {
    few_values[static_cast<size_t>(layer)] = reads.few_values[static_cast<size_t>(global)];
  });
  reads.few_values = std::move(few_values);
  return reads;
}

std::vector<StateSpec> StatesByLayer(const ModelConfig& config, std::vector<StateSpec> states) {
  std::vector<int32_t> layers;  // of the model, by their numbers among the global ones
  ForGlobalLayers(config, [&](int32_t layer, int32_t) { layers.push_back(layer); });
  for (StateSpec& spec : states) spec.layer = layers[static_cast<size_t>(spec.layer)];
  return states;
}

size_t StateBytes(const ModelConfig& config, const BankConfig& bank, const Policy& policy) {
  size_t bytes = 0;
  for (const StateSpec& spec : PositionsSpecs(bank, policy.Kept())) bytes += bank.StateBytes(spec);
  for (const StateSpec& spec : StatesByLayer(config, policy.States())) {
    bytes += bank.StateBytes(spec);
  }
  return bytes;
}

namespace {

// The heads of each class have a stream of their own, and a table where they are not of class 0.
void SplitByHeads(const ModelConfig& config, const MemoryPlan& plan, BankConfig& bank) {
  if (plan.head_classes.empty()) return;
  const auto first_table = static_cast<int32_t>(bank.tables.size());
  for (size_t c = 1; c < plan.head_classes.size(); ++c) {
    bank.tables.push_back(
        {.max_held = plan.head_classes[c].max_held, .head_class = static_cast<int32_t>(c)});
  }
  ForGlobalLayers(config, [&](int32_t layer, int32_t global) {
    LayerSpec& spec = bank.layers[static_cast<size_t>(layer)];
    const StreamSpec whole = spec.streams.front();
    spec.streams.clear();
    for (size_t c = 0; c < plan.head_classes.size(); ++c) {
      const std::vector<int32_t>& heads = plan.head_classes[c].heads[static_cast<size_t>(global)];
      if (heads.empty()) continue;
      StreamSpec& stream = spec.streams.emplace_back(whole);
      if (static_cast<int32_t>(heads.size()) < spec.n_kv_heads) stream.heads = heads;
      if (c > 0) stream.table = first_table + static_cast<int32_t>(c) - 1;
    }
  });
}

// Layers that keep different numbers of rows have a table each, the first of them table 0, or one
// for each KV head. The latter all draw on the same blocks: how many rows a layer keeps is known
// only once the prompt is whole.
void SplitByLayers(const ModelConfig& config, const MemoryPlan& plan, BankConfig& bank) {
  if (plan.layer_held.empty()) return;
  ForGlobalLayers(config, [&](int32_t layer, int32_t global) {
    const int64_t held = plan.layer_held[static_cast<size_t>(global)];
    TableSpec spec{.max_held = held};
    if (plan.heads_apart && held > 0 && !plan.by_layer) spec.prompt_tokens = plan.context;
    const auto table = static_cast<int32_t>(global == 0 ? 0 : bank.tables.size());
    if (global == 0) bank.tables.front() = spec;
    spec.shares = plan.heads_apart;
    if (global > 0) bank.tables.push_back(spec);
    for (StreamSpec& stream : bank.layers[static_cast<size_t>(layer)].streams) {
      stream.table = table;
      stream.heads_apart = plan.heads_apart;
    }
    for (int32_t head = 1; plan.heads_apart && head < config.n_kv_heads; ++head) {
      bank.tables.push_back(spec);
    }
  });
}

}  // namespace

BankConfig MakeBankConfig(const ModelConfig& config, const MemoryPlan& plan, int32_t max_sessions) {
  BankConfig bank;
  bank.layers.assign(
      config.layers.size(),
      {.n_kv_heads = config.n_kv_heads, .dk = config.head_dim, .dv = config.head_dim});
  for (size_t layer = 0; layer < plan.tiers.size(); ++layer) {
    bank.layers[layer].streams.front().tier = plan.tiers[layer];
  }
  const bool fits_by_head =
      KvFitsByHead(plan.kv_dtype, config.n_kv_heads, config.head_dim, config.head_dim);
  for (LayerSpec& layer : bank.layers) {
    layer.streams.front().by_head = plan.by_head && fits_by_head && layer.OnHost();
  }
  for (size_t layer = 0; layer < plan.values_apart.size(); ++layer) {
    if (!plan.values_apart[layer]) continue;
    const TierKind tier = plan.values_away ? TierKind::kHost : TierKind::kDevice;
    bank.layers[layer].streams = {{.planes = Planes::kK}, {.planes = Planes::kV, .tier = tier}};
  }
  for (size_t layer = 0; plan.on_disk && layer < bank.layers.size(); ++layer) {
    if (!plan.disk_layers.empty() && !plan.disk_layers[layer]) continue;
    for (StreamSpec& stream : bank.layers[layer].streams) {
      stream.on_disk = stream.tier == TierKind::kHost;
    }
  }
  bank.tables[0].max_held = plan.max_held;
  SplitByLayers(config, plan, bank);
  std::map<int32_t, int32_t> table_of;  // by window
  for (size_t layer = 0; layer < bank.layers.size(); ++layer) {
    const int32_t window = config.layers[layer].window;
    if (window == 0) continue;
    const auto [table, added] =
        table_of.try_emplace(window, static_cast<int32_t>(bank.tables.size()));
    if (added) {
      bank.tables.push_back({.window = window, .max_held = window + kSpareTokens});
      // The prompt's last rows, and those of a pass.
      if (plan.heads_apart) {
        bank.tables.back().prompt_tokens =
            2 * window + kSpareTokens + 4 * kBlockTokens + plan.chunk;
      }
    }
    for (StreamSpec& stream : bank.layers[layer].streams) stream.table = table->second;
  }
  SplitByHeads(config, plan, bank);
  bank.step_tokens = plan.chunk;
  bank.dtype = plan.kv_dtype;
  bank.block_tokens = kBlockTokens;
  bank.n_stages = plan.stages;
  bank.max_tokens = plan.context;
  // Forks and sessions each round up to a block.
  bank.pool_tokens = (plan.kv_tokens != 0 ? plan.kv_tokens : plan.context * max_sessions) +
                     kBlockTokens * max_sessions;
  bank.max_seqs = max_sessions + plan.kept;
  return bank;
}

}  // namespace omnikv
