// What schemas may say, and how the rest is refused.
#include "server/grammar/schema.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "server/protocol/fields.h"

namespace omnikv::server::schema_test {
namespace {

using ::testing::HasSubstr;

Status Check(const std::string& text) {
  Json schema;
  EXPECT_TRUE(ParseText(text, &schema)) << text;
  return CheckSchema(schema);
}
std::string Plain(const std::string& text) {
  Json schema;
  EXPECT_TRUE(ParseText(text, &schema)) << text;
  auto plain = MakePlain(schema);
  return plain.ok() ? plain->json.dump() : plain.status().message();
}

struct Case {
  const char* schema;
  StatusCode code;
  const char* says;
};

class Refused : public ::testing::TestWithParam<Case> {};

TEST_P(Refused, SaysWhere) {
  const Status status = Check(GetParam().schema);
  EXPECT_EQ(status.code(), GetParam().code) << GetParam().schema << " " << status.message();
  EXPECT_THAT(status.message(), HasSubstr(GetParam().says));
}

constexpr StatusCode kBad = StatusCode::kInvalidArgument;
constexpr StatusCode kNot = StatusCode::kUnsupported;
constexpr StatusCode kMuch = StatusCode::kResourceExhausted;

INSTANTIATE_TEST_SUITE_P(
    Schemas, Refused,
    ::testing::Values(
        Case{"[]", kBad, "the schema is no object"}, Case{"false", kBad, "which no value fits"},
        Case{R"({"not": {}})", kNot, "`not` is not supported"},
        Case{R"({"if": {}, "then": {}})", kNot, "`if` is not supported"},
        Case{R"({"type": "array", "uniqueItems": true})", kNot, "`uniqueItems`"},
        Case{R"({"type": "array", "contains": {}})", kNot, "`contains`"},
        Case{R"({"properties": {"a": {"dependentRequired": {}}}})", kNot,
             "`properties.a.dependentRequired`"},
        Case{R"({"unevaluatedProperties": false})", kNot, "`unevaluatedProperties`"},
        Case{R"({"allOf": [{"type": "string"}, {"maxLength": 3}]})", kNot, "`allOf` of more"},
        Case{R"({"anyOf": [{}], "type": "string"})", kNot, "`type` beside anyOf"},
        Case{R"({"$ref": "#/$defs/a", "type": "string", "$defs": {"a": {}}})", kNot,
             "`type` beside $ref"},
        Case{R"({"enum": ["a"], "maxLength": 3})", kNot, "`maxLength` beside enum"},
        Case{R"({"enum": ["a"], "type": "integer"})", kBad, "has no value of the type"},
        Case{R"({"enum": []})", kBad, "expected an array of values"},
        Case{R"({"const": 18446744073709551615})", kNot, "expected integers up to"},
        Case{R"({"oneOf": [{"type": "integer"}, {"type": "number"}]})", kNot, "0 and 1"},
        Case{R"({"oneOf": [{"enum": [1, 2]}, {"enum": [2.0]}]})", kNot, "one value might fit two"},
        Case{R"({"$ref": "other.json"})", kNot, "expected a place in the same schema"},
        Case{R"({"$ref": "#name"})", kNot, "expected a place in the same schema"},
        Case{R"({"$ref": "#/$defs/none"})", kBad, "which is not in the schema"},
        Case{R"({"$ref": "#"})", kBad, "the same as itself"},
        Case{R"({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {}]}}})",
             kBad, "the same as itself"},
        Case{R"({"properties": {"a": {"$ref": "#"}}, "required": ["a"]})", kBad,
             "holds itself, always"},
        Case{R"({"type": "array", "items": {"$ref": "#"}, "minItems": 1})", kBad,
             "holds itself, always"},
        Case{R"({"type": "text"})", kBad, "`type` is 'text'"},
        Case{R"({"type": ["string", 3]})", kBad, "`type` is 3"},
        Case{R"({"minLength": 3, "minimum": 4})", kNot, "`type` is missing"},
        Case{R"({"type": "string", "pattern": "a", "maxLength": 3})", kNot, "beside pattern"},
        Case{R"({"type": "string", "format": "date", "minLength": 3})", kNot, "beside format"},
        Case{R"({"type": "string", "format": "date", "pattern": "3"})", kNot, "beside pattern"},
        Case{R"({"type": "string", "format": "colour"})", kNot,
             "`format` is 'colour', expected date"},
        Case{R"({"type": "string", "minLength": 4, "maxLength": 3})", kBad, "`minLength` is 4"},
        Case{R"({"type": "string", "minLength": -1})", kBad, "`minLength` is -1"},
        Case{R"({"type": "string", "maxLength": 1e9})", kMuch, "expected at most 100000"},
        Case{R"({"type": "string", "pattern": "(?!a)b"})", kNot, "a group that begins with (?"},
        Case{R"({"type": "string", "pattern": "\\bword"})", kNot, "a word boundary"},
        Case{R"({"type": "string", "pattern": "(a)\\1"})", kNot, "a back-reference"},
        Case{R"({"type": "string", "pattern": "\\p{L}"})", kNot, "a class of Unicode"},
        Case{R"({"type": "string", "pattern": "a^b"})", kNot, "an anchor in its middle"},
        Case{R"({"type": "string", "pattern": "a$|b"})", kNot, "an anchor in its middle"},
        Case{R"({"type": "string", "pattern": "(a"})", kBad, "ends in the middle"},
        Case{R"({"type": "string", "pattern": "a\\"})", kBad, "ends in a backslash"},
        Case{R"({"type": "integer", "minimum": 3, "maximum": 2})", kBad, "leave no integer"},
        Case{R"({"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 4})", kBad,
             "leave no integer"},
        Case{R"({"type": "integer", "minimum": 1e30})", kNot, "beyond 64 bits"},
        Case{R"({"type": "integer", "multipleOf": 5, "minimum": 0})", kNot, "`multipleOf` beside"},
        Case{R"({"type": "integer", "multipleOf": 0.5})", kNot, "a whole number from 1"},
        Case{R"({"type": "integer", "multipleOf": 7, "minimum": 1, "maximum": 6})", kBad,
             "no multiple"},
        Case{R"({"type": "number", "multipleOf": 5})", kNot, "for integers alone"},
        Case{R"({"type": "number", "minimum": 1e300})", kNot, "expected a number up to 1e9"},
        Case{R"({"type": "number", "minimum": 0.12345678})", kNot, "at most 6 digits"},
        Case{R"({"type": "number", "minimum": 1, "exclusiveMaximum": 1})", kBad, "leave no number"},
        Case{R"({"type": "number", "minimum": "1"})", kBad, "`minimum` is '1', expected a number"},
        Case{R"({"type": "array", "items": [{}]})", kNot, "expected a schema, or prefixItems"},
        Case{R"({"type": "array", "minItems": 3, "items": false})", kBad,
             "the items that there can be"},
        Case{R"({"type": "array", "minItems": 3, "maxItems": 2})", kBad, "`minItems` is 3"},
        Case{R"({"properties": []})", kBad, "`properties` is an array"},
        Case{R"({"properties": {"a": 3}})", kBad, "`properties.a` is 3, expected a schema"},
        Case{R"({"properties": {"a": false}})", kBad, "`properties.a` is false"},
        Case{R"({"required": ["a"], "additionalProperties": false})", kBad,
             "none of the properties"},
        Case{R"({"required": [1]})", kBad, "expected an array of names"},
        Case{R"({"properties": {"a": {}}, "minProperties": 1})", kNot, "`minProperties` beside"},
        Case{R"({"properties": {"a": {}}, "patternProperties": {"b": {}}})", kNot,
             "`patternProperties` beside"},
        Case{R"({"properties": {"é": {}}, "additionalProperties": true})", kNot, "not plain ASCII"},
        Case{R"({"patternProperties": {"a": {}, "b": {}}})", kNot, "with one pattern"},
        Case{R"({"minProperties": 2})", kNot, "expected 0 or 1"},
        Case{R"({"propertyNames": {"type": "integer"}})", kNot, "a schema of strings"},
        Case{R"({"nullable": 3})", kBad, "`nullable` is 3"}));

TEST(Schema, WritesThePlainForm) {
  EXPECT_EQ(Plain("true"), "{}");
  EXPECT_EQ(Plain(R"({"title": "x", "x-order": 3, "type": "object"})"), R"({"type":"object"})");
  EXPECT_EQ(Plain(R"({"type": ["string", "null"], "maxLength": 100})"),
            R"({"anyOf":[{"type":"string","maxLength":100},{"type":"null"}]})");
  EXPECT_EQ(Plain(R"({"type": "string", "nullable": true})"),
            R"({"anyOf":[{"type":"string"},{"type":"null"}]})");
  EXPECT_EQ(Plain(R"({"exclusiveMinimum": 0.5, "type": "integer", "format": "int32"})"),
            R"({"type":"integer","minimum":1,"maximum":2147483647})");
  EXPECT_EQ(Plain(R"({"exclusiveMinimum": 1, "maximum": 2.5, "type": "integer"})"),
            R"({"type":"integer","minimum":2,"maximum":2})");
  EXPECT_EQ(
      Plain(
          R"({"allOf": [{"$ref": "#/definitions/a~1b"}], "definitions": {"a/b": {"type": "null"}}})"),
      R"({"$ref":"#/$defs/r0","$defs":{"r0":{"type":"null"}}})");
  EXPECT_EQ(Plain(R"({"minItems": 1})"), R"({"type":"array","items":{},"minItems":1})");
  EXPECT_EQ(Plain(R"({"type": "string", "enum": [1, "a", null]})"), R"({"enum":["a"],"omnikv":1})");
  // The order of properties is the schema's.
  EXPECT_THAT(Plain(R"({"properties": {"b": {}, "a": {}}})"), HasSubstr(R"({"b":{},"a":{}})"));
}

TEST(Schema, OneOfApart) {
  for (
      const char* schema :
      {R"({"oneOf": [{"type": "integer"}, {"type": "string"}]})",
       R"({"oneOf": [{"const": {"a": 1}}, {"const": {"a": 2}}]})",
       R"({"oneOf": [{"properties": {"kind": {"const": "a"}}, "required": ["kind"]},
                      {"properties": {"kind": {"const": "b"}, "n": {"type": "integer"}}}]})",
       R"({"oneOf": [{"$ref": "#/$defs/a"}, {"type": "null"}], "$defs": {"a": {"type": "array"}}})"}) {
    EXPECT_EQ(Check(schema).message(), "");
  }
  for (
      const char* schema :
      {R"({"oneOf": [{"const": {"a": 1, "b": 2}}, {"const": {"b": 2, "a": 1}}]})",
       R"({"oneOf": [{"properties": {"kind": {"const": "a"}}}, {"properties": {"kind": {"const": "b"}}}]})",
       R"({"oneOf": [{}, {"type": "null"}]})"}) {
    EXPECT_EQ(Check(schema).code(), StatusCode::kUnsupported) << schema;
  }
}

TEST(Schema, RecursionWithAnEnd) {
  EXPECT_TRUE(Check(R"({"properties": {"next": {"$ref": "#"}}})").ok());
  EXPECT_TRUE(Check(R"({"type": "array", "items": {"$ref": "#"}})").ok());
  EXPECT_TRUE(
      Check(
          R"({"anyOf": [{"type": "null"}, {"properties": {"a": {"$ref": "#"}}, "required": ["a"]}]})")
          .ok());
}

TEST(Schema, Limits) {
  Json many = {{"anyOf", Json::array()}};
  for (int i = 0; i < 6000; ++i) many["anyOf"].push_back({{"type", "null"}});
  EXPECT_EQ(CheckSchema(many).code(), StatusCode::kResourceExhausted);
  Json values = {{"enum", Json::array()}};
  for (int i = 0; i < 10'001; ++i) values["enum"].push_back(i);
  EXPECT_EQ(CheckSchema(values).code(), StatusCode::kResourceExhausted);
  Json properties = {{"properties", Json::object()}};
  for (int i = 0; i < 2'001; ++i) properties["properties"][fmt::format("p{}", i)] = true;
  EXPECT_EQ(CheckSchema(properties).code(), StatusCode::kResourceExhausted);
  // Two to the power of 20, but each definition is read once.
  Json defs = Json::object();
  for (int i = 0; i < 20; ++i) {
    const Json ref = {{"$ref", fmt::format("#/$defs/d{}", i + 1)}};
    defs[fmt::format("d{}", i)] = {{"type", "array"}, {"prefixItems", {ref, ref}}};
  }
  defs["d20"] = {{"type", "null"}};
  EXPECT_TRUE(CheckSchema(Json{{"$ref", "#/$defs/d0"}, {"$defs", defs}}).ok());
  const std::string pattern(3000, 'a');
  EXPECT_EQ(CheckSchema(Json{{"type", "string"}, {"pattern", pattern}}).code(),
            StatusCode::kResourceExhausted);
}

}  // namespace
}  // namespace omnikv::server::schema_test
