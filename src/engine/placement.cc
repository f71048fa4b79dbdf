#include "engine/placement.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "backend/kv_format.h"
#include "bank/fetched_units.h"
#include "bank/fetched_values.h"
#include "bank/kept_rows.h"
#include "bank/working_sets.h"
#include "base/check.h"
#include "base/log.h"
#include "base/memory.h"
#include "base/thread_pool.h"
#include "engine/asking_backend.h"
#include "engine/compositions.h"
#include "engine/disk_layers.h"
#include "io/nameless_file.h"
#include "model/forward.h"
#include "model/limits.h"
#include "policy/policy.h"

namespace omnikv {
namespace {

Result<DType> KvDType(const std::string& name, bool all_f32) {
  if (name == "auto") return all_f32 ? DType::kF32 : DType::kF16;
  for (const DType t : {DType::kF16, DType::kBF16, DType::kF32, DType::kQ8_0, DType::kQ4_0}) {
    if (name == DTypeName(t)) return t;
  }
  return InvalidArgument(
      fmt::format("`kv_dtype` is '{}', expected auto, f16, bf16, f32, q8_0 or q4_0", name));
}

StepLimits LimitsOf(const ModelConfig& config, int32_t max_rows) {
  const int64_t heads = int64_t{config.n_heads} * config.head_dim;
  const int64_t widest = std::max({int64_t{config.d_model}, heads, int64_t{config.ffn}});
  return {.max_rows = max_rows,
          .n_heads = config.n_heads,
          .n_kv_heads = config.n_kv_heads,
          .head_dim = config.head_dim,
          .widest = widest,
          .largest = widest * config.d_model};
}

}  // namespace

Status CheckOptions(const EngineOptions& o) {
  if (o.threads < 0 || o.threads > ThreadPool::kMaxThreads) {
    return InvalidArgument(fmt::format("`threads` is {}, expected 0 (physical cores) to {}",
                                       o.threads, ThreadPool::kMaxThreads));
  }
  if (o.precision != "fast" && o.precision != "full") {
    return InvalidArgument(fmt::format("`precision` is '{}', expected fast or full", o.precision));
  }
  OKV_RETURN_IF_ERROR(KvDType(o.kv_dtype, /*all_f32=*/false).status());
  if (o.context < 0 || o.context > ModelLimits::kContext) {
    return InvalidArgument(fmt::format("`context` is {}, expected tokens, 0 (the model's) to {}",
                                       o.context, ModelLimits::kContext));
  }
  if (o.prefill_chunk < 0 || o.prefill_chunk > 65536) {
    return InvalidArgument(fmt::format(
        "`prefill_chunk` is {}, expected rows, 0 (the device's) to 65536", o.prefill_chunk));
  }
  if (o.place != "auto" && o.place != "device" && o.place != "host" && o.place != "disk") {
    return InvalidArgument(
        fmt::format("`place` is '{}', expected auto, device, host or disk", o.place));
  }
  if (o.kv_folder.empty() && (o.place == "disk" || o.disk_space != 0)) {
    return InvalidArgument(fmt::format("{} is given, but no `kv_folder`, in which K/V could lie",
                                       o.place == "disk" ? "`place` disk" : "`disk_space`"));
  }
  if (o.host_reads != "auto" && o.host_reads != "fetch" && o.host_reads != "attend") {
    return InvalidArgument(
        fmt::format("`host_reads` is '{}', expected auto, fetch or attend", o.host_reads));
  }
  if (o.working_set < 0 || o.working_set > ModelLimits::kContext) {
    return InvalidArgument(
        fmt::format("`working_set` is {}, expected tokens, 0 (what there is room for) to {}",
                    o.working_set, ModelLimits::kContext));
  }
  if (o.max_sessions < 1 || o.max_sessions > 4096) {
    return InvalidArgument(fmt::format("max_sessions is {}, expected 1 to 4096", o.max_sessions));
  }
  if (o.kept_contexts < 0 || o.kept_contexts > 4096) {
    return InvalidArgument(
        fmt::format("`kept_contexts` is {}, expected 0 to 4096", o.kept_contexts));
  }
  if (o.kv_tokens < EngineOptions::kAsManyAsFit) {
    return InvalidArgument(
        fmt::format("`kv_tokens` is {}, expected a number of tokens, or auto", o.kv_tokens));
  }
  return {};
}

PolicyContext ContextOf(const ModelConfig& config, int64_t context) {
  const int32_t n_layers = GlobalLayers(config);
  return {.model_name = config.name,
          .model_path = config.path,
          .n_layers = n_layers,
          .n_heads = config.n_heads,
          .n_kv_heads = config.n_kv_heads,
          .dk = config.head_dim,
          .max_context = context,
          .inv_freq = std::vector<const float*>(static_cast<size_t>(n_layers), nullptr)};
}

PolicyContext ContextOn(Backend& backend, const ModelConfig& config, const BankConfig& bank,
                        const MemoryPlan& plan) {
  PolicyContext context = ContextOf(config, plan.context);
  context.backend = &backend;
  context.max_rows = plan.chunk;
  context.by_layer = plan.by_layer;
  context.fetches = plan.host_layers > 0;
  context.row_layout = bank.Rows();
  context.selection_tokens = static_cast<int64_t>(backend.SelectionBytes() / bank.RowBytes(0));
  return context;
}

Result<std::unique_ptr<Policy>> PolicyFor(const PolicyOptions& options, const ModelConfig& config,
                                          int64_t context, bool fetches) {
  OKV_ASSIGN_OR_RETURN(const PolicyInfo* info,
                       ResolvePolicy(options.name, config.name, GlobalLayers(config)));
  OKV_ASSIGN_OR_RETURN(auto settings,
                       PolicySettings::Parse(info->name, info->settings, options.settings));
  std::unique_ptr<Policy> policy = info->make();
  PolicyContext policy_context = ContextOf(config, context);
  policy_context.fetches = fetches;
  OKV_RETURN_IF_ERROR(policy->Prepare(policy_context, settings));
  return policy;
}

namespace {

// That the options of places are for this backend.
Status CheckPlace(const EngineOptions& options, const Backend& backend) {
  if (backend.OnDevice()) return {};
  const bool disk = !options.kv_folder.empty();
  const char* const other = options.gpu_memory != 0                                ? "`gpu_memory`"
                            : options.place == "device" || options.place == "host" ? "`place`"
                            : options.host_reads != "auto" && !disk                ? "`host_reads`"
                                                                                   : nullptr;
  if (other == nullptr) return {};
  return Unsupported(fmt::format("{} is given, but the model runs on {}", other, backend.Name()));
}

// That some of the layers which a policy lets go can lie on the disk of a card.
Status CheckDiskOfCard(const EngineOptions& options, const DeclaredReads& reads) {
  const bool fetched = options.host_reads != "attend" && reads.CanFetch();
  if ((reads.n_selections > 0 && fetched) || reads.streamed.layers > 0) return {};
  const auto any = [](const auto& layers, auto value) {
    return std::count(layers.begin(), layers.end(), value) > 0;
  };
  if (reads.n_selections == 0 && !any(reads.few_values, true) &&
      !any(reads.selection_of, kFewRows) && !any(reads.selection_of, kLastRows)) {
    return {};  // it lets none go
  }
  return Unsupported(
      fmt::format("`place` is disk, but `policy` {} with {} reads K/V where they are, which a card "
                  "cannot do on "
                  "a disk: expected `place` auto or host",
                  options.policy.name,
                  options.host_reads == "attend" ? "`host_reads` attend" : "these settings"));
}

Status CheckHostReads(const EngineOptions& options, const DeclaredReads& reads) {
  if (options.host_reads == "attend" && reads.n_selections > 0 && reads.max_recent == 0) {
    return InvalidArgument(fmt::format(
        "`host_reads` is attend, but `policy` {} with these settings has no layer that reads a "
        "selection and a bounded number of last tokens: expected auto or fetch",
        options.policy.name));
  }
  if (options.host_reads == "fetch" && !reads.CanFetch()) {
    return InvalidArgument(
        fmt::format("`host_reads` is fetch, but `policy` {} with these settings selects for each "
                    "KV head, which only the host can read where it is: expected auto or attend",
                    options.policy.name));
  }
  const int64_t tokens = options.working_set;
  if (tokens == 0 || tokens >= reads.LeastSlots()) return {};
  return InvalidArgument(
      fmt::format("`working_set` is {}, expected at least the {} tokens that {} in a step, or auto",
                  tokens, reads.LeastSlots(),
                  reads.max_ahead > 0 ? "a layer reads or fetches ahead" : "a layer reads"));
}

}  // namespace

int64_t MaxHeld(const Policy& policy, int64_t context, int32_t head_class) {
  const Policy::TokenRange dropped = policy.Dropped(context, head_class);
  return dropped.end > dropped.begin ? dropped.begin + (context - dropped.end) : 0;
}

namespace {

// What memory there is: all of the machine's, or less by an option.
struct Limit {
  Limit(const char* field, size_t cap, size_t machine, std::string_view of = "of available memory")
      : capped(cap != 0 && cap <= machine),
        bytes(capped ? cap : machine),
        name(capped ? fmt::format("{} {}", field, HumanBytes(bytes))
             : cap == 0
                 ? fmt::format("{} {}", HumanBytes(bytes), of)
                 : fmt::format("{} {} ({} is {})", HumanBytes(bytes), of, field, HumanBytes(cap))) {
  }
  bool capped;
  size_t bytes;
  std::string name;
};

size_t ResidualBytes(const ModelConfig& config, int64_t tokens) {
  return static_cast<size_t>(tokens) * static_cast<size_t>(config.d_model) * sizeof(float);
}

// Bytes of the rows of one layer of a prompt that passes layer by layer, and of its residual, which
// is in the host's memory where passes follow.
size_t PromptBytes(const ModelConfig& config, const BankConfig& bank, int64_t tokens) {
  const size_t rows = static_cast<size_t>(tokens) * bank.LargestRowBytes();
  return bank.Rows().heads_apart ? rows : rows + ResidualBytes(config, tokens);
}

// Bytes of the K/V of `plan` in all sessions, what is on the host left out: of layers that keep
// every token, by the token of one session; of the others, whatever the context. And the bytes of
// states and of stages by token.
struct KvSize {
  KvSize(const ModelConfig& config, const MemoryPlan& plan, int32_t sessions) {
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
  size_t Of(size_t tokens, size_t sessions) const { return fixed + tokens * per_token * sessions; }
  // With what a prompt of those takes, and stages.
  size_t Most(size_t tokens, size_t sessions) const {
    return Of(tokens, sessions) + tokens * (prompt_per_token + stages_per_token * sessions);
  }
  // Tokens of every session that fit in `room` bytes.
  size_t Fits(size_t room, size_t sessions) const {
    if (room < fixed) return 0;
    const size_t a_token = InSession() * sessions + prompt_per_token;
    return a_token == 0 ? static_cast<size_t>(ModelLimits::kContext) + kBlockTokens
                        : (room - fixed) / a_token;
  }

  // Of one token of one session.
  size_t InSession() const { return per_token + states_per_token + stages_per_token; }

  size_t per_token = 0;
  size_t states_per_token = 0;
  size_t stages_per_token = 0;
  size_t prompt_per_token = 0;
  size_t fixed = 0;
};

// What a policy keeps of its own in a session of such a plan; 0 where it cannot be prepared.
size_t PolicyBytes(const PolicyOptions& options, const ModelConfig& config, const MemoryPlan& plan,
                   const Backend& backend) {
  const auto info = ResolvePolicy(options.name, config.name, GlobalLayers(config));
  if (!info.ok()) return 0;
  auto settings = PolicySettings::Parse((*info)->name, (*info)->settings, options.settings);
  if (!settings.ok()) return 0;
  AskingBackend counts(backend);
  const std::unique_ptr<Policy> policy = (*info)->make();
  const BankConfig bank = MakeBankConfig(config, plan, /*max_sessions=*/1);
  return policy->Prepare(ContextOn(counts, config, bank, plan), *settings).ok() ? policy->Bytes()
                                                                                : 0;
}

// Where the layers of a card's model go.
class Placement {
 public:
  Placement(const EngineOptions& options, const ModelConfig& config, const Backend& backend,
            size_t room)
      : options_(options), config_(config), backend_(backend), room_(room) {}

