// omnikv analyze: what the attention of a model does, for policies that want to know.
#include "analyze/measure.h"

namespace omnikv::tools {

void AddAnalyze(CLI::App& app, Command& command) {
  CLI::App* analyze = app.add_subcommand("analyze", "what the attention of a model does");
  analyze->require_subcommand(1);
  AddAnalyzeAnchors(*analyze, command);
  AddAnalyzeHeads(*analyze, command);
  AddAnalyzeIndex(*analyze, command);
}

}  // namespace omnikv::tools
