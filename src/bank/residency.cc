#include "bank/residency.h"

#include <algorithm>
#include <utility>

namespace omnikv {

Result<std::unique_ptr<Residency>> Residency::Create(Backend& backend, Bank& bank,
                                                     WorkingSetConfig config) {
  const bool away = bank.HasHostLayers();
  const bool streams = away && config.reads.streamed.layers > 0;
  std::unique_ptr<Residency> residency(new Residency(backend, bank, streams));
  if (away && config.reads.n_selections > 0) {
    OKV_ASSIGN_OR_RETURN(residency->sets_, WorkingSets::Create(backend, bank, std::move(config)));
  }
  return residency;
}

int32_t Residency::NextOnHost(int32_t layer) const {
  for (; layer < bank_.n_layers(); ++layer) {
    if (bank_.OnHost(layer)) return layer;
  }
  return -1;
}

void Residency::StageFirst(int64_t n) {
  backend_.Join(Lane::kIn, Lane::kMain);
  backend_.Join(Lane::kIn, Lane::kOut);
  int32_t layer = NextOnHost(0);
  for (int32_t i = 0; i < bank_.StagesAhead() && layer >= 0; ++i) {
    bank_.StageIn(layer, step_.seq, n);
    layer = NextOnHost(layer + 1);
  }
}

void Residency::BeginStep(const ResidentStep& step) {
  step_ = step;
  staged_before_ = bank_.BytesStaged();
  if (bank_.HasHostLayers() && (step.prefill || streams_)) StageFirst(step.first_pos);
  if (sets_ != nullptr) sets_->BeginStep();
}

KvPlace Residency::BeforeAppend(int32_t layer) {
  if (!Staged(layer)) {
    return {.kv = bank_.View(layer), .slot = InSet(layer) ? sets_->OwnRow(layer) : KvSlot{}};
  }
  // What an earlier layer wrote to this stage has left it.
  backend_.Join(Lane::kMain, Lane::kOut);
  return {.kv = bank_.StageView(layer), .slot = {}};
}

void Residency::AfterAppend(int32_t layer) {
  if (!Staged(layer)) return;
  // The layer's past is on its way already; here that of a later one sets out, into the stage that
  // the layer before this has left.
  bank_.AwaitStage(layer);
  backend_.Join(Lane::kIn, Lane::kMain);
  backend_.Join(Lane::kOut, Lane::kMain);
  bank_.StageOut(layer, step_.seq, step_.first_pos, step_.first_pos + step_.n_rows);
  int32_t next = layer;
  for (int32_t i = 0; i < bank_.StagesAhead() && next >= 0; ++i) next = NextOnHost(next + 1);
  if (next >= 0) bank_.StageIn(next, step_.seq, step_.first_pos);
}

void Residency::BeforeAttend(int32_t layer, AttendArgs& attend) {
  if (InSet(layer)) sets_->Resolve(layer, attend);
}

bool Residency::WantsSelection() const {
  return sets_ != nullptr && step_.prefill &&
         step_.first_pos + step_.n_rows == step_.prompt_end;
}

void Residency::AfterObserve(int32_t layer, const std::optional<Selection>& selection) {
  const bool staged = Staged(layer);
  if (sets_ != nullptr) {
    if (staged && sets_->HasSelection(layer)) sets_->Prime(layer, bank_.StageView(layer));
    if (selection) sets_->Select(*selection, step_.seqs, /*primes=*/step_.prefill);
  }
  // The next step begins with what this one can already send.
  if (staged && streams_ && NextOnHost(layer + 1) < 0) {
    StageFirst(step_.first_pos + step_.n_rows);
  }
}

void Residency::AfterLayers() {
  if (sets_ != nullptr && !step_.prefill) sets_->WriteBack(step_.seqs);
}

void Residency::EndStep() {
  if (bank_.HasHostLayers()) backend_.Join(Lane::kMain, Lane::kOut);
  streamed_bytes_ = step_.prefill ? 0 : bank_.BytesStaged() - staged_before_;
}

void Residency::Reset() {
  if (sets_ != nullptr) sets_->Reset();
  streamed_bytes_ = 0;
}

std::optional<WorkingSets::Counters> Residency::Count() const {
  if (sets_ == nullptr) return {};
  return sets_->Count();
}

}  // namespace omnikv
