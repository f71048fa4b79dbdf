#include "eval/needles.h"

#include <fmt/format.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "flags.h"
#include "output_file.h"

namespace omnikv::tools {

Result<Document> MakeDocumentFor(const Encode& encode, DocumentSpec spec) {
  Status counted;  // not ok: a text that could not be encoded
  spec.count_tokens = [&](std::string_view text) {
    const auto ids = encode(text);
    if (!ids.ok()) counted = ids.status();
    return ids.ok() ? static_cast<int64_t>(ids->size()) : spec.target_tokens;
  };
  auto document = MakeDocument(spec);
  return counted.ok() ? std::move(document) : counted;
}

Result<Document> MakeDocumentFor(const Engine& engine, const DocumentSpec& spec) {
  const auto encode = [&](std::string_view text) {
    return engine.Tokenize(text, /*add_special=*/false, /*parse_special=*/false);
  };
  return MakeDocumentFor(encode, spec);
}

Result<std::vector<std::vector<int32_t>>> AnsweredQuestions(const Engine& engine,
                                                            const Document& document) {
  std::vector<std::vector<int32_t>> texts;
  for (size_t i = 0; i < document.needles.size(); ++i) {
    const std::string question = UserMessage(document, i);
    OKV_ASSIGN_OR_RETURN(texts.emplace_back(), PromptOf(engine, question));
    OKV_ASSIGN_OR_RETURN(const std::vector<int32_t> answer,
                         engine.Tokenize(document.needles[i].answer, /*add_special=*/false,
                                         /*parse_special=*/false));
    texts.back().insert(texts.back().end(), answer.begin(), answer.end());
  }
  return texts;
}

Result<std::vector<int32_t>> PromptOf(const Engine& engine, const std::string& message) {
  if (engine.has_chat_template()) return engine.ChatPrompt({{"user", message}});
  return engine.Tokenize(message + "\n\n", /*add_special=*/true, /*parse_special=*/false);
}

Result<DocumentResult> AskAll(Engine& engine, const PolicyOptions& policy,
                              const std::vector<Question>& questions,
                              const Session::Progress& progress) {
  DocumentResult result;
  OKV_ASSIGN_OR_RETURN(const auto session, engine.NewSession(policy));
  double decode_seconds = 0;
  int64_t decode_tokens = 0;
  for (size_t i = 0; i < questions.size(); ++i) {
    OKV_ASSIGN_OR_RETURN(const std::vector<int32_t> prompt, PromptOf(engine, questions[i].message));
    OKV_RETURN_IF_ERROR(session->Prompt(prompt, i == 0 ? progress : Session::Progress{}));
    if (i == 0) {
      result.prompt_tokens = static_cast<int64_t>(prompt.size());
      result.stats = session->stats();
      result.held_fraction = result.stats.held_fraction;
      result.read_fraction = result.stats.read_fraction;
    }
    OKV_ASSIGN_OR_RETURN(const GenerateResult answer,
                         session->Generate({.max_tokens = kMostAnswer}));
    result.answers.push_back({answer.text, IsAnswered(questions[i].value, answer.text)});
    const SessionStats stats = session->stats();
    decode_seconds += stats.decode_seconds;
    decode_tokens += stats.decode_tokens;
    result.stats.attended_tokens = stats.attended_tokens;
    result.stats.held_bytes = stats.held_bytes;
    result.stats.context_tokens = stats.context_tokens;
  }
  result.decode_ms =
      1e3 * decode_seconds / static_cast<double>(std::max<int64_t>(decode_tokens, 1));
  return result;
}

Status SaveDocument(const Document& document, const std::string& folder) {
  if (folder.empty()) return InvalidArgument("--out is empty, expected a folder");
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) {
    return NotFound(
        fmt::format("--out is '{}', which cannot be a folder ({})", folder, error.message()));
  }
  OutputFile text("--out", folder + "/document.txt");
  OutputFile about("--out", folder + "/facts.json");
  OKV_RETURN_IF_ERROR(text.Open());
  OKV_RETURN_IF_ERROR(about.Open());
  auto facts = nlohmann::ordered_json::array();
  for (const Needle& n : document.needles) {
    facts.push_back({{"kind", n.kind},
                     {"depth", n.depth},
                     {"sentence", n.sentence},
                     {"question", n.question},
                     {"answer", n.answer},
                     {"value", n.value}});
  }
  const nlohmann::ordered_json json = {{"preface", document.preface}, {"facts", facts}};
  const std::string facts_text = json.dump(1) + '\n';
  text.Write(document.text.data(), document.text.size());
  about.Write(facts_text.data(), facts_text.size());
  OKV_RETURN_IF_ERROR(text.Commit());
  OKV_RETURN_IF_ERROR(about.Commit());
  return {};
}

Result<Document> LoadDocument(const std::string& folder) {
  Document document;
  OKV_ASSIGN_OR_RETURN(document.text, ReadText("document", folder + "/document.txt"));
  const std::string path = folder + "/facts.json";
  OKV_ASSIGN_OR_RETURN(const std::string about, ReadText("facts", path));
  const auto json = nlohmann::json::parse(about, nullptr, /*allow_exceptions=*/false);
  const Status broken = Corrupt(path +
                                ": expected an object with preface and facts, as "
                                "`omnikv eval document` writes it");
  if (!json.is_object() || !json.contains("preface") || !json["preface"].is_string() ||
      !json.contains("facts") || !json["facts"].is_array()) {
    return broken;
  }
  document.preface = json["preface"].get<std::string>();
  for (const auto& fact : json["facts"]) {
    Needle needle;
    const auto read = [&](const char* key, std::string& to) {
      const bool there = fact.is_object() && fact.contains(key) && fact[key].is_string();
      if (there) to = fact[key].get<std::string>();
      return there;
    };
    if (!read("kind", needle.kind) || !read("sentence", needle.sentence) ||
        !read("question", needle.question) || !read("answer", needle.answer) ||
        !read("value", needle.value) || !fact.contains("depth") || !fact["depth"].is_number()) {
      return broken;
    }
    needle.depth = fact["depth"].get<double>();
    document.needles.push_back(std::move(needle));
  }
  return document;
}

}  // namespace omnikv::tools
