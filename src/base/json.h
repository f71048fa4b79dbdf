// JSON of files as a tree whose depth and number of values are bounded while it is read: files are
// not trusted, and a tree takes up to a hundred times the bytes of its text.
#pragma once

#include <cstddef>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "omnikv/status.h"

namespace omnikv {

struct JsonLimits {
  size_t max_depth = 64;          // objects and arrays within one another
  size_t max_values = 1'000'000;  // of all kinds; a value takes 16 to 150 bytes besides its text
};

// A tree that grows by the events of a parser. Where a method returns false, error() says why and
// the tree grows no further.
class JsonTree {
 public:
  explicit JsonTree(JsonLimits limits = {}) : limits_(limits) {}

  bool Add(nlohmann::json value);   // null, a boolean, a number or a string
  bool Open(nlohmann::json value);  // an empty object or array
  void Key(std::string key) { keys_.back() = std::move(key); }
  void Close() {
    open_.pop_back();
    keys_.pop_back();
  }

  size_t depth() const { return open_.size(); }
  // The last key of the open container at `level`, 0 the outermost. REQUIRES level < depth().
  const std::string& key(size_t level) const { return keys_[level]; }
  nlohmann::json Take() && { return std::move(root_); }
  const std::string& error() const { return error_; }

 private:
  nlohmann::json* Insert(nlohmann::json value);  // null past a limit

  JsonLimits limits_;
  nlohmann::json root_;
  std::vector<nlohmann::json*> open_;  // outermost first
  std::vector<std::string> keys_;      // [open_]
  size_t values_ = 0;
  std::string error_;
};

// kCorrupt, without a name before the sentence: "is not JSON from byte N of M on", or a limit.
Result<nlohmann::json> ParseJson(std::string_view text, const JsonLimits& limits = {});

}  // namespace omnikv
