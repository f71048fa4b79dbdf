#include "eval/compare.h"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <utility>

#include "base/log.h"
#include "base/printable.h"
#include "engine/core.h"
#include "engine/devices.h"
#include "eval/needles.h"
#include "eval/questions.h"
#include "flags.h"
#include "option_names.h"
#include "report.h"

namespace omnikv::tools {
namespace {

// Texts of one length, and the questions about each.
struct QuestionSet {
  int64_t tokens = 0;   // as asked for; of tasks the longest prompt
  int64_t prompt = 0;   // of the longest prompt
  int64_t context = 0;  // of engines that are asked them
  std::vector<std::vector<Question>> texts;
};

// A policy at one length, and what became of it.
struct Row {
  size_t set = 0;
  PolicyOptions policy;
  std::string at;  // "read 10 %": what was solved for
  std::optional<CostMeasure> measure;
  double share = 0;
  PolicyCost cost;
  std::string left_out;  // why it is not asked
  std::vector<std::vector<Answer>> answers;
  double held_fraction = 0;  // as the session measures them
  double read_fraction = 0;
};

std::string SettingsText(const PolicyOptions& policy) {
  std::string text;
  for (const auto& [key, value] : policy.settings) {
    text += fmt::format("{}{}={}", text.empty() ? "" : " ", key, value);
  }
  return text;
}

class Comparison {
 public:
  explicit Comparison(const CompareOptions& options) : o_(options) {}

  Status Run() {
    OKV_RETURN_IF_ERROR(MakeQuestions());
    OKV_RETURN_IF_ERROR(MakeRows());
    if (o_.share_prompts) {
      for (size_t s = 0; s < sets_.size(); ++s) OKV_RETURN_IF_ERROR(AskForks(s));
    }
    for (size_t i = 0; i < rows_.size(); ++i) {
      OKV_RETURN_IF_ERROR(Ask(i));
      if (!o_.json && !o_.share_prompts && rows_[i].left_out.empty()) {
        LogInfo("{} of {}: {} {} at {} tokens", i + 1, rows_.size(), rows_[i].policy.name,
                SettingsText(rows_[i].policy), sets_[rows_[i].set].tokens);
      }
    }
    Report();
    return {};
  }

 private:
  Result<std::vector<int32_t>> TokensOf(const std::string& message) const {
    const ModelText& text = model_.text;
    const bool chat = text.chat_template.has_value() || !text.chat_template_status.ok();
    if (chat) return ChatTokens(text, o_.engine.model, {{"user", message}});
    return TextTokens(text, message + "\n\n", {.add_special = true, .parse_special = false});
  }

  Status MakeQuestions() {
    OKV_RETURN_IF_ERROR(CheckOptions(o_.engine));
    OKV_ASSIGN_OR_RETURN(model_, ModelOfFiles(o_.engine.model));
    OKV_RETURN_IF_ERROR(model_.text_status);
    const int64_t ctx = o_.engine.context;
    if (!o_.tasks.empty()) {
      OKV_ASSIGN_OR_RETURN(const std::string lines, ReadText("--tasks", o_.tasks));
      OKV_ASSIGN_OR_RETURN(auto tasks, ParseTasks(Escaped(o_.tasks), lines));
      sets_.emplace_back().texts.push_back(std::move(tasks));
    }
    for (const int64_t length : o_.tasks.empty() ? o_.lengths : std::vector<int64_t>{}) {
      if (ctx > 0 && length > ctx) {
        return InvalidArgument(fmt::format(
            "--lengths has {} tokens, but the context holds {}: raise --ctx", length, ctx));
      }
      QuestionSet& set = sets_.emplace_back();
      set.tokens = length;
      const auto encode = [&](std::string_view text) {
        return TextTokens(model_.text, text, {.add_special = false, .parse_special = false});
      };
      for (int d = 0; d < o_.docs; ++d) {
        DocumentSpec spec = o_.document;
        spec.seed += static_cast<uint64_t>(d);
        spec.target_tokens = length;
        OKV_ASSIGN_OR_RETURN(const Document document, MakeDocumentFor(encode, std::move(spec)));
        set.texts.push_back(QuestionsOf(document));
      }
    }
    for (QuestionSet& set : sets_) {
      for (const auto& questions : set.texts) {
        for (const Question& question : questions) {
          OKV_ASSIGN_OR_RETURN(const auto tokens, TokensOf(question.message));
          set.prompt = std::max(set.prompt, static_cast<int64_t>(tokens.size()));
        }
      }
      if (set.tokens == 0) set.tokens = set.prompt;
      set.context = ctx > 0 ? ctx : set.prompt + kMostAnswer + 1;
      if (set.prompt > set.context) {
        return InvalidArgument(
            fmt::format("a prompt has {} tokens, but the context holds {}: raise --ctx", set.prompt,
                        set.context));
      }
    }
    return {};
  }

