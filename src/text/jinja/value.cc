#include "text/jinja/value.h"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>

#include "text/jinja/loop.h"
#include "text/jinja/unicode.h"

namespace omnikv::jinja {
namespace {

int DepthOf(const Value& v) {
  if (const Seq* seq = v.seq()) return seq->depth;
  if (const Dict* dict = v.dict()) return dict->depth;
  if (const Callable* callable = v.callable()) return 1 + DepthOf(callable->self);
  return 0;
}

int ParentDepth(int depth, const Value& child) {
  depth = std::max(depth, 1 + DepthOf(child));
  if (depth > kMaxValueDepth) Fail("a value nests more than {} levels deep", kMaxValueDepth);
  return depth;
}

// What a pass over a value's own text or items costs, not over what is in the items.
void PayForReading(Runtime& rt, const Value& v) {
  if (const Str* s = v.str()) rt.budget.Read(s->size());
  if (const Seq* seq = v.seq()) rt.budget.Work(4 * seq->items.size());
  if (const Dict* dict = v.dict()) rt.budget.Work(4 * dict->items.size());
}

// Of the hash of a key and a comparison.
void PayForKey(Runtime& rt, std::string_view key) {
  rt.budget.Node();
  rt.budget.Read(key.size());
}

bool Hashable(Runtime& rt, const Value& v) {
  rt.budget.Node();
  if (const Seq* seq = v.seq()) {
    if (seq->kind == SeqKind::kList) return false;
    return std::all_of(seq->items.begin(), seq->items.end(),
                       [&](const Value& item) { return Hashable(rt, item); });
  }
  return v.dict() == nullptr;
}

bool IsNumber(const Value& v) {
  return v.integer() || v.real() || v.boolean();
}

// Exact for 64-bit integers where long double has 64 bits of mantissa or more.
long double Number(const Value& v) {
  if (const int64_t* i = v.integer()) return static_cast<long double>(*i);
  if (const double* d = v.real()) return *d;
  return *v.boolean() ? 1.0L : 0.0L;
}

bool IsTupleLike(const Seq& seq) {
  return seq.kind == SeqKind::kTuple || seq.kind == SeqKind::kGroup;
}

bool SeqEqual(Runtime& rt, const Seq& a, const Seq& b) {
  if (&a == &b) return true;
  if (!a.HasIndex() || !b.HasIndex()) return false;
  if (a.kind != b.kind && !(IsTupleLike(a) && IsTupleLike(b))) return false;
  if (a.items.size() != b.items.size()) return false;
  for (size_t i = 0; i < a.items.size(); ++i) {
    if (!Equal(rt, a.items[i], b.items[i])) return false;
  }
  return true;
}

bool DictEqual(Runtime& rt, const Dict& a, const Dict& b) {
  if (&a == &b) return true;
  if (a.items.size() != b.items.size()) return false;
  for (const auto& [key, value] : a.items) {
    const Value* other = FindKey(rt, b, key);
    if (other == nullptr || !Equal(rt, value, *other)) return false;
  }
  return true;
}

constexpr size_t kComparison = 32;  // units of work, besides the text that is compared
constexpr size_t kNoIndex = std::numeric_limits<size_t>::max();

size_t IndexOf(Runtime& rt, const Dict& dict, const Value& key) {
  if (const Str* text = key.str()) {
    PayForKey(rt, text->text());
    const auto it = dict.by_text.find(text->text());
    return it == dict.by_text.end() ? kNoIndex : it->second;
  }
  if (!Hashable(rt, key)) Fail("{} cannot be the key of a dict", Described(key));
  if (dict.by_text.size() == dict.items.size()) return kNoIndex;  // all keys are strings
  for (size_t i = 0; i < dict.items.size(); ++i) {
    if (Equal(rt, dict.items[i].first, key)) return i;
  }
  return kNoIndex;
}

Value JsonToValue(Runtime& rt, const nlohmann::ordered_json& json, bool literal, int depth) {
  if (depth > kMaxValueDepth) Fail("the input nests more than {} levels deep", kMaxValueDepth);
  rt.budget.Node();
  switch (json.type()) {
    case nlohmann::ordered_json::value_t::null:
      return Value(None{});
    case nlohmann::ordered_json::value_t::boolean:
      return Value(json.get<bool>());
    case nlohmann::ordered_json::value_t::number_integer:
      return Value(json.get<int64_t>());
    case nlohmann::ordered_json::value_t::number_unsigned:
      if (json.get<uint64_t>() > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
        Fail("the input holds {}, which is no signed 64-bit integer", json.get<uint64_t>());
      }
      return Value(json.get<int64_t>());
    case nlohmann::ordered_json::value_t::number_float:
      return Value(json.get<double>());
    case nlohmann::ordered_json::value_t::string:
      return rt.Text(json.get_ref<const std::string&>(), literal);
    case nlohmann::ordered_json::value_t::array: {
      std::vector<Value> items;
      items.reserve(json.size());
      for (const auto& item : json) items.push_back(JsonToValue(rt, item, literal, depth + 1));
      return rt.List(std::move(items));
    }
    case nlohmann::ordered_json::value_t::object: {
      DictBuilder dict(rt);
      for (const auto& [key, item] : json.items()) {
        dict.Set(rt.Text(key, literal), JsonToValue(rt, item, literal, depth + 1));
      }
      return std::move(dict).Build();
    }
    default:
      Fail("the input holds a {}, which is not JSON", json.type_name());
  }
}

}  // namespace

Value Builtin::operator()(Runtime& rt, const Value& self, const Args& args) const {
  rt.budget.Node();
  if (reads_ == Reads::kAll) {
    PayForReading(rt, self);
    for (const Value& arg : args.positional) PayForReading(rt, arg);
    for (const auto& arg : args.named) PayForReading(rt, arg.second);
  }
  return function_(rt, self, args);
}

const Value* Dict::Find(Runtime& rt, std::string_view key) const {
  PayForKey(rt, key);
  const auto it = by_text.find(key);
  return it == by_text.end() ? nullptr : &items[it->second].second;
}

Value* Namespace::Find(Runtime& rt, std::string_view name) {
  rt.budget.Work(8 * attributes.size());
  if (name.size() > kMaxName) return nullptr;
  for (auto& [key, value] : attributes) {
    if (key.text() == name) return &value;
  }
  return nullptr;
}

Namespace* Runtime::NewNamespace() {
  budget.Bytes(sizeof(Namespace));
  return &namespaces_.emplace_back();
}

void Runtime::SetAttribute(Namespace* ns, const Str& name, Value value) {
  if (name.text().starts_with('_')) {
    Fail("'{:.100}' cannot be an attribute of a namespace", name.text());
  }
  if (name.size() > Namespace::kMaxName) {
    Fail("an attribute of a namespace has a name of {} bytes, at most {} are allowed", name.size(),
         Namespace::kMaxName);
  }
  if (Value* old = ns->Find(*this, name.text())) {
    *old = std::move(value);
    return;
  }
  budget.Bytes(sizeof(std::pair<Str, Value>));
  ns->attributes.emplace_back(name, std::move(value));
}

Value Runtime::NewSeq(SeqKind kind, std::vector<Value> items, std::string_view name) {
  budget.Node();
  budget.Bytes(sizeof(Seq) + items.size() * sizeof(Value));
  auto seq = std::make_shared<Seq>();
  seq->kind = kind;
  seq->name = name;
  for (const Value& item : items) seq->depth = ParentDepth(seq->depth, item);
  seq->items = std::move(items);
  return Value(SeqPtr(std::move(seq)));
}

Value Runtime::Text(std::string_view text, bool literal) {
  StrBuilder out(&budget);
  out.Append(text, literal);
  return Value(std::move(out).Build());
}

void DepthGuard::TooDeep() {
  throw Error{StatusCode::kResourceExhausted, "the template recurses deeper than the limit allows"};
}

bool DictBuilder::Set(const Value& key, Value value) {
  dict_->depth = ParentDepth(ParentDepth(dict_->depth, key), value);
  const size_t index = IndexOf(rt_, *dict_, key);
  if (index != kNoIndex) {
    dict_->items[index].second = std::move(value);
    return false;
  }
  rt_.budget.Node();
  rt_.budget.Bytes(4 * sizeof(Value));
  if (const Str* text = key.str()) dict_->by_text.emplace(text->text(), dict_->items.size());
  dict_->items.emplace_back(key, std::move(value));
  return true;
}

Value DictBuilder::Build() && {
  rt_.budget.Bytes(sizeof(Dict));
  return Value(DictPtr(std::move(dict_)));
}

Value FromJson(Runtime& rt, const nlohmann::ordered_json& json, bool literal) {
  return JsonToValue(rt, json, literal, 0);
}

std::string WhyUndefined(const Value& v) {
  const auto& why = v.undefined()->why;
  return why ? *why : "the value is undefined";
}

Value MakeUndefined(Runtime& rt, std::string why) {
  rt.budget.Node(4);  // the sentence has been made
  rt.budget.Bytes(64 + why.size());
  return Value(Undefined{std::make_shared<const std::string>(std::move(why))});
}

std::string Described(const Value& v) {
  if (v.undefined()) return "an undefined value";
  if (v.none()) return "none";
  if (v.boolean()) return "a boolean";
  if (v.integer()) return "an integer";
  if (v.real()) return "a float";
  if (v.str()) return "a string";
  if (v.dict()) return "a dict";
  if (v.ns()) return "a namespace";
  if (v.loop()) return "a loop";
  if (const Seq* seq = v.seq()) return fmt::format("a {}", seq->name);
  return v.callable()->macro ? "a macro" : "a function";
}

bool Truthy(const Value& v) {
  if (v.undefined() || v.none()) return false;
  if (const bool* b = v.boolean()) return *b;
  if (const int64_t* i = v.integer()) return *i != 0;
  if (const double* d = v.real()) return *d != 0;
  if (const Str* s = v.str()) return !s->empty();
  if (const Dict* dict = v.dict()) return !dict->items.empty();
  if (const Seq* seq = v.seq()) return seq->kind == SeqKind::kGenerator || !seq->items.empty();
  return true;
}

bool Equal(Runtime& rt, const Value& a, const Value& b) {
  rt.budget.Work(kComparison);
  if (IsNumber(a) && IsNumber(b)) return Number(a) == Number(b);
  if (a.str() && b.str()) {
    if (a.str()->size() != b.str()->size()) return false;
    rt.budget.Scan(a.str()->size());
    return a.str()->text() == b.str()->text();
  }
  if (a.seq() && b.seq()) return SeqEqual(rt, *a.seq(), *b.seq());
  if (a.dict() && b.dict()) return DictEqual(rt, *a.dict(), *b.dict());
  if (a.callable() && b.callable()) return a.callable() == b.callable();
  if (a.ns() && b.ns()) return a.ns() == b.ns();
  if (a.loop() && b.loop()) return a.loop() == b.loop();
  return (a.none() && b.none()) || (a.undefined() && b.undefined());
}

bool Less(Runtime& rt, const Value& a, const Value& b) {
  rt.budget.Work(kComparison);
  if (a.undefined()) Fail("{}", WhyUndefined(a));
  if (b.undefined()) Fail("{}", WhyUndefined(b));
  if (IsNumber(a) && IsNumber(b)) return Number(a) < Number(b);
  // UTF-8 bytes order as code points do.
  if (a.str() && b.str()) {
    rt.budget.Scan(std::min(a.str()->size(), b.str()->size()));
    return a.str()->text() < b.str()->text();
  }
  const Seq* x = a.seq();
  const Seq* y = b.seq();
  if (x && y && x->HasIndex() && y->HasIndex() && x->kind != SeqKind::kRange &&
      (x->kind == y->kind || (IsTupleLike(*x) && IsTupleLike(*y)))) {
    const size_t n = std::min(x->items.size(), y->items.size());
    for (size_t i = 0; i < n; ++i) {
      if (!Equal(rt, x->items[i], y->items[i])) return Less(rt, x->items[i], y->items[i]);
    }
    return x->items.size() < y->items.size();
  }
  Fail("{} and {} have no order", Described(a), Described(b));
}

bool Same(Runtime& rt, const Value& a, const Value& b) {
  if (a.boolean() && b.boolean()) return *a.boolean() == *b.boolean();
  if (a.integer() && b.integer()) return *a.integer() == *b.integer();
  if (a.real() && b.real()) return *a.real() == *b.real();
  if (a.str() && b.str()) return Equal(rt, a, b);
  if (a.seq() && b.seq()) return a.seq() == b.seq();
  if (a.dict() && b.dict()) return a.dict() == b.dict();
  if (a.callable() && b.callable()) return a.callable() == b.callable();
  if (a.ns() && b.ns()) return a.ns() == b.ns();
  if (a.loop() && b.loop()) return a.loop() == b.loop();
  return a.none() && b.none();
}

const Value* FindKey(Runtime& rt, const Dict& dict, const Value& key) {
  const size_t index = IndexOf(rt, dict, key);
  return index == kNoIndex ? nullptr : &dict.items[index].second;
}

bool Contains(Runtime& rt, const Value& container, const Value& item) {
  if (const Str* s = container.str()) {
    if (!item.str()) Fail("'in' looks for {} in a string", Described(item));
    return FindText(rt.budget, s->text(), item.str()->text(), 0) != std::string_view::npos;
  }
  if (const Dict* dict = container.dict()) return FindKey(rt, *dict, item) != nullptr;
  const SeqPtr items = Iterate(rt, container);
  return std::any_of(items->items.begin(), items->items.end(),
                     [&](const Value& v) { return Equal(rt, v, item); });
}

SeqPtr Iterate(Runtime& rt, const Value& v) {
  std::vector<Value> items;
  if (const Seq* seq = v.seq()) {
    if (seq->taken == 0) {
      if (seq->kind == SeqKind::kGenerator) seq->taken = seq->items.size();
      return v.shared_seq();
    }
    items.assign(seq->items.begin() + static_cast<ptrdiff_t>(seq->taken), seq->items.end());
    seq->taken = seq->items.size();
  } else if (const Str* s = v.str()) {
    const std::string_view text = s->text();
    for (size_t pos = 0; pos < text.size();) {
      const size_t end = pos + CharAt(text, pos).size;
      items.push_back(Value(Slice(rt.budget, *s, pos, end)));
      pos = end;
    }
  } else if (const Dict* dict = v.dict()) {
    for (const auto& item : dict->items) items.push_back(item.first);
  } else if (!v.undefined()) {
    Fail("{} cannot be iterated", Described(v));
  }
  return rt.List(std::move(items)).shared_seq();
}

int64_t Length(Runtime& rt, const Value& v) {
  if (const Str* s = v.str()) {
    rt.budget.Read(s->size());
    return static_cast<int64_t>(CountChars(s->text()));
  }
  if (const Dict* dict = v.dict()) return static_cast<int64_t>(dict->items.size());
  if (v.undefined()) return 0;
  const Seq* seq = v.seq();
  if (seq == nullptr || seq->kind == SeqKind::kGenerator) return -1;
  return static_cast<int64_t>(seq->items.size());
}

}  // namespace omnikv::jinja
