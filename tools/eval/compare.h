// omnikv eval needles: what policies answer of the same questions, each with its own settings or
// all at the same cost.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/policy_cost.h"
#include "eval/document.h"
#include "omnikv/options.h"
#include "omnikv/status.h"

namespace omnikv::tools {

struct CompareOptions {
  EngineOptions engine;  // REQUIRES a model; each policy has an engine that is opened with it
  // One engine of `full` instead: it reads each text, and every policy's session forks from there.
  bool share_prompts = false;
  std::vector<PolicyOptions> policies;  // the first is what others are held against
  // Not empty: the knobs of the other policies are solved, for each of these at each share.
  std::vector<CostMeasure> equal;
  std::vector<double> shares;
  // Questions: of documents that are made up, or of a file of tasks.
  DocumentSpec document;  // of the first one; the next seed is the next one's
  std::vector<int64_t> lengths;
  int docs = 1;
  std::string tasks;  // a path; empty: documents
  bool json = false;
};

Status Compare(const CompareOptions& options);

}  // namespace omnikv::tools
