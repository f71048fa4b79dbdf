#include "engine/swapped_member.h"

#include "base/check.h"

namespace omnikv {

Result<SwappedMember> SwappedMember::Of(EngineCore& core, const RowGroup& rows, int32_t member,
                                        const std::string& folder) {
  core.backend->Synchronize();
  OKV_ASSIGN_OR_RETURN(Scratch scratch, Scratch::Create(folder));
  SwappedMember swapped(std::move(scratch));
  const int32_t seq = rows.seq(member);
  swapped.image_ = core.bank->Image(seq);
  swapped.prompt_length_ = rows.prompt_length(member);
  swapped.prompted_ = !rows.residency().AwaitsChoice(member);
  swapped.state_ = rows.policy().SaveState(member, swapped.length());
  core.bank->Export(seq, rows.AllStates(),
                    [&](const void* data, size_t bytes) { swapped.rows_.Append(data, bytes); });
  OKV_RETURN_IF_ERROR(core.backend->TakeFailure());
  OKV_RETURN_IF_ERROR(swapped.rows_.status());
  return swapped;
}

Result<int32_t> SwappedMember::Resume(EngineCore& core, RowGroup& rows) const {
  OKV_ASSIGN_OR_RETURN(const int32_t member, rows.Join());
  size_t at = 0;
  const Status there = core.bank->Import(rows.seq(member), image_, rows.AllStates(), rows_.size(),
                                         [&](void* to, size_t bytes) {
                                           const Status read = rows_.Read(at, bytes, to);
                                           at += bytes;
                                           return read;
                                         });
  if (!there.ok()) {
    rows.Leave(member);
    return there;
  }
  OKV_CHECK(rows.policy().LoadState(member, length(), state_), "{} bytes of state of policy {}",
            state_.size(), rows.policy_name());
  rows.set_prompt_length(member, prompt_length_);
  rows.residency().Resume(member, rows.seq(member), prompted_);
  return member;
}

}  // namespace omnikv
