#include "model/forward.h"

#include <algorithm>
#include <optional>

#include "base/check.h"
#include "model/rope.h"

namespace omnikv {
namespace {

// The residual's reader: `y` holds what the last projection left, null before the first layer.
Residual Reader(const StepContext& c, bool pending, const float* post_norm, const float* norm) {
  return {.x = c.work.x.as<float>(),
          .y = pending ? c.work.y.as<float>() : nullptr,
          .post_norm = post_norm,
          .norm = norm,
          .scale = c.config.residual_scale,
          .eps = c.config.norm_eps,
          .d = c.config.d_model};
}

void EnqueueInputs(const StepContext& c, const StepShape& shape) {
  c.backend.Enqueue(EmbedArgs{.tokens = c.work.tokens.as<int32_t>(),
                              .table = c.weights.embed,
                              .scale = c.config.embed_scale,
                              .x = c.work.x.as<float>(),
                              .n_rows = shape.n_rows});
  for (size_t i = 0; i < c.ropes.sets().size(); ++i) {
    const RopeState::Set& set = c.ropes.sets()[i];
    c.backend.Enqueue(RopeTableArgs{.rows = c.work.rows.as<RowMeta>(),
                                    .inv_freq = set.inv_freq.as<float>(),
                                    .magnitude = set.magnitude,
                                    .cos_sin = c.work.cos_sin[i].as<float>(),
                                    .n_freq = set.n_freq,
                                    .n_rows = shape.n_rows});
  }
}

AttendArgs DenseAttend(const StepContext& c, const StepShape& shape, const KvView& kv) {
  return {.q = c.work.q.as<float>(),
          .o = c.work.o.as<float>(),
          .kv = kv,
          .plan = AttnPlan::Dense(),
          .rows = c.work.rows.as<RowMeta>(),
          .seqs = c.work.seqs.as<SeqMeta>(),
          .n_rows = shape.n_rows,
          .n_seqs = c.n_seqs,
          .n_heads = c.config.n_heads,
          .scale = c.config.attn_scale,
          .softcap = c.config.attn_softcap};
}

// The first half of a layer: new rows, attention, projection. `global` is the layer's number among
// the global-attention layers.
void EnqueueAttention(const StepContext& c, const StepShape& shape, int32_t layer, int32_t global) {
  const LayerWeights& w = c.weights.layers[static_cast<size_t>(layer)];
  const LayerConfig& spec = c.config.layers[static_cast<size_t>(layer)];
  const float* last_post_norm =
      layer == 0 ? nullptr : c.weights.layers[static_cast<size_t>(layer - 1)].ffn_post_norm;
  const KvPlace place = c.residency.BeforeAppend(layer);
  NormQkvRopeAppendArgs qkv{.in = Reader(c, layer > 0, last_post_norm, w.attn_norm),
                            .wq = w.wq,
                            .wk = w.wk,
                            .wv = w.wv,
                            .bq = w.bq,
                            .bk = w.bk,
                            .bv = w.bv,
                            .qk_norm = c.config.qk_norm,
                            .q_norm = w.q_norm,
                            .k_norm = w.k_norm,
                            .qk_norm_eps = c.config.norm_eps,
                            .q = c.work.q.as<float>(),
                            .n_heads = c.config.n_heads,
                            .kv = place.kv,
                            .slot = place.slot,
                            .rows = c.work.rows.as<RowMeta>(),
                            .seqs = c.work.seqs.as<SeqMeta>(),
                            .n_rows = shape.n_rows};
  if (spec.rope >= 0) {
    qkv.cos_sin = c.work.cos_sin[static_cast<size_t>(spec.rope)].as<float>();
    qkv.n_freq = c.ropes.sets()[static_cast<size_t>(spec.rope)].n_freq;
  }
  c.backend.Enqueue(qkv);
  c.residency.AfterAppend(layer);

  AttendArgs attend = DenseAttend(c, shape, place.kv);
  std::optional<Selection> selection;
  if (spec.window > 0) {  // sliding-window layers are outside every policy
    attend.plan = AttnPlan::Dense(spec.window);
    c.backend.Enqueue(attend);
  } else {
    const LayerStep step{.layer = global,
                         .prefill = shape.prefill,
                         .first_pos = shape.first_pos,
                         .prompt_end = shape.prompt_end,
                         .wants_selection = c.residency.WantsSelection()};
    c.policy.Plan(step, attend);
    c.residency.BeforeAttend(layer, attend);
    c.backend.Enqueue(attend);
    c.policy.Observe(step, attend);
    selection = c.policy.Selected(step);
    if (selection && c.on_selection && !shape.prefill) c.on_selection(*selection, attend.seqs);
  }
  c.residency.AfterObserve(layer, selection);
  c.backend.Enqueue(LinearArgs{.x = c.work.o.as<float>(),
                               .w = w.wo,
                               .bias = w.bo,
                               .y = c.work.y.as<float>(),
                               .n_rows = shape.n_rows});
}

// The second half.
void EnqueueFfn(const StepContext& c, const StepShape& shape, int32_t layer) {
  const LayerWeights& w = c.weights.layers[static_cast<size_t>(layer)];
  c.backend.Enqueue(NormGatedFfnArgs{.in = Reader(c, true, w.attn_post_norm, w.ffn_norm),
                                     .gate = w.gate,
                                     .up = w.up,
                                     .gate_bias = w.gate_bias,
                                     .up_bias = w.up_bias,
                                     .act = c.config.act,
                                     .out = c.work.ffn.as<float>(),
                                     .n_rows = shape.n_rows});
  c.backend.Enqueue(LinearArgs{.x = c.work.ffn.as<float>(),
                               .w = w.down,
                               .bias = w.down_bias,
                               .y = c.work.y.as<float>(),
                               .n_rows = shape.n_rows});
}

void EnqueueLogits(const StepContext& c, const StepShape& shape) {
  c.backend.Enqueue(NormLogitsArgs{
      .in = Reader(c, true, c.weights.layers.back().ffn_post_norm, c.weights.final_norm),
      .head = c.weights.head,
      .bias = c.weights.head_bias,
      .scale = c.config.logits_scale,
      .softcap = c.config.logits_softcap,
      .out_rows = c.work.out_rows.as<int32_t>(),
      .logits = c.work.logits.as<float>() + int64_t{shape.logits_row} * c.config.vocab,
      .n_rows = shape.n_rows,
      .n_out = shape.n_out});
}

}  // namespace

Result<RopeState> RopeState::Create(Backend& backend, const ModelConfig& config) {
  RopeState state;
  for (const RopeConfig& rope : config.ropes) {
    Set set;
    set.n_freq = rope.dim / 2;
    OKV_ASSIGN_OR_RETURN(
        set.inv_freq, backend.Allocate(static_cast<size_t>(set.n_freq) * 4, "rotary frequencies"));
    state.sets_.push_back(std::move(set));
  }
  state.Choose(backend, config, 0);
  return state;
}

void RopeState::Choose(Backend& backend, const ModelConfig& config, int64_t length) {
  for (size_t i = 0; i < sets_.size(); ++i) {
    const RopeFrequencies f = ComputeRope(config.ropes[i], config.max_context, length);
    OKV_CHECK(static_cast<int32_t>(f.inv_freq.size()) == sets_[i].n_freq);
    sets_[i].magnitude = f.magnitude;
    backend.Upload(sets_[i].inv_freq.as<void>(), f.inv_freq.data(), f.inv_freq.size() * 4);
  }
}

namespace {

// Calls visit(buffer, bytes) for every buffer of a workspace.
template <typename Visit>
void ForEachBuffer(Workspace& w, const ModelConfig& config, int64_t rows, int64_t out,
                   const Visit& visit) {
  const auto size = [](int64_t n, size_t each) { return static_cast<size_t>(n) * each; };
  const int64_t heads = int64_t{config.n_heads} * config.head_dim;
  visit(w.x, size(rows * config.d_model, 4));
  visit(w.y, size(rows * config.d_model, 4));
  visit(w.q, size(rows * heads, 4));
  visit(w.o, size(rows * heads, 4));
  visit(w.ffn, size(rows * config.ffn, 4));
  visit(w.logits, size(out * config.vocab, 4));
  visit(w.tokens, size(rows, sizeof(int32_t)));
  visit(w.rows, size(rows, sizeof(RowMeta)));
  visit(w.seqs, size(rows, sizeof(SeqMeta)));
  visit(w.out_rows, size(out, sizeof(int32_t)));
  w.cos_sin.resize(config.ropes.size());
  for (size_t i = 0; i < config.ropes.size(); ++i) {
    visit(w.cos_sin[i], size(rows * config.ropes[i].dim, 4));
  }
}

}  // namespace

Result<Workspace> Workspace::Create(Backend& backend, const ModelConfig& config, int32_t max_rows,
                                    int32_t max_out) {
  Workspace w;
  w.max_rows = max_rows;
  w.max_out = max_out;
  Status status;
  ForEachBuffer(w, config, max_rows, max_out, [&](Buffer& buffer, size_t bytes) {
    if (!status.ok()) return;
    auto allocated = backend.Allocate(bytes, "activations");
    status = allocated.status();
    if (allocated.ok()) buffer = std::move(*allocated);
  });
  if (!status.ok()) return status;
  return w;
}

size_t Workspace::BytesFor(const ModelConfig& config, int32_t max_rows, int32_t max_out) {
  Workspace w;
  size_t total = 0;
  ForEachBuffer(w, config, max_rows, max_out, [&](Buffer&, size_t bytes) { total += bytes; });
  return total;
}

int32_t GlobalLayers(const ModelConfig& config) {
  return static_cast<int32_t>(std::count_if(config.layers.begin(), config.layers.end(),
                                            [](const LayerConfig& l) { return l.window == 0; }));
}

void EnqueueStep(const StepContext& c, const StepShape& shape) {
  OKV_CHECK(shape.n_rows <= c.work.max_rows);
  OKV_CHECK(shape.logits_row + shape.n_out <= c.work.max_out);
  EnqueueInputs(c, shape);
  c.residency.BeginStep({.seqs = c.work.seqs.as<SeqMeta>(),
                         .prefill = shape.prefill,
                         .seq = c.seq,
                         .first_pos = shape.first_pos,
                         .n_rows = shape.n_rows,
                         .prompt_end = shape.prompt_end});
  if (!shape.prefill) c.policy.BeginStep(shape.variant, DenseAttend(c, shape, KvView{}));
  for (int32_t layer = 0, global = 0; layer < c.config.n_layers; ++layer) {
    EnqueueAttention(c, shape, layer, global);
    EnqueueFfn(c, shape, layer);
    if (c.config.layers[static_cast<size_t>(layer)].window == 0) ++global;
  }
  c.residency.AfterLayers();
  if (shape.n_out > 0) EnqueueLogits(c, shape);
  c.residency.EndStep();
}

}  // namespace omnikv
