// What a policy cannot be used with, as a table: the one place of these refusals and of their
// sentences. Pairs of policies in one session are in policy/combinations.h.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <span>
#include <string_view>

#include "omnikv/status.h"
#include "policy/policy.h"

namespace omnikv {

enum class Use : uint8_t {
  kPlacedOnHost,    // opened with `place` host or disk: its own layers live there
  kBesideHostKv,    // in an engine of another policy, which has K or V of layers on the host
  kBesideLastRows,  // the same, which keeps the last rows of them alone on the device
  kStreamedBatch,   // in a batch, where its group's layers are streamed
  kStreamedStep,    // in a step that other sequences share, where they are
  kOthersHeads,     // in an engine whose policy gives back tokens of KV heads that it reads
  kHeadsApart,      // in an engine whose policy has KV heads apart (StreamSpec::heads_apart)
  kValuesApart,     // in an engine whose policy has V of layers apart from K
  kWindowLayers,    // on a model with sliding-window layers, in an engine of another policy
};

struct UseRule {
  Use use;
  std::string_view name;  // of the use, for tables
  bool (*refuses)(const Policy& policy);
  std::string_view sentence;  // {0}: the policy's name; {1} and so on: as the use has them
};
// One row for each use. Whatever no row refuses runs: K/V of every format, saved contexts, and
// forks under every other policy among them.
std::span<const UseRule> UseRules();
const UseRule& RuleOf(Use use);

// kUnsupported with the sentence where the rule of `use` refuses a prepared policy.
template <typename... Args>
Status CheckUse(Use use, const Policy& policy, std::string_view name, const Args&... args) {
  const UseRule& rule = RuleOf(use);
  if (!rule.refuses(policy)) return {};
  return Unsupported(fmt::format(fmt::runtime(rule.sentence), name, args...));
}

}  // namespace omnikv
