#include "engine/compositions.h"

#include <algorithm>

#include "base/check.h"

namespace omnikv {
namespace {

bool Forgets(const Policy& policy) {
  return policy.Kept().rows > 0;
}
bool NothingForTheHost(const Policy& policy) {
  const DeclaredReads reads = policy.Reads();
  const bool values = std::count(reads.few_values.begin(), reads.few_values.end(), true) > 0;
  const auto has = [&](int32_t how) {
    return std::count(reads.selection_of.begin(), reads.selection_of.end(), how) > 0;
  };
  return reads.n_selections == 0 && reads.streamed.layers == 0 && !values && !has(kFewRows) &&
         !has(kLastRows);
}
bool ReadsMoreThanTheLast(const Policy& policy) {
  const DeclaredReads reads = policy.Reads();
  return reads.selection_of.empty() ||
         std::any_of(reads.selection_of.begin(), reads.selection_of.end(),
                     [](int32_t how) { return how != kLastRows; });
}
bool RunsPasses(const Policy& policy) {
  return policy.Kept().passes;
}
bool GathersPrompts(const Policy& policy) {
  return policy.Reads().gathers_prompts;
}
bool ReadsHeadsTogether(const Policy& policy) {
  return !policy.Kept().HeadsDiffer();
}
bool Always(const Policy&) {
  return true;
}

constexpr UseRule kRules[] = {
    {Use::kPlacedOnHost, "place=host", NothingForTheHost,
     "`place` is {2}, but policy {0} reads no layer sparsely: {1}"},
    {Use::kBesideHostKv, "K/V on the host for another policy", Forgets,
     "policy {0} forgets rows, and cannot run where K or V of layers are on the host, as the "
     "policy of the engine has them: open the engine with {0}"},
    {Use::kBesideLastRows, "K/V on the host, with the last rows alone on the device",
     ReadsMoreThanTheLast,
     "policy {0} reads more than the last tokens of a prompt, and cannot run where the policy of "
     "the engine, {1}, leaves no room for more of the layers on the host: open the engine with "
     "{0}"},
    {Use::kStreamedBatch, "a batch over streamed layers", Always,
     "policy {0} passes layers through the card one after another, and cannot serve a batch of "
     "{1} sequences"},
    {Use::kStreamedStep, "a shared step over streamed layers", Always,
     "policy {0} passes layers through the card one after another, and cannot share a step"},
    {Use::kOthersHeads, "KV heads that another policy gives back", Always,
     "policy {0} reads what policy {1}, with which the engine was opened, gives back of KV head "
     "{2} in layer {3}"},
    {Use::kHeadsApart, "KV heads that have tables of their own for another policy",
     ReadsHeadsTogether,
     "policy {0} reads the KV heads of a layer together, and cannot run where policy {1}, with "
     "which the engine was opened, has rows of their own for them: open the engine with {0}"},
    {Use::kValuesApart, "V apart from K for another policy", GathersPrompts,
     "policy {0} gathers the rows that a prompt reads, and cannot do so where policy {1}, with "
     "which the engine was opened, has V apart from K: open the engine with {0}, or set "
     "prefill=dense"},
    {Use::kWindowLayers, "sliding-window layers, in an engine of another policy", RunsPasses,
     "policy {0} runs passes over a prompt and forgets their rows, but layers of {1} have a "
     "sliding window, and no room for more rows than that in an engine that was opened with "
     "policy {2}: open the engine with {0}"},
};

}  // namespace

std::span<const UseRule> UseRules() {
  return kRules;
}

const UseRule& RuleOf(Use use) {
  const auto rule = std::find_if(std::begin(kRules), std::end(kRules),
                                 [use](const UseRule& r) { return r.use == use; });
  OKV_CHECK(rule != std::end(kRules));
  return *rule;
}

}  // namespace omnikv
