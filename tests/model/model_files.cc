#include "model_files.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <functional>
#include <numeric>

namespace omnikv {
namespace {

using Json = nlohmann::json;

constexpr uint32_t kGgufUint32 = 4, kGgufFloat32 = 6, kGgufBool = 7, kGgufString = 8;
constexpr uint32_t kGgufArray = 9;
constexpr size_t kGgufAlignment = 32;

template <typename T>
void Append(std::string& out, T value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof value);
}

void AppendString(std::string& out, const std::string& s) {
  Append<uint64_t>(out, s.size());
  out += s;
}

uint32_t GgufTypeOf(const Json& value) {
  if (value.is_string()) return kGgufString;
  if (value.is_boolean()) return kGgufBool;
  if (value.is_array()) return kGgufArray;
  return value.is_number_float() ? kGgufFloat32 : kGgufUint32;
}

void AppendGgufValue(std::string& out, const Json& value) {
  switch (GgufTypeOf(value)) {
    case kGgufString:
      AppendString(out, value.get<std::string>());
      break;
    case kGgufBool:
      Append<uint8_t>(out, value.get<bool>());
      break;
    case kGgufFloat32:
      Append(out, value.get<float>());
      break;
    case kGgufArray:
      Append(out, value.empty() ? kGgufUint32 : GgufTypeOf(value[0]));
      Append<uint64_t>(out, value.size());
      for (const Json& element : value) AppendGgufValue(out, element);
      break;
    default:
      Append(out, static_cast<uint32_t>(value.get<int64_t>()));
  }
}

uint32_t GgmlTypeOf(StorageType type) {
  switch (type) {
    case StorageType::kF32:
      return 0;
    case StorageType::kF16:
      return 1;
    case StorageType::kQ4_0:
      return 2;
    case StorageType::kQ8_0:
      return 8;
    case StorageType::kI8:
      return 24;
    case StorageType::kBF16:
      return 30;
    default:
      ADD_FAILURE() << "no ggml type for " << StorageTypeName(type);
      return 0;
  }
}

}  // namespace

TempFolder::TempFolder() {
  std::string pattern = (std::filesystem::temp_directory_path() / "omnikv_model_XXXXXX").string();
  path_ = ::mkdtemp(pattern.data());
}

TempFolder::~TempFolder() {
  std::error_code error;
  std::filesystem::remove_all(path_, error);
}

void WriteFile(const std::string& path, const std::string& bytes) {
  std::ofstream file(path, std::ios::binary);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  ASSERT_TRUE(file.good()) << path;
}

float TestValue(const std::string& name, size_t index) {
  uint64_t h = std::hash<std::string>()(name) + index * 0x9e3779b97f4a7c15u;
  h = (h ^ (h >> 31)) * 0xbf58476d1ce4e5b9u;
  h ^= h >> 29;
  return static_cast<float>(static_cast<int>(h % 255) - 127) / 64;  // 8 bits of mantissa
}

FileTensor MakeTensor(const std::string& name, StorageType type, std::vector<int64_t> shape,
                      const std::vector<float>& values) {
  FileTensor tensor;
  tensor.name = name;
  tensor.type = type;
  tensor.shape = std::move(shape);
  for (const float v : values) {
    if (type == StorageType::kF32) {
      Append(tensor.data, v);
    } else {
      Append(tensor.data, type == StorageType::kF16 ? F16FromF32(v) : Bf16FromF32(v));
    }
  }
  return tensor;
}

FileTensor MakeTensor(const std::string& name, StorageType type, std::vector<int64_t> shape) {
  std::vector<float> values(static_cast<size_t>(
      std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>())));
  for (size_t i = 0; i < values.size(); ++i) values[i] = TestValue(name, i);
  return MakeTensor(name, type, std::move(shape), values);
}

std::string SafetensorsBytes(const std::vector<FileTensor>& tensors) {
  Json header = Json::object();
  size_t offset = 0;
  std::string data;
  for (const FileTensor& t : tensors) {
    const size_t end = offset + t.data.size() + t.promised_bytes;
    header[t.name] = {
        {"dtype", StorageTypeName(t.type)}, {"shape", t.shape}, {"data_offsets", {offset, end}}};
    offset = end;
    data += t.data;
  }
  const std::string text = header.dump();
  std::string out;
  AppendString(out, text);
  return out + data;
}

std::string GgufBytes(const GgufMetadata& metadata, const std::vector<FileTensor>& tensors) {
  std::string out = "GGUF";
  Append<uint32_t>(out, 3);
  Append<uint64_t>(out, tensors.size());
  Append<uint64_t>(out, metadata.size());
  for (const auto& [key, value] : metadata) {
    AppendString(out, key);
    Append(out, GgufTypeOf(value));
    AppendGgufValue(out, value);
  }
  std::string data;
  for (const FileTensor& t : tensors) {
    AppendString(out, t.name);
    Append(out, static_cast<uint32_t>(t.shape.size()));
    for (auto dim = t.shape.rbegin(); dim != t.shape.rend(); ++dim) {
      Append(out, static_cast<uint64_t>(*dim));
    }
    Append(out, GgmlTypeOf(t.type));
    data.resize((data.size() + kGgufAlignment - 1) / kGgufAlignment * kGgufAlignment);
    Append<uint64_t>(out, data.size());
    data += t.data;
  }
  out.resize((out.size() + kGgufAlignment - 1) / kGgufAlignment * kGgufAlignment);
  return out + data;
}

}  // namespace omnikv
