// The layer loop: the only one, for every backend, every policy, prefill and decode.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
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
  Buffer x, y;                  // f32 [R, d_model]
  Buffer q, o;                  // f32 [R, n_heads, head_dim]
  Buffer ffn;                   // f32 [R, ffn]
  Buffer logits;                // f32 [max_out, vocab]
  Buffer tokens;                // int32 [R]
  Buffer rows;                  // RowMeta [R]
  Buffer seqs;                  // SeqMeta [R]
  Buffer out_rows;              // int32 [max_out]
  std::vector<Buffer> cos_sin;  // f32 [R, n_freq, 2], one for each of ModelConfig::ropes
};

// One step: `n_rows` tokens, whose meta data stand in the workspace, logits for `n_out` of them. A
// prompt's are of one sequence, a decode step's one of each. Everything here is fixed when a step
// is recorded.
struct StepShape {
  int32_t n_rows = 1;
  int32_t n_out = 1;
  bool prefill = false;
  // Position of the first row: of a prompt, and of a step that cannot be recorded
  // (Residency::CanRecord).
  int64_t first_pos = 0;
  int64_t prompt_end = 0;  // prefill: position past the prompt's last row
  int32_t variant = 0;     // decode: of the policy
  int32_t logits_row = 0;  // where the first row of logits goes
};

// Hears, while a step is enqueued or recorded, of each selection that its policy makes in it, and
// for which sequence: where to look once the step has run.
using OnSelection = std::function<void(const Selection& selection, const SeqMeta* seq)>;

// What a step works on. All outlive it.
struct StepContext {
  Backend& backend;
  const ModelConfig& config;
  const Weights& weights;
  const Workspace& work;
  const RopeState& ropes;
  Residency& residency;
  Policy& policy;
  int32_t seq = 0;           // of the bank, for layers on the host
  int32_t n_seqs = 1;        // that `work.seqs` tells of; those without rows have no tokens
  OnSelection on_selection;  // may be empty
};

// Layers that policies number: the global-attention ones.
int32_t GlobalLayers(const ModelConfig& config);

// Enqueues a whole step: embedding, layers, logits.
void EnqueueStep(const StepContext& context, const StepShape& shape);

}  // namespace omnikv
