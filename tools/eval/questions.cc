#include "eval/questions.h"

#include <fmt/format.h>

#include "base/json.h"
#include "base/printable.h"

namespace omnikv {
namespace {

Result<Question> ParseTask(std::string_view line) {
  OKV_ASSIGN_OR_RETURN(const nlohmann::json json, ParseJson(line));
  const auto text = [&](const char* key) -> const std::string* {
    return json.is_object() && json.contains(key) && json[key].is_string()
               ? json[key].get_ptr<const std::string*>()
               : nullptr;
  };
  const std::string* prompt = text("prompt");
  const std::string* answer = text("answer");
  if (prompt == nullptr || answer == nullptr || prompt->empty() || answer->empty()) {
    return Corrupt("is no task, expected an object with the texts `prompt` and `answer`");
  }
  const std::string* kind = text("kind");
  const std::string* value = text("value");
  Question task{.kind = kind != nullptr ? *kind : "task",
                .message = *prompt,
                .value = value != nullptr && !value->empty() ? *value : *answer};
  const size_t last_line = prompt->find_last_of('\n');
  task.question = last_line == std::string::npos ? *prompt : prompt->substr(last_line + 1);
  if (!json.contains("depth")) return task;
  task.depth = json["depth"].is_number() ? json["depth"].get<double>() : -1;
  if (task.depth >= 0 && task.depth <= 1) return task;
  return Corrupt(fmt::format("has the depth {}, expected a number from 0 to 1",
                             Printable(json["depth"].dump())));
}

}  // namespace

std::vector<Question> QuestionsOf(const Document& document) {
  std::vector<Question> questions;
  for (size_t i = 0; i < document.needles.size(); ++i) {
    const Needle& needle = document.needles[i];
    questions.push_back({.kind = needle.kind,
                         .depth = needle.depth,
                         .message = UserMessage(document, i),
                         .question = needle.question,
                         .value = needle.value});
  }
  return questions;
}

Result<std::vector<Question>> ParseTasks(const std::string& name, std::string_view lines) {
  std::vector<Question> tasks;
  for (int number = 1; !lines.empty(); ++number) {
    const size_t end = std::min(lines.find('\n'), lines.size());
    const std::string_view line = lines.substr(0, end);
    lines.remove_prefix(std::min(end + 1, lines.size()));
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    auto task = ParseTask(line);
    if (!task.ok()) {
      return Corrupt(fmt::format("{}: line {} {}", name, number, task.status().message()));
    }
    tasks.push_back(std::move(*task));
  }
  if (tasks.empty()) {
    return InvalidArgument(
        fmt::format("{} has no tasks, expected a JSON object with prompt and answer a line", name));
  }
  return tasks;
}

void Losses::Add(const Question& question, bool first_right, bool right) {
  ++asked_;
  right_ += right ? 1 : 0;
  const auto count = [&](Count& of) {
    of.asked += first_right ? 1 : 0;
    of.lost += first_right && !right ? 1 : 0;
  };
  count(all_);
  count(by_kind_[question.kind]);
  if (question.depth >= 0) count(by_depth_[question.depth]);
}

std::string Losses::Where() const {
  std::string text;
  const auto add = [&](const std::string& what, const Count& count) {
    if (count.lost == 0) return;
    text += fmt::format("{}{} {} of {}", text.empty() ? "" : ", ", what, count.lost, count.asked);
  };
  if (by_kind_.size() > 1) {
    for (const auto& [kind, count] : by_kind_) add(kind, count);
  }
  for (const auto& [depth, count] : by_depth_) add(fmt::format("at {:.0f} %", 100 * depth), count);
  return text;
}

}  // namespace omnikv
