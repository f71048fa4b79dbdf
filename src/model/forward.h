// The layer loop: the only one, for every backend, every policy, prefill and decode.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "backend/backend.h"
#include "bank/residency.h"
#include "model/config.h"
#include "model/weights.h"
#include "policy/policy.h"

namespace omnikv {

// Rotary frequencies of a session in the backend's memory: chosen by the length of its first
// prompt where the scaling depends on one, then fixed, as the cached keys are.
class RopeState {
 public:
  static Result<RopeState> Create(Backend& backend, const ModelConfig& config);
  void Choose(Backend& backend, const ModelConfig& config, int64_t length);

  struct Set {
    Buffer inv_freq;  // f32 [n_freq]
    int32_t n_freq = 0;
    float magnitude = 1;
  };
  const std::vector<Set>& sets() const { return sets_; }

 private:
  std::vector<Set> sets_;  // as ModelConfig::ropes
};

// Activations and step inputs, shared by the sessions of an engine. R = max_rows.
struct Workspace {
  static Result<Workspace> Create(Backend& backend, const ModelConfig& config, int32_t max_rows,
                                  int32_t max_out);
  static size_t BytesFor(const ModelConfig& config, int32_t max_rows, int32_t max_out);

  int32_t max_rows = 0;
  int32_t max_out = 0;
  Buffer x, y;  // f32 [R, d_model]
  Buffer q, o;  // f32 [R, n_heads, head_dim]
  // f32 [R, ffn]. In the first half of a layer, a step whose K/V rows go to different places has
  // them here: row r of a part is row r of block 0 of one sequence. Then queries of some heads, and
  // what attention makes of them, [R, 2, n_heads, head_dim] at most.
  Buffer ffn;
  Buffer made_rows;             // RowMeta [R]: those rows
  Buffer made_seq;              // SeqMeta [1] of zeros: the sequence, and its block table
  Buffer logits;                // f32 [max_out, vocab]
  Buffer tokens;                // int32 [R]
  Buffer rows;                  // RowMeta [R]: their sequences by number in `seqs`
  Buffer group_rows;            // RowMeta [R]: by number in the group; not for one group alone
  Buffer seqs;                  // SeqMeta [R]
  Buffer out_rows;              // int32 [max_out]: rows, those of a prompt counted from its first
  std::vector<Buffer> cos_sin;  // f32 [R, n_freq, 2], one for each of ModelConfig::ropes
};

struct StepGroup;

// Who wants to see what a step's attention reads. Such a step is not recorded.
class AttendWatch {
 public:
  virtual ~AttendWatch() = default;
  // Decode rows of `group` are about to attend in `layer` of the model, as the policy planned it:
  // `attend` names the tokens of the context, wherever their K/V are. What its plan points at is
  // enqueued, and may be read until this returns. Comes for the KV heads that take part, until each
  // had its turn. `apart`: as KvPlace::apart.
  virtual void Planned(const StepGroup& group, int32_t layer, const AttendArgs& attend,
                       int32_t apart) = 0;
};

// What all steps of an engine work with. All outlive it.
struct StepContext {
  Backend& backend;
  const ModelConfig& config;
  const Weights& weights;
  const Workspace& work;
  bool shared_products = false;  // EngineOptions::shared_products
  AttendWatch* watch = nullptr;  // null: no one
};

// A step of a prompt that passes layer by layer (docs/decisions/046): one layer of some of its
// rows.
struct OneLayer {
  int32_t layer = 0;
  const PromptStage* stage = nullptr;
  float* x = nullptr;  // f32 [n_rows, d_model]: the residual, which waits between layers
};

// The rows of a step that one policy governs: decode rows, one of each sequence, or the rows of one
// sequence's prompt. Everything here is fixed when a step is recorded.
struct StepGroup {
  Policy& policy;
  Residency& residency;
  const RopeState& ropes;
  int32_t n_rows = 1;
  int32_t n_out = 1;   // of them, the last ones, with logits
  int32_t n_seqs = 1;  // that its part of Workspace::seqs tells of; some may have no rows
  int32_t seq = 0;     // of the bank, where layers live on the host
  bool prefill = false;
  // Position of the first row: of a prompt, and of a step that cannot be recorded
  // (Residency::CanRecord).
  int64_t first_pos = 0;
  int64_t prompt_end = 0;  // prefill: position past the prompt's last row
  int32_t member = 0;      // prefill: the sequence, of SeqMeta
  bool chooses = false;    // prefill: Residency::ChoosesAfterPrompt, of the prompt's last rows
  int32_t pass = -1;       // prefill: LayerStep::pass
  int32_t variant = 0;     // decode: of the policy
  // prefill: the part of the prompt's schedule that this is, alone in its step; none: all layers.
  std::optional<OneLayer> one_layer;
};

// Layers that policies number: the global-attention ones.
int32_t GlobalLayers(const ModelConfig& config);
// Calls visit(layer, global) for each of them: its number in the model, and among them.
template <typename Visit>
void ForGlobalLayers(const ModelConfig& config, const Visit& visit) {
  int32_t global = 0;
  for (int32_t layer = 0; layer < config.n_layers; ++layer) {
    if (config.layers[static_cast<size_t>(layer)].window == 0) visit(layer, global++);
  }
}

// Enqueues a step: embedding, layers, logits; of a OneLayer, what belongs to its layer. Its inputs
// stand in the workspace, those of the groups one after the other: tokens, rows, and `n_seqs`
// sequences of each. Groups that decode come first. Their rows are computed together, and each
// prompt's by itself, so that no row depends on rows of a prompt beside it (unless products are
// shared). Logits go to the rows from `logits_row` on, in the order of the rows.
void EnqueueStep(const StepContext& context, std::span<const StepGroup> step,
                 int32_t logits_row = 0);

}  // namespace omnikv
