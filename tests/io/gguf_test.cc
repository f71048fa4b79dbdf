#include "io/gguf.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "builders.h"

namespace omnikv::gguf_test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

// The model's memory lives in a heap block of exactly its size, so that ASan sees every byte read
// beside it.
struct InMemory {
  explicit InMemory(const std::string& content)
      : bytes(content.begin(), content.end()),
        file(GgufFile::FromMemory("test.gguf", reinterpret_cast<const std::byte*>(bytes.data()),
                                  bytes.size())) {}
  const GgufFile* operator->() const { return file->get(); }

  std::vector<char> bytes;
  Result<std::unique_ptr<GgufFile>> file;
};

TEST(Gguf, ReadsEveryTypeOfMetadata) {
  const InMemory gguf(GgufBuilder()
                          .Scalar<uint8_t>("u8", GgufType::kUint8, 200)
                          .Scalar<int8_t>("i8", GgufType::kInt8, -100)
                          .Scalar<uint16_t>("u16", GgufType::kUint16, 60000)
                          .Scalar<int16_t>("i16", GgufType::kInt16, -30000)
                          .Scalar<uint32_t>("u32", GgufType::kUint32, 4000000000u)
                          .Scalar<int32_t>("i32", GgufType::kInt32, -2000000000)
                          .Scalar<uint64_t>("u64", GgufType::kUint64, UINT64_MAX)
                          .Scalar<int64_t>("i64", GgufType::kInt64, INT64_MIN)
                          .Scalar<float>("f32", GgufType::kFloat32, 0.5f)
                          .Scalar<double>("f64", GgufType::kFloat64, 1e300)
                          .Scalar<uint8_t>("yes", GgufType::kBool, 1)
                          .Scalar<uint8_t>("no", GgufType::kBool, 0)
                          .String("text", std::string_view("zero \0 and all", 14))
                          .String("empty", "")
                          .Build());
  ASSERT_TRUE(gguf.file.ok()) << gguf.file.status().message();
  EXPECT_EQ(*gguf->GetUint("u8"), 200u);
  EXPECT_EQ(*gguf->GetInt("i8"), -100);
  EXPECT_EQ(*gguf->GetUint("u16"), 60000u);
  EXPECT_EQ(*gguf->GetInt("i16"), -30000);
  EXPECT_EQ(*gguf->GetUint("u32"), 4000000000u);
  EXPECT_EQ(*gguf->GetInt("u32"), 4000000000);
  EXPECT_EQ(*gguf->GetInt("i32"), -2000000000);
  EXPECT_EQ(*gguf->GetUint("u64"), UINT64_MAX);
  EXPECT_EQ(*gguf->GetInt("i64"), INT64_MIN);
  EXPECT_EQ(*gguf->GetFloat("f32"), 0.5);
  EXPECT_EQ(*gguf->GetFloat("f64"), 1e300);
  EXPECT_TRUE(*gguf->GetBool("yes"));
  EXPECT_FALSE(*gguf->GetBool("no"));
  EXPECT_EQ(*gguf->GetString("text"), std::string_view("zero \0 and all", 14));
  EXPECT_EQ(*gguf->GetString("empty"), "");
  EXPECT_EQ(gguf->metadata().size(), 14u);
  EXPECT_EQ(gguf->metadata()[12].key, "text");
  EXPECT_TRUE(gguf->Has("u8"));
  EXPECT_FALSE(gguf->Has("u"));
}

