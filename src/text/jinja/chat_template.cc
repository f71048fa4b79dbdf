#include "text/jinja/chat_template.h"

#include <fmt/format.h>

#include <array>
#include <new>
#include <string_view>
#include <utility>

#include "base/own_stack.h"
#include "base/printable.h"
#include "text/jinja/interpreter.h"
#include "text/jinja/parser.h"

namespace omnikv {
namespace {

using jinja::Value;
using Json = nlohmann::ordered_json;

constexpr size_t kMaxSource = size_t{1} << 20;  // bytes; the largest published one has 20 KB
constexpr size_t kShownBytes = 1000;            // of a sentence, which may hold text of the file

// What a template calls the input; extra variables cannot take these names.
constexpr std::array<std::string_view, 5> kOwnNames = {"messages", "tools", "add_generation_prompt",
                                                       "bos_token", "eos_token"};

std::tm LocalTime() {
  const std::time_t seconds = std::time(nullptr);
  std::tm local{};
  localtime_r(&seconds, &local);
  return local;
}

// A message as the template sees it. As in transformers, what a model thought is known under all
// the names that templates look for.
Value MessageValue(jinja::Runtime& rt, const Json& message) {
  for (const char* name : {"reasoning_content", "thinking", "reasoning"}) {
    const auto it = message.find(name);
    if (it == message.end() || it->is_null()) continue;
    Json named = Json::object();
    named["thinking"] = *it;
    for (const auto& [key, value] : message.items()) named[key] = value;
    named["reasoning_content"] = *it;
    return jinja::FromJson(rt, named, true);
  }
  return jinja::FromJson(rt, message, true);
}

Status CheckArrayOfObjects(const Json& json, std::string_view name) {
  if (!json.is_array()) {
    return InvalidArgument(fmt::format("{} is {}, expected an array of objects", name,
                                       json.is_null() ? "missing" : json.type_name()));
  }
  for (size_t i = 0; i < json.size(); ++i) {
    if (json[i].is_object()) continue;
    return InvalidArgument(
        fmt::format("{}[{}] is a {}, expected an object", name, i, json[i].type_name()));
  }
  return Status();
}

Status CheckInput(const ChatInput& input) {
  OKV_RETURN_IF_ERROR(CheckArrayOfObjects(input.messages, "messages"));
  if (!input.tools.is_null()) OKV_RETURN_IF_ERROR(CheckArrayOfObjects(input.tools, "tools"));
  for (const Json* variables : {&input.extra, &input.special_tokens}) {
    if (variables->is_null()) continue;
    if (!variables->is_object()) {
      return InvalidArgument(fmt::format(
          "the variables of a chat template are a {}, expected an object", variables->type_name()));
    }
    for (const std::string_view name : kOwnNames) {
      if (variables->contains(name)) {
        return InvalidArgument(
            fmt::format("'{}' is not free as the name of a chat template's variable", name));
      }
    }
  }
  return Status();
}

// Views in the result are of `input`'s strings and of constants.
std::vector<std::pair<std::string_view, Value>> Variables(jinja::Runtime& rt,
                                                          const ChatInput& input) {
  std::vector<std::pair<std::string_view, Value>> variables;
  std::vector<Value> messages;
  for (const Json& message : input.messages) messages.push_back(MessageValue(rt, message));
  variables.emplace_back("messages", rt.List(std::move(messages)));
  variables.emplace_back("tools", jinja::FromJson(rt, input.tools, true));
  variables.emplace_back("add_generation_prompt", Value(input.add_generation_prompt));
  if (!input.bos_token.empty()) variables.emplace_back("bos_token", rt.Text(input.bos_token));
  if (!input.eos_token.empty()) variables.emplace_back("eos_token", rt.Text(input.eos_token));
  const auto add = [&](const Json& object, bool literal) {
    for (auto it = object.begin(); it != object.end(); ++it) {
      variables.emplace_back(it.key(), jinja::FromJson(rt, it.value(), literal));
    }
  };
  if (input.extra.is_object()) add(input.extra, true);
  if (input.special_tokens.is_object()) add(input.special_tokens, false);
  variables.emplace_back("documents", Value(jinja::None{}));  // found last: extra's come first
  return variables;
}

}  // namespace

// It may nest deeply, so it is made, walked and let go of on a stack of its own.
struct ChatTemplate::Tree {
  std::string what;
  std::string written;
  jinja::Block block;

