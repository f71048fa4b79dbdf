// How many rows of a prompt go into a step beside rows that decode, so that nobody waits for a
// token longer than a limit.
#pragma once

#include <algorithm>
#include <cstdint>

namespace omnikv {

// For one prompt and the rows that decode beside it. Steps get slower as the past of the prompt
// grows, so it learns from each of them. Thread-compatible.
class ChunkPacer {
 public:
  static constexpr int32_t kTileOfCard = 128, kTileOfHost = 16;

  // Times in milliseconds: of a step at most, and of a step of the `decode_rows` alone. `tile`:
  // rows that products take at once (kTileOfCard); `max_rows` of a chunk.
  ChunkPacer(double limit, double alone, int32_t tile, int32_t decode_rows, int32_t max_rows)
      : limit_(limit),
        alone_(alone),
        tile_(tile),
        decode_rows_(decode_rows),
        max_rows_(max_rows),
        tiles_(LeastTiles()) {}

  // From now on so many rows decode beside the prompt, and their steps take `alone` milliseconds.
  void Beside(int32_t decode_rows, double limit, double alone) {
    decode_rows_ = decode_rows;
    limit_ = limit;
    alone_ = alone;
    tiles_ = std::max(tiles_, LeastTiles());
  }
  // Of the next chunk: with the decode rows a multiple of `tile`.
  int32_t rows() const { return std::clamp(tiles_ * tile_ - decode_rows_, 1, max_rows_); }
  // A step with such a chunk took `ms`. The next one has a tile less if that was too long, or one
  // more if it would still end well before the limit.
  void Took(double ms) {
    const double per_tile = (ms - alone_) / tiles_;
    if (ms > limit_) {
      tiles_ = std::max(LeastTiles(), tiles_ - 1);
    } else if (ms + per_tile < kMargin * limit_ && rows() < max_rows_) {
      ++tiles_;
    }
  }

 private:
  static constexpr double kMargin = 0.9;  // a tile more costs more than the tiles before it

  int32_t LeastTiles() const { return decode_rows_ / tile_ + 1; }

  double limit_, alone_;
  int32_t tile_, decode_rows_, max_rows_;
  int32_t tiles_;  // of a step, decode rows included
};

}  // namespace omnikv