TEST(Gguf, ReadsArrays) {
  const InMemory gguf(GgufBuilder()
                          .Array<int32_t>("ints", GgufType::kInt32, {1, -2, 3})
                          .Array<uint64_t>("wide", GgufType::kUint64, {7, UINT64_MAX})
                          .Array<uint8_t>("bools", GgufType::kBool, {1, 0, 1})
                          .Array<float>("floats", GgufType::kFloat32, {0.25f, -1.5f})
                          .Array<double>("doubles", GgufType::kFloat64, {0.1})
                          .Strings("tokens", {"a", "", "hello", std::string("\0x", 2)})
                          .Strings("none", {})
                          .Entry("nested", 9,
                                 Bytes()
                                     .Put(9)
                                     .Put<uint64_t>(2)
                                     .Put(4)
                                     .Put<uint64_t>(1)
                                     .Put(5u)
                                     .Put(8)
                                     .Put<uint64_t>(1)
                                     .Sized("in")
                                     .str())
                          .String("after", "still found")
                          .Build());
  ASSERT_TRUE(gguf.file.ok()) << gguf.file.status().message();
  EXPECT_THAT(*gguf->IntArray("ints"), ElementsAre(1, -2, 3));
  EXPECT_THAT(*gguf->IntArray("bools"), ElementsAre(1, 0, 1));
  EXPECT_THAT(*gguf->FloatArray("floats"), ElementsAre(0.25f, -1.5f));
  EXPECT_THAT(*gguf->FloatArray("doubles"), ElementsAre(0.1f));
  EXPECT_THAT(*gguf->StringArray("tokens"),
              ElementsAre("a", "", "hello", std::string_view("\0x", 2)));
  EXPECT_TRUE(gguf->StringArray("none")->empty());
  EXPECT_EQ(*gguf->GetString("after"), "still found");
  EXPECT_EQ(gguf->metadata()[7].element, GgufType::kArray);

  EXPECT_THAT(gguf->IntArray("wide").status().message(), HasSubstr("array of 2 uint64"));
  EXPECT_THAT(gguf->IntArray("nested").status().message(), HasSubstr("array of 2 array"));
  EXPECT_THAT(gguf->StringArray("ints").status().message(),
              HasSubstr("'ints' is array of 3 int32, expected an array of strings"));
  EXPECT_FALSE(gguf->FloatArray("ints").ok());
  EXPECT_FALSE(gguf->GetString("tokens").ok());
}

TEST(Gguf, AccessorsSayWhatTheyFound) {
  const InMemory gguf(GgufBuilder()
                          .Scalar<int32_t>("negative", GgufType::kInt32, -5)
                          .Scalar<uint64_t>("huge", GgufType::kUint64, UINT64_MAX)
                          .Scalar<float>("half", GgufType::kFloat32, 0.5f)
                          .Scalar<uint8_t>("flag", GgufType::kBool, 1)
                          .String("name", "tiny\x1b[31m")
                          .Build());
  ASSERT_TRUE(gguf.file.ok()) << gguf.file.status().message();
  EXPECT_EQ(gguf->GetUint("negative").status().message(),
            "test.gguf: metadata 'negative' is int32 -5, expected an unsigned integer");
  EXPECT_EQ(gguf->GetInt("huge").status().message(),
            "test.gguf: metadata 'huge' is uint64 18446744073709551615, expected an integer below "
            "2^63");
  EXPECT_EQ(gguf->GetUint("half").status().message(),
            "test.gguf: metadata 'half' is float32 0.5, expected an unsigned integer");
  EXPECT_EQ(gguf->GetUint("name").status().message(),
            "test.gguf: metadata 'name' is string 'tiny\\x1b[31m', expected an unsigned integer");
  EXPECT_EQ(gguf->GetString("flag").status().message(),
            "test.gguf: metadata 'flag' is bool true, expected a string");
  EXPECT_EQ(gguf->GetBool("half").status().code(), StatusCode::kCorrupt);
  EXPECT_EQ(gguf->GetFloat("negative").status().code(), StatusCode::kCorrupt);

  EXPECT_EQ(gguf->GetUint("absent").status().code(), StatusCode::kNotFound);
  EXPECT_EQ(gguf->GetUint("absent").status().message(),
            "test.gguf: has no metadata 'absent', expected an unsigned integer");
  EXPECT_EQ(gguf->StringArray("absent").status().code(), StatusCode::kNotFound);

  EXPECT_EQ(*gguf->GetUintOr("absent", 7), 7u);
  EXPECT_EQ(*gguf->GetIntOr("absent", -7), -7);
  EXPECT_EQ(*gguf->GetFloatOr("absent", 0.5), 0.5);
  EXPECT_TRUE(*gguf->GetBoolOr("absent", true));
  EXPECT_EQ(*gguf->GetStringOr("absent", "x"), "x");
  EXPECT_EQ(*gguf->GetIntOr("negative", 7), -5);
  EXPECT_FALSE(gguf->GetUintOr("negative", 7).ok());
}