  // Sends as few layers to the host, of those that the policy's `reads` let go, as make `plan` fit,
  // or all of them, or none where V alone are there; false when that is not enough, with plan.tiers
  // as at the last try. The working sets have `asked` tokens; 0: what there is room for.
  bool Place(const DeclaredReads& declared, int64_t asked, MemoryPlan& plan) const {
    const DeclaredReads reads = ReadsByLayer(config_, declared);
    const StreamedLayers& streamed = reads.streamed;
    // A disk is read once for what stays in slots.
    const bool chooses = options_.host_reads == "auto";
    const bool disk_fetches = chooses && plan.on_disk && reads.HeldByUnit();
    plan.attends_away =
        reads.n_selections > 0 && reads.max_recent > 0 &&
        (options_.host_reads == "attend" || (chooses && !reads.by_token && !disk_fetches));
    plan.fetches_units = (options_.host_reads == "fetch" || disk_fetches) && reads.HeldByUnit();
    const bool by_selection = reads.by_token || plan.fetches_units || plan.attends_away;
    // By working sets, stages or last rows, or attended to away: these go first.
    std::vector<size_t> can_go;
    std::vector<size_t> in_place;  // is how they would be read
    const bool all_on_disk = backend_.OnDevice() && options_.place == "disk";
    int32_t after = GlobalLayers(config_);  // global layers after this one
    for (size_t layer = 0; layer < config_.layers.size(); ++layer) {
      const bool global = config_.layers[layer].window == 0;
      if (global) --after;
      if ((reads.selection_of[layer] >= 0 && by_selection) ||
          reads.selection_of[layer] == kLastRows || (global && after < streamed.layers)) {
        can_go.push_back(layer);
      } else if (reads.selection_of[layer] == kFewRows) {
        in_place.push_back(layer);
      }
    }
    can_go.insert(can_go.begin(), in_place.begin(), in_place.end());
    if (all_on_disk) {
      std::erase_if(can_go, [&](size_t l) { return !MayLieOnDisk(config_, reads, plan, l); });
    }
    const auto bank_of = [&] { return MakeBankConfig(config_, plan, options_.max_sessions); };
    if (can_go.empty() && plan.values_away) return Fits(reads, asked, bank_of(), plan);
    const bool all = options_.place == "host" || options_.place == "disk" || streamed.always;
    const auto with_stages = [&](int32_t most, int32_t least) {
      for (size_t n = all ? std::max<size_t>(can_go.size(), 1) : 1; n <= can_go.size(); ++n) {
        plan.tiers.assign(config_.layers.size(), TierKind::kDevice);
        for (size_t i = can_go.size() - n; i < can_go.size(); ++i) {
          plan.tiers[can_go[i]] = TierKind::kHost;
        }
        BankConfig bank = bank_of();
        const bool staged = !LastRows::Any(LastRows::ConfigOf(bank, reads, options_.max_sessions));
        for (int32_t stages = most; stages >= least; --stages) {
          const int32_t useful = std::min(stages, static_cast<int32_t>(n));
          bank.n_stages = plan.stages = staged ? std::max(std::min(2, least), useful) : 0;
          if (Fits(reads, asked, bank, plan)) return true;
        }
      }
      return false;
    };
    // Where prompts alone pass through stages, one will do, though nothing comes in meanwhile.
    return with_stages(streamed.max_ahead + 1, streamed.min_ahead + 1) ||
           (streamed.layers == 0 && with_stages(1, 1));
  }

