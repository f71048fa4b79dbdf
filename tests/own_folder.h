// A folder for the files of a test program.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <string>

namespace omnikv {

// Of this process alone, because others run the program's tests beside it. It goes with it.
inline const std::string& OwnFolder() {
  static const struct Own {
    Own() { std::filesystem::create_directories(path); }
    ~Own() { std::filesystem::remove_all(path); }
    std::string path = testing::TempDir() + "/omnikv_test_" + std::to_string(getpid());
  } own;
  return own.path;
}

}  // namespace omnikv
