// A policy decides which tokens each layer reads. It names logical tokens only, and works at record
// time: it fills plans and enqueues ops that fill them, and never sees a value.
//
// Adding one: a folder src/policy/<name>/ with <name>.cc that defines
//   PolicyInfo <Name>Policy();  // brutal_offload: BrutalOffloadPolicy
// CMake finds the folder and registers it; tests/policy runs the house tests on it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "backend/backend.h"
#include "bank/declared_reads.h"
#include "bank/state_stream.h"
#include "policy/policy_info.h"
#include "policy/residual_rows.h"
#include "policy/seq_length.h"
#include "policy/settings.h"

namespace omnikv {

// What a policy sees of the model and of the session when it prepares. Layers are the
// global-attention layers, numbered from 0: sliding-window layers are outside every budget.
struct PolicyContext {
  Backend* backend = nullptr;  // null: Prepare only resolves the settings, and takes no memory
  std::string model_name;      // for presets
  std::string model_path;      // for files that stand beside the model's; empty: it has none
  int32_t n_layers = 0;        // global-attention layers
  int32_t n_heads = 0;
  int32_t n_kv_heads = 0;
  int32_t dk = 0;
  DType kv_dtype = DType::kF16;
  int32_t max_rows = 0;     // rows of the largest step
  int32_t max_seqs = 1;     // sequences whose state it keeps: RowMeta::seq is below
  int64_t max_context = 0;  // tokens
  std::vector<const float*>
      inv_freq;  // [n_layers] device [n_freq]; null: the layer has no rotation
  int32_t n_freq = 0;
  RowLayout row_layout;
  // First prompts pass layer by layer: what it keeps for the length of a prompt is of one layer.
  bool by_layer = false;
  bool force_indices = false;  // tests: no dense shortcut, whatever the length
  bool fetches = false;  // K/V of some layers are fetched: to choose all is cheaper than not to
  // Tokens whose K/V one layer reads in the time that one selection takes: Backend::SelectionBytes.
  int64_t selection_tokens = 0;
  // The tokens of a text, and those that end a user's turn in the model's chat format. Both null
  // where the model has no tokenizer; the latter are none where it has no such format.
  std::function<Result<std::vector<int32_t>>(std::string_view text)> tokenize;
  std::function<std::vector<int32_t>()> turn_end;
};

// Enqueues what makes tokens of a layer near whose K/V may live away, and turns `attend` there.
// `candidates`: one list for all KV heads, and last tokens by bounds (DeclaredReads says how many).
using BringNear = std::function<void(const AttnPlan& candidates, AttendArgs& attend)>;

// One global-attention layer of one step, as the policy sees it.
struct LayerStep {
  int32_t layer = 0;
  bool prefill = false;    // rows of a prompt: positions after one another, eager
  int64_t first_pos = 0;   // prefill: position of the first row
  int64_t prompt_end = 0;  // prefill: position past the whole prompt's last row
  // prefill: the prompt's last rows are here, and the selection that the last row would make is
  // wanted.
  bool wants_selection = false;
  bool chooses_after = false;  // prefill: the prompt ends in a choice of the layer's rows
  // prefill: the prompt's last rows are here, and that choice is made.
  bool chooses = false;
  bool by_layer = false;           // prefill: the prompt passes layer by layer
  const SeqMeta* steps = nullptr;  // AttendArgs::seqs with all tokens, where that has held rows
  // All rows of the layer, which ops may read in place, where AttendArgs::kv has the last ones
  // alone; null: it has them all.
  const KvView* home = nullptr;
  // Decode steps: what a policy calls once in a layer of which it declared candidates.
  const BringNear* bring = nullptr;
  int32_t head_class = 0;  // of Policy::HeadClasses: the heads that take part
  int32_t seq = 0;         // prefill: the rows' sequence, of SeqMeta
  // prefill: the pass of Policy::Passes whose rows these are, behind prompt_end; -1: the prompt's.
  int32_t pass = -1;
};

// A policy's state belongs to PolicyContext::max_seqs sequences: one, or those of a batch, which
// are told apart by RowMeta::seq. Thread-compatible.
class Policy {
 public:
  virtual ~Policy() = default;

  // The only place to allocate. kInvalidArgument names a setting that this model cannot have.
  virtual Status Prepare(const PolicyContext& context, PolicySettings& settings) = 0;

  // Once a prompt (or a turn of it) is in: its length in tokens. Host-side; methods that choose
  // once do it here. kInvalidArgument where the settings leave nothing to choose of that prompt.
  virtual Status AfterPrefill(int64_t context_length) {
    static_cast<void>(context_length);
    return {};
  }