  static std::shared_ptr<Tree> New(const std::string& what) {
    return {new Tree{what, {}, {}}, [](Tree* tree) {
              if (!RunOnOwnStack([&] { delete tree; }).ok()) delete tree;
            }};
  }
  Status Parse(std::string_view source);
  Result<std::vector<TextSpan>> Render(const ChatInput& input, const RenderLimits& limits) const;
};

Result<ChatTemplate> ChatTemplate::Parse(std::string source, const std::string& what) {
  if (source.size() > kMaxSource) {
    return Corrupt(fmt::format("{}: the template has {} bytes, at most {} are allowed", what,
                               source.size(), kMaxSource));
  }
  const std::shared_ptr<Tree> tree = Tree::New(what);
  Status parsed;
  const Status ran = RunOnOwnStack([&] { parsed = tree->Parse(source); });
  OKV_RETURN_IF_ERROR(ran.Prefixed(what));
  OKV_RETURN_IF_ERROR(parsed);
  return ChatTemplate(tree);
}

Status ChatTemplate::Tree::Parse(std::string_view source) {
  try {
    std::vector<jinja::Token> tokens = jinja::Tokenize(source);
    jinja::TokenKind last = jinja::TokenKind::kEnd;
    for (const jinja::Token& token : tokens) {
      // String constants side by side are one.
      const bool joins = last == jinja::TokenKind::kString && token.kind == last;
      if (!joins && !written.empty() && written.back() != 0) written += '\0';
      last = token.kind;
      if (last == jinja::TokenKind::kData || last == jinja::TokenKind::kString) {
        written += token.text;
      }
    }
    block = jinja::Parse(std::move(tokens));
    return {};
  } catch (const jinja::SyntaxError& e) {
    return Status(e.code,
                  fmt::format("{}, line {}: {}", what, e.line, Escaped(e.message, kShownBytes)));
  } catch (const std::bad_alloc&) {
    return ResourceExhausted(fmt::format("{}: memory ran out while parsing the template", what));
  }
}

Result<std::vector<TextSpan>> ChatTemplate::Render(const ChatInput& input,
                                                   const RenderLimits& limits) const {
  Result<std::vector<TextSpan>> spans = Failed("");
  const Status ran = RunOnOwnStack([&] { spans = tree_->Render(input, limits); });
  OKV_RETURN_IF_ERROR(ran.Prefixed(tree_->what));
  return spans;
}

Result<std::vector<TextSpan>> ChatTemplate::Tree::Render(const ChatInput& input,
                                                         const RenderLimits& limits) const {
  jinja::Runtime rt(jinja::Budget(limits.max_work, limits.max_bytes), limits.max_depth,
                    input.now ? *input.now : LocalTime());
  try {
    OKV_RETURN_IF_ERROR(CheckInput(input).Prefixed(what));
    jinja::Interpreter interpreter(rt, block);
    return interpreter.Run(Variables(rt, input)).Spans();
  } catch (const jinja::Error& e) {
    const std::string where = rt.line == 0 ? "" : fmt::format(", line {}", rt.line);
    return Status(e.code, fmt::format("{}{}: {}", what, where, Escaped(e.message, kShownBytes)));
  } catch (const std::bad_alloc&) {
    return ResourceExhausted(fmt::format("{}: memory ran out while rendering", what));
  } catch (const Json::exception& e) {
    return InvalidArgument(fmt::format("{}: the input is no proper JSON: {}", what, e.what()));
  }
}

const std::string& ChatTemplate::written() const {
  return tree_->written;
}

Result<std::string> ChatTemplate::RenderText(const ChatInput& input) const {
  OKV_ASSIGN_OR_RETURN(const std::vector<TextSpan> spans, Render(input));
  std::string text;
  for (const TextSpan& span : spans) text += span.text;
  return text;
}

}  // namespace omnikv
