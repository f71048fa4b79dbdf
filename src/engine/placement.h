// What a model takes and where it lies, decided before anything is loaded.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "bank/away_attention.h"
#include "bank/bank.h"
#include "model/config.h"
#include "omnikv/options.h"
#include "omnikv/status.h"
#include "policy/policy.h"

namespace omnikv {

// Bytes, of the backend's own memory (a card's, or the host's) unless said.
struct MemoryPlan {
  size_t weights = 0;
  size_t activations = 0;   // the backend's own work included
  size_t kv_per_token = 0;  // all layers, wherever they lie
  int64_t context = 0;      // tokens a session can hold
  int64_t kv_tokens = 0;    // and all sessions together; 0: a context each
  int32_t kept = 0;         // contexts beside those of sessions
  int64_t max_held = 0;     // of them, in global-attention layers: TableSpec::max_held
  // Where the policy tells KV heads apart, each class from 0 on: its heads in each of those layers,
  // and max_held of their table (that of class 0 is above).
  struct HeadClass {
    std::vector<std::vector<int32_t>> heads;
    int64_t max_held = 0;
  };
  std::vector<HeadClass> head_classes;
  // Where those layers keep different numbers of rows (Keeps::LayersDiffer), max_held of each: they
  // have a table each. Empty: they share one.
  std::vector<int64_t> layer_held;
  // Each KV head has rows and a table of its own in those layers (Keeps::HeadsDiffer).
  bool heads_apart = false;
  size_t kv = 0;           // K/V held of `context` tokens in every session
  bool by_layer = false;   // prompts pass layer by layer (docs/decisions/046)
  size_t prompt = 0;       // what such a prompt of `context` tokens takes meanwhile
  size_t prompt_host = 0;  // beside a card, and in the host's memory (PassByLayer)
  size_t states = 0;       // that the policy keeps of `context` tokens in every session
  size_t policy = 0;       // that the engine's policy keeps in a session, states apart; on a card
  size_t policies = 0;     // left for what policies keep beside the K/V, states included
  size_t available = 0;    // what there is, at most the cap
  std::string limit;       // that, for sentences: "`gpu_memory` 24.00 GiB"
  int32_t chunk = 0;       // rows of a prefill step
  DType kv_dtype = DType::kF16;

  // [n_layers]: K and V lie in streams of their own, so that passes over K alone read whole lines;
  // empty: in no layer.
  std::vector<bool> values_apart;

  // K/V in host memory beside a card, or on a disk beside either.
  bool may_leave = false;         // is an option
  bool on_disk = false;           // those that leave lie on a disk: of `disk_layers`,
  std::vector<bool> disk_layers;  // [n_layers]; or of all layers, if this is empty
  std::vector<TierKind> tiers;    // [n_layers]
  bool values_away = false;       // V of those layers are there
  int32_t host_layers = 0;        // layers whose K and V are there
  size_t kv_host = 0;             // all that is there, in host memory and on a disk
  size_t kv_disk = 0;             // of disk_layers
  size_t disk_way = 0;            // host memory through which those pass on their way to a card
  size_t working_sets = 0;        // in the backend's memory, for that: working sets, and stages
  bool keeps_last = false;        // the last rows of host layers (LastRows), and no stages
  int32_t stages = 2;             // BankConfig::n_stages
  int32_t working_set = 0;        // tokens of each of them in a working set
  bool attends_away = false;      // the host attends to what is there, without working sets
  bool sums_away = false;         // the host sums what steps read of V, where V alone are there
  bool by_head = false;           // and K/V there lie by head, since it reads other tokens of each
  bool fetches_units = false;     // working sets hold units, with the last rows beside them

