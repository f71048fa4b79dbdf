#include "engine/block_needs.h"

#include <fmt/format.h>

#include <algorithm>

namespace omnikv {
namespace {

// Rows that a sequence has in a table at most. `global`: a layer in it, as the policy counts them.
int64_t MostRows(const EngineCore& core, const Policy& policy, const TableSpec& table,
                 int32_t global, int64_t prompt, int64_t total) {
  const int64_t chunk = std::min<int64_t>(core.work.max_rows, prompt);
  const int32_t block = core.bank->config().block_tokens;
  const Keeps keeps = policy.Kept();
  if (table.window > 0 || keeps.rows == 0) {
    return std::min(total, HeldTokens(policy, global, table, total, block) + chunk);
  }
  const int64_t after = keeps.RowsAfter(global, prompt) + (keeps.every_step ? 1 : total - prompt);
  if (core.plan.by_layer) return after;
  // All of a prompt until the choice, and a pass over it; or chunk by chunk.
  const int64_t passes = keeps.passes ? prompt + chunk : 0;
  return std::max(
      after, keeps.chunk > 0 ? std::min(prompt, after + keeps.chunk + chunk) : prompt + passes);
}

}  // namespace

BlockCounts MostBlocks(const EngineCore& core, const Policy& policy, int64_t prompt,
                       int64_t total) {
  const BankConfig& bank = core.bank->config();
  std::vector<int32_t> global_of(bank.tables.size(), 0);
  ForGlobalLayers(core.config, [&](int32_t layer, int32_t global) {
    const LayerSpec& spec = bank.layers[static_cast<size_t>(layer)];
    for (const StreamSpec& stream : spec.streams) {
      for (int32_t i = 0; i < bank.TablesOf(spec, stream); ++i) {
        global_of[static_cast<size_t>(stream.table + i)] = global;
      }
    }
  });
  BlockCounts most(bank.tables.size(), 0);
  for (size_t t = 0; t < bank.tables.size(); ++t) {
    const int64_t rows = MostRows(core, policy, bank.tables[t], global_of[t], prompt, total);
    const auto table = static_cast<int32_t>(t);
    most[static_cast<size_t>(bank.FirstSharing(table))] += bank.BlocksFor(rows) + 1;
  }
  for (size_t t = 0; t < most.size(); ++t) {
    // The memory plan has room for one context whose rows are dropped or kept by this policy.
    if (bank.tables[t].max_held == 0 || most[t] == 0) continue;
    most[t] = std::min(most[t], core.bank->TotalBlocks(static_cast<int32_t>(t)));
  }
  return most;
}

Status CheckBlocks(const EngineCore& core, const BlockCounts& most, int64_t total) {
  for (size_t t = 0; t < most.size(); ++t) {
    const int64_t there = core.bank->TotalBlocks(static_cast<int32_t>(t));
    if (most[t] <= there) continue;
    return ResourceExhausted(fmt::format(
        "{} tokens of prompt and answer take {} blocks of {} tokens, but there are {} in all: "
        "shorten the prompt or `max_tokens`",
        total, most[t], core.bank->config().block_tokens, there));
  }
  return {};
}

}  // namespace omnikv
