#include "server/protocol/anthropic_messages.h"

#include <fmt/format.h>

#include <limits>
#include <utility>
#include <vector>

#include "base/printable.h"
#include "server/protocol/conversation.h"
#include "server/protocol/sampling.h"

namespace omnikv::server {
namespace {

constexpr std::string_view kBillingHeader = "x-anthropic-billing-header";

Status ReadSystem(const Json& given, Question* question) {
  Json system = given;
  if (system.is_array() && !system.empty() && system[0].is_object()) {
    const auto text = system[0].find("text");
    if (text != system[0].end() && text->is_string() &&
        text->get_ref<const std::string&>().starts_with(kBillingHeader)) {
      system.erase(0);
    }
  }
  OKV_ASSIGN_OR_RETURN(std::string text, ContentText(system, "system", {"text"}));
  if (!text.empty()) {
    question->messages.push_back(Json{{"role", "system"}, {"content", std::move(text)}});
  }
  return Status();
}

// Blocks of one message, sorted into what messages of templates hold.
struct Blocks {
  std::string text;
  bool any_text = false;
  std::string reasoning;
  Json calls = Json::array();
  Json results = Json::array();  // messages of the role tool
};

void AppendLine(std::string* text, const std::string& more) {
  if (!text->empty()) *text += '\n';
  *text += more;
}

Status ReadBlock(const Json& json, const std::string& field, const std::string& role,
                 Blocks* blocks) {
  FieldReader block(json, field + ".");
  std::string type;
  if (!block.String("type", &type)) block.Fail("type", "the type of a block");
  OKV_RETURN_IF_ERROR(block.status());
  std::string text;
  if (type == "text") {
    if (!block.String("text", &text)) block.Fail("text", "a text");
    AppendLine(&blocks->text, text);
    blocks->any_text = true;
  } else if (type == "thinking" && role == "assistant") {
    if (!block.String("thinking", &text)) block.Fail("thinking", "a text");
    AppendLine(&blocks->reasoning, text);
  } else if (type == "redacted_thinking" && role == "assistant") {
    // nobody but Anthropic can read it
  } else if (type == "tool_use" && role == "assistant") {
    std::string id;
    std::string name;
    if (!block.String("id", &id)) block.Fail("id", "a text");
    if (!block.String("name", &name)) block.Fail("name", "the name of a tool");
    const Json* input = block.Object("input");
    if (block.ok()) {
      blocks->calls.push_back(ToolCall(id, name, input == nullptr ? "{}" : Dump(*input)));
    }
  } else if (type == "tool_result" && role == "user") {
    std::string id;
    if (!block.String("tool_use_id", &id)) block.Fail("tool_use_id", "the id of a tool_use");
    OKV_RETURN_IF_ERROR(block.status());
    const Json* content = block.Find("content");
    OKV_ASSIGN_OR_RETURN(std::string result, ContentText(content == nullptr ? Json() : *content,
                                                         block.PathOf("content"), {"text"}));
    blocks->results.push_back(
        Json{{"role", "tool"}, {"content", std::move(result)}, {"tool_call_id", id}});
  } else {
    return Refused(field, fmt::format("it is of type {}, expected text{}", Printable(type),
                                      role == "assistant" ? ", thinking or tool_use"
                                      : role == "user"    ? " or tool_result"
                                                          : ""));
  }
  return block.status();
}

Status ReadMessage(const Json& json, const std::string& field, Question* question) {
  FieldReader fields(json, field + ".");
  std::string role;
  if (!fields.Word("role", {"user", "assistant", "system"}, &role)) {
    fields.Fail("role", "user, assistant or system");
  }
  const Json* content = fields.Find("content");
  if (content == nullptr || (!content->is_string() && !content->is_array())) {
    fields.Fail("content", "a text or a list of blocks");
  }
  OKV_RETURN_IF_ERROR(fields.status());
  Blocks blocks;
  if (content->is_string()) {
    blocks.text = content->get_ref<const std::string&>();
    blocks.any_text = true;
  }
  for (size_t i = 0; content->is_array() && i < content->size(); ++i) {
    OKV_RETURN_IF_ERROR(ReadBlock((*content)[i], fmt::format("{}[{}]", fields.PathOf("content"), i),
                                  role, &blocks));
  }
  // results answer the calls of the message before, so they come before new text
  for (Json& result : blocks.results) question->messages.push_back(std::move(result));
  if (!blocks.any_text && !blocks.results.empty()) return Status();
  Json message = {{"role", role}, {"content", blocks.text}};
  if (!blocks.reasoning.empty()) message["reasoning_content"] = blocks.reasoning;
  if (!blocks.calls.empty()) message["tool_calls"] = std::move(blocks.calls);
  question->messages.push_back(std::move(message));
  return Status();
}

void ReadMessages(FieldReader* body, Question* question) {
  question->messages = Json::array();
  if (const Json* system = body->Find("system"); system != nullptr) {
    body->Check(ReadSystem(*system, question));
  }
  const Json* messages = body->Array("messages");
  if (messages == nullptr || messages->empty()) {
    return body->Fail("messages", "an array of at least one message");
  }
  for (size_t i = 0; i < messages->size() && body->ok(); ++i) {
    body->Check(ReadMessage((*messages)[i], fmt::format("messages[{}]", i), question));
  }
  if (!body->ok()) return;
  // a call is ended by its results, so nothing of it can go on
  const Json& last = question->messages.back();
  question->continue_last = last.at("role") == "assistant" && !last.contains("tool_calls");
}

void ReadTools(FieldReader* body, Question* question) {
  const Json* tools = body->Array("tools");
  if (tools == nullptr) return;
  for (size_t i = 0; i < tools->size() && body->ok(); ++i) {
    FieldReader tool((*tools)[i], fmt::format("tools[{}].", i));
    std::string type = "custom";
    std::string name;
    std::string description;
    tool.String("type", &type);
    const Json* schema = tool.Object("input_schema");
    if (tool.ok() && type != "custom" && schema == nullptr) continue;
    if (schema == nullptr) tool.Fail("input_schema", "an object");
    if (!tool.String("name", &name)) tool.Fail("name", "the name of a tool");
    tool.String("description", &description);
    body->Check(tool.status());
    if (body->ok()) AddTool(name, description, *schema, &question->tools);
  }
}

void ReadToolChoice(FieldReader* body, Question* question) {
  const Json* object = body->Object("tool_choice");
  if (object == nullptr) return;
  FieldReader choice(*object, "tool_choice.");
  std::string type;
  if (!choice.Word("type", {"auto", "any", "none", "tool"}, &type)) {
    choice.Fail("type", "auto, any, none or tool");
  }
  ToolChoice& read = question->tool_choice;
  if (type == "any") read.kind = ToolChoice::Kind::kRequired;
  if (type == "none") read.kind = ToolChoice::Kind::kNone;
  if (type == "tool") {
    read.kind = ToolChoice::Kind::kNamed;
    if (!choice.String("name", &read.name)) choice.Fail("name", "the name of a tool");
  }
  bool one = false;
  choice.Bool("disable_parallel_tool_use", &one);
  question->parallel_tool_calls = !one;
  body->Check(choice.status());
  if (body->ok()) body->Check(CheckToolChoice(*question, "tool_choice"));
}

void ReadThinking(FieldReader* body, Question* question) {
  if (const Json* given = body->Object("chat_template_kwargs"); given != nullptr) {
    question->template_arguments = *given;
  }
  if (const Json* object = body->Object("thinking"); object != nullptr) {
    FieldReader thinking(*object, "thinking.");
    std::string type;
    if (!thinking.String("type", &type)) thinking.Fail("type", "enabled, adaptive or disabled");
    body->Check(thinking.status());
    SetDefaultArgument(question, "enable_thinking", type != "disabled");
  }
  const Json* object = body->Object("output_config");
  if (object == nullptr) return;
  FieldReader config(*object, "output_config.");
  std::string effort;
  if (ReadEffort(&config, "effort", &effort)) SetEffort(question, effort);
  if (const Json* format = config.Object("format"); format != nullptr) {
    FieldReader fields(*format, "output_config.format.");
    std::string type;
    if (!fields.Word("type", {"json_schema"}, &type)) fields.Fail("type", "json_schema");
    const Json* schema = fields.Object("schema");
    if (schema == nullptr) fields.Fail("schema", "an object");
    config.Check(fields.status());
    if (config.ok()) SetSchema(question, *schema);
  }
  body->Check(config.status());
}

Result<Question> Parse(const Json& json, bool with_limit) {
  FieldReader body(json);
  Question question;
  ReadMessages(&body, &question);
  ReadCommon(&body, &question);
  if (with_limit) {
    constexpr char kExpected[] = "a whole number from 1";
    if (!body.Int("max_tokens", 1, std::numeric_limits<int64_t>::max(),
                  &question.generate.max_tokens, kExpected)) {
      body.Fail("max_tokens", kExpected);
    }
    question.limited = true;
  }
  ReadStop(&body, "stop_sequences", &question.generate.stop);
  ReadTools(&body, &question);
  ReadToolChoice(&body, &question);
  ReadThinking(&body, &question);
  OKV_RETURN_IF_ERROR(body.status());
  return question;
}

Json UsageJson(int64_t prompt, int64_t cached, int64_t completion) {
  return {{"input_tokens", prompt - cached},
          {"cache_creation_input_tokens", 0},
          {"cache_read_input_tokens", cached},
          {"output_tokens", completion}};
}

class MessagesAnswering : public Answering {
 public:
  MessagesAnswering(const Question& question, Reply reply, const AnswerForm& form)
      : reply_(std::move(reply)),
        stream_(question.stream),
        parser_(form, question, "toolu_", reply_.id, 0) {}

