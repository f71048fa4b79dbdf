#include "bank/noise_rows.h"

#include <algorithm>

namespace omnikv {
namespace {

constexpr int64_t kPatternRows = 4093;

}  // namespace

const float* Noise::Draw(int64_t n) {
  numbers_.resize(static_cast<size_t>(n));
  for (float& value : numbers_) {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    value = static_cast<float>(static_cast<int64_t>(state_) >> 40) * 0x1p-23f;
  }
  return numbers_.data();
}

const std::byte* NoiseRows::Piece(const Kind& kind, int64_t row,
                                  const std::function<void(std::byte* to, Noise& noise)>& make) {
  std::vector<std::byte>& pattern = patterns_[kind];
  if (pattern.empty()) {
    // A block's rows more than the pattern, so that each block is one piece of it.
    pattern.resize(static_cast<size_t>((kPatternRows + kind.block_rows) * kind.row_bytes));
    Noise noise;
    for (int64_t r = 0; r < kPatternRows; ++r) make(pattern.data() + r * kind.row_bytes, noise);
    for (int64_t r = 0; r < kind.block_rows; ++r) {
      std::copy_n(pattern.data() + r % kPatternRows * kind.row_bytes, kind.row_bytes,
                  pattern.data() + (kPatternRows + r) * kind.row_bytes);
    }
  }
  return pattern.data() + row % kPatternRows * kind.row_bytes;
}

}  // namespace omnikv
