#include "engine/core.h"

#include <fmt/format.h>

#include <algorithm>

#include "bank/kept_rows.h"
#include "base/log.h"
#include "engine/compositions.h"
#include "policy/kv_bytes_read.h"

namespace omnikv {
namespace {

// Whether a policy may keep so many bytes more.
Status CheckPolicyRoom(const EngineCore& core, const std::string& name, size_t bytes) {
  const size_t taken = core.policy_bytes + core.bank->StateBytes();
  const size_t left = core.plan.policies - std::min(core.plan.policies, taken);
  if (bytes <= left) return {};
  return ResourceExhausted(fmt::format(
      "policy {} keeps {} beside the K/V of {} tokens, but {} leaves {} for it: lower `context`",
      name, HumanBytes(bytes), core.bank->config().max_tokens, core.plan.limit, HumanBytes(left)));
}

// Whether all that a policy reads in a layer is kept: of the heads of a later class than 0, the
// bank keeps what a policy reads that has them in that class too.
Status CheckHeadClasses(const EngineCore& core, const std::string& name, const Policy& policy,
                        int32_t layer, int32_t global) {
  const BankConfig& bank = core.bank->config();
  const LayerSpec& spec = bank.layers[static_cast<size_t>(layer)];
  for (const StreamSpec& stream : spec.streams) {
    const int32_t head_class = bank.tables[static_cast<size_t>(stream.table)].head_class;
    if (head_class == 0) continue;
    const std::vector<int32_t> heads = policy.HeadsOf(global, head_class);
    for (int32_t i = 0; i < spec.HeadsOf(stream); ++i) {
      const int32_t h = stream.heads.empty() ? i : stream.heads[static_cast<size_t>(i)];
      if (std::find(heads.begin(), heads.end(), h) != heads.end()) continue;
      return CheckUse(Use::kOthersHeads, policy, name, core.options.policy.name, h, layer);
    }
  }
  return {};
}

}  // namespace

Result<PreparedPolicy> PreparePolicy(EngineCore& core, const PolicyOptions& options,
                                     const RopeState& ropes, int32_t max_seqs,
                                     const PolicyInfo* own) {
  PreparedPolicy prepared{.info = own};
  if (own == nullptr) {
    OKV_ASSIGN_OR_RETURN(prepared.info,
                         ResolvePolicy(options.name, core.config.name, GlobalLayers(core.config)));
  }
  const PolicyInfo& info = *prepared.info;
  if (max_seqs > 1 && !info.batches) {
    return Unsupported(
        fmt::format("policy {} reads one sequence at a time, not {}", info.name, max_seqs));
  }
  OKV_ASSIGN_OR_RETURN(prepared.settings,
                       PolicySettings::Parse(info.name, info.settings, options.settings));
  PolicyContext context =
      ContextOf(core.config, core.bank->config().max_tokens, core.bank->config().dtype);
  context.backend = core.backend.get();
  context.max_rows = core.work.max_rows;
  context.max_seqs = max_seqs;
  context.force_indices = options.force_indices;
  context.fetches = core.plan.host_layers > 0;
  context.by_layer = core.plan.by_layer;
  context.row_layout = core.bank->config().Rows();
  if (core.text.tokenizer != nullptr) {
    context.tokenize = [&core](std::string_view text) {
      return TextTokens(core.text, text, {.add_special = false, .parse_special = false});
    };
    context.turn_end = [&core] { return TurnEnd(core.text); };
  }
  context.selection_tokens =
      static_cast<int64_t>(core.backend->SelectionBytes() / core.bank->config().RowBytes(0));
  ForGlobalLayers(core.config, [&](int32_t layer, int32_t global) {
    const int32_t rope = core.config.layers[static_cast<size_t>(layer)].rope;
    if (rope < 0) return;
    const RopeState::Set& set = ropes.sets()[static_cast<size_t>(rope)];
    context.inv_freq[static_cast<size_t>(global)] = set.inv_freq.as<float>();
    context.n_freq = set.n_freq;
  });
  prepared.policy = info.make();
  Policy& policy = *prepared.policy;
  OKV_RETURN_IF_ERROR(policy.Prepare(context, prepared.settings));
  OKV_RETURN_IF_ERROR(CheckLayout(core, info.name, policy));
  const std::vector<StateSpec> states = StatesByLayer(core.config, policy.States());
  std::vector<StateSpec> opened = PositionsSpecs(core.bank->config(), policy.Kept());
  opened.insert(opened.end(), states.begin(), states.end());
  OKV_RETURN_IF_ERROR(
      CheckPolicyRoom(core, info.name, policy.Bytes() + core.bank->BytesToOpen(opened)));
  OKV_ASSIGN_OR_RETURN(prepared.states, core.bank->OpenStates(states));
  policy.SetStates(ViewsOf(prepared.states));
  core.policy_bytes += policy.Bytes();
  return prepared;
}

Status CheckTokens(const EngineCore& core, std::span<const int32_t> tokens) {
  const int64_t context = core.bank->config().max_tokens;
  if (tokens.empty()) return InvalidArgument("the prompt is empty, expected at least one token");
  if (static_cast<int64_t>(tokens.size()) > context) {
    return InvalidArgument(fmt::format(
        "the prompt has {} tokens, but the context holds {}: shorten it or raise `context`",
        tokens.size(), context));
  }
  for (int32_t t : tokens) {
    if (t < 0 || t >= core.config.vocab) {
      return InvalidArgument(
          fmt::format("token {} is not in the vocabulary of {}", t, core.config.vocab));
    }
  }
  return {};
}

Status CheckLogits(const EngineCore& core, const float* logits, int64_t length) {
  return AllFinite(logits, core.config.vocab) ? Status() : LogitsNotFinite(core, length);
}

Status LogitsNotFinite(const EngineCore& core, int64_t length) {
  const bool f16 = core.bank->config().dtype == DType::kF16;
  return Failed(fmt::format(
      "{}: after {} tokens of context the logits are NaN or infinite: its weights may be damaged "
      "(is the download complete?){}",
      core.options.model.empty() ? core.config.name : core.options.model, length,
      f16 ? ", or keys and values exceed f16, in which kv_dtype keeps them (bf16 and f32 hold more)"
          : ""));
}

Policy::TokenRange UnreadTokens(const Policy& policy, const TableSpec& table, int64_t length) {
  if (table.window == 0) return policy.Dropped(length, table.head_class);
  return {0, std::max<int64_t>(0, length + 1 - table.window)};
}

namespace {

// Of those, the tokens whose rows are given back.
Policy::TokenRange DroppedTokens(const Policy& policy, const TableSpec& table, int64_t length) {
  Policy::TokenRange range = UnreadTokens(policy, table, length);
  if (table.window > 0) range.end -= kSpareTokens;
  return range;
}

}  // namespace

void DropTokens(EngineCore& core, const Policy& policy, int32_t seq, int64_t length) {
  const std::vector<TableSpec>& tables = core.bank->config().tables;
  for (size_t i = 0; i < tables.size(); ++i) {
    const Policy::TokenRange dropped = DroppedTokens(policy, tables[i], length);
    core.bank->Drop(seq, static_cast<int32_t>(i), dropped.begin, dropped.end);
  }
}

void DropPassTokens(EngineCore& core, int32_t seq, int64_t prompt_end, int64_t length) {
  const std::vector<TableSpec>& tables = core.bank->config().tables;
  for (size_t i = 0; i < tables.size(); ++i) {
    if (tables[i].window == 0) continue;
    core.bank->Drop(seq, static_cast<int32_t>(i), prompt_end, length + 1 - tables[i].window);
  }
}

bool CanGoOnFrom(const EngineCore& core, const Policy& policy, int32_t seq, int64_t length) {
  if (length > 0 && length < core.bank->LeastLength(seq)) return false;
  const std::vector<TableSpec>& tables = core.bank->config().tables;
  for (size_t i = 0; i < tables.size(); ++i) {
    const auto table = static_cast<int32_t>(i);
    if (core.bank->Gone(seq, table) > 0) continue;  // rows have no holes there
    const Policy::TokenRange unread = UnreadTokens(policy, tables[i], length);
    if (!core.bank->Holds(seq, table, 0, std::min(unread.begin, length)) ||
        !core.bank->Holds(seq, table, std::max(unread.begin, unread.end), length)) {
      return false;
    }
    // The next row comes into the block of the last one, even where nothing reads that.
    const bool in_block = length % core.bank->config().block_tokens != 0;
    if (in_block && !core.bank->Holds(seq, table, length - 1, length)) return false;
  }
  return true;
}

double AttendedTokens(const ModelConfig& config, const Policy& policy, int32_t seq,
                      const SeqLength& at) {
  const DeclaredReads reads = policy.Reads();
  int64_t tokens = 0;  // times KV heads
  int32_t global = 0;  // the layer's number among the global-attention layers
  for (const LayerConfig& layer : config.layers) {
    if (layer.window > 0) {
      tokens += std::min<int64_t>(layer.window, at.tokens) * config.n_kv_heads;
      continue;
    }
    tokens += policy.HeadTokensReadLast(global, seq, at, config.n_kv_heads) / reads.ListsOf(global);
    ++global;
  }
  return static_cast<double>(tokens) / config.n_kv_heads / config.n_layers;
}

double ReadFraction(const EngineCore& core, const Policy& policy, int32_t seq,
                    const SeqLength& at) {
  uint64_t read = 0;
  uint64_t all = 0;
  ForGlobalLayers(core.config, [&](int32_t layer, int32_t global) {
    KvView kv = core.bank->View(layer);
    kv.n_kv_heads = core.config.n_kv_heads;  // of all classes
    read += KvBytesRead(policy, global, at, kv,
                        policy.HeadTokensReadLast(global, seq, at, kv.n_kv_heads));
    all += KvBytes(kv, at.tokens * kv.n_kv_heads, /*values=*/true);
  });
  return all > 0 ? static_cast<double>(read) / static_cast<double>(all) : 1;
}

Status CheckLayout(const EngineCore& core, const std::string& name, const Policy& policy) {
  if (GlobalLayers(core.config) < core.config.n_layers && !core.plan.heads_apart) {
    OKV_RETURN_IF_ERROR(
        CheckUse(Use::kWindowLayers, policy, name, core.config.name, core.options.policy.name));
  }
  if (core.bank->HasHostLayers()) {
    OKV_RETURN_IF_ERROR(CheckUse(Use::kBesideHostKv, policy, name));
    if (!core.bank->HasStages()) {
      OKV_RETURN_IF_ERROR(CheckUse(Use::kBesideLastRows, policy, name, core.options.policy.name));
    }
  }
  if (!core.plan.values_apart.empty()) {
    OKV_RETURN_IF_ERROR(CheckUse(Use::kValuesApart, policy, name, core.options.policy.name));
  }
  if (core.bank->config().Rows().heads_apart) {
    OKV_RETURN_IF_ERROR(CheckUse(Use::kHeadsApart, policy, name, core.options.policy.name));
  }
  Status status;
  ForGlobalLayers(core.config, [&](int32_t layer, int32_t global) {
    if (status.ok()) status = CheckHeadClasses(core, name, policy, layer, global);
  });
  return status;
}

uint64_t BytesReadAway(const EngineCore& core, const Policy& policy, const SeqLength& at) {
  if (!core.plan.values_away) return 0;
  const DeclaredReads reads = policy.Reads();
  const bool sums = core.plan.sums_away && reads.gives_logits;
  uint64_t bytes = 0;
  ForGlobalLayers(core.config, [&](int32_t layer, int32_t global) {
    if (!core.plan.values_apart[static_cast<size_t>(layer)]) return;
    if (sums && reads.few_values[static_cast<size_t>(global)]) return;
    const KvView kv = core.bank->View(layer);
    const int64_t rows = policy.HeadTokensRead(global, at, kv.n_kv_heads);
    bytes += KvBytes(kv, rows, /*values=*/true) - KvBytes(kv, rows, /*values=*/false);
  });
  return bytes;
}

int64_t HeldTokens(const Policy& policy, int32_t global, const TableSpec& table, int64_t length,
                   int32_t block_tokens) {
  const auto blocks = [&](int64_t n) { return (n + block_tokens - 1) / block_tokens; };
  const Keeps keeps = policy.Kept();
  if (keeps.rows > 0 && table.window == 0) length = keeps.RowsAfter(global, length);
  const Policy::TokenRange dropped = DroppedTokens(policy, table, length);
  const int64_t gone = std::min(dropped.end, length) / block_tokens - blocks(dropped.begin);
  return (blocks(length) - std::max<int64_t>(0, gone)) * block_tokens;
}

}  // namespace omnikv