  // Decode steps of one policy may differ (a dense one for short contexts, one that re-selects
  // every n tokens). The engine records one step for each set of bits that this returns. A step of
  // several sequences takes the bits of all of them, which does for each what its own would.
  virtual int32_t Variant(const SeqLength& at) const {
    static_cast<void>(at);
    return 0;
  }

  // Methods whose KV heads read differently: how many classes there are, and the heads of one in a
  // layer, ascending, known once prepared. Every head is in one class; class 0 reads whatever the
  // others do. Plan and Observe are called for each class that has heads there, and
  // AttendArgs::TakePart names these: all of class 0, and of a later class on the engine of another
  // policy perhaps those of one view. With one class, no one asks for its heads.
  virtual int32_t HeadClasses() const { return 1; }
  virtual std::vector<int32_t> HeadsOf(int32_t layer, int32_t head_class) const {
    static_cast<void>(layer);
    static_cast<void>(head_class);
    return {};
  }

  // Enqueues what a decode step of `variant` needs once, before its first layer. Rows of a prompt
  // of the same group may be in the step: what this prepares, Plan and Observe of these must not
  // change.
  virtual void BeginStep(int32_t variant, const AttendArgs& step) {
    static_cast<void>(variant);
    static_cast<void>(step);
  }

  // Before a layer's attention: `attend` comes filled for dense attention (queries, K/V, rows, the
  // heads that take part); sets its plan, and asks for scores, in it. May enqueue ops. In a prompt,
  // a policy of one head class may have gathered the rows that are read in memory of its own: then
  // it sets K/V, rows and sequences too.
  virtual void Plan(const LayerStep& step, AttendArgs& attend) = 0;

  // After it: may enqueue ops that read the scores.
  virtual void Observe(const LayerStep& step, const AttendArgs& attend) {
    static_cast<void>(step);
    static_cast<void>(attend);
  }
  // Of a prompt's rows, before Plan and once the layer's feed-forward part has begun: for measures
  // of a model. May download, and enqueues nothing.
  virtual void ObserveResidual(const LayerStep&, const ResidualRows&) {}

  // What the layers read, known once prepared.
  virtual DeclaredReads Reads() const { return {}; }
  // What it keeps per unit of a layer's tokens, known once prepared: at most one of a name in a
  // layer, whose rows follow from the K/V of the unit's tokens alone. The bank has the memory, so
  // forks, cuts and other sequences in a place need nothing of the policy, if every step, dense
  // ones too, makes the rows of the units that its tokens complete.
  virtual std::vector<StateSpec> States() const { return {}; }
  // Enqueues what makes the rows of `layer`, of all units that the step's tokens complete, from the
  // K/V of `attend`, which has no queries: of tokens that other policies' steps computed.
  virtual void MakeStates(int32_t layer, const AttendArgs& attend) {
    static_cast<void>(layer);
    static_cast<void>(attend);
  }
  // Where they lie, in the order of States(): after Prepare, before any step.
  virtual void SetStates(const std::vector<StateView>& states) { static_cast<void>(states); }
  // The selection that was made in `step`, after Observe: of a decode step, or of a prompt's rows
  // where LayerStep::wants_selection.
  virtual std::optional<Selection> Selected(const LayerStep& step) const {
    static_cast<void>(step);
    return std::nullopt;
  }

  // Tokens whose K and V a KV head reads in a decode step of `layer`, or each of its query heads'
  // lists, and those whose K alone it reads besides, for scores or states: what Cost must say.
  virtual int64_t TokensRead(int32_t layer, const SeqLength& at) const = 0;
  // The former for all lists of all KV heads, where these read different numbers of tokens: then
  // TokensRead is their mean, rounded down.
  virtual int64_t HeadTokensRead(int32_t layer, const SeqLength& at, int32_t n_kv_heads) const {
    return TokensRead(layer, at) * n_kv_heads;
  }
  virtual int64_t TokensScored(int32_t layer, const SeqLength& at) const {
    static_cast<void>(layer);
    static_cast<void>(at);
    return 0;
  }
  // As HeadTokensRead, of those.
  virtual int64_t HeadTokensScored(int32_t layer, const SeqLength& at, int32_t n_kv_heads) const {
    return TokensScored(layer, at) * n_kv_heads;
  }
  // Whether a decode step reads as many tokens as its scores say: then those of TokensRead and
  // HeadTokensRead are the most, and the last step of sequence `seq`, at whose end it had `at`,
  // read these instead. Waits for the backend.
  virtual bool ReadsByScore() const { return false; }
  virtual int64_t HeadTokensReadLast(int32_t layer, int32_t seq, const SeqLength& at,
                                     int32_t n_kv_heads) const {
    static_cast<void>(seq);
    return HeadTokensRead(layer, at, n_kv_heads);
  }
  // Bytes of its states that `layer` reads in a decode step.
  virtual int64_t StateBytesRead(int32_t layer, const SeqLength& at) const {
    static_cast<void>(layer);
    static_cast<void>(at);
    return 0;
  }
  // Whether the budget applies to `layer` (dense layers read everything).
  virtual bool Budgeted(int32_t layer) const = 0;
  // Tokens that the budget allows a budgeted layer at `length` tokens of context; 0: no budget.
  virtual int64_t Budget(int64_t length) const {
    static_cast<void>(length);
    return 0;
  }
  // Tokens that a budgeted layer reads besides.
  virtual int64_t Besides(const SeqLength& at) const {
    static_cast<void>(at);
    return 0;
  }
  // Both together, of one layer: where layers have budgets of their own, of which Budget is the
  // mean, of a sequence of one prompt.
  virtual int64_t LayerAllows(int32_t layer, const SeqLength& at) const {
    static_cast<void>(layer);
    return Budget(at.tokens) + Besides(at);
  }

