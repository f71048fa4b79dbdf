#include "server/protocol/fields.h"

#include <fmt/format.h>

#include <cmath>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/printable.h"

namespace omnikv::server {
namespace {

// The events of nlohmann's parser, as in base/json.cc. An object with its keys in order finds a key
// by walking all of them, so the places of keys lie in a map while the object is open.
class OrderedHandler {
 public:
  OrderedHandler(const JsonLimits& limits, size_t bytes) : limits_(limits), bytes_(bytes) {}

  bool null() { return Insert(Json()) != nullptr; }
  bool boolean(bool v) { return Insert(Json(v)) != nullptr; }
  bool number_integer(Json::number_integer_t v) { return Insert(Json(v)) != nullptr; }
  bool number_unsigned(Json::number_unsigned_t v) { return Insert(Json(v)) != nullptr; }
  bool number_float(Json::number_float_t v, const Json::string_t&) {
    return Insert(Json(v)) != nullptr;
  }
  bool string(Json::string_t& v) { return Insert(Json(std::move(v))) != nullptr; }
  bool binary(Json::binary_t&) { return false; }
  bool start_object(size_t) { return Open(Json::object()); }
  bool start_array(size_t) { return Open(Json::array()); }
  bool key(Json::string_t& v) {
    open_.back().key = std::move(v);
    return true;
  }
  bool end_object() {
    open_.pop_back();
    return true;
  }
  bool end_array() { return end_object(); }
  bool parse_error(size_t position, const std::string&, const Json::exception& e) {
    constexpr int kOutOfRange = 406;  // a number that no double holds
    error_ =
        e.id == kOutOfRange
            ? fmt::format("has a number that is too large before byte {} of {}", position, bytes_)
        : position > bytes_ ? fmt::format("is not JSON: its {} bytes end in the middle", bytes_)
                            : fmt::format("is not JSON from byte {} of {} on", position, bytes_);
    return false;
  }

  Result<Json> Take() && {
    if (!error_.empty()) return InvalidArgument(error_);
    return std::move(root_);
  }

 private:
  struct Container {
    Json* value;
    std::string key;
    std::unordered_map<std::string, size_t> places;
  };

  Json* Insert(Json value) {
    if (++values_ > limits_.max_values) {
      error_ = fmt::format("holds more than {} values", limits_.max_values);
      return nullptr;
    }
    if (open_.empty()) return &(root_ = std::move(value));
    Container& top = open_.back();
    if (top.value->is_array()) {
      top.value->push_back(std::move(value));
      return &top.value->back();
    }
    auto& members = top.value->get_ref<Json::object_t&>();
    const auto [place, fresh] = top.places.emplace(top.key, members.size());
    if (!fresh)
      return &((members.begin() + static_cast<ptrdiff_t>(place->second))->second =
                   std::move(value));
    members.push_back({std::move(top.key), std::move(value)});
    return &members.back().second;
  }

  bool Open(Json value) {
    if (open_.size() >= limits_.max_depth) {
      error_ = fmt::format("nests deeper than {} levels", limits_.max_depth);
      return false;
    }
    Json* inserted = Insert(std::move(value));
    if (inserted == nullptr) return false;
    open_.push_back({inserted, {}, {}});
    return true;
  }

