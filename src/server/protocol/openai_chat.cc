#include "server/protocol/openai_chat.h"

#include <fmt/format.h>

#include <utility>
#include <vector>

#include "base/check.h"
#include "server/protocol/conversation.h"
#include "server/protocol/openai_completions.h"
#include "server/protocol/sampling.h"

namespace omnikv::server {
namespace {

Result<Json> ReadToolCalls(const Json& list, const std::string& field) {
  Json calls = Json::array();
  for (size_t i = 0; i < list.size(); ++i) {
    const std::string where = fmt::format("{}[{}].", field, i);
    FieldReader call(list[i], where);
    std::string id;
    std::string type = "function";
    std::string name;
    std::string arguments;
    call.String("id", &id);
    call.Word("type", {"function"}, &type);
    const Json* object = call.Object("function");
    if (object == nullptr) call.Fail("function", "an object");
    OKV_RETURN_IF_ERROR(call.status());
    FieldReader function(*object, where + "function.");
    if (!function.String("name", &name)) function.Fail("name", "the name of a function");
    const Json* given = function.Find("arguments");
    // some clients send the object itself
    if (given != nullptr && given->is_object()) {
      arguments = Dump(*given);
    } else {
      function.String("arguments", &arguments);
    }
    OKV_RETURN_IF_ERROR(function.status());
    calls.push_back(ToolCall(id, name, arguments));
  }
  return calls;
}

Result<Json> ReadMessage(const Json& json, const std::string& field) {
  FieldReader fields(json, field + ".");
  std::string role;
  constexpr char kRoles[] = "system, developer, user, assistant or tool";
  if (!fields.Word("role", {"system", "developer", "user", "assistant", "tool", "function"},
                   &role)) {
    if (fields.ok()) fields.Fail("role", kRoles);
    return fields.status();
  }
  if (role == "developer") role = "system";
  if (role == "function") role = "tool";
  const Json* calls = role == "assistant" ? fields.Array("tool_calls") : nullptr;
  const bool called = calls != nullptr && !calls->empty();
  const Json* content = fields.Find("content");
  if (content == nullptr && role != "assistant") fields.Fail("content", "a text");
  OKV_RETURN_IF_ERROR(fields.status());
  OKV_ASSIGN_OR_RETURN(const std::string text,
                       ContentText(content == nullptr ? Json() : *content, fields.PathOf("content"),
                                   {"text", "refusal"}));
  Json message = {{"role", role}, {"content", text}};
  std::string reasoning;
  if (role == "assistant" &&
      (fields.String("reasoning_content", &reasoning) || fields.String("reasoning", &reasoning))) {
    message["reasoning_content"] = reasoning;
  }
  if (called) {
    OKV_ASSIGN_OR_RETURN(message["tool_calls"], ReadToolCalls(*calls, fields.PathOf("tool_calls")));
  }
  std::string id;
  std::string name;
  if (role == "tool" && fields.String("tool_call_id", &id)) message["tool_call_id"] = id;
  if (fields.String("name", &name)) message["name"] = name;
  OKV_RETURN_IF_ERROR(fields.status());
  return message;
}

void ReadMessages(FieldReader* body, Question* question) {
  const Json* messages = body->Array("messages");
  if (messages == nullptr || messages->empty()) {
    return body->Fail("messages", "an array of at least one message");
  }
  question->messages = Json::array();
  for (size_t i = 0; i < messages->size(); ++i) {
    auto message = ReadMessage((*messages)[i], fmt::format("{}[{}]", body->PathOf("messages"), i));
    if (!message.ok()) return body->Check(message.status());
    question->messages.push_back(std::move(*message));
  }
  body->Bool("continue_final_message", &question->continue_last);
  if (question->continue_last && question->messages.back().at("role") != "assistant") {
    body->Fail("continue_final_message", "a last message of the role assistant beside it");
  }
}

// Tools reach the template as the client wrote them.
void ReadTools(FieldReader* body, Question* question) {
  const Json* tools = body->Array("tools");
  if (tools == nullptr || tools->empty()) return;
  for (size_t i = 0; i < tools->size(); ++i) {
    const std::string where = fmt::format("{}[{}].", body->PathOf("tools"), i);
    FieldReader tool((*tools)[i], where);
    std::string type;
    if (!tool.Word("type", {"function"}, &type)) tool.Fail("type", "function");
    const Json* object = tool.Object("function");
    if (object == nullptr) tool.Fail("function", "an object");
    if (!tool.ok()) return body->Check(tool.status());
    FieldReader function(*object, where + "function.");
    std::string name;
    if (!function.String("name", &name)) function.Fail("name", "the name of a function");
    function.Object("parameters");
    body->Check(function.status());
  }
  question->tools = *tools;
}

void ReadToolChoice(FieldReader* body, Question* question) {
  const Json* choice = body->Find("tool_choice");
  ToolChoice& read = question->tool_choice;
  constexpr char kExpected[] = "none, auto, required or an object that names a function";
  if (choice != nullptr && choice->is_string()) {
    const auto& word = choice->get_ref<const std::string&>();
    if (word == "none") {
      read.kind = ToolChoice::Kind::kNone;
    } else if (word == "required") {
      read.kind = ToolChoice::Kind::kRequired;
    } else if (word != "auto") {
      body->Fail("tool_choice", kExpected);
    }
  } else if (choice != nullptr) {
    const Json* object = body->Object("tool_choice");
    if (object == nullptr) return;
    FieldReader fields(*object, body->PathOf("tool_choice."));
    std::string type;
    if (!fields.Word("type", {"function"}, &type)) fields.Fail("type", "function");
    const Json* function = fields.Object("function");
    if (function == nullptr) fields.Fail("function", "an object");
    body->Check(fields.status());
    if (!body->ok()) return;
    FieldReader named(*function, body->PathOf("tool_choice.function."));
    if (!named.String("name", &read.name)) named.Fail("name", "the name of a function");
    body->Check(named.status());
    read.kind = ToolChoice::Kind::kNamed;
  }
  if (body->ok()) body->Check(CheckToolChoice(*question, body->PathOf("tool_choice")));
}

void ReadFormat(FieldReader* body, Question* question) {
  const Json* object = body->Object("response_format");
  if (object == nullptr) return;
  FieldReader format(*object, body->PathOf("response_format."));
  std::string type;
  if (!format.Word("type", {"text", "json_object", "json_schema"}, &type)) {
    format.Fail("type", "text, json_object or json_schema");
  }
  if (type == "json_object") question->format.kind = AnswerFormat::Kind::kJsonObject;
  if (type == "json_schema") {
    const Json* wrapped = format.Object("json_schema");
    if (wrapped == nullptr) format.Fail("json_schema", "an object");
    body->Check(format.status());
    if (!body->ok()) return;
    FieldReader inner(*wrapped, body->PathOf("response_format.json_schema."));
    const Json* schema = inner.Object("schema");
    if (schema == nullptr) inner.Fail("schema", "an object");
    body->Check(inner.status());
    if (body->ok()) SetSchema(question, *schema);
  }
  body->Check(format.status());
}

void ReadTemplateArguments(FieldReader* body, Question* question) {
  if (const Json* given = body->Object("chat_template_kwargs"); given != nullptr) {
    question->template_arguments = *given;
  }
  std::string effort;
  ReadEffort(body, "reasoning_effort", &effort);
  // Open WebUI and OpenRouter
  if (const Json* object = body->Object("reasoning"); object != nullptr && effort.empty()) {
    FieldReader reasoning(*object, body->PathOf("reasoning."));
    ReadEffort(&reasoning, "effort", &effort);
    body->Check(reasoning.status());
  }
  if (!effort.empty()) SetEffort(question, effort);
}

void ReadLogprobs(FieldReader* body, Question* question) {
  bool wanted = false;
  int32_t top = 0;
  body->Bool("logprobs", &wanted);
  const bool given = body->Int("top_logprobs", 0, kMaxTopLogprobs, &top);
  if (given && top > 0 && !wanted) body->Fail("top_logprobs", "logprobs to be true beside it");
  if (wanted) question->top_logprobs = top;
}

Json TokenJson(const TokenLogprob& token) {
  Json bytes = Json::array();
  for (const char c : token.text) bytes.push_back(static_cast<unsigned char>(c));
  return {
      {"token", token.text}, {"logprob", LogprobJson(token.logprob)}, {"bytes", std::move(bytes)}};
}

Json TokenJson(const Piece::Token& token) {
  Json json = TokenJson(token.chosen);
  json["top_logprobs"] = Json::array();
  for (const TokenLogprob& top : token.top) json["top_logprobs"].push_back(TokenJson(top));
  return json;
}

class ChatAnswering : public Answering {
 public:
  ChatAnswering(const Question& question, Reply reply, const AnswerForm& form)
      : reply_(std::move(reply)),
        stream_(question.stream),
        usage_(question.stream_usage),
        progress_(question.stream_progress),
        logprobs_(question.top_logprobs >= 0) {
    for (int32_t i = 0; i < question.n; ++i) {
      choices_.push_back(State{AnswerParser(form, question, "call_", reply_.id, i)});
    }
  }

