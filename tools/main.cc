// The program: one binary, a subcommand each file. Results go to stdout, everything else to stderr.
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <exception>
#include <new>

#include "base/log.h"
#include "base/memory.h"
#include "base/printable.h"
#include "command_line.h"
#include "flags.h"
#include "omnikv/version.h"
#include "option_names.h"
#include "report.h"

namespace omnikv::tools {
namespace {

Status RunCommandLine(int argc, char** argv) {
  CLI::App app{"omnikv: large language models on contexts that do not fit in GPU memory", "omnikv"};
  app.set_version_flag("--version", OMNIKV_VERSION);
  app.require_subcommand(1);
  Command command;
  AddRun(app, command);
  AddChat(app, command);
  AddServe(app, command);
  AddTokenize(app, command);
  AddLogits(app, command);
  AddInfo(app, command);
  AddPolicies(app, command);
  AddBench(app, command);
  AddEval(app, command);
  AddAnalyze(app, command);
  OKV_ASSIGN_OR_RETURN(const bool parsed, ParseCommandLine(app, argc, argv));
  return parsed ? command() : Status();
}

// A standard stream that is closed at the start would hand its number to the next file that is
// opened, and what is printed would go into that file. It gets /dev/null instead, opened the wrong
// way round: to use the stream is still an error.
void OccupyStandardStreams() {
  constexpr int kWrongWay[] = {O_WRONLY, O_RDONLY, O_RDONLY};
  for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; ++fd) {
    // The lowest free number: this one.
    if (::fcntl(fd, F_GETFD) < 0 && errno == EBADF) ::open("/dev/null", kWrongWay[fd]);
  }
}

// A reader that went away (SIGPIPE) or a limit on file sizes (SIGXFSZ) ends no process here: the
// write fails, and the failure is told where it matters.
void LetWritesFail() {
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);
}

// No exception is meant to get here; those of the standard library (memory, threads) may.
Status RunAndCatch(int argc, char** argv) {
  try {
    return RunCommandLine(argc, argv);
  } catch (const std::bad_alloc&) {
    return ResourceExhausted(fmt::format("host memory ran out while {} ({} in use, {} available)",
                                         Activity(), HumanBytes(ResidentMemory()),
                                         HumanBytes(AvailableMemory())));
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
  tools::OccupyStandardStreams();
  tools::LetWritesFail();
  SetLogRewrite(tools::WithFlags);
  Status status = tools::RunAndCatch(argc, argv);
  if (const Status out = tools::FlushStdout(); !out.ok()) status = out;
  if (!status.ok()) {
    WriteStderr(fmt::format("omnikv: {}\n", Escaped(tools::WithFlags(status.message()), 4000)));
  }
  return status.ExitCode();
}
