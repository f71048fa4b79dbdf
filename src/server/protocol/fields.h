// What all protocols share: JSON bodies of clients, read field by field with one sentence for each
// mistake, and JSON and events that go out.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "base/json.h"
#include "omnikv/status.h"

namespace omnikv::server {

// Keys keep their order: templates print tools as the client wrote them.
using Json = nlohmann::ordered_json;

// The tree of a body, under the limits of ParseJson. Of a key that comes twice, the last value
// counts. kInvalidArgument, "the body is not JSON ...".
Result<Json> ParseBody(std::string_view text, const JsonLimits& limits = {});
// The same without a sentence: false where `text` is no JSON under the default limits.
bool ParseText(std::string_view text, Json* out);

// A value as a sentence shows it: 3, 'text', true, null, an array of 3, an object.
std::string Shown(const Json& value);

// "`FIELD` is VALUE, expected EXPECTED"; a field's name is a path such as messages[2].role.
Status Wrong(std::string_view field, const Json& value, std::string_view expected);
// "`FIELD` is missing, expected EXPECTED"
Status Missing(std::string_view field, std::string_view expected);
// "`FIELD` is not supported here: WHY"
Status Refused(std::string_view field, std::string_view why);

// Reads the fields of one object. A field that is null counts as absent. The first mistake stays in
// status(); after it nothing is read. Each reader returns whether it stored a value.
class FieldReader {
 public:
  // `object` stays the caller's. `path` comes before the names of fields: "messages[2].".
  // Where `object` is no object, status() says so and names the path without its last dot.
  explicit FieldReader(const Json& object, std::string path = {});

  // The field's value, or null where it is absent, null, or after a mistake.
  const Json* Find(std::string_view name) const;

  bool Bool(std::string_view name, bool* out);
  bool Int(std::string_view name, int64_t low, int64_t high, int64_t* out,
           std::string_view expected = {});
  bool Int(std::string_view name, int32_t low, int32_t high, int32_t* out,
           std::string_view expected = {});
  bool Number(std::string_view name, double low, double high, double* out);
  bool String(std::string_view name, std::string* out);
  // One of `words`.
  bool Word(std::string_view name, std::initializer_list<std::string_view> words, std::string* out);
  const Json* Object(std::string_view name);  // null: absent or a mistake
  const Json* Array(std::string_view name);   // likewise

  // The field is given and neither null, false, 0, "" nor an empty array or object: refused.
  void Refuse(std::string_view name, std::string_view why);
  // A mistake in the value of a field, which is there or missing.
  void Fail(std::string_view name, std::string_view expected);
  // A mistake found by other means; ok changes nothing.
  void Check(const Status& status);

  bool ok() const { return status_.ok(); }
  const Status& status() const { return status_; }
  std::string PathOf(std::string_view name) const { return path_ + std::string(name); }

 private:
  const Json& object_;
  std::string path_;
  Status status_;
};

// JSON as bytes; text that is no UTF-8 gets U+FFFD. NaN and infinities become null.
std::string Dump(const Json& value);

// One server-sent event: "data: JSON\n\n", or with "event: NAME\n" before it.
std::string DataEvent(const Json& data);
std::string NamedEvent(std::string_view name, const Json& data);
inline constexpr std::string_view kDoneEvent = "data: [DONE]\n\n";

// The status line's number for a failure: 400 for kInvalidArgument and kUnsupported, 404, 503 for
// kResourceExhausted, 499 for kCancelled, else 500.
int HttpStatus(StatusCode code);

// {"error": {message, type, param, code}}. `param` is the field that the sentence begins with.
Json OpenAiError(const Status& status);

// Adds the members of `extra` (an object or null) to `body`; those of the same name are replaced.
void AddMembers(Json* body, const Json& extra);

}  // namespace omnikv::server
