#include "server/protocol/openai_completions.h"

#include <fmt/format.h>

#include <chrono>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/utf8.h"
#include "server/protocol/sampling.h"

namespace omnikv::server {
namespace {

constexpr char kPromptForms[] = "a text, tokens, or a list of at most 1024 of either";

// Tokens of a list that holds nothing else; the numbers are checked against the vocabulary later.
Status ReadTokens(const Json& list, const std::string& field, PlainPrompt* prompt) {
  std::vector<int32_t> tokens;
  tokens.reserve(list.size());
  for (size_t i = 0; i < list.size(); ++i) {
    const Json& token = list[i];
    const bool fits =
        token.is_number_integer() &&
        (token.is_number_unsigned() ? token.get<uint64_t>() <= std::numeric_limits<int32_t>::max()
                                    : token.get<int64_t>() >= 0);
    if (!fits) {
      return Wrong(fmt::format("{}[{}]", field, i), token, "the number of a token");
    }
    tokens.push_back(token.get<int32_t>());
  }
  *prompt = std::move(tokens);
  return Status();
}

void ReadPrompts(FieldReader* body, std::vector<PlainPrompt>* prompts) {
  const Json* prompt = body->Find("prompt");
  if (prompt == nullptr) return body->Fail("prompt", kPromptForms);
  if (prompt->is_string()) {
    prompts->emplace_back(prompt->get_ref<const std::string&>());
    return;
  }
  if (!prompt->is_array() || prompt->empty()) return body->Fail("prompt", kPromptForms);
  if (prompt->front().is_number()) {
    PlainPrompt tokens;
    body->Check(ReadTokens(*prompt, body->PathOf("prompt"), &tokens));
    prompts->push_back(std::move(tokens));
    return;
  }
  if (prompt->size() > kMaxPrompts) return body->Fail("prompt", kPromptForms);
  for (size_t i = 0; i < prompt->size() && body->ok(); ++i) {
    const Json& one = (*prompt)[i];
    const std::string field = fmt::format("{}[{}]", body->PathOf("prompt"), i);
    PlainPrompt read;
    if (one.is_string()) {
      read = one.get_ref<const std::string&>();
    } else if (one.is_array() && !one.empty()) {
      body->Check(ReadTokens(one, field, &read));
    } else {
      body->Check(Wrong(field, one, "a text or tokens"));
    }
    prompts->push_back(std::move(read));
  }
}

bool WholeUtf8(std::string_view text) {
  for (size_t pos = 0; pos < text.size();) {
    const size_t size = Utf8CharAt(text, pos).size;
    if (size == 0) return false;
    pos += size;
  }
  return true;
}

std::string TokenName(const std::string& bytes) {
  if (WholeUtf8(bytes)) return bytes;
  std::string name = "bytes:";
  for (const char c : bytes) name += fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
  return name;
}

// Characters that begin in `bytes`: a character whose bytes lie in two tokens counts for the first.
int64_t CharactersIn(std::string_view bytes) {
  int64_t number = 0;
  for (const char c : bytes) number += (static_cast<unsigned char>(c) & 0xC0) != 0x80;
  return number;
}

Json EmptyLogprobs() {
  return {{"text_offset", Json::array()},
          {"token_logprobs", Json::array()},
          {"tokens", Json::array()},
          {"top_logprobs", Json::array()}};
}

void AddToken(const Piece::Token& token, int64_t offset, Json* logprobs) {
  (*logprobs)["text_offset"].push_back(offset);
  (*logprobs)["tokens"].push_back(TokenName(token.chosen.text));
  (*logprobs)["token_logprobs"].push_back(LogprobJson(token.chosen.logprob));
  Json top;  // null where there is no log-probability
  if (!std::isnan(token.chosen.logprob)) {
    top = Json::object();
    // several tokens may have the same text: the best stays
    for (const TokenLogprob& other : token.top) {
      const std::string name = TokenName(other.text);
      if (!top.contains(name)) top[name] = LogprobJson(other.logprob);
    }
    const std::string name = TokenName(token.chosen.text);
    if (!top.contains(name)) top[name] = LogprobJson(token.chosen.logprob);
  }
  (*logprobs)["top_logprobs"].push_back(std::move(top));
}

class CompletionsAnswering : public Answering {
 public:
  CompletionsAnswering(const Question& question, Reply reply)
      : reply_(std::move(reply)),
        stream_(question.stream),
        usage_(question.stream_usage),
        progress_(question.stream_progress),
        logprobs_(question.top_logprobs >= 0),
        choices_(question.prompts.size() * static_cast<size_t>(question.n)) {}

  std::string Begin() override {
    began_ms_ = NowMs(reply_);
    return "";
  }

  std::string Progress(int64_t done, int64_t total, int64_t cached) override {
    if (!stream_ || !progress_) return "";
    Json chunk = Chunk(Choice(0, "", Json(), Json()));
    chunk["prompt_progress"] = PromptProgress(done, total, cached, NowMs(reply_) - began_ms_);
    return DataEvent(chunk);
  }

