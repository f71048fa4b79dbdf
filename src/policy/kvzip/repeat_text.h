// What a model is asked before it repeats a part of its context.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "policy/policy.h"

namespace omnikv {

// In tokens of the model. A model without a tokenizer is asked nothing: its passes are the chunks
// alone.
class RepeatText {
 public:
  static Result<RepeatText> Of(const PolicyContext& context);

  // What comes before the part that follows the tokens `before`.
  std::vector<int32_t> Before(std::span<const int32_t> before) const;

 private:
  std::vector<int32_t> first_, later_;  // the request, for the first part and for others
  std::vector<int32_t> end_;            // of the turn
};

}  // namespace omnikv
