// omnikv policies: what each policy is, what its settings mean, and what it is known to lose.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <memory>
#include <nlohmann/json.hpp>

#include "flags.h"
#include "policy/policy.h"
#include "report.h"

namespace omnikv::tools {
namespace {

// "0 to 1", "at least 1", "last, uniform or exp": what a setting may be.
std::string Values(const SettingSpec& spec) {
  std::string values;
  switch (spec.type) {
    case SettingType::kBool:
      values = "0 or 1";
      break;
    case SettingType::kFile:
      values = "the path of a file";
      break;
    case SettingType::kChoice:
      values = fmt::format("{}", fmt::join(spec.choices, ", "));
      break;
    case SettingType::kInt:
    case SettingType::kFloat:
    case SettingType::kIntList:
      values = spec.max >= 1e15 ? fmt::format("at least {}", spec.min)
                                : fmt::format("{} to {}", spec.min, spec.max);
      if (spec.type == SettingType::kIntList) values = "a list, " + values;
  }
  return spec.allow_auto ? values + ", or auto" : values;
}

struct PoliciesFlags {
  std::string policy;  // empty: all
  bool json = false;
  bool markdown = false;
};

// Each fact, and what people read before it.
struct Fact {
  const char* key;
  const char* title;
  std::string PolicyFacts::*value;
};
constexpr Fact kFacts[] = {{"source", "source", &PolicyFacts::source},
                           {"chooses", "chooses", &PolicyFacts::chooses},
                           {"keeps", "keeps", &PolicyFacts::keeps},
                           {"reads", "reads per step and layer", &PolicyFacts::reads},
                           {"holds", "holds per layer", &PolicyFacts::holds},
                           {"loses", "is known to lose", &PolicyFacts::loses}};

nlohmann::ordered_json PolicyJson(const PolicyInfo& info) {
  nlohmann::ordered_json json = {{"name", info.name}, {"summary", info.summary}};
  for (const Fact& fact : kFacts) {
    if (!(info.facts.*fact.value).empty()) json[fact.key] = info.facts.*fact.value;
  }
  auto settings = nlohmann::ordered_json::array();
  for (const SettingSpec& spec : info.settings) {
    nlohmann::ordered_json setting = {
        {"key", spec.key}, {"values", Values(spec)}, {"help", spec.help}};
    if (!spec.default_value.empty()) setting["default"] = spec.default_value;
    settings.push_back(setting);
  }
  json["settings"] = settings;
  return json;
}

void PrintPage(const nlohmann::ordered_json& policy) {
  fmt::print("--policy {}: {}\n", policy["name"].get<std::string>(),
             policy["summary"].get<std::string>());
  for (const Fact& fact : kFacts) {
    if (!policy.contains(fact.key)) continue;
    fmt::print("  {}: {}\n", fact.title, policy[fact.key].get<std::string>());
  }
  for (const auto& setting : policy["settings"]) {
    fmt::print("  --set {}={}\n      {} ({})\n", setting["key"].get<std::string>(),
               setting.value("default", "(must be given)"), setting["help"].get<std::string>(),
               setting["values"].get<std::string>());
  }
  fmt::print("\n");
}

// The table of src/policy/README.md.
void PrintTable(const nlohmann::ordered_json& policies) {
  std::string head = "| policy |";
  std::string rule = "|---|";
  for (const Fact& fact : kFacts) {
    head += fmt::format(" {} |", fact.title);
    rule += "---|";
  }
  fmt::print("{} defaults |\n{}---|\n", head, rule);
  for (const auto& policy : policies) {
    std::string row = fmt::format("| `{}` |", policy["name"].get<std::string>());
    for (const Fact& fact : kFacts) row += fmt::format(" {} |", policy.value(fact.key, ""));
    for (const auto& setting : policy["settings"]) {
      if (!setting.contains("default")) continue;
      row += fmt::format(" `{}={}`", setting["key"].get<std::string>(),
                         setting["default"].get<std::string>());
    }
    fmt::print("{} |\n", row);
  }
}

Status ShowPolicies(const PoliciesFlags& f) {
  if (!f.policy.empty()) OKV_RETURN_IF_ERROR(FindPolicy(f.policy).status());
  auto policies = nlohmann::ordered_json::array();
  for (const PolicyInfo& info : AllPolicies()) {
    if (f.policy.empty() || f.policy == info.name) policies.push_back(PolicyJson(info));
  }
  if (f.json) {
    fmt::print("{}\n", Dump({{"policies", policies}}));
  } else if (f.markdown) {
    PrintTable(policies);
  } else {
    for (const auto& policy : policies) PrintPage(policy);
  }
  return {};
}

}  // namespace

void AddPolicies(CLI::App& app, Command& command) {
  auto f = std::make_shared<PoliciesFlags>();
  CLI::App* sub =
      app.add_subcommand("policies", "what each policy keeps, reads and loses, and its settings");
  sub->add_option("--policy", f->policy, "this one alone");
  sub->add_flag("--json", f->json, "print one JSON object");
  sub->add_flag("--markdown", f->markdown, "print the table of src/policy/README.md");
  sub->callback([&command, f] { command = [f] { return ShowPolicies(*f); }; });
}

}  // namespace omnikv::tools
