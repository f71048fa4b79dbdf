// The program: one binary, a subcommand each file. Results go to stdout, everything else to stderr.
#include <fmt/format.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <new>

#include "base/printable.h"
#include "command_line.h"
#include "flags.h"
#include "omnikv/version.h"

namespace omnikv::tools {
namespace {

Status RunCommandLine(int argc, char** argv) {
  CLI::App app{"omnikv: large language models on contexts that do not fit in GPU memory", "omnikv"};
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
  OKV_ASSIGN_OR_RETURN(const bool parsed, ParseCommandLine(app, argc, argv));
  return parsed ? command() : Status();
}

// No exception is meant to get here; those of the standard library (memory, threads) may.
Status RunAndCatch(int argc, char** argv) {
  try {
    return RunCommandLine(argc, argv);
  } catch (const std::bad_alloc&) {
    return ResourceExhausted("memory ran out");
  } catch (const std::exception& e) {
    return Failed(e.what());
  }
}

// Whether all that was printed got out.
Status FlushStdout() {
  errno = 0;
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return {};
  return Failed(fmt::format("standard output cannot be written: {}",
                            errno != 0 ? std::strerror(errno) : "an earlier part of it failed"));
}

}  // namespace
}  // namespace omnikv::tools

int main(int argc, char** argv) {
  using namespace omnikv;
  Status status = tools::RunAndCatch(argc, argv);
  if (const Status out = tools::FlushStdout(); !out.ok()) status = out;
  if (!status.ok()) fmt::print(stderr, "omnikv: {}\n", Escaped(status.message(), 4000));
  return status.ExitCode();
}
