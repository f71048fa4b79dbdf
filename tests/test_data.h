// Where tests find their data.
#pragma once

#include <cstdlib>
#include <string>

namespace omnikv {

// `path` of the repository: below the folder that OMNIKV_TEST_DATA names (a bundle has one), else
// in the source tree.
inline std::string TestData(const std::string& path) {
  const char* given = std::getenv("OMNIKV_TEST_DATA");
  return (given != nullptr ? std::string(given) : OMNIKV_SOURCE_DIR) + "/" + path;
}

}  // namespace omnikv
