#include "model/forward.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "backend/kv_format.h"
#include "base/check.h"
#include "model/rope.h"

namespace omnikv {
namespace {

// A group in a step under way.
struct Group {
  const StepGroup& rows;
  int32_t row = 0;                           // the first
  int32_t seq = 0;                           // the first
  bool alone = true;                         // no other group is in the step
  std::optional<Residency::Step> residency;  // once the step has begun
};

// Rows that are computed together: of all groups that decode, or of one prompt, or all of a step.
struct Part {
  std::span<Group> groups;
  float* x = nullptr;  // the residual, of the first row of the step
  int32_t row = 0;     // the first
  int32_t n_rows = 0;
  int32_t out = 0;  // the first row of logits
  int32_t n_out = 0;
  int32_t layer = 0;  // where the step begins
};

std::vector<Group> GroupsOf(std::span<const StepGroup> step) {
  std::vector<Group> groups;
  int32_t row = 0;
  int32_t seq = 0;
  for (const StepGroup& group : step) {
    groups.push_back(
        {.rows = group, .row = row, .seq = seq, .alone = step.size() == 1, .residency = {}});
    row += group.n_rows;
    seq += group.n_seqs;
  }
  return groups;
}

// `shared`: one part, of all groups.
std::vector<Part> PartsOf(const StepContext& c, std::span<Group> groups, bool shared) {
  std::vector<Part> parts;
  int32_t out = 0;
  for (size_t i = 0; i < groups.size(); ++i) {
    const StepGroup& rows = groups[i].rows;
    OKV_CHECK(i == 0 || rows.prefill || !groups[i - 1].rows.prefill);
    OKV_CHECK(!rows.one_layer || groups.size() == 1);
    if (i == 0 || (rows.prefill && !shared)) {
      parts.push_back({.groups = groups.subspan(i, 0),
                       .x = rows.one_layer ? rows.one_layer->x : c.work.x.as<float>(),
                       .row = groups[i].row,
                       .out = out,
                       .layer = rows.one_layer ? rows.one_layer->layer : 0});
    }
    Part& part = parts.back();
    part.groups = {part.groups.data(), part.groups.size() + 1};
    part.n_rows += rows.n_rows;
    part.n_out += rows.n_out;
    out += rows.n_out;
  }
  return parts;
}

int32_t GlobalLayersBefore(const ModelConfig& config, int32_t layer) {
  return static_cast<int32_t>(std::count_if(config.layers.begin(), config.layers.begin() + layer,
                                            [](const LayerConfig& l) { return l.window == 0; }));
}

// Where row `row` begins in an array [R, width].
float* At(const Buffer& array, int32_t row, int64_t width) {
  return array.as<float>() + row * width;
}

int64_t HeadValues(const ModelConfig& config) {
  return int64_t{config.n_heads} * config.head_dim;
}

// The residual's reader: `y` holds what the last projection left, if one is pending.
Residual Reader(const StepContext& c, const Part& part, bool pending, const float* post_norm,
                const float* norm) {
  return {.x = part.x + int64_t{part.row} * c.config.d_model,
          .y = pending ? At(c.work.y, part.row, c.config.d_model) : nullptr,
          .post_norm = post_norm,
          .norm = norm,
          .scale = c.config.residual_scale,
          .eps = c.config.norm_eps,
          .d = c.config.d_model};
}

void EnqueueInputs(const StepContext& c, const Part& part) {
  if (part.layer == 0) {
    c.backend.Enqueue(EmbedArgs{.tokens = c.work.tokens.as<int32_t>() + part.row,
                                .table = c.weights.embed,
                                .scale = c.config.embed_scale,
                                .x = part.x + int64_t{part.row} * c.config.d_model,
                                .n_rows = part.n_rows});
  }
  for (const Group& group : part.groups) {
    const std::vector<RopeState::Set>& sets = group.rows.ropes.sets();
    for (size_t i = 0; i < sets.size(); ++i) {
      c.backend.Enqueue(
          RopeTableArgs{.rows = c.work.rows.as<RowMeta>() + group.row,
                        .inv_freq = sets[i].inv_freq.as<float>(),
                        .magnitude = sets[i].magnitude,
                        .cos_sin = At(c.work.cos_sin[i], group.row, 2 * sets[i].n_freq),
                        .n_freq = sets[i].n_freq,
                        .n_rows = group.rows.n_rows});
    }
  }
}

// The rows of a group, and its sequences, by their numbers in the group.
const RowMeta* RowsOf(const StepContext& c, const Group& group) {
  return (group.alone ? c.work.rows : c.work.group_rows).as<RowMeta>() + group.row;
}
const SeqMeta* SeqsOf(const StepContext& c, const Group& group) {
  return c.work.seqs.as<SeqMeta>() + group.seq;
}

// Attention of a group's rows to everything.
AttendArgs DenseAttend(const StepContext& c, const Group& group, const KvPlace& place) {
  return {.q = At(c.work.q, group.row, HeadValues(c.config)),
          .o = At(c.work.o, group.row, HeadValues(c.config)),
          .kv = place.kv,
          .plan = AttnPlan::Dense(),
          .rows = place.rows != nullptr ? place.rows : RowsOf(c, group),
          .seqs = place.seqs != nullptr ? place.seqs : SeqsOf(c, group),
          .n_rows = group.rows.n_rows,
          .n_seqs = group.rows.n_seqs,
          .n_heads = c.config.n_heads,
          .scale = c.config.attn_scale,
          .softcap = c.config.attn_softcap,
          .busy_seqs = group.rows.prefill ? 1 : 0};
}

// Where the rows of a group go in a layer, by head class.
using Places = std::vector<KvPlace>;

// The rows of a step as `place` knows them, from those of `first` on, and their sequences: numbered
// in the group where the place is of one group alone.
std::pair<const RowMeta*, const SeqMeta*> RowsAt(const StepContext& c, const Group& first,
                                                 const KvPlace& place) {
  if (place.slot.k == nullptr && place.rows == nullptr) {
    return {c.work.rows.as<RowMeta>() + first.row, c.work.seqs.as<SeqMeta>()};
  }
  const AttendArgs attend = DenseAttend(c, first, place);
  return {attend.rows, attend.seqs};
}

// Room for the new K/V rows of a part, in the format of `kv`, on their way to several places.
KvView MadeRows(const StepContext& c, const KvView& kv) {
  return MakeKvView(c.work.ffn.as<std::byte>(), c.work.made_seq.as<int32_t>(), c.work.max_rows,
                    kv.k.dtype, c.config.n_kv_heads, kv.dk, kv.dv);
}

// From there to the places, by group.
void EnqueueStores(const StepContext& c, const Part& part, const std::vector<Places>& places) {
  for (size_t i = 0; i < places.size();) {
    const Group& first = part.groups[i];
    const Places& to = places[i];
    int32_t n_rows = 0;
    do {
      n_rows += part.groups[i++].rows.n_rows;
    } while (i < places.size() && places[i] == to);
    for (size_t p = 0; p < to.size(); p += 2) {
      const KvPlace& place = to[p];
      const KvView made = MadeRows(c, place.kv);
      const auto [rows, seqs] = RowsAt(c, first, place);
      StoreRowsArgs store{.from = made.MovedTo(made.k.Head(first.row - part.row, 0)),
                          .kv = place.kv,
                          .slot = place.slot,
                          .rows = rows,
                          .seqs = seqs,
                          .n_rows = n_rows};
      if (p + 1 < to.size()) {
        OKV_CHECK(RowsAt(c, first, to[p + 1]) == std::pair(rows, seqs));
        store.rest = to[p + 1].kv;
      }
      if (place.apart > 0) {
        const bool by_head = first.rows.prefill;
        store.row_step = by_head ? 1 : place.apart;
        store.head_step = by_head ? n_rows : 1;
      }
      c.backend.Enqueue(store);
    }
  }
}

// New rows of a layer, which are computed together. Returns where they are, by group.
std::vector<Places> EnqueueAppend(const StepContext& c, const Part& part, int32_t layer) {
  const LayerWeights& w = c.weights.layers[static_cast<size_t>(layer)];
  const LayerConfig& spec = c.config.layers[static_cast<size_t>(layer)];
  const float* last_post_norm =
      layer == 0 ? nullptr : c.weights.layers[static_cast<size_t>(layer - 1)].ffn_post_norm;
  std::vector<Places> places;
  for (Group& group : part.groups) places.push_back(group.residency->BeforeAppend(layer));
  const Group& first = part.groups.front();
  const KvPlace& place = places.front().front();
  const bool one_place =
      places.front().size() == 1 && place.apart == 0 &&
      std::all_of(places.begin(), places.end(), [&](const Places& p) { return p == places[0]; });
  const auto [rows, seqs] = one_place ? RowsAt(c, first, place)
                                      : std::pair{c.work.made_rows.as<const RowMeta>(),
                                                  c.work.made_seq.as<const SeqMeta>()};
  NormQkvRopeAppendArgs qkv{.in = Reader(c, part, layer > part.layer, last_post_norm, w.attn_norm),
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
                            .q = At(c.work.q, part.row, HeadValues(c.config)),
                            .n_heads = c.config.n_heads,
                            .kv = one_place ? place.kv : MadeRows(c, place.kv),
                            .slot = one_place ? place.slot : KvSlot{},
                            .rows = rows,
                            .seqs = seqs,
                            .n_rows = part.n_rows};
  if (spec.rope >= 0) {
    const auto set = static_cast<size_t>(spec.rope);
    qkv.n_freq = first.rows.ropes.sets()[set].n_freq;
    qkv.cos_sin = At(c.work.cos_sin[set], part.row, 2 * qkv.n_freq);
  }
  c.backend.Enqueue(qkv);
  if (!one_place) EnqueueStores(c, part, places);
  return places;
}

// Heads of a class whose rows lie in one view.
struct HeadView {
  HeadMask heads;  // AttendArgs::heads
  KvView kv;
};

// All heads of a class (empty: of the layer). Those of class 0 lie in one view: who reads
// everything reads nothing of what another policy gives back.
std::vector<HeadView> ViewsOf(const std::vector<int32_t>& heads, const Places& places) {
  const HeadMask of_class = HeadMask::Of(heads);
  OKV_CHECK(!of_class.All() || places.size() == 1);
  std::vector<HeadView> views;
  for (const KvPlace& place : places) {
    HeadMask here = of_class;
    if (!place.kv.heads.All()) here.bits &= place.kv.heads.bits;
    if (here.bits != 0 || of_class.All()) views.push_back({.heads = here, .kv = place.kv});
  }
  return views;
}

void ShowPlan(const StepContext& c, const Group& group, int32_t layer, const AttendArgs& attend,
              int32_t apart = 0) {
  if (c.watch == nullptr || group.rows.prefill) return;
  c.watch->Planned(group.rows, layer, attend, apart);
}

// Attention of KV heads that are apart, by the group's policy, as one over sequences of one KV head
// each. In decode steps queries lie as its rows do. Those of a prompt are brought in order by head.
void EnqueueApart(const StepContext& c, Group& group, int32_t layer, const LayerStep& step,
                  const KvPlace& place) {
  const int32_t heads = place.apart;
  AttendArgs attend = DenseAttend(c, group, place);
  PickHeadsArgs pick{.n_heads = heads,
                     .width = c.config.n_heads / heads * c.config.head_dim,
                     .n_rows = attend.n_rows};
  const auto for_heads = [&](const float* from, float* to, bool back) {
    const int64_t a_head = int64_t{pick.n_rows} * pick.width;
    pick.back = back;
    for (int32_t h = 0; step.prefill && h < heads; ++h) {
      pick.heads = {uint64_t{1} << h};
      pick.from = from + (back ? h * a_head : 0);
      pick.to = to + (back ? 0 : h * a_head);
      c.backend.Enqueue(pick);
    }
  };
  float* const o = attend.o;
  if (step.prefill) {
    float* const picked = At(c.work.ffn, group.row, 2 * HeadValues(c.config));
    for_heads(attend.q, picked, /*back=*/false);
    attend.q = picked;
    attend.o = picked + int64_t{attend.n_rows} * HeadValues(c.config);
  }
  attend.n_rows *= heads;
  attend.n_seqs *= heads;
  attend.n_heads /= heads;
  attend.busy_seqs *= heads;
  group.rows.policy.Plan(step, attend);
  ShowPlan(c, group, layer, attend, heads);
  if (group.residency->BeforeAttend(layer, attend)) c.backend.Enqueue(attend);
  group.residency->AfterAttend();
  for_heads(attend.o, o, /*back=*/true);
  group.rows.policy.Observe(step, attend);
}

// Attention of the heads of a class, by the group's policy.
void EnqueueHeads(const StepContext& c, Group& group, int32_t layer, const LayerStep& step,
                  const Places& places, const std::vector<int32_t>& heads) {
  if (places.front().apart > 0) return EnqueueApart(c, group, layer, step, places.front());
  const std::vector<HeadView> views = ViewsOf(heads, places);
  AttendArgs attend = DenseAttend(c, group, places.front());
  OKV_CHECK(views.size() == 1 || step.head_class > 0);
  attend.kv = views.front().kv;
  attend.heads = views.front().heads;
  group.rows.policy.Plan(step, attend);
  const AttendArgs planned = attend;
  const bool gathered = planned.kv != views.front().kv;  // by the policy
  OKV_CHECK(!gathered || views.size() == 1);
  for (const HeadView& view : views) {
    attend = planned;
    attend.heads = view.heads;
    if (!gathered) attend.kv = view.kv;
    ShowPlan(c, group, layer, attend);
    if (group.residency->BeforeAttend(layer, attend)) c.backend.Enqueue(attend);
    group.residency->AfterAttend();
  }
  group.rows.policy.Observe(step, attend);
}

// A layer of a group's step, `global` among the global-attention layers, as its policy sees it.
LayerStep StepOf(const StepContext& c, const Group& group, int32_t global) {
  const StepGroup& rows = group.rows;
  return {.layer = global,
          .prefill = rows.prefill,
          .first_pos = rows.first_pos,
          .prompt_end = rows.prompt_end,
          .wants_selection = group.residency->WantsSelection(),
          .chooses_after = rows.prefill && rows.residency.ChoosesAfterPrompt(rows.member),
          .chooses = rows.chooses,
          .by_layer = rows.one_layer.has_value(),
          .steps = SeqsOf(c, group),
          .seq = rows.member,
          .pass = rows.pass};
}

// Shows the policies of prompts the residual of a layer with global attention.
void ShowResidual(const StepContext& c, const Part& part, int32_t layer, int32_t global,
                  bool attended) {
  if (c.config.layers[static_cast<size_t>(layer)].window > 0) return;
  for (const Group& group : part.groups) {
    if (!group.rows.prefill) continue;
    group.rows.policy.ObserveResidual(StepOf(c, group, global),
                                      {.x = part.x + int64_t{group.row} * c.config.d_model,
                                       .n_rows = group.rows.n_rows,
                                       .d = c.config.d_model,
                                       .attended = attended});
  }
}

// Attention of one group in a layer, by its policy.
void EnqueueGroup(const StepContext& c, Group& group, int32_t layer, int32_t global,
                  const Places& places) {
  const StepGroup& rows = group.rows;
  const int32_t window = c.config.layers[static_cast<size_t>(layer)].window;
  std::optional<Selection> selection;
  std::optional<Retained> retained;
  if (window > 0) {  // sliding-window layers are outside every policy
    AttendArgs attend = DenseAttend(c, group, places.front());
    attend.plan = AttnPlan::Dense(window);
    ShowPlan(c, group, layer, attend);
    c.backend.Enqueue(attend);
  } else {
    LayerStep step = StepOf(c, group, global);
    if (places.front().home) step.home = &*places.front().home;
    const BringNear bring = [&](const AttnPlan& candidates, AttendArgs& attend) {
      group.residency->Bring(layer, candidates, attend);
    };
    if (!step.prefill) step.bring = &bring;
    const int32_t classes = rows.policy.HeadClasses();
    for (; step.head_class < classes; ++step.head_class) {
      const std::vector<int32_t> heads = rows.policy.HeadsOf(global, step.head_class);
      if (classes > 1 && heads.empty()) continue;
      EnqueueHeads(c, group, layer, step, places, heads);
    }
    selection = rows.policy.Selected(step);
    retained = rows.policy.Retains(step);
  }
  group.residency->AfterObserve(layer, selection, retained);
}

// The first half of a layer: new rows, attention, projection.
void EnqueueAttention(const StepContext& c, const Part& part, int32_t layer, int32_t global) {
  const LayerWeights& w = c.weights.layers[static_cast<size_t>(layer)];
  const std::vector<Places> places = EnqueueAppend(c, part, layer);
  for (Group& group : part.groups) group.residency->AfterAppend(layer);
  ShowResidual(c, part, layer, global, /*attended=*/false);
  for (size_t i = 0; i < places.size(); ++i) {
    EnqueueGroup(c, part.groups[i], layer, global, places[i]);
  }
  c.backend.Enqueue(LinearArgs{.x = At(c.work.o, part.row, HeadValues(c.config)),
                               .w = w.wo,
                               .bias = w.bo,
                               .y = At(c.work.y, part.row, c.config.d_model),
                               .n_rows = part.n_rows});
}

// The second half.
void EnqueueFfn(const StepContext& c, const Part& part, int32_t layer, int32_t global) {
  const LayerWeights& w = c.weights.layers[static_cast<size_t>(layer)];
  float* const ffn = At(c.work.ffn, part.row, c.config.ffn);
  c.backend.Enqueue(NormGatedFfnArgs{.in = Reader(c, part, true, w.attn_post_norm, w.ffn_norm),
                                     .gate = w.gate,
                                     .up = w.up,
                                     .gate_bias = w.gate_bias,
                                     .up_bias = w.up_bias,
                                     .act = c.config.act,
                                     .out = ffn,
                                     .n_rows = part.n_rows});
  ShowResidual(c, part, layer, global, /*attended=*/true);
  c.backend.Enqueue(LinearArgs{.x = ffn,
                               .w = w.down,
                               .bias = w.down_bias,
                               .y = At(c.work.y, part.row, c.config.d_model),
                               .n_rows = part.n_rows});
}

// Adds what the last projection left: an op that reads the residual, for no logits.
void EnqueueResidual(const StepContext& c, const Part& part, const float* post_norm) {
  c.backend.Enqueue(NormLogitsArgs{.in = Reader(c, part, true, post_norm, nullptr),
                                   .out_rows = c.work.out_rows.as<int32_t>(),
                                   .n_rows = part.n_rows});
}

void EnqueueLogits(const StepContext& c, const Part& part, int32_t logits_row) {
  c.backend.Enqueue(NormLogitsArgs{
      .in = Reader(c, part, true, c.weights.layers.back().ffn_post_norm, c.weights.final_norm),
      .head = c.weights.head,
      .bias = c.weights.head_bias,
      .scale = c.config.logits_scale,
      .softcap = c.config.logits_softcap,
      .out_rows = c.work.out_rows.as<int32_t>() + part.out,
      .logits = At(c.work.logits, logits_row + part.out, c.config.vocab),
      .n_rows = part.n_rows,
      .n_out = part.n_out});
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
  // K/V of a row are no larger in any format than in f32, nor are there more of them than queries.
  visit(w.ffn, size(rows * std::max<int64_t>(config.ffn, 2 * heads), 4));
  visit(w.made_rows, size(rows, sizeof(RowMeta)));
  visit(w.made_seq, sizeof(SeqMeta));
  visit(w.logits, size(out * config.vocab, 4));
  visit(w.tokens, size(rows, sizeof(int32_t)));
  visit(w.rows, size(rows, sizeof(RowMeta)));
  visit(w.group_rows, size(rows, sizeof(RowMeta)));
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
  std::vector<RowMeta> made_rows;
  for (int32_t r = 0; r < max_rows; ++r) made_rows.push_back({.seq = 0, .pos = r});
  backend.Upload(w.made_rows.as(), made_rows.data(), made_rows.size() * sizeof(RowMeta));
  return w;
}

size_t Workspace::BytesFor(const ModelConfig& config, int32_t max_rows, int32_t max_out) {
  Workspace w;
  size_t total = 0;
  ForEachBuffer(w, config, max_rows, max_out, [&](Buffer&, size_t bytes) { total += bytes; });
  return total;
}

int32_t GlobalLayers(const ModelConfig& config) {
  return GlobalLayersBefore(config, config.n_layers);
}

void EnqueueStep(const StepContext& c, std::span<const StepGroup> step, int32_t logits_row) {
  std::vector<Group> groups = GroupsOf(step);
  const std::vector<Part> parts = PartsOf(c, groups, c.shared_products);
  OKV_CHECK(parts.back().row + parts.back().n_rows <= c.work.max_rows);
  OKV_CHECK(logits_row + parts.back().out + parts.back().n_out <= c.work.max_out);
  for (const Part& part : parts) {
    EnqueueInputs(c, part);
    for (Group& group : part.groups) {
      const StepGroup& rows = group.rows;
      const AttendArgs attend = DenseAttend(c, group, KvPlace{});
      group.residency.emplace(
          rows.residency.BeginStep({.rows = attend.rows,
                                    .seqs = attend.seqs,
                                    .prefill = rows.prefill,
                                    .seq = rows.seq,
                                    .first_pos = rows.first_pos,
                                    .n_rows = rows.n_rows,
                                    .prompt_end = rows.prompt_end,
                                    .stage = rows.one_layer ? rows.one_layer->stage : nullptr}));
      if (rows.prefill) continue;
      rows.policy.BeginStep(rows.variant, DenseAttend(c, group, group.residency->OfPolicy()));
    }
  }
  const bool one_layer = step.front().one_layer.has_value();
  const int32_t first = parts.front().layer;
  const int32_t end = one_layer ? first + 1 : c.config.n_layers;
  for (int32_t layer = first; layer < end; ++layer) {
    for (const Part& part : parts) {
      const int32_t global = GlobalLayersBefore(c.config, layer);
      EnqueueAttention(c, part, layer, global);
      EnqueueFfn(c, part, layer, global);
    }
  }
  for (Group& group : groups) group.residency->AfterLayers();
  // Rows of a prompt that have logits are numbered from its first.
  for (const Part& part : PartsOf(c, groups, /*shared=*/false)) {
    if (end < c.config.n_layers) {
      EnqueueResidual(c, part, c.weights.layers[static_cast<size_t>(end - 1)].ffn_post_norm);
    } else if (part.n_out > 0) {
      EnqueueLogits(c, part, logits_row);
    }
  }
  for (Group& group : groups) group.residency->EndStep();
}

}  // namespace omnikv