  std::string Begin() override {
    began_ms_ = NowMs(reply_);
    std::string out;
    for (size_t i = 0; stream_ && i < choices_.size(); ++i) {
      out += Chunk(static_cast<int32_t>(i), {{"role", "assistant"}, {"content", ""}});
    }
    return out;
  }

  std::string Progress(int64_t done, int64_t total, int64_t cached) override {
    if (!stream_ || !progress_) return "";
    Json chunk = ChunkJson(0, Json::object());
    chunk["prompt_progress"] = PromptProgress(done, total, cached, NowMs(reply_) - began_ms_);
    return DataEvent(chunk);
  }

  std::string Reads(const Json& reads) override {
    if (!stream_) return "";
    Json chunk = ChunkJson(0, Json::object());
    chunk["omnikv_reads"] = reads;
    return DataEvent(chunk);
  }

  std::string Add(int32_t choice, const Piece& piece) override {
    State& state = Of(choice);
    if (logprobs_) {
      for (const Piece::Token& token : piece.tokens) state.tokens.push_back(TokenJson(token));
    }
    return Take(choice, state.parser.Add(piece.text));
  }

  std::string End(int32_t choice, const Ending& ending) override {
    State& state = Of(choice);
    std::string out = Take(choice, state.parser.End());
    state.finish_reason = OpenAiFinishReason(ending.reason, !state.calls.empty());
    if (stream_) out += Chunk(choice, Json::object(), state.finish_reason);
    return out;
  }

