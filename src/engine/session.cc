#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <map>
#include <numeric>
#include <optional>
#include <span>
#include <tuple>

#include "base/check.h"
#include "base/log.h"
#include "engine/core.h"
#include "engine/sampler.h"
#include "engine/stop_text.h"

namespace omnikv {
namespace {

using Clock = std::chrono::steady_clock;

double Seconds(Clock::time_point since) {
  return std::chrono::duration<double>(Clock::now() - since).count();
}

// Whether longrope rotates a context of `a` tokens by other factors than one of `b` tokens.
bool LongropeParts(const ModelConfig& config, int64_t a, int64_t b) {
  return std::any_of(config.ropes.begin(), config.ropes.end(), [&](const RopeConfig& rope) {
    return rope.scaling == RopeScaling::kLongrope &&
           (a > rope.original_context) != (b > rope.original_context);
  });
}

class SessionImpl : public Session {
 public:
  SessionImpl(EngineCore& core, PolicyOptions options)
      : core_(core), options_(std::move(options)) {}
  ~SessionImpl() override {
    if (seq_ >= 0) core_.bank->Free(seq_);
    if (policy_ != nullptr) core_.policy_bytes -= policy_->Bytes();
    if (residency_ != nullptr) core_.set_bytes -= residency_->Bytes();
  }

  // The session's own state, on a new sequence or on a fork of `from`.
  Status Open(const SessionImpl* from);

  Status Prompt(const std::vector<int32_t>& tokens, const Progress& progress) override;
  Status PrefillLogits(const std::vector<int32_t>& tokens,
                       const std::function<void(int64_t, const float*)>& sink) override;
  Result<GenerateResult> Generate(const GenerateOptions& options, const OnText& on_text) override;
  Status Step(int32_t token) override;
  const float* logits() const override { return logits_.data(); }
  Result<std::unique_ptr<Session>> Fork() override;
  Status FillContext(int64_t tokens) override;
  void Cancel() override { cancelled_.store(true, std::memory_order_relaxed); }
  const std::vector<int32_t>& tokens() const override { return tokens_; }
  SessionStats stats() const override;

 private:
  struct Random {
    uint64_t seed;   // as given
    uint64_t state;  // where its numbers stand now
  };
  using Sink = std::function<void(int64_t, const float*)>;
  // Room on the device for what the policy reads of layers that live on the host.
  Status OpenResidency();
  // Tokens that end an answer: the model's, and stop texts that are a special token, which the
  // answer's text never has.
  Result<std::vector<int32_t>> EndIds(const GenerateOptions& options) const;
  Status Prefill(const std::vector<int32_t>& tokens, const Progress& progress, const Sink& sink);
  void Drop() { DropTokens(core_, *policy_, seq_, static_cast<int64_t>(tokens_.size())); }
  // Makes the rows of a prompt that ended early the whole of it, for the policy too, whose state
  // may be that of the prompt's last rows: these are fed anew.
  Status Settle();
  // Forgets the tokens from `keep` on, and what followed from them.
  void StartOver(int64_t keep);
  // Steps that a device takes one after another by itself, each from the token that the one before
  // chose, while the host still reads that of an earlier one.
  struct Ahead {
    uint32_t launched = 0;                 // steps
    uint32_t read = 0;                     // of them
    std::array<Backend::Mark, 2> marks{};  // of the last steps launched, by their number
  };
  static constexpr uint32_t kStepsAhead = 2;        // their logits alternate
  enum class Ending { kLogits, kArgmax, kSample };  // the last two in NextToken
  // Makes room for a token, and enqueues the step that writes it. On failure nothing has changed.
  Status EnqueueDecode(uint32_t logits_row, Ending ending);
  // A decode step at `length` tokens, its own included: its logits go to that row.
  Status RunStep(int64_t length, uint32_t logits_row, Ending ending);
  void EnqueueOps(const StepShape& shape, Ending ending);
  // The token after `pending_`, as `sampler` would draw it, which then knows of it; up to `wanted`
  // tokens will be asked for in all.
  Result<int32_t> NextAhead(Ahead& ahead, Sampler& sampler, int64_t wanted);
  // Forgets the steps that nobody read, and brings the logits of the last that was.
  void EndAhead(const Ahead& ahead);
  // Writes the step's inputs: `n` tokens from position `pos` on.
  void UploadStep(const int32_t* tokens, int64_t pos, int32_t n, int64_t prompt_len);
  StepContext Context() {
    return {.backend = *core_.backend,
            .config = core_.config,
            .weights = core_.weights,
            .work = core_.work,
            .ropes = ropes_,
            .residency = *residency_,
            .policy = *policy_,
            .seq = seq_,
            .on_selection = core_.on_selection};
  }
  void ChooseRopes(int64_t length) {
    rope_length_ = length;
    ropes_.Choose(*core_.backend, core_.config, length);
  }
  void AddHeld(SessionStats& stats) const;
  bool TakeCancelled() { return cancelled_.exchange(false, std::memory_order_relaxed); }

