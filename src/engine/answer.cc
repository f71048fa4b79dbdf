#include "engine/answer.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/check.h"

namespace omnikv {

// The model's, and stop texts that are a special token, which the answer's text never has.
Result<std::vector<Answer::EndToken>> Answer::EndTokens(const EngineCore& core,
                                                        const GenerateOptions& options) {
  std::vector<EndToken> ends;
  if (!options.ignore_eos) {
    for (const int32_t token : core.config.eos_ids) ends.push_back({token, ""});
  }
  if (options.stop.empty()) return ends;
  OKV_RETURN_IF_ERROR(NeedTokenizer(core).Prefixed("`stop`"));
  const Tokenizer& tokenizer = *core.text.tokenizer;
  for (const std::string& stop : options.stop) {
    const std::optional<int32_t> id = tokenizer.TokenToId(stop);
    if (id && tokenizer.IsSpecial(*id)) ends.push_back({*id, stop});
  }
  return ends;
}

Result<Answer> Answer::Begin(const EngineCore& core, const GenerateOptions& options,
                             std::span<const int32_t> context) {
  OKV_RETURN_IF_ERROR(CheckGenerate(options));
  for (const auto& [token, bias] : options.sampling.logit_bias) {
    if (token >= 0 && token < core.config.vocab) continue;
    return InvalidArgument(
        fmt::format("`logit_bias` names token {}, expected 0 to {}", token, core.config.vocab - 1));
  }
  Answer answer(options);
  OKV_ASSIGN_OR_RETURN(answer.ends_, EndTokens(core, options));
  answer.sampler_ = std::make_unique<Sampler>(options.sampling, core.config.vocab);
  for (const int32_t token : context) answer.sampler_->See(token);
  if (core.text.tokenizer != nullptr) {
    answer.decoder_ = std::make_unique<StreamDecoder>(core.text.tokenizer.get(),
                                                      /*skip_special=*/!options.special_text);
  }
  return answer;
}

Result<std::string> Answer::Take(int32_t token) {
  OKV_CHECK(!ended());
  tokens_.push_back(token);
  if (left() == 0) ended_ = FinishReason::kLength;
  const auto end =
      std::find_if(ends_.begin(), ends_.end(), [&](const EndToken& e) { return e.token == token; });
  if (end != ends_.end()) {
    ended_ = FinishReason::kStop;
    stop_token_ = end->stop;
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
