#include "engine/stepper.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "engine/compositions.h"

namespace omnikv {

std::span<const Stepper::Rows> Stepper::ByGroup(std::span<const DecodeRow> rows) {
  std::vector<Rows>& groups = by_group_;
  groups.clear();
  for (size_t r = 0; r < rows.size(); ++r) {
    if (groups.empty() || groups.back().group != rows[r].group) {
      const bool again = std::any_of(groups.begin(), groups.end(),
                                     [&](const Rows& g) { return g.group == rows[r].group; });
      OKV_CHECK(!again, "the rows of a group stand apart");
      groups.push_back({rows[r].group, rows.subspan(r, 0)});
    }
    groups.back().rows = {groups.back().rows.data(), groups.back().rows.size() + 1};
  }
  return groups;
}

Status Stepper::Check(std::span<const DecodeRow> rows, const PromptChunk* chunk) const {
  if (rows.empty() && chunk == nullptr) {
    return InvalidArgument("a step has no sequence, expected at least one");
  }
  for (const DecodeRow& row : rows) {
    OKV_RETURN_IF_ERROR(CheckTokens(core_, {&row.token, 1}));
    if (row.group->residency().CanRecord() || (rows.size() == 1 && chunk == nullptr)) continue;
    OKV_RETURN_IF_ERROR(
        CheckUse(Use::kStreamedStep, row.group->policy(), row.group->policy_name()));
  }
  const auto n_rows = static_cast<int32_t>(rows.size() + (chunk ? chunk->tokens.size() : 0));
  const auto n_out = static_cast<int32_t>(rows.size()) + (chunk ? chunk->n_out : 0);
  if (static_cast<int32_t>(rows.size()) <= kMaxBatch && n_rows <= core_.work.max_rows &&
      n_out <= core_.work.max_out) {
    return {};
  }
  return InvalidArgument(
      fmt::format("a step of {} sequences and {} rows, {} with logits, is asked for, expected at "
                  "most {}, {} and {}",
                  rows.size(), n_rows, n_out, kMaxBatch, core_.work.max_rows, core_.work.max_out));
}

Status Stepper::Append(std::span<const DecodeRow> rows) {
  for (size_t i = 0; i < rows.size(); ++i) {
    const Status room = rows[i].group->Append(rows[i].member, 1);
    if (room.ok()) continue;
    TakeBack(rows.first(i));
    return room;
  }
  return {};
}

void Stepper::TakeBack(std::span<const DecodeRow> rows) {
  if (!rows.empty()) core_.backend->Synchronize();
  for (const auto& [group, member, token] : rows) group->Forget(member, group->length(member) - 1);
}

Status Stepper::GiveUp(std::span<const DecodeRow> rows, const Status& failure) {
  TakeBack(rows);
  ForgetSlots(rows);
  return failure;
}

void Stepper::ForgetSlots(std::span<const DecodeRow> rows) {
  for (const auto& [group, member, token] : rows) group->residency().Reset(member);
}

int64_t Stepper::FirstPos(const PromptChunk& chunk) {
  if (chunk.one_layer) return chunk.first_pos;
  return chunk.group->length(chunk.member) - static_cast<int64_t>(chunk.tokens.size());
}

void Stepper::AddSeqs(const RowGroup& group) {
  seqs_.resize(seqs_.size() + static_cast<size_t>(group.max_seqs()));
}

void Stepper::AddRow(int32_t member, int64_t pos, int32_t token, size_t first_seq) {
  tokens_.push_back(token);
  group_rows_.push_back({.seq = member, .pos = static_cast<int32_t>(pos)});
  rows_.push_back(
      {.seq = static_cast<int32_t>(first_seq) + member, .pos = static_cast<int32_t>(pos)});
}

void Stepper::Upload(std::span<const DecodeRow> rows, const PromptChunk* chunk) {
  tokens_.clear();
  rows_.clear();
  group_rows_.clear();
  seqs_.clear();
  out_rows_.clear();
  const auto add_seq = [&](const RowGroup& group, int32_t member, size_t first_seq, int32_t begin,
                           int32_t n, int64_t length, int64_t prompt_length) {
    SeqMeta& seq = seqs_[first_seq + static_cast<size_t>(member)];
    OKV_CHECK(seq.q_len == 0, "member {} is named twice", member);
    seq = {.q_begin = begin,
           .q_len = n,
           .kv_len = static_cast<int32_t>(length),
           .table_off = core_.bank->TableOffset(group.seq(member)),
           .prompt_len = static_cast<int32_t>(prompt_length)};
  };
  const std::span<const Rows> groups = ByGroup(rows);
  for (const Rows& of : groups) {
    const size_t first_seq = seqs_.size();
    AddSeqs(*of.group);
    int32_t begin = 0;
    for (const auto& [group, member, token] : of.rows) {
      add_seq(*group, member, first_seq, begin++, 1, group->length(member),
              group->prompt_length(member));
      out_rows_.push_back(static_cast<int32_t>(tokens_.size()));
      AddRow(member, group->length(member) - 1, token, first_seq);
    }
  }
  if (chunk != nullptr) {
    const size_t first_seq = seqs_.size();
    AddSeqs(*chunk->group);
    const auto n = static_cast<int32_t>(chunk->tokens.size());
    int64_t pos = FirstPos(*chunk);
    add_seq(*chunk->group, chunk->member, first_seq, 0, n, pos + n, chunk->prompt_end);
    for (const int32_t token : chunk->tokens) AddRow(chunk->member, pos++, token, first_seq);
    for (int32_t r = n - chunk->n_out; r < n; ++r) out_rows_.push_back(r);
  }
  OKV_CHECK(seqs_.size() <= static_cast<size_t>(core_.work.max_rows));
  const auto upload = [&](const Buffer& to, const auto& from) {
    core_.backend->Upload(to.as(), from.data(), from.size() * sizeof(from[0]));
  };
  upload(core_.work.tokens, tokens_);
  upload(core_.work.rows, rows_);
  if (groups.size() + (chunk != nullptr) > 1) upload(core_.work.group_rows, group_rows_);
  upload(core_.work.seqs, seqs_);
  upload(core_.work.out_rows, out_rows_);
}

void Stepper::Enqueue(int32_t logits_row, StepEnd end) {
  const Workspace& work = core_.work;
  EnqueueStep({.backend = *core_.backend,
               .config = core_.config,
               .weights = core_.weights,
               .work = work,
               .shared_products = core_.options.shared_products,
               .watch = watch_},
              groups_, logits_row);
  if (end == StepEnd::kLogits) return;
  int32_t n_rows = 0;
  for (const StepGroup& group : groups_) n_rows += group.prefill ? 0 : group.n_rows;
  const ChoiceBuffers& choices = core_.choices;
  const bool draws = end == StepEnd::kSample;
  core_.backend->Enqueue(
      NextTokenArgs{.logits = work.logits.as<float>() + int64_t{logits_row} * core_.config.vocab,
                    .tokens = work.tokens.as<int32_t>(),
                    .rows = work.rows.as<RowMeta>(),
                    .group_rows = groups_.size() > 1 ? work.group_rows.as<RowMeta>() : nullptr,
                    .seqs = work.seqs.as<SeqMeta>(),
                    .sample = draws ? choices.samples.as<SampleMeta>() : nullptr,
                    .seen = draws ? choices.seen.as<uint32_t>() : nullptr,
                    .out = choices.chosen.as<int32_t>(),
                    .step = choices.count.as<uint32_t>(),
                    .vocab = core_.config.vocab,
                    .ring = StepsAhead::kMost,
                    .n_rows = n_rows});
}

void Stepper::SetGroups(std::span<const DecodeRow> rows) {
  groups_.clear();
  for (const Rows& of : ByGroup(rows)) {
    RowGroup& group = *of.group;
    const auto n_rows = static_cast<int32_t>(of.rows.size());
    int32_t variant = 0;
    for (const DecodeRow& row : of.rows) {
      variant |= group.policy().Variant(group.lengths(row.member));
    }
    groups_.push_back({.policy = group.policy(),
                       .residency = group.residency(),
                       .ropes = group.ropes_,
                       .n_rows = n_rows,
                       .n_out = n_rows,
                       .n_seqs = group.max_seqs(),
                       .seq = group.seq(of.rows.front().member),
                       .first_pos = group.length(of.rows.front().member) - 1,
                       .variant = variant});
  }
}

StepEnd Stepper::EndOf(std::span<Sampler* const> samplers) {
  const bool draws = std::any_of(samplers.begin(), samplers.end(), [](const Sampler* sampler) {
    return sampler != nullptr && !sampler->IsArgmax();
  });
  return draws ? StepEnd::kSample : StepEnd::kArgmax;
}

Status Stepper::PrepareDraws(std::span<Sampler* const> samplers, StepEnd end, uint32_t step) {
  Backend& backend = *core_.backend;
  ChoiceBuffers& choices = core_.choices;
  const auto words = static_cast<size_t>(SeenWords(core_.config.vocab));
  const auto take = [&](Buffer& buffer, size_t bytes) -> Status {
    if (buffer.size() != 0) return {};
    OKV_ASSIGN_OR_RETURN(buffer, backend.Allocate(bytes, "chosen tokens"));
    return {};
  };
  OKV_RETURN_IF_ERROR(take(choices.count, 4));
  if (choices.chosen.size() == 0) {
    OKV_ASSIGN_OR_RETURN(
        choices.chosen, backend.AllocateShared(4 * StepsAhead::kMost * kMaxBatch, "chosen tokens"));
  }
  backend.Upload(choices.count.as(), &step, sizeof(step));
  if (end != StepEnd::kSample) return {};
  OKV_RETURN_IF_ERROR(take(choices.samples, kMaxBatch * sizeof(SampleMeta)));
  OKV_RETURN_IF_ERROR(take(choices.seen, kMaxBatch * words * sizeof(uint32_t)));
  for (size_t r = 0; r < samplers.size(); ++r) {
    const Sampler* sampler = samplers[r];
    const SampleMeta meta = sampler != nullptr ? sampler->meta() : SampleMeta{};
    backend.Upload(choices.samples.as<SampleMeta>() + r, &meta, sizeof(meta));
    if (sampler == nullptr) continue;
    backend.Upload(choices.seen.as<uint32_t>() + r * words, sampler->seen().data(),
                   words * sizeof(uint32_t));
  }
  return {};
}

Status Stepper::EnqueueDecode(std::span<const DecodeRow> rows, int32_t logits_row, StepEnd end) {
  Backend& backend = *core_.backend;
  SetGroups(rows);
  const bool recorded =
      watch_ == nullptr && std::all_of(groups_.begin(), groups_.end(), [](const StepGroup& group) {
        return group.residency.CanRecord();
      });
  std::unique_ptr<Recording>* step = nullptr;
  if (recorded && groups_.size() == 1) {
    const StepGroup& group = groups_.front();
    step =
        &rows.front().group->steps_.Use({group.variant, group.n_rows, logits_row, end}).recording;
  } else if (recorded) {
    MixedSteps::Key key{.parts = {}, .logits_row = logits_row, .end = static_cast<int32_t>(end)};
    for (size_t i = 0, row = 0; i < groups_.size();
         row += static_cast<size_t>(groups_[i++].n_rows)) {
      key.parts.push_back({rows[row].group->id(), groups_[i].variant, groups_[i].n_rows});
    }
    step = core_.mixed_steps.Use(key);
  }
  if (step == nullptr) {
    Enqueue(logits_row, end);
    return backend.TakeFailure();
  }
  if (*step == nullptr) {
    for (StepGroup& group : groups_) group.first_pos = 0;  // a recording knows no length
    *step = backend.Record([&] { Enqueue(logits_row, end); });
    if (const Status failure = backend.TakeFailure(); !failure.ok()) {
      step->reset();
      return failure;
    }
  }
  backend.Replay(**step);
  return backend.TakeFailure();
}

Status Stepper::EnqueueWithChunk(std::span<const DecodeRow> rows, const PromptChunk& chunk,
                                 StepEnd end) {
  SetGroups(rows);
  RowGroup& group = *chunk.group;
  const auto n_rows = static_cast<int32_t>(chunk.tokens.size());
  groups_.push_back(
      {.policy = group.policy(),
       .residency = group.residency(),
       .ropes = group.ropes_,
       .n_rows = n_rows,
       .n_out = chunk.n_out,
       .n_seqs = group.max_seqs(),
       .seq = group.seq(chunk.member),
       .prefill = true,
       .first_pos = FirstPos(chunk),
       .prompt_end = chunk.prompt_end,
       .member = chunk.member,
       .chooses = group.ChoosesAfter(chunk.member, FirstPos(chunk) + n_rows, chunk.prompt_end),
       .pass = chunk.pass,
       .one_layer = chunk.one_layer});
  Enqueue(0, end);
  return core_.backend->TakeFailure();
}

Status Stepper::Logits(int32_t row, int64_t length, float* to) const {
  const auto vocab = static_cast<size_t>(core_.config.vocab);
  core_.backend->Download(to, core_.work.logits.as<float>() + static_cast<size_t>(row) * vocab,
                          vocab * sizeof(float));
  return CheckLogits(core_, to, length);
}

Status Stepper::Step(std::span<const DecodeRow> rows, std::span<float* const> logits,
                     const PromptChunk* chunk, const BackendDraws* draws) {
  OKV_RETURN_IF_ERROR(Check(rows, chunk));
  OKV_RETURN_IF_ERROR(Append(rows));
  const int64_t chunk_pos = chunk != nullptr ? chunk->group->length(chunk->member) : 0;
  if (chunk != nullptr) {
    const auto n = static_cast<int64_t>(chunk->tokens.size());
    const Status room = chunk->group->AppendPrompt(chunk->member, n, chunk->prompt_end);
    if (!room.ok()) {
      TakeBack(rows);
      return room;
    }
  }
  Upload(rows, chunk);
  const StepEnd end = draws != nullptr && !rows.empty() ? EndOf(draws->samplers) : StepEnd::kLogits;
  Status status;
  if (end != StepEnd::kLogits) status = PrepareDraws(draws->samplers, end, /*step=*/0);
  if (status.ok()) {
    status = chunk != nullptr ? EnqueueWithChunk(rows, *chunk, end) : EnqueueDecode(rows, 0, end);
  }
  if (status.ok() && end != StepEnd::kLogits) core_.backend->Await(core_.backend->SetMark());
  for (size_t r = 0; r < rows.size() && status.ok(); ++r) {
    const int64_t length = rows[r].group->length(rows[r].member);
    if (end == StepEnd::kLogits) {
      status = Logits(static_cast<int32_t>(r), length, logits[r]);
    } else if ((draws->tokens[r] = core_.choices.chosen.as<int32_t>()[r]) < 0) {
      status = LogitsNotFinite(core_, length);
    }
  }
  // Of work that the step waited for: the host's beside a card.
  if (const Status late = core_.backend->TakeFailure(); !late.ok()) status = late;
  if (!status.ok() && chunk != nullptr) {
    core_.backend->Synchronize();
    // Rows that a choice has moved in some layers are of no use, nor are sums that some layers have
    // added to.
    const bool lost = chunk->group->policy().Kept().sums ||
                      chunk->group->ChoosesAfter(chunk->member, chunk->group->length(chunk->member),
                                                 chunk->prompt_end);
    chunk->group->CutTo(chunk->member, lost ? 0 : chunk_pos);
  }
  if (!status.ok()) return GiveUp(rows, status);
  for (const auto& [group, member, token] : rows) group->Drop(member, group->length(member));
  if (chunk != nullptr) {
    chunk->group->EndPromptRows(chunk->member, chunk->prompt_end);
  }
  for (size_t r = 0; r < rows.size() && end != StepEnd::kLogits; ++r) {
    if (draws->samplers[r] != nullptr) draws->samplers[r]->Take(draws->tokens[r]);
  }
  return {};
}

Status Stepper::MakeStates(RowGroup& group, int32_t member) {
  const int64_t length = group.length(member);
  const Workspace& work = core_.work;
  std::vector<SeqMeta> seqs(static_cast<size_t>(group.max_seqs()));
  for (int64_t at = 0; at < length;) {
    const auto n = static_cast<int32_t>(std::min<int64_t>(work.max_rows, length - at));
    seqs[static_cast<size_t>(member)] = {.q_len = n,
                                         .kv_len = static_cast<int32_t>(at) + n,
                                         .table_off = core_.bank->TableOffset(group.seq(member)),
                                         .prompt_len = static_cast<int32_t>(length)};
    rows_.clear();
    for (int32_t r = 0; r < n; ++r) {
      rows_.push_back({.seq = member, .pos = static_cast<int32_t>(at) + r});
    }
    core_.backend->Upload(work.rows.as(), rows_.data(), rows_.size() * sizeof(RowMeta));
    core_.backend->Upload(work.seqs.as(), seqs.data(), seqs.size() * sizeof(SeqMeta));
    group.residency().MakeStates(work.rows.as<RowMeta>(), n, work.seqs.as<SeqMeta>());
    ForGlobalLayers(core_.config, [&](int32_t layer, int32_t global) {
      group.policy().MakeStates(global, {.kv = core_.bank->View(layer),
                                         .rows = work.rows.as<RowMeta>(),
                                         .seqs = work.seqs.as<SeqMeta>(),
                                         .n_rows = n,
                                         .n_seqs = group.max_seqs(),
                                         .n_heads = core_.config.n_heads});
    });
    at += n;
  }
  return core_.backend->TakeFailure();
}

Status Stepper::OneLayerOf(const PromptChunk& chunk) {
  OKV_RETURN_IF_ERROR(Check({}, &chunk));
  Upload({}, &chunk);
  return EnqueueWithChunk({}, chunk, StepEnd::kLogits);
}

Status Stepper::ChooseAfterPasses(RowGroup& group, int32_t member, int64_t tokens,
                                  PromptStage* parked) {
  const std::vector<int64_t> rows = group.policy().ChooseAfterPasses(member, tokens);
  if (parked != nullptr) {
    OKV_RETURN_IF_ERROR(group.AppendWhole(member, tokens, rows));
    group.EndPromptRows(member, tokens);
  }
  const Workspace& work = core_.work;
  const auto last = static_cast<int32_t>(tokens) - 1;  // stands for the rows of a step
  std::vector<SeqMeta> seqs(static_cast<size_t>(group.max_seqs()));
  seqs[static_cast<size_t>(member)] = {.q_len = 1,
                                       .kv_len = last + 1,
                                       .table_off = core_.bank->TableOffset(group.seq(member)),
                                       .prompt_len = last + 1};
  const RowMeta row{.seq = member, .pos = last};
  core_.backend->Upload(work.rows.as(), &row, sizeof(row));
  core_.backend->Upload(work.seqs.as(), seqs.data(), seqs.size() * sizeof(SeqMeta));
  group.residency().MakeStates(work.rows.as<RowMeta>(), 1, work.seqs.as<SeqMeta>(), parked);
  int32_t global = 0;
  for (int32_t layer = 0; layer < core_.config.n_layers; ++layer) {
    if (parked != nullptr) parked->Unpark(layer);
    if (core_.config.layers[static_cast<size_t>(layer)].window > 0) {
      if (parked != nullptr) parked->CopyHome(layer);
      continue;
    }
    const auto retained = group.policy().Retains(
        {.layer = global++, .prefill = true, .prompt_end = tokens, .chooses = true, .seq = member});
    group.residency().RetainAfterPasses(layer, *retained, work.seqs.as<SeqMeta>(), parked);
  }
  const Status moved = core_.backend->TakeFailure();
  if (moved.ok()) {
    group.EndPasses(member, rows);
  } else {  // rows that have moved in some layers are of no use
    core_.backend->Synchronize();
    group.CutTo(member, 0);
  }
  return moved;
}

Status Stepper::MadeUpChunks(RowGroup& group, int32_t member, int64_t tokens) {
  const bool by_layer = group.PassesByLayer(member);
  const bool passes = group.AwaitsPasses(member);
  if (by_layer) {
    const std::vector<int64_t> rows =
        passes ? group.policy().ChooseAfterPasses(member, tokens) : std::vector<int64_t>();
    OKV_RETURN_IF_ERROR(group.AppendWhole(member, tokens, rows));
    group.EndPromptRows(member, tokens);
    if (passes) group.EndPasses(member, rows);
    core_.bank->FillWithNoise(group.seq(member));
    return {};
  }
  for (int64_t at = 0; at < tokens;) {
    const int64_t end = group.PartEnd(at, tokens);
    const int64_t chunk = std::min<int64_t>(core_.work.max_rows, end - at);
    OKV_RETURN_IF_ERROR(group.AppendPrompt(member, chunk, end));
    at += chunk;
    group.EndPromptRows(member, end);
  }
  if (passes) group.EndPasses(member, group.policy().ChooseAfterPasses(member, tokens));
  core_.bank->FillWithNoise(group.seq(member));
  group.residency().Reset(member);
  return {};
}

Result<PromptSteps> PromptSteps::Begin(Stepper& stepper, RowGroup& group, int32_t member,
                                       std::span<const int32_t> tokens, bool all_logits) {
  EngineCore& core = stepper.core_;
  PromptSteps steps(stepper, group, member, tokens);
  steps.all_logits_ = all_logits;
  steps.pos_ = group.length(member);
  OKV_RETURN_IF_ERROR(steps.PlanPasses());
  if (!group.PassesByLayer(member)) {
    // Heads that are apart have room for one prompt before its choice, and for a later turn and a
    // pass over it where first prompts pass layer by layer.
    const bool apart = core.bank->config().Rows().heads_apart && group.AwaitsPasses(member);
    const int64_t pass = apart ? steps.LongestPass() : 0;
    if (!apart || core.plan.by_layer) {
      OKV_RETURN_IF_ERROR(
          group.residency().CheckRoom(group.seq(member), steps.total() - steps.pos_ + pass));
    }
    return steps;
  }
  OKV_ASSIGN_OR_RETURN(ByLayer by_layer, MakeByLayer(core, steps));
  // What stays of a prompt is known once its passes are over.
  if (steps.passes_.empty()) OKV_RETURN_IF_ERROR(group.AppendWhole(member, steps.total()));
  steps.by_layer_ = std::make_unique<ByLayer>(std::move(by_layer));
  steps.last_layer_ = core.config.n_layers - 1;
  return steps;
}

Result<PromptSteps::ByLayer> PromptSteps::MakeByLayer(EngineCore& core, const PromptSteps& steps) {
  size_t rows = static_cast<size_t>(steps.total());
  for (const std::vector<int32_t>& pass : steps.passes_) rows += pass.size();
  OKV_ASSIGN_OR_RETURN(PromptStage stage, PromptStage::Create(*core.backend, *core.bank,
                                                              steps.group_->seq(steps.member_),
                                                              steps.total(), steps.LongestPass()));
  const size_t bytes = rows * static_cast<size_t>(core.config.d_model) * sizeof(float);
  constexpr std::string_view kWhat = "the residual of the prompt";
  OKV_ASSIGN_OR_RETURN(Buffer x, stage.parks() ? core.backend->AllocateShared(bytes, kWhat)
                                               : core.backend->Allocate(bytes, kWhat));
  return ByLayer{std::move(stage), std::move(x)};
}

PromptSteps::~PromptSteps() {
  if (by_layer_ != nullptr) End();
  if (pass_row_ > 0) group_->CutTo(member_, total());
}

void PromptSteps::End() {
  stepper_->core_.backend->Synchronize();
  by_layer_.reset();
  pass_row_ = 0;
  if (done()) return;
  group_->CutTo(member_, 0);
}

bool PromptSteps::TakesCompany(int32_t n) const {
  const Workspace& work = stepper_->core_.work;
  return by_layer_ == nullptr && pos_ < total() && n + RowsTogether() <= work.max_rows &&
         n < work.max_out && n <= kMaxBatch;
}

Status PromptSteps::Run(const PromptChunk& chunk, int64_t first_pos, int64_t row,
                        const Company& company) {
  if (by_layer_ == nullptr)
    return stepper_->Step(company.rows, company.logits, &chunk, company.draws);
  EngineCore& core = stepper_->core_;
  const int64_t d = core.config.d_model;
  float* const x = by_layer_->x.as<float>() + row * d;
  const bool shared = by_layer_->stage.parks();
  float* const near = shared ? core.work.x.as<float>() : x;
  const auto copy = [&](float* to, const float* from) {
    if (!shared) return;
    core.backend->Copy(to, from, chunk.tokens.size() * static_cast<size_t>(d) * sizeof(float),
                       Lane::kMain);
  };
  PromptChunk step = chunk;
  step.one_layer = OneLayer{.layer = layer_, .stage = &by_layer_->stage, .x = near};
  step.first_pos = first_pos;
  if (layer_ > 0) copy(near, x);
  OKV_RETURN_IF_ERROR(stepper_->OneLayerOf(step));
  if (layer_ < last_layer_) copy(x, near);
  return {};
}

Status PromptSteps::PlanPasses() {
  if (!group_->AwaitsPasses(member_)) return {};
  OKV_ASSIGN_OR_RETURN(passes_, group_->policy().Passes(member_, tokens_));
  const int64_t most = LongestPass();
  const int64_t context = stepper_->core_.bank->config().max_tokens;
  if (total() + most <= context) return {};
  return InvalidArgument(fmt::format(
      "policy {} runs passes of up to {} tokens behind a prompt of {}, which exceed the context of "
      "{}: raise `context`",
      group_->policy_name(), most, total(), context));
}

int64_t PromptSteps::LongestPass() const {
  size_t rows = 0;
  for (const std::vector<int32_t>& pass : passes_) rows = std::max(rows, pass.size());
  return static_cast<int64_t>(rows);
}

Status PromptSteps::AdvancePass() {
  const std::span<const int32_t> pass = passes_[pass_];
  const size_t n =
      std::min(pass.size() - pass_row_, static_cast<size_t>(stepper_->core_.work.max_rows));
  const auto row = static_cast<int64_t>(pass_row_);
  n_out_ = first_out_ = 0;
  OKV_RETURN_IF_ERROR(Run({.group = group_,
                           .member = member_,
                           .tokens = pass.subspan(pass_row_, n),
                           .prompt_end = total(),
                           .pass = static_cast<int32_t>(pass_)},
                          total() + row, total() + before_ + row, {}));
  pass_row_ += n;
  if (pass_row_ < pass.size()) return {};
  if (by_layer_ == nullptr) group_->CutTo(member_, total());
  before_ += static_cast<int64_t>(pass.size());
  pass_row_ = 0;
  return ++pass_ < passes_.size() ? Status() : EndLayer();
}

Status PromptSteps::EndLayer() {
  PromptStage* const parked =
      by_layer_ != nullptr && by_layer_->stage.parks() ? &by_layer_->stage : nullptr;
  if (parked != nullptr) parked->Park(layer_);
  if (layer_ < last_layer_) {
    pos_ = 0;
    pass_ = 0;
    before_ = 0;
    ++layer_;
    return {};
  }
  if (by_layer_ != nullptr && parked == nullptr) group_->EndPromptRows(member_, total());
  if (group_->AwaitsPasses(member_)) {
    OKV_RETURN_IF_ERROR(stepper_->ChooseAfterPasses(*group_, member_, total(), parked));
  }
  if (by_layer_ != nullptr) End();
  return {};
}

Status PromptSteps::Advance(const Company& company) {
  const auto n_rows = static_cast<int32_t>(company.rows.size());
  OKV_CHECK(n_rows == 0 || TakesCompany(n_rows));
  const Status ran = pos_ == total() ? AdvancePass() : AdvancePrompt(company);
  if (ran.ok() || by_layer_ == nullptr) return ran;
  pass_ = 0;  // not done
  End();
  return ran;
}

Status PromptSteps::AdvancePrompt(const Company& company) {
  const Workspace& work = stepper_->core_.work;
  const auto others = static_cast<int32_t>(company.rows.size());
  const int32_t room =
      (all_logits_ ? std::min(work.max_out, work.max_rows) : work.max_rows) - others;
  const int32_t most = std::clamp(company.most_rows, std::min(room, RowsTogether()), room);
  const int64_t end = group_->PartEnd(pos_, total());
  const int32_t n = group_->ChunkRows(end - pos_, most);
  const bool last = pos_ + n == total();
  n_out_ = layer_ < last_layer_ ? 0 : all_logits_ ? n : last ? 1 : 0;
  first_out_ = others;
  OKV_RETURN_IF_ERROR(
      Run({.group = group_,
           .member = member_,
           .tokens = tokens_.subspan(static_cast<size_t>(pos_), static_cast<size_t>(n)),
           .prompt_end = end,
           .n_out = n_out_},
          pos_, pos_, company));
  pos_ += n;
  return last && passes_.empty() ? EndLayer() : Status();
}

StepsAhead::StepsAhead(Stepper& stepper, std::vector<DecodeRow> rows,
                       std::vector<Sampler*> samplers)
    : stepper_(stepper),
      rows_(std::move(rows)),
      samplers_(std::move(samplers)),
      end_(Stepper::EndOf(samplers_)) {
  OKV_CHECK(samplers_.size() == rows_.size());
}

Status StepsAhead::Launch() {
  OKV_RETURN_IF_ERROR(stepper_.Check(rows_, nullptr));
  OKV_RETURN_IF_ERROR(stepper_.Append(rows_));
  Status status;
  if (launched_ == read_) {  // forgets what steps that nobody read have drawn
    status = stepper_.PrepareDraws(samplers_, end_, launched_);
    stepper_.Upload(rows_, nullptr);
  }
  if (status.ok()) status = stepper_.EnqueueDecode(rows_, RowOf(launched_), end_);
  if (!status.ok()) return stepper_.GiveUp(rows_, status);
  marks_[launched_ % kMost] = stepper_.core_.backend->SetMark();
  ++launched_;
  ++launches_;
  return {};
}

Result<std::span<const DecodeRow>> StepsAhead::Read(int64_t wanted) {
  while (launched_ - read_ < std::min<int64_t>(kMost, wanted)) {
    // What cannot be had ahead of time may not be needed.
    const Status launched = Launch();
    const bool lacks = launched.code() == StatusCode::kResourceExhausted;
    if (lacks && launched_ > read_) break;
    if (!launched.ok()) {
      stepper_.core_.backend->Synchronize();
      return launched;
    }
  }
  stepper_.core_.backend->Await(marks_[read_ % kMost]);
  // Of the host's work beside a card: of this step, or of one that follows it.
  if (const Status late = stepper_.core_.backend->TakeFailure(); !late.ok()) return GiveUp(late);
  const int32_t* chosen = stepper_.core_.choices.chosen.as<int32_t>() + RowOf(read_);
  const auto unread = static_cast<int64_t>(launched_ - read_) - 1;  // after this one
  for (size_t r = 0; r < rows_.size(); ++r) {
    if (chosen[r] >= 0) continue;
    return LogitsNotFinite(stepper_.core_, rows_[r].group->length(rows_[r].member) - unread);
  }
  ++read_;
  for (size_t r = 0; r < rows_.size(); ++r) {
    auto& [group, member, token] = rows_[r];
    group->Drop(member, group->length(member) - unread);
    token = chosen[r];
    if (samplers_[r] != nullptr) samplers_[r]->Take(token);
  }
  return std::span<const DecodeRow>(rows_);
}

Status StepsAhead::GiveUp(const Status& failure) {
  stepper_.core_.backend->Synchronize();
  Stepper::ForgetSlots(rows_);
  return failure;
}

void StepsAhead::End() {
  const auto unread = static_cast<int64_t>(launched_ - read_);
  for (const auto& [group, member, token] : rows_) {
    group->Forget(member, group->length(member) - unread);
  }
  launched_ = read_;
}

}  // namespace omnikv