// The metadata alone, whatever the tensors are, or whether they are there.
TEST(Gguf, ReadsMetadataAlone) {
  GgufBuilder builder;
  builder.Add({"t", {256}, 16, std::string(66, '\0')});  // IQ2_XXS, which is not read
  const std::string bytes = builder.Build();
  const auto* data = reinterpret_cast<const std::byte*>(bytes.data());
  EXPECT_EQ(GgufFile::FromMemory("all", data, bytes.size()).status().code(),
            StatusCode::kUnsupported);
  const auto alone = GgufFile::FromMemory("alone", data, bytes.size(), GgufParts::kMetadata);
  ASSERT_TRUE(alone.ok()) << alone.status().message();
  EXPECT_EQ((*alone)->tensors().size(), 0u);
  // A file that ends where its metadata does.
  const std::string path = OMNIKV_SOURCE_DIR "/tests/io/data/quants.gguf";
  const auto whole = GgufFile::Open(path);
  ASSERT_TRUE(whole.ok());
  const auto head = GgufFile::Open(path, GgufParts::kMetadata);
  ASSERT_TRUE(head.ok());
  EXPECT_EQ((*head)->metadata().size(), (*whole)->metadata().size());
  EXPECT_EQ(*(*head)->GetString("general.architecture"), "test");
}

TEST(Gguf, ReadsTensors) {
  const std::string content = GgufBuilder()
                                  .Add({"matrix", {3, 2}, 0, WithFloats({1, 2, 3, 4, 5, 6})})
                                  .Add({"scalar", {}, 0, WithFloats({7})})
                                  .Add({"blocks", {32, 2, 1, 1}, 8, std::string(68, '\1')})
                                  .Add({"ids", {2}, 27, std::string(16, '\0')})
                                  .Build();
  const TempFolder folder;
  const auto opened = GgufFile::Open(folder.Write("m.gguf", content));
  ASSERT_TRUE(opened.ok()) << opened.status().message();
  const GgufFile& gguf = **opened;
  ASSERT_EQ(gguf.tensors().size(), 4u);
  const TensorView* matrix = gguf.Find("matrix");
  ASSERT_NE(matrix, nullptr);
  EXPECT_EQ(matrix->type, StorageType::kF32);
  EXPECT_THAT(matrix->shape, ElementsAre(2, 3));
  EXPECT_EQ(matrix->NumValues(), 6u);
  std::vector<float> values(3);
  ASSERT_TRUE(gguf.ReadValues(*matrix, 3, 3, DType::kF32, values.data()).ok());
  EXPECT_THAT(values, ElementsAre(4, 5, 6));
  EXPECT_TRUE(gguf.Find("scalar")->shape.empty());
  EXPECT_EQ(gguf.Find("scalar")->bytes, 4u);
  EXPECT_THAT(gguf.Find("blocks")->shape, ElementsAre(1, 1, 2, 32));
  EXPECT_EQ(gguf.Find("blocks")->bytes, 68u);
  EXPECT_EQ(gguf.Find("ids")->type, StorageType::kI64);
  EXPECT_FALSE(IsConvertible(gguf.Find("ids")->type));
  EXPECT_EQ(gguf.Find("matri"), nullptr);

  ASSERT_TRUE(gguf.ReadValues(*matrix, 0, 3, DType::kF32, values.data()).ok());
  EXPECT_THAT(values, ElementsAre(1, 2, 3));
}

