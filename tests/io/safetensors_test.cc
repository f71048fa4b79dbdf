#include "io/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "builders.h"

namespace omnikv::safetensors_test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

struct InMemory {
  explicit InMemory(const std::string& content)
      : bytes(content.begin(), content.end()),
        model(SafetensorsModel::FromMemory(
            "test.safetensors", reinterpret_cast<const std::byte*>(bytes.data()), bytes.size())) {}
  const SafetensorsModel* operator->() const { return model->get(); }

  std::vector<char> bytes;  // exactly the file: ASan sees every byte read beside it
  Result<std::unique_ptr<SafetensorsModel>> model;
};

std::string Header(std::initializer_list<std::string> entries) {
  return fmt::format("{{{}}}", fmt::join(entries, ","));
}

// A file of F32 tensors of one value each, all of value `value`.
std::string Ones(const std::vector<std::string>& names, float value = 1) {
  std::vector<std::string> entries;
  Bytes data;
  for (const std::string& name : names) {
    entries.push_back(SafetensorsEntry(name, "F32", {1}, data.size(), data.size() + 4));
    data.Put(value);
  }
  return SafetensorsBytes(fmt::format("{{{}}}", fmt::join(entries, ",")), data.str());
}

float FirstValue(const SafetensorsModel& model, const TensorView& tensor) {
  float v = 0;
  EXPECT_TRUE(model.ReadValues(tensor, 0, 1, DType::kF32, &v).ok());
  return v;
}

TEST(Safetensors, ReadsAFile) {
  // Not in the order of the data, with metadata, an escaped name, an empty tensor and a scalar, and
  // a header length that leaves the floats misaligned.
  const std::string header = Header({SafetensorsEntry("b", "BF16", {2}, 24, 28),
                                     R"("__metadata__":{"format":"pt","dtype":"x"})",
                                     SafetensorsEntry("a", "F32", {2, 3}, 0, 24),
                                     SafetensorsEntry("none", "F16", {0, 5}, 28, 28),
                                     SafetensorsEntry("\\u00e9\\n", "F32", {}, 28, 32)}) +
                             std::string("   ");
  const std::string data = WithFloats({1, 2, 3, 4, 5, 6}) +
                           Bytes().Put<uint16_t>(0x3f80).Put<uint16_t>(0xc000).str() +
                           WithFloats({7});
  for (size_t pad = 0; pad < 8; ++pad) {
    const InMemory model(SafetensorsBytes(header + std::string(pad, ' '), data));
    ASSERT_TRUE(model.model.ok()) << model.model.status().message();
    ASSERT_EQ(model->tensors().size(), 4u);
    EXPECT_EQ(model->tensors()[0].name, "a");
    EXPECT_EQ(model->tensors()[1].name, "b");
    const TensorView* a = model->Find("a");
    ASSERT_NE(a, nullptr);
    EXPECT_EQ(a->type, StorageType::kF32);
    EXPECT_THAT(a->shape, ElementsAre(2, 3));
    EXPECT_EQ(a->bytes, 24u);
    std::vector<float> values(6);
    ASSERT_TRUE((*model.model)->ReadValues(*a, 0, 6, DType::kF32, values.data()).ok());
    EXPECT_THAT(values, ElementsAre(1, 2, 3, 4, 5, 6));
    values.resize(2);
    ASSERT_TRUE(
        (*model.model)->ReadValues(*model->Find("b"), 0, 2, DType::kF32, values.data()).ok());
    EXPECT_THAT(values, ElementsAre(1, -2));
    EXPECT_EQ(model->Find("none")->bytes, 0u);
    EXPECT_EQ(model->Find("none")->NumValues(), 0u);
    EXPECT_EQ(FirstValue(**model.model, *model->Find("\xc3\xa9\n")), 7);
    EXPECT_EQ(model->Find("__metadata__"), nullptr);
  }
}

