// Runs the program under test and keeps what it says.
#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

namespace omnikv::cli {

namespace fs = std::filesystem;

struct Outcome {
  int exit_code = -1;  // -1: ended by a signal
  std::string out, err;
};

inline std::string Slurp(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {(std::istreambuf_iterator<char>(file)), {}};
}

inline void Spill(const fs::path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

// A test with a folder of its own.
class ProgramTest : public ::testing::Test {
 protected:
  void SetUp() override {
    dir_ = fs::temp_directory_path() / ("omnikv_cli_test_" + std::to_string(getpid()));
    fs::create_directories(dir_);
  }
  void TearDown() override { fs::remove_all(dir_); }

  // `arguments` as a shell reads them, `input` on stdin. Where the shell opens stdout itself
  // ("info >/dev/full"), `out` stays empty. `before` goes in front of the program's name.
  Outcome Run(const std::string& arguments, const std::string& input = "",
              const std::string& before = "") {
    Spill(dir_ / "in", input);
    const std::string command = before + "{ " + OMNIKV_BINARY + " " + arguments + "; } >" +
                                (dir_ / "out").string() + " 2>" + (dir_ / "err").string() + " <" +
                                (dir_ / "in").string();
    const int status = std::system(command.c_str());
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, Slurp(dir_ / "out"), Slurp(dir_ / "err")};
  }

  fs::path dir_;
};

}  // namespace omnikv::cli
