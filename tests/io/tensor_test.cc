#include "io/tensor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cstring>
#include <limits>
#include <random>

#include "builders.h"
#include "io/gguf.h"

namespace omnikv::tensor_test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

constexpr StorageType kConvertible[] = {
    StorageType::kF32,  StorageType::kF16,  StorageType::kBF16, StorageType::kQ8_0,
    StorageType::kQ4_0, StorageType::kQ4_1, StorageType::kQ5_0, StorageType::kQ5_1,
    StorageType::kQ2_K, StorageType::kQ3_K, StorageType::kQ4_K, StorageType::kQ5_K,
    StorageType::kQ6_K,
};

TEST(StorageType, NativeTypesAgreeWithBase) {
  size_t native = 0;
  for (const StorageType type : kConvertible) {
    EXPECT_TRUE(IsConvertible(type));
    const auto dtype = NativeDType(type);
    if (!dtype) continue;
    ++native;
    EXPECT_EQ(DTypeBytes(*dtype, 256), 256 / BlockValues(type) * BlockBytes(type));
  }
  EXPECT_EQ(native, 4u);
  EXPECT_FALSE(IsConvertible(StorageType::kF64));
  EXPECT_FALSE(NativeDType(StorageType::kI8).has_value());
}

TEST(StorageBytes, CountsWholeBlocks) {
  const auto bytes = [](StorageType type, std::vector<int64_t> shape) {
    return StorageBytes(type, shape);
  };
  EXPECT_EQ(*bytes(StorageType::kF32, {}), 4u);
  EXPECT_EQ(*bytes(StorageType::kF16, {3, 5}), 30u);
  EXPECT_EQ(*bytes(StorageType::kF16, {3, 0}), 0u);
  EXPECT_EQ(*bytes(StorageType::kQ6_K, {2, 512}), 840u);
  EXPECT_EQ(*bytes(StorageType::kF4, {3, 2}), 3u);
  EXPECT_THAT(bytes(StorageType::kQ8_0, {7}).status().message(),
              HasSubstr("has shape [7] of type Q8_0, expected whole blocks of 32 values"));
  EXPECT_THAT(bytes(StorageType::kF32, {-1, 4}).status().message(), HasSubstr("no negative"));
  EXPECT_THAT(bytes(StorageType::kU8, {INT64_MAX, 2}).status().message(), HasSubstr("overflows"));
  EXPECT_TRUE(bytes(StorageType::kU8, {INT64_MAX}).ok());
}

// tests/io/data/quants.gguf: see scripts/make_io_goldens.py.
class Goldens : public testing::Test {
 protected:
  void SetUp() override {
    auto file = GgufFile::Open(OMNIKV_SOURCE_DIR "/tests/io/data/quants.gguf");
    ASSERT_TRUE(file.ok()) << file.status().message();
    gguf_ = std::move(*file);
  }
  std::unique_ptr<GgufFile> gguf_;
};

// Bit for bit: the values are one rounded product, or a product and a sum, in the order of ggml.
TEST_F(Goldens, EveryTypeGivesTheReferenceValues) {
  size_t seen = 0;
  for (const StorageType type : kConvertible) {
    if (type == StorageType::kF32) continue;
    const std::string name(StorageTypeName(type));
    SCOPED_TRACE(name);
    const TensorView* tensor = gguf_->Find(name);
    const TensorView* reference = gguf_->Find(name + ".f32");
    ASSERT_NE(tensor, nullptr);
    ASSERT_NE(reference, nullptr);
    ASSERT_EQ(tensor->type, type);
    ASSERT_EQ(tensor->shape, reference->shape);
    const size_t n = reference->NumValues();
    std::vector<float> expected(n), values(n);
    ASSERT_TRUE(gguf_->Read(*reference, 0, 4 * n, expected.data()).ok());
    ASSERT_TRUE(gguf_->ReadValues(*tensor, 0, n, DType::kF32, values.data()).ok());
    for (size_t i = 0; i < n; ++i) {
      ASSERT_EQ(std::bit_cast<uint32_t>(values[i]), std::bit_cast<uint32_t>(expected[i]))
          << "value " << i << ": " << values[i] << ", expected " << expected[i];
    }
    ++seen;

    // One row alone, and the narrow types, which round what f32 holds.
    const auto row = static_cast<size_t>(tensor->shape.back());
    const size_t first = n - row;
    values.assign(row, 0);
    ASSERT_TRUE(gguf_->ReadValues(*tensor, first, row, DType::kF32, values.data()).ok());
    EXPECT_EQ(std::memcmp(values.data(), expected.data() + first, 4 * row), 0);
    for (const DType out : {DType::kF16, DType::kBF16}) {
      std::vector<uint16_t> narrow(n), rounded(n);
      ASSERT_TRUE(gguf_->ReadValues(*tensor, 0, n, out, narrow.data()).ok());
      for (size_t i = 0; i < n; ++i) StoreFromF32(out, rounded.data(), i, expected[i]);
      EXPECT_EQ(narrow, rounded) << DTypeName(out);
    }
  }
  EXPECT_EQ(seen, 12u);
}