  // The same, where a card's layers that exceed `host` bytes of the host's memory lie on a disk, if
  // there is one. What the host would attend to in its memory is fetched from there.
  bool PlaceBeside(const DeclaredReads& declared, int64_t asked, size_t host,
                   MemoryPlan& plan) const {
    const bool disk = backend_.OnDevice() && !options_.kv_folder.empty();
    const bool all = disk && options_.place == "disk";
    const MemoryPlan before = plan;
    plan.on_disk = plan.on_disk || all;
    if (!Place(declared, asked, plan)) return false;
    if (!disk || (!all && plan.kv_host <= host)) return true;
    plan = before;
    plan.on_disk = true;
    if (!Place(declared, asked, plan)) return false;
    SendToDisk(config_, ReadsByLayer(config_, declared), options_.max_sessions, host, all, plan);
    return true;
  }

  // The end of a message: which policies, as they are by default, make `plan` fit with layers in so
  // much of the host's memory and of a disk.
  std::string Others(const MemoryPlan& plan, size_t host, size_t disk) const {
    std::vector<std::string> names;
    for (const PolicyInfo& info : AllPolicies()) {
      EngineOptions other = options_;
      other.place = "auto";
      const auto policy = PolicyFor({.name = info.name}, config_, plan.context, /*fetches=*/true);
      if (!policy.ok()) continue;
      MemoryPlan placed = plan;
      placed.may_leave = true;
      PlanPolicy(config_, **policy, options_.max_sessions, placed);
      placed.policy = PolicyBytes({.name = info.name}, config_, placed, backend_);
      const Placement placement(other, config_, backend_, room_);
      const bool fits = placement.PlaceBeside((*policy)->Reads(), 0, host, placed);
      if (fits && placed.OnHost() <= host && placed.OnDisk() <= disk) names.push_back(info.name);
    }
    if (names.empty()) return "";
    return fmt::format("; it fits with layers on the {}: `place` auto `policy` {}",
                       plan.on_disk ? "disk" : "host", fmt::join(names, " or "));
  }

