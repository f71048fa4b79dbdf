#include "text/jinja/loop.h"

#include <algorithm>

namespace omnikv::jinja {
namespace {

Value Cycle(Runtime&, const Value& self, const Args& args) {
  if (args.positional.empty()) Fail("loop.cycle needs at least one value");
  const auto n = static_cast<int64_t>(args.positional.size());
  return args.positional[static_cast<size_t>(std::max<int64_t>(self.loop()->index0(), 0) % n)];
}

Value ChangedMethod(Runtime& rt, const Value& self, const Args& args) {
  return Value(self.loop()->Changed(rt, args.positional));
}

Value Method(std::string_view name, Builtin builtin, const Value& self) {
  return Value(std::make_shared<const Callable>(Callable{name, builtin, self, nullptr, nullptr}));
}

}  // namespace

bool Loop::Peek() {
  if (!ahead_.empty()) return true;
  Value item;
  if (!next_ || !next_(&item)) return false;
  ahead_.push_back(std::move(item));
  return true;
}

bool Loop::Advance() {
  if (!Peek()) return false;
  previous_ = std::move(current_);
  current_ = std::move(ahead_.back());
  ahead_.pop_back();
  ++index0_;
  return true;
}

int64_t Loop::CountAll() {
  if (length_ < 0) {
    std::reverse(ahead_.begin(), ahead_.end());
    Value item;
    while (next_ && next_(&item)) ahead_.push_back(std::move(item));
    length_ = index0_ + 1 + static_cast<int64_t>(ahead_.size());
    std::reverse(ahead_.begin(), ahead_.end());
  }
  return length_;
}

Value Loop::Attribute(Runtime& rt, std::string_view name, const Value& self) {
  rt.budget.Node();
  if (name == "index0") return Value(index0_);
  if (name == "index") return Value(index0_ + 1);
  if (name == "first") return Value(index0_ == 0);
  if (name == "last") return Value(!Peek());
  if (name == "length") return Value(CountAll());
  if (name == "revindex0") return Value(CountAll() - index0_ - 1);
  if (name == "revindex") return Value(CountAll() - index0_);
  if (name == "depth") return Value(int64_t{1});
  if (name == "depth0") return Value(int64_t{0});
  if (name == "previtem") {
    return index0_ > 0 ? previous_ : MakeUndefined(rt, "the first item of a loop has no previtem");
  }
  if (name == "nextitem") {
    return Peek() ? ahead_.back() : MakeUndefined(rt, "the last item of a loop has no nextitem");
  }
  if (name == "cycle") return Method("cycle", Cycle, self);
  if (name == "changed") return Method("changed", ChangedMethod, self);
  return MakeUndefined(rt, fmt::format("loop has no attribute '{:.100}'", name));
}

bool Loop::Changed(Runtime& rt, const std::vector<Value>& values) {
  const bool same =
      last_changed_ &&
      std::equal(values.begin(), values.end(), last_changed_->begin(), last_changed_->end(),
                 [&](const Value& a, const Value& b) { return Equal(rt, a, b); });
  if (!same) last_changed_ = values;
  return !same;
}

void Loop::Close() {
  next_ = nullptr;
  previous_ = current_ = Value();
  ahead_.clear();
  last_changed_.reset();
}

}  // namespace omnikv::jinja