  std::string Add(int32_t choice, const Piece& piece) override {
    State& state = Of(choice);
    Json logprobs;
    if (logprobs_) {
      logprobs = EmptyLogprobs();
      for (const Piece::Token& token : piece.tokens) {
        AddToken(token, state.characters, stream_ ? &logprobs : &state.logprobs);
        state.characters += CharactersIn(token.chosen.text);
      }
    }
    if (!stream_) {
      state.text += piece.text;
      return "";
    }
    if (piece.text.empty() && (!logprobs_ || piece.tokens.empty())) return "";
    return DataEvent(Chunk(Choice(choice, piece.text, std::move(logprobs), Json())));
  }

  std::string End(int32_t choice, const Ending& ending) override {
    const char* reason = OpenAiFinishReason(ending.reason, false);
    Of(choice).finish_reason = reason;
    return stream_ ? DataEvent(Chunk(Choice(choice, "", Json(), reason))) : "";
  }

  std::string Close(const Usage& usage, const nlohmann::ordered_json& extra) override {
    if (stream_) return LastChunks(Head(), usage_ ? &usage : nullptr, extra);
    Json body = Head();
    body["choices"] = Json::array();
    for (size_t i = 0; i < choices_.size(); ++i) {
      State& state = choices_[i];
      body["choices"].push_back(Choice(static_cast<int32_t>(i), state.text,
                                       logprobs_ ? std::move(state.logprobs) : Json(),
                                       state.finish_reason));
    }
    body["usage"] = OpenAiUsage(usage);
    AddMembers(&body, extra);
    return Dump(body);
  }

  std::string Error(const Status& status) override { return OpenAiErrorReply(status, stream_); }

 private:
  struct State {
    std::string text;
    Json logprobs = EmptyLogprobs();
    int64_t characters = 0;  // of the tokens so far
    Json finish_reason;
  };

  State& Of(int32_t choice) {
    OKV_CHECK(choice >= 0 && static_cast<size_t>(choice) < choices_.size(), "choice {}", choice);
    return choices_[static_cast<size_t>(choice)];
  }

  Json Head() const {
    return {{"id", "cmpl-" + reply_.id},
            {"object", "text_completion"},
            {"created", reply_.created},
            {"model", reply_.model}};
  }

  static Json Choice(int32_t index, const std::string& text, Json logprobs, Json finish_reason) {
    return {{"index", index},
            {"text", text},
            {"logprobs", std::move(logprobs)},
            {"finish_reason", std::move(finish_reason)}};
  }

  Json Chunk(Json choice) const {
    Json chunk = Head();
    chunk["choices"] = Json::array();
    chunk["choices"].push_back(std::move(choice));
    if (usage_) chunk["usage"] = Json();
    return chunk;
  }

  const Reply reply_;
  const bool stream_;
  const bool usage_;
  const bool progress_;
  const bool logprobs_;
  std::vector<State> choices_;
  int64_t began_ms_ = 0;
};

}  // namespace

std::string LastChunks(Json head, const Usage* usage, const Json& extra) {
  std::string out;
  // Members that come besides need an event, whether or not the usage is asked for.
  if (usage != nullptr || (extra.is_object() && !extra.empty())) {
    head["choices"] = Json::array();
    if (usage != nullptr) head["usage"] = OpenAiUsage(*usage);
    AddMembers(&head, extra);
    out = DataEvent(head);
  }
  return out += kDoneEvent;
}

std::string OpenAiErrorReply(const Status& status, bool stream) {
  const Json error = OpenAiError(status);
  return stream ? DataEvent(error).append(kDoneEvent) : Dump(error);
}

Result<Question> ParseCompletions(const Json& json) {
  FieldReader body(json);
  Question question;
  ReadPrompts(&body, &question.prompts);
  ReadCommon(&body, &question);
  ReadStop(&body, "stop", &question.generate.stop);
  ReadMaxTokens(&body, "max_tokens", &question);
  ReadChoices(&body, &question);
  ReadStreamOptions(&body, &question);
  body.Int("logprobs", 0, kMaxTopLogprobs, &question.top_logprobs);
  body.Bool("echo", &question.echo);
  body.Refuse("suffix", "text is only written after a prompt");
  OKV_RETURN_IF_ERROR(body.status());
  return question;
}

std::unique_ptr<Answering> AnswerCompletions(const Question& question, Reply reply) {
  return std::make_unique<CompletionsAnswering>(question, std::move(reply));
}

Json OpenAiUsage(const Usage& usage) {
  return {{"prompt_tokens", usage.prompt_tokens},
          {"completion_tokens", usage.completion_tokens},
          {"total_tokens", usage.prompt_tokens + usage.completion_tokens},
          {"prompt_tokens_details", {{"cached_tokens", usage.cached_tokens}}}};
}

Json PromptProgress(int64_t done, int64_t total, int64_t cached, int64_t time_ms) {
  return {{"total", total}, {"cache", cached}, {"processed", done}, {"time_ms", time_ms}};
}

Json LogprobJson(double logprob) {
  if (std::isnan(logprob)) return Json();
  return std::isinf(logprob) ? Json(-9999.0) : Json(logprob);
}

const char* OpenAiFinishReason(FinishReason reason, bool called_tools) {
  if (reason != FinishReason::kStop) return "length";
  return called_tools ? "tool_calls" : "stop";
}

int64_t NowMs(const Reply& reply) {
  if (reply.now_ms) return reply.now_ms();
  return std::chrono::duration_cast<std::chrono::milliseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace omnikv::server
