// Any bytes as a body of every protocol, and as a JSON schema: a mistake is one sentence, and a question
// that is accepted has replies that are JSON, whatever the model says. The first byte says what it says.
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/check.h"
#include "server/grammar/schema.h"
#include "server/protocol/anthropic_messages.h"
#include "server/protocol/fields.h"
#include "server/protocol/openai_chat.h"
#include "server/protocol/openai_completions.h"
#include "server/protocol/openai_responses.h"
#include "server/protocol/tool_calls.h"

using namespace omnikv;
using namespace omnikv::server;

namespace {

const char* const kSaid[] = {
    "yes", "\xFF", "<tool_call><function=f><parameter=a>1</parameter></function>",
    "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1}}</tool_call>", "[TOOL_CALLS]f[ARGS]{"};

Reply OfTheFuzzer() { return {.id = "1", .model = "m", .now_ms = [] { return int64_t{0}; }}; }

void Answer(const Question& question, std::string_view said, ToolFormat format) {
  const AnswerForm form = {.tools = format, .stream_calls = true};
  std::vector<std::unique_ptr<Answering>> all;
  if (!question.prompts.empty()) all.push_back(AnswerCompletions(question, OfTheFuzzer()));
  all.push_back(AnswerChat(question, OfTheFuzzer(), form));
  all.push_back(AnswerMessages(question, OfTheFuzzer(), form));
  all.push_back(AnswerResponses(question, OfTheFuzzer(), form));
  Piece piece;
  if (said != "\xFF") piece.text = said;  // texts are whole characters, tokens need not be
  piece.tokens.resize(1);
  piece.tokens[0].chosen = {std::string(said), -1};
  piece.tokens[0].top.push_back({"a", -2});
  for (const auto& answer : all) {
    std::string out = answer->Begin();
    out += answer->Add(0, piece);
    out += answer->End(0, FinishReason::kStop);
    out += answer->Close({1, 0, 1}, Json());
    Json json;
    OKV_CHECK(question.stream ? !out.empty() : ParseText(out, &json));
  }
  OKV_CHECK(!Dump(GenericSchema(question.tools, false, true)).empty());
  OKV_CHECK(!GenericInstruction(question.tools).empty());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const Result<Json> body = ParseBody({reinterpret_cast<const char*>(data) + 1, size - 1});
  if (!body.ok()) {
    OKV_CHECK(!body.status().message().empty());
    return 0;
  }
  constexpr ToolFormat kFormats[] = {ToolFormat::kQwenXml, ToolFormat::kHermes, ToolFormat::kMistral,
                                     ToolFormat::kGeneric};
  const std::string_view said = kSaid[data[0] % std::size(kSaid)];
  const ToolFormat format = kFormats[data[0] / 16 % std::size(kFormats)];
  for (const auto parse :
       {ParseCompletions, ParseChat, ParseMessages, ParseCountTokens, ParseResponses}) {
    const Result<Question> question = parse(*body);
    if (!question.ok()) {
      OKV_CHECK(question.status().code() == StatusCode::kInvalidArgument);
      OKV_CHECK(!question.status().message().empty());
      continue;
    }
    Answer(*question, said, format);
    if (question->format.kind == AnswerFormat::Kind::kJsonSchema) {
      static_cast<void>(CheckSchema(question->format.schema));
    }
  }
  const Result<PlainSchema> plain = MakePlain(*body, {.schemas = 500, .values = 500});
  OKV_CHECK(plain.ok() ? !Dump(plain->json).empty() : !plain.status().message().empty());
  return 0;
}
