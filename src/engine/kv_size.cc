#include "engine/kv_size.h"

#include <algorithm>

#include "model/limits.h"

namespace omnikv {

size_t ResidualBytes(const ModelConfig& config, int64_t tokens) {
  return static_cast<size_t>(tokens) * static_cast<size_t>(config.d_model) * sizeof(float);
}

size_t PromptBytes(const ModelConfig& config, const BankConfig& bank, int64_t tokens) {
  const size_t rows = static_cast<size_t>(tokens) * bank.LargestRowBytes();
  return bank.Rows().heads_apart ? rows : rows + ResidualBytes(config, tokens);
}

KvSize::KvSize(const ModelConfig& config, const MemoryPlan& plan, int32_t sessions) {
  BankConfig bank = MakeBankConfig(config, plan, sessions);
  const auto tokens = static_cast<size_t>(bank.PoolTokens());
  stages_per_token = (Bank::StageBytes(bank) + tokens - 1) / tokens;
  for (LayerSpec& layer : bank.layers) {
    std::erase_if(layer.streams, [&](const StreamSpec& stream) {
      if (bank.tables[static_cast<size_t>(stream.table)].max_held != 0) return false;
      if (stream.tier == TierKind::kDevice) per_token += bank.StreamBytes(layer, stream);
      return true;
    });
  }
  // What heads that are apart keep is a share of the context.
  const size_t kept = Bank::ReservedBytes(bank, TierKind::kDevice);
  for (LayerSpec& layer : bank.layers) {
    std::erase_if(layer.streams, [](const StreamSpec& stream) { return stream.heads_apart; });
  }
  fixed = Bank::ReservedBytes(bank, TierKind::kDevice);
  per_token += (kept - fixed + tokens - 1) / tokens;
  if (plan.by_layer) prompt_per_token = PromptBytes(config, bank, 1);
  states_per_token = (plan.states + tokens - 1) / tokens;
}

size_t KvSize::Fits(size_t room, size_t sessions) const {
  if (room < fixed) return 0;
  const size_t a_token = InSession() * sessions + prompt_per_token;
  return a_token == 0 ? static_cast<size_t>(ModelLimits::kContext) + kBlockTokens
                      : (room - fixed) / a_token;
}

}  // namespace omnikv
