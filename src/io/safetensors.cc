#include "io/safetensors.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "base/printable.h"

namespace omnikv {
namespace {

constexpr size_t kMaxJsonBytes = 100'000'000;  // the reference implementation's limit for headers
// Of an index; a map of them takes some 250 bytes each. The largest published have 200,000.
constexpr size_t kMaxIndexTensors = 1'000'000;
constexpr size_t kMaxRank = 16;
constexpr size_t kMaxIndexDepth = 32;

std::optional<StorageType> TypeOfDtype(std::string_view dtype) {
  using enum StorageType;
  // The dtypes of the format; the block types of GGUF are not among them.
  for (const StorageType type :
       {kF32,    kF16,        kBF16,       kF64,    kC64,    kI8,   kI16,    kI32,
        kI64,    kU8,         kU16,        kU32,    kU64,    kBool, kF8E4M3, kF8E5M2,
        kF8E8M0, kF8E4M3Fnuz, kF8E5M2Fnuz, kF6E2M3, kF6E3M2, kF4}) {
    if (StorageTypeName(type) == dtype) return type;
  }
  return std::nullopt;
}

// Events of a JSON text, for readers that keep the first complaint and stop there. Working on
// events rather than on a tree bounds memory by what is kept, and shows keys that occur twice.
class JsonReader {
 public:
  using number_integer_t = nlohmann::json::number_integer_t;
  using number_unsigned_t = nlohmann::json::number_unsigned_t;
  using number_float_t = nlohmann::json::number_float_t;
  using string_t = nlohmann::json::string_t;
  using binary_t = nlohmann::json::binary_t;

  // Reads `text`; the first complaint, or the place where it stops being JSON, as kCorrupt.
  Status Read(const std::string& path, std::string_view text) {
    try {
      nlohmann::json::sax_parse(text.begin(), text.end(), this);
    } catch (const std::exception& e) {  // the library's own limits; the reader throws nothing
      Complain(fmt::format("cannot be read as JSON ({})", e.what()));
    }
    return complaint_.empty() ? Status() : Corrupt(path + ": " + complaint_);
  }

  bool null() { return Scalar("null"); }
  bool boolean(bool) { return Scalar("a boolean"); }
  bool number_integer(number_integer_t) { return Scalar("a negative number"); }
  bool number_float(number_float_t, const string_t&) {
    return Scalar("a number that is fractional or beyond 64 bits");
  }
  bool binary(binary_t&) { return Scalar("binary data"); }
  bool number_unsigned(number_unsigned_t value) { return OnUnsigned(value); }
  bool string(string_t& value) { return OnString(value); }
  bool start_object(size_t) {
    ++depth_;
    return OnStartObject();
  }
  bool end_object() {
    --depth_;
    return OnEnd();
  }
  bool start_array(size_t) {
    ++depth_;
    return OnStartArray();
  }
  bool end_array() {
    --depth_;
    return OnEnd();
  }
  bool key(string_t& value) { return OnKey(value); }
  bool parse_error(size_t position, const std::string&, const nlohmann::json::exception&) {
    return Complain(fmt::format("is not valid JSON at byte {} of its JSON text", position));
  }

 protected:
  ~JsonReader() = default;

  size_t depth() const { return depth_; }  // objects and arrays that are open
  bool Complain(std::string complaint) {
    if (complaint_.empty()) complaint_ = std::move(complaint);
    return false;
  }

 private:
  virtual bool Scalar(const char* what) = 0;  // any value that no other event is for
  virtual bool OnUnsigned(uint64_t value) = 0;
  virtual bool OnString(std::string& value) = 0;
  virtual bool OnStartObject() = 0;  // depth() counts it already
  virtual bool OnStartArray() = 0;   // depth() counts it already
  virtual bool OnEnd() = 0;          // depth() no longer counts it
  virtual bool OnKey(std::string& value) = 0;

  size_t depth_ = 0;
  std::string complaint_;
};

struct HeaderEntry {
  std::string name;
  std::optional<StorageType> type;
  std::vector<int64_t> shape;
  std::vector<int64_t> offsets;  // begin and end in the data area
  bool has_shape = false;
  bool has_offsets = false;
};

// {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, "__metadata__": {...}}
class HeaderReader final : public JsonReader {
 public:
  std::vector<HeaderEntry>& entries() { return entries_; }

 private:
  std::string Where() const { return "tensor " + Printable(entries_.back().name); }
  // `at`: the depth at which the unexpected value lies.
  bool Unexpected(std::string_view what, size_t at) {
    if (in_metadata_) return Complain(fmt::format("__metadata__ has {}, expected strings", what));
    if (at == 1) {
      return Complain(fmt::format("{} is {}, expected an object of dtype, shape and data_offsets",
                                  Where(), what));
    }
    return Complain(fmt::format("{} has {} in {}, expected {}", Where(), what, field_,
                                field_ == "dtype" ? "a string" : "an array of whole numbers"));
  }

