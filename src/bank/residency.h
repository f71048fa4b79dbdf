// Where the K/V that a step reads and writes are: at home in the device's memory, in a stage that a
// layer passes through whole, or in slots for selected rows. The layer loop asks, and knows
// nothing of it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "backend/backend.h"
#include "bank/away_attention.h"
#include "bank/bank.h"
#include "bank/declared_reads.h"
#include "bank/fetched_units.h"
#include "bank/fetched_values.h"
#include "bank/kept_rows.h"
#include "bank/last_rows.h"
#include "bank/prompt_stage.h"
#include "bank/summed_values.h"
#include "bank/working_sets.h"

namespace omnikv {

// The rows of a step that one policy governs: of one or several sequences. Fixed where the step is
// recorded.
struct StepRows {
  const RowMeta* rows = nullptr;  // [n_rows]
  const SeqMeta* seqs = nullptr;
  bool prefill = false;
  // Of the sequence whose layers pass through stages; other steps may leave them out.
  int32_t seq = -1;        // of the bank
  int64_t first_pos = 0;   // position of the first row
  int32_t n_rows = 0;      // rows after one another
  int64_t prompt_end = 0;  // prefill: position past the whole prompt's last row
  // prefill: of a prompt that passes layer by layer; null: chunk by chunk.
  const PromptStage* stage = nullptr;
};

// Where a layer's new rows go, and where its attention finds all rows.
struct KvPlace {
  KvView kv;
  // Where all rows of the layer are, the step's own included, if `kv` has the last ones alone.
  std::optional<KvView> home;
  KvSlot slot;  // its `row` by number of the sequence in StepRows::seqs
  // The step's rows and sequences as `kv` numbers them; null: StepRows says it.
  const RowMeta* rows = nullptr;
  const SeqMeta* seqs = nullptr;
  // KV heads that are apart (StreamSpec::heads_apart); 0: none. Then `kv` has one head, and `rows`
  // and `seqs` have one for each KV head where the step has one: as LocateRowsArgs numbers them, in
  // a prompt's rows by head.
  int32_t apart = 0;

  bool operator==(const KvPlace&) const = default;
};

// Of the sequences of one group. Enqueues what moves, at record time, like a policy.
// Thread-compatible.
class Residency {
 public:
  // `max_rows` of a step. Layers of `away` that the host attends to have no working sets.
  static Result<std::unique_ptr<Residency>> Create(Backend& backend, Bank& bank,
                                                   WorkingSetConfig config, AwayConfig away,
                                                   const Keeps& keeps, int32_t max_rows);
  // Bytes of the backend's memory that Create took.
  size_t Bytes() const { return bytes_; }

  // Sequence q of SeqMeta, `seq` of the bank, begins anew, or as a fork of the one with number
  // from_q of another group.
  void Begin(int32_t q, int32_t seq, const Residency* from = nullptr, int32_t from_q = 0);
  // Sequence q of SeqMeta is `seq` of the bank as a file had it; `prompted`: not AwaitsChoice.
  void Resume(int32_t q, int32_t seq, bool prompted) {
    if (kept_ != nullptr) kept_->Resume(q, seq, prompted);
  }
  // Tokens of q whose rows are lost by choice, those of evictions apart: in the layer that lost
  // least, and by the policy's number of the layer where these differ, else empty. The latter stand
  // until q changes.
  int64_t Gone(int32_t q) const { return kept_ != nullptr ? kept_->Gone(q) : 0; }
  std::span<const int64_t> LayerGone(int32_t q) const {
    return kept_ != nullptr ? kept_->LayerGone(q) : std::span<const int64_t>();
  }
  // What it keeps per token of a sequence.
  StateStreams states() const { return kept_ != nullptr ? kept_->positions() : StateStreams(); }
  // Bank::Append, for rows of a prompt or of decode steps. `chooses`: StepRows::chooses.
  Status Append(int32_t q, int32_t seq, int64_t n, bool prefill, bool chooses = false);
  // Bank::AppendWhole, for the first prompt of a sequence. `rows`: as EndPrompt.
  Status AppendWhole(int32_t seq, int64_t n, std::span<const int64_t> rows = {});
  // kResourceExhausted where a turn of `n` tokens would be refused on its way.
  Status CheckRoom(int32_t seq, int64_t n) const {
    return kept_ != nullptr ? kept_->CheckRoom(seq, n) : Status();
  }
  // Bank::Truncate, of steps that nobody read or of a sequence that CanGoOnFrom there, or to
  // nothing.
  void Truncate(int32_t q, int32_t seq, int64_t length);
  // Whether a prompt of the sequence that ends now ends in a choice of the rows that stay.
  bool ChoosesAfterPrompt(int32_t q) const {
    return kept_ != nullptr && kept_->ChoosesAfterPrompt(q);
  }
  // Whether that is still to come for the first time.
  bool AwaitsChoice(int32_t q) const { return kept_ != nullptr && !kept_->Prompted(q); }
  // A prompt has come to its end, with such a choice or without. `rows`: how many each layer keeps
  // after a choice that says so (Keeps::passes), by the policy's numbers.
  void EndPrompt(int32_t q, int32_t seq, bool chose, std::span<const int64_t> rows = {}) {
    if (kept_ != nullptr) kept_->EndPrompt(q, seq, chose, rows);
  }
  // Enqueues the moves of a layer's rows by a choice after passes. `seqs` are those of the last
  // MakeStates. `stage`: StepRows::stage.
  void RetainAfterPasses(int32_t layer, const Retained& retained, const SeqMeta* seqs,
                         const PromptStage* stage = nullptr) {
    kept_->Retain(layer, retained, seqs, /*prefill=*/true, stage);
  }

