// Files that come with the project: the default model and document.
#pragma once

#include <string>

#include "omnikv/status.h"

namespace omnikv::tools {

// The path of a shipped file, found beside the program (../share/omnikv of an installation) or in
// the source tree it was built from. kNotFound names the places that were looked at and `flag`,
// what to give instead.
Result<std::string> ShippedFile(const std::string& relative, const std::string& flag);

}  // namespace omnikv::tools
