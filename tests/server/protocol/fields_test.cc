#include "server/protocol/fields.h"

#include "server/protocol/model_name.h"
#include "sse.h"

namespace omnikv::server::fields_test {
namespace {

std::string BodyMistake(std::string_view text, const JsonLimits& limits = {}) {
  const auto body = ParseBody(text, limits);
  EXPECT_EQ(body.status().code(), StatusCode::kInvalidArgument);
  return body.status().message();
}

TEST(Fields, BodiesKeepTheOrderOfKeys) {
  EXPECT_EQ(Dump(J(R"({"z": 1, "a": {"y": [], "b": [1, -2, 2.5, true, null, "\u00e9"]}})")),
            R"({"z":1,"a":{"y":[],"b":[1,-2,2.5,true,null,"é"]}})");
  EXPECT_EQ(Dump(J(R"({"a": 1, "b": 2, "a": [3]})")), R"({"a":[3],"b":2})");
}

TEST(Fields, BodiesAreBounded) {
  EXPECT_EQ(BodyMistake("{\"a\": 1,"), "the body is not JSON: its 8 bytes end in the middle");
  EXPECT_EQ(BodyMistake("{\"a\": x}"), "the body is not JSON from byte 7 of 8 on");
  EXPECT_EQ(BodyMistake("[1e999]"), "the body has a number that is too large before byte 6 of 7");
  EXPECT_EQ(BodyMistake(std::string(1000, '[')), "the body nests deeper than 64 levels");
  EXPECT_EQ(BodyMistake("[1, 2]", {.max_values = 2}), "the body holds more than 2 values");
}

TEST(Fields, ManyKeysOfOneObjectTakeTimeOfTheirNumberOnly) {
  std::string text = "{";
  for (int i = 0; i < 300'000; ++i) text += "\"k" + std::to_string(i) + "\":1,";
  text += "\"k0\":2}";
  EXPECT_EQ(J(text).size(), 300'000U);
}

TEST(Fields, OneSentenceForEachMistake) {
  const Json json = J(R"({"b": 1, "i": 2.5, "n": "x", "s": [1, 2], "o": "y", "a": {}, "w": "z",
                          "big": 18446744073709551615, "whole": 3.0, "null": null})");
  const auto mistake = [&](auto read) {
    FieldReader reader(json, "p.");
    read(&reader);
    return reader.status().message();
  };
  bool flag = false;
  int64_t number = 0;
  double real = 0;
  std::string text;
  EXPECT_EQ(mistake([&](auto* r) { r->Bool("b", &flag); }), "`p.b` is 1, expected true or false");
  EXPECT_EQ(mistake([&](auto* r) { r->Int("i", 0, 9, &number); }),
            "`p.i` is 2.5, expected a whole number from 0 to 9");
  EXPECT_EQ(mistake([&](auto* r) { r->Int("b", 2, 9, &number); }),
            "`p.b` is 1, expected a whole number from 2 to 9");
  EXPECT_EQ(mistake([&](auto* r) { r->Int("big", 0, INT64_MAX, &number, "less"); }),
            "`p.big` is 18446744073709551615, expected less");
  EXPECT_EQ(mistake([&](auto* r) { r->Number("n", 0, 1, &real); }),
            "`p.n` is 'x', expected a number from 0 to 1");
  EXPECT_EQ(mistake([&](auto* r) { r->String("s", &text); }),
            "`p.s` is an array of 2, expected a text");
  EXPECT_EQ(mistake([&](auto* r) { r->Object("o"); }), "`p.o` is 'y', expected an object");
  EXPECT_EQ(mistake([&](auto* r) { r->Array("a"); }), "`p.a` is an object, expected an array");
  EXPECT_EQ(mistake([&](auto* r) {
              r->Word("w", {"k", "l", "m"}, &text);
            }),
            "`p.w` is 'z', expected k, l or m");
  EXPECT_EQ(mistake([&](auto* r) { r->Fail("none", "one"); }), "`p.none` is missing, expected one");
  EXPECT_EQ(mistake([&](auto* r) { r->Refuse("b", "why"); }), "`p.b` is not supported here: why");
  // the first mistake stays
  EXPECT_EQ(mistake([&](auto* r) {
              r->Bool("b", &flag);
              r->Object("o");
            }),
            "`p.b` is 1, expected true or false");
  FieldReader fine(json);
  EXPECT_TRUE(fine.Int("whole", 0, 9, &number));
  EXPECT_EQ(number, 3);
  EXPECT_FALSE(fine.Bool("null", &flag));
  fine.Refuse("null", "why");
  EXPECT_TRUE(fine.ok());
  EXPECT_EQ(FieldReader(J("[1]")).status().message(),
            "the body is an array of 1, expected an object");
  const Json three = 3;
  EXPECT_EQ(FieldReader(three, "x.y.").status().message(), "`x.y` is 3, expected an object");
}

TEST(Fields, ErrorsNameTheField) {
  EXPECT_EQ(Dump(OpenAiError(InvalidArgument("`n` is 0, expected more"))),
            R"({"error":{"message":"`n` is 0, expected more","type":"invalid_request_error",)"
            R"("param":"n","code":null}})");
  EXPECT_EQ(Dump(OpenAiError(NotFound("no model x"))),
            R"({"error":{"message":"no model x","type":"not_found_error","param":null,)"
            R"("code":"not_found"}})");
  EXPECT_EQ(OpenAiError(ResourceExhausted("full"))["error"]["type"], "overloaded_error");
  EXPECT_EQ(OpenAiError(Failed("disk"))["error"]["type"], "server_error");
  EXPECT_EQ(HttpStatus(StatusCode::kInvalidArgument), 400);
  EXPECT_EQ(HttpStatus(StatusCode::kResourceExhausted), 503);
  EXPECT_EQ(HttpStatus(StatusCode::kFailed), 500);
}

TEST(Fields, BytesThatAreNoTextGoOutReplaced) {
  EXPECT_EQ(DataEvent(Json("a\xff"
                           "b")),
            "data: \"a\xEF\xBF\xBD"
            "b\"\n\n");
}

TEST(ModelName, HoldsAPolicy) {
  const auto model = ParseModelName("org/m@7@omnikv:budget=2048,tail=64,x=a=b,y=");
  ASSERT_TRUE(model.ok());
  EXPECT_EQ(model->name, "org/m@7");
  EXPECT_EQ(model->policy, "omnikv");
  const std::vector<std::pair<std::string, std::string>> settings = {
      {"budget", "2048"}, {"tail", "64"}, {"x", "a=b"}, {"y", ""}};
  EXPECT_EQ(model->settings, settings);
  EXPECT_EQ(ParseModelName("m:7b")->name, "m:7b");
  EXPECT_EQ(ParseModelName("@full")->policy, "full");
  EXPECT_EQ(ParseModelName("")->name, "");
  for (const std::string wrong : {"m@", "m@:a=1", "m@p:", "m@p:a", "m@p:=1", "m@p:a=1,"}) {
    EXPECT_EQ(ParseModelName(wrong).status().message(),
              "`model` is '" + wrong + "', expected NAME@POLICY:KEY=VALUE,KEY=VALUE");
  }
}

}  // namespace
}  // namespace omnikv::server::fields_test
