// Made-up rows of K/V and of states, reproducible, for contexts that nobody has computed.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <vector>

namespace omnikv {

// Numbers in (-1, 1), from a multiplicative generator.
class Noise {
 public:
  // n more, valid until the next call.
  const float* Draw(int64_t n);

 private:
  uint64_t state_ = 0x9e3779b97f4a7c15u;
  std::vector<float> numbers_;
};

// For each kind of row a pattern of a prime number of them, so that no two near rows are alike, and
// scores of a context have few ties. A pattern is made once and serves all layers.
// Thread-compatible.
class NoiseRows {
 public:
  struct Kind {
    int64_t row_bytes = 0;
    int64_t block_rows = 0;  // most rows that Piece gives
    int32_t heads = 0;       // of K/V, whose heads have dk and dv values; 0: rows of states
    int32_t dk = 0;
    int32_t dv = 0;

    auto operator<=>(const Kind&) const = default;
  };

  // Row `row` of the pattern, repeated, and the block_rows - 1 behind it. `make` writes a row of
  // this kind. Valid as long as this is.
  const std::byte* Piece(const Kind& kind, int64_t row,
                         const std::function<void(std::byte* to, Noise& noise)>& make);

 private:
  std::map<Kind, std::vector<std::byte>> patterns_;
};

}  // namespace omnikv
