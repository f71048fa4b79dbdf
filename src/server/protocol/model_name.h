// A policy in the name of the model, for clients that can set nothing but the name.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "omnikv/status.h"

namespace omnikv::server {

struct ModelName {
  std::string name;    // of the model; may be empty
  std::string policy;  // empty: the server's
  std::vector<std::pair<std::string, std::string>> settings;
};

// "NAME@POLICY:KEY=VALUE,KEY=VALUE" or "NAME@POLICY"; without @, all of it is the name. The last @
// counts, because folders may have one in their names. kInvalidArgument where a part after @ is
// empty or a setting has no =.
Result<ModelName> ParseModelName(std::string_view text);

}  // namespace omnikv::server
