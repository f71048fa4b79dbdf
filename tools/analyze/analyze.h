// The subcommands of `omnikv analyze`.
#pragma once

#include "flags.h"

namespace omnikv::tools {

void AddHeads(CLI::App& analyze, Command& command);
void AddIndex(CLI::App& analyze, Command& command);

}  // namespace omnikv::tools
