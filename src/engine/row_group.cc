#include "engine/row_group.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/check.h"
#include "engine/supported.h"

namespace omnikv {
namespace {

// Whether sequences of one engine can share steps.
Status CheckShared(const EngineCore& core) {
  for (const RopeConfig& rope : core.config.ropes) {
    if (rope.scaling == RopeScaling::kDynamic || rope.scaling == RopeScaling::kLongrope) {
      return Unsupported(
          fmt::format("{} rotates its keys by the length of each prompt, which sequences of a "
                      "batch would have to share",
                      core.config.name));
    }
  }
  return {};
}

Status CheckSize(const EngineCore& core, int32_t max_seqs) {
  if (max_seqs < 1 || max_seqs > kMaxBatch) {
    return InvalidArgument(
        fmt::format("a batch of {} sequences is asked for, expected 1 to {}", max_seqs, kMaxBatch));
  }
  if (max_seqs > 1) OKV_RETURN_IF_ERROR(CheckShared(core));
  const int32_t most = std::min(core.work.max_rows, core.work.max_out / 2);
  if (most < max_seqs) {
    return InvalidArgument(fmt::format(
        "a batch of {} sequences is asked for, but `prefill_chunk` and the open sessions allow "
        "steps of {} rows",
        max_seqs, most));
  }
  return {};
}

}  // namespace

Result<std::unique_ptr<RowGroup>> RowGroup::Open(EngineCore& core, const PolicyOptions& policy,
                                                 int32_t max_seqs) {
  OKV_RETURN_IF_ERROR(CheckSupported(core, policy, max_seqs));
  return OpenUnasked(core, policy, max_seqs);
}

Result<std::unique_ptr<RowGroup>> RowGroup::OpenUnasked(EngineCore& core,
                                                        const PolicyOptions& policy,
                                                        int32_t max_seqs) {
  OKV_RETURN_IF_ERROR(CheckSize(core, max_seqs));
  std::unique_ptr<RowGroup> group(new RowGroup(core));
  group->id_ = core.next_group++;
  OKV_ASSIGN_OR_RETURN(group->ropes_, RopeState::Create(*core.backend, core.config));
  OKV_ASSIGN_OR_RETURN(group->policy_, PreparePolicy(core, policy, group->ropes_, max_seqs));
  const DeclaredReads reads = group->policy().Reads();
  const auto least = static_cast<int32_t>(reads.max_tokens);
  OKV_ASSIGN_OR_RETURN(group->residency_,
                       Residency::Create(*core.backend, *core.bank,
                                         {.reads = ReadsByLayer(core.config, reads),
                                          .n_slots = std::max(least, core.plan.working_set),
                                          .n_seqs = max_seqs},
                                         group->policy().Kept(), core.work.max_rows));
  core.set_bytes += group->residency().Bytes();
  if (max_seqs > 1 && !group->residency().CanRecord()) {
    return Unsupported(fmt::format(
        "policy {} passes layers through the card one after another, and cannot serve a batch of "
        "{} sequences",
        group->policy_name(), max_seqs));
  }
  group->slots_.resize(static_cast<size_t>(max_seqs));
  return group;
}

RowGroup::~RowGroup() {
  core_.mixed_steps.Forget(id_);
  for (const Slot& slot : slots_) {
    if (slot.seq >= 0) core_.bank->Free(slot.seq);
  }
  if (policy_.policy != nullptr) core_.policy_bytes -= policy().Bytes();
  if (residency_ != nullptr) core_.set_bytes -= residency().Bytes();
}

const RowGroup::Slot& RowGroup::At(int32_t slot) const {
  OKV_CHECK(slot >= 0 && slot < max_seqs() && slots_[static_cast<size_t>(slot)].seq >= 0,
            "slot {} of {}", slot, max_seqs());
  return slots_[static_cast<size_t>(slot)];
}

template <typename NewSequence>
Result<int32_t> RowGroup::Take(const NewSequence& new_sequence) {
  const auto free =
      std::find_if(slots_.begin(), slots_.end(), [](const Slot& s) { return s.seq < 0; });
  if (free == slots_.end()) {
    return ResourceExhausted(fmt::format("all {} sequences of the batch are taken", max_seqs()));
  }
  OKV_ASSIGN_OR_RETURN(free->seq, new_sequence());
  free->prompt_length = 0;
  const auto slot = static_cast<int32_t>(free - slots_.begin());
  residency().Begin(slot, free->seq);
  return slot;
}

Result<int32_t> RowGroup::Join() {
  return Take([&] { return core_.bank->NewSequence(); });
}

Result<int32_t> RowGroup::JoinFork(const RowGroup& from) {
  OKV_CHECK(max_seqs() == 1 && from.max_seqs() == 1);
  OKV_ASSIGN_OR_RETURN(const int32_t slot, Take([&] { return core_.bank->Fork(from.seq(0)); }));
  set_prompt_length(slot, from.prompt_length(0));
  residency().Begin(slot, seq(slot), &from.residency(), 0);
  policy().CopyState(from.policy());
  return slot;
}

Result<int32_t> RowGroup::JoinPrefix(const RowGroup& from, int64_t length) {
  OKV_CHECK(max_seqs() == 1 && from.max_seqs() == 1 && from.least_length(0) == 0);
  Bank& bank = *core_.bank;
  OKV_ASSIGN_OR_RETURN(const int32_t slot, Take([&] { return bank.Fork(from.seq(0)); }));
  bank.Lose(seq(slot), 0, Bank::LoseRows::kNone);  // as `from` would in its next step
  CutTo(slot, length);
  return slot;
}

void RowGroup::Leave(int32_t slot) {
  core_.bank->Free(At(slot).seq);
  residency().Reset(slot);  // for the next sequence in it
  slots_[static_cast<size_t>(slot)].seq = -1;
}

bool RowGroup::ChoosesAfter(int32_t slot, int64_t position, int64_t prompt_end) const {
  return position == prompt_end && residency().ChoosesAfterPrompt(slot);
}

Status RowGroup::Append(int32_t slot, int64_t n) {
  return residency().Append(slot, seq(slot), n, /*prefill=*/false);
}

Status RowGroup::AppendPrompt(int32_t slot, int64_t n, int64_t prompt_end) {
  return residency().Append(slot, seq(slot), n, /*prefill=*/true,
                            ChoosesAfter(slot, length(slot) + n, prompt_end));
}

bool RowGroup::PassesByLayer(int32_t slot) const {
  const bool planned = core_.plan.by_layer && residency().AwaitsChoice(slot);
  return length(slot) == 0 && (planned || core_.all_by_layer);
}

void RowGroup::EndPromptRows(int32_t slot, int64_t prompt_end) {
  set_prompt_length(slot, length(slot));
  Drop(slot, length(slot));
  if (length(slot) < prompt_end) return;
  residency().EndPrompt(slot, seq(slot), ChoosesAfter(slot, length(slot), prompt_end));
}

void RowGroup::Forget(int32_t slot, int64_t length) {
  residency().Truncate(slot, seq(slot), length);
}

int64_t RowGroup::WarmRows(int32_t slot) const {
  const int64_t last = residency().AwaitsChoice(slot) ? policy().LastRows() : 1;
  return std::max(policy().WarmRows(), last);
}

int32_t RowGroup::ChunkRows(int64_t left, int32_t most) const {
  const int64_t last = std::min<int64_t>({left, policy().LastRows(), most});
  return static_cast<int32_t>(
      left <= most ? left : std::min<int64_t>(most, std::max<int64_t>(1, left - last)));
}

void RowGroup::CutTo(int32_t slot, int64_t length) {
  Forget(slot, length);
  residency().Reset(slot);
  set_prompt_length(slot, length);
}

}  // namespace omnikv