TEST(Gguf, TensorsComeInTheOrderOfTheirData) {
  const InMemory gguf(GgufBuilder()
                          .Add({"late", {1}, 0, WithFloats({1}), 64})
                          .Add({"early", {1}, 0, WithFloats({2}), 0})
                          .Add({"", {}, 0, WithFloats({3})})
                          .Build());
  EXPECT_FALSE(gguf.file.ok());  // the nameless one
  const InMemory named(GgufBuilder()
                           .Add({"late", {1}, 0, WithFloats({1}), 32})
                           .Add({"early", {1}, 0, WithFloats({2}), 0})
                           .Build());
  ASSERT_TRUE(named.file.ok()) << named.file.status().message();
  EXPECT_EQ(named->tensors()[0].name, "early");
  EXPECT_EQ(named->tensors()[1].name, "late");
}

TEST(Gguf, TakesVersion2AndOtherAlignments) {
  GgufBuilder builder;
  builder.version = 2;
  builder.alignment = 256;
  builder.Scalar<uint32_t>("general.alignment", GgufType::kUint32, 256)
      .Add({"a", {1}, 0, WithFloats({1})})
      .Add({"b", {1}, 0, WithFloats({2})});
  const InMemory gguf(builder.Build());
  ASSERT_TRUE(gguf.file.ok()) << gguf.file.status().message();
  float b = 0;
  ASSERT_TRUE((*gguf.file)->ReadValues(*gguf->Find("b"), 0, 1, DType::kF32, &b).ok());
  EXPECT_EQ(b, 2);
}

TEST(Gguf, StringsOfAVocabularyAreViewsIntoTheFile) {
  std::vector<std::string> tokens;
  for (int i = 0; i < 150000; ++i) tokens.push_back(std::to_string(i));
  const InMemory gguf(GgufBuilder().Strings("tokens", tokens).Build());
  ASSERT_TRUE(gguf.file.ok()) << gguf.file.status().message();
  const auto read = gguf->StringArray("tokens");
  ASSERT_TRUE(read.ok());
  ASSERT_EQ(read->size(), tokens.size());
  EXPECT_TRUE(std::equal(tokens.begin(), tokens.end(), read->begin()));
  EXPECT_GE((*read)[0].data(), gguf.bytes.data());
  EXPECT_LT((*read)[149999].data(), gguf.bytes.data() + gguf.bytes.size());
}

GgufBuilder OneTensor(GgufBuilder::Tensor tensor) {
  return GgufBuilder().Add(std::move(tensor));
}