  // Enqueues what makes the positions of rows that another group's steps wrote, of a sequence that
  // lost none. `stage`: where its rows are, if not in the bank, which then has no positions yet.
  void MakeStates(const RowMeta* rows, int32_t n_rows, const SeqMeta* seqs,
                  const PromptStage* stage = nullptr) {
    if (kept_ != nullptr) kept_->Locate(rows, n_rows, seqs, /*prefill=*/true, stage);
  }

  // Whether the host attends to K/V that live there, or sums V.
  bool AttendsAway() const { return away_ != nullptr || sums_ != nullptr; }

  // Whether decode steps may be recorded. What a step moves through stages depends on its length.
  bool CanRecord() const { return !streams_; }

  // One step, while it is enqueued. The hooks are called in this order: for each layer
  // BeforeAppend, AfterAppend, BeforeAttend, AfterAttend and AfterObserve, then AfterLayers and
  // EndStep. Where a
  // step has decode rows and a chunk of a prompt, each is one such object. A step of one layer of a
  // prompt calls them for that one.
  class Step {
   public:
    // The step's rows and sequences as the policy counts them in layer 0 (KvPlace); no K/V.
    KvPlace OfPolicy() const;
    // Where `layer` reads and writes in this step, by head class: one place for all heads, or
    // several with some heads each (KvView::heads). What is enqueued after it writes the new rows.
    std::vector<KvPlace> BeforeAppend(int32_t layer);
    // The new rows are written: K and V of all tokens are at the place.
    void AfterAppend(int32_t layer);
    // In a decode step, `layer` will read no tokens but some that `candidates` lists and the last
    // ones of its range. Makes K of these near and turns `attend` there; V is near after
    // BeforeAttend. Does nothing where all is near already, or is read in place.
    void Bring(int32_t layer, const AttnPlan& candidates, AttendArgs& attend);
    // `attend` has its plan. Makes what it reads near, and redirects it there. False: nothing of it
    // is left to the device.
    bool BeforeAttend(int32_t layer, AttendArgs& attend);
    // What BeforeAttend left of it is enqueued.
    void AfterAttend();
    // Whether the selection that the last row of this prompt would make is of use: the first decode
    // step would find its rows near.
    bool WantsSelection() const;
    // The attention is enqueued. `selection` and `retained` are what the layer selected in it and
    // what it keeps, if it chose.
    void AfterObserve(int32_t layer, const std::optional<Selection>& selection,
                      const std::optional<Retained>& retained);
    void AfterLayers();
    // What travels in this step has arrived before the next begins.
    void EndStep();