  // What each policy costs, before any weight is read.
  Status MakeRows() {
    OKV_ASSIGN_OR_RETURN(const auto backend, MakeBackend(o_.engine));
    for (size_t s = 0; s < sets_.size(); ++s) {
      EngineOptions options = o_.engine;
      options.context = sets_[s].context;
      const CostModel model{.options = options,
                            .config = model_.config,
                            .weight_bytes = model_.weight_bytes,
                            .format = model_.format,
                            .backend = *backend};
      for (size_t p = 0; p < o_.policies.size(); ++p) {
        if (p == 0 || o_.equal.empty()) {
          Row& row = rows_.emplace_back();
          row.set = s;
          row.policy = o_.policies[p];
          OKV_ASSIGN_OR_RETURN(row.cost, CostOf(model, row.policy, sets_[s].prompt));
          continue;
        }
        OKV_RETURN_IF_ERROR(CheckKnob(model, o_.policies[p]));
        for (const CostMeasure measure : o_.equal) {
          for (const double share : o_.shares) Solve(model, s, o_.policies[p], measure, share);
        }
      }
    }
    return {};
  }

  void Solve(const CostModel& model, size_t set, const PolicyOptions& policy, CostMeasure measure,
             double share) {
    Row& row = rows_.emplace_back();
    row.set = set;
    row.policy = policy;
    row.measure = measure;
    row.share = share;
    row.at = fmt::format("{} {:g} %", CostMeasureName(measure), 100 * share);
    auto equal = SolveCost(model, policy, measure, share, sets_[set].prompt);
    if (!equal.ok()) {
      row.left_out = "cannot run: " + WithFlags(equal.status().message());
      return;
    }
    row.policy = std::move(equal->policy);
    row.cost = std::move(equal->cost);
    row.left_out = std::move(equal->beyond);
  }

  // The row before that asked the same of the same policy, if there is one.
  const Row* AskedBefore(size_t i) const {
    for (const Row& other : std::span(rows_).first(i)) {
      if (other.set == rows_[i].set && other.policy.name == rows_[i].policy.name &&
          other.policy.settings == rows_[i].policy.settings && other.left_out.empty()) {
        return &other;
      }
    }
    return nullptr;
  }

  // Every row of a set, in sessions that fork from one of full attention.
  Status AskForks(size_t s) {
    EngineOptions options = o_.engine;
    options.context = sets_[s].context;
    options.policy = {.name = "full"};
    options.max_sessions = 2;
    OKV_ASSIGN_OR_RETURN(const auto engine, LoadWithProgress(std::move(options), /*quiet=*/true));
    for (const auto& questions : sets_[s].texts) {
      OKV_ASSIGN_OR_RETURN(const auto reader, engine->NewSession({.name = "full"}));
      for (Row& row : rows_) {
        if (row.set == s) row.answers.emplace_back();
      }
      for (const Question& question : questions) {
        OKV_ASSIGN_OR_RETURN(const auto prompt, PromptOf(*engine, question.message));
        OKV_RETURN_IF_ERROR(reader->Prompt(prompt));
        for (size_t i = 0; i < rows_.size(); ++i) {
          Row& row = rows_[i];
          if (row.set != s || !row.left_out.empty() || AskedBefore(i) != nullptr) continue;
          OKV_ASSIGN_OR_RETURN(const auto fork, reader->Fork(row.policy));
          OKV_ASSIGN_OR_RETURN(const GenerateResult answer,
                               fork->Generate({.max_tokens = kMostAnswer}));
          row.answers.back().push_back({answer.text, IsAnswered(question.value, answer.text)});
        }
      }
      if (!o_.json) LogInfo("{} tokens: {} questions asked", sets_[s].tokens, questions.size());
    }
    return {};
  }

