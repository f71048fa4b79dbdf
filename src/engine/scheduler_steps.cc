// The steps of the requests that run: which rows each has, and what comes of them.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "base/check.h"
#include "engine/scheduler.h"

namespace omnikv {
namespace {

// What log-probabilities are less than their logits.
double LogSum(std::span<const float> logits) {
  const double most = *std::max_element(logits.begin(), logits.end());
  const double sum =
      std::accumulate(logits.begin(), logits.end(), 0.0, [&](double total, float logit) {
        return total + std::exp(static_cast<double>(logit) - most);
      });
  return most + std::log(sum);
}

std::vector<ScoredToken> TopTokens(std::span<const float> logits, int32_t n, double log_sum) {
  std::vector<int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  const auto least = static_cast<ptrdiff_t>(std::min<size_t>(static_cast<size_t>(n), order.size()));
  std::partial_sort(order.begin(), order.begin() + least, order.end(), [&](int32_t a, int32_t b) {
    const float la = logits[static_cast<size_t>(a)];
    const float lb = logits[static_cast<size_t>(b)];
    return la != lb ? la > lb : a < b;
  });
  std::vector<ScoredToken> top;
  for (ptrdiff_t i = 0; i < least; ++i) {
    const int32_t token = order[static_cast<size_t>(i)];
    top.push_back({token, logits[static_cast<size_t>(token)] - log_sum});
  }
  return top;
}

// While it lives, steps are shown to `watch`, if that watches anything.
class Watching {
 public:
  Watching(Stepper& stepper, ReadWatch& watch) : stepper_(stepper) {
    if (!watch.empty()) stepper_.set_watch(&watch);
  }
  ~Watching() { stepper_.set_watch(nullptr); }
  Watching(const Watching&) = delete;
  Watching& operator=(const Watching&) = delete;

