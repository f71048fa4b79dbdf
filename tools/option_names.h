// The library's messages name fields of its options, in backticks; the program's name flags.
#pragma once

#include <string>
#include <string_view>

namespace omnikv::tools {

// `message` with the flag of each field: "`context` is 4" becomes "--ctx is 4".
std::string WithFlags(std::string_view message);

}  // namespace omnikv::tools
