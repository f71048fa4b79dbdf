// Which policies one layer could have together, as a table: of the pairs of kinds, why a session
// cannot have both.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "omnikv/status.h"
#include "policy/policy.h"

namespace omnikv {

// Two policies of these kinds, in any order. `why` is a sentence without its end, with {0} for the
// name of the policy of kind `a` and {1} for the other's.
struct KindPair {
  PolicyKind a;
  PolicyKind b;
  std::string_view why;
};
// One row for each pair of kinds, of a kind with itself too.
std::span<const KindPair> KindPairs();

// The kind of a prepared policy, by what it does: what PolicyInfo::kind must say.
PolicyKind KindOf(const Policy& policy, int32_t n_layers);

// The policy that is both of these together (PolicyInfo::combines); null: none is.
const PolicyInfo* Combining(const PolicyInfo& a, const PolicyInfo& b);

// Ok where `name` is of one policy. "a+b" asks for two in one session, which no session can have:
// kUnsupported with the name of the policy that is both, or else the sentence of the table;
// kInvalidArgument where there is no such policy.
Status CheckCombination(const std::string& name);

}  // namespace omnikv
