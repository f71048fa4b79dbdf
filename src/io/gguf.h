// Models in GGUF files: metadata (architecture, hyper-parameters, tokenizer) and tensors in one.
//
// Format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), versions 2 and 3,
// little-endian: "GGUF", u32 version, u64 tensors, u64 metadata entries; the entries; the tensor
// infos (name, dimensions innermost first, type, offset); padding to general.alignment; the data.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "io/file.h"
#include "io/tensor.h"
#include "omnikv/status.h"

namespace omnikv {

// Types of metadata values, numbered as in the file.
enum class GgufType : uint32_t {
  kUint8 = 0,
  kInt8 = 1,
  kUint16 = 2,
  kInt16 = 3,
  kUint32 = 4,
  kInt32 = 5,
  kFloat32 = 6,
  kBool = 7,
  kString = 8,
  kArray = 9,
  kUint64 = 10,
  kInt64 = 11,
  kFloat64 = 12,
};

// What is read of a file: all of it, or the metadata alone, for which tensors may be of any type,
// in other files (the first part of a split model), cut off or absent.
enum class GgufParts { kAll, kMetadata };

// One metadata entry, as it lies in the file.
struct GgufEntry {
  std::string_view key;
  GgufType type = GgufType::kUint8;     // kArray: `count` elements of type `element`
  GgufType element = GgufType::kUint8;  // otherwise the same as `type`
  uint64_t count = 1;
  const std::byte* data = nullptr;  // the value, or the first element; misaligned
};

// Open checks everything that the accessors and the tensor views rely on, so that no bytes outside
// the file are ever read. Metadata comes into memory once; strings stay where they are in it and
// cost nothing until they are asked for.
class GgufFile final : public TensorSource {
 public:
  // kNotFound: no such file; kUnsupported: a version, byte order, tensor type or split file that
  // this build does not read; kCorrupt: the file contradicts itself or its format.
  static Result<std::unique_ptr<GgufFile>> Open(const std::string& path,
                                                GgufParts parts = GgufParts::kAll);

  // The same for bytes in memory, which must outlive the object; `name` stands in messages for the
  // path.
  static Result<std::unique_ptr<GgufFile>> FromMemory(std::string name, const std::byte* data,
                                                      size_t size,
                                                      GgufParts parts = GgufParts::kAll);

  const std::vector<GgufEntry>& metadata() const { return entries_; }  // in the order of the file
  bool Has(std::string_view key) const { return FindEntry(key) != nullptr; }

  // Metadata by key. Integers of every width are one kind, and so are both widths of floats; a
  // value that the result type does not hold is an error. kNotFound when the key is absent,
  // kCorrupt when its type is another; both say the key and what was expected.
  Result<uint64_t> GetUint(std::string_view key) const;
  Result<int64_t> GetInt(std::string_view key) const;
  Result<double> GetFloat(std::string_view key) const;
  Result<bool> GetBool(std::string_view key) const;
  Result<std::string_view> GetString(std::string_view key) const;  // valid as long as this object

  // The same with a value for an absent key. A key of the wrong type is still an error.
  Result<uint64_t> GetUintOr(std::string_view key, uint64_t fallback) const;
  Result<int64_t> GetIntOr(std::string_view key, int64_t fallback) const;
  Result<double> GetFloatOr(std::string_view key, double fallback) const;
  Result<bool> GetBoolOr(std::string_view key, bool fallback) const;
  Result<std::string_view> GetStringOr(std::string_view key, std::string_view fallback) const;

  // Arrays. IntArray takes booleans too, as 0 and 1. Views are valid as long as this object.
  Result<std::vector<int64_t>> IntArray(std::string_view key) const;
  Result<std::vector<float>> FloatArray(std::string_view key) const;
  Result<std::vector<std::string_view>> StringArray(std::string_view key) const;

 private:
  using TensorSource::TensorSource;

  Status Parse(FileHead& head, uint32_t file, GgufParts parts);
  const GgufEntry* FindEntry(std::string_view key) const;
  Result<const GgufEntry*> Require(std::string_view key, std::string_view expected) const;
  Status Mismatch(const GgufEntry& entry, std::string_view expected) const;

  Pages metadata_;  // what entries_ point into, unless that is the caller's
  std::vector<GgufEntry> entries_;
  std::vector<uint32_t> by_key_;  // [entries_.size()] indices into entries_, sorted by key
};

}  // namespace omnikv