  std::string Begin() override {
    if (!stream_) return "";
    Json message = Message();
    message["usage"] = UsageJson(reply_.prompt_tokens, 0, 0);
    return Event("message_start", {{"message", std::move(message)}});
  }

  std::string Progress(int64_t, int64_t, int64_t) override {
    return stream_ ? Event("ping", Json::object()) : "";
  }

  std::string Add(int32_t, const Piece& piece) override { return Take(parser_.Add(piece.text)); }

  std::string End(int32_t, const Ending& ending) override {
    std::string out = Take(parser_.End());
    out += CloseBlock();
    if (ending.reason != FinishReason::kStop) {
      stop_reason_ = "max_tokens";
    } else if (!ending.stop.empty()) {
      stop_reason_ = "stop_sequence";
      stop_sequence_ = ending.stop;
    } else {
      stop_reason_ = parser_.calls() > 0 ? "tool_use" : "end_turn";
    }
    return out;
  }

  std::string Close(const Usage& usage, const nlohmann::ordered_json& extra) override {
    Json count = UsageJson(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens);
    if (!stream_) {
      Json message = Message();
      message["content"] = std::move(content_);
      message["usage"] = std::move(count);
      AddMembers(&message, extra);
      return Dump(message);
    }
    const Json end = {{"delta", {{"stop_reason", stop_reason_}, {"stop_sequence", stop_sequence_}}},
                      {"usage", std::move(count)}};
    return Event("message_delta", end) +
           Event("message_stop", extra.is_object() ? extra : Json::object());
  }

