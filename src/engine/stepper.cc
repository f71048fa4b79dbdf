#include "engine/stepper.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/check.h"

namespace omnikv {

void Stepper::Upload(int32_t n_out) {
  const auto upload = [&](const Buffer& to, const auto& from) {
    core_.backend->Upload(to.as(), from.data(), from.size() * sizeof(from[0]));
  };
  out_rows_.resize(static_cast<size_t>(n_out));
  std::iota(out_rows_.begin(), out_rows_.end(), static_cast<int32_t>(tokens_.size()) - n_out);
  upload(core_.work.tokens, tokens_);
  upload(core_.work.rows, rows_);
  upload(core_.work.seqs, seqs_);
  upload(core_.work.out_rows, out_rows_);
}

void Stepper::Enqueue(RowGroup& group, int32_t slot, const StepShape& shape, StepEnd end) {
  EnqueueStep({.backend = *core_.backend,
               .config = core_.config,
               .weights = core_.weights,
               .work = core_.work,
               .ropes = group.ropes_,
               .residency = group.residency(),
               .policy = group.policy(),
               .seq = group.seq(slot),
               .n_seqs = group.max_seqs(),
               .on_selection = core_.on_selection},
              shape);
  if (end == StepEnd::kLogits) return;
  const bool draws = end == StepEnd::kSample;
  core_.backend->Enqueue(NextTokenArgs{
      .logits = core_.work.logits.as<float>() + int64_t{shape.logits_row} * core_.config.vocab,
      .tokens = core_.work.tokens.as<int32_t>(),
      .rows = core_.work.rows.as<RowMeta>(),
      .seqs = core_.work.seqs.as<SeqMeta>(),
      .sample = draws ? group.samples_.as<SampleMeta>() : nullptr,
      .seen = draws ? group.seen_.as<uint32_t>() : nullptr,
      .out = group.chosen_.as<int32_t>(),
      .step = group.step_count_.as<uint32_t>(),
      .vocab = core_.config.vocab,
      .ring = StepsAhead::kMost,
      .n_rows = shape.n_rows});
}

Status Stepper::Chunk(RowGroup& group, int32_t slot, std::span<const int32_t> tokens,
                      int64_t prompt_end, int32_t n_out) {
  const int64_t pos = group.length(slot);
  const auto n = static_cast<int32_t>(tokens.size());
  OKV_RETURN_IF_ERROR(core_.bank->Append(group.seq(slot), n));
  tokens_.assign(tokens.begin(), tokens.end());
  rows_.clear();
  for (int32_t r = 0; r < n; ++r) {
    rows_.push_back({.seq = slot, .pos = static_cast<int32_t>(pos) + r});
  }
  seqs_.assign(static_cast<size_t>(group.max_seqs()), SeqMeta{});
  seqs_[static_cast<size_t>(slot)] = {.q_begin = 0,
                                      .q_len = n,
                                      .kv_len = static_cast<int32_t>(pos) + n,
                                      .table_off = core_.bank->TableOffset(group.seq(slot)),
                                      .prompt_len = static_cast<int32_t>(prompt_end)};
  Upload(n_out);
  Enqueue(
      group, slot,
      {.n_rows = n, .n_out = n_out, .prefill = true, .first_pos = pos, .prompt_end = prompt_end},
      StepEnd::kLogits);
  const Status failure = core_.backend->TakeFailure();
  if (!failure.ok()) {
    core_.backend->Synchronize();
    group.CutTo(slot, pos);
    return failure;
  }
  group.set_prompt_length(slot, pos + n);
  return {};
}

Status Stepper::MadeUpChunks(RowGroup& group, int32_t slot, int64_t tokens) {
  for (int64_t at = 0; at < tokens;) {
    const int64_t chunk = std::min<int64_t>(core_.work.max_rows, tokens - at);
    OKV_RETURN_IF_ERROR(core_.bank->Append(group.seq(slot), chunk));
    at += chunk;
    group.Drop(slot, at);
  }
  core_.bank->FillWithNoise(group.seq(slot));
  group.set_prompt_length(slot, tokens);
  return {};
}

Status Stepper::Check(std::span<const NextToken> next) const {
  if (next.empty()) return InvalidArgument("a step has no sequence, expected at least one");
  for (const NextToken& row : next) OKV_RETURN_IF_ERROR(CheckTokens(core_, {&row.token, 1}));
  return {};
}

Status Stepper::Append(RowGroup& group, std::span<const NextToken> next) {
  for (size_t i = 0; i < next.size(); ++i) {
    const Status room = core_.bank->Append(group.seq(next[i].slot), 1);
    if (!room.ok()) return GiveUp(group, next.first(i), room);
  }
  return {};
}

Status Stepper::GiveUp(RowGroup& group, std::span<const NextToken> next, const Status& failure) {
  if (!next.empty()) core_.backend->Synchronize();
  for (const NextToken& row : next) {
    core_.bank->Truncate(group.seq(row.slot), group.length(row.slot) - 1);
  }
  return failure;
}

void Stepper::UploadDecode(const RowGroup& group, std::span<const NextToken> next) {
  tokens_.clear();
  rows_.clear();
  seqs_.assign(static_cast<size_t>(group.max_seqs()), SeqMeta{});
  for (const auto& [slot, token] : next) {
    SeqMeta& seq = seqs_[static_cast<size_t>(slot)];
    OKV_CHECK(seq.q_len == 0, "slot {} is named twice", slot);
    const auto length = static_cast<int32_t>(group.length(slot));
    seq = {.q_begin = static_cast<int32_t>(rows_.size()),
           .q_len = 1,
           .kv_len = length,
           .table_off = core_.bank->TableOffset(group.seq(slot)),
           .prompt_len = static_cast<int32_t>(group.prompt_length(slot))};
    tokens_.push_back(token);
    rows_.push_back({.seq = slot, .pos = length - 1});
  }
  Upload(static_cast<int32_t>(next.size()));
}

Status Stepper::EnqueueDecode(RowGroup& group, std::span<const NextToken> next, int32_t logits_row,
                              StepEnd end) {
  const auto n_rows = static_cast<int32_t>(next.size());
  StepShape shape{.n_rows = n_rows, .n_out = n_rows, .logits_row = logits_row};
  for (const NextToken& row : next) {
    shape.variant = std::max(shape.variant, group.policy().Variant(group.lengths(row.slot)));
  }
  const int32_t first = next.front().slot;
  Backend& backend = *core_.backend;
  if (!group.residency().CanRecord()) {
    shape.first_pos = group.length(first) - 1;
    Enqueue(group, first, shape, end);
    return backend.TakeFailure();
  }
  std::unique_ptr<Recording>& step = group.steps_[{shape.variant, n_rows, logits_row, end}];
  if (step == nullptr) {
    step = backend.Record([&] { Enqueue(group, first, shape, end); });
    if (const Status failure = backend.TakeFailure(); !failure.ok()) {
      step.reset();
      return failure;
    }
  }
  backend.Replay(*step);
  return backend.TakeFailure();
}

Status Stepper::Logits(int32_t row, int64_t length, float* to) const {
  const auto vocab = static_cast<size_t>(core_.config.vocab);
  core_.backend->Download(to, core_.work.logits.as<float>() + static_cast<size_t>(row) * vocab,
                          vocab * sizeof(float));
  return CheckLogits(core_, to, length);
}

Status Stepper::Step(RowGroup& group, std::span<const NextToken> next,
                     std::span<float* const> logits) {
  OKV_RETURN_IF_ERROR(Check(next));
  OKV_RETURN_IF_ERROR(Append(group, next));
  UploadDecode(group, next);
  Status status = EnqueueDecode(group, next, 0, StepEnd::kLogits);
  for (size_t r = 0; r < next.size() && status.ok(); ++r) {
    status = Logits(static_cast<int32_t>(r), group.length(next[r].slot), logits[r]);
  }
  if (!status.ok()) return GiveUp(group, next, status);
  for (const NextToken& row : next) group.Drop(row.slot, group.length(row.slot));
  return {};
}

StepsAhead::StepsAhead(Stepper& stepper, RowGroup& group, std::span<const NextToken> next,
                       std::vector<Sampler*> samplers)
    : stepper_(stepper),
      group_(group),
      next_(next.begin(), next.end()),
      samplers_(std::move(samplers)) {
  OKV_CHECK(samplers_.size() == next_.size());
  const bool draws = std::any_of(samplers_.begin(), samplers_.end(), [](const Sampler* sampler) {
    return sampler != nullptr && !sampler->IsArgmax();
  });
  end_ = draws ? StepEnd::kSample : StepEnd::kArgmax;
}

Status StepsAhead::Prepare() {
  Backend& backend = *stepper_.core_.backend;
  const auto rows = static_cast<size_t>(group_.max_seqs());
  const auto words = static_cast<size_t>(SeenWords(stepper_.core_.config.vocab));
  const auto take = [&](Buffer& buffer, size_t bytes) -> Status {
    if (buffer.size() != 0) return {};
    OKV_ASSIGN_OR_RETURN(buffer, backend.Allocate(bytes, "chosen tokens"));
    return {};
  };
  OKV_RETURN_IF_ERROR(take(group_.step_count_, 4));
  if (group_.chosen_.size() == 0) {
    OKV_ASSIGN_OR_RETURN(group_.chosen_, backend.AllocateShared(4 * kMost * rows, "chosen tokens"));
  }
  stepper_.UploadDecode(group_, next_);
  backend.Upload(group_.step_count_.as(), &launched_, sizeof(launched_));
  if (end_ != StepEnd::kSample) return {};
  OKV_RETURN_IF_ERROR(take(group_.samples_, rows * sizeof(SampleMeta)));
  OKV_RETURN_IF_ERROR(take(group_.seen_, rows * words * sizeof(uint32_t)));
  // This also forgets what steps that nobody read have drawn.
  for (size_t r = 0; r < samplers_.size(); ++r) {
    const Sampler* sampler = samplers_[r];
    const SampleMeta meta = sampler != nullptr ? sampler->meta() : SampleMeta{};
    backend.Upload(group_.samples_.as<SampleMeta>() + r, &meta, sizeof(meta));
    if (sampler == nullptr) continue;
    backend.Upload(group_.seen_.as<uint32_t>() + r * words, sampler->seen().data(),
                   words * sizeof(uint32_t));
  }
  return {};
}

Status StepsAhead::Launch() {
  OKV_RETURN_IF_ERROR(stepper_.Append(group_, next_));
  const Status prepared = launched_ == read_ ? Prepare() : Status();
  if (!prepared.ok()) return stepper_.GiveUp(group_, next_, prepared);
  const Status enqueued = stepper_.EnqueueDecode(group_, next_, RowsOf(launched_), end_);
  if (!enqueued.ok()) return stepper_.GiveUp(group_, next_, enqueued);
  marks_[launched_ % kMost] = stepper_.core_.backend->SetMark();
  ++launched_;
  ++launches_;
  return {};
}

Result<std::span<const NextToken>> StepsAhead::Read(int64_t wanted) {
  while (launched_ - read_ < std::min<int64_t>(kMost, wanted)) {
    // What cannot be had ahead of time may not be needed.
    const Status launched = Launch();
    if (!launched.ok() && launched_ > read_) break;
    OKV_RETURN_IF_ERROR(launched);
  }
  stepper_.core_.backend->Await(marks_[read_ % kMost]);
  const int32_t* chosen = group_.chosen_.as<int32_t>() + RowsOf(read_);
  const auto unread = static_cast<int64_t>(launched_ - read_) - 1;  // after this one
  for (size_t r = 0; r < next_.size(); ++r) {
    if (chosen[r] >= 0) continue;
    return LogitsNotFinite(stepper_.core_, group_.length(next_[r].slot) - unread);
  }
  ++read_;
  for (size_t r = 0; r < next_.size(); ++r) {
    group_.Drop(next_[r].slot, group_.length(next_[r].slot) - unread);
    next_[r].token = chosen[r];
    if (samplers_[r] != nullptr) samplers_[r]->Take(chosen[r]);
  }
  return std::span<const NextToken>(next_);
}

void StepsAhead::End() {
  const auto unread = static_cast<int64_t>(launched_ - read_);
  for (const NextToken& row : next_) {
    stepper_.core_.bank->Truncate(group_.seq(row.slot), group_.length(row.slot) - unread);
  }
  launched_ = read_;
}

}  // namespace omnikv
