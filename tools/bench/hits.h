// omnikv bench --hits: what share of the chosen K/V a working set holds already, by its size.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "omnikv/options.h"
#include "omnikv/status.h"

namespace omnikv::tools {

struct HitsOptions {
  EngineOptions engine;  // REQUIRES a model
  PolicyOptions policy;
  std::string file;                  // a text; empty: documents made up, with questions
  std::vector<int64_t> lengths;      // tokens of those documents
  std::vector<double> working_sets;  // sizes, as multiples of what a layer reads, at least 1
  int64_t steps = 256;               // decode steps of a case
  bool json = false;
};

// Decodes real text over a context of it, and simulates working sets of every size by what the
// policy chose: on any device. Two cases a document: the answers that the model generates to its
// questions, each from an empty set as sessions begin; and the document's own end, read a token a
// step as if it were generated. A file has no questions. Prints a table, or one JSON object.
Status BenchHits(const HitsOptions& options);

}  // namespace omnikv::tools