  std::string Close(const Usage& usage, const nlohmann::ordered_json& extra) override {
    if (stream_) return LastChunks(Head(), usage_ ? &usage : nullptr, extra);
    Json body = Head();
    body["choices"] = Json::array();
    for (size_t i = 0; i < choices_.size(); ++i) {
      body["choices"].push_back(ChoiceJson(static_cast<int32_t>(i), choices_[i]));
    }
    body["usage"] = OpenAiUsage(usage);
    AddMembers(&body, extra);
    return Dump(body);
  }

  std::string Error(const Status& status) override { return OpenAiErrorReply(status, stream_); }

 private:
  struct State {
    AnswerParser parser;
    std::string content = {};
    std::string reasoning = {};
    Json calls = Json::array();
    Json tokens = Json::array();  // of a stream: those that no chunk had yet
    Json finish_reason = {};
  };

  State& Of(int32_t choice) {
    OKV_CHECK(choice >= 0 && static_cast<size_t>(choice) < choices_.size(), "choice {}", choice);
    return choices_[static_cast<size_t>(choice)];
  }

  Json Head() const {
    return {{"id", "chatcmpl-" + reply_.id},
            {"object", stream_ ? "chat.completion.chunk" : "chat.completion"},
            {"created", reply_.created},
            {"model", reply_.model}};
  }

