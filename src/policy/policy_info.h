// What a policy says of itself before it runs: facts for people, settings, and what engines and
// tests need to know of it whatever the model is.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "omnikv/status.h"
#include "policy/settings.h"

namespace omnikv {

class Policy;

// What a reader wants to know of a policy before it runs, a phrase each: of a context of N tokens,
// a budget of b tokens, and rows (K and V of a token in a layer). Empty: not said.
struct PolicyFacts {
  std::string source;   // the paper, and the published code that it follows
  std::string chooses;  // when it chooses, and by what
  std::string keeps;    // which rows, and in which memory
  std::string reads;    // in a decode step, per layer
  std::string holds;    // after the prompt, per layer
  std::string loses;    // what it is known to lose
};

// The setting that scales what a policy reads and holds, for comparisons at equal cost: how many
// tokens, or a share. A higher value costs at least as much, or with `falls` at most as much.
struct CostKnob {
  std::string key = {};  // of PolicyInfo::settings, kInt or kFloat; empty: nothing scales it
  bool falls = false;
  SettingList with = {};  // other settings that such a comparison needs
  // Settings that are a part of it, such as recent tokens of a budget, and which part.
  std::vector<std::pair<std::string, double>> parts = {};
};

// What a policy does with the tokens of a layer. Which two of them a layer could have together
// follows from it (policy/combinations.h).
enum class PolicyKind : uint8_t {
  kReadsAll,     // reads every token
  kStreams,      // reads every token, and its layers come whole from the host
  kSelects,      // keeps every token, and reads some
  kWindow,       // gives tokens up by their position alone, as the context grows
  kForgets,      // chooses the rows that stay, and gives up the others (Keeps)
  kHeads,        // reads every token in some KV heads, and gives tokens up in the others
  kHeadsSelect,  // keeps every token in some KV heads and reads some, and gives tokens up in the
                 // others
};

struct PolicyInfo {
  std::string name;
  std::string summary;  // one line: what it keeps, what it reads, where it is from
  PolicyFacts facts = {};
  PolicyKind kind = PolicyKind::kReadsAll;
  std::vector<std::string> combines = {};  // policies that it is together, where it is of several
  CostKnob knob = {};
  std::vector<SettingSpec> settings;
  std::function<std::unique_ptr<Policy>()> make;
  bool batches = false;  // whether it keeps the state of more than one sequence
  // Settings under which it reads everything a context of `length` holds, so that it must equal
  // `full`; empty where it cannot, and then `exempt` says why.
  std::function<std::vector<SettingList>(int64_t length)> covering = [](int64_t) {
    return std::vector<SettingList>{};
  };
  std::string exempt;
  // Other settings whose steps differ, for the house tests: valid on a model of six layers or more,
  // each with a budget far below a context of 100 tokens.
  std::vector<SettingList> test_settings;
  // Whether it is what a user wants by default on this model, of `n_layers` global-attention
  // layers; null: never.
  std::function<bool(std::string_view model_name, int32_t n_layers)> recommended;
};

// Every policy of this build, by name.
const std::vector<PolicyInfo>& AllPolicies();
// The first policy that recommends itself for a model, else `full`.
const PolicyInfo& RecommendedPolicy(std::string_view model_name, int32_t n_layers);
// kInvalidArgument with the list of names when there is none of that name.
Result<const PolicyInfo*> FindPolicy(const std::string& name);
// The same, where "auto" is the recommended one.
Result<const PolicyInfo*> ResolvePolicy(const std::string& name, std::string_view model_name,
                                        int32_t n_layers);

}  // namespace omnikv
