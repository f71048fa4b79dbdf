// What a session would hold and read under a policy, known before anything is loaded: the numbers
// of `omnikv info`, and the settings at which policies cost the same.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "backend/backend.h"
#include "engine/placement.h"
#include "model/config.h"
#include "omnikv/options.h"
#include "omnikv/status.h"
#include "policy/policy.h"

namespace omnikv {

struct PolicyCost {
  // Where the backend computes, in host memory beside a card, and on a disk.
  struct Bytes {
    size_t own = 0;
    size_t host = 0;
    size_t disk = 0;
  };

  std::string settings;      // every one, as resolved
  int32_t dense_layers = 0;  // global-attention layers to which no budget applies
  Bytes held;                // K/V of the tokens, working sets, stages and the policy's state
  Bytes reserved;            // the same for the plan's context, and what a prompt takes meanwhile
  size_t policy_bytes = 0;   // of the held ones, the policy's state
  uint64_t read_bytes = 0;   // K/V and states that a decode step reads, sliding windows included
  // SessionStats::held_fraction and read_fraction.
  double held_fraction = 0;
  double read_fraction = 0;
};

// What `info` with `settings` costs at the end of a prompt of `tokens` tokens, in an engine that is
// planned by `plan`: one opened with that policy, or (`placed` is false) one that has room for all
// K/V on its own device. As Policy::Prepare where the model or a setting is against it.
Result<PolicyCost> CostOf(const PolicyInfo& info, PolicySettings settings,
                          const ModelConfig& config, Backend& backend, const MemoryPlan& plan,
                          bool placed, int64_t tokens);

// A model on a machine, for which costs are asked. All outlive it.
struct CostModel {
  const EngineOptions& options;  // whose policy is not looked at
  const ModelConfig& config;
  size_t weight_bytes = 0;
  std::optional<DType> format;
  Backend& backend;
};

// The same in an engine that is opened with this policy.
Result<PolicyCost> CostOf(const CostModel& model, const PolicyOptions& policy, int64_t tokens);

enum class CostMeasure { kHeld, kRead };
const char* CostMeasureName(CostMeasure measure);

// The settings of a policy at which it costs what was asked for.
struct EqualCost {
  PolicyOptions policy;  // with what was given, and what was solved
  PolicyCost cost;       // of these
  // Empty: the share is reached. Else why the policy costs more whatever its knob says; `policy` is
  // then the nearest to it.
  std::string beyond;
};

// kInvalidArgument where the knob of the policy is among its settings: it is to be solved.
Status CheckKnob(const CostModel& model, const PolicyOptions& given);

// Solves the knob of the policy (PolicyInfo::knob) at `tokens` tokens, so that what it holds or
// reads is the largest share of full attention's that is at most `share`. `given`: the policy, and
// other settings of it, which CheckKnob lets pass. As CostOf where it runs at no value of the knob.
Result<EqualCost> SolveCost(const CostModel& model, const PolicyOptions& given, CostMeasure measure,
                            double share, int64_t tokens);

}  // namespace omnikv
