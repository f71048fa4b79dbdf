#include "shipped.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <filesystem>
#include <vector>

namespace omnikv::tools {

Result<std::string> ShippedFile(const std::string& relative, const std::string& flag) {
  namespace fs = std::filesystem;
  std::error_code error;
  std::vector<std::string> places;
  const fs::path program = fs::read_symlink("/proc/self/exe", error);
  if (!error) places.push_back(program.parent_path().parent_path() / "share" / "omnikv" / relative);
  places.push_back(fs::path(OMNIKV_SOURCE_TREE) / relative);
  for (const std::string& place : places) {
    if (fs::exists(place, error)) return place;
  }
  return NotFound(
      fmt::format("the shipped file is not at {}: give {}", fmt::join(places, " or "), flag));
}

}  // namespace omnikv::tools
