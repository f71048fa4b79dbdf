// The variable `loop` of a for statement.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string_view>
#include <vector>

#include "text/jinja/value.h"

namespace omnikv::jinja {

class Loop {
 public:
  // `next` stores the next item that passes the filter of the loop, or returns false. It is called
  // as late as possible, because the body may change what the filter sees. `length` is the number
  // of items, -1 where only walking them tells.
  Loop(std::function<bool(Value*)> next, int64_t length)
      : next_(std::move(next)), length_(length) {}

  bool Advance();
  const Value& item() const { return current_; }
  Value Attribute(Runtime& rt, std::string_view name, const Value& self);
  // True when the arguments differ from those of the last call.
  bool Changed(Runtime& rt, const std::vector<Value>& values);
  int64_t index0() const { return index0_; }
  // Lets go of everything, so that a loop that outlives its statement holds nothing.
  void Close();

 private:
  bool Peek();  // fills ahead_ with the next item if there is one
  int64_t CountAll();

  std::function<bool(Value*)> next_;
  int64_t length_;
  int64_t index0_ = -1;
  Value previous_;
  Value current_;
  std::vector<Value> ahead_;  // items pulled but not reached, in reverse order
  std::optional<std::vector<Value>> last_changed_;
};

}  // namespace omnikv::jinja
