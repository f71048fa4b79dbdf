#include "server/generation.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "server/protocol/fields.h"

namespace omnikv::server {
namespace {

double PerSecond(double n, double seconds) {
  return seconds > 0 ? n / seconds : 0;
}

// Three decimals of a share, of which 0 and 1 mean none and all.
double Rounded(double share) {
  if (share <= 0 || share >= 1) return share;
  return std::clamp(std::round(1000 * share) / 1000, 0.001, 0.999);
}

// The event of return_reads (docs/serve.md).
Json ReadsJson(const ReadPicture& picture) {
  Json read = Json::array();
  for (const std::vector<float>& layer : picture.shares) {
    Json shares = Json::array();
    for (const float share : layer) shares.push_back(Rounded(share));
    read.push_back(layer.empty() ? Json() : std::move(shares));
  }
  return {{"layers", picture.shares.size()},
          {"tokens", picture.tokens},
          {"bin_tokens", picture.bin_tokens},
          {"read", std::move(read)},
          {"attended", picture.attended},
          {"bytes", picture.bytes},
          {"hit_rate", picture.hit_rate ? Json(*picture.hit_rate) : Json()}};
}

}  // namespace

Generation::Generation(Engines engines, Question question, std::unique_ptr<Answering> answering,
                       std::shared_ptr<HttpReply> reply, ErrorBody error_body)
    : engines_(std::move(engines)),
      question_(std::move(question)),
      answering_(std::move(answering)),
      reply_(std::move(reply)),
      error_body_(std::move(error_body)) {}

void Generation::Run(const Prompts& prompts, const Request& request, const MakeFilter& filter) {
  const auto self = shared_from_this();
  stats_.resize(prompts.tokens.size());
  left_ = static_cast<int32_t>(prompts.tokens.size()) * question_.n;
  for (const std::vector<int32_t>& prompt : prompts.tokens) {
    usage_.prompt_tokens += std::ssize(prompt);
  }
  if (question_.echo) {
    if (const Status said = Echo(prompts); !said.ok()) return Fail(said);
  }
  // A client that goes takes its requests along; it may go while they are handed over.
  const std::weak_ptr<Generation> weak = self;
  reply_->OnGone([weak] {
    if (const auto generation = weak.lock()) generation->CancelAll();
  });
  const std::lock_guard lock(mutex_);
  int32_t choice = 0;
  for (const std::vector<int32_t>& prompt : prompts.tokens) {
    for (int32_t i = 0; i < question_.n; ++i, ++choice) {
      Request one = request;
      one.prompt = prompt;
      one.any_spelling = prompts.of_text && !question_.echo;
      if (filter) one.filter = filter();
      one.generate.sampling.seed += static_cast<uint64_t>(i);
      if (question_.stream && question_.stream_progress && choice == 0) {
        one.on_progress = [self](int64_t done, int64_t total, int64_t cached) {
          self->Progress(done, total, cached);
        };
      }
      if (question_.stream && question_.read_bins > 0 && choice == 0) {
        one.read_bins = question_.read_bins;
        one.on_reads = [self](const ReadPicture& picture) { self->Reads(picture); };
      }
      one.on_piece = [self, choice](const AnswerPiece& piece) { self->Add(choice, piece); };
      one.on_end = [self, choice](const Result<RequestEnd>& end) { self->End(choice, end); };
      ids_.push_back(engines_.scheduler.Submit(std::move(one)));
      if (gone_) engines_.scheduler.Cancel(ids_.back());
    }
  }
}

Status Generation::Echo(const Prompts& prompts) {
  int32_t choice = 0;
  for (const std::vector<int32_t>& prompt : prompts.tokens) {
    OKV_RETURN_IF_ERROR(NeedTokenizer(engines_.core));
    OKV_ASSIGN_OR_RETURN(const std::string text,
                         engines_.core.text.tokenizer->Decode(prompt, /*skip_special=*/false));
    for (int32_t i = 0; i < question_.n; ++i) {
      Begin();
      Say(answering_->Add(choice++, {.text = text}));
    }
  }
  return {};
}

void Generation::Begin() {
  if (std::exchange(begun_, true)) return;
  if (question_.stream) reply_->Begin({.content_type = "text/event-stream"});
  Say(answering_->Begin());
}

void Generation::Say(std::string bytes) {
  if (question_.stream && !bytes.empty()) reply_->Write(std::move(bytes));
}

void Generation::Progress(int64_t done, int64_t total, int64_t cached) {
  if (over_) return;
  Begin();
  Say(answering_->Progress(done, total, cached));
}

void Generation::Reads(const ReadPicture& picture) {
  if (over_) return;
  Begin();
  Say(answering_->Reads(ReadsJson(picture)));
}

Piece Generation::PieceOf(const AnswerPiece& piece) const {
  Piece out{.text = piece.text};
  if (question_.top_logprobs < 0) return out;
  const auto named = [&](int32_t token, double logprob) {
    const Tokenizer* tokenizer = engines_.core.text.tokenizer.get();
    Result<std::string> text = std::string();
    if (tokenizer != nullptr) text = tokenizer->Decode({token}, /*skip_special=*/false);
    return TokenLogprob{.text = text.ok() ? *text : "", .logprob = logprob};
  };
  Piece::Token token{.chosen = named(piece.token, piece.logprob)};
  for (const ScoredToken& t : piece.top) token.top.push_back(named(t.token, t.logprob));
  out.tokens.push_back(std::move(token));
  return out;
}

void Generation::Add(int32_t choice, const AnswerPiece& piece) {
  if (over_) return;
  Begin();
  Say(answering_->Add(choice, PieceOf(piece)));
}

void Generation::End(int32_t choice, const Result<RequestEnd>& end) {
  if (end.ok()) engines_.metrics->Ended(end->reason, end->stats);
  if (over_) return;
  if (!end.ok()) return Fail(end.status());
  Begin();
  usage_.completion_tokens += end->stats.answer_tokens;
  if (choice % question_.n == 0) {
    // A prompt that was respelled has another number of tokens than was counted for the client.
    usage_.cached_tokens =
        std::min(usage_.cached_tokens + end->stats.cached_tokens, usage_.prompt_tokens);
    stats_[static_cast<size_t>(choice / question_.n)] = end->stats;
  }
  if (!end->text.empty()) Say(answering_->Add(choice, {.text = end->text}));
  Say(answering_->End(choice, {end->reason, end->stop}));
  if (--left_ > 0) return;
  over_ = true;
  std::string last = answering_->Close(usage_, Extra());
  if (!question_.stream) return reply_->Send({}, std::move(last));
  reply_->Write(std::move(last));
  reply_->End();
}

nlohmann::ordered_json Generation::Extra() const {
  const RequestStats& s = stats_.front();
  const int64_t computed = s.prompt_tokens - s.cached_tokens;
  return {
      {"timings",
       {{"cache_n", s.cached_tokens},
        {"prompt_n", computed},
        {"prompt_ms", 1e3 * s.prefill_seconds},
        {"prompt_per_second", PerSecond(static_cast<double>(computed), s.prefill_seconds)},
        {"predicted_n", s.answer_tokens},
        {"predicted_ms", 1e3 * s.decode_seconds},
        {"predicted_per_second",
         PerSecond(static_cast<double>(s.answer_tokens), s.decode_seconds)}}},
      {"omnikv",
       {{"policy", s.policy},
        {"settings", s.settings},
        {"read_fraction", s.read_fraction},
        {"attended_tokens", s.attended_tokens},
        {"held_bytes", {{"device", s.held.device}, {"host", s.held.host}, {"disk", s.held.disk}}},
        {"hit_rate", s.hit_rate ? nlohmann::ordered_json(*s.hit_rate) : nullptr},
        {"fetched_bytes", s.fetched_bytes},
        {"stored_tokens", s.stored_tokens},
        {"queue_ms", 1e3 * s.queue_seconds}}}};
}

void Generation::Fail(const Status& status) {
  over_ = true;
  CancelAll();
  if (begun_ && question_.stream) {
    reply_->Write(answering_->Error(status));
    return reply_->End();
  }
  HttpHead head{.status = HttpStatus(status.code())};
  if (head.status == 503) head.headers = {{"retry-after", "1"}};
  reply_->Send(std::move(head), error_body_(status));
}

void Generation::CancelAll() {
  const std::lock_guard lock(mutex_);
  gone_ = true;
  for (const Scheduler::Id id : ids_) engines_.scheduler.Cancel(id);
}

}  // namespace omnikv::server
