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

// Where a JSON value that begins with a bracket ends. Only its texts and its brackets are looked
// at: a parser says later whether it is JSON. Looking again at a text that grew costs what is new.
class JsonScan {
 public:
  // Whether the value that begins at `begin` ends in `text`, and then the byte after it.
  bool End(std::string_view text, size_t begin, size_t* end);

 private:
  size_t pos_ = 0;
  int depth_ = 0;
  bool in_string_ = false;
  bool escaped_ = false;
  bool done_ = false;
};

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

  // For calls that go out while they are written: a call begins once its name and the { of its
  // arguments are there, whatever follows. kBad: it must be read whole (a list of calls, XML, other
  // orders of keys, arguments that are a text).
  struct Head {
    Outcome outcome = Outcome::kMore;
    std::string name;
    size_t arguments = 0;  // where they begin in the text
  };
  Head ReadHead(std::string_view text, bool final) const;
  // After a head of kGood: where the arguments end so far, and whether that is their end.
  bool ArgumentsEnd(std::string_view text, const Head& head, size_t* end);
  // And then what follows them, up to the marker that closes the call: `size` of a Read.
  Read Rest(std::string_view text, const Head& head, size_t arguments_end, bool final);

 private:
  size_t Begin(std::string_view text) const;  // of the body
  Read ReadJson(std::string_view text, size_t begin, bool final);
  Read ReadXml(std::string_view text, size_t begin, bool final);
  // Where the arguments of a call of kMistral with a name of its own begin.
  Head MistralHead(std::string_view text, size_t begin, bool final) const;
  Head JsonHead(std::string_view text, size_t begin, bool final) const;

  CallMarker marker_;
  const Json* tools_;
  JsonScan scan_;       // of the body
  JsonScan arguments_;  // of a call that goes out while it is written
  size_t pos_ = 0;      // how far the end of XML was looked for
};

}  // namespace omnikv::server
