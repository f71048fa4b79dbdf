#include "server/protocol/conversation.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/printable.h"
#include "server/protocol/tool_calls.h"

namespace omnikv::server {

Result<std::string> ContentText(const Json& content, const std::string& field,
                                std::initializer_list<std::string_view> text_types) {
  if (content.is_null()) return std::string();
  if (content.is_string()) return content.get_ref<const std::string&>();
  if (!content.is_array()) return Wrong(field, content, "a text or a list of parts");
  std::string all;
  for (size_t i = 0; i < content.size(); ++i) {
    const std::string where = fmt::format("{}[{}]", field, i);
    FieldReader part(content[i], where + ".");
    std::string type;
    std::string text;
    if (!part.String("type", &type)) part.Fail("type", "the type of a part");
    OKV_RETURN_IF_ERROR(part.status());
    if (std::find(text_types.begin(), text_types.end(), type) == text_types.end()) {
      return Refused(where,
                     fmt::format("it is of type {}, and models read text only", Printable(type)));
    }
    if (!part.String(type == "refusal" ? "refusal" : "text", &text)) part.Fail("text", "a text");
    OKV_RETURN_IF_ERROR(part.status());
    if (i > 0) all += '\n';
    all += text;
  }
  return all;
}

Json ToolCall(const std::string& id, const std::string& name, const std::string& arguments) {
  Json parsed;
  if (arguments.empty()) {
    parsed = Json::object();
  } else if (!ParseText(arguments, &parsed) || !parsed.is_object()) {
    parsed = arguments;
  }
  return {{"id", id},
          {"type", "function"},
          {"function", {{"name", name}, {"arguments", std::move(parsed)}}}};
}

void AddTool(const std::string& name, const std::string& description, const Json& parameters,
             Json* tools) {
  Json function = {{"name", name}};
  if (!description.empty()) function["description"] = description;
  if (!parameters.is_null()) function["parameters"] = parameters;
  if (!tools->is_array()) *tools = Json::array();
  tools->push_back(Json{{"type", "function"}, {"function", std::move(function)}});
}

bool HasTool(const Json& tools, std::string_view name) {
  if (!tools.is_array()) return false;
  return std::any_of(tools.begin(), tools.end(), [&](const Json& tool) {
    return tool.at("function").at("name").get_ref<const std::string&>() == name;
  });
}

Status CheckToolChoice(const Question& question, const std::string& field) {
  const ToolChoice& choice = question.tool_choice;
  if (choice.kind == ToolChoice::Kind::kRequired && question.tools.empty()) {
    return InvalidArgument(
        fmt::format("`{}` demands a call, but there are no tools, expected some", field));
  }
  if (choice.kind == ToolChoice::Kind::kNamed && !HasTool(question.tools, choice.name)) {
    return InvalidArgument(fmt::format("`{}` names the tool {}, expected one of the tools", field,
                                       Printable(choice.name)));
  }
  return Status();
}

void MergeLeadingSystem(Json* messages) {
  const auto system = [&](size_t i) {
    return i < messages->size() && (*messages)[i].at("role") == "system";
  };
  size_t number = 0;
  while (system(number)) ++number;
  if (number < 2) return;
  std::string all;
  for (size_t i = 0; i < number; ++i) {
    const auto& text = (*messages)[i].at("content").get_ref<const std::string&>();
    if (!all.empty() && !text.empty()) all += "\n\n";
    all += text;
  }
  (*messages)[0]["content"] = std::move(all);
  messages->erase(messages->begin() + 1, messages->begin() + static_cast<ptrdiff_t>(number));
}

void SetDefaultArgument(Question* question, const std::string& name, Json value) {
  Json& arguments = question->template_arguments;
  if (!arguments.is_object()) arguments = Json::object();
  if (!arguments.contains(name)) arguments[name] = std::move(value);
}

bool ReadEffort(FieldReader* fields, std::string_view name, std::string* effort) {
  return fields->Word(name, {"none", "minimal", "low", "medium", "high", "xhigh", "max"}, effort);
}

void SetEffort(Question* question, const std::string& effort) {
  SetDefaultArgument(question, "reasoning_effort", effort);
  if (effort == "none") SetDefaultArgument(question, "enable_thinking", false);
}

namespace {

// The text that a model which knows only the generic form would have written.
std::string GenericCalls(const Json& message) {
  Json calls = Json::array();
  for (const Json& call : message.at("tool_calls")) calls.push_back(call.at("function"));
  std::string text = message.at("content").get_ref<const std::string&>();
  if (!text.empty()) text += '\n';
  return text + Dump(Json{{"tool_calls", std::move(calls)}});
}

std::string GenericResult(const Json& message) {
  Json result = Json::object();
  for (const char* key : {"tool_call_id", "name"}) {
    if (message.contains(key)) result[key] = message.at(key);
  }
  result["result"] = message.at("content");
  return Dump(result);
}

}  // namespace

void UseGenericForm(Question* question) {
  if (!question->messages.is_array()) return;
  Json messages = Json::array();
  bool results = false;  // the last message is one of results
  for (const Json& message : question->messages) {
    const Json& role = message.at("role");
    if (role == "tool" || (results && role == "user")) {
      const std::string text = role == "tool" ? GenericResult(message)
                                              : message.at("content").get_ref<const std::string&>();
      if (results) {
        messages.back().at("content").get_ref<std::string&>() += "\n" + text;
      } else {
        messages.push_back(Json{{"role", "user"}, {"content", text}});
      }
      results = role == "tool";
      continue;
    }
    results = false;
    messages.push_back(message);
    if (!message.contains("tool_calls")) continue;
    messages.back()["content"] = GenericCalls(message);
    messages.back().erase("tool_calls");
  }
  question->messages = std::move(messages);
  const ToolChoice::Kind choice = question->tool_choice.kind;
  if (question->tools.empty() || choice == ToolChoice::Kind::kNone) return;
  question->messages.insert(
      question->messages.begin(),
      Json{{"role", "system"}, {"content", GenericInstruction(question->tools)}});
  MergeLeadingSystem(&question->messages);
  if (question->format.kind != AnswerFormat::Kind::kText) return;
  Json tools = question->tools;
  if (choice == ToolChoice::Kind::kNamed) {
    tools = Json::array();
    for (const Json& tool : question->tools) {
      if (tool.at("function").at("name") == question->tool_choice.name) tools.push_back(tool);
    }
  }
  SetSchema(question,
            GenericSchema(tools, choice != ToolChoice::Kind::kAuto, question->parallel_tool_calls));
}

void SetSchema(Question* question, const Json& schema) {
  question->format.kind = AnswerFormat::Kind::kJsonSchema;
  question->format.schema = schema;
}

}  // namespace omnikv::server
