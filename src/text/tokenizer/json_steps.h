// The parts of tokenizer.json that are chains of steps.
#pragma once

#include <optional>
#include <vector>

#include "omnikv/status.h"
#include "text/tokenizer/decoder.h"
#include "text/tokenizer/json_node.h"
#include "text/tokenizer/normalizer.h"
#include "text/tokenizer/pre_tokenizer.h"

namespace omnikv::tok {

// Steps that a chain may have, sequences in sequences included, and levels of those.
inline constexpr size_t kMaxSteps = 256;
inline constexpr int kMaxStepDepth = 16;

// Each appends the steps of `node`, sequences flattened; null has none. kUnsupported names a type
// that is not known and those that are.
Status ReadNormalizer(const JsonNode& node, std::vector<NamedStep<Normalizer>>* steps);
Status ReadDecoder(const JsonNode& node, std::vector<DecoderStep>* steps);

struct PreTokenizerChain {
  std::vector<NamedStep<PreTokenizer>> steps;
  bool gives_bytes = false;  // the last step leaves bytes as they are
};
// With `model_takes_bytes` a ByteLevel step at the end does not map bytes to characters.
Result<PreTokenizerChain> ReadPreTokenizer(const JsonNode& node, bool model_takes_bytes);

}  // namespace omnikv::tok
