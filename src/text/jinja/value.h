// The values of a template: Python's, as far as templates see them.
#pragma once

#include <ctime>
#include <deque>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "text/jinja/error.h"
#include "text/jinja/str.h"

namespace omnikv::jinja {

struct Callable;
struct Dict;
struct Namespace;
struct Seq;
class Loop;
class Runtime;

struct Undefined {
  std::shared_ptr<const std::string> why;  // what to say when it is used; null: nothing to add
};
struct None {};

class Value {
 public:
  Value() : v_(Undefined{}) {}
  explicit Value(Undefined u) : v_(std::move(u)) {}
  explicit Value(None n) : v_(n) {}
  explicit Value(bool b) : v_(b) {}
  explicit Value(const char*) = delete;  // would be a bool
  explicit Value(int64_t i) : v_(i) {}
  explicit Value(double d) : v_(d) {}
  explicit Value(Str s) : v_(std::move(s)) {}
  explicit Value(std::shared_ptr<const Seq> s) : v_(std::move(s)) {}
  explicit Value(std::shared_ptr<const Dict> d) : v_(std::move(d)) {}
  explicit Value(Namespace* n) : v_(n) {}
  explicit Value(std::shared_ptr<const Callable> c) : v_(std::move(c)) {}
  explicit Value(std::shared_ptr<Loop> l) : v_(std::move(l)) {}

  // The alternative, or null when the value is of another kind.
  const Undefined* undefined() const { return std::get_if<Undefined>(&v_); }
  bool none() const { return std::holds_alternative<None>(v_); }
  const bool* boolean() const { return std::get_if<bool>(&v_); }
  const int64_t* integer() const { return std::get_if<int64_t>(&v_); }  // not a bool
  const double* real() const { return std::get_if<double>(&v_); }
  const Str* str() const { return std::get_if<Str>(&v_); }
  const Seq* seq() const { return Pointee<const Seq>(); }
  const Dict* dict() const { return Pointee<const Dict>(); }
  const Callable* callable() const { return Pointee<const Callable>(); }
  Loop* loop() const { return Pointee<Loop>(); }
  Namespace* ns() const {
    const auto* p = std::get_if<Namespace*>(&v_);
    return p ? *p : nullptr;
  }
  std::shared_ptr<const Seq> shared_seq() const { return std::get<std::shared_ptr<const Seq>>(v_); }

 private:
  template <typename T>
  T* Pointee() const {
    const auto* p = std::get_if<std::shared_ptr<T>>(&v_);
    return p ? p->get() : nullptr;
  }

  std::variant<Undefined, None, bool, int64_t, double, Str, std::shared_ptr<const Seq>,
               std::shared_ptr<const Dict>, Namespace*, std::shared_ptr<const Callable>,
               std::shared_ptr<Loop>>
      v_;
};

using SeqPtr = std::shared_ptr<const Seq>;
using DictPtr = std::shared_ptr<const Dict>;

// Containers nest at most this deep, so that walking and freeing them is safe on any stack.
inline constexpr int kMaxValueDepth = 200;

enum class SeqKind {
  kList,
  kTuple,
  kRange,
  kGroup,      // a tuple with the attributes grouper and list, of the filter groupby
  kGenerator,  // what map, select, ... return: always true, no length, can be walked once
  kView,       // dict.keys(), .values(), .items()
};

struct Seq {
  SeqKind kind = SeqKind::kList;
  int depth = 1;
  std::string_view name = "list";  // of the Python type
  std::vector<Value> items;
  mutable size_t taken = 0;  // generators: items already walked

  bool HasIndex() const { return kind != SeqKind::kGenerator && kind != SeqKind::kView; }
};

// Insertion-ordered. Keys are hashable values; equal keys appear once.
struct Dict {
  int depth = 1;
  std::vector<std::pair<Value, Value>> items;
  std::unordered_map<std::string_view, size_t> by_text;  // string key -> index into items

  const Value* Find(Runtime& rt, std::string_view key) const;
};

// The only values that change. Owned by the Runtime: a namespace can hold itself.
struct Namespace {
  static constexpr size_t kMaxName = 255;  // bytes
  std::vector<std::pair<Str, Value>> attributes;

