#include "engine/policy_cost.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>

#include "bank/bank.h"
#include "bank/kept_rows.h"
#include "base/check.h"
#include "engine/core.h"
#include "policy/kv_bytes_read.h"

namespace omnikv {
namespace {

// Of a layer's blocks in a table, of so many bytes each.
size_t BlocksBytes(const Policy& policy, const BankConfig& bank, size_t layer, int32_t table,
                   int64_t tokens, size_t block_bytes) {
  int32_t global = 0;  // the policy's number of the layer
  for (size_t l = 0; l < layer; ++l) global += bank.IsGlobal(l) ? 1 : 0;
  const TableSpec& spec = bank.tables[static_cast<size_t>(table)];
  const int64_t held = HeldTokens(policy, global, spec, tokens, bank.block_tokens);
  return static_cast<size_t>(held / bank.block_tokens) * block_bytes;
}

// States of the blocks that `tokens` tokens take.
size_t StatesHeld(const ModelConfig& config, const Policy& policy, const BankConfig& bank,
                  int64_t tokens) {
  std::vector<StateSpec> states = StatesByLayer(config, policy.States());
  for (const StateSpec& spec : PositionsSpecs(bank, policy.Kept())) states.push_back(spec);
  size_t bytes = 0;
  for (const StateSpec& state : states) {
    const auto layer = static_cast<size_t>(state.layer);
    const int64_t units = std::max(1, bank.block_tokens / state.unit);  // of a block
    const int32_t table = bank.layers[layer].table();
    bytes += BlocksBytes(policy, bank, layer, table, tokens,
                         static_cast<size_t>(bank.Sharing(table) * units * state.bytes_per_unit));
  }
  return bytes;
}

}  // namespace

Result<PolicyCost> CostOf(const PolicyInfo& info, PolicySettings settings,
                          const ModelConfig& config, Backend& backend, const MemoryPlan& plan,
                          bool placed, int64_t tokens) {
  PolicyCost cost;
  std::unique_ptr<Policy> policy = info.make();
  const BankConfig planned = MakeBankConfig(config, plan, /*max_sessions=*/1);
  PolicyContext context = ContextOn(backend, config, planned, plan);
  context.by_layer = placed && context.by_layer;
  context.fetches = placed && context.fetches;
  OKV_RETURN_IF_ERROR(policy->Prepare(context, settings));
  MemoryPlan own = plan;  // the policy's
  if (!placed) {
    own.tiers.clear();
    own.stages = MemoryPlan{}.stages;
  }
  PlanPolicy(config, *policy, /*max_sessions=*/1, own);
  BankConfig bank = MakeBankConfig(config, own, /*max_sessions=*/1);
  bank.pool_tokens = plan.context;
  if (bank.Rows().heads_apart != context.row_layout.heads_apart) {  // of which it keeps less
    context.row_layout = bank.Rows();
    policy = info.make();
    OKV_RETURN_IF_ERROR(policy->Prepare(context, settings));
  }
  if (!placed) own.working_sets = Bank::StageBytes(bank);
  const LayerSpec& spec = bank.layers.front();
  const KvView kv{.k = {.dtype = bank.dtype},
                  .v = {.dtype = bank.dtype},
                  .n_kv_heads = spec.n_kv_heads,
                  .dk = spec.dk,
                  .dv = spec.dv};
  std::vector<int64_t> layer_gone;
  const SeqLength at = AtPromptEnd(policy->Kept(), tokens, layer_gone);
  uint64_t read = 0;  // by global-attention layers
  uint64_t all = 0;
  int32_t budgeted = 0;
  ForGlobalLayers(config, [&](int32_t, int32_t global) {
    budgeted += policy->Budgeted(global) ? 1 : 0;
    read += KvBytesRead(*policy, global, at, kv);
    all += KvBytes(kv, tokens * kv.n_kv_heads, /*values=*/true);
  });
  cost.read_fraction = all > 0 ? static_cast<double>(read) / static_cast<double>(all) : 1;
  cost.read_bytes = read;
  for (const LayerConfig& layer : config.layers) {
    if (layer.window == 0) continue;
    cost.read_bytes +=
        KvBytes(kv, std::min<int64_t>(layer.window, tokens) * kv.n_kv_heads, /*values=*/true);
  }
  cost.settings = settings.ToString();
  cost.dense_layers = context.n_layers - budgeted;
  for (size_t l = 0; l < bank.layers.size(); ++l) {
    const LayerSpec& layer = bank.layers[l];
    for (const StreamSpec& s : layer.streams) {
      const size_t block = bank.StreamBytes(layer, s) * static_cast<size_t>(bank.block_tokens);
      (s.on_disk                   ? cost.held.disk
       : s.tier == TierKind::kHost ? cost.held.host
                                   : cost.held.own) +=
          BlocksBytes(*policy, bank, l, s.table, tokens, block);
    }
  }
  cost.policy_bytes = policy->Bytes() + StatesHeld(config, *policy, bank, tokens);
  cost.held.own += own.working_sets + cost.policy_bytes;
  cost.reserved = {.own = Bank::ReservedBytes(bank, TierKind::kDevice) + own.prompt +
                          own.working_sets + policy->Bytes() + StateBytes(config, bank, *policy),
                   .host = Bank::ReservedBytes(bank, TierKind::kHost) - Bank::ReservedOnDisk(bank),
                   .disk = Bank::ReservedOnDisk(bank)};
  cost.held_fraction = static_cast<double>(cost.held.own) /
                       (static_cast<double>(tokens) * static_cast<double>(plan.kv_per_token));
  return cost;
}

namespace {

Result<const PolicyInfo*> InfoOf(const CostModel& model, const PolicyOptions& policy) {
  return ResolvePolicy(policy.name, model.config.name, GlobalLayers(model.config));
}

}  // namespace

Result<PolicyCost> CostOf(const CostModel& model, const PolicyOptions& policy, int64_t tokens) {
  EngineOptions options = model.options;
  options.policy = policy;
  OKV_ASSIGN_OR_RETURN(const PolicyInfo* info, InfoOf(model, policy));
  OKV_ASSIGN_OR_RETURN(PolicySettings settings,
                       PolicySettings::Parse(info->name, info->settings, policy.settings));
  OKV_ASSIGN_OR_RETURN(const MemoryPlan plan, PlanMemory(options, model.config, model.weight_bytes,
                                                         model.format, model.backend));
  return CostOf(*info, std::move(settings), model.config, model.backend, plan, /*placed=*/true,
                tokens);
}

const char* CostMeasureName(CostMeasure measure) {
  return measure == CostMeasure::kHeld ? "held" : "read";
}

namespace {

// The values of a knob, ascending by what they cost.
class Values {
 public:
  Values(const SettingSpec& spec, bool falls, int64_t tokens) : spec_(spec), falls_(falls) {
    if (spec.type == SettingType::kInt) {
      last_ = std::max<int64_t>(
          0, std::min(static_cast<int64_t>(spec.max), tokens) - static_cast<int64_t>(spec.min));
    }
  }

