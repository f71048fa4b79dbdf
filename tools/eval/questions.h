// Questions that `omnikv eval` asks a model under several policies, from documents or from a file
// of tasks, and which of them a policy loses.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "eval/document.h"
#include "omnikv/status.h"

namespace omnikv {

struct Question {
  std::string kind;
  double depth = -1;     // of its fact in the text, 0 to 1; below 0: not known
  std::string message;   // what the user says, text and all
  std::string question;  // what of it is shown
  std::string value;     // what a right reply tells
};

// Of every fact of a document, in its order.
std::vector<Question> QuestionsOf(const Document& document);

// Tasks: a JSON object on each line with a `prompt` and its `answer`, and if wanted a `kind`, a
// `depth` from 0 to 1, and a `value`, the part of the answer that a reply must tell (the answer, if
// there is none). `name` is the file's, for messages. kCorrupt names the line that is none.
Result<std::vector<Question>> ParseTasks(const std::string& name, std::string_view lines);

// What a policy loses of the questions that a first one answers: in all, by kind, and by the depth
// of the fact.
class Losses {
 public:
  struct Count {
    int asked = 0;  // of those that the first policy answers
    int lost = 0;
  };

  void Add(const Question& question, bool first_right, bool right);

  int asked() const { return asked_; }
  int right() const { return right_; }
  const Count& all() const { return all_; }
  const std::map<std::string, Count>& by_kind() const { return by_kind_; }
  const std::map<double, Count>& by_depth() const { return by_depth_; }
  // "magic 2 of 6; at 10 % 1 of 2": those in which some are lost; kinds where there are several.
  std::string Where() const;

 private:
  int asked_ = 0;
  int right_ = 0;
  Count all_;
  std::map<std::string, Count> by_kind_;
  std::map<double, Count> by_depth_;
};

}  // namespace omnikv