  // Tokens that no row after the first `length` ones will read, in any layer, by the heads of
  // `head_class` or of a later one: their memory is given back. `begin` is the same for every
  // length, `end` grows with it. A sequence that is cut back into what still needed them starts
  // over.
  struct TokenRange {
    int64_t begin = 0;
    int64_t end = 0;
  };
  virtual TokenRange Dropped(int64_t length, int32_t head_class) const {
    static_cast<void>(length);
    static_cast<void>(head_class);
    return {};
  }

  // Whether rows of a prompt read everything that is held, known once prepared: where nothing is
  // lost before, their logits are full attention's.
  virtual bool DensePrompts() const { return true; }
  // Rows of a prompt that pass in one step, from the first new row on; the last step may have
  // fewer. 0: any number.
  virtual int32_t PromptStepRows() const { return 0; }

  // Methods that choose the rows that a layer keeps, and forget the others. All that such a policy
  // sees of a step (rows, sequences) counts held rows, not tokens; in BeginStep, those of layer 0.
  virtual Keeps Kept() const { return {}; }
  // Rows at the end of a sequence's first prompt that it must see in one step to choose.
  virtual int32_t LastRows() const { return 1; }
  // What `layer` keeps, after Observe: of a prompt's last rows where LayerStep::chooses, and of
  // every decode step where Keeps::every_step.
  virtual std::optional<Retained> Retains(const LayerStep& step) const {
    static_cast<void>(step);
    return std::nullopt;
  }

  // Methods that choose after passes (Keeps::passes): once the last row of a prompt of sequence
  // `seq` of SeqMeta is in (a first one, or any: Keeps::first_prompt), the rows of each of these
  // lists of tokens run behind it, pass after pass, and are forgotten at the pass's end. Plan and
  // Observe see them (LayerStep::pass). `prompt`: all tokens of the sequence.
  virtual Result<std::vector<std::vector<int32_t>>> Passes(int32_t seq,
                                                           std::span<const int32_t> prompt) const {
    static_cast<void>(seq);
    static_cast<void>(prompt);
    return std::vector<std::vector<int32_t>>{};
  }
  // Then, on the host: chooses the rows of sequence `seq` of SeqMeta, and returns how many each
  // list of each layer keeps, [n_layers, Keeps::lists]. Retains says which. Without a pass before
  // it, of a prompt of made-up K/V.
  virtual std::vector<int64_t> ChooseAfterPasses(int32_t seq, int64_t tokens) {
    static_cast<void>(seq);
    static_cast<void>(tokens);
    return {};
  }
  // Sequence `seq` of SeqMeta begins anew, without tokens. On the host.
  virtual void StartOver(int32_t seq) { static_cast<void>(seq); }

  // Memory that Prepare took.
  virtual size_t Bytes() const { return 0; }

  // Whether a sequence may be cut back, other than by the steps that ran ahead of the host. One
  // that may not starts over then.
  virtual bool CutsBack() const { return true; }
  // Rows at the end of a prompt that must be fed anew after the sequence was cut back, for the
  // policy's own state to be what it would have been.
  virtual int64_t WarmRows() const { return 1; }

  // Takes over the state of `from`, the same policy on a forked sequence.
  virtual void CopyState(const Policy& from) { static_cast<void>(from); }
  // The same as bytes: the state of sequence `seq`, which has `length` tokens, and back, into any
  // sequence of an instance with the same settings, whose sequences may be longer. States() are not
  // part of it. False where the bytes cannot be such a state.
  virtual std::string SaveState(int32_t seq, int64_t length) const {
    static_cast<void>(seq);
    static_cast<void>(length);
    return {};
  }
  virtual bool LoadState(int32_t seq, int64_t length, std::string_view state) {
    static_cast<void>(seq);
    static_cast<void>(length);
    return state.empty();
  }
};

}  // namespace omnikv
