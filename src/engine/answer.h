// From the tokens of one sequence to its answer: draws them, and turns them into text until the
// options say that it ends.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/core.h"
#include "engine/sampler.h"
#include "engine/stop_text.h"
#include "text/tokenizer/tokenizer.h"

namespace omnikv {

// Thread-compatible. It must not outlive the core.
class Answer {
 public:
  // After the tokens of `context`, which count for the repetition penalty. kInvalidArgument for
  // options out of range, kNotFound for stop texts where the model has no tokenizer.
  static Result<Answer> Begin(const EngineCore& core, const GenerateOptions& options,
                              std::span<const int32_t> context);

  Sampler& sampler() { return *sampler_; }
  const Sampler& sampler() const { return *sampler_; }

  // A token was drawn: returns the text that can be shown now, whole UTF-8 characters. REQUIRES
  // !ended().
  Result<std::string> Take(int32_t token);
  // No more tokens come: the text that was held back.
  Result<std::string> Flush();

  // kStop once a stop text or an end token came, kLength once max_tokens did.
  bool ended() const { return ended_.has_value(); }
  FinishReason reason() const { return ended_.value_or(FinishReason::kLength); }
  // The one of the options' stop texts that ended it; empty: none did.
  const std::string& stop() const { return stop_token_.empty() ? stop_.stop() : stop_token_; }
  // Tokens that are still allowed.
  int64_t left() const { return max_tokens_ - static_cast<int64_t>(tokens_.size()); }
  const std::vector<int32_t>& tokens() const { return tokens_; }

 private:
  struct EndToken {
    int32_t token;
    std::string stop;  // the stop text that it is; empty: the model's own
  };

  explicit Answer(const GenerateOptions& options)
      : stop_(options.stop), max_tokens_(options.max_tokens) {
    if (max_tokens_ == 0) ended_ = FinishReason::kLength;
  }

  static Result<std::vector<EndToken>> EndTokens(const EngineCore& core,
                                                 const GenerateOptions& options);

  std::unique_ptr<Sampler> sampler_;  // steps ahead keep its address
  std::vector<EndToken> ends_;
  StopText stop_;
  std::unique_ptr<StreamDecoder> decoder_;  // null: no tokenizer, no text
  int64_t max_tokens_;
  std::vector<int32_t> tokens_;
  std::optional<FinishReason> ended_;
  std::string stop_token_;
};

}  // namespace omnikv
