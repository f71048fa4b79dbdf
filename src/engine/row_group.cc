#include "engine/row_group.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "engine/compositions.h"
#include "engine/supported.h"

namespace omnikv {

bool OneRotation(const ModelConfig& config) {
  return std::none_of(config.ropes.begin(), config.ropes.end(), [](const RopeConfig& rope) {
    return rope.scaling == RopeScaling::kDynamic || rope.scaling == RopeScaling::kLongrope;
  });
}

namespace {

// Whether sequences of one engine can share steps.
Status CheckShared(const EngineCore& core) {
  if (OneRotation(core.config)) return {};
  return Unsupported(
      fmt::format("{} rotates its keys by the length of each prompt, which sequences of a batch "
                  "would have to share",
                  core.config.name));
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
                                                 int32_t max_seqs, const PolicyInfo* own) {
  OKV_RETURN_IF_ERROR(CheckSupported(core, policy, max_seqs, own));
  return OpenUnasked(core, policy, max_seqs, own);
}

Result<std::unique_ptr<RowGroup>> RowGroup::OpenUnasked(EngineCore& core,
                                                        const PolicyOptions& policy,
                                                        int32_t max_seqs, const PolicyInfo* own) {
  OKV_RETURN_IF_ERROR(CheckSize(core, max_seqs));
  std::unique_ptr<RowGroup> group(new RowGroup(core));
  group->id_ = core.next_group++;
  OKV_ASSIGN_OR_RETURN(group->ropes_, RopeState::Create(*core.backend, core.config));
  OKV_ASSIGN_OR_RETURN(group->policy_, PreparePolicy(core, policy, group->ropes_, max_seqs, own));
  for (int32_t layer = 0; layer < GlobalLayers(core.config); ++layer) {
    group->reads_all_ = group->reads_all_ && !group->policy().Budgeted(layer);
  }
  DeclaredReads reads = group->policy().Reads();
  if (!reads.by_token && !core.plan.fetches_units) reads.n_selections = 0;  // no set holds one
  const auto least = static_cast<int32_t>(reads.LeastSlots());
  OKV_ASSIGN_OR_RETURN(group->residency_,
                       Residency::Create(*core.backend, *core.bank,
                                         {.reads = ReadsByLayer(core.config, reads),
                                          .n_slots = std::max(least, core.plan.working_set),
                                          .n_seqs = max_seqs},
                                         AwayOf(core.config, core.plan, reads, max_seqs),
                                         group->policy().Kept(), core.work.max_rows));
  core.set_bytes += group->residency().Bytes();
  if (max_seqs > 1 && !group->residency().CanRecord()) {
    OKV_RETURN_IF_ERROR(
        CheckUse(Use::kStreamedBatch, group->policy(), group->policy_name(), max_seqs));
  }
  group->members_.resize(static_cast<size_t>(max_seqs));
  return group;
}

RowGroup::~RowGroup() {
  core_.mixed_steps.Forget(id_);
  for (const Member& member : members_) {
    if (member.seq >= 0) core_.bank->Free(member.seq);
  }
  if (policy_.policy != nullptr) core_.policy_bytes -= policy().Bytes();
  if (residency_ != nullptr) core_.set_bytes -= residency().Bytes();
}

const RowGroup::Member& RowGroup::At(int32_t member) const {
  OKV_CHECK(member >= 0 && member < max_seqs() && members_[static_cast<size_t>(member)].seq >= 0,
            "member {} of {}", member, max_seqs());
  return members_[static_cast<size_t>(member)];
}

template <typename NewSequence>
Result<int32_t> RowGroup::Take(const NewSequence& new_sequence) {
  const auto free =
      std::find_if(members_.begin(), members_.end(), [](const Member& m) { return m.seq < 0; });
  if (free == members_.end()) {
    return ResourceExhausted(fmt::format("all {} sequences of the batch are taken", max_seqs()));
  }
  OKV_ASSIGN_OR_RETURN(free->seq, new_sequence());
  free->prompt_length = 0;
  const auto member = static_cast<int32_t>(free - members_.begin());
  residency().Begin(member, free->seq);
  policy().StartOver(member);
  return member;
}

Result<int32_t> RowGroup::Join() {
  return Take([&] { return core_.bank->NewSequence(); });
}

Result<int32_t> RowGroup::JoinFork(const RowGroup& from) {
  OKV_CHECK(max_seqs() == 1 && from.max_seqs() == 1);
  OKV_ASSIGN_OR_RETURN(const int32_t member, Take([&] { return core_.bank->Fork(from.seq(0)); }));
  set_prompt_length(member, from.prompt_length(0));
  residency().Begin(member, seq(member), &from.residency(), 0);
  policy().CopyState(from.policy());
  return member;
}

Result<int32_t> RowGroup::JoinPrefix(int32_t bank_seq, int64_t length) {
  Bank& bank = *core_.bank;
  OKV_CHECK(bank.LeastLength(bank_seq) == 0);
  OKV_ASSIGN_OR_RETURN(const int32_t member, Take([&] { return bank.Fork(bank_seq); }));
  for (size_t table = 0; table < bank.config().tables.size(); ++table) {
    // As the sequence would in its next step.
    bank.Lose(seq(member), static_cast<int32_t>(table), Bank::LoseRows::kNone);
  }
  CutTo(member, length);
  return member;
}

int32_t RowGroup::Detach(int32_t member) {
  residency().Reset(member);  // for the next sequence of that number
  return std::exchange(members_[static_cast<size_t>(member)].seq, -1);
}

StateStreams RowGroup::AllStates() const {
  StateStreams all = states();
  const StateStreams rows = residency().states();
  all.insert(all.end(), rows.begin(), rows.end());
  return all;
}

void RowGroup::Leave(int32_t member) {
  OKV_CHECK(At(member).seq >= 0);
  core_.bank->Free(Detach(member));
}

bool RowGroup::ChoosesAfter(int32_t member, int64_t position, int64_t prompt_end) const {
  return position == prompt_end && residency().ChoosesAfterPrompt(member) && !AwaitsPasses(member);
}

Status RowGroup::Append(int32_t member, int64_t n) {
  return residency().Append(member, seq(member), n, /*prefill=*/false);
}

Status RowGroup::AppendPrompt(int32_t member, int64_t n, int64_t prompt_end) {
  const int64_t end = length(member) + n;
  // After passes rows move, so they must be the sequence's own by then.
  const bool moves = end > prompt_end || ChoosesAfter(member, end, prompt_end);
  return residency().Append(member, seq(member), n, /*prefill=*/true, moves);
}

bool RowGroup::PassesByLayer(int32_t member) const {
  const bool planned = core_.plan.by_layer && residency().AwaitsChoice(member);
  const Keeps keeps = policy().Kept();
  const bool passes = keeps.passes && !core_.bank->config().Rows().heads_apart;
  const bool may =
      length(member) == 0 && keeps.chunk == 0 && !passes && policy().PromptStepRows() == 0;
  return may && (planned || core_.all_by_layer);
}

void RowGroup::EndPromptRows(int32_t member, int64_t prompt_end) {
  set_prompt_length(member, length(member));
  if (length(member) > prompt_end) {
    return DropPassTokens(core_, seq(member), prompt_end, length(member));
  }
  Drop(member, length(member));
  if (length(member) < prompt_end || AwaitsPasses(member)) return;
  residency().EndPrompt(member, seq(member), ChoosesAfter(member, length(member), prompt_end));
}

void RowGroup::Forget(int32_t member, int64_t length) {
  residency().Truncate(member, seq(member), length);
}

int64_t RowGroup::WarmRows(int32_t member) const {
  const int64_t last = residency().AwaitsChoice(member) ? policy().LastRows() : 1;
  return std::max(policy().WarmRows(), last);
}

int64_t RowGroup::PartEnd(int64_t position, int64_t total) const {
  const int64_t chunk = policy().Kept().chunk;
  return chunk > 0 ? std::min(total, (position / chunk + 1) * chunk) : total;
}

int32_t RowGroup::ChunkRows(int64_t left, int32_t most) const {
  if (const int32_t wanted = policy().PromptStepRows(); wanted > 0) most = std::min(most, wanted);
  const int64_t last = std::min<int64_t>({left, policy().LastRows(), most});
  return static_cast<int32_t>(
      left <= most ? left : std::min<int64_t>(most, std::max<int64_t>(1, left - last)));
}

void RowGroup::CutTo(int32_t member, int64_t length) {
  Forget(member, length);
  residency().Reset(member);
  set_prompt_length(member, length);
  if (length == 0) policy().StartOver(member);
}

}  // namespace omnikv