TEST(Safetensors, RecognisesEveryDtype) {
  struct Case {
    const char* dtype;
    StorageType type;
    size_t bytes;  // of 4 values
  };
  for (const Case& c : std::initializer_list<Case>{{"BOOL", StorageType::kBool, 4},
                                                   {"F4", StorageType::kF4, 2},
                                                   {"F6_E2M3", StorageType::kF6E2M3, 3},
                                                   {"F6_E3M2", StorageType::kF6E3M2, 3},
                                                   {"U8", StorageType::kU8, 4},
                                                   {"I8", StorageType::kI8, 4},
                                                   {"F8_E5M2", StorageType::kF8E5M2, 4},
                                                   {"F8_E4M3", StorageType::kF8E4M3, 4},
                                                   {"F8_E8M0", StorageType::kF8E8M0, 4},
                                                   {"F8_E4M3FNUZ", StorageType::kF8E4M3Fnuz, 4},
                                                   {"F8_E5M2FNUZ", StorageType::kF8E5M2Fnuz, 4},
                                                   {"I16", StorageType::kI16, 8},
                                                   {"U16", StorageType::kU16, 8},
                                                   {"F16", StorageType::kF16, 8},
                                                   {"BF16", StorageType::kBF16, 8},
                                                   {"I32", StorageType::kI32, 16},
                                                   {"U32", StorageType::kU32, 16},
                                                   {"F32", StorageType::kF32, 16},
                                                   {"C64", StorageType::kC64, 32},
                                                   {"F64", StorageType::kF64, 32},
                                                   {"I64", StorageType::kI64, 32},
                                                   {"U64", StorageType::kU64, 32}}) {
    SCOPED_TRACE(c.dtype);
    const InMemory model(SafetensorsBytes(
        Header({SafetensorsEntry("t", c.dtype, {2, 2}, 0, c.bytes)}), std::string(c.bytes, '\0')));
    ASSERT_TRUE(model.model.ok()) << model.model.status().message();
    EXPECT_EQ(model->Find("t")->type, c.type);
    EXPECT_EQ(StorageTypeName(c.type), c.dtype);
    EXPECT_EQ(IsConvertible(c.type), c.type == StorageType::kF32 || c.type == StorageType::kF16 ||
                                         c.type == StorageType::kBF16);
  }
}

