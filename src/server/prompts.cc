#include "server/prompts.h"

#include <algorithm>
#include <utility>
#include <variant>

namespace omnikv::server {
namespace {

// Leaves out what the template writes behind the last message.
Status CutAfterLastMessage(const Question& question, std::vector<TextSpan>& spans) {
  const auto last =
      std::find_if(spans.rbegin(), spans.rend(), [](const TextSpan& span) { return span.literal; });
  const nlohmann::ordered_json& content = question.messages.back()["content"];
  const std::string* said = content.get_ptr<const std::string*>();
  const size_t at = last == spans.rend() || said == nullptr || said->empty()
                        ? std::string::npos
                        : last->text.rfind(*said);
  if (at == std::string::npos) {
    return InvalidArgument(
        "the last message is to be continued, but the chat template does not show where it ends");
  }
  last->text.resize(at + said->size());
  spans.erase(last.base(), spans.end());
  return {};
}

}  // namespace

Result<std::vector<TextSpan>> RenderQuestion(const EngineCore& core, const Question& question) {
  OKV_ASSIGN_OR_RETURN(std::vector<TextSpan> spans,
                       RenderChat(core.text, core.options.model,
                                  {.messages = question.messages,
                                   .tools = question.tools,
                                   .add_generation_prompt = !question.continue_last,
                                   .extra = question.template_arguments}));
  if (question.continue_last) OKV_RETURN_IF_ERROR(CutAfterLastMessage(question, spans));
  return spans;
}

Result<Prompts> PromptsOf(const EngineCore& core, const Question& question) {
  Prompts prompts;
  prompts.of_text = std::ranges::all_of(question.prompts, [](const PlainPrompt& prompt) {
    return std::holds_alternative<std::string>(prompt);
  });
  if (!question.messages.is_null()) {
    OKV_RETURN_IF_ERROR(NeedTokenizer(core));
    OKV_ASSIGN_OR_RETURN(const std::vector<TextSpan> spans, RenderQuestion(core, question));
    for (auto span = spans.rbegin();
         span != spans.rend() && prompts.end.size() < Prompts::kEndBytes; ++span) {
      const size_t most = Prompts::kEndBytes - prompts.end.size();
      prompts.end.insert(0, span->text, span->text.size() - std::min(most, span->text.size()));
    }
    OKV_ASSIGN_OR_RETURN(prompts.tokens.emplace_back(), EncodeChat(core.text, spans));
    return prompts;
  }
  for (const PlainPrompt& prompt : question.prompts) {
    if (const auto* tokens = std::get_if<std::vector<int32_t>>(&prompt)) {
      prompts.tokens.push_back(*tokens);
      continue;
    }
    OKV_RETURN_IF_ERROR(NeedTokenizer(core));
    OKV_ASSIGN_OR_RETURN(prompts.tokens.emplace_back(),
                         TextTokens(core.text, std::get<std::string>(prompt),
                                    {.add_special = true, .parse_special = true}));
  }
  return prompts;
}

}  // namespace omnikv::server