std::vector<HostileFile> HostileFiles() {
  using enum StatusCode;
  const std::string f = WithFloats({1});
  const std::string good = GgufBuilder().Strings("k", {"abc"}).Add({"t", {1}, 0, f}).Build();
  std::vector<HostileFile> files = {
      {"nothing", "", kCorrupt, {"begins with ''", "expected 'GGUF'"}},
      {"other magic", "GGML" + good.substr(4), kCorrupt, {"begins with 'GGML'"}},
      {"magic alone", "GGUF", kCorrupt, {"has 4 bytes", "24"}},
      {"cut header", good.substr(0, 23), kCorrupt, {"has 23 bytes", "24"}},
  };
  const auto add = [&files](std::string what, const GgufBuilder& builder, StatusCode code,
                            std::vector<std::string> fragments) {
    files.push_back({std::move(what), builder.Build(), code, std::move(fragments)});
  };
  const auto with = [](auto change) {
    GgufBuilder builder;
    builder.String("k", "v").Add({"t", {1}, 0, WithFloats({1})});
    change(builder);
    return builder;
  };

  add("version 1", with([](auto& b) { b.version = 1; }), kUnsupported,
      {"GGUF version 1", "expected 2 or 3"});
  add("version 4", with([](auto& b) { b.version = 4; }), kUnsupported, {"GGUF version 4"});
  add("big-endian", with([](auto& b) { b.version = 0x03000000; }), kUnsupported,
      {"version 3 in big-endian byte order"});
  add("too many entries", with([](auto& b) { b.n_entries = UINT64_MAX; }), kCorrupt,
      {"claims 18446744073709551615 metadata entries", "at most"});
  add("one entry too many", with([](auto& b) { b.n_entries = 2; }), kCorrupt,
      {"tensor 0 has a name of 0 bytes"});
  add("too many tensors", with([](auto& b) { b.n_tensors = uint64_t{1} << 62; }), kCorrupt,
      {"claims 4611686018427387904 tensors"});
  add("tensors but no infos", with([](auto& b) { b.n_tensors = 2; }), kCorrupt, {"tensor"});

  add("key without end", GgufBuilder().Entry(std::string(20, 'k'), 0, "x"), kCorrupt, {});
  files.back().bytes.resize(24 + 8 + 10);
  files.back().fragments = {"ends inside metadata entry 0"};
  add("key length 2^64 - 1", GgufBuilder(), kCorrupt, {"ends inside metadata entry 0"});
  files.back().bytes =
      Bytes().Raw("GGUF").Put(3).Put<uint64_t>(0).Put<uint64_t>(1).Put(UINT64_MAX).Zeros(32).str();
  add("empty key", GgufBuilder().String("", "x"), kCorrupt, {"entry 0", "0 bytes", "1 to 65535"});
  add("long key", GgufBuilder().String(std::string(65536, 'k'), "x"), kCorrupt,
      {"65536 bytes", "1 to 65535"});
  add("no value type", GgufBuilder().Entry("key", 0, "x"), kCorrupt,
      {"'key'", "ends with the file"});
  files.back().bytes =
      Bytes().Raw("GGUF").Put(3).Put<uint64_t>(0).Put<uint64_t>(1).Sized("key").Zeros(3).str();
  add("value type 13", GgufBuilder().Entry("key", 13, "xxxxxxxx"), kCorrupt,
      {"metadata 'key' has type 13", "0 to 12"});
  add("cut value", GgufBuilder().Entry("key", 10, "1234567"), kCorrupt,
      {"'key' has a value that runs past the end"});
  add("cut string", GgufBuilder().Entry("key", 8, Bytes().Put<uint64_t>(5).Raw("1234").str()),
      kCorrupt, {"'key' has a value that runs past the end"});
  add("string length 2^64 - 8", GgufBuilder().Entry("key", 8, Bytes().Put(UINT64_MAX - 7).str()),
      kCorrupt, {"'key' has a value that runs past the end"});
  add("bool of 2", GgufBuilder().Scalar<uint8_t>("key", GgufType::kBool, 2), kCorrupt,
      {"'key' has a bool of 2", "0 or 1"});
  add("bool of 255 in an array", GgufBuilder().Array<uint8_t>("key", GgufType::kBool, {0, 255}),
      kCorrupt, {"'key' has a bool of 255"});
  add("cut array header", GgufBuilder().Entry("key", 9, Bytes().Put(4).Put(1).str()), kCorrupt,
      {"'key' has a value that runs past the end"});
  add("array element 77", GgufBuilder().Entry("key", 9, Bytes().Put(77).Put<uint64_t>(0).str()),
      kCorrupt, {"'key' has array elements of type 77", "0 to 12"});
  add("cut array", GgufBuilder().Entry("key", 9, Bytes().Put(4).Put<uint64_t>(3).Zeros(11).str()),
      kCorrupt, {"'key' has a value that runs past the end"});
  add("array of 2^62 uint64",
      GgufBuilder().Entry("key", 9, Bytes().Put(10).Put(uint64_t{1} << 62).str()), kCorrupt,
      {"'key' has an array of 4611686018427387904", "at most 67108864"});
  add("array of strings, one cut",
      GgufBuilder().Entry("key", 9, Bytes().Put(8).Put<uint64_t>(2).Sized("ok").Put(99L).str()),
      kCorrupt, {"'key' has a value that runs past the end"});
  Bytes deep;
  for (int i = 0; i < 100; ++i) deep.Put(9).Put<uint64_t>(1);
  add("arrays 100 deep", GgufBuilder().Entry("key", 9, deep.str()), kCorrupt,
      {"'key' has arrays nested deeper than 4"});
  add("nested element 13",
      GgufBuilder().Entry("key", 9, Bytes().Put(9).Put<uint64_t>(1).Put(13).Put<uint64_t>(0).str()),
      kCorrupt, {"'key' has array elements of type 13"});
  add("nested array cut", GgufBuilder().Entry("key", 9, Bytes().Put(9).Put<uint64_t>(1).str()),
      kCorrupt, {"'key' has a value that runs past the end"});
  add("a key twice", GgufBuilder().String("twice", "a").String("once", "b").String("twice", "c"),
      kCorrupt, {"metadata 'twice' twice", "expected it once"});
  add("alignment 0", GgufBuilder().Scalar<uint32_t>("general.alignment", GgufType::kUint32, 0),
      kCorrupt, {"general.alignment of 0", "power of two from 8 to 1048576"});
  add("alignment 48", GgufBuilder().Scalar<uint32_t>("general.alignment", GgufType::kUint32, 48),
      kCorrupt, {"general.alignment of 48"});
  add("alignment 2^31",
      GgufBuilder().Scalar<uint32_t>("general.alignment", GgufType::kUint32, 1u << 31), kCorrupt,
      {"general.alignment of 2147483648"});
  add("alignment -32", GgufBuilder().Scalar<int32_t>("general.alignment", GgufType::kInt32, -32),
      kCorrupt, {"'general.alignment' is int32 -32"});
  add("alignment as a string", GgufBuilder().String("general.alignment", "32"), kCorrupt,
      {"'general.alignment' is string '32'"});
  add("one part of three", GgufBuilder().Scalar<uint16_t>("split.count", GgufType::kUint16, 3),
      kUnsupported, {"one of 3 parts", "whole file"});

  add("nameless tensor", OneTensor({"", {1}, 0, f}), kCorrupt, {"tensor 0", "0 bytes"});
  add("5 dimensions", OneTensor({"t", {1, 1, 1, 1, 1}, 0, f}), kCorrupt,
      {"tensor 't' has 5 dimensions", "at most 4"});
  add("a dimension of 0", OneTensor({"t", {4, 0}, 0, ""}), kCorrupt,
      {"tensor 't' has dimension 1 of 0"});
  add("a dimension of 2^63", OneTensor({"t", {uint64_t{1} << 63}, 0, f}), kCorrupt,
      {"tensor 't' has dimension 0 of 9223372036854775808"});
  add("sizes that wrap to 0", OneTensor({"t", {uint64_t{1} << 32, uint64_t{1} << 32}, 24, f}),
      kCorrupt, {"tensor 't' has shape [4294967296, 4294967296]", "overflows"});
  add("sizes that wrap in bytes", OneTensor({"t", {uint64_t{1} << 62}, 0, f}), kCorrupt,
      {"tensor 't'", "overflows"});
  add("ggml type 4, removed long ago", OneTensor({"t", {32}, 4, f}), kUnsupported,
      {"tensor 't' has ggml type 4,"});
  add("ggml type IQ2_XXS", OneTensor({"t", {256}, 16, f}), kUnsupported,
      {"tensor 't' has ggml type 16 (IQ2_XXS)", "expected F32"});
  add("ggml type MXFP4", OneTensor({"t", {32}, 39, f}), kUnsupported, {"ggml type 39 (MXFP4)"});
  add("ggml type 2^32 - 1", OneTensor({"t", {32}, UINT32_MAX, f}), kUnsupported,
      {"ggml type 4294967295"});
  add("half a block", OneTensor({"t", {48, 2}, 8, std::string(102, '\0')}), kCorrupt,
      {"tensor 't' has rows of 48 values", "whole blocks of 32 for Q8_0"});
  add("half a K block", OneTensor({"t", {128, 2}, 12, std::string(144, '\0')}), kCorrupt,
      {"tensor 't' has rows of 128 values", "256 for Q4_K"});
  add("a scalar of blocks", OneTensor({"t", {}, 8, std::string(34, '\0')}), kCorrupt,
      {"tensor 't' has rows of 1 values"});
  add("a crooked offset", OneTensor({"t", {1}, 0, std::string(64, '\0'), 4}), kCorrupt,
      {"tensor 't' at offset 4 is not aligned", "multiple of 32"});
  add("an offset past the end", OneTensor({"t", {1}, 0, f, 64}), kCorrupt,
      {"tensor 't' at offset 64 has 4 bytes", "32 bytes"});
  add("an offset of 2^64 - 32", OneTensor({"t", {16}, 0, f, UINT64_MAX - 31}), kCorrupt,
      {"tensor 't' at offset 18446744073709551584"});
  add("data past the end", OneTensor({"t", {1000}, 0, f}), kCorrupt,
      {"tensor 't' at offset 0 has 4000 bytes", "32 bytes"});
  add("tensors that overlap",
      GgufBuilder()
          .Add({"a", {16}, 0, std::string(64, '\0'), 0})
          .Add({"b", {16}, 0, std::string(64, '\0'), 32}),
      kCorrupt, {"tensor 'b' at offset 32 overlaps 'a'", "at least 64"});
  add("a tensor twice", GgufBuilder().Add({"same", {1}, 0, f}).Add({"same", {1}, 0, f}), kCorrupt,
      {"two tensors named 'same'"});
  add("a name for terminals", OneTensor({"\x1b]0;gotcha\a", {1}, 99, f}), kUnsupported,
      {"tensor '\\x1b]0;gotcha\\x07'"});
  add("a name of 60000 bytes", OneTensor({std::string(60000, 'n'), {1}, 99, f}), kUnsupported,
      {std::string(100, 'n') + "...' has ggml type 99"});
  return files;
}

