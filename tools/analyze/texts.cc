#include "analyze/texts.h"

#include <fmt/format.h>

#include <iterator>

#include "eval/needles.h"

namespace omnikv::tools {
namespace {

// Documents with facts of several kinds, from far to near.
Result<Texts> MadeUpTexts(const TextFlags& f, const Engine& engine) {
  Texts texts;
  for (int d = 0; d < f.docs; ++d) {
    OKV_ASSIGN_OR_RETURN(
        const Document document,
        MakeDocumentFor(engine, {.seed = f.seed + static_cast<uint64_t>(d),
                                 .target_tokens = f.tokens,
                                 .count_tokens = nullptr,
                                 .depths = {0.1, 0.35, 0.6, 0.9},
                                 .kinds = {"passkey", "magic", "best", "person"}}));
    OKV_ASSIGN_OR_RETURN(Texts asked, AnsweredQuestions(engine, document));
    std::move(asked.begin(), asked.end(), std::back_inserter(texts));
  }
  return texts;
}

}  // namespace

void AddTextFlags(CLI::App& sub, TextFlags& flags) {
  AddRepeatable(sub, "-f,--file", flags.files,
                "a text to measure on, as it is, without a chat template; - is stdin; may be "
                "repeated");
  CLI::Option* files = sub.get_option("--file");
  sub.add_option("--docs", flags.docs, "documents made up, four questions each")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str()
      ->excludes(files);
  sub.add_option("--tokens", flags.tokens, "of a document")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 24))
      ->capture_default_str()
      ->excludes(files);
  sub.add_option("--seed", flags.seed, "of the first document")
      ->capture_default_str()
      ->excludes(files);
}

Result<std::vector<std::string>> ReadTexts(const TextFlags& flags) {
  std::vector<std::string> given;
  for (const std::string& file : flags.files) {
    OKV_ASSIGN_OR_RETURN(given.emplace_back(), ReadText("-f", file));
    if (given.back().empty()) {
      return InvalidArgument(fmt::format("-f {} is empty, expected a text", file));
    }
  }
  return given;
}

Result<Texts> TextsOf(const TextFlags& flags, const std::vector<std::string>& given,
                      const Engine& engine) {
  if (given.empty()) return MadeUpTexts(flags, engine);
  Texts texts;
  for (const std::string& text : given) {
    OKV_ASSIGN_OR_RETURN(texts.emplace_back(),
                         engine.Tokenize(text, /*add_special=*/true, /*parse_special=*/true));
  }
  return texts;
}

}  // namespace omnikv::tools
