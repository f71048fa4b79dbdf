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
#include "base/printable.h"
#include "engine/answer.h"
#include "engine/context_file.h"
#include "engine/holdings.h"
#include "engine/kept_contexts.h"
#include "engine/prompt_chunks.h"
#include "engine/stepper.h"

namespace omnikv {
namespace {

std::string StateText(const StateSpec& s) {
  return fmt::format("{} bytes of {} per {} tokens of layer {}", s.bytes_per_unit,
                     Printable(s.name), s.unit, s.layer);
}

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
  SessionImpl(EngineCore& core, PolicyOptions options, const PolicyInfo* own = nullptr)
      : core_(core), options_(std::move(options)), own_(own), stepper_(core) {}

  const RowGroup& group() const { return *group_; }
  int32_t pending() const { return pending_; }

  // The session's own state, on a new sequence or on a fork of `from`.
  Status Open(const SessionImpl* from);
  // The same with the tokens of `from`, of another policy, as the prompt.
  Status OpenWithPromptOf(const SessionImpl& from);
  // The same as a file has it.
  Status OpenSaved(const CheckedFile& file, const SavedContext& saved);

  Status Prompt(const std::vector<int32_t>& tokens, const Progress& progress) override;
  Status PrefillLogits(const std::vector<int32_t>& tokens,
                       const std::function<void(int64_t, const float*)>& sink) override;
  Result<GenerateResult> Generate(const GenerateOptions& options, const OnText& on_text) override;
  Status Step(int32_t token) override;
  const float* logits() const override { return logits_.data(); }
  Result<std::unique_ptr<Session>> Fork() override;
  Result<std::unique_ptr<Session>> Fork(const PolicyOptions& policy) override;
  Status Save(const std::string& path) override;
  Status FillContext(int64_t tokens) override;
  void Cancel() override { cancelled_.store(true, std::memory_order_relaxed); }
  const std::vector<int32_t>& tokens() const override { return tokens_; }
  SessionStats stats() const override;

 private:
  using Sink = std::function<void(int64_t, const float*)>;
  Status OpenGroup();
  Status Prefill(const std::vector<int32_t>& tokens, const Progress& progress, const Sink& sink);
  // Makes the rows of a prompt that ended early the whole of it, for the policy too, whose state
  // may be that of the prompt's last rows: these are fed anew.
  Status Settle();
  // Tokens of `from` whose rows this session's policy would have made as they are.
  int64_t Shares(const SessionImpl& from) const;
  // A token that a decode step has computed.
  void AddToken(int32_t token);
  // Forgets the tokens from `keep` on, and what followed from them.
  void StartOver(int64_t keep);
  // Ends steps that went ahead, and brings the logits of the last that was read.
  void EndAhead(StepsAhead& ahead);
  Policy& policy() const { return group_->policy(); }
  void ChooseRopes(int64_t length) {
    rope_length_ = length;
    group_->ropes().Choose(*core_.backend, core_.config, length);
  }
  void AddHeld(SessionStats& stats) const;
  bool TakeCancelled() { return cancelled_.exchange(false, std::memory_order_relaxed); }

