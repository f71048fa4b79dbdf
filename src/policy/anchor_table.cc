#include "policy/anchor_table.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <string_view>

#include "policy/number_table.h"

namespace omnikv {
namespace {

constexpr std::string_view kTitle = "anchors\t";

Result<std::vector<int32_t>> ParseAnchors(std::string_view line, const std::string& path,
                                          int32_t n_layers) {
  const std::string where = path + ": line 1";
  OKV_ASSIGN_OR_RETURN(const auto numbers, ParseNumberLine(line, where, 0, n_layers - 1));
  std::vector<int32_t> anchors;
  for (const double number : numbers) {
    const auto anchor = static_cast<int32_t>(number);
    if (anchor != number || (anchors.empty() ? anchor != 0 : anchor <= anchors.back())) {
      return InvalidArgument(
          fmt::format("{} has {}, expected ascending layers, from 0 on", where, number));
    }
    anchors.push_back(anchor);
  }
  if (!anchors.empty()) return anchors;
  return InvalidArgument(where + " names no anchor, expected ascending layers, from 0 on");
}

}  // namespace

Result<AnchorTable> ReadAnchorTable(const std::string& path, int32_t n_layers, int32_t n_kv_heads) {
  const auto bytes = ReadNumberTable(path);
  if (!bytes.ok()) return bytes.status();
  std::string_view text = *bytes;
  AnchorTable table;
  int32_t first_line = 1;
  if (text.starts_with(kTitle)) {
    const size_t end = std::min(text.find('\n'), text.size());
    const std::string_view line = text.substr(kTitle.size(), end - kTitle.size());
    OKV_ASSIGN_OR_RETURN(table.anchors, ParseAnchors(line, path, n_layers));
    text.remove_prefix(std::min(end + 1, text.size()));
    ++first_line;
  }
  OKV_ASSIGN_OR_RETURN(const auto numbers, ParseHeadNumbers(path, text, n_layers, n_kv_heads, 0,
                                                            n_kv_heads - 1, first_line));
  for (size_t i = 0; i < numbers.size(); ++i) {
    table.head_map.push_back(static_cast<int32_t>(numbers[i]));
    if (table.head_map.back() == numbers[i]) continue;
    return InvalidArgument(fmt::format("{}: line {} has {}, expected whole numbers", path,
                                       first_line + static_cast<int32_t>(i) / n_kv_heads,
                                       numbers[i]));
  }
  return table;
}

std::string AnchorTableText(const AnchorTable& table, int32_t n_kv_heads) {
  std::string text;
  if (!table.anchors.empty()) {
    text = fmt::format("{}{}\n", kTitle, fmt::join(table.anchors, "\t"));
  }
  for (size_t i = 0; i < table.head_map.size(); ++i) {
    const bool ends = (i + 1) % static_cast<size_t>(n_kv_heads) == 0;
    text += fmt::format("{}{}", table.head_map[i], ends ? '\n' : '\t');
  }
  return text;
}

}  // namespace omnikv
