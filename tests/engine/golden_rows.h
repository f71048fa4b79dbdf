// Rows of floats in a file of goldens.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "io/safetensors.h"

namespace omnikv {

// The tensor `name`, [rows, columns], as f32.
inline std::vector<std::vector<float>> Rows(const TensorSource& file, const std::string& name) {
  const TensorView* t = file.Find(name);
  EXPECT_NE(t, nullptr) << name;
  if (t == nullptr) return {};
  const auto columns = static_cast<size_t>(t->shape[1]);
  std::vector<std::vector<float>> rows(static_cast<size_t>(t->shape[0]),
                                       std::vector<float>(columns));
  for (size_t r = 0; r < rows.size(); ++r) {
    ConvertRows(*t, r * columns, columns, DType::kF32, rows[r].data());
  }
  return rows;
}

}  // namespace omnikv
