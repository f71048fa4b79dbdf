// Whether two engines write the same text. Rounding may turn a choice between two tokens, but only
// where the reference hesitates: by less than what rounding was seen to move logits elsewhere.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "omnikv/engine.h"

namespace omnikv {

using Tokens = std::vector<int32_t>;

inline double MaxDifference(const float* a, const float* b, int32_t n) {
  double most = 0;
  for (int32_t i = 0; i < n; ++i) {
    most = std::max(most, std::abs(static_cast<double>(a[i]) - b[i]));
  }
  return most;
}

// A greedy choice of the reference.
struct Choice {
  int32_t token = -1;
  double margin = 0;  // of its logit over the next best
};

inline Choice Choose(const float* logits, int32_t vocab) {
  Choice best;
  float top = -INFINITY;
  float next = -INFINITY;
  for (int32_t i = 0; i < vocab; ++i) {
    if (logits[i] > top) {
      next = top;
      top = logits[i];
      best.token = i;
    } else {
      next = std::max(next, logits[i]);
    }
  }
  best.margin = static_cast<double>(top) - next;
  return best;
}

// What the reference writes, by Step: up to `n` tokens, the last one of `ends` included.
inline std::vector<Choice> GreedyChoices(Session& reference, const Tokens& prompt, int64_t n,
                                         int32_t vocab, const Tokens& ends) {
  std::vector<Choice> choices;
  EXPECT_TRUE(reference.Prompt(prompt).ok());
  while (static_cast<int64_t>(choices.size()) < n) {
    choices.push_back(Choose(reference.logits(), vocab));
    const int32_t token = choices.back().token;
    if (std::find(ends.begin(), ends.end(), token) != ends.end()) break;
    if (static_cast<int64_t>(choices.size()) == n) break;
    EXPECT_TRUE(reference.Step(token).ok());
  }
  return choices;
}

// By how much the logits of `got` differ from the reference's, at most: after `prompt` and in `n`
// steps over the reference's greedy tokens, which both are given.
inline double TeacherForcedError(Session& reference, Session& got, const Tokens& prompt, int n,
                                 int32_t vocab) {
  EXPECT_TRUE(reference.Prompt(prompt).ok());
  EXPECT_TRUE(got.Prompt(prompt).ok());
  double error = MaxDifference(reference.logits(), got.logits(), vocab);
  for (int i = 0; i < n; ++i) {
    const int32_t token = Choose(reference.logits(), vocab).token;
    EXPECT_TRUE(reference.Step(token).ok());
    EXPECT_TRUE(got.Step(token).ok());
    error = std::max(error, MaxDifference(reference.logits(), got.logits(), vocab));
  }
  return error;
}

// Whether `got` is what the reference chose. A first token that differs is a failure, unless the
// reference's margin there is below twice `error`, which REQUIRES to be measured on other steps.
inline bool ExpectSameText(const std::string& what, const std::vector<Choice>& want,
                           const Tokens& got, double error) {
  size_t at = 0;
  while (at < want.size() && at < got.size() && want[at].token == got[at]) ++at;
  if (at == want.size() && at == got.size()) return true;
  if (at == want.size() || at == got.size()) {
    ADD_FAILURE() << what << ": " << got.size() << " tokens, expected " << want.size();
    return false;
  }
  fmt::print("{}: differs at token {}, margin {:.3g}, error elsewhere {:.3g}\n", what, at,
             want[at].margin, error);
  EXPECT_LE(want[at].margin, 2 * error) << what << ", token " << at;
  return false;
}

}  // namespace omnikv
