// Reading a model's configuration from GGUF metadata.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "io/gguf.h"
#include "model/arch/arch.h"
#include "model/config.h"
#include "omnikv/status.h"

namespace omnikv {

// What a family's from_gguf reads: metadata under "<architecture>.", typed and bounded. What is
// wrong first is kept in the Status; accessors then return values that do no harm.
class GgufConfig {
 public:
  GgufConfig(const Arch& arch, const GgufFile& file, std::string architecture, Status* status)
      : arch_(arch), file_(file), architecture_(std::move(architecture)), status_(status) {}

  const GgufFile& file() const { return file_; }

  bool Has(std::string_view key) const { return file_.Has(Key(key)); }

  // Without a fallback the key must be there. Numbers outside [min, max] are refused. An array with
  // an entry for each layer counts as a number where all entries are equal.
  int64_t Int(std::string_view key, int64_t min, int64_t max,
              std::optional<int64_t> fallback = std::nullopt) const;
  double Float(std::string_view key, double min, double max,
               std::optional<double> fallback = std::nullopt) const;
  bool Bool(std::string_view key, bool fallback) const;

  // The rotary frequencies; those of global layers where a family has two sets.
  RopeConfig ReadRope(const ModelConfig& config) const;

  // attention.sliding_window in tokens; 0 where it is absent, 0 or not shorter than the context.
  int32_t ReadWindow(const ModelConfig& config) const;

  // Which layers slide, [n_layers]: an array of booleans, or a number n for all but every n-th.
  std::vector<bool> ReadSlidingPattern(int64_t fallback, const ModelConfig& config) const;

  // Records that the key's value is not what it must be.
  void Refuse(std::string_view key, std::string_view value, std::string_view expected) const;

 private:
  std::string Key(std::string_view key) const { return architecture_ + "." + std::string(key); }
  void Fail(Status status) const;
  std::string String(std::string_view key, std::string fallback) const;
  std::vector<float> ReadFactors(std::string_view tensor, int64_t n) const;

  const Arch& arch_;
  const GgufFile& file_;
  std::string architecture_;
  Status* status_;
};

// The configuration in `file`. kUnsupported names a family or a variation that does not run,
// kCorrupt and kNotFound the file and the key.
Result<ModelConfig> ReadGgufConfig(const GgufFile& file);

}  // namespace omnikv
