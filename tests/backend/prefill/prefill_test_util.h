// Random data in every storage format, and the instruction sets to run a test on.
#pragma once

#include <hwy/targets.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "backend/cpu/prefill/kernels.h"
#include "backend/ops.h"

namespace omnikv {

class Random {
 public:
  explicit Random(uint32_t seed) : generator_(seed) {}

  float Normal(float scale = 1) { return scale * normal_(generator_); }
  std::vector<float> Normals(int64_t n, float scale = 1) {
    std::vector<float> out(static_cast<size_t>(n));
    for (float& v : out) v = Normal(scale);
    return out;
  }
  int64_t Below(int64_t n) { return std::uniform_int_distribution<int64_t>(0, n - 1)(generator_); }

 private:
  std::mt19937 generator_;
  std::normal_distribution<float> normal_;
};

// A weight [n_out, n_in] of random values, its rows padded by `pad` bytes.
struct TestWeight {
  TestWeight(DType format, int64_t n_out, int64_t n_in, Random& random, int64_t pad = 0) {
    ref.format = format;
    ref.n_out = n_out;
    ref.n_in = n_in;
    ref.row_bytes = static_cast<int64_t>(DTypeBytes(format, static_cast<size_t>(n_in))) + pad;
    bytes.resize(static_cast<size_t>(n_out * ref.row_bytes));
    for (int64_t r = 0; r < n_out; ++r) {
      std::byte* row = bytes.data() + r * ref.row_bytes;
      if (format != DType::kQ8_0) {
        for (int64_t i = 0; i < n_in; ++i) {
          StoreFromF32(format, row, static_cast<size_t>(i), random.Normal(0.1f));
        }
        continue;
      }
      for (int64_t i = 0; i < n_in; i += kQ8Block, row += kQ8BlockBytes) {
        const F16 scale = F16FromF32(0.002f + std::abs(random.Normal(0.001f)));
        std::memcpy(row, &scale, sizeof(scale));
        for (size_t j = 0; j < kQ8Block; ++j) {
          row[2 + j] = static_cast<std::byte>(random.Below(255) - 127);
        }
      }
    }
    ref.data = bytes.data();
  }

  float At(int64_t row, int64_t i) const {
    return LoadAsF32(ref.format, ref.Row(row), static_cast<size_t>(i));
  }

  std::vector<std::byte> bytes;
  WeightRef ref;
};

// Calls body once for each instruction set that Highway was built for and this CPU has.
template <typename Body>
void ForEachTarget(const Body& body) {
  std::set<std::string> done;
  const int64_t all = hwy::SupportedTargets();
  for (int64_t left = all; left != 0; left &= left - 1) {
    hwy::SetSupportedTargetsForTest(left & -left);
    hwy::GetChosenTarget().Update(left & -left);
    if (done.insert(prefill::BestVectorKernels().name).second) body();
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().Update(all);
}

}  // namespace omnikv