TEST_F(Goldens, Q8AgreesWithBase) {
  const TensorView* tensor = gguf_->Find("Q8_0");
  ASSERT_NE(tensor, nullptr);
  std::vector<float> values(tensor->NumValues());
  ASSERT_TRUE(gguf_->ReadValues(*tensor, 0, values.size(), DType::kF32, values.data()).ok());
  std::vector<std::byte> stored(tensor->bytes);
  ASSERT_TRUE(gguf_->Read(*tensor, 0, stored.size(), stored.data()).ok());
  for (size_t i = 0; i < values.size(); ++i) {
    ASSERT_EQ(values[i], LoadAsF32(DType::kQ8_0, stored.data(), i)) << i;
  }
}

// The file was written by another implementation of the format.
TEST_F(Goldens, MetadataOfEveryType) {
  EXPECT_EQ(*gguf_->GetUint("general.alignment"), 64u);
  EXPECT_EQ(*gguf_->GetString("general.architecture"), "test");
  EXPECT_EQ(*gguf_->GetUint("test.uint8"), 255u);
  EXPECT_EQ(*gguf_->GetInt("test.int8"), -128);
  EXPECT_EQ(*gguf_->GetUint("test.uint16"), 65535u);
  EXPECT_EQ(*gguf_->GetInt("test.int16"), -32768);
  EXPECT_EQ(*gguf_->GetUint("test.uint32"), 4294967295u);
  EXPECT_EQ(*gguf_->GetInt("test.int32"), -2147483648);
  EXPECT_EQ(*gguf_->GetUint("test.uint64"), UINT64_MAX);
  EXPECT_EQ(*gguf_->GetInt("test.int64"), INT64_MIN);
  EXPECT_EQ(*gguf_->GetFloat("test.float32"), 0.1f);
  EXPECT_EQ(*gguf_->GetFloat("test.float64"), 0.1);
  EXPECT_TRUE(*gguf_->GetBool("test.bool"));
  EXPECT_EQ(*gguf_->GetString("test.string"),
            "gr\xc3\xbc\xc3\x9f"
            "e \xf0\x9f\x99\x82");
  EXPECT_THAT(*gguf_->IntArray("test.ints"), ElementsAre(1, -2, 3));
  EXPECT_THAT(*gguf_->FloatArray("test.floats"), ElementsAre(0.5f, -0.25f));
  EXPECT_THAT(*gguf_->StringArray("test.strings"), ElementsAre("", "a", "\xe2\x96\x81the"));
  EXPECT_THAT(*gguf_->IntArray("test.bools"), ElementsAre(1, 0));
  EXPECT_THAT(*gguf_->IntArray("test.bytes"), ElementsAre(0, 127, 255));
}

void Convert(StorageType type, const void* from, size_t n, DType out, void* to) {
  ConvertValues(type, static_cast<const std::byte*>(from), n, out, to);
}