  Status Ask(size_t i) {
    Row& row = rows_[i];
    if (!row.left_out.empty()) return {};
    if (const Row* asked = AskedBefore(i)) {
      row.answers = asked->answers;
      row.held_fraction = asked->held_fraction;
      row.read_fraction = asked->read_fraction;
      return {};
    }
    if (o_.share_prompts) return {};
    EngineOptions options = o_.engine;
    options.context = sets_[row.set].context;
    options.policy = row.policy;
    OKV_ASSIGN_OR_RETURN(const auto engine, LoadWithProgress(std::move(options), /*quiet=*/true));
    for (const auto& questions : sets_[row.set].texts) {
      OKV_ASSIGN_OR_RETURN(DocumentResult result, AskAll(*engine, row.policy, questions));
      if (row.answers.empty()) {
        row.held_fraction = result.held_fraction;
        row.read_fraction = result.read_fraction;
      }
      for (size_t q = 0; q < questions.size(); ++q) {
        if (result.answers[q].right) continue;
        LogVerbose("{} tokens, text {}, {}: {} -> {}", sets_[row.set].tokens, row.answers.size(),
                   row.policy.name, questions[q].question, result.answers[q].text);
      }
      row.answers.push_back(std::move(result.answers));
    }
    return {};
  }

  // Against the first policy at the row's length.
  Losses LossesOf(const Row& row) const {
    const auto first = std::find_if(rows_.begin(), rows_.end(),
                                    [&](const Row& other) { return other.set == row.set; });
    Losses losses;
    for (size_t t = 0; t < row.answers.size(); ++t) {
      for (size_t q = 0; q < row.answers[t].size(); ++q) {
        losses.Add(sets_[row.set].texts[t][q], first->answers[t][q].right, row.answers[t][q].right);
      }
    }
    return losses;
  }

  nlohmann::ordered_json JsonOf(const Row& row) const {
    nlohmann::ordered_json json = {{"tokens", sets_[row.set].tokens}, {"policy", row.policy.name}};
    if (row.measure) {
      json["equal"] = {{"measure", CostMeasureName(*row.measure)}, {"share", row.share}};
    }
    auto set = nlohmann::ordered_json::object();
    for (const auto& [key, value] : row.policy.settings) set[key] = value;
    json["set"] = set;
    json["settings"] = row.cost.settings;
    json["held_fraction"] = row.cost.held_fraction;
    json["read_fraction"] = row.cost.read_fraction;
    if (!row.left_out.empty()) {
      json["left_out"] = row.left_out;
      return json;
    }
    const Losses losses = LossesOf(row);
    const auto counts = [](const auto& by, const auto& name) {
      auto all = nlohmann::ordered_json::array();
      for (const auto& [key, count] : by) {
        all.push_back({{name, key}, {"asked", count.asked}, {"lost", count.lost}});
      }
      return all;
    };
    if (!o_.share_prompts) {
      json["measured_held_fraction"] = row.held_fraction;
      json["measured_read_fraction"] = row.read_fraction;
    }
    json.update({{"asked", losses.asked()},
                 {"right", losses.right()},
                 {"lost_against_" + o_.policies[0].name, losses.all().lost},
                 {"by_kind", counts(losses.by_kind(), "kind")},
                 {"by_depth", counts(losses.by_depth(), "depth")}});
    return json;
  }

  void Report() const {
    if (o_.json) {
      auto cases = nlohmann::ordered_json::array();
      for (const Row& row : rows_) cases.push_back(JsonOf(row));
      fmt::print("{}\n", Dump({{"cases", cases}}));
      return;
    }
    fmt::print("{:>7}  {:<11} {:<14} {:<30} {:>7} {:>7} {:>6}  {}\n", "tokens",
               o_.equal.empty() ? "" : "equal", "policy", "settings", "held", "read", "right",
               "lost where " + o_.policies[0].name + " is right");
    for (const Row& row : rows_) {
      fmt::print("{:>7}  {:<11} {:<14} {:<30} ", sets_[row.set].tokens, row.at, row.policy.name,
                 row.left_out.empty() ? SettingsText(row.policy) : "");
      if (!row.left_out.empty()) {
        fmt::print("{}\n", Escaped(row.left_out));
        continue;
      }
      const Losses losses = LossesOf(row);
      const std::string where = losses.Where();
      fmt::print("{:>5.1f} % {:>5.1f} % {:>3}/{:<2}  {} of {}{}\n", 100 * row.cost.held_fraction,
                 100 * row.cost.read_fraction, losses.right(), losses.asked(), losses.all().lost,
                 losses.all().asked, where.empty() ? "" : ": " + Escaped(where));
    }
  }

  const CompareOptions& o_;
  EngineModel model_;
  std::vector<QuestionSet> sets_;
  std::vector<Row> rows_;
};

}  // namespace

Status Compare(const CompareOptions& options) {
  return Comparison(options).Run();
}

}  // namespace omnikv::tools
