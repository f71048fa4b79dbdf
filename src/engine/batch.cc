#include "engine/batch.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <numeric>

#include "base/check.h"

namespace omnikv {
namespace {

Status CheckBatch(const EngineCore& core, int32_t max_seqs) {
  if (max_seqs < 1 || max_seqs > kMaxBatch) {
    return InvalidArgument(
        fmt::format("a batch of {} sequences is asked for, expected 1 to {}", max_seqs, kMaxBatch));
  }
  if (core.bank->HasHostLayers()) {
    return Unsupported(fmt::format(
        "a batch of {} sequences needs all K/V on the card, but some layers' live on the host: "
        "lower `context`, or raise `gpu_memory`",
        max_seqs));
  }
  if (std::min(core.work.max_rows, core.work.max_out) < max_seqs) {
    return InvalidArgument(fmt::format(
        "a batch of {} sequences is asked for, but `prefill_chunk` and the open sessions allow "
        "steps of {} rows",
        max_seqs, std::min(core.work.max_rows, core.work.max_out)));
  }
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

}  // namespace

Result<std::unique_ptr<Batch>> Batch::Open(EngineCore& core, const PolicyOptions& policy,
                                           int32_t max_seqs) {
  OKV_RETURN_IF_ERROR(CheckBatch(core, max_seqs));
  std::unique_ptr<Batch> batch(new Batch(core));
  OKV_ASSIGN_OR_RETURN(batch->ropes_, RopeState::Create(*core.backend, core.config));
  OKV_ASSIGN_OR_RETURN(batch->policy_, PreparePolicy(core, policy, batch->ropes_, max_seqs));
  OKV_ASSIGN_OR_RETURN(batch->residency_, Residency::Create(*core.backend, *core.bank, {}));
  batch->slots_.resize(static_cast<size_t>(max_seqs));
  for (Slot& slot : batch->slots_) slot.logits.resize(static_cast<size_t>(core.config.vocab));
  OKV_ASSIGN_OR_RETURN(
      batch->chosen_,
      core.backend->AllocateShared(sizeof(int32_t) * kStepsAhead * static_cast<size_t>(max_seqs),
                                   "chosen tokens"));
  OKV_ASSIGN_OR_RETURN(batch->step_count_, core.backend->Allocate(4, "chosen tokens"));
  return batch;
}

Batch::~Batch() {
  for (const Slot& slot : slots_) {
    if (slot.seq >= 0) core_.bank->Free(slot.seq);
  }
  if (policy_.policy != nullptr) core_.policy_bytes -= policy_.policy->Bytes();
}

const Batch::Slot& Batch::At(int32_t slot) const {
  OKV_CHECK(slot >= 0 && slot < max_seqs() && slots_[static_cast<size_t>(slot)].seq >= 0,
            "slot {} of {}", slot, max_seqs());
  return slots_[static_cast<size_t>(slot)];
}

Result<int32_t> Batch::Take() {
  const auto free =
      std::find_if(slots_.begin(), slots_.end(), [](const Slot& s) { return s.seq < 0; });
  if (free == slots_.end()) {
    return ResourceExhausted(fmt::format("all {} sequences of the batch are taken", max_seqs()));
  }
  OKV_ASSIGN_OR_RETURN(free->seq, core_.bank->NewSequence());
  return static_cast<int32_t>(free - slots_.begin());
}

void Batch::Leave(int32_t slot) {
  core_.bank->Free(At(slot).seq);
  slots_[static_cast<size_t>(slot)].seq = -1;
}

Result<int32_t> Batch::Taken(int32_t slot, const Status& status) {
  if (status.ok()) return slot;
  Leave(slot);
  return status;
}

Result<int32_t> Batch::Join(const std::vector<int32_t>& prompt) {
  OKV_RETURN_IF_ERROR(CheckTokens(core_, prompt));
  OKV_ASSIGN_OR_RETURN(const int32_t slot, Take());
  return Taken(slot, Prefill(slot, prompt));
}

Result<int32_t> Batch::JoinMadeUp(int64_t tokens) {
  OKV_ASSIGN_OR_RETURN(const int32_t slot, Take());
  return Taken(slot, FillWithNoise(slot, tokens));
}

Status Batch::FillWithNoise(int32_t slot, int64_t tokens) {
  Slot& taken = slots_[static_cast<size_t>(slot)];
  OKV_RETURN_IF_ERROR(AppendMadeUp(core_, *policy_.policy, taken.seq, tokens));
  taken.prompt_len = tokens;
  return policy_.policy->AfterPrefill(tokens);
}

Status Batch::Prefill(int32_t slot, const std::vector<int32_t>& prompt) {
  Slot& taken = slots_[static_cast<size_t>(slot)];
  const auto total = static_cast<int64_t>(prompt.size());
  taken.prompt_len = total;
  for (int64_t pos = 0; pos < total;) {
    const auto n = static_cast<int32_t>(std::min<int64_t>(core_.work.max_rows, total - pos));
    const int64_t end = pos + n;
    OKV_RETURN_IF_ERROR(core_.bank->Append(taken.seq, n));
    tokens_.assign(prompt.begin() + pos, prompt.begin() + end);
    rows_.clear();
    for (int64_t p = pos; p < end; ++p) {
      rows_.push_back({.seq = slot, .pos = static_cast<int32_t>(p)});
    }
    seqs_.assign(slots_.size(), SeqMeta{});
    seqs_[static_cast<size_t>(slot)] = {.q_begin = 0,
                                        .q_len = n,
                                        .kv_len = static_cast<int32_t>(end),
                                        .table_off = core_.bank->TableOffset(taken.seq),
                                        .prompt_len = static_cast<int32_t>(total)};
    const int32_t n_out = end == total ? 1 : 0;
    Upload(n - n_out, n_out);
    EnqueueStep(
        Context(),
        {.n_rows = n, .n_out = n_out, .prefill = true, .first_pos = pos, .prompt_end = total});
    OKV_RETURN_IF_ERROR(core_.backend->TakeFailure());
    pos = end;
    Drop(slot);
  }
  core_.backend->Download(taken.logits.data(), core_.work.logits.as(),
                          taken.logits.size() * sizeof(float));
  OKV_RETURN_IF_ERROR(CheckLogits(core_, taken.logits.data(), total));
  return policy_.policy->AfterPrefill(total);
}

void Batch::Drop(int32_t slot) {
  DropTokens(core_, *policy_.policy, At(slot).seq, length(slot));
}

Status Batch::Begin(std::span<const Next> next, int64_t n) {
  if (next.empty()) return InvalidArgument("a step has no sequence, expected at least one");
  lengths_.clear();
  tokens_.clear();
  rows_.clear();
  seqs_.assign(slots_.size(), SeqMeta{});
  for (const Next& row : next) {
    OKV_RETURN_IF_ERROR(CheckTokens(core_, {&row.token, 1}));
    const Slot& slot = At(row.slot);
    SeqMeta& seq = seqs_[static_cast<size_t>(row.slot)];
    OKV_CHECK(seq.q_len == 0, "slot {} is named twice", row.slot);
    const auto r = static_cast<int32_t>(rows_.size());
    const auto pos = static_cast<int32_t>(length(row.slot));
    seq = {.q_begin = r,
           .q_len = 1,
           .kv_len = pos + 1,
           .table_off = core_.bank->TableOffset(slot.seq),
           .prompt_len = static_cast<int32_t>(slot.prompt_len)};
    lengths_.push_back({.tokens = pos + 1, .prompt = slot.prompt_len});
    tokens_.push_back(row.token);
    rows_.push_back({.seq = row.slot, .pos = pos});
  }
  for (size_t i = 0; i < next.size(); ++i) {
    const Status room = core_.bank->Append(At(next[i].slot).seq, n);
    if (room.ok()) continue;
    for (const Next& done : next.first(i)) {
      core_.bank->Truncate(At(done.slot).seq, length(done.slot) - n);
    }
    return room;
  }
  Upload(0, static_cast<int32_t>(next.size()));
  return {};
}

void Batch::Upload(int32_t first_out, int32_t n_out) {
  const auto upload = [&](const Buffer& to, const auto& from) {
    core_.backend->Upload(to.as(), from.data(), from.size() * sizeof(from[0]));
  };
  out_rows_.resize(static_cast<size_t>(n_out));
  std::iota(out_rows_.begin(), out_rows_.end(), first_out);
  upload(core_.work.tokens, tokens_);
  upload(core_.work.rows, rows_);
  upload(core_.work.seqs, seqs_);
  upload(core_.work.out_rows, out_rows_);
}

Result<const Recording*> Batch::StepFor(size_t n_rows, bool chooses) {
  int32_t variant = 0;
  for (const SeqLength& at : lengths_) {
    variant = std::max(variant, policy_.policy->Variant(at));
  }
  std::unique_ptr<Recording>& step = steps_[{variant, n_rows, chooses}];
  if (step != nullptr) return step.get();
  const auto rows = static_cast<int32_t>(n_rows);
  step = core_.backend->Record([&] {
    EnqueueStep(Context(), {.n_rows = rows, .n_out = rows, .variant = variant});
    if (!chooses) return;
    core_.backend->Enqueue(NextTokenArgs{.logits = core_.work.logits.as<float>(),
                                         .tokens = core_.work.tokens.as<int32_t>(),
                                         .rows = core_.work.rows.as<RowMeta>(),
                                         .seqs = core_.work.seqs.as<SeqMeta>(),
                                         .out = chosen_.as<int32_t>(),
                                         .step = step_count_.as<uint32_t>(),
                                         .vocab = core_.config.vocab,
                                         .ring = kStepsAhead,
                                         .n_rows = rows});
  });
  if (const Status failure = core_.backend->TakeFailure(); !failure.ok()) {
    step.reset();
    return failure;
  }
  return step.get();
}

Status Batch::EnqueueDecode(size_t n_rows, bool chooses) {
  OKV_ASSIGN_OR_RETURN(const Recording* step, StepFor(n_rows, chooses));
  core_.backend->Replay(*step);
  return core_.backend->TakeFailure();
}

Status Batch::GiveUp(std::span<const Next> next, int64_t n, const Status& failure) {
  core_.backend->Synchronize();
  for (const Next& row : next) core_.bank->Truncate(At(row.slot).seq, length(row.slot) - n);
  return failure;
}

Status Batch::End(std::span<const Next> next) {
  const auto vocab = static_cast<size_t>(core_.config.vocab);
  for (size_t r = 0; r < next.size(); ++r) {
    std::vector<float>& logits = slots_[static_cast<size_t>(next[r].slot)].logits;
    core_.backend->Download(logits.data(), core_.work.logits.as<float>() + r * vocab,
                            vocab * sizeof(float));
    OKV_RETURN_IF_ERROR(CheckLogits(core_, logits.data(), length(next[r].slot)));
  }
  for (const Next& row : next) Drop(row.slot);
  return {};
}

Status Batch::Step(std::span<const Next> next) {
  OKV_RETURN_IF_ERROR(Begin(next, 1));
  const Status enqueued = EnqueueDecode(next.size(), /*chooses=*/false);
  if (!enqueued.ok()) return GiveUp(next, 1, enqueued);
  const Status ended = End(next);
  return ended.ok() ? ended : GiveUp(next, 1, ended);
}

Result<std::vector<std::vector<int32_t>>> Batch::Greedy(std::span<const Next> next, int64_t steps) {
  std::vector<std::vector<int32_t>> tokens(next.size());
  if (steps < 1) return tokens;
  OKV_RETURN_IF_ERROR(Begin(next, steps));
  Backend& backend = *core_.backend;
  const uint32_t zero = 0;
  backend.Upload(step_count_.as(), &zero, sizeof(zero));
  std::array<Backend::Mark, kStepsAhead> marks{};
  int64_t launched = 0;
  for (int64_t read = 0; read < steps; ++read) {
    for (; launched < std::min<int64_t>(steps, read + kStepsAhead); ++launched) {
      const Status enqueued = EnqueueDecode(next.size(), /*chooses=*/true);
      if (!enqueued.ok()) return GiveUp(next, steps, enqueued);
      marks[static_cast<size_t>(launched % kStepsAhead)] = backend.SetMark();
      for (SeqLength& at : lengths_) ++at.tokens;
    }
    const auto slot = static_cast<size_t>(read % kStepsAhead);
    backend.Await(marks[slot]);
    const int32_t* chosen = chosen_.as<int32_t>() + slot * next.size();
    for (size_t r = 0; r < next.size(); ++r) {
      if (chosen[r] < 0) {
        const int64_t unread = steps - read - 1;
        return GiveUp(next, steps, LogitsNotFinite(core_, length(next[r].slot) - unread));
      }
      tokens[r].push_back(chosen[r]);
    }
  }
  const Status ended = End(next);
  if (!ended.ok()) return GiveUp(next, steps, ended);
  return tokens;
}

double Batch::attended_tokens(int32_t slot) const {
  return AttendedTokens(core_.config, *policy_.policy,
                        {.tokens = length(slot), .prompt = At(slot).prompt_len});
}

}  // namespace omnikv
