// The web page of the server.
#pragma once

#include <string_view>

namespace omnikv::server {

std::string_view PageHtml();

}  // namespace omnikv::server
