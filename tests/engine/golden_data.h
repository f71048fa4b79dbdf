// Reading goldens, and how far logits are from them.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "io/safetensors.h"

namespace omnikv {

inline nlohmann::json ReadJson(const std::string& path) {
  std::ifstream file(path);
  return nlohmann::json::parse(file);
}

// The rows of a matrix as f32.
inline std::vector<std::vector<float>> Rows(const TensorSource& file, const std::string& name) {
  const TensorView* t = file.Find(name);
  EXPECT_NE(t, nullptr) << name;
  if (t == nullptr) return {};
  const auto columns = static_cast<size_t>(t->shape[1]);
  std::vector<std::vector<float>> rows(static_cast<size_t>(t->shape[0]),
                                       std::vector<float>(columns));
  for (size_t r = 0; r < rows.size(); ++r) {
    EXPECT_TRUE(file.ReadValues(*t, r * columns, columns, DType::kF32, rows[r].data()).ok());
  }
  return rows;
}

inline size_t ArgMax(const float* v, size_t n) {
  return static_cast<size_t>(std::max_element(v, v + n) - v);
}

// max|Δ| / max|reference| of one position.
inline double Error(const float* got, const std::vector<float>& reference) {
  double error = 0;
  double size = 0;
  for (size_t i = 0; i < reference.size(); ++i) {
    error = std::max(error, std::abs(static_cast<double>(got[i]) - reference[i]));
    size = std::max(size, std::abs(static_cast<double>(reference[i])));
  }
  return error / size;
}

// The same of a position of scripts/policy_oracle.py: every fourth logit, then the largest of all.
inline double ErrorOfOracle(const float* got, const std::vector<float>& reference) {
  double error = 0;
  for (size_t k = 0; k + 1 < reference.size(); ++k) {
    error = std::max(error, std::abs(static_cast<double>(got[4 * k]) - reference[k]));
  }
  return error / reference.back();
}

// Between the two largest logits.
inline double Margin(const std::vector<float>& logits) {
  std::vector<float> top(logits);
  std::partial_sort(top.begin(), top.begin() + 2, top.end(), std::greater<>());
  return top[0] - top[1];
}

inline double Largest(const std::vector<float>& v) {
  double largest = 0;
  for (float x : v) largest = std::max<double>(largest, std::abs(x));
  return largest;
}

}  // namespace omnikv