  EngineCore& core_;
  PolicyOptions options_;
  PolicySettings settings_;
  int32_t seq_ = -1;
  RopeState ropes_;
  std::unique_ptr<Policy> policy_;
  std::unique_ptr<Residency> residency_;
  // By the policy's variant, the row of the logits, and how it ends.
  std::map<std::tuple<int32_t, uint32_t, Ending>, std::unique_ptr<Recording>> steps_;
  Buffer chosen_;                  // int32 [kStepsAhead], shared: tokens that steps chose
  Buffer step_count_;              // uint32 [1]
  Buffer sample_;                  // SampleMeta [1]
  Buffer seen_;                    // uint32 [SeenWords(vocab)]
  std::vector<int32_t> tokens_;    // in the bank
  std::vector<float> logits_;      // [vocab], after the last token
  std::vector<RowMeta> rows_;      // scratch, [max_rows]
  int64_t steps_since_reset_ = 0;  // decode steps whose transfers `residency_` has counted
  int64_t prompt_len_ = 0;         // tokens that came as prompts, in context now
  bool settled_ = false;           // the policy knows them all: the last Prompt came to its end
  int64_t rope_length_ = 0;  // the context, in tokens, that the keys in the bank are rotated for
  int32_t pending_ = -1;     // sampled, not yet in the bank
  bool has_logits_ = false;
  std::optional<Random> random_;  // of the last Generate since the prompt
  std::atomic<bool> cancelled_{false};
  SessionStats stats_;
};

Status SessionImpl::Open(const SessionImpl* from) {
  OKV_ASSIGN_OR_RETURN(ropes_, RopeState::Create(*core_.backend, core_.config));
  OKV_ASSIGN_OR_RETURN(PreparedPolicy prepared, PreparePolicy(core_, options_, ropes_, 1));
  settings_ = std::move(prepared.settings);
  policy_ = std::move(prepared.policy);
  OKV_RETURN_IF_ERROR(OpenResidency());
  rows_.resize(static_cast<size_t>(core_.work.max_rows));
  logits_.resize(static_cast<size_t>(core_.config.vocab));
  stats_.device = core_.backend->Name();
  stats_.policy = prepared.info->name;
  if (from == nullptr) {
    OKV_ASSIGN_OR_RETURN(seq_, core_.bank->NewSequence());
    return {};
  }
  OKV_ASSIGN_OR_RETURN(seq_, core_.bank->Fork(from->seq_));
  ChooseRopes(from->rope_length_);
  policy_->CopyState(*from->policy_);
  tokens_ = from->tokens_;
  logits_ = from->logits_;
  prompt_len_ = from->prompt_len_;
  settled_ = from->settled_;
  pending_ = from->pending_;
  has_logits_ = from->has_logits_;
  random_ = from->random_;
  return {};
}

Status SessionImpl::OpenResidency() {
  const DeclaredReads reads = policy_->Reads();
  const auto least = static_cast<int32_t>(reads.max_tokens);
  OKV_ASSIGN_OR_RETURN(residency_, Residency::Create(*core_.backend, *core_.bank,
                                                     {.reads = ReadsByLayer(core_.config, reads),
                                                      .n_slots = std::max(least, core_.working_set),
                                                      .simulated_hits = core_.simulated_hits}));
  core_.set_bytes += residency_->Bytes();
  return {};
}

void SessionImpl::StartOver(int64_t keep) {
  core_.bank->Truncate(seq_, keep);
  residency_->Reset();
  steps_since_reset_ = 0;
  tokens_.resize(static_cast<size_t>(keep));
  prompt_len_ = keep;
  settled_ = false;
  pending_ = -1;
  has_logits_ = false;
  random_.reset();
}

void SessionImpl::UploadStep(const int32_t* tokens, int64_t pos, int32_t n, int64_t prompt_len) {
  Backend& backend = *core_.backend;
  const auto count = static_cast<size_t>(n);
  for (size_t r = 0; r < count; ++r) {
    rows_[r] = {.seq = 0, .pos = static_cast<int32_t>(pos + static_cast<int64_t>(r))};
  }
  const SeqMeta seq{.q_begin = 0,
                    .q_len = n,
                    .kv_len = static_cast<int32_t>(pos + n),
                    .table_off = core_.bank->TableOffset(seq_),
                    .prompt_len = static_cast<int32_t>(prompt_len)};
  backend.Upload(core_.work.tokens.as<void>(), tokens, count * sizeof(int32_t));
  backend.Upload(core_.work.rows.as<void>(), rows_.data(), count * sizeof(RowMeta));
  backend.Upload(core_.work.seqs.as<void>(), &seq, sizeof(seq));
}

Status SessionImpl::Prefill(const std::vector<int32_t>& tokens, const Progress& progress,
                            const Sink& sink) {
  OKV_RETURN_IF_ERROR(CheckTokens(core_, tokens));
  TakeCancelled();
  const auto start = Clock::now();
  const auto total = static_cast<int64_t>(tokens.size());
  // What is here already stays, but for the rows that the logits and the policy's state need anew,
  // and unless the new context's keys are rotated otherwise.
  int64_t keep = 0;
  if (!sink && !LongropeParts(core_.config, rope_length_, total)) {
    const size_t common = std::min(tokens.size(), tokens_.size());
    keep = std::mismatch(tokens.begin(), tokens.begin() + static_cast<ptrdiff_t>(common),
                         tokens_.begin())
               .first -
           tokens.begin();
    keep = std::max<int64_t>(0, std::min(keep, total - policy_->WarmRows()));
    if (!CanGoOnFrom(core_, *policy_, seq_, keep)) keep = 0;
  }
  StartOver(keep);
  if (keep == 0) ChooseRopes(total);
  const int32_t most = core_.work.max_rows;
  const int32_t chunk = sink ? std::min(core_.work.max_out, most) : most;
  for (int64_t pos = keep; pos < total;) {
    const auto n = static_cast<int32_t>(std::min<int64_t>(chunk, total - pos));
    const bool last = pos + n == total;
    OKV_RETURN_IF_ERROR(core_.bank->Append(seq_, n));
    UploadStep(tokens.data() + pos, pos, n, total);
    const int32_t n_out = sink ? n : (last ? 1 : 0);
    std::vector<int32_t> out_rows(static_cast<size_t>(n_out));
    std::iota(out_rows.begin(), out_rows.end(), n - n_out);
    core_.backend->Upload(core_.work.out_rows.as<void>(), out_rows.data(), out_rows.size() * 4);
    EnqueueStep(
        Context(),
        {.n_rows = n, .n_out = n_out, .prefill = true, .first_pos = pos, .prompt_end = total});
    if (const Status failure = core_.backend->TakeFailure(); !failure.ok()) {
      core_.backend->Synchronize();
      StartOver(pos);
      return failure;
    }
    for (int32_t r = 0; r < n_out; ++r) {
      core_.backend->Download(logits_.data(),
                              core_.work.logits.as<float>() + int64_t{r} * core_.config.vocab,
                              logits_.size() * sizeof(float));
      if (const Status finite = CheckLogits(core_, logits_.data(), pos + n - n_out + r + 1);
          !finite.ok()) {
        StartOver(0);
        return finite;
      }
      if (sink) sink(pos + r, logits_.data());
    }
    pos += n;
    tokens_.assign(tokens.begin(), tokens.begin() + pos);
    prompt_len_ = pos;
    Drop();
    if (progress) progress(pos - keep, total - keep);
    if (TakeCancelled()) {
      return Cancelled(fmt::format("cancelled after {} of {} tokens", pos, total));
    }
  }
  core_.backend->Synchronize();
  stats_.prefill_tokens = total - keep;
  stats_.prefill_seconds = Seconds(start);
  stats_.decode_tokens = 0;
  stats_.decode_seconds = 0;
  OKV_RETURN_IF_ERROR(policy_->AfterPrefill(total));
  settled_ = true;
  has_logits_ = true;
  return {};
}

Status SessionImpl::Settle() {
  if (settled_ || tokens_.empty()) return {};
  if (policy_->WarmRows() > 1) return Prefill(std::vector<int32_t>(tokens_), {}, {});
  OKV_RETURN_IF_ERROR(policy_->AfterPrefill(prompt_len_));
  settled_ = true;
  return {};
}

Status SessionImpl::Prompt(const std::vector<int32_t>& tokens, const Progress& progress) {
  return Prefill(tokens, progress, {});
}

Status SessionImpl::PrefillLogits(const std::vector<int32_t>& tokens, const Sink& sink) {
  return Prefill(tokens, {}, sink);
}

Status SessionImpl::Step(int32_t token) {
  OKV_RETURN_IF_ERROR(CheckTokens(core_, {&token, 1}));
  OKV_RETURN_IF_ERROR(Settle());
  UploadStep(&token, core_.bank->Length(seq_), 1, prompt_len_);
  const int32_t zero = 0;
  core_.backend->Upload(core_.work.out_rows.as<void>(), &zero, sizeof(zero));
  OKV_RETURN_IF_ERROR(EnqueueDecode(0, Ending::kLogits));
  core_.backend->Download(logits_.data(), core_.work.logits.as<float>(),
                          logits_.size() * sizeof(float));
  const int64_t length = core_.bank->Length(seq_);
  if (const Status finite = CheckLogits(core_, logits_.data(), length); !finite.ok()) {
    core_.bank->Truncate(seq_, length - 1);
    return finite;
  }
  tokens_.push_back(token);
  Drop();
  pending_ = -1;
  has_logits_ = true;
  return {};
}

Status SessionImpl::EnqueueDecode(uint32_t logits_row, Ending ending) {
  OKV_RETURN_IF_ERROR(core_.bank->Append(seq_, 1));
  const int64_t length = core_.bank->Length(seq_);
  const Status failure = RunStep(length, logits_row, ending);
  if (failure.ok()) {
    ++steps_since_reset_;
  } else {
    core_.backend->Synchronize();
    core_.bank->Truncate(seq_, length - 1);
  }
  return failure;
}

Status SessionImpl::RunStep(int64_t length, uint32_t logits_row, Ending ending) {
  const int32_t variant = policy_->Variant({.tokens = length, .prompt = prompt_len_});
  StepShape shape{.variant = variant, .logits_row = static_cast<int32_t>(logits_row)};
  if (!residency_->CanRecord()) {
    shape.first_pos = length - 1;
    EnqueueOps(shape, ending);
    return core_.backend->TakeFailure();
  }
  std::unique_ptr<Recording>& step = steps_[{variant, logits_row, ending}];
  if (step == nullptr) {
    step = core_.backend->Record([&] { EnqueueOps(shape, ending); });
    if (const Status failure = core_.backend->TakeFailure(); !failure.ok()) {
      step.reset();
      return failure;
    }
  }
  core_.backend->Replay(*step);
  return core_.backend->TakeFailure();
}

void SessionImpl::EnqueueOps(const StepShape& shape, Ending ending) {
  EnqueueStep(Context(), shape);
  if (ending == Ending::kLogits) return;
  const bool samples = ending == Ending::kSample;
  core_.backend->Enqueue(NextTokenArgs{
      .logits = core_.work.logits.as<float>() + int64_t{shape.logits_row} * core_.config.vocab,
      .tokens = core_.work.tokens.as<int32_t>(),
      .rows = core_.work.rows.as<RowMeta>(),
      .seqs = core_.work.seqs.as<SeqMeta>(),
      .sample = samples ? sample_.as<SampleMeta>() : nullptr,
      .seen = samples ? seen_.as<uint32_t>() : nullptr,
      .out = chosen_.as<int32_t>(),
      .step = step_count_.as<uint32_t>(),
      .vocab = core_.config.vocab,
      .ring = kStepsAhead,
      .n_rows = 1});
}

Result<int32_t> SessionImpl::NextAhead(Ahead& ahead, Sampler& sampler, int64_t wanted) {
  Backend& backend = *core_.backend;
  const size_t seen_bytes = sampler.seen().size() * sizeof(uint32_t);
  if (chosen_.size() == 0) {
    OKV_ASSIGN_OR_RETURN(sample_, backend.Allocate(sizeof(SampleMeta), "chosen tokens"));
    OKV_ASSIGN_OR_RETURN(seen_, backend.Allocate(seen_bytes, "chosen tokens"));
    OKV_ASSIGN_OR_RETURN(step_count_, backend.Allocate(4, "chosen tokens"));
    OKV_ASSIGN_OR_RETURN(chosen_, backend.AllocateShared(4 * kStepsAhead, "chosen tokens"));
  }
  const Ending ending = sampler.IsArgmax() ? Ending::kArgmax : Ending::kSample;
  if (ahead.launched == ahead.read) {
    UploadStep(&pending_, core_.bank->Length(seq_), 1, prompt_len_);
    const int32_t zero = 0;
    backend.Upload(core_.work.out_rows.as<void>(), &zero, sizeof(zero));
    backend.Upload(step_count_.as<void>(), &ahead.launched, sizeof(ahead.launched));
    // This also forgets what steps that nobody read have drawn.
    if (ending == Ending::kSample) {
      backend.Upload(sample_.as<void>(), &sampler.meta(), sizeof(SampleMeta));
      backend.Upload(seen_.as<void>(), sampler.seen().data(), seen_bytes);
    }
  }
  while (ahead.launched - ahead.read < std::min<int64_t>(kStepsAhead, wanted)) {
    // What cannot be had ahead of time may not be needed.
    const uint32_t slot = ahead.launched % kStepsAhead;
    const Status enqueued = EnqueueDecode(slot, ending);
    if (!enqueued.ok() && ahead.launched > ahead.read) break;
    OKV_RETURN_IF_ERROR(enqueued);
    ahead.marks[slot] = backend.SetMark();
    ++ahead.launched;
  }
  const uint32_t slot = ahead.read++ % kStepsAhead;
  backend.Await(ahead.marks[slot]);
  const int32_t token = chosen_.as<int32_t>()[slot];
  if (token < 0) return LogitsNotFinite(core_, static_cast<int64_t>(tokens_.size()) + 1);
  tokens_.push_back(pending_);
  Drop();
  sampler.Take(token);
  return token;
}

void SessionImpl::EndAhead(const Ahead& ahead) {
  core_.bank->Truncate(seq_, static_cast<int64_t>(tokens_.size()));
  if (ahead.read == 0) return;
  const int64_t row = (ahead.read - 1) % kStepsAhead;
  core_.backend->Download(logits_.data(), core_.work.logits.as<float>() + row * core_.config.vocab,
                          logits_.size() * sizeof(float));
}

Result<std::vector<int32_t>> SessionImpl::EndIds(const GenerateOptions& options) const {
  std::vector<int32_t> ends;
  if (!options.ignore_eos) ends = core_.config.eos_ids;
  if (options.stop.empty()) return ends;
  OKV_RETURN_IF_ERROR(NeedTokenizer(core_).Prefixed("`stop`"));
  const Tokenizer& tokenizer = *core_.text.tokenizer;
  for (const std::string& stop : options.stop) {
    const std::optional<int32_t> id = tokenizer.TokenToId(stop);
    if (id && tokenizer.IsSpecial(*id)) ends.push_back(*id);
  }
  return ends;
}

Result<GenerateResult> SessionImpl::Generate(const GenerateOptions& options,
                                             const OnText& on_text) {
  OKV_RETURN_IF_ERROR(CheckGenerate(options));
  OKV_ASSIGN_OR_RETURN(const std::vector<int32_t> ends, EndIds(options));
  if (!has_logits_) return InvalidArgument("there is no prompt to go on from");
  const auto start = Clock::now();
  stats_.decode_tokens = 0;
  SamplingOptions sampling = options.sampling;
  if (random_ && random_->seed == sampling.seed) sampling.seed = random_->state;
  Sampler sampler(sampling, core_.config.vocab);
  for (int32_t t : tokens_) sampler.See(t);
  if (pending_ >= 0) sampler.See(pending_);
  StopText text(options.stop);
  std::unique_ptr<StreamDecoder> decoder;
  if (core_.text.tokenizer != nullptr) {
    decoder = std::make_unique<StreamDecoder>(core_.text.tokenizer.get());
  }
  GenerateResult result;
  bool going = true;
  const auto emit = [&](const std::string& piece) {
    result.text += piece;
    if (!piece.empty() && on_text && !on_text(piece)) going = false;
  };
  Ahead ahead;
  Status failure;  // ends it, and leaves what was generated in context
  while (static_cast<int64_t>(result.tokens.size()) < options.max_tokens && going) {
    if (TakeCancelled()) {
      result.finish_reason = FinishReason::kCancelled;
      break;
    }
    const bool full = static_cast<int64_t>(tokens_.size()) == core_.bank->config().max_tokens;
    if (pending_ >= 0 && full) break;  // kLength
    int32_t token = -1;
    if (pending_ >= 0) ++stats_.decode_tokens;
    if (pending_ >= 0 && core_.backend->OnDevice()) {
      const int64_t wanted = options.max_tokens - static_cast<int64_t>(result.tokens.size());
      const auto next = NextAhead(ahead, sampler, wanted);
      failure = next.status();
      if (next.ok()) token = *next;
    } else {
      if (pending_ >= 0) failure = Step(pending_);
      if (failure.ok()) token = sampler.Sample(logits_.data());
    }
    if (!failure.ok()) break;
    result.tokens.push_back(token);
    pending_ = token;
    if (std::find(ends.begin(), ends.end(), token) != ends.end()) {
      result.finish_reason = FinishReason::kStop;
      break;
    }
    if (decoder != nullptr) {
      const Result<std::string> piece = decoder->Push(token);
      failure = piece.status();
      if (!failure.ok()) break;
      emit(text.Push(*piece));
    }
    if (text.stopped()) {
      result.finish_reason = FinishReason::kStop;
      break;
    }
  }
  if (!going) result.finish_reason = FinishReason::kCancelled;
  EndAhead(ahead);
  random_ = {.seed = options.sampling.seed, .state = sampler.meta().random};
  if (!failure.ok()) return failure;
  if (decoder != nullptr && !text.stopped()) {
    OKV_ASSIGN_OR_RETURN(const std::string rest, decoder->Flush());
    emit(text.Push(rest));
    emit(text.Flush());
  }
  stats_.decode_seconds = Seconds(start);
  TakeCancelled();  // one that came too late for this call is not for the next
  return result;
}

Result<std::unique_ptr<Session>> SessionImpl::Fork() {
  auto fork = std::make_unique<SessionImpl>(core_, options_);
  OKV_RETURN_IF_ERROR(fork->Open(this));
  return std::unique_ptr<Session>(std::move(fork));
}

Status SessionImpl::FillContext(int64_t tokens) {
  const int64_t context = core_.bank->config().max_tokens;
  if (tokens < 1 || tokens > context) {
    return InvalidArgument(fmt::format(
        "{} made-up tokens are asked for, expected 1 to the context of {}", tokens, context));
  }
  StartOver(0);
  OKV_RETURN_IF_ERROR(AppendMadeUp(core_, *policy_, seq_, tokens));
  tokens_.assign(static_cast<size_t>(tokens), 0);
  ChooseRopes(tokens);
  prompt_len_ = tokens;
  OKV_RETURN_IF_ERROR(policy_->AfterPrefill(tokens));
  settled_ = true;
  has_logits_ = true;
  return {};
}

void SessionImpl::AddHeld(SessionStats& stats) const {
  const Bank& bank = *core_.bank;
  const size_t stages = Bank::StageBytes(bank.config());
  const size_t all = bank.OwnBytes() + stages + core_.policy_bytes + core_.set_bytes;
  stats.held_bytes.host = bank.HostBytes();
  (core_.backend->OnDevice() ? stats.held_bytes.device : stats.held_bytes.host) += all;
  const size_t kv = static_cast<size_t>(bank.Length(seq_)) * Bank::BytesPerToken(bank.config());
  if (kv == 0) return;
  const size_t own = bank.OwnBytes(seq_) + stages + policy_->Bytes() + residency_->Bytes();
  stats.held_fraction = static_cast<double>(own) / static_cast<double>(kv);
}

SessionStats SessionImpl::stats() const {
  SessionStats stats = stats_;
  const int64_t length = core_.bank->Length(seq_);
  stats.settings = settings_.ToString();
  stats.context_tokens = length;
  stats.budget_tokens = policy_->Budget(length);
  const SeqLength at{.tokens = length, .prompt = prompt_len_};
  stats.attended_tokens = AttendedTokens(core_.config, *policy_, at);
  stats.read_fraction = ReadFraction(core_, *policy_, at);
  AddHeld(stats);
  stats.transfer_bytes_per_step = residency_->StreamedBytes();
  if (steps_since_reset_ == 0) return stats;
  if (const auto rows = residency_->Count()) {
    stats.transfer_bytes_per_step = rows->missed_bytes / static_cast<size_t>(steps_since_reset_);
    if (rows->selected > 0) {
      stats.hit_rate = 1 - static_cast<double>(rows->missed) / static_cast<double>(rows->selected);
    }
  }
  return stats;
}

}  // namespace

Result<std::unique_ptr<Session>> MakeSession(EngineCore& core, const PolicyOptions& policy) {
  auto session = std::make_unique<SessionImpl>(core, policy);
  OKV_RETURN_IF_ERROR(session->Open(nullptr));
  return std::unique_ptr<Session>(std::move(session));
}

}  // namespace omnikv