  // What policies keep beside the K/V: states, and what the engine's policy keeps of its own, but
  // room for scores of all heads for one query and a few more at least.
  size_t PolicyRoom(const MemoryPlan& plan) const {
    const size_t scores =
        static_cast<size_t>(plan.context) * static_cast<size_t>(config_.n_heads + 64) * 4;
    return plan.states + std::max(scores, plan.policy) * static_cast<size_t>(options_.max_sessions);
  }

 private:
  // `bank`: MakeBankConfig of `plan`.
  bool Fits(const DeclaredReads& reads, int64_t asked, const BankConfig& bank,
            MemoryPlan& plan) const {
    const auto sessions = static_cast<size_t>(options_.max_sessions);
    const auto layer_token = plan.kv_per_token / config_.layers.size();
    plan.host_layers =
        static_cast<int32_t>(std::count(plan.tiers.begin(), plan.tiers.end(), TierKind::kHost));
    size_t in_sets = 0;  // layers
    for (size_t layer = 0; layer < plan.tiers.size(); ++layer) {
      in_sets += plan.tiers[layer] == TierKind::kHost && reads.selection_of[layer] >= 0 ? 1 : 0;
    }
    plan.kv = Bank::ReservedBytes(bank, TierKind::kDevice);
    plan.kv_host = Bank::ReservedBytes(bank, TierKind::kHost);
    if (plan.attends_away) return FitsAway(reads, bank, plan);
    WorkingSetConfig sets{.reads = reads,
                          .n_slots = static_cast<int32_t>(
                              std::max(reads.LeastSlots(), std::min(asked, plan.context)))};
    const auto set_bytes = [&] {
      return sessions * (plan.fetches_units ? FetchedUnits::Bytes(bank, sets)
                                            : WorkingSets::Bytes(bank, sets));
    };
    const LastRowsConfig last = LastRows::ConfigOf(bank, reads, options_.max_sessions);
    plan.keeps_last = LastRows::Any(last);
    const size_t stages = Bank::StageBytes(bank) + LastRows::Bytes(bank, last) +
                          FetchedValues::Bytes(bank, reads, options_.max_sessions);
    const size_t fixed = plan.kv + plan.prompt + stages + PolicyRoom(plan);
    const size_t least = fixed + set_bytes();
    if (least > room_) return false;
    if (asked == 0 &&
        reads.n_selections > 0) {  // what is left widens the working sets, up to everything
      const size_t slot =
          sessions * (in_sets * layer_token + 8 * static_cast<size_t>(reads.n_selections));
      const size_t more = (room_ - least) / slot;
      sets.n_slots = static_cast<int32_t>(std::min<size_t>(
          static_cast<size_t>(reads.LeastSlots()) + more, static_cast<size_t>(plan.context) + 1));
      sets.n_slots = std::max(sets.n_slots, static_cast<int32_t>(reads.LeastSlots()));
    }
    plan.working_set = plan.keeps_last ? static_cast<int32_t>(LastRows::KeptTokens(bank, last))
                       : reads.n_selections > 0 ? sets.n_slots
                                                : 0;
    plan.working_sets = stages + set_bytes();
    plan.policies = room_ - plan.kv - plan.prompt - plan.working_sets;
    return true;
  }

