#include "engine/placement.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>

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
#include "engine/kv_size.h"
#include "io/nameless_file.h"
#include "model/forward.h"
#include "model/limits.h"
#include "policy/policy.h"

namespace omnikv {
namespace {

StepLimits LimitsOf(const ModelConfig& config, std::optional<DType> weights, int32_t max_rows) {
  const int64_t heads = int64_t{config.n_heads} * config.head_dim;
  const int64_t widest = std::max({int64_t{config.d_model}, heads, int64_t{config.ffn}});
  return {.max_rows = max_rows,
          .n_heads = config.n_heads,
          .n_kv_heads = config.n_kv_heads,
          .head_dim = config.head_dim,
          .widest = widest,
          .largest = widest * config.d_model,
          .weights = weights};
}

}  // namespace

PolicyContext ContextOf(const ModelConfig& config, int64_t context, DType kv_dtype) {
  const int32_t n_layers = GlobalLayers(config);
  return {.model_name = config.name,
          .model_path = config.path,
          .n_layers = n_layers,
          .n_heads = config.n_heads,
          .n_kv_heads = config.n_kv_heads,
          .dk = config.head_dim,
          .kv_dtype = kv_dtype,
          .max_context = context,
          .inv_freq = std::vector<const float*>(static_cast<size_t>(n_layers), nullptr)};
}

PolicyContext ContextOn(Backend& backend, const ModelConfig& config, const BankConfig& bank,
                        const MemoryPlan& plan) {
  PolicyContext context = ContextOf(config, plan.context, plan.kv_dtype);
  context.backend = &backend;
  context.max_rows = plan.chunk;
  context.by_layer = plan.by_layer;
  context.fetches = plan.host_layers > 0;
  context.row_layout = bank.Rows();
  context.selection_tokens = static_cast<int64_t>(backend.SelectionBytes() / bank.RowBytes(0));
  return context;
}

Result<std::unique_ptr<Policy>> PolicyFor(const PolicyOptions& options, const ModelConfig& config,
                                          int64_t context, DType kv_dtype, bool fetches) {
  OKV_ASSIGN_OR_RETURN(const PolicyInfo* info,
                       ResolvePolicy(options.name, config.name, GlobalLayers(config)));
  OKV_ASSIGN_OR_RETURN(auto settings,
                       PolicySettings::Parse(info->name, info->settings, options.settings));
  std::unique_ptr<Policy> policy = info->make();
  PolicyContext policy_context = ContextOf(config, context, kv_dtype);
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

// MemoryPlan::sums_away.
bool SumsAway(const EngineOptions& options, const Backend& backend, const DeclaredReads& reads,
              const MemoryPlan& plan) {
  return plan.values_away && backend.OnDevice() && reads.gives_logits &&
         options.host_reads != "fetch";
}

// The card's bytes for V of few tokens of `n_seqs` sequences. `reads` is by layer of the bank.
size_t ValuesBytes(const BankConfig& bank, const DeclaredReads& reads, int32_t n_seqs,
                   const MemoryPlan& plan) {
  return plan.sums_away ? 0 : FetchedValues::Bytes(bank, reads, n_seqs);
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
    plan.by_head = plan.attends_away && !reads.by_token;
    plan.sums_away = SumsAway(options_, backend_, declared, plan);
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
    if (can_go.empty() && plan.values_away) {
      // Prompts alone pass through stages: one will do.
      if (Fits(reads, asked, bank_of(), plan)) return true;
      plan.stages = 1;
      return Fits(reads, asked, bank_of(), plan);
    }
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
      const auto policy =
          PolicyFor({.name = info.name}, config_, plan.context, plan.kv_dtype, /*fetches=*/true);
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
    const WorkingSetConfig candidates = FetchedUnits::OfCandidates(bank, reads, 1);
    const size_t stages = Bank::StageBytes(bank) + LastRows::Bytes(bank, last) +
                          ValuesBytes(bank, reads, options_.max_sessions, plan) +
                          sessions * FetchedUnits::Bytes(bank, candidates);
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
    const AwayConfig away{.reads = reads,
                          .attends = true,
                          .n_heads = config_.n_heads,
                          .n_seqs = options_.max_sessions};
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
          .attends = plan.attends_away,
          .sums_values = plan.sums_away,
          .n_heads = config.n_heads,
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
                    .sums_away = plan.sums_away,
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

namespace {

// PlanMemory, in the order of its steps.
class Planner {
 public:
  Planner(const EngineOptions& options, const ModelConfig& config, const Backend& backend)
      : options_(options), config_(config), backend_(backend) {}

  Result<MemoryPlan> Run(size_t weight_bytes, std::optional<DType> weights) {
    OKV_RETURN_IF_ERROR(SetSizes(weight_bytes, weights));
    OKV_RETURN_IF_ERROR(SetPolicy());
    OKV_RETURN_IF_ERROR(SetLimits());
    const bool all_here = Passes();
    const KvSize kv(config_, plan_, options_.max_sessions);
    sizes_ = Sizes(kv);
    const bool always = card_ && reads_.streamed.always;
    const bool all_leave = options_.place == "host" || options_.place == "disk";
    if (plan_.may_leave && (!all_here || all_leave || always || plan_.values_away)) {
      OKV_ASSIGN_OR_RETURN(std::optional<MemoryPlan> placed, PlaceAway(always, all_leave));
      if (placed) return std::move(*placed);
    }
    OKV_RETURN_IF_ERROR(CutToFit(kv));
    if (cap_ != 0 && !limit_->capped) {
      LogInfo("{} is {}, but {} are available: planned with that", field_, HumanBytes(cap_),
              HumanBytes(machine_));
    }
    return AllHere(kv);
  }

 private:
  Status SetSizes(size_t weight_bytes, std::optional<DType> weights) {
    OKV_RETURN_IF_ERROR(CheckOptions(options_));
    OKV_RETURN_IF_ERROR(CheckPlace(options_, backend_));
    plan_.on_disk = !card_ && has_disk_;  // a card's is for what exceeds the host's memory
    OKV_ASSIGN_OR_RETURN(plan_.kv_dtype, KvDType(options_.kv_dtype, weights));
    if (!KvFits(plan_.kv_dtype, config_.head_dim)) {
      return Unsupported(
          fmt::format("`kv_dtype` is {}, but the model's heads have {} values, expected a multiple "
                      "of {}",
                      options_.kv_dtype, config_.head_dim, kBlockValues));
    }
    plan_.weights = weight_bytes;
    plan_.chunk = options_.prefill_chunk != 0 ? options_.prefill_chunk : backend_.PrefillRows();
    plan_.activations =
        Workspace::BytesFor(config_, plan_.chunk,
                            MaxOutRows(config_, plan_.chunk, options_.max_sessions)) +
        backend_.WorkBytes(LimitsOf(config_, weights, plan_.chunk));
    plan_.may_leave = (card_ && options_.place != "device") || options_.place == "disk";
    plan_.context = options_.context != 0 ? options_.context : config_.max_context;
    plan_.kept = options_.kept_contexts;
    if (options_.kv_tokens > 0 && options_.kv_tokens < plan_.context) {
      return InvalidArgument(fmt::format("`kv_tokens` is {}, expected at least the context of {}",
                                         options_.kv_tokens, plan_.context));
    }
    if (shared_) plan_.kv_tokens = std::clamp(options_.kv_tokens, plan_.context, MostTokens());
    plan_.kv_per_token = Bank::BytesPerToken(Layout());
    return {};
  }

  Status SetPolicy() {
    auto policy =
        PolicyFor(options_.policy, config_, plan_.context, plan_.kv_dtype, /*fetches=*/true);
    policy_status_ = policy.status();
    if (!policy.ok()) return {};
    policy_ = std::move(*policy);
    reads_ = policy_->Reads();
    PlanPolicy(config_, *policy_, options_.max_sessions, plan_);
    if (beside_) plan_.policy = PolicyBytes(options_.policy, config_, plan_, backend_);
    return CheckHostReads(options_, reads_);
  }

  Status SetLimits() {
    size_t disk_room = 0;
    if (has_disk_) {
      OKV_ASSIGN_OR_RETURN(disk_room, FreeRoom(options_.kv_folder));
    }
    limit_.emplace(field_, cap_, machine_);
    disk_.emplace("`disk_space`", options_.disk_space, disk_room,
                  fmt::format("free in {}", options_.kv_folder));
    memory_.emplace("`host_memory`", options_.host_memory, AvailableMemory());
    plan_.available = limit_->bytes;
    plan_.limit = limit_->name;
    const size_t fixed = plan_.weights + plan_.activations;
    room_ = plan_.available > fixed ? plan_.available - fixed : 0;
    asked_ = static_cast<size_t>(shared_ ? plan_.kv_tokens : plan_.context);
    placement_.emplace(options_, config_, backend_, room_);
    return {};
  }

  BankConfig Layout() const { return MakeBankConfig(config_, plan_, options_.max_sessions); }
  // Of whole blocks of each session.
  int64_t MostTokens() const {
    return (plan_.context + kBlockTokens - 1) / kBlockTokens * kBlockTokens * options_.max_sessions;
  }
  const Limit& Away() const { return card_ ? *memory_ : *disk_; }
  std::string Others() const { return placement_->Others(plan_, memory_->bytes, disk_->bytes); }

  // Whether all K/V fit in the backend's own memory.
  bool FitsHere() const {
    const KvSize kv(config_, plan_, options_.max_sessions);
    return kv.Fits(room_, sessions_) >= asked_ + spare_ &&
           (!beside_ ||
            room_ >= kv.Most(asked_ + spare_, sessions_) + placement_->PolicyRoom(plan_));
  }
  // The same, once prompts pass in the way that takes less where that is needed.
  bool Passes() {
    if (policy_ != nullptr && plan_.on_disk && !plan_.may_leave && !FitsHere()) {
      plan_.may_leave = true;
      PlanPolicy(config_, *policy_, options_.max_sessions, plan_);
    }
    if (card_ && plan_.heads_apart && plan_.may_leave && !FitsHere()) {
      PassByLayer(config_, *policy_, options_.max_sessions, plan_);
    }
    return FitsHere();
  }

  // For sentences: what there is room for.
  std::string Sizes(const KvSize& kv) const {
    const size_t fits = kv.Fits(room_, sessions_);
    const char* const fixed_is = plan_.by_layer                ? "what stays of a prompt"
                                 : !plan_.head_classes.empty() ? "heads that keep few tokens"
                                                               : "sliding windows";
    const std::string fixed =
        kv.fixed == 0 ? "" : fmt::format(", and {} of {},", HumanBytes(kv.fixed), fixed_is);
    const std::string leave =
        kv.per_token + kv.prompt_per_token == 0
            ? fmt::format("{} for K/V, which take {},", HumanBytes(room_), HumanBytes(kv.fixed))
            : fmt::format("room for {} tokens of K/V{} at {} each{}", fits - std::min(fits, spare_),
                          kv.states_per_token == 0 ? "" : " and the policy's states",
                          HumanBytes(kv.InSession() + kv.prompt_per_token), fixed);
    return fmt::format("weights {} and activations {} leave {} in {}", HumanBytes(plan_.weights),
                       HumanBytes(plan_.activations), leave, plan_.limit);
  }

  // kResourceExhausted where what leaves the backend's memory has no room there.
  Status CheckAway(const MemoryPlan& p) const {
    const Limit& host = Away();
    if (p.prompt_host > host.bytes) {
      return ResourceExhausted(fmt::format(
          "K/V of a prompt of {} tokens wait in the host's memory and take {}, expected at most "
          "{}: {}",
          p.context, HumanBytes(p.prompt_host), host.name, sizes_));
    }
    const bool to_disk = has_disk_ && (!card_ || p.OnHost() <= host.bytes);
    if (to_disk ? p.OnDisk() <= disk_->bytes : p.OnHost() <= host.bytes) return {};
    const auto values =
        p.values_away ? std::count(p.values_apart.begin(), p.values_apart.end(), true) : 0;
    const auto there = std::count(p.disk_layers.begin(), p.disk_layers.end(), true);
    const int64_t layers = !card_ || !has_disk_ ? p.host_layers
                           : to_disk            ? there
                                                : p.host_layers - there;
    return ResourceExhausted(fmt::format(
        "{} of a context of {} tokens go to the {} and take {}, expected at most {}{}: {}",
        values > 0 ? fmt::format("V of {} layers", values) : fmt::format("{} layers", layers),
        p.context, to_disk ? "disk" : "host", HumanBytes(to_disk ? p.OnDisk() : p.OnHost()),
        to_disk ? disk_->name : host.name,
        card_ && has_disk_ && !to_disk ? ", since they cannot lie on the disk of a card" : "",
        sizes_));
  }

  // With layers elsewhere, for so many tokens; none: the backend's own memory has no room even so.
  // `last` is the plan that was tried last.
  Result<std::optional<MemoryPlan>> Place(int64_t kv_tokens, MemoryPlan& last) const {
    last = plan_;
    last.kv_tokens = kv_tokens;
    if (!placement_->PlaceBeside(reads_, options_.working_set, memory_->bytes, last)) {
      return std::optional<MemoryPlan>();
    }
    OKV_RETURN_IF_ERROR(CheckAway(last));
    return std::optional(last);
  }

  // `placed`, or the same for as many tokens as fit, to a sixteenth of a context.
  MemoryPlan Widest(MemoryPlan placed) const {
    int64_t most = MostTokens();
    MemoryPlan last;
    for (int64_t next = most; next > placed.kv_tokens;
         next = placed.kv_tokens + (most - placed.kv_tokens) / 2) {
      auto more = Place(next, last);
      if (more.ok() && *more) {
        placed = std::move(**more);
      } else {
        most = next;
      }
      if (most - placed.kv_tokens <= plan_.context / 16) break;
    }
    return placed;
  }

  // None: it does not fit so, but may fit without.
  Result<std::optional<MemoryPlan>> PlaceAway(bool always, bool all_leave) const {
    OKV_RETURN_IF_ERROR(policy_status_);
    if (card_ && options_.place == "disk") OKV_RETURN_IF_ERROR(CheckDiskOfCard(options_, reads_));
    MemoryPlan last;
    OKV_ASSIGN_OR_RETURN(std::optional<MemoryPlan> placed, Place(plan_.kv_tokens, last));
    if (placed && options_.kv_tokens == EngineOptions::kAsManyAsFit) {
      return std::optional(Widest(std::move(*placed)));
    }
    if (placed) return placed;
    if (options_.working_set > 0 && placement_->PlaceBeside(reads_, 0, memory_->bytes, last)) {
      return ResourceExhausted(
          fmt::format("`working_set` is {} tokens, which do not fit; auto would be {}: {}",
                      options_.working_set, last.working_set, sizes_));
    }
    if (always) {
      return ResourceExhausted(
          fmt::format("a context of {} tokens does not fit with {} layers on the host: {}{}",
                      asked_, last.host_layers, sizes_, Others()));
    }
    if (all_leave && !plan_.values_away) {
      const std::string why = sizes_ + Others();
      OKV_RETURN_IF_ERROR(
          CheckUse(Use::kPlacedOnHost, *policy_, options_.policy.name, why, options_.place));
      return ResourceExhausted(
          fmt::format("`place` is {}, but a context of {} tokens does not fit that way either: {}",
                      options_.place, asked_, why));
    }
    return std::optional<MemoryPlan>();
  }

  // A context that nobody asked for becomes what fits of it.
  Status CutToFit(const KvSize& kv) {
    const size_t fits = kv.Fits(room_, sessions_);
    if (fits >= asked_ + spare_) return {};
    if (options_.context != 0 || options_.kv_tokens > 0 || fits < 2 * spare_) {
      return ResourceExhausted(fmt::format("a context of {} tokens does not fit: {}{}", asked_,
                                           sizes_, beside_ ? Others() : ""));
    }
    // What a policy keeps beside the K/V takes room too, by default well below a part in sixteen.
    plan_.context = static_cast<int64_t>(fits - fits / 16 - spare_);
    if (shared_) plan_.kv_tokens = plan_.context;
    LogInfo("the context is cut from {} to {} tokens: {}", asked_, plan_.context, sizes_);
    if (policy_ == nullptr || !plan_.heads_apart) return {};
    // It keeps a share of the context.
    OKV_ASSIGN_OR_RETURN(const auto fitting, PolicyFor(options_.policy, config_, plan_.context,
                                                       plan_.kv_dtype, /*fetches=*/true));
    const bool by_layer = plan_.by_layer;
    PlanPolicy(config_, *fitting, options_.max_sessions, plan_);
    if (by_layer) PassByLayer(config_, *fitting, options_.max_sessions, plan_);
    return {};
  }

  // All K/V in the backend's own memory, but V that a policy always sends away.
  Result<MemoryPlan> AllHere(const KvSize& kv) {
    if (options_.kv_tokens == EngineOptions::kAsManyAsFit && kv.InSession() > 0) {
      const size_t taken = kv.Most(static_cast<size_t>(plan_.kv_tokens) + spare_, sessions_) +
                           placement_->PolicyRoom(plan_);
      // Groups of other policies need room, too.
      const size_t more = (room_ - std::min(room_, taken)) / kv.InSession() / 16 * 15;
      plan_.kv_tokens = std::min(MostTokens(), plan_.kv_tokens + static_cast<int64_t>(more));
    }
    const BankConfig bank = Layout();
    if (policy_ != nullptr) plan_.states = StateBytes(config_, bank, *policy_);
    if (plan_.by_layer) plan_.prompt = PromptBytes(config_, bank, plan_.context);
    const auto tokens = static_cast<size_t>(shared_ ? plan_.kv_tokens : plan_.context);
    plan_.kv = kv.Of(tokens, sessions_);
    plan_.kv_host = Bank::ReservedBytes(bank, TierKind::kHost);
    plan_.sums_away = SumsAway(options_, backend_, reads_, plan_);
    const size_t chosen =
        ValuesBytes(bank, ReadsByLayer(config_, reads_), options_.max_sessions, plan_);
    plan_.working_sets = Bank::StageBytes(bank) + chosen;
    OKV_RETURN_IF_ERROR(CheckAway(plan_));
    const size_t most = kv.Most(tokens + spare_, sessions_);
    plan_.policies = room_ - std::min(room_, most + chosen);
    return plan_;
  }

  const EngineOptions& options_;
  const ModelConfig& config_;
  const Backend& backend_;
  const bool card_ = backend_.OnDevice();
  const bool has_disk_ = !options_.kv_folder.empty();
  // Whether layers may lie elsewhere than in the backend's memory.
  const bool beside_ = card_ || has_disk_;
  // Whether sessions share their tokens; then the plan is made for those that they have at least.
  const bool shared_ = options_.kv_tokens != 0;
  const size_t sessions_ = static_cast<size_t>(shared_ ? 1 : options_.max_sessions);
  const size_t spare_ = static_cast<size_t>(kBlockTokens * (shared_ ? options_.max_sessions : 1));
  const char* const field_ = card_ ? "`gpu_memory`" : "`host_memory`";
  const size_t cap_ = card_ ? options_.gpu_memory : options_.host_memory;
  const size_t machine_ = backend_.AvailableMemory();

  MemoryPlan plan_;
  Status policy_status_;
  std::unique_ptr<Policy> policy_;  // null: it cannot be had
  DeclaredReads reads_;
  std::optional<Limit> limit_, memory_, disk_;
  std::optional<Placement> placement_;
  size_t room_ = 0;    // for K/V, in the backend's own memory
  size_t asked_ = 0;   // tokens
  std::string sizes_;  // for sentences
};

}  // namespace

Result<MemoryPlan> PlanMemory(const EngineOptions& options, const ModelConfig& config,
                              size_t weight_bytes, std::optional<DType> weights,
                              const Backend& backend) {
  return Planner(options, config, backend).Run(weight_bytes, weights);
}

}  // namespace omnikv