  EngineCore& core_;
  PolicyOptions options_;
  const PolicyInfo* own_;
  Stepper stepper_;
  std::unique_ptr<RowGroup> group_;  // of one sequence, member 0
  std::vector<int32_t> tokens_;      // in the bank
  std::vector<float> logits_;        // [vocab], after the last token
  int64_t steps_since_reset_ = 0;    // decode steps whose transfers the group has counted
  bool settled_ = false;    // the policy knows all prompts' tokens: the last came to its end
  int64_t dense_rows_ = 0;  // the first ones, each computed from all before it, in all layers
  PromptChunks chunks_;
  int64_t rope_length_ = 0;  // the context, in tokens, that the keys in the bank are rotated for
  int32_t pending_ = -1;     // sampled, not yet in the bank
  bool has_logits_ = false;
  std::optional<SavedContext::Random> random_;  // of the last Generate since the prompt
  std::atomic<bool> cancelled_{false};
  SessionStats stats_;
};

Status SessionImpl::OpenGroup() {
  OKV_ASSIGN_OR_RETURN(group_, RowGroup::Open(core_, options_, 1, own_));
  logits_.resize(static_cast<size_t>(core_.config.vocab));
  stats_.device = core_.backend->Name();
  stats_.policy = group_->policy_name();
  stats_.dense_prompts = group_->DensePrompts();
  chunks_ = PromptChunks(policy().PromptStepRows());
  return {};
}

Status SessionImpl::Open(const SessionImpl* from) {
  OKV_RETURN_IF_ERROR(OpenGroup());
  if (from == nullptr) return group_->Join().status();
  OKV_RETURN_IF_ERROR(group_->JoinFork(*from->group_).status());
  ChooseRopes(from->rope_length_);
  tokens_ = from->tokens_;
  logits_ = from->logits_;
  settled_ = from->settled_;
  dense_rows_ = from->dense_rows_;
  chunks_ = from->chunks_;
  pending_ = from->pending_;
  has_logits_ = from->has_logits_;
  random_ = from->random_;
  return {};
}

int64_t SessionImpl::Shares(const SessionImpl& from) const {
  if (!from.group_->DensePrompts()) return 0;
  return ShareableTokens(
      core_, *group_, /*key=*/"",
      {.seq = from.group_->seq(0), .tokens = from.tokens_, .dense_rows = from.dense_rows_},
      from.tokens_);
}

Status SessionImpl::OpenWithPromptOf(const SessionImpl& from) {
  OKV_RETURN_IF_ERROR(OpenGroup());
  const int64_t shared = Shares(from);
  if (shared == 0) {
    OKV_RETURN_IF_ERROR(group_->Join().status());
  } else {
    OKV_RETURN_IF_ERROR(group_->JoinPrefix(from.group_->seq(0), shared).status());
    ChooseRopes(from.rope_length_);
    tokens_.assign(from.tokens_.begin(), from.tokens_.begin() + shared);
    dense_rows_ = shared;
    OKV_RETURN_IF_ERROR(stepper_.MakeStates(*group_, 0));
  }
  if (from.tokens_.empty()) return {};
  const int64_t warm = group_->WarmRows(0);
  OKV_RETURN_IF_ERROR(Prefill(from.tokens_, {}, {}));
  stats_.recomputed_tokens = std::max<int64_t>(0, stats_.prefill_tokens - warm);
  return {};
}

void SessionImpl::StartOver(int64_t keep) {
  group_->CutTo(0, keep);
  steps_since_reset_ = 0;
  tokens_.resize(static_cast<size_t>(keep));
  settled_ = false;
  dense_rows_ = std::min(dense_rows_, keep);
  chunks_.Cut(keep);
  pending_ = -1;
  has_logits_ = false;
  random_.reset();
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
  int64_t held = 0;
  if (!sink) {
    held = CommonTokens(tokens, tokens_);
    held = std::max<int64_t>(0, std::min(held, total - group_->WarmRows(0)));
    const bool cut = held < static_cast<int64_t>(tokens_.size());
    const int64_t whole = chunks_.WholeUpTo(held);
    const bool stays = !LongropeParts(core_.config, rope_length_, total) &&
                       (!cut || policy().CutsBack()) &&
                       CanGoOnFrom(core_, policy(), group_->seq(0), whole);
    keep = stays ? whole : 0;
  }
  // A choice that is still to come is made layer by layer, of all rows.
  if (core_.plan.by_layer && group_->residency().AwaitsChoice(0)) keep = 0;
  StartOver(keep);
  if (keep == 0) ChooseRopes(total);
  const int32_t most = core_.work.max_rows;
  const int32_t chunk = sink ? std::min(core_.work.max_out, most) : most;
  if (const int32_t together = std::max(policy().LastRows(), policy().PromptStepRows());
      sink && together > chunk) {
    return Unsupported(fmt::format(
        "policy {} chooses from {} rows of a prompt together, but logits come of {} rows",
        group_->policy_name(), together, chunk));
  }
  OKV_ASSIGN_OR_RETURN(PromptSteps steps, PromptSteps::Begin(stepper_, *group_, 0, tokens,
                                                             /*all_logits=*/sink != nullptr));
  while (!steps.done()) {
    const bool dense = group_->DensePrompts() && dense_rows_ == steps.computed();
    if (const Status done = steps.Advance(); !done.ok()) {
      StartOver(steps.computed());
      return done;
    }
    for (int32_t r = 0; r < steps.n_out(); ++r) {
      const int64_t row = steps.pos() - steps.n_out() + r;
      if (const Status read = stepper_.Logits(r, row + 1, logits_.data()); !read.ok()) {
        StartOver(0);
        return read;
      }
      if (sink) sink(row, logits_.data());
    }
    if (dense) dense_rows_ = steps.computed();
    chunks_.Add(static_cast<int64_t>(tokens_.size()), steps.computed());
    tokens_.assign(tokens.begin(), tokens.begin() + steps.computed());
    if (progress) progress(steps.progress() - keep, total - keep);
    if (TakeCancelled()) {
      return Cancelled(fmt::format("cancelled after {} of {} tokens", steps.computed(), total));
    }
  }
  core_.backend->Synchronize();
  stats_.prefill_tokens = total - keep;
  stats_.recomputed_tokens = held - keep;
  stats_.prefill_seconds = Seconds(start);
  stats_.decode_tokens = 0;
  stats_.decode_seconds = 0;
  OKV_RETURN_IF_ERROR(policy().AfterPrefill(total));
  settled_ = true;
  has_logits_ = true;
  return {};
}

Status SessionImpl::Settle() {
  if (settled_ || tokens_.empty()) return {};
  if (group_->WarmRows(0) > 1 || group_->residency().AwaitsChoice(0))
    return Prefill(std::vector<int32_t>(tokens_), {}, {});
  OKV_RETURN_IF_ERROR(policy().AfterPrefill(group_->prompt_length(0)));
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
  const DecodeRow row{.group = group_.get(), .token = token};
  float* const logits = logits_.data();
  OKV_RETURN_IF_ERROR(stepper_.Step({&row, 1}, {&logits, 1}));
  ++steps_since_reset_;
  AddToken(token);
  pending_ = -1;
  has_logits_ = true;
  return {};
}

void SessionImpl::AddToken(int32_t token) {
  tokens_.push_back(token);
  const auto length = static_cast<int64_t>(tokens_.size());
  if (group_->ReadsAll() && dense_rows_ == length - 1) dense_rows_ = length;
}

void SessionImpl::EndAhead(StepsAhead& ahead) {
  ahead.End();
  steps_since_reset_ += ahead.launches();
  if (ahead.reads() == 0) return;
  core_.backend->Download(
      logits_.data(),
      core_.work.logits.as<float>() + int64_t{ahead.logits_row()} * core_.config.vocab,
      logits_.size() * sizeof(float));
}

Result<GenerateResult> SessionImpl::Generate(const GenerateOptions& options,
                                             const OnText& on_text) {
  OKV_RETURN_IF_ERROR(CheckGenerate(options));
  if (!has_logits_) return InvalidArgument("there is no prompt to go on from");
  const auto start = Clock::now();
  stats_.decode_tokens = 0;
  GenerateOptions goes_on = options;
  if (random_ && random_->seed == options.sampling.seed) goes_on.sampling.seed = random_->state;
  OKV_ASSIGN_OR_RETURN(Answer answer, Answer::Begin(core_, goes_on, tokens_));
  Sampler& sampler = answer.sampler();
  if (pending_ >= 0) sampler.See(pending_);
  const bool goes_ahead = core_.backend->OnDevice() && !sampler.ChangesLogits();
  GenerateResult result;
  bool going = true;
  const auto emit = [&](const std::string& piece) {
    result.text += piece;
    if (!piece.empty() && on_text && !on_text(piece)) going = false;
  };
  std::optional<StepsAhead> ahead;
  Status failure;  // ends it, and leaves what was generated in context
  while (!answer.ended() && going) {
    if (TakeCancelled()) {
      result.finish_reason = FinishReason::kCancelled;
      break;
    }
    const bool full = static_cast<int64_t>(tokens_.size()) == core_.bank->config().max_tokens;
    if (pending_ >= 0 && full) break;  // kLength
    int32_t token = -1;
    if (pending_ >= 0) ++stats_.decode_tokens;
    if (pending_ >= 0 && goes_ahead) {
      if (!ahead) {
        const DecodeRow row{.group = group_.get(), .token = pending_};
        ahead.emplace(stepper_, std::vector{row}, std::vector{&sampler});
      }
      const auto next = ahead->Read(answer.left());
      failure = next.status();
      if (next.ok()) {
        AddToken(pending_);
        token = next->front().token;
      }
    } else {
      if (pending_ >= 0) failure = Step(pending_);
      if (failure.ok()) token = sampler.Sample(logits_.data());
    }
    // What a layer has room for is full, as a context may be.
    if (failure.code() == StatusCode::kResourceExhausted &&
        !group_->residency().CheckRoom(group_->seq(0), 1).ok()) {
      failure = {};
      break;  // kLength
    }
    if (!failure.ok()) break;
    pending_ = token;
    const Result<std::string> piece = answer.Take(token);
    failure = piece.status();
    if (!failure.ok()) break;
    emit(*piece);
    result.finish_reason = answer.reason();
  }
  if (!going) result.finish_reason = FinishReason::kCancelled;
  if (ahead) EndAhead(*ahead);
  random_ = {.seed = options.sampling.seed, .state = sampler.meta().random};
  if (!failure.ok()) return failure;
  OKV_ASSIGN_OR_RETURN(const std::string rest, answer.Flush());
  emit(rest);
  result.tokens = answer.tokens();
  stats_.decode_seconds = Seconds(start);
  TakeCancelled();  // one that came too late for this call is not for the next
  return result;
}

Result<std::unique_ptr<Session>> SessionImpl::Fork() {
  auto fork = std::make_unique<SessionImpl>(core_, options_, own_);
  OKV_RETURN_IF_ERROR(fork->Open(this));
  return std::unique_ptr<Session>(std::move(fork));
}

Result<std::unique_ptr<Session>> SessionImpl::Fork(const PolicyOptions& policy) {
  auto fork = std::make_unique<SessionImpl>(core_, policy);
  OKV_RETURN_IF_ERROR(fork->OpenWithPromptOf(*this));
  return std::unique_ptr<Session>(std::move(fork));
}

Status SessionImpl::Save(const std::string& path) {
  Backend& backend = *core_.backend;
  backend.Synchronize();
  const auto length = static_cast<int64_t>(tokens_.size());
  const std::string state = policy().SaveState(/*seq=*/0, length);
  SavedContext saved{.model = ModelMarks(core_),
                     .policy = options_,
                     .resolved = group_->settings().ToString(),
                     .policy_bytes = state.size(),
                     .image = core_.bank->Image(group_->seq(0)),
                     .prompt_length = group_->prompt_length(0),
                     .rope_length = rope_length_,
                     .dense_rows = dense_rows_,
                     .chunks = chunks_.runs(),
                     .pending = pending_,
                     .settled = settled_,
                     .prompted = !group_->residency().AwaitsChoice(0),
                     .has_logits = has_logits_,
                     .random = random_};
  saved.policy.name = group_->policy_name();
  const StateStreams states = group_->AllStates();
  for (const auto& stream : states) saved.streams.push_back(stream->spec);
  OKV_ASSIGN_OR_RETURN(const auto file,
                       CheckedFileWriter::Create(path, kContextFile, TextOf(saved)));
  file->Write(tokens_.data(), tokens_.size() * sizeof(int32_t));
  file->Write(logits_.data(), logits_.size() * sizeof(float));
  file->Write(state.data(), state.size());
  core_.bank->Export(group_->seq(0), states,
                     [&](const void* data, size_t bytes) { file->Write(data, bytes); });
  OKV_RETURN_IF_ERROR(backend.TakeFailure());
  return file->Commit();
}

Status SessionImpl::OpenSaved(const CheckedFile& file, const SavedContext& saved) {
  OKV_RETURN_IF_ERROR(Open(nullptr));
  if (const std::string here = group_->settings().ToString(); here != saved.resolved) {
    return InvalidArgument(fmt::format("policy {} had {}, but here it would have '{}'",
                                       saved.policy.name, Printable(saved.resolved), here));
  }
  OKV_RETURN_IF_ERROR(CheckImage(core_.bank->config(), saved.image));
  const StateStreams states = group_->AllStates();
  // Of another version of a policy, or damaged.
  const auto [here, there] =
      std::mismatch(states.begin(), states.end(), saved.streams.begin(), saved.streams.end(),
                    [](const auto& stream, const StateSpec& spec) { return stream->spec == spec; });
  if (here != states.end() || there != saved.streams.end()) {
    return Corrupt(fmt::format(
        "what its policy keeps is not what policy {} keeps of this model: it has {}, expected {}",
        saved.policy.name, there == saved.streams.end() ? "no more" : StateText(*there),
        here == states.end() ? "no more" : StateText((*here)->spec)));
  }
  const Keeps keeps = policy().Kept();
  for (size_t i = 0; i < saved.image.tables.size(); ++i) {
    const SequenceImage::Table& table = saved.image.tables[i];
    const bool may_lose = keeps.rows > 0 && core_.bank->config().tables[i].window == 0;
    const bool may_evict = may_lose && keeps.every_step && table.most == keeps.rows;
    if ((table.gone > 0 && !may_lose) || (table.most > 0 && !may_evict)) {
      return Corrupt(fmt::format("its rows were lost in a way that policy {} never loses any",
                                 saved.policy.name));
    }
  }
  if (!saved.image.fewer.empty() && !keeps.LayersDiffer()) {
    return Corrupt(
        fmt::format("its layers have different numbers of rows, which policy {} never keeps",
                    saved.policy.name));
  }
  size_t at = 0;
  const auto read = [&](void* to, size_t bytes) {
    const Status status = file.Read(at, bytes, to);
    at += bytes;
    return status;
  };
  const auto length = static_cast<size_t>(saved.image.length);
  const size_t before = length * sizeof(int32_t) + logits_.size() * sizeof(float);
  if (before > file.size() || saved.policy_bytes > file.size() - before) {
    return Corrupt(fmt::format("has no room for {} tokens and {} bytes of its policy", length,
                               saved.policy_bytes));
  }
  tokens_.resize(length);
  OKV_RETURN_IF_ERROR(read(tokens_.data(), length * sizeof(int32_t)));
  if (const Status known = tokens_.empty() ? Status() : CheckTokens(core_, tokens_); !known.ok()) {
    return Corrupt(known.message());
  }
  OKV_RETURN_IF_ERROR(read(logits_.data(), logits_.size() * sizeof(float)));
  if (saved.has_logits && !AllFinite(logits_.data(), core_.config.vocab)) {
    return Corrupt("its logits are not finite");
  }
  if (saved.pending >= core_.config.vocab || (saved.has_logits && tokens_.empty())) {
    return Corrupt(fmt::format("goes on with token {} after {} tokens", saved.pending, length));
  }
  std::string state(saved.policy_bytes, '\0');
  OKV_RETURN_IF_ERROR(read(state.data(), state.size()));
  const int32_t seq = group_->seq(0);
  OKV_RETURN_IF_ERROR(core_.bank->Import(seq, saved.image, states, file.size() - at, read));
  if (!CanGoOnFrom(core_, policy(), seq, saved.image.length)) {
    return Corrupt("lacks rows that the next token would read");
  }
  if (!policy().LoadState(/*seq=*/0, saved.image.length, state)) {
    return Corrupt(
        fmt::format("{} bytes are no state of policy {}", state.size(), saved.policy.name));
  }
  group_->set_prompt_length(0, saved.prompt_length);
  group_->residency().Resume(0, seq, saved.prompted);
  if (length > 0) ChooseRopes(saved.rope_length);
  dense_rows_ = saved.dense_rows;
  chunks_ = PromptChunks(policy().PromptStepRows(), saved.chunks);
  settled_ = saved.settled;
  pending_ = saved.pending;
  has_logits_ = saved.has_logits;
  random_ = saved.random;
  return core_.backend->TakeFailure();
}

Status SessionImpl::FillContext(int64_t tokens) {
  const int64_t context = core_.bank->config().max_tokens;
  if (tokens < 1 || tokens > context) {
    return InvalidArgument(fmt::format(
        "{} made-up tokens are asked for, expected 1 to the context of {}", tokens, context));
  }
  StartOver(0);
  OKV_RETURN_IF_ERROR(stepper_.MadeUpChunks(*group_, 0, tokens));
  tokens_.assign(static_cast<size_t>(tokens), 0);
  dense_rows_ = tokens;
  ChooseRopes(tokens);
  OKV_RETURN_IF_ERROR(policy().AfterPrefill(tokens));
  settled_ = true;
  has_logits_ = true;
  return {};
}

void SessionImpl::AddHeld(SessionStats& stats) const {
  const Bank& bank = *core_.bank;
  const size_t stages = Bank::StageBytes(bank.config());
  stats.held_bytes = HoldingsOf(core_).bytes;
  const size_t kv = static_cast<size_t>(group_->length(0)) * Bank::BytesPerToken(bank.config());
  if (kv == 0) return;
  const size_t own = bank.DeviceBytes(group_->seq(0), group_->AllStates()) + stages +
                     policy().Bytes() + group_->residency().Bytes();
  stats.held_fraction = static_cast<double>(own) / static_cast<double>(kv);
}

SessionStats SessionImpl::stats() const {
  SessionStats stats = stats_;
  const SeqLength at = group_->lengths(0);
  stats.settings = group_->settings().ToString();
  stats.context_tokens = at.tokens;
  stats.budget_tokens = policy().Budget(at.tokens);
  stats.attended_tokens = AttendedTokens(core_.config, policy(), /*seq=*/0, at);
  stats.read_fraction = ReadFraction(core_, policy(), /*seq=*/0, at);
  AddHeld(stats);
  stats.transfer_bytes_per_step = group_->residency().StreamedBytes();
  if (steps_since_reset_ == 0) return stats;
  if (group_->residency().CanRecord()) {
    stats.transfer_bytes_per_step = BytesReadAway(core_, policy(), at);
  }
  if (const auto rows = group_->residency().CountBytes()) {
    stats.transfer_bytes_per_step = rows->missed_bytes / static_cast<size_t>(steps_since_reset_);
    stats.hit_rate = rows->HitRate({});
  }
  return stats;
}

}  // namespace