  std::string Error(const Status& status) override {
    const Json error = AnthropicError(status);
    return stream_ ? NamedEvent("error", error) : Dump(error);
  }

 private:
  static std::string Event(std::string_view type, const Json& members) {
    Json data = {{"type", type}};
    AddMembers(&data, members);
    return NamedEvent(type, data);
  }

  Json Message() const {
    return {
        {"id", "msg_" + reply_.id},       {"type", "message"},        {"role", "assistant"},
        {"model", reply_.model},          {"content", Json::array()}, {"stop_reason", stop_reason_},
        {"stop_sequence", stop_sequence_}};
  }

  // The member of a block that its deltas lengthen, and the type of these.
  static const char* TextMember(const std::string& type) {
    return type == "thinking" ? "thinking" : "text";
  }

  std::string OpenBlock(const std::string& type, Json block) {
    std::string out = CloseBlock();
    open_ = type;
    if (stream_) {
      out += Event("content_block_start", {{"index", blocks_}, {"content_block", block}});
    }
    content_.push_back(std::move(block));
    return out;
  }

  std::string Delta(Json delta) const {
    return Event("content_block_delta", {{"index", blocks_}, {"delta", std::move(delta)}});
  }

  // JSON text of the call whose block is open.
  std::string AddInput(const std::string& text) {
    if (stream_) return Delta({{"type", "input_json_delta"}, {"partial_json", text}});
    input_ += text;
    return "";
  }

