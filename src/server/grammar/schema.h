// JSON schemas as answers can be held to them.
//
// xgrammar leaves out what it does not know, in silence or with a line on stderr, and so an answer
// would not fit the schema. Here a schema is read first, whatever cannot be kept is refused by
// name, and the rest is written anew in the few forms of which xgrammar keeps every word.
//
// **Keywords.** Annotations (title, description, default, examples, $comment and the like, x-...)
// mean nothing here. These are kept:
// - type (one or several), enum, const, anyOf, nullable; allOf of one schema; oneOf whose schemas
//   cannot fit the same value, by their types, by values of enum or const, or by such a property
//   that one of them requires.
// - $ref to a place in the same schema ("#/$defs/..."), recursive too where an end is possible.
// - Strings: minLength and maxLength, or pattern, or format: date, time, date-time, duration,
// email,
//   hostname, ipv4, ipv6, uuid, uri.
// - Numbers: minimum, maximum, exclusiveMinimum, exclusiveMaximum; of integers multipleOf too (up
// to
//   1024, between two bounds or without any), and the formats int32 and int64. A number between
//   bounds has at most 6 digits after the point.
// - Arrays: items, prefixItems, minItems, maxItems.
// - Objects: properties, required, additionalProperties (a schema too), minProperties,
//   maxProperties, one pattern of patternProperties, propertyNames. The last four only without
//   properties.
// Beside $ref, anyOf, oneOf and allOf nothing else may stand but annotations; beside enum and const
// a type may.
//
// **Narrower than the schema.** What comes out always fits the schema, but not all that fits can
// come out:
// - Properties come in the order of the schema, and properties that it does not name only where it
//   says additionalProperties. An object without any properties named can have all.
// - A pattern must fit the whole string. Its ^ and $ stand at its ends.
// - Strings with a pattern, a format, minLength or maxLength have no characters that need an
// escape:
//   no quotes, backslashes and line ends.
// - Where no type is said, the keywords say it. Items after prefixItems need items.
#pragma once

#include <cstddef>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "omnikv/status.h"

namespace omnikv::server {

struct SchemaLimits {
  size_t schemas = 5'000;     // within the schema, each definition once
  size_t values = 10'000;     // of all enums
  size_t properties = 2'000;  // of one object
  int64_t count = 100'000;    // minLength, maxItems and their like
  size_t pattern_bytes = 2048;
};

// A schema that xgrammar keeps.
struct PlainSchema {
  nlohmann::ordered_json json;
  std::vector<std::string> patterns;  // of its strings, each once
};

// Reads a schema: an object, or true. `schema` nests at most 64 levels deep (ParseText of
// protocol/fields.h sees to it). kInvalidArgument where it is no schema or no value fits it,
// kUnsupported where it says something that cannot be kept, kResourceExhausted past a limit. The
// sentence names the place: "`properties.a.minimum` is 'x', expected a number".
Result<PlainSchema> MakePlain(const nlohmann::ordered_json& schema,
                              const SchemaLimits& limits = {});

// Whether it would be ok.
Status CheckSchema(const nlohmann::ordered_json& schema, const SchemaLimits& limits = {});

// What a regular expression may not have: what xgrammar leaves out (lookaround, anchors within), or
// does not know; and limits. The sentence goes on after a name: "has a lookahead, ...".
Status CheckPattern(const std::string& pattern, const SchemaLimits& limits = {});

}  // namespace omnikv::server
