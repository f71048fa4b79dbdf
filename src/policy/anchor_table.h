// The file of policy kascade: its anchors, and for each layer whose lists its heads read.
//     anchors  0  2  13                 (between tabs; the line may be missing)
//     0  1                              a line per layer, a column per KV head:
//     1  1                              the head of the layer's anchor whose tokens it reads
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "omnikv/status.h"

namespace omnikv {

struct AnchorTable {
  std::vector<int32_t> anchors;   // ascending, from 0; empty: the file names none
  std::vector<int32_t> head_map;  // [n_layers * n_kv_heads]; of anchors nobody looks at it
};

// kInvalidArgument, with the file and the line that is wrong, for a file that is not such a table
// of a model of this shape.
Result<AnchorTable> ReadAnchorTable(const std::string& path, int32_t n_layers, int32_t n_kv_heads);
// The text of such a file.
std::string AnchorTableText(const AnchorTable& table, int32_t n_kv_heads);

}  // namespace omnikv