  Value* Find(Runtime& rt, std::string_view name);
};

// Names keep their origin: `**` takes them from a dict of the user's.
struct Args {
  std::vector<Value> positional;
  std::vector<std::pair<Str, Value>> named;
};

// A filter, a test, a method or a function. `self` is what it is applied to. A call pays for
// reading all that it is given once, whatever it then does with it, so that none can forget to;
// what takes more than that pays the rest itself.
class Builtin {
 public:
  using Function = Value (*)(Runtime& rt, const Value& self, const Args& args);
  enum class Reads { kAll, kKind };  // kKind: at most of what kind a value is, or whether empty

  constexpr Builtin() = default;
  constexpr Builtin(Function f, Reads reads = Reads::kAll)  // NOLINT: implicit by design
      : function_(f), reads_(reads) {}

  explicit operator bool() const { return function_ != nullptr; }
  // REQUIRES a function.
  Value operator()(Runtime& rt, const Value& self, const Args& args) const;
  Reads reads() const { return reads_; }

 private:
  Function function_ = nullptr;
  Reads reads_ = Reads::kAll;
};

struct MacroNode;
struct Scope;

struct Callable {
  std::string_view name;
  Builtin builtin;                   // none: a macro
  Value self;                        // the bound object of a method
  const MacroNode* macro = nullptr;  // its scope is the one it was defined in
  Scope* scope = nullptr;
};

// What one rendering uses and owns.
class Runtime {
 public:
  Runtime(Budget b, int max_call_depth, std::tm now_local)
      : budget(b), max_depth(max_call_depth), now(now_local) {}

  Namespace* NewNamespace();
  // Fails on names that begin with an underscore, as transformers does, and on long ones.
  void SetAttribute(Namespace* ns, const Str& name, Value value);
  Value NewSeq(SeqKind kind, std::vector<Value> items, std::string_view name);
  Value List(std::vector<Value> items) { return NewSeq(SeqKind::kList, std::move(items), "list"); }
  Value Tuple(std::vector<Value> items) {
    return NewSeq(SeqKind::kTuple, std::move(items), "tuple");
  }
  Value Generator(std::vector<Value> items) {
    return NewSeq(SeqKind::kGenerator, std::move(items), "generator");
  }
  Value Text(std::string_view text, bool literal = false);

  Budget budget;
  const int max_depth;
  int depth = 0;  // of nested evaluation
  int line = 0;   // of the template, for error messages
  const std::tm now;

 private:
  std::deque<Namespace> namespaces_;
};

// Counts one level of nested evaluation, within the limit.
class DepthGuard {
 public:
  explicit DepthGuard(Runtime& rt) : rt_(rt) {
    if (rt.depth >= rt.max_depth) TooDeep();
    ++rt.depth;
  }
  ~DepthGuard() { --rt_.depth; }
  DepthGuard(const DepthGuard&) = delete;
  DepthGuard& operator=(const DepthGuard&) = delete;

 private:
  [[noreturn]] static void TooDeep();
  Runtime& rt_;
};

class DictBuilder {
 public:
  explicit DictBuilder(Runtime& rt) : rt_(rt), dict_(std::make_shared<Dict>()) {}
  // Replaces the value of an equal key; true if there was none. Fails on a key that cannot be
  // hashed.
  bool Set(const Value& key, Value value);
  Value Build() &&;

 private:
  Runtime& rt_;
  std::shared_ptr<Dict> dict_;
};

// The value that `json` describes. All of its strings, keys included, are literal or none is.
Value FromJson(Runtime& rt, const nlohmann::ordered_json& json, bool literal);

// Why an undefined value is what it is, in a sentence. REQUIRES v.undefined().
std::string WhyUndefined(const Value& v);
Value MakeUndefined(Runtime& rt, std::string why);
// "a string", "an integer", ..., for messages.
std::string Described(const Value& v);

bool Truthy(const Value& v);
bool Equal(Runtime& rt, const Value& a, const Value& b);
bool Less(Runtime& rt, const Value& a, const Value& b);  // fails where Python has no order
bool Same(Runtime& rt, const Value& a, const Value& b);  // Python's `is`
bool Contains(Runtime& rt, const Value& container, const Value& item);
const Value* FindKey(Runtime& rt, const Dict& dict, const Value& key);  // null: not there

// The items a loop over `v` sees: of a string its characters, of a dict its keys, of undefined
// none. Uses up a generator. Fails on what cannot be iterated.
SeqPtr Iterate(Runtime& rt, const Value& v);
// Characters, items, ...; -1 for what has no length.
int64_t Length(Runtime& rt, const Value& v);

}  // namespace omnikv::jinja
