#include "server/protocol/openai_responses.h"

#include <fmt/format.h>

#include <utility>
#include <vector>

#include "server/protocol/conversation.h"
#include "server/protocol/sampling.h"

namespace omnikv::server {
namespace {

// The assistant's message that ends the conversation so far, or null.
Json* LastAssistant(Question* question) {
  Json& messages = question->messages;
  if (messages.empty() || messages.back().at("role") != "assistant") return nullptr;
  return &messages.back();
}

Json* NewMessage(const std::string& role, const std::string& text, Question* question) {
  question->messages.push_back(Json{{"role", role}, {"content", text}});
  return &question->messages.back();
}

bool SaidNothing(const Json& message) {
  return message.at("content").get_ref<const std::string&>().empty() &&
         !message.contains("tool_calls");
}

Status ReadMessageItem(FieldReader* item, Question* question) {
  std::string role;
  if (!item->Word("role", {"user", "assistant", "system", "developer"}, &role)) {
    item->Fail("role", "user, assistant, system or developer");
  }
  const Json* content = item->Find("content");
  if (content == nullptr) item->Fail("content", "a text or a list of parts");
  OKV_RETURN_IF_ERROR(item->status());
  OKV_ASSIGN_OR_RETURN(const std::string text,
                       ContentText(*content, item->PathOf("content"),
                                   {"input_text", "output_text", "text", "refusal"}));
  Json* last = LastAssistant(question);
  if (role == "assistant" && last != nullptr && SaidNothing(*last)) {
    (*last)["content"] = text;
  } else {
    NewMessage(role == "developer" ? "system" : role, text, question);
  }
  return Status();
}

Status ReadReasoningItem(FieldReader* item, Question* question) {
  std::string text;
  for (const char* field : {"content", "summary"}) {
    const Json* parts = item->Array(field);
    OKV_RETURN_IF_ERROR(item->status());
    if (parts == nullptr || !text.empty()) continue;
    OKV_ASSIGN_OR_RETURN(
        text, ContentText(*parts, item->PathOf(field), {"reasoning_text", "summary_text", "text"}));
  }
  // what is encrypted is another server's
  if (text.empty()) return Status();
  (*NewMessage("assistant", "", question))["reasoning_content"] = text;
  return Status();
}

Status ReadCallItem(FieldReader* item, Question* question) {
  std::string id;
  std::string name;
  std::string arguments;
  if (!item->String("call_id", &id)) item->Fail("call_id", "a text");
  if (!item->String("name", &name)) item->Fail("name", "the name of a function");
  item->String("arguments", &arguments);
  OKV_RETURN_IF_ERROR(item->status());
  Json* message = LastAssistant(question);
  if (message == nullptr) message = NewMessage("assistant", "", question);
  if (!message->contains("tool_calls")) (*message)["tool_calls"] = Json::array();
  (*message)["tool_calls"].push_back(ToolCall(id, name, arguments));
  return Status();
}

Status ReadOutputItem(FieldReader* item, Question* question) {
  std::string id;
  if (!item->String("call_id", &id)) item->Fail("call_id", "a text");
  const Json* output = item->Find("output");
  if (output == nullptr) item->Fail("output", "a text or a list of parts");
  OKV_RETURN_IF_ERROR(item->status());
  OKV_ASSIGN_OR_RETURN(const std::string text, ContentText(*output, item->PathOf("output"),
                                                           {"input_text", "output_text", "text"}));
  (*NewMessage("tool", text, question))["tool_call_id"] = id;
  return Status();
}

Status ReadItem(const Json& json, const std::string& field, Question* question) {
  FieldReader item(json, field + ".");
  std::string type = "message";
  item.String("type", &type);
  OKV_RETURN_IF_ERROR(item.status());
  if (type == "message") return ReadMessageItem(&item, question);
  if (type == "reasoning") return ReadReasoningItem(&item, question);
  if (type == "function_call") return ReadCallItem(&item, question);
  if (type == "function_call_output") return ReadOutputItem(&item, question);
  if (type == "item_reference") return Refused(field, "items are not kept, so send the item");
  return Status();
}

void ReadInput(FieldReader* body, Question* question) {
  question->messages = Json::array();
  std::string instructions;
  if (body->String("instructions", &instructions) && !instructions.empty()) {
    NewMessage("system", instructions, question);
  }
  const Json* input = body->Find("input");
  constexpr char kExpected[] = "a text or an array of at least one item";
  if (input != nullptr && input->is_string()) {
    NewMessage("user", input->get_ref<const std::string&>(), question);
    return;
  }
  if (input == nullptr || !input->is_array() || input->empty()) {
    return body->Fail("input", kExpected);
  }
  for (size_t i = 0; i < input->size() && body->ok(); ++i) {
    body->Check(ReadItem((*input)[i], fmt::format("input[{}]", i), question));
  }
  if (question->messages.empty()) body->Fail("input", "at least one message or call");
  if (body->ok()) MergeLeadingSystem(&question->messages);
}

void ReadTools(FieldReader* body, Question* question) {
  const Json* tools = body->Array("tools");
  if (tools == nullptr) return;
  for (size_t i = 0; i < tools->size() && body->ok(); ++i) {
    FieldReader tool((*tools)[i], fmt::format("tools[{}].", i));
    std::string type;
    std::string name;
    std::string description;
    if (!tool.String("type", &type)) tool.Fail("type", "function");
    if (tool.ok() && type != "function") continue;
    if (!tool.String("name", &name)) tool.Fail("name", "the name of a function");
    tool.String("description", &description);
    const Json* parameters = tool.Object("parameters");
    body->Check(tool.status());
    if (!body->ok()) return;
    AddTool(name, description, parameters == nullptr ? Json() : *parameters, &question->tools);
  }
}

void ReadToolChoice(FieldReader* body, Question* question) {
  const Json* choice = body->Find("tool_choice");
  if (choice == nullptr) return;
  ToolChoice& read = question->tool_choice;
  if (choice->is_object()) {
    FieldReader fields(*choice, "tool_choice.");
    std::string type;
    if (!fields.Word("type", {"function"}, &type)) fields.Fail("type", "function");
    if (!fields.String("name", &read.name)) fields.Fail("name", "the name of a function");
    read.kind = ToolChoice::Kind::kNamed;
    body->Check(fields.status());
  } else if (*choice == "none") {
    read.kind = ToolChoice::Kind::kNone;
  } else if (*choice == "required") {
    read.kind = ToolChoice::Kind::kRequired;
  } else if (*choice != "auto") {
    body->Fail("tool_choice", "none, auto, required or an object that names a function");
  }
  if (body->ok()) body->Check(CheckToolChoice(*question, "tool_choice"));
}

void ReadFormat(FieldReader* body, Question* question) {
  const Json* text = body->Object("text");
  if (text == nullptr) return;
  FieldReader fields(*text, "text.");
  if (const Json* object = fields.Object("format"); object != nullptr) {
    FieldReader format(*object, "text.format.");
    std::string type;
    if (!format.Word("type", {"text", "json_object", "json_schema"}, &type)) {
      format.Fail("type", "text, json_object or json_schema");
    }
    if (type == "json_object") question->format.kind = AnswerFormat::Kind::kJsonObject;
    if (type == "json_schema") {
      const Json* schema = format.Object("schema");
      if (schema == nullptr) format.Fail("schema", "an object");
      if (format.ok()) SetSchema(question, *schema);
    }
    fields.Check(format.status());
  }
  body->Check(fields.status());
}

void ReadReasoning(FieldReader* body, Question* question) {
  if (const Json* given = body->Object("chat_template_kwargs"); given != nullptr) {
    question->template_arguments = *given;
  }
  const Json* object = body->Object("reasoning");
  if (object == nullptr) return;
  FieldReader reasoning(*object, "reasoning.");
  std::string effort;
  if (ReadEffort(&reasoning, "effort", &effort)) SetEffort(question, effort);
  body->Check(reasoning.status());
}

Json ChoiceJson(const ToolChoice& choice) {
  switch (choice.kind) {
    case ToolChoice::Kind::kNone:
      return "none";
    case ToolChoice::Kind::kRequired:
      return "required";
    case ToolChoice::Kind::kNamed:
      return {{"type", "function"}, {"name", choice.name}};
    case ToolChoice::Kind::kAuto:
      break;
  }
  return "auto";
}

Json FormatJson(const AnswerFormat& format) {
  switch (format.kind) {
    case AnswerFormat::Kind::kJsonObject:
      return {{"type", "json_object"}};
    case AnswerFormat::Kind::kJsonSchema:
      return {{"type", "json_schema"}, {"name", "answer"}, {"schema", format.schema}};
    case AnswerFormat::Kind::kText:
      break;
  }
  return {{"type", "text"}};
}

// The members of a response that the question decides.
Json Echo(const Question& question) {
  Json tools = Json::array();
  for (size_t i = 0; question.tools.is_array() && i < question.tools.size(); ++i) {
    Json tool = {{"type", "function"}};
    AddMembers(&tool, question.tools[i].at("function"));
    if (!tool.contains("parameters")) tool["parameters"] = Json();
    tool["strict"] = false;
    tools.push_back(std::move(tool));
  }
  Json effort;
  if (question.template_arguments.is_object()) {
    const auto found = question.template_arguments.find("reasoning_effort");
    if (found != question.template_arguments.end() && found->is_string()) effort = *found;
  }
  return {{"instructions", Json()},
          {"max_output_tokens", question.limited ? Json(question.generate.max_tokens) : Json()},
          {"parallel_tool_calls", question.parallel_tool_calls},
          {"previous_response_id", Json()},
          {"reasoning", {{"effort", std::move(effort)}, {"summary", Json()}}},
          {"store", false},
          {"temperature", question.generate.sampling.temperature},
          {"text", {{"format", FormatJson(question.format)}}},
          {"tool_choice", ChoiceJson(question.tool_choice)},
          {"tools", std::move(tools)},
          {"top_p", question.generate.sampling.top_p},
          {"truncation", "disabled"},
          {"background", false},
          {"metadata", Json::object()}};
}

class ResponsesAnswering : public Answering {
 public:
  ResponsesAnswering(const Question& question, Reply reply, const AnswerForm& form)
      : reply_(std::move(reply)),
        stream_(question.stream),
        echo_(Echo(question)),
        parser_(form, question, "call_", reply_.id, 0) {}