   private:
    friend class Residency;
    Step(Residency& residency, const StepRows& rows);
    // Whether `layer` passes through a stage in this step.
    bool Staged(int32_t layer) const;
    // Whether its rows are in the stage of a prompt that passes layer by layer: not all stay.
    bool InPromptStage(int32_t layer) const;
    KvPlace PlaceInPromptStage(int32_t layer) const;
    // Whether this step has made the selection of a layer with a working set.
    bool HasSelected(int32_t layer) const;
    // Whether it is read through a working set.
    bool InSet(int32_t layer) const { return !rows_.prefill && HasSelected(layer); }
    // Whether the host attends to some of its tokens.
    bool Away(int32_t layer) const {
      return !rows_.prefill && r_.away_ != nullptr && r_.away_->last().Has(layer);
    }
    // Whether what its plan lists comes to slots.
    bool Listed(int32_t layer) const {
      return !rows_.prefill && r_.units_ != nullptr && r_.units_->SelectionOf(layer) >= 0;
    }
    void ReadListed(int32_t layer, AttendArgs& attend);
    // Whether it lists candidates before its plan, which come to slots.
    bool HasCandidates(int32_t layer) const {
      return !rows_.prefill && r_.candidates_ != nullptr && r_.candidates_->SelectionOf(layer) >= 0;
    }
    // The last rows of the layer, where the step has these alone on the device; else null.
    LastRows* Last(int32_t layer) const {
      LastRows* const last = rows_.prefill ? nullptr : r_.LastOfSteps();
      if (last != nullptr && last->Has(layer)) return last;
      return r_.last_ != nullptr && r_.last_->Has(layer) ? r_.last_.get() : nullptr;
    }

    Residency& r_;
    StepRows rows_;
    std::optional<Op> merge_;     // brings in what the host does of the attention under way
    std::vector<bool> selected_;  // [n_selections]: made in this step
    int32_t brought_ = -1;        // the layer whose candidates are near
    bool primes_ = false;
    size_t staged_before_ = 0;  // Bank::BytesStaged when the step began
  };
  // Where one step has several, those of decode rows begin first.
  Step BeginStep(const StepRows& rows) { return {*this, rows}; }

  // Forgets what is in the working sets of a sequence, by its number in SeqMeta: after something
  // other than a decode step wrote K/V.
  void Reset(int32_t seq);

  // Since Create or Reset, where layers read selections through slots: of one sequence by its
  // number in SeqMeta, or of all (-1). Waits for the backend.
  std::optional<SlotCounters> Count(int32_t q = -1) const;
  // The same, but all bytes that crossed the bus for slots: those of candidates, too.
  std::optional<SlotCounters> CountBytes(int32_t q = -1) const;
  // Bytes that the last decode step brought to stages.
  size_t StreamedBytes() const { return streamed_bytes_; }

 private:
  Residency(Backend& backend, Bank& bank, bool streams)
      : backend_(backend), bank_(bank), streams_(streams) {}
  // The last rows that decode steps alone have on the device, and prompts do not; null: none.
  LastRows* LastOfSteps() const {
    if (away_ != nullptr) return &away_->last();
    const auto& units = units_ != nullptr ? units_ : candidates_;
    return units != nullptr ? &units->last() : nullptr;
  }
  // The first layer of the host tier from `layer` on, or -1.
  int32_t NextOnHost(int32_t layer) const;
  // The first `n` tokens of the first host layers of `seq` set out: of as many layers as are ahead,
  // of one at least. Every stage is free once what is enqueued has run.
  void StageFirst(int32_t seq, int64_t n);
  // The same of the host layer that is so many after `layer`, if there is one.
  void StageNext(int32_t layer, int32_t seq, int64_t n);

  Backend& backend_;
  Bank& bank_;
  bool streams_;                         // decode steps read host layers through stages
  bool decodes_ = false;                 // the step under way has decode rows
  std::unique_ptr<WorkingSets> sets_;    // null: no layer is read through one
  std::unique_ptr<KeptRows> kept_;       // null: no rows are forgotten by choice
  std::unique_ptr<AwayAttention> away_;  // null: the device attends to everything
  std::unique_ptr<FetchedUnits> units_;  // null: no layer reads listed units from slots
  // Null: no layer lists candidates, or they are read in place. Never beside `away_` or `units_`.
  std::unique_ptr<FetchedUnits> candidates_;
  std::unique_ptr<FetchedValues> values_;  // null: V of no layer is away alone, or the host sums it
  std::unique_ptr<SummedValues> sums_;     // null: it does not
  std::unique_ptr<LastRows> last_;         // of all host layers, if steps read them so; else null
  size_t bytes_ = 0;
  size_t streamed_bytes_ = 0;
};

}  // namespace omnikv