 private:
  Stepper& stepper_;
};

}  // namespace

bool Scheduler::ReadsByItself(const Sequence& s) {
  const RowGroup& rows = *s.group->rows;
  return rows.PassesByLayer(s.member) || rows.AwaitsPasses(s.member);
}

Scheduler::Sequence* Scheduler::NextPrompt() {
  const bool taken = std::any_of(running_.begin(), running_.end(), [](const Sequence& s) {
    return s.prompt && !s.ended && s.by_itself;
  });
  Sequence* next = nullptr;  // whose turn is the longest ago
  for (Sequence& s : running_) {
    if (s.ended || s.read || (taken && !s.prompt && ReadsByItself(s))) continue;
    if (next == nullptr || s.turn < next->turn) next = &s;
  }
  return next;
}

void Scheduler::Decoding(const Sequence* prompt, Sequences& together, Sequences& alone) {
  std::vector<Group*> groups;
  for (Group& group : groups_.groups()) {
    if (group.used > 0) groups.push_back(&group);
  }
  std::sort(groups.begin(), groups.end(),
            [](const Group* a, const Group* b) { return a->last_step < b->last_step; });
  // A step has an entry for each number of a sequence in each of its groups.
  int32_t room = core_.work.max_rows - (prompt != nullptr ? prompt->group->rows->max_seqs() : 0);
  for (Group* group : groups) {
    Sequences members;
    for (Sequence& s : running_) {
      if (s.group == group && s.read && !s.ended) members.push_back(&s);
    }
    if (!group->rows->residency().CanRecord()) {
      alone.insert(alone.end(), members.begin(), members.end());
    } else if (!members.empty() && group->rows->max_seqs() <= room) {
      room -= group->rows->max_seqs();
      group->last_step = ++n_steps_;
      together.insert(together.end(), members.begin(), members.end());
    }
  }
}

bool Scheduler::DeviceDraws(const Sequences& rows) const {
  return core_.backend->OnDevice() && !rows.empty() &&
         std::all_of(rows.begin(), rows.end(), [](const Sequence* s) {
           return s->request.top_logprobs < 0 && s->request.filter == nullptr &&
                  !s->request.on_reads && !s->answer.sampler().ChangesLogits();
         });
}

Status Scheduler::StepAhead(const Sequences& rows) {
  if (!ahead_ || rows != ahead_rows_) {
    EndAhead();
    std::vector<DecodeRow> decode;
    std::vector<Sampler*> samplers;
    for (Sequence* s : rows) {
      decode.push_back({s->group->rows.get(), s->member, s->next});
      samplers.push_back(&s->answer.sampler());
    }
    ahead_.emplace(stepper_, std::move(decode), std::move(samplers));
    ahead_rows_ = rows;
    ahead_read_ = 0;
  }
  int64_t wanted = rows.front()->answer.left();
  for (const Sequence* s : rows) wanted = std::min(wanted, s->answer.left());
  OKV_ASSIGN_OR_RETURN(const auto read, ahead_->Read(wanted));
  const auto before = std::exchange(ahead_read_at_, Clock::now());
  // The first ones are recorded, and those in flight came at once.
  constexpr int64_t kFirst = int64_t{StepsAhead::kMost} * MixedSteps::kFirstRecorded;
  if (++ahead_read_ > kFirst) CountAlone(1e3 * Seconds(before, ahead_read_at_));
  CountStep(rows);
  std::vector<int32_t> drawn;
  for (const DecodeRow& row : read) drawn.push_back(row.token);
  for (Sequence* s : rows) Appended(*s);
  for (size_t r = 0; r < rows.size(); ++r) Drawn(*rows[r], drawn[r]);
  return {};
}

void Scheduler::CountAlone(double ms) {
  constexpr double kNew = 0.2;  // the last steps count
  alone_ms_ = alone_ms_ == 0 ? ms : (1 - kNew) * alone_ms_ + kNew * ms;
}

void Scheduler::CountStep(const Sequences& rows) {
  if (rows.empty()) return;
  const std::lock_guard lock(mutex_);
  ++stats_.steps;
  stats_.step_rows += std::ssize(rows);
}

void Scheduler::EndAhead() {
  if (!ahead_) return;
  ahead_->End();
  ahead_.reset();
  ahead_rows_.clear();
}

void Scheduler::Together(const Sequences& rows, Sequence* prompt) {
  if (prompt != nullptr && !rows.empty()) {
    const Status begun = BeginPrompt(*prompt);
    if (!begun.ok()) End(*prompt, begun);
    const bool apart =
        prompt->ended || !prompt->prompt->TakesCompany(static_cast<int32_t>(rows.size()));
    if (apart) {
      if (const Status ran = StepOf(rows, nullptr); !ran.ok()) Apart(rows, nullptr, ran);
      if (!prompt->ended) Together({}, prompt);
      return;
    }
  }
  if (const Status ran = StepOf(rows, prompt); !ran.ok()) Apart(rows, prompt, ran);
}

void Scheduler::Apart(const Sequences& rows, Sequence* prompt, const Status& failure) {
  EndAhead();
  if (rows.size() + (prompt != nullptr ? 1 : 0) == 1) {
    return End(prompt != nullptr ? *prompt : *rows.front(), failure);
  }
  for (Sequence* s : rows) {
    if (const Status ran = StepOf({s}, nullptr); !ran.ok()) End(*s, ran);
  }
  if (prompt == nullptr) return;
  if (prompt->failed_once) return End(*prompt, failure);
  prompt->failed_once = true;  // its next chunk may do without the row that failed
  prompt->prompt.reset();
  prompt->tokens.resize(static_cast<size_t>(prompt->group->rows->length(prompt->member)));
  prompt->dense_rows = std::min<int64_t>(prompt->dense_rows, std::ssize(prompt->tokens));
}

Status Scheduler::BeginPrompt(Sequence& s) {
  if (s.prompt) return {};
  OKV_ASSIGN_OR_RETURN(PromptSteps steps,
                       PromptSteps::Begin(stepper_, *s.group->rows, s.member, s.request.prompt,
                                          /*all_logits=*/false));
  s.by_itself = ReadsByItself(s);
  s.prompt.emplace(std::move(steps));
  return {};
}

Status Scheduler::StepOf(const Sequences& rows, Sequence* prompt) {
  std::vector<DecodeRow> decode;
  std::vector<float*> logits;
  std::vector<Sampler*> samplers;
  std::vector<int32_t> drawn(rows.size());
  for (Sequence* s : rows) {
    decode.push_back({s->group->rows.get(), s->member, s->next});
    logits.push_back(s->logits.data());
    samplers.push_back(&s->answer.sampler());
  }
  const BackendDraws by_device{.samplers = samplers, .tokens = drawn};
  const BackendDraws* const draws = DeviceDraws(rows) ? &by_device : nullptr;
  ReadWatch watch(core_);
  const std::vector<int32_t> watched = WatchReads(rows, watch);
  const Watching watching(stepper_, watch);
  const auto start = Clock::now();
  const auto took = [&] {
    return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
  };
  int64_t before = 0;
  if (prompt == nullptr) {
    OKV_RETURN_IF_ERROR(stepper_.Step(decode, logits, nullptr, draws));
    if (watch.empty()) CountAlone(took());
  } else {
    OKV_RETURN_IF_ERROR(BeginPrompt(*prompt));
    prompt->turn = ++turns_;
    PromptSteps::Company company{.rows = decode, .logits = logits, .draws = draws};
    if (!rows.empty()) {
      const double limit = std::max(options_.token_ms, 2 * alone_ms_);
      const auto beside =
          static_cast<int32_t>(core_.options.shared_products ? rows.size() : size_t{0});
      const int32_t most = core_.work.max_rows - static_cast<int32_t>(rows.size());
      const int32_t tile =
          core_.backend->OnDevice() ? ChunkPacer::kTileOfCard : ChunkPacer::kTileOfHost;
      if (!pacer_) pacer_.emplace(limit, alone_ms_, tile, beside, most);
      pacer_->Beside(beside, limit, alone_ms_);
      company.most_rows = pacer_->rows();
    }
    before = prompt->prompt->computed();
    OKV_RETURN_IF_ERROR(prompt->prompt->Advance(company));
    if (prompt->prompt->computed() - before == company.most_rows) pacer_->Took(took());
  }
  CountStep(rows);
  for (Sequence* s : rows) Appended(*s);
  TellReads(rows, watched, watch);
  for (size_t r = 0; r < rows.size(); ++r) {
    draws != nullptr ? Drawn(*rows[r], drawn[r]) : Draw(*rows[r]);
  }
  if (prompt != nullptr) AfterChunk(*prompt, before);
  return {};
}

std::vector<int32_t> Scheduler::WatchReads(const Sequences& rows, ReadWatch& watch) const {
  const auto now = Clock::now();
  std::vector<int32_t> watched;
  for (const Sequence* s : rows) {
    const bool due =
        s->request.on_reads && (s->pictured == Clock::time_point() || s->answer.left() == 1 ||
                                Seconds(s->pictured, now) >= s->request.reads_seconds);
    watched.push_back(due ? watch.Add(*s->group->rows, s->member, s->request.read_bins) : -1);
  }
  return watched;
}

void Scheduler::TellReads(const Sequences& rows, std::span<const int32_t> watched,
                          const ReadWatch& watch) {
  for (size_t r = 0; r < rows.size(); ++r) {
    if (watched[r] < 0) continue;
    rows[r]->pictured = Clock::now();
    rows[r]->request.on_reads(watch.Take(watched[r]));
  }
}

void Scheduler::AfterChunk(Sequence& s, int64_t before) {
  const RowGroup& rows = *s.group->rows;
  PromptSteps& steps = *s.prompt;
  const int64_t total = std::ssize(s.request.prompt);
  if (steps.n_out() > 0) {
    const Status finite = stepper_.Logits(steps.first_out(), total, s.logits.data());
    if (!finite.ok()) return End(s, finite);
  }
  if (rows.DensePrompts() && s.dense_rows == before) s.dense_rows = steps.computed();
  s.tokens.assign(s.request.prompt.begin(), s.request.prompt.begin() + steps.computed());
  if (s.request.on_progress) {
    s.request.on_progress(steps.progress(), total, s.stats.cached_tokens);
  }
  if (!steps.done()) return;
  s.prompt.reset();
  s.read = true;
  s.read_at = Clock::now();
  const Status taken = rows.policy().AfterPrefill(total);
  if (!taken.ok()) return End(s, taken);
  Draw(s);
}

void Scheduler::Appended(Sequence& s) {
  if (s.group->rows->ReadsAll() && s.dense_rows == std::ssize(s.tokens)) ++s.dense_rows;
  s.tokens.push_back(s.next);
}

void Scheduler::Draw(Sequence& s) {
  if (s.answer.ended()) return End(s, {}, s.answer.reason());  // of no tokens
  TokenFilter* const filter = s.request.filter.get();
  if (filter == nullptr) return Drawn(s, s.answer.sampler().Sample(s.logits.data()));
  allowed_.resize(static_cast<size_t>(SeenWords(core_.config.vocab)));
  filter->Allowed(allowed_);
  filtered_ = s.logits;
  for (size_t t = 0; t < filtered_.size(); ++t) {
    const bool may_come = (allowed_[t / 32] >> (t % 32) & 1) != 0;
    if (!may_come) filtered_[t] = -std::numeric_limits<float>::infinity();
  }
  const int32_t token = s.answer.sampler().Sample(filtered_.data());
  filter->Take(token);
  Drawn(s, token);
}

void Scheduler::Drawn(Sequence& s, int32_t token) {
  s.next = token;
  Result<std::string> text = s.answer.Take(token);
  if (!text.ok()) return End(s, text.status());
  if (s.request.on_piece) {
    AnswerPiece piece{.token = token, .text = std::move(*text)};
    if (s.request.top_logprobs >= 0) {
      const double log_sum = LogSum(s.logits);
      piece.logprob = s.logits[static_cast<size_t>(token)] - log_sum;
      piece.top = TopTokens(s.logits, s.request.top_logprobs, log_sum);
    }
    s.request.on_piece(piece);
  }
  const bool full = std::ssize(s.tokens) == core_.bank->config().max_tokens;
  if (s.answer.ended() || full) End(s, {}, s.answer.reason());
}

}  // namespace omnikv