  std::string Begin() override {
    const Json response = Response("in_progress");
    std::string out = Event("response.created", {{"response", response}});
    out += Event("response.in_progress", {{"response", response}});
    return out;
  }

  std::string Progress(int64_t, int64_t, int64_t) override { return ""; }

  std::string Add(int32_t, const Piece& piece) override { return Take(parser_.Add(piece.text)); }

  std::string End(int32_t, const Ending& ending) override {
    std::string out = Take(parser_.End());
    complete_ = ending.reason == FinishReason::kStop;
    out += CloseItem(complete_);
    return out;
  }

  std::string Close(const Usage& usage, const nlohmann::ordered_json& extra) override {
    Json response = Response(complete_ ? "completed" : "incomplete");
    if (!complete_) response["incomplete_details"] = {{"reason", "max_output_tokens"}};
    response["usage"] = {{"input_tokens", usage.prompt_tokens},
                         {"input_tokens_details",
                          {{"cached_tokens", usage.cached_tokens}, {"cache_write_tokens", 0}}},
                         {"output_tokens", usage.completion_tokens},
                         {"output_tokens_details", {{"reasoning_tokens", 0}}},
                         {"total_tokens", usage.prompt_tokens + usage.completion_tokens}};
    AddMembers(&response, extra);
    if (!stream_) return Dump(response);
    return Event(complete_ ? "response.completed" : "response.incomplete",
                 {{"response", std::move(response)}});
  }

