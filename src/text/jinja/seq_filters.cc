// Filters on lists, dicts and whatever else can be walked.
#include <algorithm>
#include <optional>

#include "text/jinja/builtins.h"
#include "text/jinja/ops.h"
#include "text/jinja/print.h"
#include "text/jinja/str_ops.h"

namespace omnikv::jinja {
namespace {

using namespace std::string_view_literals;

// ---- attribute paths ----

// "a.b.0": attribute b of attribute a, its item 0. An integer is one item; none is the value
// itself.
class AttrPath {
 public:
  AttrPath() = default;
  AttrPath(Runtime& rt, const Value& path) {
    if (path.none()) return;
    if (!path.str()) {
      parts_.push_back(path);
      return;
    }
    const Str dot(".");
    for (const Value& part : Split(rt, *path.str(), &dot, -1)) {
      const std::string_view text = part.str()->text();
      const bool number = !text.empty() && std::all_of(text.begin(), text.end(),
                                                       [](char c) { return c >= '0' && c <= '9'; });
      parts_.push_back(number ? Value(*ParseInt(text, 10)) : part);
    }
  }

  Value Get(Runtime& rt, Value v, const Value* fallback = nullptr) const {
    for (const Value& part : parts_) {
      v = GetItem(rt, v, part);
      if (fallback && !fallback->none() && v.undefined()) v = *fallback;
    }
    return v;
  }