std::vector<HostileFile> HostileFiles() {
  using enum StatusCode;
  std::vector<HostileFile> files;
  const auto raw = [&files](std::string what, std::string bytes,
                            std::vector<std::string> fragments) {
    files.push_back({std::move(what), std::move(bytes), kCorrupt, std::move(fragments)});
  };
  const auto header = [&raw](std::string what, std::string_view text,
                             std::vector<std::string> fragments, size_t data_bytes = 8) {
    raw(std::move(what), SafetensorsBytes(text, std::string(data_bytes, '\0')),
        std::move(fragments));
  };
  const auto entry = [&header](std::string what, std::string_view dtype, std::vector<int64_t> shape,
                               uint64_t begin, uint64_t end, std::vector<std::string> fragments) {
    header(std::move(what), Header({SafetensorsEntry("t", dtype, shape, begin, end)}),
           std::move(fragments));
  };

  raw("nothing", "", {"has 0 bytes", "at least 10"});
  raw("nine bytes", "123456789", {"has 9 bytes"});
  raw("a pickle", "PK\3\4" + std::string(60, '\0'), {"gives its header", "2 to 56"});
  raw("a header of 2^64 - 1 bytes", Bytes().Put(UINT64_MAX).Raw("{}").str(),
      {"gives its header 18446744073709551615 bytes", "10 bytes"});
  raw("a header one byte too long", Bytes().Put<uint64_t>(3).Raw("{}").str(),
      {"gives its header 3 bytes", "2 to 2"});
  raw("a header of 0 bytes", Bytes().Put<uint64_t>(0).Raw("{}").str(),
      {"gives its header 0 bytes"});
  header("a header that begins with a space", " {}", {"begins with byte 0x20", "'{'"}, 0);
  header("a zero byte after the header", std::string("{}\0{}", 5), {"zero byte at 2"}, 0);
  header("text after the header", "{}{}", {"not valid JSON"}, 0);
  header("half a header", R"({"t":{"dtype":"F32")", {"not valid JSON"});
  header("a trailing comma", fmt::format("{{{},}}", SafetensorsEntry("t", "F32", {2}, 0, 8)),
         {"not valid JSON"});
  header("broken UTF-8", "{\"\xff\":1}", {"not valid JSON"});
  header("a number beyond floats", R"({"t":1e999})", {"not valid JSON"});

  header("a tensor that is a number", R"({"t":5})", {"tensor 't' is a number", "an object"});
  header("a tensor that is negative", R"({"t":-5})", {"tensor 't' is a negative number"});
  header("a tensor that is null", R"({"t":null})", {"tensor 't' is null"});
  header("a tensor that is a string", R"({"t":"F32"})", {"tensor 't' is a string"});
  header("a tensor that is a list", R"({"t":[]})", {"tensor 't' is an array"});
  header("a million open brackets", std::string("{\"t\":") + std::string(1000000, '['),
         {"tensor 't' is an array"});
  header("an object in a tensor", R"({"t":{"shape":{}}})", {"'t' has an object in shape"});
  header("a list in a list", R"({"t":{"shape":[[1]]}})", {"'t' has an array in shape"});
  header("no dtype", R"({"t":{"shape":[2],"data_offsets":[0,8]}})", {"tensor 't' has no dtype"});
  header("no shape", R"({"t":{"dtype":"F32","data_offsets":[0,8]}})", {"'t' has no shape"});
  header("no offsets", R"({"t":{"dtype":"F32","shape":[2]}})", {"'t' has no data_offsets"});
  header("an empty tensor entry", R"({"t":{}})", {"tensor 't' has no dtype"});
  header("an unknown field", R"({"t":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"x":1}})",
         {"tensor 't' has a field 'x'", "expected dtype, shape and data_offsets"});
  header("dtype twice", R"({"t":{"dtype":"F32","dtype":"F16","shape":[2],"data_offsets":[0,8]}})",
         {"tensor 't' has dtype twice"});
  header("shape twice", R"({"t":{"shape":[2],"shape":[2]}})", {"tensor 't' has shape twice"});
  header("offsets twice", R"({"t":{"data_offsets":[],"data_offsets":[]}})",
         {"tensor 't' has data_offsets twice"});
  header("a name twice",
         Header({SafetensorsEntry("t", "F32", {1}, 0, 4), SafetensorsEntry("t", "F32", {1}, 4, 8)}),
         {"two tensors named 't'"});
  header("a name twice, once escaped",
         Header({SafetensorsEntry("t", "F32", {1}, 0, 4),
                 SafetensorsEntry("\\u0074", "F32", {1}, 4, 8)}),
         {"two tensors named 't'"});
  entry("an unknown dtype", "F33", {2}, 0, 8, {"tensor 't' has dtype 'F33'"});
  entry("a dtype of GGUF", "Q8_0", {32}, 0, 34, {"tensor 't' has dtype 'Q8_0'"});
  entry("a dtype in small letters", "f32", {2}, 0, 8, {"tensor 't' has dtype 'f32'"});
  header("a dtype that is a number", R"({"t":{"dtype":5}})",
         {"'t' has a number in dtype", "string"});
  header("a dtype that is a list", R"({"t":{"dtype":["F32"]}})", {"'t' has an array in dtype"});
  header("a shape that is a number", R"({"t":{"shape":5}})",
         {"'t' has a number in shape", "array of whole numbers"});
  header("a shape of strings", R"({"t":{"shape":["2"]}})", {"'t' has a string in shape"});
  header("a negative dimension", R"({"t":{"shape":[-2]}})", {"'t' has a negative number in shape"});
  header("half a dimension", R"({"t":{"shape":[0.5]}})", {"'t' has a number that is fractional"});
  header("a dimension beyond 64 bits", R"({"t":{"shape":[99999999999999999999]}})",
         {"'t' has a number that is fractional or beyond 64 bits in shape"});
  header("a dimension of 2^63", R"({"t":{"shape":[9223372036854775808]}})",
         {"'t' has 9223372036854775808 in shape", "less than 2^63"});
  header("a shape of 17", R"({"t":{"shape":[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1]}})",
         {"'t' has more than 16 numbers in shape"});
  header("three offsets", R"({"t":{"data_offsets":[0,4,8]}})",
         {"'t' has more than 2 numbers in data_offsets"});
  header("one offset", R"({"t":{"dtype":"F32","shape":[2],"data_offsets":[8]}})",
         {"'t' has 1 numbers in data_offsets", "begin and end"});
  entry("a product that wraps", "F32", {int64_t{1} << 32, int64_t{1} << 32}, 0, 0,
        {"tensor 't' has shape [4294967296, 4294967296]", "overflows"});
  entry("bytes that wrap", "F32", {int64_t{1} << 62}, 0, 0, {"tensor 't'", "overflows"});
  entry("a product that wraps before a zero", "U8", {INT64_MAX, 3, 0}, 0, 0, {"overflows"});
  entry("a third of a byte", "F4", {3}, 0, 1,
        {"tensor 't' has shape [3] of type F4", "whole blocks"});
  entry("an end before its begin", "F32", {2}, 8, 0, {"data_offsets [8, 0]", "begin before end"});
  entry("an end past the file", "F32", {4}, 0, 16, {"data_offsets [0, 16]", "at most the 8 bytes"});
  entry("offsets of 2^63 - 1", "U8", {0}, INT64_MAX, INT64_MAX,
        {"data_offsets [9223372036854775807, 9223372036854775807]", "at most the 8 bytes"});
  entry("too few bytes for its shape", "F32", {3}, 0, 8,
        {"8 bytes", "expected 12 for shape [3] of F32"});
  entry("too many bytes for its shape", "F16", {2}, 0, 8,
        {"8 bytes", "expected 4 for shape [2] of F16"});
  entry("a hole at the start", "F32", {1}, 4, 8, {"data_offsets [4, 8], expected 0", "no hole"});
  entry("data that no tensor covers", "F32", {1}, 0, 4, {"cover 4 bytes", "all 8"});
  header("data without tensors", "{}", {"cover 0 bytes", "all 8"});
  header("a hole in the middle",
         Header({SafetensorsEntry("a", "U8", {2}, 0, 2), SafetensorsEntry("b", "U8", {4}, 4, 8)}),
         {"tensor 'b' has data_offsets [4, 8], expected 2", "no hole"});
  header("tensors that overlap",
         Header({SafetensorsEntry("b", "U8", {4}, 4, 8), SafetensorsEntry("a", "U8", {6}, 0, 6)}),
         {"tensor 'b' has data_offsets [4, 8], expected no overlap with 'a', which ends at 6"});
  header("the same bytes twice",
         Header({SafetensorsEntry("a", "U8", {8}, 0, 8), SafetensorsEntry("b", "U8", {8}, 0, 8)}),
         {"tensor 'b'", "no overlap with 'a'"});
  header("an empty tensor inside another",
         Header({SafetensorsEntry("a", "U8", {8}, 0, 8), SafetensorsEntry("b", "U8", {0}, 4, 4)}),
         {"tensor 'b'", "no overlap with 'a'"});
  header("metadata that is a string", R"({"__metadata__":"pt"})",
         {"__metadata__ has a string", "expected strings"});
  header("metadata with a number", R"({"__metadata__":{"a":1}})", {"__metadata__ has a number"});
  header("metadata with a list", R"({"__metadata__":{"a":[]}})", {"__metadata__ has an array"});
  header("metadata with an object", R"({"__metadata__":{"a":{}}})", {"__metadata__ has an object"});
  header("metadata twice", R"({"__metadata__":{},"__metadata__":{}})", {"__metadata__ twice"});
  header("a name for terminals", "{\"\\u001b]0;gotcha\\u0007\":5}", {"'\\x1b]0;gotcha\\x07'"});
  return files;
}

