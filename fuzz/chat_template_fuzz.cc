// Any bytes as a chat template on a fixed conversation: parsing and rendering end in a Status
// within the limits, and no text of the user loses its mark.
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "text/jinja/chat_template.h"

namespace {

// All strings of the conversation carry this letter, which no template has by chance.
constexpr std::string_view kRune = "\xE1\x9A\xA0";

omnikv::ChatInput Conversation() {
  omnikv::ChatInput input;
  input.messages = nlohmann::ordered_json::parse(R"([
    {"role": "systemᚠ", "content": " Be <brief>. ᚠ\n"},
    {"role": "userᚠ", "content": [{"type": "textᚠ", "text": "Hi 'a' \"b\" ᚠé"}], "n": 3, "x": 2.5},
    {"role": "assistantᚠ", "content": null, "reasoning_content": "ᚠ Hm\n\n",
     "tool_calls": [{"id": "ᚠ1", "function": {"name": "fᚠ", "arguments": {"ᚠa": [1, true]}}}]},
    {"role": "toolᚠ", "name": "fᚠ", "content": "{\"ᚠ\": [1, 2]}"}])");
  input.tools = nlohmann::ordered_json::parse(R"([
    {"type": "functionᚠ", "function": {"name": "fᚠ", "parameters": {"ᚠp": {"type": "stringᚠ"}}}}])");
  input.add_generation_prompt = true;
  input.bos_token = "<s>";
  input.eos_token = "</s>";
  input.extra = {{"flag", true}, {"date_string", "ᚠ May"}};
  input.now = std::tm{};
  return input;
}

void Require(bool condition) {
  if (!condition) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const omnikv::ChatInput input = Conversation();
  const std::string source(reinterpret_cast<const char*>(data), size);
  const auto parsed = omnikv::ChatTemplate::Parse(source, "fuzz");
  if (!parsed.ok()) {
    Require(!parsed.status().message().empty());
    return 0;
  }
  omnikv::RenderLimits limits;
  limits.max_work = 10'000'000;
  limits.max_bytes = 4 << 20;
  const auto spans = parsed->Render(input, limits);
  if (!spans.ok()) {
    Require(!spans.status().message().empty());
    return 0;
  }
  // A template can write the rune itself, plainly or by an escape.
  const bool may_write =
      source.find('\\') != std::string::npos || source.find('\xE1') != std::string::npos;
  for (size_t i = 0; i < spans->size(); ++i) {
    const omnikv::TextSpan& span = (*spans)[i];
    Require(!span.text.empty());
    Require(i == 0 || span.literal != (*spans)[i - 1].literal);
    Require(may_write || span.literal || span.text.find(kRune) == std::string::npos);
  }
  return 0;
}
