#include "io/tensor.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <limits>
#include <numeric>

#include "base/check.h"
#include "base/printable.h"

namespace omnikv {
namespace {

struct TypeInfo {
  StorageType type;
  std::string_view name;
  uint16_t block_values;
  uint16_t block_bytes;
};

// In the order of the enum.
constexpr TypeInfo kTypes[] = {
    {StorageType::kF32, "F32", 1, 4},
    {StorageType::kF16, "F16", 1, 2},
    {StorageType::kBF16, "BF16", 1, 2},
    {StorageType::kQ8_0, "Q8_0", 32, 34},
    {StorageType::kQ4_0, "Q4_0", 32, 18},
    {StorageType::kQ4_1, "Q4_1", 32, 20},
    {StorageType::kQ5_0, "Q5_0", 32, 22},
    {StorageType::kQ5_1, "Q5_1", 32, 24},
    {StorageType::kQ2_K, "Q2_K", 256, 84},
    {StorageType::kQ3_K, "Q3_K", 256, 110},
    {StorageType::kQ4_K, "Q4_K", 256, 144},
    {StorageType::kQ5_K, "Q5_K", 256, 176},
    {StorageType::kQ6_K, "Q6_K", 256, 210},
    {StorageType::kF64, "F64", 1, 8},
    {StorageType::kC64, "C64", 1, 8},
    {StorageType::kI8, "I8", 1, 1},
    {StorageType::kI16, "I16", 1, 2},
    {StorageType::kI32, "I32", 1, 4},
    {StorageType::kI64, "I64", 1, 8},
    {StorageType::kU8, "U8", 1, 1},
    {StorageType::kU16, "U16", 1, 2},
    {StorageType::kU32, "U32", 1, 4},
    {StorageType::kU64, "U64", 1, 8},
    {StorageType::kBool, "BOOL", 1, 1},
    {StorageType::kF8E4M3, "F8_E4M3", 1, 1},
    {StorageType::kF8E5M2, "F8_E5M2", 1, 1},
    {StorageType::kF8E8M0, "F8_E8M0", 1, 1},
    {StorageType::kF8E4M3Fnuz, "F8_E4M3FNUZ", 1, 1},
    {StorageType::kF8E5M2Fnuz, "F8_E5M2FNUZ", 1, 1},
    {StorageType::kF6E2M3, "F6_E2M3", 4, 3},
    {StorageType::kF6E3M2, "F6_E3M2", 4, 3},
    {StorageType::kF4, "F4", 2, 1},
};

constexpr bool InEnumOrder() {
  for (size_t i = 0; i < std::size(kTypes); ++i) {
    if (static_cast<size_t>(kTypes[i].type) != i) return false;
  }
  return true;
}
static_assert(InEnumOrder());

const TypeInfo& Info(StorageType type) {
  return kTypes[static_cast<size_t>(type)];
}

}  // namespace

std::string_view StorageTypeName(StorageType type) {
  return Info(type).name;
}
size_t BlockValues(StorageType type) {
  return Info(type).block_values;
}
size_t BlockBytes(StorageType type) {
  return Info(type).block_bytes;
}
bool IsConvertible(StorageType type) {
  return type <= StorageType::kQ6_K;
}

std::optional<DType> NativeDType(StorageType type) {
  switch (type) {
    case StorageType::kF32:
      return DType::kF32;
    case StorageType::kF16:
      return DType::kF16;
    case StorageType::kBF16:
      return DType::kBF16;
    case StorageType::kQ8_0:
      return DType::kQ8_0;
    default:
      return std::nullopt;
  }
}

size_t TensorView::NumValues() const {
  return bytes / BlockBytes(type) * BlockValues(type);
}

Result<size_t> StorageBytes(StorageType type, std::span<const int64_t> shape) {
  const TypeInfo& info = Info(type);
  uint64_t values = 1;
  uint64_t bytes = 0;
  bool overflow = false;
  for (const int64_t dim : shape) {
    if (dim < 0) {
      return Corrupt(
          fmt::format("has shape [{}], expected no negative dimension", fmt::join(shape, ", ")));
    }
    overflow |= __builtin_mul_overflow(values, static_cast<uint64_t>(dim), &values);
  }
  overflow |= __builtin_mul_overflow(values / info.block_values, info.block_bytes, &bytes);
  if (overflow || bytes > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
    return Corrupt(fmt::format("has shape [{}] of type {}, whose size overflows 63 bits",
                               fmt::join(shape, ", "), info.name));
  }
  if (values % info.block_values != 0) {
    return Corrupt(fmt::format("has shape [{}] of type {}, expected whole blocks of {} values",
                               fmt::join(shape, ", "), info.name, info.block_values));
  }
  return static_cast<size_t>(bytes);
}

const TensorView* TensorSource::Find(std::string_view name) const {
  const auto it = std::lower_bound(
      by_name_.begin(), by_name_.end(), name,
      [this](uint32_t i, std::string_view wanted) { return tensors_[i].name < wanted; });
  if (it == by_name_.end() || tensors_[*it].name != name) return nullptr;
  return &tensors_[*it];
}

uint32_t TensorSource::TakeFile(InputFile file) {
  files_.push_back(std::move(file));
  return static_cast<uint32_t>(files_.size() - 1);
}

Status TensorSource::Read(const TensorView& tensor, size_t offset, size_t bytes, void* to) const {
  OKV_CHECK(offset <= tensor.bytes && bytes <= tensor.bytes - offset, "{} + {} of {}", offset,
            bytes, tensor.bytes);
  return files_[tensor.file].Read(tensor.offset + offset, bytes, to);
}

Status TensorSource::ReadValues(const TensorView& tensor, size_t first_value, size_t n_values,
                                DType out, void* dst) const {
  const size_t block = BlockValues(tensor.type);
  const size_t block_bytes = BlockBytes(tensor.type);
  OKV_CHECK(first_value % block == 0 && n_values % block == 0, "{} + {} of blocks of {}",
            first_value, n_values, block);
  std::vector<std::byte> stored(n_values / block * block_bytes);
  OKV_RETURN_IF_ERROR(
      Read(tensor, first_value / block * block_bytes, stored.size(), stored.data()));
  ConvertValues(tensor.type, stored.data(), n_values, out, dst);
  return {};
}

Status TensorSource::SetTensors(std::vector<TensorView> tensors) {
  OKV_CHECK(tensors.size() <= std::numeric_limits<uint32_t>::max());
  tensors_ = std::move(tensors);
  by_name_.resize(tensors_.size());
  std::iota(by_name_.begin(), by_name_.end(), 0u);
  std::sort(by_name_.begin(), by_name_.end(),
            [this](uint32_t a, uint32_t b) { return tensors_[a].name < tensors_[b].name; });
  const auto twice = std::adjacent_find(
      by_name_.begin(), by_name_.end(),
      [this](uint32_t a, uint32_t b) { return tensors_[a].name == tensors_[b].name; });
  if (twice != by_name_.end()) {
    return Corrupt(fmt::format("{}: has two tensors named {}, expected different names", path_,
                               Printable(tensors_[*twice].name)));
  }
  return Status();
}

}  // namespace omnikv
