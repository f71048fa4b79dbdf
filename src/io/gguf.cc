#include "io/gguf.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <numeric>
#include <optional>
#include <utility>

#include "base/printable.h"

namespace omnikv {
namespace {

static_assert(std::endian::native == std::endian::little, "files are read as they lie in memory");

constexpr uint64_t kDefaultAlignment = 32;
constexpr uint64_t kMinAlignment = 8;  // the format asks for a multiple of 8
constexpr uint64_t kMaxAlignment = 1 << 20;
constexpr uint64_t kMaxNameBytes = 65535;  // the format's limit for keys
constexpr uint32_t kMaxRank = 4;
constexpr int kMaxArrayDepth = 4;
// Far beyond any model, small enough to allocate for.
constexpr uint64_t kMaxEntries = 1 << 20;
constexpr uint64_t kMaxTensors = 1 << 20;
constexpr uint64_t kMaxArrayLength = 1 << 26;
constexpr size_t kMaxHeadBytes = size_t{1} << 32;
constexpr uint64_t kMinEntryBytes = 8 + 4 + 1;           // key length, type, the smallest value
constexpr uint64_t kMinTensorInfoBytes = 8 + 4 + 4 + 8;  // name length, rank, type, offset

struct GgmlType {
  uint32_t number;
  StorageType type;
};
constexpr GgmlType kReadTypes[] = {
    {0, StorageType::kF32},   {1, StorageType::kF16},   {2, StorageType::kQ4_0},
    {3, StorageType::kQ4_1},  {6, StorageType::kQ5_0},  {7, StorageType::kQ5_1},
    {8, StorageType::kQ8_0},  {10, StorageType::kQ2_K}, {11, StorageType::kQ3_K},
    {12, StorageType::kQ4_K}, {13, StorageType::kQ5_K}, {14, StorageType::kQ6_K},
    {24, StorageType::kI8},   {25, StorageType::kI16},  {26, StorageType::kI32},
    {27, StorageType::kI64},  {28, StorageType::kF64},  {30, StorageType::kBF16},
};

struct UnreadType {
  uint32_t number;
  std::string_view name;
};
constexpr UnreadType kUnreadTypes[] = {
    {9, "Q8_1"},    {15, "Q8_K"},  {16, "IQ2_XXS"}, {17, "IQ2_XS"}, {18, "IQ3_XXS"}, {19, "IQ1_S"},
    {20, "IQ4_NL"}, {21, "IQ3_S"}, {22, "IQ2_S"},   {23, "IQ4_XS"}, {29, "IQ1_M"},   {34, "TQ1_0"},
    {35, "TQ2_0"},  {39, "MXFP4"}, {40, "NVFP4"},   {41, "Q1_0"},
};

std::optional<StorageType> TypeOfGgml(uint32_t number) {
  for (const GgmlType& t : kReadTypes) {
    if (t.number == number) return t.type;
  }
  return std::nullopt;
}

std::string GgmlTypeName(uint32_t number) {
  for (const UnreadType& t : kUnreadTypes) {
    if (t.number == number) return fmt::format("ggml type {} ({})", number, t.name);
  }
  return fmt::format("ggml type {}", number);
}

struct ValueType {
  std::string_view name;
  size_t bytes;  // of one value; 0 for strings and arrays, which carry their length
};
constexpr std::array<ValueType, 13> kValueTypes = {{{"uint8", 1},
                                                    {"int8", 1},
                                                    {"uint16", 2},
                                                    {"int16", 2},
                                                    {"uint32", 4},
                                                    {"int32", 4},
                                                    {"float32", 4},
                                                    {"bool", 1},
                                                    {"string", 0},
                                                    {"array", 0},
                                                    {"uint64", 8},
                                                    {"int64", 8},
                                                    {"float64", 8}}};
const ValueType& InfoOf(GgufType type) {
  return kValueTypes[static_cast<uint32_t>(type)];
}

template <typename T>
T Load(const std::byte* p) {
  T v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

// A string at p, whose bounds were checked when the file was opened.
std::string_view LoadString(const std::byte* p) {
  return {reinterpret_cast<const char*>(p) + sizeof(uint64_t), Load<uint64_t>(p)};
}

Status CheckCount(const std::string& path, std::string_view what, uint64_t n, uint64_t limit) {
  if (n <= limit) return Status();
  return Corrupt(fmt::format("{}: claims {} {}, expected at most {} in a file of this size", path,
                             n, what, limit));
}

// The integer of `type` at p, unless the type is no integer or T does not hold the value.
template <typename T>
std::optional<T> LoadInteger(GgufType type, const std::byte* p) {
  const auto as = [p](auto sample) -> std::optional<T> {
    const auto v = Load<decltype(sample)>(p);
    if (!std::in_range<T>(v)) return std::nullopt;
    return static_cast<T>(v);
  };
  switch (type) {
    case GgufType::kUint8:
      return as(uint8_t{});
    case GgufType::kInt8:
      return as(int8_t{});
    case GgufType::kUint16:
      return as(uint16_t{});
    case GgufType::kInt16:
      return as(int16_t{});
    case GgufType::kUint32:
      return as(uint32_t{});
    case GgufType::kInt32:
      return as(int32_t{});
    case GgufType::kUint64:
      return as(uint64_t{});
    case GgufType::kInt64:
      return as(int64_t{});
    default:
      return std::nullopt;
  }
}

std::optional<double> LoadFloat(GgufType type, const std::byte* p) {
  if (type == GgufType::kFloat32) return Load<float>(p);
  if (type == GgufType::kFloat64) return Load<double>(p);
  return std::nullopt;
}

// Reads the file from its start. Every Read and Skip checks the bounds and brings the bytes into
// memory first; once one has failed, the caller reports where, unless it was the file that failed.
class Cursor {
 public:
  explicit Cursor(FileHead& head) : head_(head) {}

  size_t position() const { return position_; }
  size_t left() const { return head_.size() - position_; }
  const std::byte* here() const { return head_.data() + position_; }

  template <typename T>
  bool Read(T* out) {
    const std::byte* at = here();
    if (!Pass(sizeof(T))) return false;
    *out = Load<T>(at);
    return true;
  }
  bool Read(std::string_view* out) {
    uint64_t length;
    if (!Read(&length)) return false;
    const std::byte* at = here();
    if (!Pass(length)) return false;
    *out = {reinterpret_cast<const char*>(at), length};
    return true;
  }
  bool Skip(uint64_t count, size_t bytes_each) {
    return count <= left() / bytes_each && Pass(count * bytes_each);
  }

 private:
  bool Pass(uint64_t bytes) {
    if (bytes > left() || !head_.Fetch(position_ + bytes)) return false;
    position_ += bytes;
    return true;
  }

  FileHead& head_;
  size_t position_ = 0;
};

// Passes over `count` values of `type`, checking all that is inside them; the clause that says what
// is wrong when something is.
Status SkipValues(Cursor* cursor, GgufType type, uint64_t count, int depth) {
  const Status cut = Corrupt("has a value that runs past the end of the file");
  if (count > kMaxArrayLength) {
    return Corrupt(fmt::format("has an array of {}, expected at most {}", count, kMaxArrayLength));
  }
  if (const size_t bytes = InfoOf(type).bytes; bytes > 0) {
    const std::byte* first = cursor->here();
    if (!cursor->Skip(count, bytes)) return cut;
    if (type == GgufType::kBool) {
      for (uint64_t i = 0; i < count; ++i) {
        const auto v = Load<uint8_t>(first + i);
        if (v > 1) return Corrupt(fmt::format("has a bool of {}, expected 0 or 1", v));
      }
    }
    return Status();
  }
  if (type == GgufType::kString) {
    for (uint64_t i = 0; i < count; ++i) {
      std::string_view s;
      if (!cursor->Read(&s)) return cut;
    }
    return Status();
  }
  if (depth == kMaxArrayDepth) {
    return Corrupt(fmt::format("has arrays nested deeper than {} levels", kMaxArrayDepth));
  }
  for (uint64_t i = 0; i < count; ++i) {
    uint32_t element;
    uint64_t length;
    if (!cursor->Read(&element) || !cursor->Read(&length)) return cut;
    if (element >= kValueTypes.size()) {
      return Corrupt(fmt::format("has array elements of type {}, expected 0 to {}", element,
                                 kValueTypes.size() - 1));
    }
    OKV_RETURN_IF_ERROR(SkipValues(cursor, static_cast<GgufType>(element), length, depth + 1));
  }
  return Status();
}

// "int32 -5", "string 'gpt2'", "array of 12 string": what an entry is, for a message.
std::string Describe(const GgufEntry& entry) {
  const std::string_view name = InfoOf(entry.element).name;
  if (entry.type == GgufType::kArray) return fmt::format("array of {} {}", entry.count, name);
  if (entry.type == GgufType::kString) {
    return fmt::format("string {}", Printable(LoadString(entry.data)));
  }
  if (entry.type == GgufType::kBool) {
    return fmt::format("bool {}", Load<uint8_t>(entry.data) != 0);
  }
  if (const auto v = LoadFloat(entry.type, entry.data)) return fmt::format("{} {}", name, *v);
  if (entry.type == GgufType::kUint64) {
    return fmt::format("{} {}", name, Load<uint64_t>(entry.data));
  }
  return fmt::format("{} {}", name, LoadInteger<int64_t>(entry.type, entry.data).value_or(0));
}

Status CheckName(const std::string& path, std::string_view what, uint64_t i,
                 std::string_view name) {
  if (!name.empty() && name.size() <= kMaxNameBytes) return Status();
  return Corrupt(fmt::format("{}: {} {} has a name of {} bytes, expected 1 to {}", path, what, i,
                             name.size(), kMaxNameBytes));
}

Status ParseEntry(const std::string& path, Cursor* cursor, uint64_t i, GgufEntry* entry) {
  uint32_t type;
  if (!cursor->Read(&entry->key)) {
    return Corrupt(fmt::format("{}: ends inside metadata entry {}", path, i));
  }
  OKV_RETURN_IF_ERROR(CheckName(path, "metadata entry", i, entry->key));
  const std::string where = fmt::format("{}: metadata {}", path, Printable(entry->key));
  if (!cursor->Read(&type)) return Corrupt(where + " ends with the file, expected its value");
  if (type >= kValueTypes.size()) {
    return Corrupt(
        fmt::format("{} has type {}, expected 0 to {}", where, type, kValueTypes.size() - 1));
  }
  entry->type = entry->element = static_cast<GgufType>(type);
  if (entry->type == GgufType::kArray) {
    uint32_t element;
    if (!cursor->Read(&element) || !cursor->Read(&entry->count)) {
      return Corrupt(where + " has a value that runs past the end of the file");
    }
    if (element >= kValueTypes.size()) {
      return Corrupt(fmt::format("{} has array elements of type {}, expected 0 to {}", where,
                                 element, kValueTypes.size() - 1));
    }
    entry->element = static_cast<GgufType>(element);
  }
  entry->data = cursor->here();
  const int depth = entry->type == GgufType::kArray ? 1 : 0;
  const Status status = SkipValues(cursor, entry->element, entry->count, depth);
  return status.ok() ? status : Status(status.code(), where + " " + status.message());
}

// A tensor, and its offset in the data area, which begins only after the last tensor info.
struct TensorInfo {
  TensorView view;
  uint64_t offset = 0;
};

Status ParseTensorInfo(const std::string& path, Cursor* cursor, uint64_t i, TensorInfo* info) {
  std::string_view name;
  uint32_t rank;
  if (!cursor->Read(&name)) return Corrupt(fmt::format("{}: ends inside tensor {}", path, i));
  OKV_RETURN_IF_ERROR(CheckName(path, "tensor", i, name));
  info->view.name = name;
  const std::string where = fmt::format("{}: tensor {}", path, Printable(name));
  const std::string cut = where + " is described past the end of the file";
  if (!cursor->Read(&rank)) return Corrupt(cut);
  if (rank > kMaxRank) {
    return Corrupt(fmt::format("{} has {} dimensions, expected at most {}", where, rank, kMaxRank));
  }
  for (uint32_t d = 0; d < rank; ++d) {
    uint64_t dim;
    if (!cursor->Read(&dim)) return Corrupt(cut);
    if (dim == 0 || dim > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
      return Corrupt(
          fmt::format("{} has dimension {} of {}, expected 1 to 2^63 - 1", where, d, dim));
    }
    info->view.shape.push_back(static_cast<int64_t>(dim));
  }
  uint32_t number;
  if (!cursor->Read(&number) || !cursor->Read(&info->offset)) return Corrupt(cut);
  const std::optional<StorageType> type = TypeOfGgml(number);
  if (!type) {
    return Unsupported(fmt::format(
        "{} has {}, expected F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1 or Q2_K to Q6_K", where,
        GgmlTypeName(number)));
  }
  info->view.type = *type;
  const int64_t row = rank == 0 ? 1 : info->view.shape[0];
  if (static_cast<uint64_t>(row) % BlockValues(*type) != 0) {
    return Corrupt(fmt::format("{} has rows of {} values, expected whole blocks of {} for {}",
                               where, row, BlockValues(*type), StorageTypeName(*type)));
  }
  std::reverse(info->view.shape.begin(), info->view.shape.end());  // the file's are innermost first
  const Result<size_t> bytes = StorageBytes(*type, info->view.shape);
  if (!bytes.ok()) return Status(bytes.status().code(), where + " " + bytes.status().message());
  info->view.bytes = *bytes;
  return Status();
}

// Places the tensors, in the order of their offsets, in the data area of file `file`.
Status PlaceTensors(const std::string& path, uint32_t file, uint64_t area, uint64_t area_bytes,
                    uint64_t alignment, std::vector<TensorInfo>* infos) {
  std::stable_sort(infos->begin(), infos->end(),
                   [](const TensorInfo& a, const TensorInfo& b) { return a.offset < b.offset; });
  uint64_t covered = 0;  // end of the tensor before
  const TensorInfo* previous = nullptr;
  for (TensorInfo& info : *infos) {
    const std::string where =
        fmt::format("{}: tensor {} at offset {}", path, Printable(info.view.name), info.offset);
    if (info.offset % alignment != 0) {
      return Corrupt(fmt::format("{} is not aligned, expected a multiple of {}", where, alignment));
    }
    if (info.offset > area_bytes || info.view.bytes > area_bytes - info.offset) {
      return Corrupt(
          fmt::format("{} has {} bytes, expected no more than the {} bytes of tensor data "
                      "that the file has",
                      where, info.view.bytes, area_bytes));
    }
    if (info.offset < covered) {
      return Corrupt(fmt::format("{} overlaps {}, expected an offset of at least {}", where,
                                 Printable(previous->view.name), covered));
    }
    info.view.file = file;
    info.view.offset = area + info.offset;
    covered = info.offset + info.view.bytes;
    previous = &info;
  }
  return Status();
}

}  // namespace

Result<std::unique_ptr<GgufFile>> GgufFile::Open(const std::string& path, GgufParts parts) {
  std::unique_ptr<GgufFile> gguf(new GgufFile(path));
  OKV_ASSIGN_OR_RETURN(InputFile input, InputFile::Open(path));
  const uint32_t file = gguf->TakeFile(std::move(input));
  OKV_ASSIGN_OR_RETURN(FileHead head, FileHead::Open(gguf->FileOf(file), kMaxHeadBytes));
  const Status parsed = gguf->Parse(head, file, parts);
  OKV_RETURN_IF_ERROR(head.status());  // the cause of the other, if there is one
  OKV_RETURN_IF_ERROR(parsed);
  gguf->metadata_ = head.TakePages();
  return gguf;
}

Result<std::unique_ptr<GgufFile>> GgufFile::FromMemory(std::string name, const std::byte* data,
                                                       size_t size, GgufParts parts) {
  std::unique_ptr<GgufFile> gguf(new GgufFile(name));
  const uint32_t file = gguf->TakeFile(InputFile::FromMemory(std::move(name), data, size));
  FileHead head(data, size);
  OKV_RETURN_IF_ERROR(gguf->Parse(head, file, parts));
  return gguf;
}

Status GgufFile::Parse(FileHead& head, uint32_t file, GgufParts parts) {
  const size_t size = head.size();
  if (!head.Fetch(std::min(size, size_t{4}))) return head.status();
  Cursor cursor(head);
  uint32_t magic, version;
  uint64_t n_tensors, n_entries;
  if (!cursor.Read(&magic) || std::memcmp(head.data(), "GGUF", 4) != 0) {
    return Corrupt(fmt::format(
        "{}: begins with {}, expected 'GGUF'", path(),
        Printable({reinterpret_cast<const char*>(head.data()), std::min(size, size_t{4})})));
  }
  if (!cursor.Read(&version) || !cursor.Read(&n_tensors) || !cursor.Read(&n_entries)) {
    return Corrupt(
        fmt::format("{}: has {} bytes, expected at least the 24 of a GGUF header", path(), size));
  }
  if (version != 2 && version != 3) {
    const bool swapped = version >> 24 == 2 || version >> 24 == 3;
    return Unsupported(fmt::format("{}: has GGUF version {}{}, expected 2 or 3, little-endian",
                                   path(), swapped ? version >> 24 : version,
                                   swapped ? " in big-endian byte order" : ""));
  }
  OKV_RETURN_IF_ERROR(CheckCount(path(), "metadata entries", n_entries,
                                 std::min(kMaxEntries, cursor.left() / kMinEntryBytes)));
  entries_.resize(n_entries);
  for (uint64_t i = 0; i < n_entries; ++i) {
    OKV_RETURN_IF_ERROR(ParseEntry(path(), &cursor, i, &entries_[i]));
  }
  by_key_.resize(n_entries);
  std::iota(by_key_.begin(), by_key_.end(), 0u);
  std::sort(by_key_.begin(), by_key_.end(),
            [this](uint32_t a, uint32_t b) { return entries_[a].key < entries_[b].key; });
  const auto twice = std::adjacent_find(
      by_key_.begin(), by_key_.end(),
      [this](uint32_t a, uint32_t b) { return entries_[a].key == entries_[b].key; });
  if (twice != by_key_.end()) {
    return Corrupt(fmt::format("{}: has metadata {} twice, expected it once", path(),
                               Printable(entries_[*twice].key)));
  }
  if (parts == GgufParts::kMetadata) return {};

  OKV_ASSIGN_OR_RETURN(const uint64_t n_splits, GetUintOr("split.count", 1));
  if (n_splits > 1) {
    return Unsupported(
        fmt::format("{}: is one of {} parts of a split model, expected one whole file "
                    "(llama-gguf-split --merge joins them)",
                    path(), n_splits));
  }
  OKV_ASSIGN_OR_RETURN(const uint64_t alignment, GetUintOr("general.alignment", kDefaultAlignment));
  if (!std::has_single_bit(alignment) || alignment < kMinAlignment || alignment > kMaxAlignment) {
    return Corrupt(
        fmt::format("{}: has a general.alignment of {}, expected a power of two from {} "
                    "to {}",
                    path(), alignment, kMinAlignment, kMaxAlignment));
  }

  OKV_RETURN_IF_ERROR(CheckCount(path(), "tensors", n_tensors,
                                 std::min(kMaxTensors, cursor.left() / kMinTensorInfoBytes)));
  std::vector<TensorInfo> infos(n_tensors);
  for (uint64_t i = 0; i < n_tensors; ++i) {
    OKV_RETURN_IF_ERROR(ParseTensorInfo(path(), &cursor, i, &infos[i]));
  }
  const uint64_t area =
      std::min<uint64_t>(size, (cursor.position() + alignment - 1) / alignment * alignment);
  OKV_RETURN_IF_ERROR(PlaceTensors(path(), file, area, size - area, alignment, &infos));
  std::vector<TensorView> tensors;
  tensors.reserve(infos.size());
  for (TensorInfo& info : infos) tensors.push_back(std::move(info.view));
  return SetTensors(std::move(tensors));
}

const GgufEntry* GgufFile::FindEntry(std::string_view key) const {
  const auto it = std::lower_bound(
      by_key_.begin(), by_key_.end(), key,
      [this](uint32_t i, std::string_view wanted) { return entries_[i].key < wanted; });
  return it == by_key_.end() || entries_[*it].key != key ? nullptr : &entries_[*it];
}

Result<const GgufEntry*> GgufFile::Require(std::string_view key, std::string_view expected) const {
  const GgufEntry* entry = FindEntry(key);
  if (entry != nullptr) return entry;
  return NotFound(fmt::format("{}: has no metadata '{}', expected {}", path(), key, expected));
}

Status GgufFile::Mismatch(const GgufEntry& entry, std::string_view expected) const {
  return Corrupt(fmt::format("{}: metadata {} is {}, expected {}", path(), Printable(entry.key),
                             Describe(entry), expected));
}

Result<uint64_t> GgufFile::GetUint(std::string_view key) const {
  constexpr std::string_view kExpected = "an unsigned integer";
  OKV_ASSIGN_OR_RETURN(const GgufEntry* entry, Require(key, kExpected));
  if (const auto v = LoadInteger<uint64_t>(entry->type, entry->data)) return *v;
  return Mismatch(*entry, kExpected);
}

Result<int64_t> GgufFile::GetInt(std::string_view key) const {
  constexpr std::string_view kExpected = "an integer below 2^63";
  OKV_ASSIGN_OR_RETURN(const GgufEntry* entry, Require(key, kExpected));
  if (const auto v = LoadInteger<int64_t>(entry->type, entry->data)) return *v;
  return Mismatch(*entry, kExpected);
}

Result<double> GgufFile::GetFloat(std::string_view key) const {
  constexpr std::string_view kExpected = "a float";
  OKV_ASSIGN_OR_RETURN(const GgufEntry* entry, Require(key, kExpected));
  if (const auto v = LoadFloat(entry->type, entry->data)) return *v;
  return Mismatch(*entry, kExpected);
}

Result<bool> GgufFile::GetBool(std::string_view key) const {
  constexpr std::string_view kExpected = "a bool";
  OKV_ASSIGN_OR_RETURN(const GgufEntry* entry, Require(key, kExpected));
  if (entry->type == GgufType::kBool) return Load<uint8_t>(entry->data) != 0;
  return Mismatch(*entry, kExpected);
}

Result<std::string_view> GgufFile::GetString(std::string_view key) const {
  constexpr std::string_view kExpected = "a string";
  OKV_ASSIGN_OR_RETURN(const GgufEntry* entry, Require(key, kExpected));
  if (entry->type == GgufType::kString) return LoadString(entry->data);
  return Mismatch(*entry, kExpected);
}

Result<uint64_t> GgufFile::GetUintOr(std::string_view key, uint64_t fallback) const {
  return Has(key) ? GetUint(key) : fallback;
}
Result<int64_t> GgufFile::GetIntOr(std::string_view key, int64_t fallback) const {
  return Has(key) ? GetInt(key) : fallback;
}
Result<double> GgufFile::GetFloatOr(std::string_view key, double fallback) const {
  return Has(key) ? GetFloat(key) : fallback;
}
Result<bool> GgufFile::GetBoolOr(std::string_view key, bool fallback) const {
  return Has(key) ? GetBool(key) : fallback;
}
Result<std::string_view> GgufFile::GetStringOr(std::string_view key,
                                               std::string_view fallback) const {
  return Has(key) ? GetString(key) : fallback;
}

Result<std::vector<int64_t>> GgufFile::IntArray(std::string_view key) const {
  constexpr std::string_view kExpected = "an array of integers below 2^63";
  OKV_ASSIGN_OR_RETURN(const GgufEntry* entry, Require(key, kExpected));
  if (entry->type != GgufType::kArray) return Mismatch(*entry, kExpected);
  // A bool is a byte of 0 or 1, checked on opening.
  const GgufType type = entry->element == GgufType::kBool ? GgufType::kUint8 : entry->element;
  const size_t stride = InfoOf(type).bytes;
  std::vector<int64_t> out(entry->count);
  for (uint64_t i = 0; i < entry->count; ++i) {
    const auto v = LoadInteger<int64_t>(type, entry->data + i * stride);
    if (!v) return Mismatch(*entry, kExpected);
    out[i] = *v;
  }
  return out;
}

Result<std::vector<float>> GgufFile::FloatArray(std::string_view key) const {
  constexpr std::string_view kExpected = "an array of floats";
  OKV_ASSIGN_OR_RETURN(const GgufEntry* entry, Require(key, kExpected));
  if (entry->type != GgufType::kArray) return Mismatch(*entry, kExpected);
  const size_t stride = InfoOf(entry->element).bytes;
  std::vector<float> out(entry->count);
  for (uint64_t i = 0; i < entry->count; ++i) {
    const auto v = LoadFloat(entry->element, entry->data + i * stride);
    if (!v) return Mismatch(*entry, kExpected);
    out[i] = static_cast<float>(*v);
  }
  return out;
}

Result<std::vector<std::string_view>> GgufFile::StringArray(std::string_view key) const {
  constexpr std::string_view kExpected = "an array of strings";
  OKV_ASSIGN_OR_RETURN(const GgufEntry* entry, Require(key, kExpected));
  if (entry->type != GgufType::kArray || entry->element != GgufType::kString) {
    return Mismatch(*entry, kExpected);
  }
  std::vector<std::string_view> out(entry->count);
  const std::byte* p = entry->data;
  for (std::string_view& s : out) {
    s = LoadString(p);
    p += sizeof(uint64_t) + s.size();
  }
  return out;
}

}  // namespace omnikv
