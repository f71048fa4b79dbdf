// Files of numbers that policies read: one for each KV head of each layer, a line per layer, a
// column per KV head, between tabs.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "omnikv/status.h"
#include "policy/settings.h"

namespace omnikv {

// kInvalidArgument, with the file and the line that is wrong, unless all are numbers from `min` to
// `max`.
Result<std::vector<double>> ReadHeadNumbers(const std::string& path, int32_t n_layers,
                                            int32_t n_kv_heads, double min, double max);
// The same in two parts: the text of the file, and what it says from line `first_line` of the file
// on, for tables that begin otherwise.
Result<std::string> ReadNumberTable(const std::string& path);
Result<std::vector<double>> ParseHeadNumbers(const std::string& path, std::string_view text,
                                             int32_t n_layers, int32_t n_kv_heads, double min,
                                             double max, int32_t first_line);
// The numbers of one line, between tabs. `where` names it in messages.
Result<std::vector<double>> ParseNumberLine(std::string_view line, const std::string& where,
                                            double min, double max);
// The text of such a file, with six digits behind the point. `numbers` [n_layers * n_kv_heads].
std::string HeadNumbersText(const std::vector<double>& numbers, int32_t n_kv_heads);

// Where a file of a model's numbers is looked for when none is named: model.NAME beside model.gguf,
// NAME in a model's folder.
std::string PathBesideModel(const std::string& model_path, const std::string& name);
// That path if there is such a file, and then the setting `key` is its name alone: a saved context
// goes on where the model is reached by another path.
std::optional<std::string> FindBesideModel(const std::string& model_path, const std::string& name,
                                           PolicySettings& settings, const std::string& key);

}  // namespace omnikv