  // Tokens that came before their text wait for the next chunk of their choice.
  Json ChunkJson(int32_t choice, Json delta, Json finish_reason = Json()) {
    Json& tokens = Of(choice).tokens;
    Json logprobs;
    if (!tokens.empty()) logprobs = {{"content", std::exchange(tokens, Json::array())}};
    Json chunk = Head();
    chunk["choices"] = Json::array();
    chunk["choices"].push_back(Json{{"index", choice},
                                    {"delta", std::move(delta)},
                                    {"logprobs", std::move(logprobs)},
                                    {"finish_reason", std::move(finish_reason)}});
    if (usage_) chunk["usage"] = Json();
    return chunk;
  }

  std::string Chunk(int32_t choice, Json delta, Json finish_reason = Json()) {
    return DataEvent(ChunkJson(choice, std::move(delta), std::move(finish_reason)));
  }

  std::string Take(int32_t choice, const std::vector<AnswerPart>& parts) {
    State& state = Of(choice);
    std::string out;
    for (const AnswerPart& part : parts) {
      Json delta = Json::object();
      switch (part.kind) {
        case AnswerPart::Kind::kContent:
          if (!stream_) state.content += part.text;
          delta["content"] = part.text;
          break;
        case AnswerPart::Kind::kReasoning:
          if (!stream_) state.reasoning += part.text;
          delta["reasoning"] = part.text;
          delta["reasoning_content"] = part.text;
          break;
        case AnswerPart::Kind::kArguments:
          state.calls.back()["function"]["arguments"].get_ref<std::string&>() += part.text;
          delta["tool_calls"] = Json::array();
          delta["tool_calls"].push_back(
              Json{{"index", state.calls.size() - 1}, {"function", {{"arguments", part.text}}}});
          break;
        case AnswerPart::Kind::kCall:
          state.calls.push_back(
              Json{{"id", part.id},
                   {"type", "function"},
                   {"function", {{"name", part.name}, {"arguments", part.text}}}});
          Json call = {{"index", state.calls.size() - 1}};
          call.update(state.calls.back());
          delta["tool_calls"] = Json::array();
          delta["tool_calls"].push_back(std::move(call));
          break;
      }
      if (stream_) out += Chunk(choice, std::move(delta));
    }
    return out;
  }

  Json ChoiceJson(int32_t index, State& state) const {
    Json message = {{"role", "assistant"}, {"content", state.content}, {"refusal", Json()}};
    if (!state.reasoning.empty()) {
      message["reasoning"] = state.reasoning;
      message["reasoning_content"] = state.reasoning;
    }
    if (!state.calls.empty()) {
      if (state.content.empty()) message["content"] = Json();
      message["tool_calls"] = std::move(state.calls);
    }
    Json logprobs;
    if (logprobs_) logprobs = {{"content", std::move(state.tokens)}, {"refusal", Json()}};
    return {{"index", index},
            {"message", std::move(message)},
            {"logprobs", std::move(logprobs)},
            {"finish_reason", state.finish_reason}};
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

Result<Question> ParseChat(const Json& json) {
  FieldReader body(json);
  Question question;
  ReadMessages(&body, &question);
  ReadCommon(&body, &question);
  ReadStop(&body, "stop", &question.generate.stop);
  ReadMaxTokens(&body, "max_tokens", &question);
  ReadMaxTokens(&body, "max_completion_tokens", &question);
  ReadChoices(&body, &question);
  ReadStreamOptions(&body, &question);
  ReadLogprobs(&body, &question);
  ReadTools(&body, &question);
  ReadToolChoice(&body, &question);
  body.Bool("parallel_tool_calls", &question.parallel_tool_calls);
  ReadFormat(&body, &question);
  ReadTemplateArguments(&body, &question);
  OKV_RETURN_IF_ERROR(body.status());
  return question;
}

std::unique_ptr<Answering> AnswerChat(const Question& question, Reply reply,
                                      const AnswerForm& form) {
  return std::make_unique<ChatAnswering>(question, std::move(reply), form);
}

}  // namespace omnikv::server
