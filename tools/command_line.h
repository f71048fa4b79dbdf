// How the program reads its command line: what holds for every subcommand and flag, in one place.
#pragma once

#include <CLI/CLI.hpp>

#include "omnikv/status.h"

namespace omnikv::tools {

// Parses with `app`, all of whose subcommands are registered, and calls their callbacks. Values may
// not be empty, numbers are read by numbers.h, and `help run` means `run --help`. False when that
// was all (--help, --version); kInvalidArgument is one sentence about the first thing that is
// wrong, with the nearest name where one is close.
Result<bool> ParseCommandLine(CLI::App& app, int argc, char** argv);

}  // namespace omnikv::tools
