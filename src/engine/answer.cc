#include "engine/answer.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/check.h"

namespace omnikv {
namespace {

// Tokens that end an answer: the model's, and stop texts that are a special token, which the
// answer's text never has.
Result<std::vector<int32_t>> EndIds(const EngineCore& core, const GenerateOptions& options) {
  std::vector<int32_t> ends;
  if (!options.ignore_eos) ends = core.config.eos_ids;
  if (options.stop.empty()) return ends;
  OKV_RETURN_IF_ERROR(NeedTokenizer(core).Prefixed("`stop`"));
  const Tokenizer& tokenizer = *core.text.tokenizer;
  for (const std::string& stop : options.stop) {
    const std::optional<int32_t> id = tokenizer.TokenToId(stop);
    if (id && tokenizer.IsSpecial(*id)) ends.push_back(*id);
  }
  return ends;
}

}  // namespace

Result<Answer> Answer::Begin(const EngineCore& core, const GenerateOptions& options,
                             std::span<const int32_t> context) {
  OKV_RETURN_IF_ERROR(CheckGenerate(options));
  for (const auto& [token, bias] : options.sampling.logit_bias) {
    if (token >= 0 && token < core.config.vocab) continue;
    return InvalidArgument(
        fmt::format("`logit_bias` names token {}, expected 0 to {}", token, core.config.vocab - 1));
  }
  Answer answer(options);
  OKV_ASSIGN_OR_RETURN(answer.ends_, EndIds(core, options));
  answer.sampler_ = std::make_unique<Sampler>(options.sampling, core.config.vocab);
  for (const int32_t token : context) answer.sampler_->See(token);
  if (core.text.tokenizer != nullptr) {
    answer.decoder_ = std::make_unique<StreamDecoder>(core.text.tokenizer.get());
  }
  return answer;
}

Result<std::string> Answer::Take(int32_t token) {
  OKV_CHECK(!ended());
  tokens_.push_back(token);
  if (left() == 0) ended_ = FinishReason::kLength;
  if (std::find(ends_.begin(), ends_.end(), token) != ends_.end()) {
    ended_ = FinishReason::kStop;
    return std::string();
  }
  if (decoder_ == nullptr) return std::string();
  OKV_ASSIGN_OR_RETURN(const std::string piece, decoder_->Push(token));
  std::string shown = stop_.Push(piece);
  if (stop_.stopped()) ended_ = FinishReason::kStop;
  return shown;
}

Result<std::string> Answer::Flush() {
  if (decoder_ == nullptr || stop_.stopped()) return std::string();
  OKV_ASSIGN_OR_RETURN(const std::string rest, decoder_->Flush());
  return stop_.Push(rest) + stop_.Flush();
}

}  // namespace omnikv