  std::string Error(const Status& status) override {
    if (!stream_) return Dump(OpenAiError(status));
    Json response = Response("failed");
    response["error"] = {
        {"code", HttpStatus(status.code()) == 400 ? "invalid_prompt" : "server_error"},
        {"message", status.message()}};
    return Event("response.failed", {{"response", std::move(response)}});
  }

 private:
  // What differs between the two kinds of items that hold text.
  struct Kind {
    const char* item;    // type of the item
    const char* prefix;  // of its id
    const char* part;    // type of the part of its content
    const char* event;
  };
  static constexpr Kind kMessage = {"message", "msg_", "output_text", "response.output_text"};
  static constexpr Kind kReasoning = {"reasoning", "rs_", "reasoning_text",
                                      "response.reasoning_text"};

  Json Response(const char* status) const {
    Json response = {
        {"id", "resp_" + reply_.id}, {"object", "response"}, {"created_at", reply_.created},
        {"status", status},          {"error", Json()},      {"incomplete_details", Json()},
        {"model", reply_.model},     {"output", output_}};
    AddMembers(&response, echo_);
    response["usage"] = Json();
    return response;
  }

  // "" where the question asks for no stream.
  std::string Event(const std::string& type, const Json& members) {
    if (!stream_) return "";
    Json data = {{"type", type}, {"sequence_number", sequence_++}};
    AddMembers(&data, members);
    return NamedEvent(type, data);
  }

  // The place of the item that is open, or comes next.
  size_t Index() const { return output_.size(); }
  std::string ItemId(const char* prefix) const {
    return fmt::format("{}{}_{}", prefix, reply_.id, Index());
  }

  Json Part(const std::string& text) const {
    Json part = {{"type", open_->part}, {"text", text}};
    if (open_ == &kMessage) {
      part["annotations"] = Json::array();
      part["logprobs"] = Json::array();
    }
    return part;
  }

  Json Item(const char* status, Json content) const {
    Json item = {{"type", open_->item}, {"id", ItemId(open_->prefix)}, {"status", status}};
    if (open_ == &kMessage) {
      item["role"] = "assistant";
    } else {
      item["summary"] = Json::array();
    }
    item["content"] = std::move(content);
    return item;
  }

  // Members of events that say where in the response they belong.
  Json Place(const Json& members) const {
    Json place = {
        {"item_id", ItemId(open_->prefix)}, {"output_index", Index()}, {"content_index", 0}};
    AddMembers(&place, members);
    return place;
  }

