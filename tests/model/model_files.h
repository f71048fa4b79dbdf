// Writes model files for tests: Hugging Face folders and GGUF files of a few kilobytes.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "io/tensor.h"

namespace omnikv {

// A folder that is removed with all that is in it.
class TempFolder {
 public:
  TempFolder();
  ~TempFolder();
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

  std::string path() const { return path_.string(); }
  std::string operator/(const std::string& name) const { return (path_ / name).string(); }

 private:
  std::filesystem::path path_;
};

void WriteFile(const std::string& path, const std::string& bytes);

// A tensor to be written: `data` is what `type` stores.
struct FileTensor {
  std::string name;
  StorageType type = StorageType::kF32;
  std::vector<int64_t> shape;  // outermost first
  std::string data;
  size_t promised_bytes = 0;  // safetensors: bytes past the data that the header speaks of
};

// The value of a tensor's element, by name and index: different everywhere, the same each time.
// Exact in bf16.
float TestValue(const std::string& name, size_t index);

// A tensor of TestValues. F32, F16 and BF16.
FileTensor MakeTensor(const std::string& name, StorageType type, std::vector<int64_t> shape);
FileTensor MakeTensor(const std::string& name, StorageType type, std::vector<int64_t> shape,
                      const std::vector<float>& values);

std::string SafetensorsBytes(const std::vector<FileTensor>& tensors);

// Metadata values of a GGUF file: integers become uint32, floats float32, strings, booleans, arrays
// of one of these.
using GgufMetadata = std::vector<std::pair<std::string, nlohmann::json>>;
std::string GgufBytes(const GgufMetadata& metadata, const std::vector<FileTensor>& tensors);

}  // namespace omnikv