  bool Scalar(const char* what) override { return Unexpected(what, depth()); }

  bool OnUnsigned(uint64_t value) override {
    if (depth() != 3) return Unexpected("a number", depth());
    if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
      return Complain(
          fmt::format("{} has {} in {}, expected less than 2^63", Where(), value, field_));
    }
    auto& numbers = field_ == "shape" ? entries_.back().shape : entries_.back().offsets;
    const size_t limit = field_ == "shape" ? kMaxRank : 2;
    if (numbers.size() == limit) {
      return Complain(fmt::format("{} has more than {} numbers in {}", Where(), limit, field_));
    }
    numbers.push_back(static_cast<int64_t>(value));
    return true;
  }

  bool OnString(std::string& value) override {
    if (in_metadata_ && depth() == 2) return true;
    if (in_metadata_ || depth() != 2 || field_ != "dtype") return Unexpected("a string", depth());
    HeaderEntry& entry = entries_.back();
    entry.type = TypeOfDtype(value);
    if (!entry.type) {
      return Complain(fmt::format("{} has dtype {}, expected one of the safetensors format",
                                  Where(), Printable(value)));
    }
    return true;
  }

  bool OnStartObject() override {
    return depth() <= 2 ? true : Unexpected("an object", depth() - 1);
  }

  bool OnStartArray() override {
    if (depth() != 3 || in_metadata_ || field_ == "dtype") {
      return Unexpected("an array", depth() - 1);
    }
    (field_ == "shape" ? entries_.back().has_shape : entries_.back().has_offsets) = true;
    return true;
  }

  bool OnEnd() override {
    if (depth() == 1) {
      if (!in_metadata_) return CheckComplete();
      in_metadata_ = false;
    }
    return true;
  }

  bool OnKey(std::string& key) override {
    if (depth() == 1) {
      in_metadata_ = key == "__metadata__";
      if (in_metadata_ && std::exchange(has_metadata_, true)) {
        return Complain("header has __metadata__ twice, expected it once");
      }
      if (!in_metadata_) entries_.push_back({.name = std::move(key)});
      return true;
    }
    if (in_metadata_) return true;
    const HeaderEntry& entry = entries_.back();
    field_ = std::move(key);
    bool twice = false;
    if (field_ == "dtype") {
      twice = entry.type.has_value();
    } else if (field_ == "shape") {
      twice = entry.has_shape;
    } else if (field_ == "data_offsets") {
      twice = entry.has_offsets;
    } else {
      return Complain(fmt::format("{} has a field {}, expected dtype, shape and data_offsets",
                                  Where(), Printable(field_)));
    }
    return twice ? Complain(fmt::format("{} has {} twice, expected it once", Where(), field_))
                 : true;
  }

  bool CheckComplete() {
    const HeaderEntry& entry = entries_.back();
    const char* missing = !entry.type          ? "dtype"
                          : !entry.has_shape   ? "shape"
                          : !entry.has_offsets ? "data_offsets"
                                               : nullptr;
    if (missing != nullptr) {
      return Complain(
          fmt::format("{} has no {}, expected dtype, shape and data_offsets", Where(), missing));
    }
    if (entry.offsets.size() != 2) {
      return Complain(fmt::format("{} has {} numbers in data_offsets, expected begin and end",
                                  Where(), entry.offsets.size()));
    }
    return true;
  }

  std::vector<HeaderEntry> entries_;
  std::string field_;          // of the tensor that is being read
  bool in_metadata_ = false;   // inside "__metadata__"
  bool has_metadata_ = false;  // it has been seen
};

// {"metadata": anything, "weight_map": {"name": "model-00001-of-00002.safetensors"}}
class IndexReader final : public JsonReader {
 public:
  std::map<std::string, std::string>& weight_map() { return weight_map_; }
  bool has_map() const { return has_map_; }

