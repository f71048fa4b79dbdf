#include "policy/number_table.h"

#include <fmt/format.h>

#include <filesystem>
#include <utility>

#include "base/numbers.h"
#include "base/printable.h"
#include "io/file.h"

namespace omnikv {
namespace {

constexpr size_t kMaxBytes = size_t{1} << 20;

// What comes before the next `separator`, which `text` loses with it.
std::string_view Next(std::string_view& text, char separator) {
  const size_t at = text.find(separator);
  const std::string_view part = text.substr(0, at);
  text.remove_prefix(at == std::string_view::npos ? text.size() : at + 1);
  return part;
}

}  // namespace

Result<std::string> ReadNumberTable(const std::string& path) {
  auto bytes = ReadWholeFile(path, kMaxBytes);
  if (!bytes.ok()) return InvalidArgument(bytes.status().message());
  return std::move(*bytes);
}

Result<std::vector<double>> ParseNumberLine(std::string_view line, const std::string& where,
                                            double min, double max) {
  std::vector<double> numbers;
  if (line.ends_with('\r')) line.remove_suffix(1);
  while (!line.empty()) {
    const std::string_view field = Next(line, '\t');
    const auto number = ParseReal(field);
    if (!number || *number < min || *number > max) {
      return InvalidArgument(fmt::format("{} has {}, expected numbers from {} to {}", where,
                                         Printable(field), min, max));
    }
    numbers.push_back(*number);
  }
  return numbers;
}

Result<std::vector<double>> ParseHeadNumbers(const std::string& path, std::string_view text,
                                             int32_t n_layers, int32_t n_kv_heads, double min,
                                             double max, int32_t first_line) {
  std::vector<double> numbers;
  int32_t n_lines = 0;
  while (!text.empty()) {
    const std::string where = fmt::format("{}: line {}", path, first_line + n_lines++);
    OKV_ASSIGN_OR_RETURN(const auto line, ParseNumberLine(Next(text, '\n'), where, min, max));
    numbers.insert(numbers.end(), line.begin(), line.end());
    if (line.size() == static_cast<size_t>(n_kv_heads)) continue;
    return InvalidArgument(
        fmt::format("{} has {} numbers, expected {}, one for each KV head of the model", where,
                    line.size(), n_kv_heads));
  }
  if (n_lines == n_layers) return numbers;
  return InvalidArgument(
      fmt::format("{}: has {} lines, expected {}, one for each layer of the "
                  "model that attends to all tokens",
                  path, n_lines, n_layers));
}

Result<std::vector<double>> ReadHeadNumbers(const std::string& path, int32_t n_layers,
                                            int32_t n_kv_heads, double min, double max) {
  const auto text = ReadNumberTable(path);
  if (!text.ok()) return text.status();
  return ParseHeadNumbers(path, *text, n_layers, n_kv_heads, min, max, 1);
}

std::string HeadNumbersText(const std::vector<double>& numbers, int32_t n_kv_heads) {
  std::string text;
  for (size_t i = 0; i < numbers.size(); ++i) {
    const bool ends = (i + 1) % static_cast<size_t>(n_kv_heads) == 0;
    text += fmt::format("{:.6f}{}", numbers[i], ends ? '\n' : '\t');
  }
  return text;
}

std::string PathBesideModel(const std::string& model_path, const std::string& name) {
  constexpr std::string_view kGguf = ".gguf";
  if (!model_path.ends_with(kGguf)) return model_path + "/" + name;
  return model_path.substr(0, model_path.size() - kGguf.size()) + "." + name;
}

std::optional<std::string> FindBesideModel(const std::string& model_path, const std::string& name,
                                           PolicySettings& settings, const std::string& key) {
  std::string beside = PathBesideModel(model_path, name);
  std::error_code error;
  if (model_path.empty() || !std::filesystem::exists(beside, error)) return std::nullopt;
  settings.Resolve(key, std::filesystem::path(beside).filename());
  return beside;
}

}  // namespace omnikv