  JsonLimits limits_;
  size_t bytes_;
  Json root_;
  std::vector<Container> open_;  // outermost first
  size_t values_ = 0;
  std::string error_;
};

Result<Json> ParseOrdered(std::string_view text, const JsonLimits& limits) {
  OrderedHandler handler(limits, text.size());
  Json::sax_parse(text.begin(), text.end(), &handler);
  return std::move(handler).Take();
}

}  // namespace

Result<Json> ParseBody(std::string_view text, const JsonLimits& limits) {
  auto json = ParseOrdered(text, limits);
  if (!json.ok()) return InvalidArgument(fmt::format("the body {}", json.status().message()));
  return json;
}

bool ParseText(std::string_view text, Json* out) {
  auto json = ParseOrdered(text, {});
  if (!json.ok()) return false;
  *out = std::move(*json);
  return true;
}

std::string Shown(const Json& value) {
  if (value.is_string()) return Printable(value.get_ref<const std::string&>());
  if (value.is_object()) return "an object";
  if (value.is_array()) return fmt::format("an array of {}", value.size());
  return Dump(value);
}

Status Wrong(std::string_view field, const Json& value, std::string_view expected) {
  return InvalidArgument(fmt::format("`{}` is {}, expected {}", field, Shown(value), expected));
}

Status Missing(std::string_view field, std::string_view expected) {
  return InvalidArgument(fmt::format("`{}` is missing, expected {}", field, expected));
}

Status Refused(std::string_view field, std::string_view why) {
  return InvalidArgument(fmt::format("`{}` is not supported here: {}", field, why));
}

FieldReader::FieldReader(const Json& object, std::string path)
    : object_(object), path_(std::move(path)) {
  if (object_.is_object()) return;
  status_ = path_.empty()
                ? InvalidArgument(fmt::format("the body is {}, expected an object", Shown(object)))
                : Wrong(path_.substr(0, path_.size() - 1), object, "an object");
}

const Json* FieldReader::Find(std::string_view name) const {
  if (!ok()) return nullptr;
  const auto found = object_.find(std::string(name));
  return found == object_.end() || found->is_null() ? nullptr : &*found;
}

void FieldReader::Fail(std::string_view name, std::string_view expected) {
  if (!ok()) return;
  const auto found = object_.find(std::string(name));
  status_ = found == object_.end() ? Missing(PathOf(name), expected)
                                   : Wrong(PathOf(name), *found, expected);
}

void FieldReader::Check(const Status& status) {
  if (ok()) status_ = status;
}

bool FieldReader::Bool(std::string_view name, bool* out) {
  const Json* value = Find(name);
  if (value == nullptr) return false;
  if (!value->is_boolean()) return Fail(name, "true or false"), false;
  *out = value->get<bool>();
  return true;
}

bool FieldReader::Int(std::string_view name, int64_t low, int64_t high, int64_t* out,
                      std::string_view expected) {
  const Json* value = Find(name);
  if (value == nullptr) return false;
  int64_t number = 0;
  bool whole = true;
  if (value->is_number_unsigned()) {
    const auto given = value->get<uint64_t>();
    whole = given <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
    if (whole) number = static_cast<int64_t>(given);
  } else if (value->is_number_integer()) {
    number = value->get<int64_t>();
  } else if (value->is_number_float()) {
    // 1e3 and 20.0 are whole numbers too; beyond 2^53 a double does not say which
    const auto given = value->get<double>();
    whole = std::abs(given) <= 9007199254740992.0 && given == std::floor(given);
    if (whole) number = static_cast<int64_t>(given);
  } else {
    whole = false;
  }
  if (!whole || number < low || number > high) {
    Fail(name, expected.empty() ? fmt::format("a whole number from {} to {}", low, high)
                                : std::string(expected));
    return false;
  }
  *out = number;
  return true;
}

bool FieldReader::Int(std::string_view name, int32_t low, int32_t high, int32_t* out,
                      std::string_view expected) {
  int64_t wide = 0;
  if (!Int(name, static_cast<int64_t>(low), static_cast<int64_t>(high), &wide, expected)) {
    return false;
  }
  *out = static_cast<int32_t>(wide);
  return true;
}

bool FieldReader::Number(std::string_view name, double low, double high, double* out) {
  const Json* value = Find(name);
  if (value == nullptr) return false;
  const bool number = value->is_number();
  const double given = number ? value->get<double>() : 0;
  if (!number || !(given >= low && given <= high)) {
    Fail(name, fmt::format("a number from {} to {}", low, high));
    return false;
  }
  *out = given;
  return true;
}

bool FieldReader::String(std::string_view name, std::string* out) {
  const Json* value = Find(name);
  if (value == nullptr) return false;
  if (!value->is_string()) return Fail(name, "a text"), false;
  *out = value->get_ref<const std::string&>();
  return true;
}

bool FieldReader::Word(std::string_view name, std::initializer_list<std::string_view> words,
                       std::string* out) {
  const Json* value = Find(name);
  if (value == nullptr) return false;
  std::string list;
  size_t number = 0;
  for (const std::string_view word : words) {
    if (value->is_string() && value->get_ref<const std::string&>() == word) {
      *out = word;
      return true;
    }
    const bool last = ++number == words.size();
    list += fmt::format("{}{}", number == 1 ? "" : last ? " or " : ", ", word);
  }
  Fail(name, list);
  return false;
}

const Json* FieldReader::Object(std::string_view name) {
  const Json* value = Find(name);
  if (value != nullptr && !value->is_object()) return Fail(name, "an object"), nullptr;
  return value;
}

const Json* FieldReader::Array(std::string_view name) {
  const Json* value = Find(name);
  if (value != nullptr && !value->is_array()) return Fail(name, "an array"), nullptr;
  return value;
}

void FieldReader::Refuse(std::string_view name, std::string_view why) {
  const Json* value = Find(name);
  if (value == nullptr) return;
  const bool empty = value->is_structured() ? value->empty()
                     : value->is_string()   ? value->get_ref<const std::string&>().empty()
                     : value->is_boolean()  ? !value->get<bool>()
                                            : value->get<double>() == 0;
  if (!empty) Check(Refused(PathOf(name), why));
}

std::string Dump(const Json& value) {
  return value.dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::string DataEvent(const Json& data) {
  return "data: " + Dump(data) + "\n\n";
}

std::string NamedEvent(std::string_view name, const Json& data) {
  return fmt::format("event: {}\ndata: {}\n\n", name, Dump(data));
}

int HttpStatus(StatusCode code) {
  switch (code) {
    case StatusCode::kOk:
      return 200;
    case StatusCode::kInvalidArgument:
    case StatusCode::kUnsupported:
      return 400;
    case StatusCode::kNotFound:
      return 404;
    case StatusCode::kResourceExhausted:
      return 503;
    case StatusCode::kCancelled:
      return 499;
    default:
      return 500;
  }
}

Json OpenAiError(const Status& status) {
  const int number = HttpStatus(status.code());
  Json param;
  const std::string& message = status.message();
  if (message.starts_with('`')) {
    const size_t end = message.find('`', 1);
    if (end != std::string::npos) param = message.substr(1, end - 1);
  }
  const char* type = number == 404   ? "not_found_error"
                     : number == 503 ? "overloaded_error"
                     : number < 500  ? "invalid_request_error"
                                     : "server_error";
  Json code;
  if (number == 404) code = "not_found";
  return {{"error", {{"message", message}, {"type", type}, {"param", param}, {"code", code}}}};
}

void AddMembers(Json* body, const Json& extra) {
  if (!extra.is_object()) return;
  for (const auto& [key, value] : extra.items()) (*body)[key] = value;
}

}  // namespace omnikv::server
