#include "bank/residency.h"

#include <algorithm>
#include <utility>

namespace omnikv {

Result<std::unique_ptr<Residency>> Residency::Create(Backend& backend, Bank& bank,
                                                     WorkingSetConfig config, AwayConfig away,
                                                     const Keeps& keeps, int32_t max_rows) {
  const bool on_host = bank.HasHostLayers();
  const bool streams = on_host && config.reads.streamed.layers > 0;
  std::unique_ptr<Residency> residency(new Residency(backend, bank, streams));
  if (keeps.rows > 0) {
    OKV_ASSIGN_OR_RETURN(residency->kept_,
                         KeptRows::Create(backend, bank, keeps, config.n_seqs, max_rows));
    residency->bytes_ += residency->kept_->Bytes();
  }
  if (SummedValues::Any(bank.config(), away)) {
    OKV_ASSIGN_OR_RETURN(residency->sums_, SummedValues::Create(backend, bank, away));
  } else if (FetchedValues::Any(bank.config(), config.reads)) {
    OKV_ASSIGN_OR_RETURN(residency->values_,
                         FetchedValues::Create(backend, bank, config.reads, config.n_seqs));
    residency->bytes_ += FetchedValues::Bytes(bank.config(), config.reads, config.n_seqs);
  }
  const LastRowsConfig last = LastRows::ConfigOf(bank.config(), config.reads, config.n_seqs);
  if (LastRows::Any(AwayAttention::LastRowsOf(bank.config(), away))) {
    OKV_ASSIGN_OR_RETURN(residency->away_, AwayAttention::Create(backend, bank, away));
    residency->bytes_ += AwayAttention::Bytes(bank.config(), away);
  } else if (LastRows::Any(last)) {
    OKV_ASSIGN_OR_RETURN(residency->last_, LastRows::Create(backend, bank, last));
    residency->bytes_ += LastRows::Bytes(bank.config(), last);
  } else if (FetchedUnits::AnyHeld(bank.config(), config)) {
    OKV_ASSIGN_OR_RETURN(residency->units_, FetchedUnits::Create(backend, bank, config));
    residency->bytes_ += FetchedUnits::Bytes(bank.config(), config);
  } else if (const WorkingSetConfig few =
                 FetchedUnits::OfCandidates(bank.config(), config.reads, config.n_seqs);
             FetchedUnits::AnyHeld(bank.config(), few)) {
    OKV_ASSIGN_OR_RETURN(residency->candidates_, FetchedUnits::Create(backend, bank, few));
    residency->bytes_ += FetchedUnits::Bytes(bank.config(), few);
  }
  if (on_host && config.reads.by_token && residency->away_ == nullptr &&
      WorkingSets::AnyHeld(bank.config(), config)) {
    OKV_ASSIGN_OR_RETURN(residency->sets_, WorkingSets::Create(backend, bank, std::move(config)));
    residency->bytes_ += residency->sets_->Bytes();
  }
  return residency;
}

int32_t Residency::NextOnHost(int32_t layer) const {
  for (; layer < bank_.n_layers(); ++layer) {
    if (bank_.OnHost(layer)) return layer;
  }
  return -1;
}

void Residency::StageFirst(int32_t seq, int64_t n) {
  backend_.Join(Lane::kIn, Lane::kMain);
  backend_.Join(Lane::kIn, Lane::kOut);
  int32_t layer = NextOnHost(0);
  for (int32_t i = 0; i < std::max(1, bank_.StagesAhead()) && layer >= 0; ++i) {
    bank_.StageIn(layer, seq, n);
    layer = NextOnHost(layer + 1);
  }
}

void Residency::StageNext(int32_t layer, int32_t seq, int64_t n) {
  for (int32_t i = 0; i < std::max(1, bank_.StagesAhead()) && layer >= 0; ++i) {
    layer = NextOnHost(layer + 1);
  }
  if (layer >= 0) bank_.StageIn(layer, seq, n);
}

Residency::Step::Step(Residency& residency, const StepRows& rows)
    : r_(residency), rows_(rows), staged_before_(residency.bank_.BytesStaged()) {
  if (r_.bank_.HasHostLayers() && r_.last_ == nullptr && (rows.prefill || r_.streams_)) {
    r_.StageFirst(rows.seq, rows.first_pos);
  }
  if (!rows.prefill) r_.decodes_ = true;
  if (r_.kept_ != nullptr) {
    r_.kept_->Locate(rows.rows, rows.n_rows, rows.seqs, rows.prefill, rows.stage);
  }
  if (r_.units_ != nullptr) {
    selected_.resize(static_cast<size_t>(r_.units_->n_selections()));
    if (!rows.prefill) r_.units_->last().BeginStep(rows.seqs);
  }
  if (r_.sets_ == nullptr) return;
  selected_.resize(static_cast<size_t>(r_.sets_->n_selections()));
  // Decode rows of the same step would lose what they selected themselves.
  primes_ = rows.prefill && !r_.decodes_ && rows.first_pos + rows.n_rows == rows.prompt_end;
}

bool Residency::Step::Staged(int32_t layer) const {
  return r_.bank_.OnHost(layer) && r_.last_ == nullptr && (rows_.prefill || r_.streams_);
}

bool Residency::Step::InPromptStage(int32_t layer) const {
  if (rows_.stage == nullptr) return false;
  const BankConfig& bank = r_.bank_.config();
  const int32_t table = bank.layers[static_cast<size_t>(layer)].table();
  return bank.tables[static_cast<size_t>(table)].window > 0 || r_.kept_ != nullptr;
}

bool Residency::Step::HasSelected(int32_t layer) const {
  if (r_.sets_ == nullptr) return false;
  const int32_t selection = r_.sets_->SelectionOf(layer);
  return selection >= 0 && selected_[static_cast<size_t>(selection)];
}

KvPlace Residency::Step::OfPolicy() const {
  if (r_.kept_ == nullptr) return {};
  const KeptRows::Located located = r_.kept_->OfFirst(rows_.prefill);
  return {.rows = located.rows, .seqs = located.seqs};
}

KvPlace Residency::Step::PlaceInPromptStage(int32_t layer) const {
  KvPlace place{.kv = rows_.stage->View(layer)};
  if (!r_.bank_.HeadsApart(layer)) return place;
  const KeptRows::Located located = r_.kept_->Of(layer, rows_.prefill);
  place.rows = located.rows;
  place.seqs = located.seqs;
  place.apart = r_.bank_.HeadClasses(layer);
  return place;
}

std::vector<KvPlace> Residency::Step::BeforeAppend(int32_t layer) {
  if (InPromptStage(layer)) return {PlaceInPromptStage(layer)};
  // What an earlier layer wrote to this stage has left it.
  if (Staged(layer)) r_.backend_.Join(Lane::kMain, Lane::kOut);
  std::vector<KvPlace> places;
  const int32_t apart = r_.bank_.HeadsApart(layer) ? r_.bank_.HeadClasses(layer) : 0;
  if (apart > 0) places.push_back({.kv = r_.bank_.View(layer), .apart = apart});
  for (int32_t c = 0; apart == 0 && c < r_.bank_.HeadClasses(layer); ++c) {
    const KvView kv = Staged(layer) ? r_.bank_.StageView(layer, c) : r_.bank_.View(layer, c);
    const int32_t n_heads = r_.bank_.config().layers[static_cast<size_t>(layer)].n_kv_heads;
    places.push_back({.kv = kv.OfHeads(HeadMask::Of(r_.bank_.HeadsOf(layer, c)), n_heads)});
  }
  if (Staged(layer)) return places;
  KvPlace& place = places.front();
  if (const LastRows* last = Last(layer); last != nullptr) {
    place.home = place.kv;
    place.kv = last->View(layer);
  }
  if (InSet(layer)) place.slot = r_.sets_->OwnRows(layer);
  if (r_.kept_ != nullptr && r_.kept_->Governs(layer)) {
    r_.kept_->SetPositions(layer, place.kv);
    const KeptRows::Located located = r_.kept_->Of(layer, rows_.prefill);
    place.rows = located.rows;
    place.seqs = located.seqs;
  }
  return places;
}

void Residency::Step::AfterAppend(int32_t layer) {
  if (LastRows* last = Last(layer); last != nullptr) {
    last->StoreHome(layer, rows_.rows, rows_.seqs, rows_.n_rows);
  }
  if (!Staged(layer)) return;
  // The layer's past is on its way already. That of a later one sets out here, into the stage that
  // the layer before this has left, or after the layer where there is but one stage.
  Bank& bank = r_.bank_;
  bank.AwaitStage(layer);
  r_.backend_.Join(Lane::kIn, Lane::kMain);
  r_.backend_.Join(Lane::kOut, Lane::kMain);
  bank.StageOut(layer, rows_.seq, rows_.first_pos, rows_.first_pos + rows_.n_rows);
  if (bank.StagesAhead() > 0) r_.StageNext(layer, rows_.seq, rows_.first_pos);
}

bool Residency::Step::BeforeAttend(int32_t layer, AttendArgs& attend) {
  if (InSet(layer)) r_.sets_->Resolve(layer, attend);
  if (Listed(layer)) ReadListed(layer, attend);
  if (HasCandidates(layer) && brought_ == layer) {
    r_.candidates_->AwaitValues();
  } else if (HasCandidates(layer)) {
    attend.kv = r_.bank_.View(layer);  // the step lists none and reads everything, where all is
  }
  if (r_.values_ != nullptr && !rows_.prefill) r_.values_->Fetch(layer, attend);
  if (r_.sums_ != nullptr && !rows_.prefill) {
    if (const auto fetch = r_.sums_->Send(layer, attend)) {
      merge_ = *fetch;
      return false;
    }
  }
  if (Away(layer)) merge_ = r_.away_->Split(layer, attend);
  return true;
}

void Residency::Step::Bring(int32_t layer, const AttnPlan& candidates, AttendArgs& attend) {
  if (!HasCandidates(layer)) return;
  r_.candidates_->Select(layer, candidates, attend.seqs);
  r_.candidates_->ResolveKeys(layer, attend);
  brought_ = layer;
}

void Residency::Step::ReadListed(int32_t layer, AttendArgs& attend) {
  const auto selection = static_cast<size_t>(r_.units_->SelectionOf(layer));
  if (!selected_[selection]) r_.units_->Select(layer, attend.plan, attend.seqs);
  selected_[selection] = true;
  r_.units_->Resolve(layer, attend);
}

void Residency::Step::AfterAttend() {
  if (!merge_) return;
  r_.backend_.Join(Lane::kMain, Lane::kHost);
  r_.backend_.Enqueue(*merge_);
  merge_.reset();
}

bool Residency::Step::WantsSelection() const {
  return primes_;
}

void Residency::Step::AfterObserve(int32_t layer, const std::optional<Selection>& selection,
                                   const std::optional<Retained>& retained) {
  if (retained) r_.kept_->Retain(layer, *retained, rows_.seqs, rows_.prefill, rows_.stage);
  const bool last = rows_.first_pos + rows_.n_rows == rows_.prompt_end;
  if (last && !retained && InPromptStage(layer) && !rows_.stage->parks()) {
    rows_.stage->CopyHome(layer);
  }
  if (primes_ && Staged(layer) && HasSelected(layer)) {
    r_.sets_->Prime(layer, r_.bank_.StageView(layer));
  }
  if (r_.sets_ != nullptr && selection) {
    r_.sets_->Select(*selection, rows_.seqs, primes_);
    selected_[static_cast<size_t>(selection->number)] = true;
  }
  if (Staged(layer) && r_.bank_.StagesAhead() == 0) {
    r_.backend_.Join(Lane::kIn, Lane::kMain);
    r_.backend_.Join(Lane::kIn, Lane::kOut);
    r_.StageNext(layer, rows_.seq, rows_.first_pos);
  }
  // The next step begins with what this one can already send.
  if (Staged(layer) && r_.streams_ && r_.NextOnHost(layer + 1) < 0) {
    r_.StageFirst(rows_.seq, rows_.first_pos + rows_.n_rows);
  }
}

void Residency::Step::AfterLayers() {
  if (r_.units_ != nullptr && !rows_.prefill) r_.units_->last().EndStep();
  if (r_.sets_ != nullptr && !rows_.prefill) r_.sets_->WriteBack(rows_.seqs, selected_);
}

void Residency::Step::EndStep() {
  if (r_.bank_.HasHostLayers()) r_.backend_.Join(Lane::kMain, Lane::kOut);
  if (r_.sets_ != nullptr && r_.sets_->FetchesAhead()) r_.backend_.Join(Lane::kMain, Lane::kIn);
  r_.streamed_bytes_ = rows_.prefill ? 0 : r_.bank_.BytesStaged() - staged_before_;
  r_.decodes_ = false;
}

void Residency::Begin(int32_t q, int32_t seq, const Residency* from, int32_t from_q) {
  if (values_ != nullptr) values_->Begin(q, seq);
  if (last_ != nullptr) last_->Begin(q, seq);
  if (LastRows* last = LastOfSteps(); last != nullptr) last->Begin(q, seq);
  if (kept_ != nullptr) {
    kept_->Begin(q, seq, from != nullptr ? from->kept_.get() : nullptr, from_q);
  }
}

Status Residency::Append(int32_t q, int32_t seq, int64_t n, bool prefill, bool chooses) {
  if (last_ != nullptr) last_->Fill(q, seq);
  if (LastRows* last = LastOfSteps(); last != nullptr) {
    prefill ? last->Forget(q) : last->Fill(q, seq);
  }
  if (kept_ != nullptr) return kept_->Append(q, seq, n, prefill, chooses);
  return bank_.Append(seq, n);
}

Status Residency::AppendWhole(int32_t seq, int64_t n, std::span<const int64_t> rows) {
  return kept_ != nullptr ? kept_->AppendWhole(seq, n, rows) : bank_.AppendWhole(seq, n, {});
}

void Residency::Truncate(int32_t q, int32_t seq, int64_t length) {
  if (kept_ != nullptr) return kept_->Truncate(q, seq, length);
  bank_.Truncate(seq, length);
}

void Residency::Reset(int32_t seq) {
  if (last_ != nullptr) last_->Forget(seq);
  if (LastRows* last = LastOfSteps(); last != nullptr) last->Forget(seq);
  if (sets_ != nullptr) sets_->Reset(seq);
  if (units_ != nullptr) units_->Reset(seq);
  if (candidates_ != nullptr) candidates_->Reset(seq);
  streamed_bytes_ = 0;
}

std::optional<SlotCounters> Residency::Count(int32_t q) const {
  if (units_ != nullptr) return units_->Count(q);
  if (sets_ == nullptr) return {};
  return sets_->Count(q);
}

std::optional<SlotCounters> Residency::CountBytes(int32_t q) const {
  std::optional<SlotCounters> all = Count(q);
  if (candidates_ == nullptr) return all;
  if (!all) all.emplace();
  all->missed_bytes += candidates_->Count(q).missed_bytes;
  return all;
}

}  // namespace omnikv
