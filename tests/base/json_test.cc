// JSON of files is bounded while it is read.
#include "base/json.h"

#include <gtest/gtest.h>

namespace omnikv::json_test {
namespace {

std::string Message(const std::string& text, const JsonLimits& limits = {}) {
  return ParseJson(text, limits).status().message();
}

TEST(Json, ReadsWhatTheLibraryReads) {
  const std::string text =
      R"({"a": [1, -2, 3.5, 18446744073709551615, true, null, "x\u00e9"], "b": {"c": {}, "d": []}})";
  const auto json = ParseJson(text);
  ASSERT_TRUE(json.ok()) << json.status().message();
  EXPECT_EQ(*json, nlohmann::json::parse(text));
  EXPECT_EQ(*ParseJson(R"({"a": 1, "a": 2})"), nlohmann::json::parse(R"({"a": 2})"));
  EXPECT_EQ(*ParseJson("7"), nlohmann::json(7));
}

TEST(Json, NamesThePlace) {
  EXPECT_EQ(Message("{\"a\": 1,"), "is not JSON: its 8 bytes end in the middle");
  EXPECT_EQ(Message(""), "is not JSON: its 0 bytes end in the middle");
  EXPECT_EQ(Message("{\"a\": x}"), "is not JSON from byte 7 of 8 on");
  EXPECT_NE(Message("[1e999]").find("too large"), std::string::npos);
}

TEST(Json, IsBounded) {
  EXPECT_EQ(Message(std::string(20'000'000, '[')), "nests deeper than 64 levels");
  std::string nested;
  for (int i = 0; i < 100; ++i) nested += "{\"a\":";
  EXPECT_EQ(Message(nested), "nests deeper than 64 levels");
  const std::string four = "[1, {\"a\": 2}]";
  EXPECT_TRUE(ParseJson(four, {.max_values = 4}).ok());
  EXPECT_EQ(Message(four, {.max_values = 3}), "holds more than 3 values");
}

}  // namespace
}  // namespace omnikv::json_test
