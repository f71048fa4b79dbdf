// Reading a Hugging Face folder's config.json and generation_config.json. Both spellings are read:
// transformers 5 (rope_parameters) and what came before it (rope_theta and rope_scaling).
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "io/tensor.h"
#include "model/arch/arch.h"
#include "model/config.h"
#include "omnikv/status.h"

namespace omnikv {

// A JSON file, parsed. kNotFound or kCorrupt, with the file and the place, when it cannot be.
Result<nlohmann::json> ReadJsonFile(const std::string& path);

// The fields of a JSON object, typed and bounded. What is wrong first is kept in one Status, shared
// with the objects inside; accessors then return values that do no harm. So reading is a list of
// fields, and the status is asked for once. A null field counts as absent, as in transformers. The
// JSON and the status outlive it.
class JsonFields {
 public:
  // `prefix` stands before the names of fields in messages: "rope_scaling.".
  JsonFields(std::string file, const nlohmann::json* object, Status* status,
             std::string prefix = "");

  bool Has(std::string_view key) const;
  bool IsNull(std::string_view key) const;  // there, and null

  // Without a fallback the field must be there. Numbers outside [min, max] are refused.
  int64_t Int(std::string_view key, int64_t min, int64_t max,
              std::optional<int64_t> fallback = std::nullopt) const;
  double Float(std::string_view key, double min, double max,
               std::optional<double> fallback = std::nullopt) const;
  bool Bool(std::string_view key, bool fallback) const;
  std::string String(std::string_view key, std::optional<std::string> fallback) const;

  // Arrays; an absent one is empty.
  std::vector<int64_t> Ints(std::string_view key, int64_t min, int64_t max) const;
  std::vector<float> Floats(std::string_view key, double min, double max) const;
  std::vector<std::string> Strings(std::string_view key) const;

  std::optional<JsonFields> Object(std::string_view key) const;

  // Records what the field's value is and what it must be.
  void Refuse(std::string_view key, std::string_view expected,
              StatusCode code = StatusCode::kUnsupported) const;
  bool ok() const { return status_->ok(); }

  const nlohmann::json& json() const { return *object_; }

 private:
  const nlohmann::json* Find(std::string_view key) const;
  template <typename T, typename Convert>
  std::vector<T> Array(std::string_view key, const std::string& expected, Convert convert) const;

  std::string file_;
  const nlohmann::json* object_;
  Status* status_;
  std::string prefix_;
};

// What a family's from_hf reads.
class HfConfig {
 public:
  HfConfig(const Arch& arch, JsonFields fields, const TensorSource& tensors)
      : arch_(arch), fields_(std::move(fields)), tensors_(tensors) {}

  const JsonFields& fields() const { return fields_; }
  const TensorView* FindEmbedding() const;

  // One set of rotary frequencies, from an object of rope parameters (none: unscaled) and, for what
  // it leaves out, the fields of config.json.
  RopeConfig ReadRope(const std::optional<JsonFields>& params, double default_theta,
                      const ModelConfig& config) const;

  // sliding_window in tokens; 0 where it is null or not shorter than the context.
  int32_t ReadWindow(int64_t fallback, const ModelConfig& config) const;

  // Which layers slide, [n_layers]: those that layer_types names, without it those of `fallback`.
  std::vector<bool> ReadSliding(std::vector<bool> fallback) const;

 private:
  const Arch& arch_;
  JsonFields fields_;
  const TensorSource& tensors_;
};

// The configuration in `folder`, whose weights are `tensors`. kUnsupported names a family or a
// variation that does not run, kCorrupt and kNotFound the file and the field.
Result<ModelConfig> ReadHfConfig(const std::string& folder, const TensorSource& tensors);

}  // namespace omnikv