  size_t OnDisk() const { return !on_disk ? 0 : disk_layers.empty() ? kv_host : kv_disk; }
  // What a card's plan takes in host memory.
  size_t OnHost() const { return kv_host - OnDisk() + disk_way; }
};

// The format of K/V by its name; auto is that of the weights if they are all f32, else f16.
// kInvalidArgument for another name.
Result<DType> KvDType(const std::string& name, std::optional<DType> weights);

// kInvalidArgument for options that are wrong whatever the model and the device are.
Status CheckOptions(const EngineOptions& options);

// Sizes everything; `weights` is the format of all matrices, if they have one. kInvalidArgument for
// options out of range, kResourceExhausted with the numbers when a context that was asked for does
// not fit. Without one, the context is the model's, or what fits of it. On a card too small for the
// context, layers that the policy reads sparsely, or streams, go to the host, the last first, and
// what is left widens their working sets. So they go to the disk of `kv_folder` from a memory that
// is too small, if the disk has room for them, and from a card those for which the host's memory is
// too small (disk_layers.h).
Result<MemoryPlan> PlanMemory(const EngineOptions& options, const ModelConfig& config,
                              size_t weight_bytes, std::optional<DType> weights,
                              const Backend& backend);

// What a group of `n_seqs` sequences attends to on the host under such a plan, whose policy
// declares `reads`.
AwayConfig AwayOf(const ModelConfig& config, const MemoryPlan& plan, const DeclaredReads& reads,
                  int32_t n_seqs);

// What the plan says to a caller.
MemoryNeeds NeedsOf(const MemoryPlan& plan, const Backend& backend);

// The model as its policies see it, for sessions of `context` tokens, K/V in `kv_dtype`: without
// memory for their state, and without rotations.
PolicyContext ContextOf(const ModelConfig& config, int64_t context, DType kv_dtype);

// The same with a backend, in an engine of such a plan whose bank is `bank`.
PolicyContext ContextOn(Backend& backend, const ModelConfig& config, const BankConfig& bank,
                        const MemoryPlan& plan);

// A policy prepared for a model without memory, for sessions of `context` tokens, with some layers'
// K/V on the host (`fetches`) or none; kInvalidArgument where the model or a setting is against it.
Result<std::unique_ptr<Policy>> PolicyFor(const PolicyOptions& options, const ModelConfig& config,
                                          int64_t context, DType kv_dtype, bool fetches);
// TableSpec::max_held of the global-attention layers under `policy`, for `context` tokens, if its
// prompts pass chunk by chunk; of the heads of a class.
int64_t MaxHeld(const Policy& policy, int64_t context, int32_t head_class = 0);
// What a plan for plan.context tokens says of `policy`: max_held, head_classes, layer_held,
// heads_apart, by_layer, prompt, states, values_apart, values_away.
void PlanPolicy(const ModelConfig& config, const Policy& policy, int32_t max_sessions,
                MemoryPlan& plan);
// Then changes the plan so that first prompts pass layer by layer under a policy that chooses after
// passes over them: all of their rows wait in the host's memory, and there is no room for them on
// the device (docs/decisions/075). REQUIRES heads_apart.
void PassByLayer(const ModelConfig& config, const Policy& policy, int32_t max_sessions,
                 MemoryPlan& plan);

// BankConfig::block_tokens.
inline constexpr int32_t kBlockTokens = 64;

// Tokens before a window that its layers keep, so that a turn that is written a little differently
// the next time does not start over.
inline constexpr int64_t kSpareTokens = 64;

// The bank of a model: one LayerSpec per layer. Table 0 has the global-attention layers, or the
// heads of class 0 in them, or the first of them; each other table those of one size of window, or
// of another class, or another one of them.
BankConfig MakeBankConfig(const ModelConfig& config, const MemoryPlan& plan, int32_t max_sessions);

// Sequences that decode together at most.
inline constexpr int32_t kMaxBatch = 64;

// Rows of logits that PrefillLogits may ask for at once: bounded by memory, at least the two for
// each sequence of a batch that decode steps alternate between.
int32_t MaxOutRows(const ModelConfig& config, int32_t chunk, int32_t max_sessions);

// What a policy declares of the global-attention layers, for all layers of the bank.
DeclaredReads ReadsByLayer(const ModelConfig& config, DeclaredReads reads);
std::vector<StateSpec> StatesByLayer(const ModelConfig& config, std::vector<StateSpec> states);
// Bytes of those in a bank of the model.
size_t StateBytes(const ModelConfig& config, const BankConfig& bank, const Policy& policy);

}  // namespace omnikv
