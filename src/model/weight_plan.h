// Where each row of a model's weights comes from and goes to: the directory of a file's tensors,
// checked against what the family needs, before any weight is read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "io/tensor.h"
#include "model/loader.h"
#include "model/weights.h"
#include "omnikv/status.h"

namespace omnikv {

// Destination row -> source row. Fused projections are taken apart and rotary pairs put in order by
// it, so that rows move whole and quantised ones stay as they are.
struct RowMap {
  int64_t first = 0;         // source row of destination row 0
  int64_t head_dim = 1;      // rows of a head
  int64_t group_heads = 0;   // heads in a row taken of each group; 0: all heads follow each other
  int64_t group_stride = 0;  // heads of a group in the source
  // Within a head, the source has values i and i + head_dim / 2 of a pair side by side.
  bool pairs = false;

  bool contiguous() const { return !pairs && group_heads == 0; }
  int64_t operator()(int64_t row) const;
};

// Rows of one tensor, copied to one place.
struct TensorCopy {
  const TensorView* source = nullptr;
  RowMap rows;
  DType format = DType::kF32;  // in memory
  int64_t n_rows = 0;
  int64_t n_values = 0;   // in a row
  int64_t row_bytes = 0;  // from row to row in memory
  size_t offset = 0;      // in memory, bytes
  bool vector = false;    // n_rows numbers, dense
  float add = 0;          // added to each number of a vector (norms stored as w - 1)

  size_t bytes() const { return static_cast<size_t>(n_rows * row_bytes); }
  // The rows lie in the file as they will lie in memory.
  bool verbatim() const;
};

struct WeightPlan {
  std::vector<TensorCopy> copies;  // in the order of the file
  size_t bytes = 0;                // of memory
  Weights weights;  // complete but for `memory`; pointers are null when planned without memory
};

// Plans for memory at `base` (null: not there yet, to learn `bytes`). kCorrupt when a tensor is
// missing or is not what the configuration says, kUnsupported when there are tensors that the
// family does not know.
Result<WeightPlan> PlanWeights(const ModelFiles& files, std::byte* base);

}  // namespace omnikv
