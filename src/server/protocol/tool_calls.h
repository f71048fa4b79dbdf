// How models write calls of tools, one format at a time, and the readers of these formats.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "server/protocol/fields.h"

namespace omnikv::server {

// How a model writes the call of a tool N:
// - kHermes: `<tool_call>{"name": N, "arguments": {...}}</tool_call>`. Hermes, Qwen 2.5 and 3,
//   Granite 4.
// - kQwenXml: `<tool_call><function=N><parameter=K>V</parameter></function></tool_call>`.
//   Qwen3-Coder.
// - kLlama: `{"name": N, "parameters": {...}}` as the whole answer or after `<|python_tag|>`, with
//   ; between several. Without the tag it must name a tool that there is.
// - kMistral: `[TOOL_CALLS][{"name": N, "arguments": {...}}, ...]`, or `[TOOL_CALLS]N[ARGS]{...}`
//   for each call.
// - kGranite: `<|tool_call|>[{...}]` (3.1 on), `<tool_call>[{...}]`, `<function_call>{...}` (3.0).
// - kPhi: `functools[{...}]`, or `<|tool_call|>[{...}]<|/tool_call|>`.
// - kGeneric: an object by GenericSchema, for templates of which no format is known.
// In all of them an array may hold several objects, "parameters" and "arguments" mean the same, and
// arguments may be a text that holds JSON.
enum class ToolFormat { kHermes, kQwenXml, kLlama, kMistral, kGranite, kPhi, kGeneric };

const char* ToolFormatName(ToolFormat format);

// By the markers that the template writes itself (ChatTemplate::written()).
ToolFormat DetectToolFormat(std::string_view written);

// For kGeneric: a JSON schema of an answer that is either {"tool_calls": [{name, arguments}]} or
// {"response": TEXT}; with `must_call` only the former. `parallel`: more than one call. `tools` are
// those of a Question.
Json GenericSchema(const Json& tools, bool must_call, bool parallel);
// For kGeneric: what the model must be told, because its template does not show the tools.
std::string GenericInstruction(const Json& tools);

struct CallText {
  std::string name;
  std::string arguments;  // JSON text of an object
};

// Where a call may begin in an answer.
struct CallMarker {
  enum class Body { kJson, kXml, kMistral, kResponse };
  std::string_view open;   // empty: a { that begins the answer
  std::string_view close;  // empty: none. It may be left out
  Body body = Body::kJson;
  size_t body_at = 0;  // byte of `open` at which the body begins; 0: after it
};

// Of a format. Those with an empty `open` come last.
std::vector<CallMarker> CallMarkers(ToolFormat format);

// Reads the calls that begin at one marker, as the text grows. Reading again costs what is new.
class CallReader {
 public:
  // `tools`: of a Question. They give the types of kXml's values, and a call without a marker must
  // name one of them.
  CallReader(const CallMarker& marker, const Json& tools) : marker_(marker), tools_(&tools) {}

  enum class Outcome { kMore, kBad, kGood };
  struct Read {
    Outcome outcome = Outcome::kMore;
    size_t size = 0;  // bytes of the calls with their markers; of kGood
    std::vector<CallText> calls;
    std::optional<std::string> response;  // kGeneric's answer in words
  };
  // `text` begins with the marker and only grows from call to call; `final`: no more will come.
  // kBad: this is no call.
  Read Next(std::string_view text, bool final);

 private:
  Read ReadJson(std::string_view text, size_t begin, bool final);
  Read ReadXml(std::string_view text, size_t begin, bool final);
  Read ReadMistral(std::string_view text, size_t begin, bool final);
  bool JsonEnd(std::string_view text, size_t begin, size_t* end);

  CallMarker marker_;
  const Json* tools_;
  // How far the JSON value, or the search for the end of XML, was read.
  size_t pos_ = 0;
  int depth_ = 0;
  bool in_string_ = false;
  bool escaped_ = false;
};

}  // namespace omnikv::server
