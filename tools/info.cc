// omnikv info: what a model is, whether it can run here, and what each policy would hold and read.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/log.h"
#include "base/memory.h"
#include "base/printable.h"
#include "engine/devices.h"
#include "engine/placement.h"
#include "engine/policy_cost.h"
#include "flags.h"
#include "model/forward.h"
#include "model/loader.h"
#include "option_names.h"
#include "policy/kv_bytes_read.h"
#include "policy_file.h"
#include "report.h"

namespace omnikv::tools {
namespace {

struct InfoFlags {
  EngineFlags engine;
  PolicyFlags policy;
  bool json = false;
};

// `own` bytes where the backend computes; beside it, in host memory and on a disk.
nlohmann::ordered_json ByTier(const Backend& backend, size_t own, size_t host, size_t disk) {
  const bool device = backend.OnDevice();
  return {{"device", device ? own : 0}, {"host", device ? host : own + host}, {"disk", disk}};
}

size_t Sum(const nlohmann::ordered_json& tiers) {
  return tiers["device"].get<size_t>() + tiers["host"].get<size_t>() + tiers["disk"].get<size_t>();
}

// What `info` says of one policy at a context. `placed`: the plan is for it, else none of its
// layers is on the host.
nlohmann::ordered_json PolicyJson(const PolicyInfo& info, Result<PolicySettings> settings,
                                  const ModelConfig& config, Backend& backend,
                                  const MemoryPlan& plan, bool placed) {
  nlohmann::ordered_json json = {{"name", info.name}, {"summary", info.summary}};
  const Result<PolicyCost> cost =
      CostOf(info, std::move(*settings), config, backend, plan, placed, plan.context);
  if (!cost.ok()) {
    json["cannot_run"] = WithFlags(cost.status().message());
    return json;
  }
  json["settings"] = cost->settings;
  json["dense_layers"] = cost->dense_layers;
  json["held_bytes"] = ByTier(backend, cost->held.own, cost->held.host, cost->held.disk);
  json["reserved_bytes"] =
      ByTier(backend, cost->reserved.own, cost->reserved.host, cost->reserved.disk);
  json["policy_bytes"] = cost->policy_bytes;
  json["read_bytes_per_step"] = cost->read_bytes;
  return json;
}

nlohmann::ordered_json ModelJson(const ModelFiles& files) {
  const ModelConfig& c = files.config;
  return {{"path", files.path},       {"family", c.family},          {"name", c.name},
          {"layers", c.n_layers},     {"d_model", c.d_model},        {"heads", c.n_heads},
          {"kv_heads", c.n_kv_heads}, {"head_dim", c.head_dim},      {"ffn", c.ffn},
          {"vocab", c.vocab},         {"max_context", c.max_context}};
}

void PrintText(const nlohmann::ordered_json& json, const MemoryPlan& plan,
               const MemoryNeeds& needs) {
  const auto& m = json["model"];
  fmt::print("{}: {} {}, {} layers, d {}, {}/{} heads of {}, FFN {}, vocabulary {}, context {}\n",
             Escaped(m["path"].get<std::string>()), m["family"].get<std::string>(),
             Printable(m["name"].get<std::string>()), m["layers"].get<int>(),
             m["d_model"].get<int>(), m["heads"].get<int>(), m["kv_heads"].get<int>(),
             m["head_dim"].get<int>(), m["ffn"].get<int>(), m["vocab"].get<int>(),
             m["max_context"].get<int64_t>());
  for (const auto& note : json["notes"]) fmt::print("note: {}\n", Escaped(note.get<std::string>()));
  fmt::print("device: {}\n", json["device"].get<std::string>());
  for (const std::string& line : PlanLines(needs)) fmt::print("{}\n", line);
  fmt::print("K/V in {}, {} a token\n", DTypeName(plan.kv_dtype), HumanBytes(plan.kv_per_token));
  fmt::print("\n{:<14} {:>13} {:>13} {:>13} {:>13}  {}\n", "policy", "holds", "reserved",
             "read per step", "dense layers", "what it does");
  for (const auto& p : json["policies"]) {
    if (p.contains("cannot_run")) {
      fmt::print("{:<14} {}\n", p["name"].get<std::string>(),
                 Escaped(p["cannot_run"].get<std::string>()));
      continue;
    }
    fmt::print("{:<14} {:>13} {:>13} {:>13} {:>13}  {}\n", p["name"].get<std::string>(),
               HumanBytes(Sum(p["held_bytes"])), HumanBytes(Sum(p["reserved_bytes"])),
               HumanBytes(p["read_bytes_per_step"].get<size_t>()), p["dense_layers"].get<int>(),
               p["summary"].get<std::string>());
    if (!p["settings"].get<std::string>().empty()) {
      fmt::print("               {}\n", p["settings"].get<std::string>());
    }
  }
}

Status Info(const InfoFlags& f) {
  OKV_ASSIGN_OR_RETURN(EngineOptions options, ToEngineOptions(f.engine));
  OKV_ASSIGN_OR_RETURN(const PolicyOptions policy, ToPolicyOptions(f.policy));
  options.policy = policy;
  OKV_RETURN_IF_ERROR(CheckOptions(options));
  SetActivity("reading the model");
  OKV_ASSIGN_OR_RETURN(const ModelFiles files, OpenModel(options.model));
  OKV_ASSIGN_OR_RETURN(const size_t weight_bytes, WeightBytes(files));
  OKV_ASSIGN_OR_RETURN(const auto backend, MakeBackend(options));
  OKV_ASSIGN_OR_RETURN(const MemoryPlan plan, PlanMemory(options, files.config, weight_bytes,
                                                         FormatOfAll(files), *backend));
  const MemoryNeeds needs = NeedsOf(plan, *backend);
  const std::string by_default =
      RecommendedPolicy(files.config.name, GlobalLayers(files.config)).name;
  nlohmann::ordered_json json = {
      {"model", ModelJson(files)},
      {"notes", WeightNotes(files)},
      {"device", backend->Describe()},
      {"weight_bytes", plan.weights},
      {"activation_bytes", plan.activations},
      {"kv_dtype", DTypeName(plan.kv_dtype)},
      {"kv_bytes_per_token", plan.kv_per_token},
      {"kv_bytes", ByTier(*backend, plan.kv, needs.kv_host, needs.kv_disk)},
      {"host_layers", needs.host_layers},
      {"host_value_layers", needs.host_values},
      {"working_set_bytes", plan.working_sets},
      {"working_set_tokens", plan.working_set},
      {"available_bytes", plan.available},
      {"context", plan.context},
      {"default_policy", by_default},
      {"policies", nlohmann::ordered_json::array()}};
  // One that is named is shown alone; settings are those of the one that would run.
  const bool all = policy.name == "auto";
  OKV_ASSIGN_OR_RETURN(const PolicyInfo* running,
                       ResolvePolicy(policy.name, files.config.name, GlobalLayers(files.config)));
  const std::string& runs = running->name;
  for (const PolicyInfo& info : AllPolicies()) {
    if (info.name != runs && !all) continue;
    auto settings =
        PolicySettings::Parse(info.name, info.settings,
                              info.name == runs ? policy.settings : decltype(policy.settings){});
    OKV_RETURN_IF_ERROR(settings.status());
    json["policies"].push_back(PolicyJson(info, std::move(settings), files.config, *backend, plan,
                                          /*placed=*/info.name == runs));
  }
  const auto& shown = json["policies"];
  if (!all && shown.front().contains("cannot_run")) {
    return InvalidArgument(shown.front()["cannot_run"].get<std::string>());
  }
  if (f.json) {
    fmt::print("{}\n", Dump(json));
  } else {
    PrintText(json, plan, needs);
  }
  return {};
}

}  // namespace

void AddInfo(CLI::App& app, Command& command) {
  auto f = std::make_shared<InfoFlags>();
  CLI::App* sub = app.add_subcommand("info", "what a model is and what it takes; loads nothing");
  sub->add_flag("--json", f->json, "print one JSON object");
  AddPolicyFlags(*sub, f->policy);
  AddEngineFlags(*sub, f->engine);
  sub->callback([&command, f] {
    command = [f]() -> Status {
      OKV_RETURN_IF_ERROR(ApplyPolicyFile(f->engine, f->policy));
      return Info(*f);
    };
  });
}

}  // namespace omnikv::tools
