// The SIMD kernels of the prefill path. All of them put rows of activations (or queries) in the
// lanes of a vector and broadcast weights (or keys and values), so weights and K/V are read as they
// are stored, row-major, and no sum ever crosses lanes: the order of every sum is that of its
// index.
//
// A *panel* is `lanes` rows of activations, transposed: [n_in / pack, lanes] words of 4 bytes,
// where a word holds one f32 (pack 1) or two consecutive bf16 values (pack 2).
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"
#include "base/thread_pool.h"

namespace omnikv::prefill {

// Weight rows of a call of GemmKernels::multiply, and key rows of a tile, come in multiples of
// this; rows that pad them are computed and ignored. Every kernel's register block divides it.
inline constexpr int64_t kRowUnit = 12;

// Memory that is wanted next: rows of `bytes` bytes, `stride` bytes apart.
struct Ahead {
  const std::byte* data = nullptr;
  int64_t rows = 0;
  int64_t stride = 0;
  int64_t bytes = 0;

  // Part `part` of `parts` of it.
  void Fetch(int64_t part, int64_t parts) const {
    for (int64_t r = rows * part / parts; r < rows * (part + 1) / parts; ++r) {
      for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(data + r * stride + b, 0, 2);
    }
  }
};

// One instruction set's matrix product.
struct GemmKernels {
  const char* name;
  int64_t lanes;  // rows of a panel
  int64_t pack;   // values in a word

  // acc[n, ld_acc] += w · panel for rows < `rows` of the panel, fetching ahead[0..1] into the
  // caches meanwhile. w: [n, ld_w] words, n a multiple of kRowUnit; panel: [k, lanes] words.
  void (*multiply)(const uint32_t* w, int64_t ld_w, int64_t n, const uint32_t* panel, int64_t rows,
                   int64_t k, const Ahead* ahead, float* acc, int64_t ld_acc);
};

// What AttendKernels::attend adds to one panel of query rows: a tile of consecutive tokens.
struct AttendTile {
  const uint32_t* q = nullptr;   // [dk / pack, lanes] words: queries, scaled so that their products
                                 // with keys are logits to base 2 (with a cap: natural logits)
  float* o = nullptr;            // [dv, lanes]: running sum of p v
  float* top = nullptr;          // [lanes]: running maximum of logits, base 2
  float* sum = nullptr;          // [lanes]: running sum of p = 2^(logit - top)
  float* norm = nullptr;         // [lanes]: running sum of p as v is multiplied by it, rounded
  const int32_t* pos = nullptr;  // [lanes]: positions of the query rows
  const uint32_t* k = nullptr;   // [tokens padded to kRowUnit, ld_k] words
  const uint32_t* v = nullptr;   // pack 1: [tokens, ld_v]; pack 2: [tokens / 2, ld_v], word (t, d)
                                 // holding value d of tokens 2t and 2t + 1
  float* logits = nullptr;       // scratch: [tokens of a tile, lanes], or what the kernels ask for
  int64_t ld_k = 0;              // words
  int64_t ld_v = 0;              // words
  int32_t dk = 0;
  int32_t dv = 0;
  int32_t first = 0;    // position of the tile's first token
  int32_t tokens = 0;   // at least 1
  int32_t window = 0;   // a row at p reads tokens > p - window; 0: all
  bool lse = true;      // whether `sum` is wanted, where `norm` is kept
  bool masked = false;  // some row of the panel does not read some token of the tile
  float cap = 0;        // softcap; 0: none
};

inline constexpr int32_t kTileTokens = 96;  // a multiple of kRowUnit and of 32

// Rows of K and V of consecutive tokens, in 16 bits.
struct AttendRows {
  static constexpr int64_t kMost = 32;
  DType dtype = DType::kBF16;
  int32_t dk = 0;
  int32_t dv = 0;
  int64_t n = 0;
  const std::byte* k[kMost];
  const std::byte* v[kMost];
};

// One instruction set's attention.
struct AttendKernels {
  const char* name;
  int64_t lanes;  // query rows of a panel: (token, head) pairs
  int64_t pack;
  int32_t tile_tokens = kTileTokens;
  // Queries of a block: many, so that fetching and converting a tile of K/V costs little beside
  // multiplying it, but no more than stay in the second-level cache with their sums.
  int64_t max_queries = 512;
  int64_t min_queries = 64;  // fewer are a block only where threads would have none
  int64_t query_words = 128 << 10;
  int64_t unit = 1;           // words of a query are padded with zeros to a multiple of this
  bool norm = false;          // keeps AttendTile::norm
  int64_t scratch = 0;        // floats of AttendTile::logits; 0: tile_tokens * lanes
  void (*begin)() = nullptr;  // called by a thread before and after its tiles; null: nothing to do
  void (*end)() = nullptr;

  // The kernels' own order of K and V: writes tokens [first, first + rows.n) of a tile, `first` a
  // multiple of AttendRows::kMost, to `k` and `v`, which have room for a tile's tokens with dk and
  // dv rounded up to 32. Null: rows (AttendTile).
  void (*pack_rows)(const AttendRows& rows, int64_t first, uint32_t* k, uint32_t* v) = nullptr;

  // Adds a tile to `n` panels, calling before(i) ahead of panel i.
  void (*attend)(const AttendTile* panels, int64_t n, FunctionRef<void(int64_t)> before) = nullptr;
};

// What any instruction set of Highway does. Pointers are to static tables.
struct VectorKernels {
  const char* name;
  GemmKernels gemm;      // f32
  AttendKernels attend;  // f32

  // n values as f32. n is a multiple of kQ8Block for kQ8_0. REQUIRES type != kQ4_0.
  void (*to_f32)(DType type, const std::byte* src, int64_t n, float* out);
  // The same of values in blocks whose scales lie apart (kv_format.h).
  void (*blocks_to_f32)(DType type, const std::byte* values, const std::byte* scales, int64_t n,
                        float* out);
  // Rounded to nearest even; NaN stays NaN.
  void (*to_bf16)(const float* src, int64_t n, Bf16* out);
  // out[i] = the pair (even[i], odd[i]), even in the low half.
  void (*pair)(const Bf16* even, const Bf16* odd, int64_t n, uint32_t* out);
  // out[c, r] = src[r, c] for r < rows, c < cols.
  void (*transpose)(const uint32_t* src, int64_t ld_src, int64_t rows, int64_t cols, uint32_t* out,
                    int64_t ld_out);
  // gate[i] = act(gate[i]) * up[i], act being SiLU or tanh-GELU. In whole vectors: both arrays have
  // room for n rounded up to 16.
  void (*gate)(bool gelu, float* gate, const float* up, int64_t n);
  // out[i] = value * src[i].
  void (*scale)(const float* src, int64_t n, float value, float* out);
};

// The best that this CPU runs; in tests, the best of the targets that Highway is limited to.
const VectorKernels& BestVectorKernels();

}  // namespace omnikv::prefill
