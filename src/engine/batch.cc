#include "engine/batch.h"

#include <algorithm>

namespace omnikv {

Result<std::unique_ptr<Batch>> Batch::Open(EngineCore& core, const PolicyOptions& policy,
                                           int32_t max_seqs) {
  std::unique_ptr<Batch> batch(new Batch(core));
  OKV_ASSIGN_OR_RETURN(batch->group_, RowGroup::Open(core, policy, max_seqs));
  batch->logits_.assign(static_cast<size_t>(max_seqs),
                        std::vector<float>(static_cast<size_t>(core.config.vocab)));
  return batch;
}

Result<int32_t> Batch::Taken(int32_t member, const Status& status) {
  if (status.ok()) return member;
  Leave(member);
  return status;
}

Result<int32_t> Batch::Join(const std::vector<int32_t>& prompt) {
  OKV_RETURN_IF_ERROR(CheckTokens(core_, prompt));
  OKV_ASSIGN_OR_RETURN(const int32_t member, group_->Join());
  return Taken(member, Prefill(member, prompt));
}

Result<int32_t> Batch::JoinMadeUp(int64_t tokens) {
  OKV_ASSIGN_OR_RETURN(const int32_t member, group_->Join());
  return Taken(member, FillWithNoise(member, tokens));
}

Status Batch::FillWithNoise(int32_t member, int64_t tokens) {
  OKV_RETURN_IF_ERROR(stepper_.MadeUpChunks(*group_, member, tokens));
  return group_->policy().AfterPrefill(tokens);
}

Status Batch::Prefill(int32_t member, const std::vector<int32_t>& prompt) {
  const auto total = static_cast<int64_t>(prompt.size());
  OKV_ASSIGN_OR_RETURN(PromptSteps steps, PromptSteps::Begin(stepper_, *group_, member, prompt,
                                                             /*all_logits=*/false));
  while (!steps.done()) OKV_RETURN_IF_ERROR(steps.Advance());
  OKV_RETURN_IF_ERROR(stepper_.Logits(0, total, logits_[static_cast<size_t>(member)].data()));
  return group_->policy().AfterPrefill(total);
}

std::vector<DecodeRow> Batch::RowsOf(std::span<const Next> next) const {
  std::vector<DecodeRow> rows;
  for (const Next& row : next) rows.push_back({group_.get(), row.member, row.token});
  return rows;
}

Status Batch::Step(std::span<const Next> next) {
  std::vector<float*> logits;
  for (const Next& row : next) logits.push_back(logits_[static_cast<size_t>(row.member)].data());
  return stepper_.Step(RowsOf(next), logits);
}

Result<std::vector<std::vector<int32_t>>> Batch::Generate(std::span<const Next> next,
                                                          int64_t steps) {
  std::vector<std::vector<int32_t>> tokens(next.size());
  if (steps < 1) return tokens;
  std::vector<Sampler*> samplers;
  for (const Next& row : next) samplers.push_back(row.sampler);
  StepsAhead ahead(stepper_, RowsOf(next), std::move(samplers));
  Status status;
  for (int64_t left = steps; left > 0 && status.ok(); --left) {
    const auto read = ahead.Read(left);
    status = read.status();
    for (size_t r = 0; r < next.size() && status.ok(); ++r) tokens[r].push_back((*read)[r].token);
  }
  ahead.End();
  for (size_t r = 0; r < next.size() && status.ok(); ++r) {
    const int32_t member = next[r].member;
    status = stepper_.Logits(ahead.logits_row() + static_cast<int32_t>(r), length(member),
                             logits_[static_cast<size_t>(member)].data());
  }
  if (status.ok()) return tokens;
  core_.backend->Synchronize();
  for (const Next& row : next) {
    group_->Forget(row.member,
                   std::max(length(row.member) - ahead.reads(), group_->least_length(row.member)));
  }
  return status;
}

double Batch::attended_tokens(int32_t member) const {
  return AttendedTokens(core_.config, group_->policy(), member, group_->lengths(member));
}

}  // namespace omnikv
