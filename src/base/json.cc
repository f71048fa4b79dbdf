#include "base/json.h"

#include <fmt/format.h>

namespace omnikv {
namespace {

using nlohmann::json;

// The events of nlohmann's parser. A method that returns false ends the parse.
class Handler {
 public:
  explicit Handler(const JsonLimits& limits, size_t bytes) : tree_(limits), bytes_(bytes) {}

  bool null() { return tree_.Add(json()); }
  bool boolean(bool v) { return tree_.Add(json(v)); }
  bool number_integer(json::number_integer_t v) { return tree_.Add(json(v)); }
  bool number_unsigned(json::number_unsigned_t v) { return tree_.Add(json(v)); }
  bool number_float(json::number_float_t v, const json::string_t&) { return tree_.Add(json(v)); }
  bool string(json::string_t& v) { return tree_.Add(json(std::move(v))); }
  bool binary(json::binary_t&) { return false; }
  bool start_object(size_t) { return tree_.Open(json::object()); }
  bool start_array(size_t) { return tree_.Open(json::array()); }
  bool key(json::string_t& v) {
    tree_.Key(std::move(v));
    return true;
  }
  bool end_object() {
    tree_.Close();
    return true;
  }
  bool end_array() { return end_object(); }
  bool parse_error(size_t position, const std::string&, const json::exception& e) {
    constexpr int kOutOfRange = 406;  // a number that no double holds
    error_ = e.id == kOutOfRange
                 ? fmt::format(
                       "is not JSON that can be read: the number before byte {} of {} is "
                       "too large",
                       position, bytes_)
             : position > bytes_
                 ? fmt::format("is not JSON: its {} bytes end in the middle", bytes_)
                 : fmt::format("is not JSON from byte {} of {} on", position, bytes_);
    return false;
  }

  Result<json> Take() && {
    if (!error_.empty()) return Corrupt(error_);
    if (!tree_.error().empty()) return Corrupt(tree_.error());
    return std::move(tree_).Take();
  }

 private:
  JsonTree tree_;
  size_t bytes_;  // of the text
  std::string error_;
};

}  // namespace

json* JsonTree::Insert(json value) {
  if (++values_ > limits_.max_values) {
    error_ = fmt::format("holds more than {} values", limits_.max_values);
    return nullptr;
  }
  if (open_.empty()) return &(root_ = std::move(value));
  json& top = *open_.back();
  if (top.is_array()) {
    top.push_back(std::move(value));
    return &top.back();
  }
  return &(top[keys_.back()] = std::move(value));
}

bool JsonTree::Add(json value) {
  return Insert(std::move(value)) != nullptr;
}

bool JsonTree::Open(json value) {
  if (open_.size() >= limits_.max_depth) {
    error_ = fmt::format("nests deeper than {} levels", limits_.max_depth);
    return false;
  }
  json* inserted = Insert(std::move(value));
  if (inserted == nullptr) return false;
  open_.push_back(inserted);
  keys_.emplace_back();
  return true;
}

Result<json> ParseJson(std::string_view text, const JsonLimits& limits) {
  Handler handler(limits, text.size());
  json::sax_parse(text.begin(), text.end(), &handler);
  return std::move(handler).Take();
}

}  // namespace omnikv
