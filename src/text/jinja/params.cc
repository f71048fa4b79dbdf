#include <algorithm>

#include "base/check.h"
#include "text/jinja/builtins.h"

namespace omnikv::jinja {

Params::Params(std::string_view callee, const Args& args,
               std::initializer_list<std::string_view> names, size_t n_required)
    : callee_(callee) {
  OKV_CHECK(names.size() <= kMax);
  std::copy(names.begin(), names.end(), names_.begin());
  if (args.positional.size() > names.size()) {
    Fail("{} takes at most {} arguments, not {}", callee, names.size(), args.positional.size());
  }
  for (size_t i = 0; i < args.positional.size(); ++i) values_[i] = &args.positional[i];
  for (const auto& [name, value] : args.named) {
    size_t i = 0;
    while (i < names.size() && names_[i] != name.text()) ++i;
    if (i == names.size()) Fail("{} takes no argument '{:.100}'", callee, name.text());
    if (values_[i] != nullptr) Fail("{} got the argument '{}' twice", callee, names_[i]);
    values_[i] = &value;
  }
  for (size_t i = 0; i < n_required; ++i) {
    if (values_[i] == nullptr) Fail("{} needs the argument '{}'", callee, names_[i]);
  }
}

bool Params::Bool(size_t i, bool fallback) const {
  return values_[i] == nullptr ? fallback : Truthy(*values_[i]);
}

int64_t Params::Int(size_t i, int64_t fallback) const {
  if (values_[i] == nullptr) return fallback;
  if (const int64_t* number = values_[i]->integer()) return *number;
  if (const bool* b = values_[i]->boolean()) return *b ? 1 : 0;
  Wrong(i, "an integer");
}

const Str& Params::Text(size_t i) const {
  if (const Str* s = values_[i]->str()) return *s;
  Wrong(i, "a string");
}

void Params::Wrong(size_t i, std::string_view expected) const {
  if (values_[i]->undefined()) Fail("{}", WhyUndefined(*values_[i]));
  Fail("{} takes {} as '{}', not {}", callee_, expected, names_[i], Described(*values_[i]));
}

}  // namespace omnikv::jinja
