// Models with made-up weights of any geometry: for benchmarks, which need no download, and tests.
#pragma once

#include <string>

#include "model/config.h"
#include "model/weights.h"
#include "omnikv/status.h"

namespace omnikv {

// "tiny" (the shipped model's), "llama-1b", "llama3-8b", or the path of a JSON file with layers,
// d_model, heads, kv_heads, head_dim, ffn, vocab and, optional, max_context. kCorrupt names the
// field that is missing, out of range (ModelLimits) or does not fit the others.
Result<ModelConfig> GeometryConfig(const std::string& geometry);

// Weights of a llama of this geometry, every matrix in `format`, reproducible. Their size keeps
// activations finite; they mean nothing.
size_t GeneratedWeightBytes(const ModelConfig& config, DType format);
Result<Weights> GenerateWeights(Backend& backend, const ModelConfig& config, DType format);

}  // namespace omnikv
