// The program: one binary, a subcommand each file. Results go to stdout, everything else to stderr.
#include <fmt/format.h>

#include <cstdio>

#include "flags.h"
#include "omnikv/version.h"

int main(int argc, char** argv) {
  using namespace omnikv;
  using namespace omnikv::tools;
  CLI::App app{"omnikv: large language models on contexts that do not fit in GPU memory"};
  app.set_version_flag("--version", OMNIKV_VERSION);
  app.require_subcommand(1);
  Command command;
  AddRun(app, command);
  AddChat(app, command);
  AddTokenize(app, command);
  AddLogits(app, command);
  AddInfo(app, command);
  AddBench(app, command);
  AddEval(app, command);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    if (e.get_exit_code() == 0) return app.exit(e);  // --help, --version
    fmt::print(stderr, "omnikv: {} (omnikv --help lists what there is)\n", e.what());
    return 2;
  }
  const Status status = command();
  if (!status.ok()) fmt::print(stderr, "omnikv: {}\n", status.message());
  return status.ExitCode();
}
