// What contexts of the store have in common: the beginning of a context in pieces of equal numbers
// of tokens, each named by all that its rows depend on (docs/decisions/085).
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "bank/bank.h"
#include "io/checked_file.h"
#include "omnikv/status.h"

namespace omnikv {

inline constexpr FileKind kSegmentFile = {
    .magic = "omnikvsg", .version = 1, .name = "a segment of stored contexts"};

// How the contexts of one engine are cut.
struct SegmentShape {
  int64_t tokens = 0;  // of one
  size_t bytes = 0;    // of its K/V: the rows of those tables that keep all tokens
  size_t file_bytes = 0;
  std::string root;  // what all names depend on: model, format of K/V, layout, tokens
  // Whether contexts have rows besides, in tables that do not keep all tokens. Then the beginning
  // of a context cannot be used without its end.
  bool others = false;
};

// `tokens`: of one, whole blocks; 0: as many as take about 64 MiB, 256 to 1,024 of them. `marks`
// are ModelMarks.
SegmentShape ShapeOf(const BankConfig& config, const nlohmann::json& marks, int64_t tokens);

// Whether it is what segments are called: 64 hexadecimal digits.
bool IsSegmentName(std::string_view name);
// The names of the segments at the beginning of a context: none where the image has lost rows. A
// name is SHA-256 of the one before it, of the tokens, of how many of their rows are of a dense
// prompt, and where not all are, of `made_by`, the key of the group that made the others. So
// contexts whose rows may differ have different names from there on.
std::vector<std::string> SegmentNames(const SegmentShape& shape, const BankConfig& config,
                                      const SequenceImage& image, std::span<const int32_t> tokens,
                                      int64_t dense_rows, std::string_view made_by);

// What the file of a context says of them, added to its text, and read from there.
struct SegmentList {
  int64_t tokens = 0;  // of each; 0 where there are none
  std::vector<std::string> names;

  bool operator==(const SegmentList&) const = default;
};
std::string WithSegments(const std::string& text, const SegmentList& segments);
// kCorrupt, without a name before the sentence. Each name is one.
Result<SegmentList> ParseSegments(std::string_view text);
// The text of the file of one, by which it is known when it is read.
std::string TextOfSegment(const std::string& name);

}  // namespace omnikv