TEST(Safetensors, RefusesHostileFiles) {
  const std::vector<HostileFile> files = HostileFiles();
  EXPECT_GE(files.size(), 40u);
  for (const HostileFile& file : files) {
    SCOPED_TRACE(file.what);
    const InMemory model(file.bytes);
    if (model.model.ok()) {
      ADD_FAILURE() << "was accepted";
      continue;
    }
    const std::string& message = model.model.status().message();
    EXPECT_EQ(model.model.status().code(), file.code) << message;
    EXPECT_THAT(message, testing::StartsWith("test.safetensors: "));
    EXPECT_LT(message.size(), 300u);
    for (const std::string& fragment : file.fragments) EXPECT_THAT(message, HasSubstr(fragment));
  }
}

TEST(Safetensors, RefusesEveryTruncation) {
  const std::string good = Ones({"a", "b"});
  for (size_t n = 0; n < good.size(); ++n) {
    EXPECT_FALSE(InMemory(good.substr(0, n)).model.ok()) << n << " of " << good.size() << " bytes";
  }
  EXPECT_TRUE(InMemory(good).model.ok());
  EXPECT_FALSE(InMemory(good + "x").model.ok());
}

TEST(Safetensors, OpensAFileAndAFolder) {
  const TempFolder folder;
  const std::string file = folder.Write("model.safetensors", Ones({"a"}, 5));
  folder.Write("model.safetensors.index.json", "not looked at");
  for (const std::string& path : {file, folder.path()}) {
    const auto model = SafetensorsModel::Open(path);
    ASSERT_TRUE(model.ok()) << model.status().message();
    EXPECT_EQ((*model)->path(), path);
    const TensorView* a = (*model)->Find("a");
    ASSERT_NE(a, nullptr);
    EXPECT_EQ(FirstValue(**model, *a), 5);
  }
}

