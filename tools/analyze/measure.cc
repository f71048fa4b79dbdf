#include "analyze/measure.h"

#include <fmt/format.h>

#include <iterator>
#include <optional>

#include "base/log.h"
#include "eval/needles.h"
#include "output_file.h"
#include "report.h"

namespace omnikv::tools {
namespace {

using Texts = std::vector<std::vector<int32_t>>;

// Documents with facts of several kinds, from far to near.
Result<Texts> MadeUpTexts(const MeasureFlags& f, const Engine& engine) {
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

Result<Texts> TextsOf(const MeasureFlags& f, const std::vector<std::string>& given,
                      const Engine& engine) {
  if (given.empty()) return MadeUpTexts(f, engine);
  Texts texts;
  for (const std::string& text : given) {
    OKV_ASSIGN_OR_RETURN(texts.emplace_back(),
                         engine.Tokenize(text, /*add_special=*/true, /*parse_special=*/true));
  }
  return texts;
}

}  // namespace

void AddTextFlags(CLI::App& sub, MeasureFlags& f, const std::string& tokens_help) {
  AddRepeatable(sub, "-f,--file", f.files,
                "a text to measure on, as it is, without a chat template; - is stdin; may be "
                "repeated");
  CLI::Option* files = sub.get_option("--file");
  sub.add_option("--docs", f.docs, "documents made up, four questions each")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str()
      ->excludes(files);
  sub.add_option("--tokens", f.tokens, tokens_help)
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 24))
      ->capture_default_str()
      ->excludes(files);
  sub.add_option("--seed", f.seed, "of the first document")->capture_default_str()->excludes(files);
}

void AddMeasureFlags(CLI::App& sub, MeasureFlags& f, const std::string& tokens_help,
                     const std::string& out_help) {
  AddTextFlags(sub, f, tokens_help);
  sub.add_option("--window", f.window, "the last tokens of a text, whose attention counts")
      ->check(CLI::Range(1, 65536))
      ->capture_default_str();
  sub.add_option("-o,--out", f.out, out_help);
  sub.add_flag("--json", f.json, "print one JSON object");
  AddEngineFlags(sub, f.engine);
}

Status RunMeasure(const MeasureFlags& f, const Measure& measure) {
  OKV_ASSIGN_OR_RETURN(EngineOptions options, ToEngineOptions(f.engine));
  options.policy.name = "full";
  std::vector<std::string> given;
  for (const std::string& file : f.files) {
    OKV_ASSIGN_OR_RETURN(given.emplace_back(), ReadText("-f", file));
    if (given.back().empty()) {
      return InvalidArgument(fmt::format("-f {} is empty, expected a text", file));
    }
  }
  std::optional<OutputFile> file;
  if (!f.out.empty()) {
    file.emplace("-o", f.out);
    OKV_RETURN_IF_ERROR(file->Open());
  }
  Texts texts;
  options.check = [&](const Engine& engine) -> Status {
    OKV_ASSIGN_OR_RETURN(texts, TextsOf(f, given, engine));
    return measure.check(CoreOf(engine), texts);
  };
  OKV_ASSIGN_OR_RETURN(const auto engine, LoadWithProgress(std::move(options), f.json));
  SetActivity(measure.activity);
  {
    ProgressBar bar(measure.activity);
    OKV_RETURN_IF_ERROR(
        measure.run(CoreOf(*engine), texts, [&](double done) { bar.Update(done, 1); }));
  }
  if (file) {
    const std::string table = measure.file(CoreOf(*engine));
    file->Write(table.data(), table.size());
    OKV_RETURN_IF_ERROR(file->Commit());
  }
  fmt::print("{}", measure.printed(*engine, texts.size()));
  return {};
}

}  // namespace omnikv::tools