Result<std::unique_ptr<Session>> MakeSession(EngineCore& core, const PolicyOptions& policy,
                                             const PolicyInfo* own) {
  auto session = std::make_unique<SessionImpl>(core, policy, own);
  OKV_RETURN_IF_ERROR(session->Open(nullptr));
  return std::unique_ptr<Session>(std::move(session));
}

const RowGroup& GroupOf(const Session& session) {
  return static_cast<const SessionImpl&>(session).group();
}

int32_t PendingToken(const Session& session) {
  return static_cast<const SessionImpl&>(session).pending();
}

Result<std::unique_ptr<Session>> RestoreSession(EngineCore& core, const std::string& path) {
  OKV_ASSIGN_OR_RETURN(InputFile input, InputFile::Open(path));
  OKV_ASSIGN_OR_RETURN(const CheckedFile file, CheckedFile::Open(std::move(input), kContextFile));
  const Result<SavedContext> saved = ParseSavedContext(file.text());
  if (!saved.ok()) return saved.status().Prefixed(path);
  OKV_RETURN_IF_ERROR(CheckModelMarks(ModelMarks(core), saved->model).Prefixed(path));
  auto session = std::make_unique<SessionImpl>(core, saved->policy);
  OKV_RETURN_IF_ERROR(session->OpenSaved(file, *saved).Prefixed(path));
  return std::unique_ptr<Session>(std::move(session));
}

}  // namespace omnikv