  int64_t last() const { return last_; }  // the index of the dearest
  double At(int64_t i) const {
    if (falls_) i = last_ - i;
    if (spec_.type == SettingType::kInt) return spec_.min + static_cast<double>(i);
    return spec_.min +
           (spec_.max - spec_.min) * static_cast<double>(i) / static_cast<double>(last_);
  }
  static std::string Text(const SettingSpec& spec, double value) {
    if (spec.type == SettingType::kInt) return fmt::format("{:.0f}", std::floor(value));
    return fmt::format("{:.6f}", value);
  }

 private:
  const SettingSpec& spec_;
  bool falls_;
  int64_t last_ = 1 << 16;
};

bool Has(const SettingList& list, const std::string& key) {
  return std::any_of(list.begin(), list.end(), [&](const auto& s) { return s.first == key; });
}

const SettingSpec& SpecOf(const PolicyInfo& info, const std::string& key) {
  const auto spec = std::find_if(info.settings.begin(), info.settings.end(),
                                 [&](const SettingSpec& s) { return s.key == key; });
  OKV_CHECK(spec != info.settings.end() &&
                (spec->type == SettingType::kInt || spec->type == SettingType::kFloat),
            "policy {} has no number '{}'", info.name, key);
  return *spec;
}

// `given`, the knob at `value`, and what goes with it.
PolicyOptions AtValue(const PolicyInfo& info, const PolicyOptions& given, double value) {
  PolicyOptions policy = given;
  policy.name = info.name;
  const auto add = [&](const std::string& key, std::string text) {
    if (!Has(given.settings, key)) policy.settings.emplace_back(key, std::move(text));
  };
  const CostKnob& knob = info.knob;
  add(knob.key, Values::Text(SpecOf(info, knob.key), value));
  for (const auto& [key, text] : knob.with) add(key, text);
  for (const auto& [key, part] : knob.parts) {
    add(key, Values::Text(SpecOf(info, key), value * part));
  }
  return policy;
}

}  // namespace

Status CheckKnob(const CostModel& model, const PolicyOptions& given) {
  OKV_ASSIGN_OR_RETURN(const PolicyInfo* info, InfoOf(model, given));
  const std::string& key = info->knob.key;
  if (key.empty() || !Has(given.settings, key)) return {};
  return InvalidArgument(fmt::format(
      "policy {}: {} is given, but a comparison at equal cost solves it, expected other "
      "settings alone",
      info->name, key));
}

Result<EqualCost> SolveCost(const CostModel& model, const PolicyOptions& given, CostMeasure measure,
                            double share, int64_t tokens) {
  OKV_ASSIGN_OR_RETURN(const PolicyInfo* info, InfoOf(model, given));
  const CostKnob& knob = info->knob;
  const auto of = [&](const PolicyCost& cost) {
    return measure == CostMeasure::kHeld ? cost.held_fraction : cost.read_fraction;
  };
  const auto least = [&](const PolicyCost& cost, const std::string& where) {
    const std::string& what = measure == CostMeasure::kHeld ? info->facts.keeps : info->facts.reads;
    return fmt::format("{} {:.1f} % at least{}{}",
                       measure == CostMeasure::kHeld ? "holds" : "reads", 100 * of(cost), where,
                       what.empty() ? "" : ": " + what);
  };
  EqualCost equal{.policy = given};
  equal.policy.name = info->name;
  if (knob.key.empty()) {
    OKV_ASSIGN_OR_RETURN(equal.cost, CostOf(model, equal.policy, tokens));
    if (of(equal.cost) > share) equal.beyond = least(equal.cost, ", and no setting scales it");
    return equal;
  }
  const Values values(SpecOf(*info, knob.key), knob.falls, tokens);
  // The costs of values that the policy refuses lie below: it needs more than those to run at all.
  Status refused;
  const auto cost_at = [&](int64_t i) -> Result<std::optional<PolicyCost>> {
    auto cost = CostOf(model, AtValue(*info, given, values.At(i)), tokens);
    if (cost.ok()) return std::optional<PolicyCost>(*cost);
    if (cost.status().code() != StatusCode::kInvalidArgument) return cost.status();
    refused = cost.status();
    return std::optional<PolicyCost>();
  };
  int64_t below = -1;                 // the dearest that is not above the share
  int64_t above = values.last() + 1;  // the cheapest that is
  std::optional<PolicyCost> cost_below, cost_above;
  while (above - below > 1) {
    const int64_t i = below + (above - below) / 2;
    OKV_ASSIGN_OR_RETURN(std::optional<PolicyCost> cost, cost_at(i));
    if (cost && of(*cost) > share) {
      above = i;
      cost_above = std::move(cost);
    } else {
      below = i;
      cost_below = std::move(cost);
    }
  }
  if (!cost_below && !cost_above) return refused;
  const double value = values.At(cost_below ? below : above);
  equal.policy = AtValue(*info, given, value);
  equal.cost = cost_below ? *cost_below : *cost_above;
  if (!cost_below) {
    const std::string text = Values::Text(SpecOf(*info, knob.key), value);
    equal.beyond = least(equal.cost, fmt::format(" ({}={})", knob.key, text));
  }
  return equal;
}

}  // namespace omnikv