  Json TextEvent(const char* member, const std::string& text) const {
    Json members = Place({{member, text}});
    if (open_ == &kMessage) members["logprobs"] = Json::array();
    return members;
  }

  std::string AddText(const Kind* kind, const std::string& text) {
    std::string out;
    if (open_ != kind) {
      out += CloseItem(true);
      open_ = kind;
      out += Event("response.output_item.added",
                   {{"output_index", Index()}, {"item", Item("in_progress", Json::array())}});
      out += Event("response.content_part.added", Place({{"part", Part("")}}));
    }
    text_ += text;
    out += Event(std::string(kind->event) + ".delta", TextEvent("delta", text));
    return out;
  }

  std::string CloseItem(bool complete) {
    if (!call_.is_null()) return CloseCall(complete);
    if (open_ == nullptr) return "";
    std::string out = Event(std::string(open_->event) + ".done", TextEvent("text", text_));
    const Json part = Part(text_);
    out += Event("response.content_part.done", Place({{"part", part}}));
    Json content = Json::array();
    content.push_back(part);
    Json item = Item(complete ? "completed" : "incomplete", std::move(content));
    out += Event("response.output_item.done", {{"output_index", Index()}, {"item", item}});
    output_.push_back(std::move(item));
    open_ = nullptr;
    text_.clear();
    return out;
  }

  std::string OpenCall(const AnswerPart& call) {
    std::string out = CloseItem(true);
    call_ = {{"type", "function_call"}, {"id", ItemId("fc_")}, {"status", "in_progress"},
             {"call_id", call.id},      {"name", call.name},   {"arguments", ""}};
    out += Event("response.output_item.added", {{"output_index", Index()}, {"item", call_}});
    return call.text.empty() ? out : out.append(AddArguments(call.text));
  }

  std::string CallEvent(const char* type, const char* member, const std::string& text) {
    return Event(type, {{"item_id", call_["id"]}, {"output_index", Index()}, {member, text}});
  }

  std::string AddArguments(const std::string& text) {
    text_ += text;
    return CallEvent("response.function_call_arguments.delta", "delta", text);
  }

  // A call whose arguments are whole is complete, though the answer may be cut short after it.
  std::string CloseCall(bool complete) {
    Json arguments;
    complete = complete || ParseText(text_, &arguments);
    std::string out = CallEvent("response.function_call_arguments.done", "arguments", text_);
    call_["status"] = complete ? "completed" : "incomplete";
    call_["arguments"] = std::exchange(text_, "");
    out += Event("response.output_item.done", {{"output_index", Index()}, {"item", call_}});
    output_.push_back(std::exchange(call_, Json()));
    return out;
  }

  std::string Take(const std::vector<AnswerPart>& parts) {
    std::string out;
    for (const AnswerPart& part : parts) {
      switch (part.kind) {
        case AnswerPart::Kind::kContent:
          out += AddText(&kMessage, part.text);
          break;
        case AnswerPart::Kind::kReasoning:
          out += AddText(&kReasoning, part.text);
          break;
        case AnswerPart::Kind::kCall:
          out += OpenCall(part);
          break;
        case AnswerPart::Kind::kArguments:
          out += AddArguments(part.text);
          break;
      }
    }
    return out;
  }

  const Reply reply_;
  const bool stream_;
  const Json echo_;
  AnswerParser parser_;
  int64_t sequence_ = 0;
  Json output_ = Json::array();  // items that are closed
  const Kind* open_ = nullptr;   // of the item that text goes to
  Json call_;                    // or the item of the call that is open
  std::string text_;             // its text, or its arguments
  bool complete_ = false;
};

}  // namespace

Result<Question> ParseResponses(const Json& json) {
  FieldReader body(json);
  Question question;
  body.Refuse("previous_response_id",
              "answers are not kept, so send the whole conversation as input");
  body.Refuse("conversation", "conversations are not kept, so send all of it as input");
  body.Refuse("background", "answers are not kept, so they cannot be fetched later");
  body.Refuse("prompt", "prompts are not kept, so send the text as input");
  ReadInput(&body, &question);
  ReadCommon(&body, &question);
  ReadMaxTokens(&body, "max_output_tokens", &question);
  ReadStop(&body, "stop", &question.generate.stop);
  ReadTools(&body, &question);
  ReadToolChoice(&body, &question);
  body.Bool("parallel_tool_calls", &question.parallel_tool_calls);
  ReadFormat(&body, &question);
  ReadReasoning(&body, &question);
  OKV_RETURN_IF_ERROR(body.status());
  return question;
}

std::unique_ptr<Answering> AnswerResponses(const Question& question, Reply reply,
                                           const AnswerForm& form) {
  return std::make_unique<ResponsesAnswering>(question, std::move(reply), form);
}

}  // namespace omnikv::server