TEST(Safetensors, OpensShards) {
  const TempFolder folder;
  folder.Write("one.safetensors", Ones({"a", "b", "extra"}, 1));
  folder.Write("two.safetensors", Ones({"c"}, 2));
  folder.Write("model.safetensors.index.json",
               R"({"metadata":{"total_size":12,"deep":[[{"weight_map":1}]]},
                   "weight_map":{"c":"two.safetensors","a":"one.safetensors",
                                 "b":"one.safetensors"}})");
  const auto model = SafetensorsModel::Open(folder.path());
  ASSERT_TRUE(model.ok()) << model.status().message();
  ASSERT_EQ((*model)->tensors().size(), 4u);
  EXPECT_EQ(FirstValue(**model, *(*model)->Find("b")), 1);
  EXPECT_EQ(FirstValue(**model, *(*model)->Find("c")), 2);
  EXPECT_NE((*model)->Find("extra"), nullptr);
}

struct HostileIndex {
  std::string what;
  std::string json;
  StatusCode code;
  std::vector<std::string> fragments;
};

TEST(Safetensors, RefusesHostileIndices) {
  using enum StatusCode;
  const auto map = [](std::string_view body) {
    return fmt::format(R"({{"weight_map":{{{}}}}})", body);
  };
  const std::string index = "model.safetensors.index.json";
  const HostileIndex cases[] = {
      {"not JSON", "{", kCorrupt, {index, "not valid JSON"}},
      {"a list", "[]", kCorrupt, {index, "is an array"}},
      {"a word", "\"weight_map\"", kCorrupt, {index, "no weight_map"}},
      {"no map", R"({"metadata":{}})", kCorrupt, {index, "no weight_map"}},
      {"a map elsewhere",
       R"({"metadata":{"weight_map":{"a":"one.safetensors"}}})",
       kCorrupt,
       {"no weight_map"}},
      {"a map that is a list", R"({"weight_map":["a"]})", kCorrupt, {"weight_map has an array"}},
      {"a map that is a string", R"({"weight_map":"a"})", kCorrupt, {"string for weight_map"}},
      {"a map that is null", R"({"weight_map":null})", kCorrupt, {"weight_map has null"}},
      {"a map twice", R"({"weight_map":{},"weight_map":{}})", kCorrupt, {"weight_map twice"}},
      {"a number for a shard", map(R"("a":1)"), kCorrupt, {"weight_map has a number"}},
      {"an object for a shard",
       map(R"("a":{"b":"one.safetensors"})"),
       kCorrupt,
       {"weight_map has an object"}},
      {"a name twice",
       map(R"("a":"one.safetensors","a":"two.safetensors")"),
       kCorrupt,
       {"weight_map has 'a' twice"}},
      {"100 levels",
       std::string("{\"metadata\":") + std::string(100, '['),
       kCorrupt,
       {"nested deeper than 32"}},
      {"a million levels",
       std::string("{\"metadata\":") + std::string(1000000, '['),
       kCorrupt,
       {"deeper"}},
      {"the folder above", map(R"("a":"..")"), kCorrupt, {"places 'a' in '..'", "same folder"}},
      {"a file above", map(R"("a":"../one.safetensors")"), kCorrupt, {"'../one.safetensors'"}},
      {"a file of the system", map(R"("a":"/etc/passwd")"), kCorrupt, {"'/etc/passwd'"}},
      {"a file of another system", map(R"("a":"..\\one.safetensors")"), kCorrupt, {"same folder"}},
      {"a slash in disguise", map(R"("a":"..\u002fone.safetensors")"), kCorrupt, {"same folder"}},
      {"a zero byte", map(R"("a":"one.safetensors\u0000.png")"), kCorrupt, {"\\x00.png"}},
      {"a shard for terminals", map(R"("a":"\u001b[2J")"), kCorrupt, {"'\\x1b[2J'"}},
      {"no file name", map(R"("a":"")"), kCorrupt, {"places 'a' in ''"}},
      {"a missing shard",
       map(R"("a":"one.safetensors","z":"three.safetensors")"),
       kNotFound,
       {"three.safetensors: no such file", index}},
      {"a tensor its shard lacks",
       map(R"("a":"one.safetensors","z":"two.safetensors")"),
       kCorrupt,
       {"two.safetensors: has no tensor 'z'", index}},
      {"a tensor in the other shard",
       map(R"("a":"two.safetensors","b":"one.safetensors")"),
       kCorrupt,
       {"one.safetensors: has tensor 'a'", "places in 'two.safetensors'"}},
      {"a tensor in two shards",
       map(R"("a":"one.safetensors","c":"two.safetensors")"),
       kCorrupt,
       {"two tensors named 'both'"}},
      {"a shard that is none",
       map(R"("a":"model.safetensors.index.json")"),
       kCorrupt,
       {index, "gives its header"}},
      {"the folder itself", map(R"("a":".")"), kCorrupt, {"places 'a' in '.'"}},
  };
  for (const HostileIndex& c : cases) {
    SCOPED_TRACE(c.what);
    const TempFolder folder;
    folder.Write("one.safetensors", Ones({"a", "b", "both"}));
    folder.Write("two.safetensors", Ones({"c", "both"}));
    folder.Write(index, c.json);
    const auto model = SafetensorsModel::Open(folder.path());
    if (model.ok()) {
      ADD_FAILURE() << "was accepted";
      continue;
    }
    const std::string& message = model.status().message();
    EXPECT_EQ(model.status().code(), c.code) << message;
    EXPECT_THAT(message, testing::StartsWith(folder.path()));
    for (const std::string& fragment : c.fragments) EXPECT_THAT(message, HasSubstr(fragment));
  }
}

TEST(Safetensors, RefusesEndlessIndices) {
  const TempFolder folder;
  std::string json = "{\"weight_map\":{\"0\":\"a\"";
  for (int i = 1; i <= 1'000'000; ++i) json += fmt::format(",\"{}\":\"a\"", i);
  const std::string index = folder.Write("model.safetensors.index.json", json + "}}");
  EXPECT_THAT(SafetensorsModel::Open(folder.path()).status().message(),
              HasSubstr("weight_map has more than 1000000 tensors"));
  std::filesystem::resize_file(index, 100'000'001);
  EXPECT_THAT(SafetensorsModel::Open(folder.path()).status().message(),
              HasSubstr("has 100000001 bytes, expected at most 100000000"));
}

TEST(Safetensors, OpenNamesWhatIsWrongWithThePath) {
  const TempFolder folder;
  const auto none = SafetensorsModel::Open(folder.path() + "/none.safetensors");
  EXPECT_EQ(none.status().code(), StatusCode::kNotFound);
  EXPECT_THAT(none.status().message(), HasSubstr("none.safetensors: no such file"));
  const auto empty = SafetensorsModel::Open(folder.path());
  EXPECT_EQ(empty.status().code(), StatusCode::kNotFound);
  EXPECT_THAT(empty.status().message(), HasSubstr("neither model.safetensors nor"));
  folder.Write("model.safetensors", "");
  EXPECT_THAT(SafetensorsModel::Open(folder.path()).status().message(), HasSubstr("is empty"));
}

}  // namespace
}  // namespace omnikv::safetensors_test