 private:
  std::vector<Value> parts_;
};

Value FoldCase(Runtime& rt, const Value& v) {
  return v.str() ? Value(MapCase(rt, *v.str(), Case::kLower)) : v;
}

Value Key(Runtime& rt, const AttrPath& path, const Value& item, bool case_sensitive,
          const Value* fallback = nullptr) {
  const Value key = path.Get(rt, item, fallback);
  return case_sensitive ? key : FoldCase(rt, key);
}

struct Keyed {
  Value key;
  Value item;
};

void Sort(Runtime& rt, std::vector<Keyed>* items, bool reverse) {
  std::stable_sort(items->begin(), items->end(), [&](const Keyed& a, const Keyed& b) {
    return reverse ? Less(rt, b.key, a.key) : Less(rt, a.key, b.key);
  });
}

std::vector<Value> ItemsOf(std::vector<Keyed> keyed) {
  std::vector<Value> items;
  items.reserve(keyed.size());
  for (Keyed& one : keyed) items.push_back(std::move(one.item));
  return items;
}

// ---- one item or number of the whole ----

Value LengthFilter(Runtime& rt, const Value& self, const Args& args) {
  const Params params("length", args, {});
  const int64_t length = Length(rt, self);
  if (length < 0) Fail("{} has no length", Described(self));
  return Value(length);
}

Value First(Runtime& rt, const Value& self, const Args& args) {
  const Params params("first", args, {});
  if (const Seq* seq = self.seq(); seq && seq->kind == SeqKind::kGenerator) {
    if (seq->taken < seq->items.size()) return seq->items[seq->taken++];
    return MakeUndefined(rt, "the first item of nothing is undefined");
  }
  if (self.str() && !self.str()->empty()) return GetItem(rt, self, Value(int64_t{0}));
  const SeqPtr items = Iterate(rt, self);
  if (!items->items.empty()) return items->items.front();
  return MakeUndefined(rt, "the first item of nothing is undefined");
}

Value Last(Runtime& rt, const Value& self, const Args& args) {
  const Params params("last", args, {});
  if (Length(rt, self) < 0) Fail("{} has no last item", Described(self));
  if (self.str() && !self.str()->empty()) return GetItem(rt, self, Value(int64_t{-1}));
  const SeqPtr items = Iterate(rt, self);
  if (!items->items.empty()) return items->items.back();
  return MakeUndefined(rt, "the last item of nothing is undefined");
}

template <bool kMax>
Value Extreme(Runtime& rt, const Value& self, const Args& args) {
  const Params params(kMax ? "max" : "min", args, {"case_sensitive", "attribute"});
  const AttrPath path = params.Given(1) ? AttrPath(rt, params.Get(1)) : AttrPath();
  const bool case_sensitive = params.Bool(0, false);
  std::optional<Keyed> best;
  const SeqPtr all = Iterate(rt, self);
  for (const Value& item : all->items) {
    Keyed next{Key(rt, path, item, case_sensitive), item};
    if (!best || (kMax ? Less(rt, best->key, next.key) : Less(rt, next.key, best->key))) {
      best = std::move(next);
    }
  }
  return best ? best->item : MakeUndefined(rt, "the extreme of nothing is undefined");
}

Value Sum(Runtime& rt, const Value& self, const Args& args) {
  const Params params("sum", args, {"attribute", "start"});
  const AttrPath path = params.Given(0) ? AttrPath(rt, params.Get(0)) : AttrPath();
  Value sum = params.Find(1) ? params.Get(1) : Value(int64_t{0});
  if (sum.str()) Fail("sum does not add strings");
  const SeqPtr all = Iterate(rt, self);
  for (const Value& item : all->items) {
    sum = Arithmetic(rt, BinaryOp::kAdd, sum, path.Get(rt, item));
  }
  return sum;
}

Value JoinFilter(Runtime& rt, const Value& self, const Args& args) {
  const Params params("join", args, {"d", "attribute"});
  const AttrPath path = params.Given(1) ? AttrPath(rt, params.Get(1)) : AttrPath();
  const Str separator = params.Find(0) ? ToStr(rt, params.Get(0)) : Str();
  const SeqPtr items = Iterate(rt, self);
  StrBuilder out(&rt.budget);
  for (const Value& item : items->items) {
    rt.budget.Node();
    if (&item != &items->items.front()) out.Append(separator);
    out.Append(ToStr(rt, path.Get(rt, item)));
  }
  return Value(std::move(out).Build());
}

// ---- the whole in another form ----

Value ListFilter(Runtime& rt, const Value& self, const Args& args) {
  const Params params("list", args, {});
  return rt.List(Iterate(rt, self)->items);
}

Value ItemsFilter(Runtime& rt, const Value& self, const Args& args) {
  const Params params("items", args, {});
  if (self.undefined()) return rt.Generator({});
  if (!self.dict()) Fail("items takes a dict, not {}", Described(self));
  std::vector<Value> items;
  for (const auto& [key, value] : self.dict()->items) items.push_back(rt.Tuple({key, value}));
  return rt.Generator(std::move(items));
}

Value Reverse(Runtime& rt, const Value& self, const Args& args) {
  const Params params("reverse", args, {});
  const Value none(None{});
  if (self.str()) return GetSlice(rt, self, none, none, Value(int64_t{-1}));
  const bool was_generator = Length(rt, self) < 0;
  std::vector<Value> items = Iterate(rt, self)->items;
  std::reverse(items.begin(), items.end());
  return was_generator ? rt.List(std::move(items)) : rt.Generator(std::move(items));
}

Value SortFilter(Runtime& rt, const Value& self, const Args& args) {
  const Params params("sort", args, {"reverse", "case_sensitive", "attribute"});
  const bool case_sensitive = params.Bool(1, false);
  std::vector<AttrPath> paths;  // "a,b" sorts by a, then by b
  if (params.Given(2) && params.Get(2).str()) {
    const Str comma(",");
    for (const Value& one : Split(rt, params.Text(2), &comma, -1)) paths.emplace_back(rt, one);
  } else {
    paths.push_back(params.Given(2) ? AttrPath(rt, params.Get(2)) : AttrPath());
  }
  std::vector<Keyed> items;
  const SeqPtr all = Iterate(rt, self);
  for (const Value& item : all->items) {
    std::vector<Value> keys;
    for (const AttrPath& path : paths) keys.push_back(Key(rt, path, item, case_sensitive));
    items.push_back({rt.List(std::move(keys)), item});
  }
  Sort(rt, &items, params.Bool(0, false));
  return rt.List(ItemsOf(std::move(items)));
}

Value DictSort(Runtime& rt, const Value& self, const Args& args) {
  const Params params("dictsort", args, {"case_sensitive", "by", "reverse"});
  const std::string_view by = params.Find(1) ? params.Text(1).text() : "key";
  if (by != "key" && by != "value") Fail("dictsort sorts by key or value, not '{:.100}'", by);
  if (self.undefined()) Fail("{}", WhyUndefined(self));
  if (!self.dict()) Fail("dictsort takes a dict, not {}", Described(self));
  std::vector<Keyed> items;
  for (const auto& [key, value] : self.dict()->items) {
    const Value& sorted_by = by == "key" ? key : value;
    items.push_back(
        {params.Bool(0, false) ? sorted_by : FoldCase(rt, sorted_by), rt.Tuple({key, value})});
  }
  Sort(rt, &items, params.Bool(2, false));
  return rt.List(ItemsOf(std::move(items)));
}

Value Unique(Runtime& rt, const Value& self, const Args& args) {
  const Params params("unique", args, {"case_sensitive", "attribute"});
  const AttrPath path = params.Given(1) ? AttrPath(rt, params.Get(1)) : AttrPath();
  DictBuilder seen(rt);
  std::vector<Value> items;
  const SeqPtr all = Iterate(rt, self);
  for (const Value& item : all->items) {
    if (seen.Set(Key(rt, path, item, params.Bool(0, false)), Value(None{}))) items.push_back(item);
  }
  return rt.Generator(std::move(items));
}

Value GroupBy(Runtime& rt, const Value& self, const Args& args) {
  const Params params("groupby", args, {"attribute", "default", "case_sensitive"}, 1);
  const AttrPath path(rt, params.Get(0));
  const Value* fallback = params.Find(1);
  std::vector<Keyed> items;
  const SeqPtr all = Iterate(rt, self);
  for (const Value& item : all->items) {
    items.push_back({Key(rt, path, item, params.Bool(2, false), fallback), item});
  }
  Sort(rt, &items, false);
  std::vector<Value> groups;
  for (size_t i = 0; i < items.size();) {
    const size_t begin = i;
    std::vector<Value> members;
    do {
      members.push_back(items[i++].item);
    } while (i < items.size() && Equal(rt, items[i].key, items[begin].key));
    const Value grouper = path.Get(rt, items[begin].item, fallback);
    groups.push_back(rt.NewSeq(SeqKind::kGroup, {grouper, rt.List(std::move(members))}, "tuple"));
  }
  return rt.List(std::move(groups));
}

// ---- each item by itself ----

Args WithoutFirst(const Args& args, size_t n) {
  return {{args.positional.begin() + static_cast<ptrdiff_t>(n), args.positional.end()}, args.named};
}

Builtin NamedOperation(const NamedBuiltin* (*find)(std::string_view), const Value& name,
                       std::string_view kind) {
  if (!name.str()) Fail("the name of a {} is {}, expected a string", kind, Described(name));
  const NamedBuiltin* found = find(name.str()->text());
  if (!found) Fail("there is no {} '{:.100}'", kind, name.str()->text());
  return found->builtin;
}

Value Map(Runtime& rt, const Value& self, const Args& args) {
  const DepthGuard guard(rt);  // map can map itself
  std::vector<Value> mapped;
  if (!Truthy(self)) return rt.Generator({});
  if (args.positional.empty()) {
    const Params params("map", args, {"attribute", "default"}, 1);
    const AttrPath path(rt, params.Get(0));
    const SeqPtr all = Iterate(rt, self);
    for (const Value& item : all->items) {
      mapped.push_back(path.Get(rt, item, params.Find(1)));
    }
  } else {
    const Builtin filter = NamedOperation(FindFilter, args.positional[0], "filter");
    const Args rest = WithoutFirst(args, 1);
    const SeqPtr all = Iterate(rt, self);
    for (const Value& item : all->items) {
      rt.budget.Node();
      mapped.push_back(filter(rt, item, rest));
    }
  }
  return rt.Generator(std::move(mapped));
}

// select, reject (kAttr: by the attribute that the first argument names): items for which a test,
// or else their truth, is kWanted.
template <bool kAttr, bool kWanted>
Value Choose(Runtime& rt, const Value& self, const Args& args) {
  const DepthGuard guard(rt);
  if (!Truthy(self)) return rt.Generator({});
  if (kAttr && args.positional.empty()) Fail("selectattr and rejectattr need an attribute");
  const AttrPath path = kAttr ? AttrPath(rt, args.positional[0]) : AttrPath();
  constexpr size_t kTest = kAttr ? 1 : 0;
  Builtin test;
  Args rest;
  if (args.positional.size() > kTest) {
    test = NamedOperation(FindTest, args.positional[kTest], "test");
    rest = WithoutFirst(args, kTest + 1);
  }
  std::vector<Value> chosen;
  const SeqPtr all = Iterate(rt, self);
  for (const Value& item : all->items) {
    rt.budget.Node();
    const Value v = path.Get(rt, item);
    if (Truthy(test ? test(rt, v, rest) : v) == kWanted) chosen.push_back(item);
  }
  return rt.Generator(std::move(chosen));
}

constexpr auto kFilters = std::to_array<NamedBuiltin>({
    {"count"sv, LengthFilter},
    {"dictsort"sv, DictSort},
    {"first"sv, First},
    {"groupby"sv, GroupBy},
    {"items"sv, ItemsFilter},
    {"join"sv, JoinFilter},
    {"last"sv, Last},
    {"length"sv, LengthFilter},
    {"list"sv, ListFilter},
    {"map"sv, Map},
    {"max"sv, Extreme<true>},
    {"min"sv, Extreme<false>},
    {"reject"sv, Choose<false, false>},
    {"rejectattr"sv, Choose<true, false>},
    {"reverse"sv, Reverse},
    {"select"sv, Choose<false, true>},
    {"selectattr"sv, Choose<true, true>},
    {"sort"sv, SortFilter},
    {"sum"sv, Sum},
    {"unique"sv, Unique},
});

}  // namespace

BuiltinTable SequenceFilters() {
  return kFilters;
}

}  // namespace omnikv::jinja