 private:
  bool Scalar(const char* what) override {
    if (!in_map_) return true;
    return Complain(fmt::format("weight_map has {}, expected names of files", what));
  }
  bool OnUnsigned(uint64_t) override { return Scalar("a number"); }
  bool OnString(std::string& file) override {
    if (!in_map_) return true;
    if (depth() == 1) return Complain("has a string for weight_map, expected an object");
    // A name that could leave the folder, or upset the terminal that shows it.
    const bool odd = std::any_of(file.begin(), file.end(), [](unsigned char c) {
      return c < ' ' || c == 0x7f || c == '/' || c == '\\';
    });
    if (odd || file.empty() || file == "." || file == "..") {
      return Complain(fmt::format("weight_map places {} in {}, expected a file of the same folder",
                                  Printable(tensor_), Printable(file)));
    }
    if (weight_map_.size() == kMaxIndexTensors) {
      return Complain(
          fmt::format("weight_map has more than {} tensors, expected fewer", kMaxIndexTensors));
    }
    if (!weight_map_.emplace(tensor_, std::move(file)).second) {
      return Complain(fmt::format("weight_map has {} twice, expected it once", Printable(tensor_)));
    }
    return true;
  }
  bool OnStartObject() override {
    if (in_map_ && depth() == 2) has_map_ = true;
    if (in_map_ && depth() > 2) return Scalar("an object");
    return CheckDepth();
  }
  bool OnStartArray() override {
    if (depth() == 1) return Complain("is an array, expected an object");
    return in_map_ ? Scalar("an array") : CheckDepth();
  }
  bool CheckDepth() {
    if (depth() <= kMaxIndexDepth) return true;
    return Complain(fmt::format("is nested deeper than {} levels", kMaxIndexDepth));
  }
  bool OnEnd() override {
    if (depth() == 1) in_map_ = false;
    return true;
  }
  bool OnKey(std::string& key) override {
    if (depth() == 1) {
      in_map_ = key == "weight_map";
      if (in_map_ && has_map_) return Complain("has weight_map twice, expected it once");
    } else if (in_map_) {
      tensor_ = std::move(key);
    }
    return true;
  }

  std::map<std::string, std::string> weight_map_;
  std::string tensor_;   // whose value comes next
  bool in_map_ = false;  // inside "weight_map", or about to enter it
  bool has_map_ = false;
};

// Checks the file, which its source knows as number `number`, and appends its tensors in the order
// of their data.
Status ParseFile(const InputFile& file, uint32_t number, std::vector<TensorView>* tensors) {
  const std::string& path = file.path();
  const size_t size = file.size();
  uint64_t header_bytes = 0;
  if (size < sizeof header_bytes + 2) {
    return Corrupt(
        fmt::format("{}: has {} bytes, expected a safetensors file of at least 10", path, size));
  }
  OKV_RETURN_IF_ERROR(file.Read(0, sizeof header_bytes, &header_bytes));
  const uint64_t limit = std::min<uint64_t>(size - sizeof header_bytes, kMaxJsonBytes);
  if (header_bytes < 2 || header_bytes > limit) {
    return Corrupt(fmt::format(
        "{}: gives its header {} bytes, expected 2 to {} in a safetensors file of {} bytes", path,
        header_bytes, limit, size));
  }
  std::string header(header_bytes, '\0');
  OKV_RETURN_IF_ERROR(file.Read(sizeof header_bytes, header_bytes, header.data()));
  if (header.front() != '{') {
    return Corrupt(fmt::format("{}: header begins with byte 0x{:02x}, expected '{{'", path,
                               static_cast<unsigned char>(header.front())));
  }
  if (const size_t nul = header.find('\0'); nul != std::string::npos) {
    // The JSON library takes a zero byte for the end and would not look at what follows it.
    return Corrupt(fmt::format("{}: header has a zero byte at {}, expected JSON", path, nul));
  }
  HeaderReader reader;
  OKV_RETURN_IF_ERROR(reader.Read(path, header));
  std::vector<HeaderEntry>& entries = reader.entries();
  std::sort(entries.begin(), entries.end(), [](const HeaderEntry& a, const HeaderEntry& b) {
    return std::tie(a.offsets, a.name) < std::tie(b.offsets, b.name);
  });

  const uint64_t area = sizeof header_bytes + header_bytes;  // where the data begins
  const uint64_t area_bytes = size - area;
  uint64_t covered = 0;  // bytes of the data area that tensors so far cover
  tensors->reserve(tensors->size() + entries.size());
  for (HeaderEntry& entry : entries) {
    const std::string where = fmt::format("{}: tensor {}", path, Printable(entry.name));
    const auto begin = static_cast<uint64_t>(entry.offsets[0]);
    const auto end = static_cast<uint64_t>(entry.offsets[1]);
    const std::string span = fmt::format("{} has data_offsets [{}, {}]", where, begin, end);
    if (begin > end) return Corrupt(span + ", expected begin before end");
    if (end > area_bytes) {
      return Corrupt(fmt::format("{}, expected at most the {} bytes of data that the file has",
                                 span, area_bytes));
    }
    if (begin < covered) {
      return Corrupt(fmt::format("{}, expected no overlap with {}, which ends at {}", span,
                                 Printable(tensors->back().name), covered));
    }
    if (begin > covered) {
      return Corrupt(fmt::format("{}, expected {}: the format allows no hole", span, covered));
    }
    const Result<size_t> bytes = StorageBytes(*entry.type, entry.shape);
    if (!bytes.ok()) return Status(bytes.status().code(), where + " " + bytes.status().message());
    if (end - begin != *bytes) {
      return Corrupt(fmt::format("{}, {} bytes, expected {} for shape [{}] of {}", span,
                                 end - begin, *bytes, fmt::join(entry.shape, ", "),
                                 StorageTypeName(*entry.type)));
    }
    tensors->push_back({.name = std::move(entry.name),
                        .type = *entry.type,
                        .shape = std::move(entry.shape),
                        .file = number,
                        .offset = area + begin,
                        .bytes = *bytes});
    covered = end;
  }
  if (covered != area_bytes) {
    return Corrupt(fmt::format("{}: tensors cover {} bytes, expected all {} of its data", path,
                               covered, area_bytes));
  }
  return Status();
}

bool IsFolder(const std::string& path) {
  struct stat info;
  return ::stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode);
}

}  // namespace

