// Conversations as chat templates take them, made of what protocols say. A message of the neutral
// form has role, content (a text), and where they apply reasoning_content, tool_calls, tool_call_id
// and name, in this order.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "server/protocol/fields.h"
#include "server/protocol/protocol.h"

namespace omnikv::server {

// The text of a content: a text, or a list of parts of one of the types in `text_types`, whose
// texts are joined by line ends, as vLLM and llama-server join them. Null is "". Other parts
// (images, audio, files) are refused by their place.
Result<std::string> ContentText(const Json& content, const std::string& field,
                                std::initializer_list<std::string_view> text_types);

// One call of a tool as templates want it: {id, type: "function", function: {name, arguments}}.
// `arguments` is the JSON text that models wrote: templates print objects, so it becomes one where
// it is one ("" is an empty one), else it stays the text.
Json ToolCall(const std::string& id, const std::string& name, const std::string& arguments);

// Adds a tool as templates take it; `parameters` and `description` may be absent (null, "").
void AddTool(const std::string& name, const std::string& description, const Json& parameters,
             Json* tools);

// Whether `tools`, in the form of templates, has one of this name.
bool HasTool(const Json& tools, std::string_view name);

// The choice fits the tools: kRequired needs some, kNamed the one. `field` is where it was given.
Status CheckToolChoice(const Question& question, const std::string& field);

// Makes one message of the system messages that begin the conversation, with an empty line between
// their texts: many templates take one at most, and protocols give instructions apart.
void MergeLeadingSystem(Json* messages);

// Sets a variable of the template that nothing has set yet.
void SetDefaultArgument(Question* question, const std::string& name, Json value);

// How much the model is to think: none, minimal, low, medium, high, xhigh or max, which are the
// words of several protocols. Templates read reasoning_effort, and with none also enable_thinking.
bool ReadEffort(FieldReader* fields, std::string_view name, std::string* effort);
void SetEffort(Question* question, const std::string& effort);

// For ToolFormat::kGeneric: such templates print neither tools nor calls nor results. So the system
// message tells the model what GenericInstruction says, calls become the text that it would have
// written, and results become a user's message, together with the one that follows. Unless the
// question has a form of its own, the answer must follow GenericSchema. Nothing happens where the
// question has no tools, or where its choice is kNone and the conversation has no calls.
void UseGenericForm(Question* question);

// A JSON schema as the form of the answer.
void SetSchema(Question* question, const Json& schema);

}  // namespace omnikv::server