TEST(ConvertValues, WidensEveryHalf) {
  // All 65,536 patterns, from an odd address as a safetensors file may have it.
  constexpr size_t kN = 65536;
  std::vector<char> bytes(2 * kN + 1);
  for (size_t i = 0; i < kN; ++i) {
    const auto h = static_cast<uint16_t>(i);
    std::memcpy(&bytes[1 + 2 * i], &h, 2);
  }
  std::vector<uint32_t> values(kN);
  Convert(StorageType::kF16, &bytes[1], kN, DType::kF32, values.data());
  for (size_t i = 0; i < kN; ++i) {
    ASSERT_EQ(values[i], std::bit_cast<uint32_t>(F32FromF16(static_cast<F16>(i)))) << i;
  }
  Convert(StorageType::kBF16, &bytes[1], kN, DType::kF32, values.data());
  for (size_t i = 0; i < kN; ++i) {
    ASSERT_EQ(values[i], static_cast<uint32_t>(i) << 16) << i;
  }
  // The same type comes out as it went in, NaN payloads and all.
  std::vector<uint16_t> copy(kN);
  Convert(StorageType::kF16, &bytes[1], kN, DType::kF16, copy.data());
  EXPECT_EQ(std::memcmp(copy.data(), &bytes[1], 2 * kN), 0);
}

TEST(ConvertValues, NarrowsAsBaseDoes) {
  // Every exponent, mantissas around every tie of both narrow types, and random ones; a length that
  // is no multiple of any chunk.
  std::vector<uint32_t> bits;
  std::mt19937 random(1);
  for (uint32_t high = 0; high < 65536; high += 1 + (high & 3)) {
    for (const uint32_t low : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0x1000u, 0xffffu}) {
      bits.push_back(high << 16 | low);
    }
    bits.push_back(high << 16 | (random() & 0xffff));
  }
  bits.resize(bits.size() / 2048 * 2048 - 4);
  const size_t n = bits.size();
  std::vector<uint16_t> values(n - 3);
  for (const DType out : {DType::kF16, DType::kBF16}) {
    Convert(StorageType::kF32, &bits[3], n - 3, out, values.data());
    for (size_t i = 3; i < n; ++i) {
      const auto f = std::bit_cast<float>(bits[i]);
      const uint16_t expected = out == DType::kF16 ? F16FromF32(f) : Bf16FromF32(f);
      ASSERT_EQ(values[i - 3], expected) << DTypeName(out) << " of " << f;
    }
  }
}

TEST(ConvertValues, CrossesBetweenNarrowTypes) {
  const uint16_t halves[] = {0x3c00, 0x3c01, 0x7bff, 0x0001, 0xfc00, 0xbc18};
  uint16_t bf16[6];
  Convert(StorageType::kF16, halves, 6, DType::kBF16, bf16);
  EXPECT_THAT(bf16, ElementsAre(0x3f80, 0x3f80, 0x4780, 0x3380, 0xff80, 0xbf83));
}

TEST(ConvertValuesDeathTest, ChecksItsCaller) {
  const std::vector<std::byte> bytes(68);
  const TensorView q8{.name = "t", .type = StorageType::kQ8_0, .shape = {64}, .bytes = 68};
  const auto source = GgufFile::Open(OMNIKV_SOURCE_DIR "/tests/io/data/quants.gguf");
  ASSERT_TRUE(source.ok());
  float out[64];
  EXPECT_DEATH(static_cast<void>((*source)->ReadValues(q8, 16, 32, DType::kF32, out)),
               "blocks of 32");
  EXPECT_DEATH(static_cast<void>((*source)->ReadValues(q8, 32, 64, DType::kF32, out)),
               "34 \\+ 68 of 68");
  EXPECT_DEATH(Convert(StorageType::kQ8_0, bytes.data(), 16, DType::kF32, out), "blocks of 32");
  EXPECT_DEATH(Convert(StorageType::kQ8_0, bytes.data(), 64, DType::kQ8_0, out), "check failed");
  EXPECT_DEATH(Convert(StorageType::kI64, bytes.data(), 8, DType::kF32, out),
               "I64 is not convertible");
}

}  // namespace
}  // namespace omnikv::tensor_test