Result<std::map<std::string, std::string>> ParseSafetensorsIndex(const std::string& path,
                                                                 std::string_view text) {
  IndexReader reader;
  OKV_RETURN_IF_ERROR(reader.Read(path, text));
  if (!reader.has_map()) {
    return Corrupt(
        fmt::format("{}: has no weight_map, expected tensor names and their files", path));
  }
  return std::move(reader.weight_map());
}

Result<std::unique_ptr<SafetensorsModel>> SafetensorsModel::FromMemory(std::string name,
                                                                       const std::byte* data,
                                                                       size_t size) {
  std::unique_ptr<SafetensorsModel> model(new SafetensorsModel(std::move(name)));
  std::vector<TensorView> tensors;
  OKV_RETURN_IF_ERROR(
      model->AddTensors(InputFile::FromMemory(model->path(), data, size), &tensors));
  OKV_RETURN_IF_ERROR(model->SetTensors(std::move(tensors)));
  return model;
}

Status SafetensorsModel::AddTensors(InputFile file, std::vector<TensorView>* tensors) {
  const uint32_t number = TakeFile(std::move(file));
  return ParseFile(FileOf(number), number, tensors);
}

Status SafetensorsModel::AddFile(const std::string& file_path, std::vector<TensorView>* tensors) {
  OKV_ASSIGN_OR_RETURN(InputFile file, InputFile::Open(file_path));
  return AddTensors(std::move(file), tensors);
}

Status SafetensorsModel::AddShards(const std::string& index_path,
                                   std::vector<TensorView>* tensors) {
  OKV_ASSIGN_OR_RETURN(const std::string text, ReadWholeFile(index_path, kMaxJsonBytes));
  OKV_ASSIGN_OR_RETURN(const auto index, ParseSafetensorsIndex(index_path, text));
  std::set<std::string> shards;
  for (const auto& [tensor, shard] : index) shards.insert(shard);
  std::set<std::string> missing;  // tensors of the index that no shard has had so far
  for (const auto& [tensor, shard] : index) missing.insert(missing.end(), tensor);
  for (const std::string& shard : shards) {
    const std::string shard_path = path() + "/" + shard;
    const size_t first = tensors->size();
    const Status added = AddFile(shard_path, tensors);
    if (added.code() == StatusCode::kNotFound) {
      return NotFound(fmt::format("{}, though {} names it", added.message(), index_path));
    }
    OKV_RETURN_IF_ERROR(added);
    for (size_t i = first; i < tensors->size(); ++i) {
      const auto it = index.find((*tensors)[i].name);
      if (it == index.end()) continue;  // not in the index: harmless, as long as it is unique
      if (it->second != shard) {
        return Corrupt(fmt::format("{}: has tensor {}, which {} places in {}", shard_path,
                                   Printable(it->first), index_path, Printable(it->second)));
      }
      missing.erase(it->first);
    }
  }
  if (!missing.empty()) {
    const std::string& tensor = *missing.begin();
    return Corrupt(fmt::format("{}/{}: has no tensor {}, though {} places it there", path(),
                               index.at(tensor), Printable(tensor), index_path));
  }
  return Status();
}

Result<std::unique_ptr<SafetensorsModel>> SafetensorsModel::Open(const std::string& path) {
  std::unique_ptr<SafetensorsModel> model(new SafetensorsModel(path));
  const std::string single = path + "/model.safetensors";
  const std::string index = path + "/model.safetensors.index.json";
  std::vector<TensorView> tensors;
  if (!IsFolder(path)) {
    OKV_RETURN_IF_ERROR(model->AddFile(path, &tensors));
  } else if (MayExist(single)) {
    OKV_RETURN_IF_ERROR(model->AddFile(single, &tensors));
  } else if (MayExist(index)) {
    OKV_RETURN_IF_ERROR(model->AddShards(index, &tensors));
  } else {
    return NotFound(
        fmt::format("{}: has neither model.safetensors nor model.safetensors.index.json", path));
  }
  OKV_RETURN_IF_ERROR(model->SetTensors(std::move(tensors)));
  return model;
}

}  // namespace omnikv
