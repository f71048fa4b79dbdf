#include "policy/combinations.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace omnikv {
namespace {

using enum PolicyKind;

constexpr std::string_view kLeavesNothing =
    "{0} reads every token of a layer, which leaves {1} nothing to do there";
constexpr std::string_view kWholeLayers =
    "{0} brings layers whole from the host, and {1} reads few of their tokens";
constexpr std::string_view kBothForget =
    "{0} and {1} both give tokens of a layer up, each by a rule of its own";
constexpr std::string_view kBothChoose = "{0} and {1} both choose what a layer reads";
constexpr std::string_view kBothDivide = "{0} and {1} both divide the KV heads of a layer";
constexpr std::string_view kGone =
    "{0} chooses among all tokens of a layer, of which {1} gives "
    "some up";

constexpr KindPair kPairs[] = {
    {kReadsAll, kReadsAll, "{0} and {1} both read every token"},
    {kReadsAll, kStreams, "{0} and {1} both read every token"},
    {kReadsAll, kSelects, kLeavesNothing},
    {kReadsAll, kWindow, kLeavesNothing},
    {kReadsAll, kForgets, kLeavesNothing},
    {kReadsAll, kHeads, kLeavesNothing},
    {kStreams, kStreams, "{0} and {1} both bring layers whole from the host"},
    {kStreams, kSelects, kWholeLayers},
    {kStreams, kWindow, kWholeLayers},
    {kStreams, kForgets, kWholeLayers},
    {kStreams, kHeads, kWholeLayers},
    {kSelects, kSelects, kBothChoose},
    {kSelects, kWindow, kGone},
    {kSelects, kForgets, kGone},
    {kSelects, kHeads,
     "{0} would have to choose among the KV heads of {1} that read everything, which is not built"},
    {kWindow, kWindow, kBothForget},
    {kWindow, kForgets, kBothForget},
    {kWindow, kHeads, kBothForget},
    {kForgets, kForgets, kBothForget},
    {kForgets, kHeads, kBothForget},
    {kHeads, kHeads, kBothDivide},
    {kReadsAll, kHeadsSelect, kLeavesNothing},
    {kStreams, kHeadsSelect, kWholeLayers},
    {kSelects, kHeadsSelect, kBothChoose},
    {kWindow, kHeadsSelect, kBothForget},
    {kForgets, kHeadsSelect, kBothForget},
    {kHeads, kHeadsSelect, kBothDivide},
    {kHeadsSelect, kHeadsSelect, kBothDivide},
};

}  // namespace

std::span<const KindPair> KindPairs() {
  return kPairs;
}

PolicyKind KindOf(const Policy& policy, int32_t n_layers) {
  constexpr int64_t kLong = int64_t{1} << 40;  // tokens
  if (policy.Kept().rows > 0) return kForgets;
  if (policy.HeadClasses() > 1) return policy.Budget(kLong) > 0 ? kHeadsSelect : kHeads;
  const Policy::TokenRange dropped = policy.Dropped(kLong, 0);
  if (dropped.end > dropped.begin) return kWindow;
  if (policy.Reads().streamed.layers > 0) return kStreams;
  for (int32_t layer = 0; layer < n_layers; ++layer) {
    if (policy.Budgeted(layer)) return kSelects;
  }
  return kReadsAll;
}

const PolicyInfo* Combining(const PolicyInfo& a, const PolicyInfo& b) {
  const auto has = [](const PolicyInfo& info, const std::string& name) {
    return std::find(info.combines.begin(), info.combines.end(), name) != info.combines.end();
  };
  for (const PolicyInfo& info : AllPolicies()) {
    if (&a != &b && has(info, a.name) && has(info, b.name)) return &info;
  }
  return nullptr;
}

Status CheckCombination(const std::string& name) {
  const size_t plus = name.find('+');
  if (plus == std::string::npos) return {};
  OKV_ASSIGN_OR_RETURN(const PolicyInfo* a, FindPolicy(name.substr(0, plus)));
  OKV_ASSIGN_OR_RETURN(const PolicyInfo* b, FindPolicy(name.substr(plus + 1)));
  if (const PolicyInfo* both = Combining(*a, *b)) {
    return Unsupported(fmt::format("a session has one policy, not '{}': {} and {} together are {}",
                                   name, a->name, b->name, both->name));
  }
  const auto is = [&](const KindPair& pair) { return pair.a == a->kind && pair.b == b->kind; };
  auto pair = std::find_if(std::begin(kPairs), std::end(kPairs), is);
  if (pair == std::end(kPairs)) {
    std::swap(a, b);
    pair = std::find_if(std::begin(kPairs), std::end(kPairs), is);
  }
  OKV_CHECK(pair != std::end(kPairs), "{}", name);
  return Unsupported(fmt::format("a session has one policy, not '{}': {}", name,
                                 fmt::format(fmt::runtime(pair->why), a->name, b->name)));
}

}  // namespace omnikv
