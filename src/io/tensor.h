// Tensors as files store them, whatever the format: a name, a type, a shape and where the bytes
// are. safetensors.h and gguf.h produce them; the model's loader finds and converts them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/dtype.h"
#include "io/file.h"
#include "omnikv/status.h"

namespace omnikv {

// How a file stores numbers. Multi-byte values are little-endian. Types that are not convertible
// are recognised so that a file which carries them beside its weights still opens (position ids,
// say), and so that asking for them can be refused by name.
enum class StorageType : uint8_t {
  // Convertible: plain floats, then the block formats of GGUF (values per block: see BlockValues).
  kF32,
  kF16,
  kBF16,
  kQ8_0,
  kQ4_0,
  kQ4_1,
  kQ5_0,
  kQ5_1,
  kQ2_K,
  kQ3_K,
  kQ4_K,
  kQ5_K,
  kQ6_K,
  // Not convertible.
  kF64,
  kC64,
  kI8,
  kI16,
  kI32,
  kI64,
  kU8,
  kU16,
  kU32,
  kU64,
  kBool,
  kF8E4M3,
  kF8E5M2,
  kF8E8M0,
  kF8E4M3Fnuz,
  kF8E5M2Fnuz,
  kF6E2M3,
  kF6E3M2,
  kF4,
};

std::string_view StorageTypeName(StorageType type);  // as its file format writes it: "BF16", "Q4_K"
size_t BlockValues(StorageType type);                // values that are stored together, 1 if none
size_t BlockBytes(StorageType type);                 // bytes that BlockValues values take
bool IsConvertible(StorageType type);                // ConvertRows reads it
std::optional<DType> NativeDType(StorageType type);  // kernels read it as it is

// One tensor of an open TensorSource; valid as long as that source.
struct TensorView {
  std::string name;
  StorageType type = StorageType::kF32;
  std::vector<int64_t> shape;  // outermost first, row-major; empty for a scalar
  uint32_t file = 0;           // of the source's files
  size_t offset = 0;           // in that file
  size_t bytes = 0;

  size_t NumValues() const;  // the product of shape
};

// The bytes that a tensor of this type and shape takes, or the clause that says what is wrong with
// it ("has shape [7], expected whole blocks of 32 values"): negative or overflowing dimensions, or
// a number of values that is not whole blocks. The caller puts file and tensor before the clause.
Result<size_t> StorageBytes(StorageType type, std::span<const int64_t> shape);

// n_values values that are stored as `type` at src, which may be misaligned, to dst[n_values] of
// type `out`, rounded to nearest even. Block formats give the values that ggml defines, bit for
// bit. REQUIRES IsConvertible(type), out one of f32, f16 and bf16, n_values a multiple of
// BlockValues(type), dst aligned for `out`. Thread-safe.
void ConvertValues(StorageType type, const std::byte* src, size_t n_values, DType out, void* dst);

// An open model file, or folder of files. Const methods may be called from several threads.
class TensorSource {
 public:
  virtual ~TensorSource() = default;
  TensorSource(const TensorSource&) = delete;
  TensorSource& operator=(const TensorSource&) = delete;

  // nullptr when there is no tensor of that name. Valid as long as this source.
  const TensorView* Find(std::string_view name) const;

  // In the order in which their bytes lie in the file: reading them so reads the disk forwards.
  const std::vector<TensorView>& tensors() const { return tensors_; }

  const std::string& path() const { return path_; }  // what the user named: a file or a folder

  // Bytes [offset, offset + bytes) of the tensor, as they are stored, to `to`. REQUIRES a tensor of
  // this source and a range inside it. kFailed when they cannot be read (InputFile::Read).
  Status Read(const TensorView& tensor, size_t offset, size_t bytes, void* to) const;

  // Values [first_value, first_value + n_values) of the tensor, in row-major order, to
  // dst[n_values] of type `out`: Read, then ConvertValues. REQUIRES both ends to be multiples of
  // BlockValues(tensor.type) and inside the tensor.
  Status ReadValues(const TensorView& tensor, size_t first_value, size_t n_values, DType out,
                    void* dst) const;

 protected:
  explicit TensorSource(std::string path) : path_(std::move(path)) {}

  // Takes a file for TensorView::file to name, by its number.
  uint32_t TakeFile(InputFile file);
  const InputFile& FileOf(uint32_t number) const { return files_[number]; }

  // Takes the tensors, in file order, and makes Find work. kCorrupt when two share a name.
  Status SetTensors(std::vector<TensorView> tensors);

 private:
  std::string path_;
  std::vector<InputFile> files_;
  std::vector<TensorView> tensors_;
  std::vector<uint32_t> by_name_;  // [tensors_.size()] indices into tensors_, sorted by name
};

}  // namespace omnikv
