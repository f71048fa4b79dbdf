// A model loaded for a test, and comparisons of its weights.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "backend/ref/ref_backend.h"
#include "model/loader.h"

namespace omnikv {

struct Loaded {
  ModelFiles files;
  std::unique_ptr<Backend> backend;
  Weights weights;
};

inline Loaded Load(const std::string& path) {
  Loaded out;
  Result<ModelFiles> files = OpenModel(path);
  EXPECT_TRUE(files.ok()) << files.status().message();
  if (!files.ok()) return out;
  out.files = std::move(*files);
  out.backend = MakeRefBackend();
  Result<Weights> weights = LoadWeights(out.files, *out.backend, nullptr);
  EXPECT_TRUE(weights.ok()) << weights.status().message();
  if (weights.ok()) out.weights = std::move(*weights);
  return out;
}

// All values of a matrix, [n_out, n_in].
inline std::vector<float> Values(const WeightRef& w) {
  std::vector<float> values;
  for (int64_t row = 0; row < w.n_out; ++row) {
    for (int64_t i = 0; i < w.n_in; ++i) {
      values.push_back(LoadAsF32(w.format, w.Row(row), static_cast<size_t>(i)));
    }
  }
  return values;
}

// The values at `data`; none when it is null.
inline std::vector<float> Values(const float* data, int64_t n) {
  return data == nullptr ? std::vector<float>() : std::vector<float>(data, data + n);
}

inline void ExpectSameWeights(const Loaded& a, const Loaded& b) {
  const ModelConfig& c = a.files.config;
  const int64_t n_q = int64_t{c.n_heads} * c.head_dim;
  const int64_t n_kv = int64_t{c.n_kv_heads} * c.head_dim;
  const bool full = c.qk_norm == QkNorm::kFull;
  const Weights& v = a.weights;
  const Weights& w = b.weights;
  EXPECT_EQ(Values(v.embed), Values(w.embed));
  EXPECT_EQ(Values(v.head), Values(w.head));
  EXPECT_EQ(Values(v.final_norm, c.d_model), Values(w.final_norm, c.d_model));
  ASSERT_EQ(v.layers.size(), w.layers.size());
  for (size_t i = 0; i < v.layers.size(); ++i) {
    SCOPED_TRACE(i);
    const LayerWeights& x = v.layers[i];
    const LayerWeights& y = w.layers[i];
    for (const auto part :
         {&LayerWeights::wq, &LayerWeights::wk, &LayerWeights::wv, &LayerWeights::wo,
          &LayerWeights::gate, &LayerWeights::up, &LayerWeights::down}) {
      EXPECT_EQ(Values(x.*part), Values(y.*part));
      EXPECT_EQ((x.*part).n_in, (y.*part).n_in);
    }
    const auto same = [&](const float* LayerWeights::*part, int64_t n) {
      EXPECT_EQ(Values(x.*part, n), Values(y.*part, n));
    };
    same(&LayerWeights::attn_norm, c.d_model);
    same(&LayerWeights::attn_post_norm, c.d_model);
    same(&LayerWeights::ffn_norm, c.d_model);
    same(&LayerWeights::ffn_post_norm, c.d_model);
    same(&LayerWeights::bq, n_q);
    same(&LayerWeights::bk, n_kv);
    same(&LayerWeights::bv, n_kv);
    same(&LayerWeights::bo, c.d_model);
    same(&LayerWeights::q_norm, full ? n_q : c.head_dim);
    same(&LayerWeights::k_norm, full ? n_kv : c.head_dim);
    same(&LayerWeights::gate_bias, c.ffn);
    same(&LayerWeights::up_bias, c.ffn);
    same(&LayerWeights::down_bias, c.d_model);
  }
}

}  // namespace omnikv
