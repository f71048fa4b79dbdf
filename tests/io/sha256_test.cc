// The values that FIPS 180-4 and its examples give.
#include "io/sha256.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <string_view>

namespace omnikv::sha256_test {
namespace {

std::string HexOfText(std::string_view text, size_t piece) {
  Sha256 sum;
  for (size_t at = 0; at < text.size(); at += piece) {
    const std::string_view part = text.substr(at, piece);
    sum.Add(part.data(), part.size());
  }
  return HexOf(sum.Value());
}

TEST(Sha256Test, KnownValues) {
  for (const size_t piece : {size_t{1}, size_t{7}, size_t{64}, size_t{1000}}) {
    EXPECT_EQ(HexOfText("", piece),
              "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    EXPECT_EQ(HexOfText("abc", piece),
              "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    EXPECT_EQ(HexOfText("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq", piece),
              "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
    EXPECT_EQ(HexOfText(std::string(1'000'000, 'a'), piece),
              "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
  }
}

TEST(Sha256Test, TheLengthIsAddedWhereverItFalls) {
  // Of 55, 56, 63, 64 and 65 bytes: around the end of a block.
  EXPECT_EQ(HexOfText(std::string(55, 'a'), 64),
            "9f4390f8d30c2dd92ec9f095b65e2b9ae9b0a925a5258e241c9f1e910f734318");
  EXPECT_EQ(HexOfText(std::string(56, 'a'), 64),
            "b35439a4ac6f0948b6d6f9e3c6af0f5f590ce20f1bde7090ef7970686ec6738a");
  EXPECT_EQ(HexOfText(std::string(63, 'a'), 64),
            "7d3e74a05d7db15bce4ad9ec0658ea98e3f06eeecf16b4c6fff2da457ddc2f34");
  EXPECT_EQ(HexOfText(std::string(64, 'a'), 64),
            "ffe054fe7ae0cb6dc65c3af9b61d5209f439851db43d0ba5997337df154668eb");
  EXPECT_EQ(HexOfText(std::string(65, 'a'), 64),
            "635361c48bb9eab14198e76ea8ab7f1a41685d6ad62aa9146d301d4f17eb0ae0");
}

}  // namespace
}  // namespace omnikv::sha256_test
