#include "server/protocol/tool_calls.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <iterator>
#include <utility>

namespace omnikv::server {
namespace {

using Outcome = CallReader::Outcome;
using Read = CallReader::Read;

constexpr std::string_view kSpace = " \t\r\n";

size_t SkipSpace(std::string_view text, size_t pos) {
  return std::min(text.find_first_not_of(kSpace, pos), text.size());
}

// Whether `word` stands at `pos`, may still come to stand there, or does not.
enum class Match { kYes, kMaybe, kNo };
Match MatchAt(std::string_view text, size_t pos, std::string_view word) {
  const std::string_view rest = text.substr(pos, word.size());
  if (rest == word) return Match::kYes;
  return pos + rest.size() == text.size() && word.starts_with(rest) ? Match::kMaybe : Match::kNo;
}

Read Undecided(bool final) {
  return {.outcome = final ? Outcome::kBad : Outcome::kMore};
}

Read Bad() {
  return {.outcome = Outcome::kBad};
}

// The end of a call whose text ends at `end`, with the marker that closes it.
Read Closed(std::string_view text, size_t end, std::string_view close, bool final) {
  Read read = {.outcome = Outcome::kGood, .size = end};
  if (close.empty()) return read;
  const size_t pos = SkipSpace(text, end);
  const Match match = MatchAt(text, pos, close);
  if (match == Match::kMaybe && !final) return {.outcome = Outcome::kMore};
  if (match == Match::kYes) read.size = pos + close.size();
  return read;
}

// Arguments as JSON text: an object, or a text that holds one.
bool ArgumentsText(const Json& value, std::string* out) {
  Json parsed;
  if (value.is_object()) {
    *out = Dump(value);
  } else if (value.is_null()) {
    *out = "{}";
  } else if (value.is_string() && ParseText(value.get_ref<const std::string&>(), &parsed) &&
             parsed.is_object()) {
    *out = value.get_ref<const std::string&>();
  } else {
    return false;
  }
  return true;
}

bool CallOf(const Json& json, CallText* call) {
  if (!json.is_object()) return false;
  const auto nested = json.find("function");
  if (nested != json.end() && nested->is_object()) return CallOf(*nested, call);
  auto name = json.find("name");
  // Granite 3.0 writes the name there now and then
  if (name == json.end()) name = nested;
  if (name == json.end() || !name->is_string()) return false;
  call->name = name->get_ref<const std::string&>();
  if (call->name.empty()) return false;
  for (const char* key : {"arguments", "parameters"}) {
    const auto found = json.find(key);
    if (found != json.end()) return ArgumentsText(*found, &call->arguments);
  }
  call->arguments = "{}";
  return true;
}

bool CallsOf(const Json& json, std::vector<CallText>* calls) {
  if (json.is_array()) {
    for (const Json& one : json) {
      if (!CallOf(one, &calls->emplace_back())) return false;
    }
    return !json.empty();
  }
  return CallOf(json, &calls->emplace_back());
}

const Json* Member(const Json* object, std::string_view key) {
  if (object == nullptr || !object->is_object()) return nullptr;
  const auto found = object->find(std::string(key));
  return found == object->end() ? nullptr : &*found;
}

const Json* FindTool(const Json& tools, std::string_view name) {
  if (!tools.is_array()) return nullptr;
  for (const Json& tool : tools) {
    const Json* function = Member(&tool, "function");
    const Json* own = Member(function, "name");
    if (own != nullptr && own->is_string() && own->get_ref<const std::string&>() == name) {
      return function;
    }
  }
  return nullptr;
}

// Whether a schema allows values of `type`; one that names no type allows texts.
bool Allows(const Json* schema, std::string_view type) {
  const Json* types = Member(schema, "type");
  if (types == nullptr) return type == "string";
  if (types->is_string()) return types->get_ref<const std::string&>() == type;
  return types->is_array() && std::any_of(types->begin(), types->end(), [&](const Json& one) {
           return one.is_string() && one.get_ref<const std::string&>() == type;
         });
}

// A value of XML by the type that the tool's schema gives it.
Json TypedValue(const std::string& text, const Json* schema) {
  Json parsed;
  if (Allows(schema, "null") && text == "null") return parsed;
  if (Allows(schema, "string")) return text;
  if (Allows(schema, "boolean") && (text == "True" || text == "False")) return text == "True";
  return ParseText(text, &parsed) ? parsed : Json(text);
}

// Whether an object that begins a text may be a call, by its first key: an answer in JSON is not to
// be held back to its end.
bool MayBeCall(std::string_view object, bool generic) {
  const size_t quote = SkipSpace(object, 1);
  if (quote == object.size()) return true;
  constexpr std::string_view kCall[] = {"\"name\"",     "\"type\"",      "\"id\"",
                                        "\"function\"", "\"arguments\"", "\"parameters\""};
  constexpr std::string_view kGeneric[] = {"\"tool_calls\"", "\"tool_call\"", "\"response\""};
  const auto fits = [&](std::string_view key) { return MatchAt(object, quote, key) != Match::kNo; };
  return generic ? std::any_of(std::begin(kGeneric), std::end(kGeneric), fits)
                 : std::any_of(std::begin(kCall), std::end(kCall), fits);
}

// The body between <function=N> and </function>.
bool ReadParameters(std::string_view body, const Json* function, Json* arguments) {
  constexpr std::string_view kOpen = "<parameter=";
  constexpr std::string_view kClose = "</parameter>";
  const Json* properties = Member(Member(function, "parameters"), "properties");
  *arguments = Json::object();
  size_t pos = SkipSpace(body, 0);
  while (pos < body.size()) {
    if (!body.substr(pos).starts_with(kOpen)) return false;
    pos += kOpen.size();
    const size_t name_end = body.find('>', pos);
    if (name_end == std::string_view::npos) return false;
    const std::string name(body.substr(pos, name_end - pos));
    // a value may hold the marker that closes it: the one before a parameter or the end counts
    size_t close = body.find(kClose, name_end + 1);
    size_t next = 0;
    for (; close != std::string_view::npos; close = body.find(kClose, close + 1)) {
      next = SkipSpace(body, close + kClose.size());
      if (next == body.size() || body.substr(next).starts_with(kOpen)) break;
    }
    if (close == std::string_view::npos) return false;
    std::string_view value = body.substr(name_end + 1, close - name_end - 1);
    if (value.starts_with('\n')) value.remove_prefix(1);
    if (value.ends_with('\n')) value.remove_suffix(1);
    (*arguments)[name] = TypedValue(std::string(value), Member(properties, name));
    pos = next;
  }
  return true;
}

}  // namespace

const char* ToolFormatName(ToolFormat format) {
  switch (format) {
    case ToolFormat::kHermes:
      return "hermes";
    case ToolFormat::kQwenXml:
      return "qwen_xml";
    case ToolFormat::kLlama:
      return "llama";
    case ToolFormat::kMistral:
      return "mistral";
    case ToolFormat::kGranite:
      return "granite";
    case ToolFormat::kPhi:
      return "phi";
    case ToolFormat::kGeneric:
      return "generic";
  }
  return "?";
}

ToolFormat DetectToolFormat(std::string_view written) {
  const auto has = [&](std::string_view text) {
    return written.find(text) != std::string_view::npos;
  };
  if (has("<function=") && has("<parameter=")) return ToolFormat::kQwenXml;
  if (has("[TOOL_CALLS]")) return ToolFormat::kMistral;
  if (has("functools") || has("<|tool|>")) return ToolFormat::kPhi;
  // GLM has <tool_call> too, but no JSON in it
  if (has("<tool_call>") && !has("<arg_key>")) return ToolFormat::kHermes;
  if (has("<|tool_call|>") || has("<function_call>") || has("<|start_of_role|>")) {
    return ToolFormat::kGranite;
  }
  if (has("<|python_tag|>") || has("\"parameters\": dictionary of argument name")) {
    return ToolFormat::kLlama;
  }
  return ToolFormat::kGeneric;
}

Json GenericSchema(const Json& tools, bool must_call, bool parallel) {
  Json calls = {{"type", "array"}, {"minItems", 1}};
  if (!parallel) calls["maxItems"] = 1;
  Json one_of = Json::array();
  if (tools.is_array()) {
    for (const Json& tool : tools) {
      const Json* function = Member(&tool, "function");
      const Json* name = Member(function, "name");
      const Json* parameters = Member(function, "parameters");
      if (name == nullptr) continue;
      one_of.push_back(
          Json{{"type", "object"},
               {"properties",
                {{"name", {{"const", *name}}},
                 {"arguments", parameters != nullptr ? *parameters : Json{{"type", "object"}}}}},
               {"required", Json::array({"name", "arguments"})},
               {"additionalProperties", false}});
    }
  }
  calls["items"] = {{"anyOf", std::move(one_of)}};
  const auto object = [](const char* name, Json schema) {
    Json properties = Json::object();
    properties[name] = std::move(schema);
    return Json{{"type", "object"},
                {"properties", std::move(properties)},
                {"required", Json::array({name})},
                {"additionalProperties", false}};
  };
  Json with_calls = object("tool_calls", std::move(calls));
  if (must_call) return with_calls;
  Json any = Json::array();
  any.push_back(std::move(with_calls));
  any.push_back(object("response", {{"type", "string"}}));
  return {{"anyOf", std::move(any)}};
}

std::string GenericInstruction(const Json& tools) {
  std::string list;
  for (size_t i = 0; tools.is_array() && i < tools.size(); ++i) {
    if (const Json* function = Member(&tools[i], "function"); function != nullptr) {
      list += Dump(*function) + "\n";
    }
  }
  return "You can call these functions, each given as JSON:\n" + list +
         "Answer with one JSON object and nothing else. To call functions, write "
         R"({"tool_calls": [{"name": NAME, "arguments": {...}}]}. To answer in words, write )"
         R"({"response": TEXT}.)";
}

std::vector<CallMarker> CallMarkers(ToolFormat format) {
  using Body = CallMarker::Body;
  const CallMarker hermes = {"<tool_call>", "</tool_call>"};
  switch (format) {
    case ToolFormat::kHermes:
      return {hermes};
    case ToolFormat::kQwenXml:
      return {{"<tool_call>", "</tool_call>", Body::kXml},
              {"<function=", "</tool_call>", Body::kXml}};
    case ToolFormat::kLlama:
      return {{"<|python_tag|>", ""}, {"", ""}};
    case ToolFormat::kMistral:
      return {{"[TOOL_CALLS]", "", Body::kMistral}};
    case ToolFormat::kGranite:
      return {{"<|tool_call|>", ""}, hermes, {"<function_call>", "</function_call>"}};
    case ToolFormat::kPhi:
      return {{"functools[", "", Body::kJson, 9}, {"<|tool_call|>", "<|/tool_call|>"}};
    case ToolFormat::kGeneric:
      return {hermes, {"", "", Body::kResponse}};
  }
  return {};
}

bool JsonScan::End(std::string_view text, size_t begin, size_t* end) {
  for (pos_ = std::max(pos_, begin); !done_ && pos_ < text.size(); ++pos_) {
    const char c = text[pos_];
    if (in_string_) {
      if (escaped_) {
        escaped_ = false;
      } else if (c == '\\') {
        escaped_ = true;
      } else if (c == '"') {
        in_string_ = false;
      }
    } else if (c == '"') {
      in_string_ = true;
    } else if (c == '{' || c == '[') {
      ++depth_;
    } else if ((c == '}' || c == ']') && --depth_ == 0) {
      done_ = true;
    }
  }
  *end = pos_;
  return done_;
}

size_t CallReader::Begin(std::string_view text) const {
  return SkipSpace(text, marker_.body_at > 0 ? marker_.body_at : marker_.open.size());
}

CallReader::Read CallReader::Next(std::string_view text, bool final) {
  const size_t begin = Begin(text);
  if (begin == text.size()) return Undecided(final);
  const bool json = text[begin] == '{' || text[begin] == '[';
  if (marker_.body == CallMarker::Body::kXml && text[begin] != '{') {
    return ReadXml(text, begin, final);
  }
  if (marker_.body != CallMarker::Body::kMistral || json) return ReadJson(text, begin, final);
  const Head head = MistralHead(text, begin, final);
  size_t end = 0;
  if (head.outcome != Outcome::kGood) return {.outcome = head.outcome};
  if (!scan_.End(text, head.arguments, &end)) return Undecided(final);
  Json arguments;
  if (!ParseText(text.substr(head.arguments, end - head.arguments), &arguments)) return Bad();
  Read read = {.outcome = Outcome::kGood, .size = end};
  read.calls.push_back({head.name, Dump(arguments)});
  return read;
}

CallReader::Head CallReader::ReadHead(std::string_view text, bool final) const {
  const size_t begin = Begin(text);
  const Head undecided = {.outcome = final ? Outcome::kBad : Outcome::kMore};
  if (begin == text.size()) return undecided;
  if (marker_.body == CallMarker::Body::kResponse || text[begin] == '[') {
    return {.outcome = Outcome::kBad};
  }
  if (text[begin] == '{') return JsonHead(text, begin, final);
  return marker_.body == CallMarker::Body::kMistral ? MistralHead(text, begin, final)
                                                    : Head{.outcome = Outcome::kBad};
}

bool CallReader::ArgumentsEnd(std::string_view text, const Head& head, size_t* end) {
  return arguments_.End(text, head.arguments, end);
}

CallReader::Read CallReader::Rest(std::string_view text, const Head& head, size_t arguments_end,
                                  bool final) {
  const size_t begin = Begin(text);
  size_t end = arguments_end;
  // an object around the arguments, which other keys may follow; its } may be forgotten
  if (begin < head.arguments && text[begin] == '{') {
    const size_t next = SkipSpace(text, arguments_end);
    if (next == text.size() && !final) return {.outcome = Outcome::kMore};
    if (next < text.size() && text[next] == '}') end = next + 1;
    if (next < text.size() && text[next] == ',' && !scan_.End(text, begin, &end)) {
      if (!final) return {.outcome = Outcome::kMore};
      end = arguments_end;
    }
  }
  return Closed(text, end, marker_.close, final);
}

CallReader::Read CallReader::ReadJson(std::string_view text, size_t begin, bool final) {
  if (text[begin] != '{' && text[begin] != '[') return Bad();
  if (marker_.open.empty() &&
      !MayBeCall(text.substr(begin), marker_.body == CallMarker::Body::kResponse)) {
    return Bad();
  }
  size_t end = 0;
  if (!scan_.End(text, begin, &end)) return Undecided(final);
  Json json;
  if (!ParseText(text.substr(begin, end - begin), &json)) return Bad();
  std::vector<CallText> calls;
  if (marker_.body == CallMarker::Body::kResponse) {
    const Json* response = Member(&json, "response");
    const Json* given = Member(&json, "tool_calls");
    if (given == nullptr) given = Member(&json, "tool_call");
    if (given != nullptr) {
      if (!CallsOf(*given, &calls)) return Bad();
    } else if (response == nullptr) {
      return Bad();
    } else {
      Read read = {.outcome = Outcome::kGood, .size = end};
      read.response =
          response->is_string() ? response->get_ref<const std::string&>() : Dump(*response);
      return read;
    }
  } else if (!CallsOf(json, &calls)) {
    return Bad();
  }
  // without a marker it may be JSON that answers the question
  if (marker_.open.empty() && marker_.body == CallMarker::Body::kJson &&
      FindTool(*tools_, calls.front().name) == nullptr) {
    return Bad();
  }
  Read read = Closed(text, end, marker_.close, final);
  if (read.outcome == Outcome::kGood) read.calls = std::move(calls);
  return read;
}

CallReader::Read CallReader::ReadXml(std::string_view text, size_t begin, bool final) {
  constexpr std::string_view kFunction = "<function=";
  constexpr std::string_view kEnd = "</function>";
  const bool bare = marker_.open == kFunction;
  const size_t at = bare ? 0 : begin;
  if (const Match match = MatchAt(text, at, kFunction); match != Match::kYes) {
    return match == Match::kMaybe ? Undecided(final) : Bad();
  }
  const size_t name_at = at + kFunction.size();
  const size_t name_end = text.find_first_of(">\n", name_at);
  if (name_end == std::string_view::npos) return Undecided(final);
  if (text[name_end] != '>' || name_end == name_at) return Bad();
  // An argument may hold </function>: the one before the marker that closes the call counts, or
  // the first where no marker opened it, or the last where nothing more comes.
  size_t end = std::string_view::npos;
  size_t size = 0;
  for (size_t pos = text.find(kEnd, std::max(pos_, name_end)); pos != std::string_view::npos;
       pos = text.find(kEnd, pos + 1)) {
    const size_t next = SkipSpace(text, pos + kEnd.size());
    const Match match = MatchAt(text, next, marker_.close);
    pos_ = pos;
    if (match == Match::kMaybe && !final) return {.outcome = Outcome::kMore};
    if (match == Match::kYes || bare || next == text.size()) {
      end = pos;
      size = match == Match::kYes ? next + marker_.close.size() : pos + kEnd.size();
      break;
    }
  }
  if (end == std::string_view::npos) {
    if (text.size() > kEnd.size()) pos_ = std::max(pos_, text.size() - kEnd.size());
    return Undecided(final);
  }
  const std::string name(text.substr(name_at, name_end - name_at));
  Json arguments;
  if (!ReadParameters(text.substr(name_end + 1, end - name_end - 1), FindTool(*tools_, name),
                      &arguments)) {
    return Bad();
  }
  Read read = {.outcome = Outcome::kGood, .size = size};
  read.calls.push_back({name, Dump(arguments)});
  return read;
}

CallReader::Head CallReader::MistralHead(std::string_view text, size_t begin, bool final) const {
  const Head undecided = {.outcome = final ? Outcome::kBad : Outcome::kMore};
  size_t pos = begin;
  while (pos < text.size() && (std::isalnum(static_cast<unsigned char>(text[pos])) != 0 ||
                               text[pos] == '_' || text[pos] == '-' || text[pos] == '.')) {
    ++pos;
  }
  Head head = {.outcome = Outcome::kBad, .name = std::string(text.substr(begin, pos - begin))};
  if (pos == text.size()) return undecided;
  if (head.name.empty()) return head;
  // the model's own number of the call stands between, and is not kept
  constexpr std::string_view kId = "[CALL_ID]";
  constexpr std::string_view kArguments = "[ARGS]";
  if (const Match match = MatchAt(text, pos, kId); match == Match::kYes) {
    pos = text.find_first_of("[{", pos + kId.size());
    if (pos == std::string_view::npos) return undecided;
  } else if (match == Match::kMaybe) {
    return undecided;
  }
  if (const Match match = MatchAt(text, pos, kArguments); match == Match::kYes) {
    pos += kArguments.size();
  } else if (match == Match::kMaybe) {
    return undecided;
  }
  head.arguments = SkipSpace(text, pos);
  if (head.arguments == text.size()) return undecided;
  if (text[head.arguments] == '{') head.outcome = Outcome::kGood;
  return head;
}

CallReader::Head CallReader::JsonHead(std::string_view text, size_t begin, bool final) const {
  const Head undecided = {.outcome = final ? Outcome::kBad : Outcome::kMore};
  const Head bad = {.outcome = Outcome::kBad};
  Head head = bad;
  // texts by their keys, up to the key of an object
  for (size_t pos = begin + 1;; ++pos) {
    std::string_view texts[2];  // a key, and its value
    for (std::string_view& one : texts) {
      pos = SkipSpace(text, pos);
      if (pos == text.size()) return undecided;
      const bool arguments = texts[0] == "arguments" || texts[0] == "parameters";
      if (text[pos] == '{' && arguments && !head.name.empty()) {
        head.outcome = Outcome::kGood;
        head.arguments = pos;
        return head;
      }
      const size_t end = text.find_first_of("\"\\", pos + 1);
      if (text[pos] != '"' || arguments) return bad;
      if (end == std::string_view::npos) return undecided;
      if (text[end] != '"') return bad;  // names have no escapes
      one = text.substr(pos + 1, end - pos - 1);
      pos = SkipSpace(text, end + 1);
      if (pos == text.size()) return undecided;
      if (text[pos] != (&one == &texts[0] ? ':' : ',')) return bad;
      if (&one == &texts[0]) ++pos;
    }
    if (texts[0] != "name") continue;
    head.name = texts[1];
    if (marker_.open.empty() && FindTool(*tools_, head.name) == nullptr) return bad;
  }
}

}  // namespace omnikv::server