TEST(Gguf, RefusesHostileFiles) {
  const std::vector<HostileFile> files = HostileFiles();
  EXPECT_GE(files.size(), 40u);
  for (const HostileFile& file : files) {
    SCOPED_TRACE(file.what);
    const InMemory gguf(file.bytes);
    if (gguf.file.ok()) {
      ADD_FAILURE() << "was accepted";
      continue;
    }
    const std::string& message = gguf.file.status().message();
    EXPECT_EQ(gguf.file.status().code(), file.code) << message;
    EXPECT_THAT(message, testing::StartsWith("test.gguf: "));
    EXPECT_LT(message.size(), 300u);
    for (const std::string& fragment : file.fragments) EXPECT_THAT(message, HasSubstr(fragment));
  }
}

// Every prefix of a good file is refused, and none reads past its end (ASan watches).
TEST(Gguf, RefusesEveryTruncation) {
  const std::string good = GgufBuilder()
                               .Strings("tokens", {"a", "bc"})
                               .Scalar<uint32_t>("n", GgufType::kUint32, 3)
                               .Add({"t", {32, 2}, 8, std::string(68, '\1')})
                               .Build();
  const size_t end = good.size() - (32 - 68 % 32) % 32;  // the padding at the end may be missing
  for (size_t n = 0; n < end; ++n) {
    EXPECT_FALSE(InMemory(good.substr(0, n)).file.ok()) << n << " of " << good.size() << " bytes";
  }
  EXPECT_TRUE(InMemory(good.substr(0, end)).file.ok());
}

TEST(Gguf, OpenNamesWhatIsWrongWithThePath) {
  const TempFolder folder;
  EXPECT_EQ(GgufFile::Open(folder.path() + "/none.gguf").status().code(), StatusCode::kNotFound);
  EXPECT_EQ(GgufFile::Open(folder.path()).status().code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(GgufFile::Open(folder.Write("x.gguf", "no model")).status().message(),
              HasSubstr("/x.gguf: begins with 'no m', expected 'GGUF'"));
}

}  // namespace
}  // namespace omnikv::gguf_test
