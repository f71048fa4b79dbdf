#include "policy/number_table.h"

#include <fmt/format.h>

#include <filesystem>
#include <string_view>

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

Result<std::vector<double>> ReadHeadNumbers(const std::string& path, int32_t n_layers,
                                            int32_t n_kv_heads, double min, double max) {
  const auto bytes = ReadWholeFile(path, kMaxBytes);
  if (!bytes.ok()) return InvalidArgument(bytes.status().message());
  std::vector<double> numbers;
  int32_t n_lines = 0;
  for (std::string_view text = *bytes; !text.empty();) {
    std::string_view line = Next(text, '\n');
    if (line.ends_with('\r')) line.remove_suffix(1);
    ++n_lines;
    int32_t columns = 0;
    for (; !line.empty(); ++columns) {
      const std::string_view field = Next(line, '\t');
      const auto number = ParseReal(field);
      if (!number || *number < min || *number > max) {
        return InvalidArgument(fmt::format("{}: line {} has {}, expected numbers from {} to {}",
                                           path, n_lines, Printable(field), min, max));
      }
      numbers.push_back(*number);
    }
    if (columns != n_kv_heads) {
      return InvalidArgument(
          fmt::format("{}: line {} has {} numbers, expected {}, one for each KV head of the model",
                      path, n_lines, columns, n_kv_heads));
    }
  }
  if (n_lines == n_layers) return numbers;
  return InvalidArgument(
      fmt::format("{}: has {} lines, expected {}, one for each layer of the "
                  "model that attends to all tokens",
                  path, n_lines, n_layers));
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