  std::string CloseBlock() {
    if (open_.empty()) return "";
    Json input;
    if (!stream_ && open_ == "tool_use" && ParseText(input_, &input) && input.is_object()) {
      content_.back()["input"] = std::move(input);
    }
    input_.clear();
    open_.clear();
    const int32_t index = blocks_++;
    return stream_ ? Event("content_block_stop", {{"index", index}}) : "";
  }

  std::string AddText(const std::string& type, const std::string& text) {
    const char* member = TextMember(type);
    std::string out;
    if (open_ != type) {
      Json block = {{"type", type}, {member, ""}};
      if (type == "thinking") block["signature"] = "";
      out = OpenBlock(type, std::move(block));
    }
    if (stream_) return out + Delta({{"type", type + "_delta"}, {member, text}});
    content_.back()[member].get_ref<std::string&>() += text;
    return out;
  }

  std::string Take(const std::vector<AnswerPart>& parts) {
    std::string out;
    for (const AnswerPart& part : parts) {
      switch (part.kind) {
        case AnswerPart::Kind::kContent:
          out += AddText("text", part.text);
          break;
        case AnswerPart::Kind::kReasoning:
          out += AddText("thinking", part.text);
          break;
        case AnswerPart::Kind::kCall:
          out += OpenBlock("tool_use", {{"type", "tool_use"},
                                        {"id", part.id},
                                        {"name", part.name},
                                        {"input", Json::object()}});
          if (!part.text.empty()) out += AddInput(part.text);
          break;
        case AnswerPart::Kind::kArguments:
          out += AddInput(part.text);
          break;
      }
    }
    return out;
  }

  const Reply reply_;
  const bool stream_;
  AnswerParser parser_;
  std::string open_;    // the type of the block that text goes to; empty: none
  std::string input_;   // of the call whose block is open, where there is no stream
  int32_t blocks_ = 0;  // that are closed
  Json content_ = Json::array();
  Json stop_reason_;
  Json stop_sequence_;
};

}  // namespace

Result<Question> ParseMessages(const Json& body) {
  return Parse(body, true);
}

Result<Question> ParseCountTokens(const Json& body) {
  return Parse(body, false);
}

std::string CountTokensBody(int64_t tokens) {
  return Dump(Json{{"input_tokens", tokens}});
}

std::unique_ptr<Answering> AnswerMessages(const Question& question, Reply reply,
                                          const AnswerForm& form) {
  return std::make_unique<MessagesAnswering>(question, std::move(reply), form);
}

Json AnthropicError(const Status& status) {
  const int number = HttpStatus(status.code());
  const char* type = number == 404   ? "not_found_error"
                     : number == 503 ? "overloaded_error"
                     : number < 500  ? "invalid_request_error"
                                     : "api_error";
  return {{"type", "error"}, {"error", {{"type", type}, {"message", status.message()}}}};
}

}  // namespace omnikv::server