  // Where the host attends to what is there.
  bool FitsAway(const DeclaredReads& reads, const BankConfig& bank, MemoryPlan& plan) const {
    const AwayConfig away{
        .reads = reads, .n_heads = config_.n_heads, .n_seqs = options_.max_sessions};
    const LastRowsConfig last = AwayAttention::LastRowsOf(bank, away);
    plan.working_set = static_cast<int32_t>(LastRows::KeptTokens(bank, last));
    plan.working_sets = Bank::StageBytes(bank) + AwayAttention::Bytes(bank, away);
    const size_t fixed = plan.kv + plan.prompt + plan.working_sets;
    if (fixed + PolicyRoom(plan) > room_) return false;
    plan.policies = room_ - fixed;
    return true;
  }

  const EngineOptions& options_;
  const ModelConfig& config_;
  const Backend& backend_;
  size_t room_;  // bytes for K/V and all that goes with them
};

}  // namespace

namespace {

// MemoryPlan::head_classes. None where all heads are in one class.
std::vector<MemoryPlan::HeadClass> HeadClassesOf(const ModelConfig& config, const Policy& policy,
                                                 int64_t context) {
  std::vector<MemoryPlan::HeadClass> classes;
  int32_t with_heads = 0;
  for (int32_t c = 0; c < policy.HeadClasses(); ++c) {
    MemoryPlan::HeadClass& of = classes.emplace_back();
    of.max_held = MaxHeld(policy, context, c);
    bool any = false;
    for (int32_t layer = 0; layer < GlobalLayers(config); ++layer) {
      of.heads.push_back(policy.HeadsOf(layer, c));
      any = any || !of.heads.back().empty();
    }
    with_heads += any ? 1 : 0;
  }
  if (with_heads < 2) classes.clear();
  return classes;
}

// KV heads of all layers share what they keep, so there is room for the mean of it.
void HoldTheMean(const Keeps& keeps, int64_t later, MemoryPlan& plan) {
  for (size_t layer = 0; layer < plan.layer_held.size(); ++layer) {
    const int64_t mean = keeps.RowsAfter(static_cast<int32_t>(layer), plan.context);
    plan.layer_held[layer] = std::min(plan.context, mean + 1) + later;
  }
}

}  // namespace

void PlanPolicy(const ModelConfig& config, const Policy& policy, int32_t max_sessions,
                MemoryPlan& plan) {
  const auto bank = [&] { return MakeBankConfig(config, plan, max_sessions); };
  plan.by_layer = false;
  plan.prompt = plan.prompt_host = 0;
  plan.layer_held.clear();
  plan.heads_apart = false;
  plan.values_apart = ReadsByLayer(config, policy.Reads()).few_values;
  plan.values_away = plan.may_leave && !plan.values_apart.empty();
  plan.max_held = MaxHeld(policy, plan.context);
  plan.head_classes = HeadClassesOf(config, policy, plan.context);
  if (const Keeps keeps = policy.Kept(); keeps.rows > 0) {
    const size_t by_chunk = Bank::ReservedBytes(bank(), TierKind::kDevice);
    const size_t prompt = PromptBytes(config, bank(), plan.context);
    const int64_t later = std::max(keeps.room, keeps.chunk);
    plan.max_held = keeps.rows + later;
    for (const int64_t rows : keeps.layer_rows) plan.layer_held.push_back(rows + later);
    plan.heads_apart = keeps.HeadsDiffer() && config.n_kv_heads <= kMaxMaskedHeads;
    if (plan.heads_apart) HoldTheMean(keeps, later, plan);
    plan.by_layer = keeps.chunk == 0 && !keeps.passes &&
                    Bank::ReservedBytes(bank(), TierKind::kDevice) + prompt < by_chunk;
    plan.prompt = plan.by_layer ? prompt : 0;
    const bool less = Bank::ReservedBytes(bank(), TierKind::kDevice) < by_chunk;
    if (!plan.by_layer && keeps.chunk == 0 && !(plan.heads_apart && less)) {
      plan.max_held = 0;
      std::fill(plan.layer_held.begin(), plan.layer_held.end(), 0);
    }
  }
  plan.states = StateBytes(config, bank(), policy);
}

void PassByLayer(const ModelConfig& config, const Policy& policy, int32_t max_sessions,
                 MemoryPlan& plan) {
  OKV_CHECK(plan.heads_apart);
  const Keeps keeps = policy.Kept();
  plan.by_layer = true;
  HoldTheMean(keeps, keeps.room, plan);
  const BankConfig bank = MakeBankConfig(config, plan, max_sessions);
  plan.prompt = PromptBytes(config, bank, plan.context);
  // The rows of passes are the prompt's once more, and what asks for them.
  const auto rows = static_cast<size_t>(plan.context) * Bank::BytesPerToken(bank);
  plan.prompt_host = rows + ResidualBytes(config, 2 * plan.context + plan.context / 16);
  plan.states = StateBytes(config, bank, policy);
}

AwayConfig AwayOf(const ModelConfig& config, const MemoryPlan& plan, const DeclaredReads& reads,
                  int32_t n_seqs) {
  return {.reads = ReadsByLayer(config, reads),
          .n_heads = plan.attends_away ? config.n_heads : 0,
          .n_seqs = n_seqs};
}

MemoryNeeds NeedsOf(const MemoryPlan& plan, const Backend& backend) {
  MemoryNeeds needs{.on_device = backend.OnDevice(),
                    .weights = plan.weights,
                    .activations = plan.activations,
                    .kv = plan.kv,
                    .kv_host = plan.kv_host - plan.OnDisk(),
                    .kv_disk = plan.OnDisk(),
                    .prompt = plan.prompt,
                    .working_sets = plan.working_sets,
                    .working_set = plan.working_set,
                    .keeps_last = plan.attends_away || plan.keeps_last,
                    .attends_away = plan.attends_away,
                    .available = plan.available,
                    .context = plan.context,
                    .kv_tokens = plan.kv_tokens};
  for (size_t layer = 0; layer < plan.tiers.size(); ++layer) {
    if (plan.tiers[layer] == TierKind::kHost) {
      needs.host_layers.push_back(static_cast<int32_t>(layer));
    }
  }
  for (size_t layer = 0; plan.values_away && layer < plan.values_apart.size(); ++layer) {
    if (plan.values_apart[layer]) needs.host_values.push_back(static_cast<int32_t>(layer));
  }
  return needs;
}

int32_t MaxOutRows(const ModelConfig& config, int32_t chunk, int32_t max_sessions) {
  constexpr int64_t kLogitsBytes = int64_t{8} << 20;
  const int32_t least = 2 * std::min(max_sessions, kMaxBatch);
  return static_cast<int32_t>(std::clamp<int64_t>(kLogitsBytes / (int64_t{4} * config.vocab), least,
                                                  std::max(chunk, least)));
}

Result<MemoryPlan> PlanMemory(const EngineOptions& options, const ModelConfig& config,
                              size_t weight_bytes, bool all_f32, const Backend& backend) {
  OKV_RETURN_IF_ERROR(CheckOptions(options));
  const bool card = backend.OnDevice();
  OKV_RETURN_IF_ERROR(CheckPlace(options, backend));
  MemoryPlan plan;
  const bool has_disk = !options.kv_folder.empty();
  plan.on_disk = !card && has_disk;  // a card's is for what exceeds the host's memory
  size_t disk_room = 0;
  if (has_disk) {
    OKV_ASSIGN_OR_RETURN(disk_room, FreeRoom(options.kv_folder));
  }
  // Whether layers may lie elsewhere than in the backend's memory.
  const bool beside = card || plan.on_disk;
  OKV_ASSIGN_OR_RETURN(plan.kv_dtype, KvDType(options.kv_dtype, all_f32));
  if (!KvFits(plan.kv_dtype, config.head_dim)) {
    return Unsupported(
        fmt::format("`kv_dtype` is {}, but the model's heads have {} values, expected a multiple "
                    "of {}",
                    options.kv_dtype, config.head_dim, kBlockValues));
  }
  plan.weights = weight_bytes;
  plan.chunk = options.prefill_chunk != 0 ? options.prefill_chunk : backend.PrefillRows();
  plan.activations = Workspace::BytesFor(config, plan.chunk,
                                         MaxOutRows(config, plan.chunk, options.max_sessions)) +
                     backend.WorkBytes(LimitsOf(config, plan.chunk));
  plan.may_leave = (card && options.place != "device") || options.place == "disk";
  plan.context = options.context != 0 ? options.context : config.max_context;
  plan.kept = options.kept_contexts;
  // Whether sessions share their tokens; then the plan is made for those that they have at least.
  const bool shared = options.kv_tokens != 0;
  if (options.kv_tokens > 0 && options.kv_tokens < plan.context) {
    return InvalidArgument(fmt::format("`kv_tokens` is {}, expected at least the context of {}",
                                       options.kv_tokens, plan.context));
  }
  const auto most_tokens = [&] {  // whole blocks of each session
    return (plan.context + kBlockTokens - 1) / kBlockTokens * kBlockTokens * options.max_sessions;
  };
  if (shared) plan.kv_tokens = std::clamp(options.kv_tokens, plan.context, most_tokens());
  plan.kv_per_token = Bank::BytesPerToken(MakeBankConfig(config, plan, options.max_sessions));
  const auto policy = PolicyFor(options.policy, config, plan.context, /*fetches=*/true);
  if (policy.ok()) {
    PlanPolicy(config, **policy, options.max_sessions, plan);
    if (beside) plan.policy = PolicyBytes(options.policy, config, plan, backend);
    OKV_RETURN_IF_ERROR(CheckHostReads(options, (*policy)->Reads()));
  }
  const char* field = card ? "`gpu_memory`" : "`host_memory`";
  const size_t cap = card ? options.gpu_memory : options.host_memory;
  const size_t machine = backend.AvailableMemory();
  const Limit limit(field, cap, machine);
  plan.available = limit.bytes;
  plan.limit = limit.name;
  const auto sessions = static_cast<size_t>(shared ? 1 : options.max_sessions);
  const auto spare = static_cast<size_t>(kBlockTokens * (shared ? options.max_sessions : 1));
  const size_t fixed = plan.weights + plan.activations;
  const size_t room = plan.available > fixed ? plan.available - fixed : 0;
  const auto asked = static_cast<size_t>(shared ? plan.kv_tokens : plan.context);
  const Placement placement(options, config, backend, room);
  const auto fits_here = [&] {
    const KvSize kv(config, plan, options.max_sessions);
    return kv.Fits(room, sessions) >= asked + spare &&
           (!beside || room >= kv.Most(asked + spare, sessions) + placement.PolicyRoom(plan));
  };
  if (plan.on_disk && !plan.may_leave && policy.ok() && !fits_here()) {
    plan.may_leave = true;
    PlanPolicy(config, **policy, options.max_sessions, plan);
  }
  if (card && plan.heads_apart && plan.may_leave && !fits_here()) {
    PassByLayer(config, **policy, options.max_sessions, plan);
  }
  const bool all_here = fits_here();
  const KvSize kv(config, plan, options.max_sessions);
  const size_t fits = kv.Fits(room, sessions);
  const std::string sizes = fmt::format(
      "weights {} and activations {} leave {} in {}", HumanBytes(plan.weights),
      HumanBytes(plan.activations),
      kv.per_token + kv.prompt_per_token == 0
          ? fmt::format("{} for K/V, which take {},", HumanBytes(room), HumanBytes(kv.fixed))
          : fmt::format("room for {} tokens of K/V{} at {} each{}", fits - std::min(fits, spare),
                        kv.states_per_token == 0 ? "" : " and the policy's states",
                        HumanBytes(kv.InSession() + kv.prompt_per_token),
                        kv.fixed == 0 ? ""
                                      : fmt::format(", and {} of {},", HumanBytes(kv.fixed),
                                                    plan.by_layer ? "what stays of a prompt"
                                                    : !plan.head_classes.empty()
                                                        ? "heads that keep few tokens"
                                                        : "sliding windows")),
      plan.limit);
  const Limit disk("`disk_space`", options.disk_space, disk_room,
                   fmt::format("free in {}", options.kv_folder));
  const Limit memory("`host_memory`", options.host_memory, AvailableMemory());
  const Limit& host = card ? memory : disk;  // of what leaves the backend's own memory
  const auto fits_on_host = [&](const MemoryPlan& p) -> Status {
    if (p.prompt_host > host.bytes) {
      return ResourceExhausted(fmt::format(
          "K/V of a prompt of {} tokens wait in the host's memory and take {}, expected at most "
          "{}: {}",
          p.context, HumanBytes(p.prompt_host), host.name, sizes));
    }
    const bool to_disk = has_disk && (!card || p.OnHost() <= host.bytes);
    if (to_disk ? p.OnDisk() <= disk.bytes : p.OnHost() <= host.bytes) return {};
    const auto values =
        p.values_away ? std::count(p.values_apart.begin(), p.values_apart.end(), true) : 0;
    const auto there = std::count(p.disk_layers.begin(), p.disk_layers.end(), true);
    const int64_t layers = !card || !has_disk ? p.host_layers
                           : to_disk          ? there
                                              : p.host_layers - there;
    return ResourceExhausted(fmt::format(
        "{} of a context of {} tokens go to the {} and take {}, expected at most {}{}: {}",
        values > 0 ? fmt::format("V of {} layers", values) : fmt::format("{} layers", layers),
        p.context, to_disk ? "disk" : "host", HumanBytes(to_disk ? p.OnDisk() : p.OnHost()),
        to_disk ? disk.name : host.name,
        card && has_disk && !to_disk ? ", since they cannot lie on the disk of a card" : "",
        sizes));
  };
  const auto others = [&] { return placement.Others(plan, memory.bytes, disk.bytes); };
  const DeclaredReads reads = policy.ok() ? (*policy)->Reads() : DeclaredReads{};
  const bool always = card && reads.streamed.always;
  const bool all_leave = options.place == "host" || options.place == "disk";
  if (plan.may_leave && (!all_here || all_leave || always || plan.values_away)) {
    OKV_RETURN_IF_ERROR(policy.status());
    if (card && options.place == "disk") {
      OKV_RETURN_IF_ERROR(CheckDiskOfCard(options, reads));
    }
    MemoryPlan placed;  // tried last
    // None: there is no room in the backend's own memory.
    const auto place = [&](int64_t kv_tokens) -> std::optional<Result<MemoryPlan>> {
      placed = plan;
      placed.kv_tokens = kv_tokens;
      if (!placement.PlaceBeside(reads, options.working_set, memory.bytes, placed)) {
        return std::nullopt;
      }
      OKV_RETURN_IF_ERROR(fits_on_host(placed));
      return placed;
    };
    if (auto best = place(plan.kv_tokens)) {
      if (!best->ok() || options.kv_tokens != EngineOptions::kAsManyAsFit) return *best;
      // Between the most that fits and the least that does not, to a sixteenth of a context.
      int64_t most = most_tokens();
      for (int64_t next = most; next > (*best)->kv_tokens;
           next = (*best)->kv_tokens + (most - (*best)->kv_tokens) / 2) {
        auto more = place(next);
        if (more && more->ok()) {
          best = std::move(more);
        } else {
          most = next;
        }
        if (most - (*best)->kv_tokens <= plan.context / 16) break;
      }
      return *best;
    }
    if (options.working_set > 0 && placement.PlaceBeside(reads, 0, memory.bytes, placed)) {
      return ResourceExhausted(
          fmt::format("`working_set` is {} tokens, which do not fit; auto would be {}: {}",
                      options.working_set, placed.working_set, sizes));
    }
    if (always) {
      return ResourceExhausted(
          fmt::format("a context of {} tokens does not fit with {} layers on the host: {}{}", asked,
                      placed.host_layers, sizes, others()));
    }
    if (all_leave && !plan.values_away) {
      const std::string why = sizes + others();
      OKV_RETURN_IF_ERROR(
          CheckUse(Use::kPlacedOnHost, **policy, options.policy.name, why, options.place));
      return ResourceExhausted(
          fmt::format("`place` is {}, but a context of {} tokens does not fit that way either: {}",
                      options.place, asked, why));
    }
  }
  if (fits < asked + spare) {
    if (options.context != 0 || options.kv_tokens > 0 || fits < 2 * spare) {
      return ResourceExhausted(fmt::format("a context of {} tokens does not fit: {}{}", asked,
                                           sizes, beside ? others() : ""));
    }
    // What a policy keeps beside the K/V takes room too, by default well below a part in sixteen.
    plan.context = static_cast<int64_t>(fits - fits / 16 - spare);
    if (shared) plan.kv_tokens = plan.context;
    LogInfo("the context is cut from {} to {} tokens: {}", asked, plan.context, sizes);
    if (policy.ok() && plan.heads_apart) {  // of which it keeps a share
      OKV_ASSIGN_OR_RETURN(const auto fitting,
                           PolicyFor(options.policy, config, plan.context, /*fetches=*/true));
      const bool by_layer = plan.by_layer;
      PlanPolicy(config, *fitting, options.max_sessions, plan);
      if (by_layer) PassByLayer(config, *fitting, options.max_sessions, plan);
    }
  }
  if (cap != 0 && !limit.capped) {
    LogInfo("{} is {}, but {} are available: planned with that", field, HumanBytes(cap),
            HumanBytes(machine));
  }
  if (options.kv_tokens == EngineOptions::kAsManyAsFit && kv.InSession() > 0) {
    const size_t taken =
        kv.Most(static_cast<size_t>(plan.kv_tokens) + spare, sessions) + placement.PolicyRoom(plan);
    // Groups of other policies need room, too.
    const size_t more = (room - std::min(room, taken)) / kv.InSession() / 16 * 15;
    plan.kv_tokens = std::min(most_tokens(), plan.kv_tokens + static_cast<int64_t>(more));
  }
  const BankConfig bank = MakeBankConfig(config, plan, options.max_sessions);
  if (policy.ok()) plan.states = StateBytes(config, bank, **policy);
  if (plan.by_layer) plan.prompt = PromptBytes(config, bank, plan.context);
  const auto tokens = static_cast<size_t>(shared ? plan.kv_tokens : plan.context);
  plan.kv = kv.Of(tokens, sessions);
  plan.kv_host = Bank::ReservedBytes(bank, TierKind::kHost);
  const size_t chosen =
      FetchedValues::Bytes(bank, ReadsByLayer(config, reads), options.max_sessions);
  plan.working_sets = Bank::StageBytes(bank) + chosen;
  OKV_RETURN_IF_ERROR(fits_on_host(plan));
  const size_t most = kv.Most(tokens + spare, sessions);
  plan.policies = room - std::min(room, most + chosen);
  return plan;
}

}  // namespace omnikv
