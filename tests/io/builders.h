// Files for tests, byte by byte: well-formed by default, and wrong in exactly one place on request.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "io/gguf.h"

namespace omnikv {

// Little-endian bytes, appended value by value.
class Bytes {
 public:
  template <typename T>
  Bytes& Put(T value) {
    out_.append(reinterpret_cast<const char*>(&value), sizeof value);
    return *this;
  }
  Bytes& Raw(std::string_view bytes) {
    out_ += bytes;
    return *this;
  }
  Bytes& Zeros(size_t n) {
    out_.append(n, '\0');
    return *this;
  }
  Bytes& Sized(std::string_view s) { return Put<uint64_t>(s.size()).Raw(s); }  // a GGUF string
  Bytes& PadTo(size_t alignment) {
    return Zeros((alignment - out_.size() % alignment) % alignment);
  }
  size_t size() const { return out_.size(); }
  const std::string& str() const { return out_; }

 private:
  std::string out_;
};

// A GGUF file. Counts, offsets, magic and version are right unless they are set.
struct GgufBuilder {
  struct Tensor {
    std::string name;
    std::vector<uint64_t> dims;  // innermost first
    uint32_t ggml_type = 0;
    std::string data;
    std::optional<uint64_t> offset;
  };

  std::string magic = "GGUF";
  uint32_t version = 3;
  std::optional<uint64_t> n_tensors;
  std::optional<uint64_t> n_entries;
  size_t alignment = 32;
  std::vector<std::string> entries;
  std::vector<Tensor> tensors;

  GgufBuilder& Entry(std::string_view key, uint32_t type, std::string_view value) {
    entries.push_back(Bytes().Sized(key).Put(type).Raw(value).str());
    return *this;
  }
  template <typename T>
  GgufBuilder& Scalar(std::string_view key, GgufType type, T value) {
    return Entry(key, static_cast<uint32_t>(type), Bytes().Put(value).str());
  }
  GgufBuilder& String(std::string_view key, std::string_view value) {
    return Entry(key, static_cast<uint32_t>(GgufType::kString), Bytes().Sized(value).str());
  }
  template <typename T>
  GgufBuilder& Array(std::string_view key, GgufType element, const std::vector<T>& values) {
    Bytes value;
    value.Put(element).Put<uint64_t>(values.size());
    for (const T& v : values) value.Put(v);
    return Entry(key, static_cast<uint32_t>(GgufType::kArray), value.str());
  }
  GgufBuilder& Strings(std::string_view key, const std::vector<std::string>& values) {
    Bytes value;
    value.Put(GgufType::kString).Put<uint64_t>(values.size());
    for (const std::string& v : values) value.Sized(v);
    return Entry(key, static_cast<uint32_t>(GgufType::kArray), value.str());
  }
  GgufBuilder& Add(Tensor tensor) {
    tensors.push_back(std::move(tensor));
    return *this;
  }

  std::string Build() const {
    Bytes file;
    file.Raw(magic).Put(version).Put(n_tensors.value_or(tensors.size()));
    file.Put(n_entries.value_or(entries.size()));
    for (const std::string& entry : entries) file.Raw(entry);
    Bytes data;
    for (const Tensor& t : tensors) {
      file.Sized(t.name).Put(static_cast<uint32_t>(t.dims.size()));
      for (const uint64_t dim : t.dims) file.Put(dim);
      file.Put(t.ggml_type).Put<uint64_t>(t.offset.value_or(data.size()));
      data.Raw(t.data).PadTo(alignment);
    }
    if (!tensors.empty()) file.PadTo(alignment);
    return file.Raw(data.str()).str();
  }
};

inline std::string SafetensorsBytes(std::string_view header, std::string_view data = "") {
  return Bytes().Put<uint64_t>(header.size()).Raw(header).Raw(data).str();
}

// "name":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}
inline std::string SafetensorsEntry(std::string_view name, std::string_view dtype,
                                    const std::vector<int64_t>& shape, uint64_t begin,
                                    uint64_t end) {
  return fmt::format(R"("{}":{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})", name, dtype,
                     fmt::join(shape, ","), begin, end);
}

inline std::string WithFloats(std::initializer_list<float> values) {
  Bytes out;
  for (const float v : values) out.Put(v);
  return out.str();
}

// A folder of its own for each test, removed with it.
class TempFolder {
 public:
  TempFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "omnikv_io_XXXXXX").string();
    EXPECT_NE(::mkdtemp(pattern.data()), nullptr);
    path_ = pattern;
  }
  ~TempFolder() { std::filesystem::remove_all(path_); }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

  const std::string& path() const { return path_; }
  std::string Write(const std::string& name, std::string_view bytes) const {
    const std::string path = path_ + "/" + name;
    std::ofstream(path, std::ios::binary) << bytes;
    return path;
  }

 private:
  std::string path_;
};

inline const std::byte* AsBytes(const std::string& s) {
  return reinterpret_cast<const std::byte*>(s.data());
}

// A file that must be refused, the code of the refusal and what its sentence must say.
struct HostileFile {
  std::string what;
  std::string bytes;
  StatusCode code;
  std::vector<std::string> fragments;
};

}  // namespace omnikv
