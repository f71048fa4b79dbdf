// The head of a reply as bytes.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include "server/http/access.h"
#include "server/http/http.h"

namespace omnikv::server {

struct ReplyFacts {
  bool http10 = false;           // the request's version
  bool keep_alive = false;       // the connection serves another request afterwards
  std::optional<size_t> length;  // of the body; without, it is chunked or ends the connection
  Headers more;                  // the server's own
};

// Whether a reply with `status` has a body at all.
bool HasBody(int status);

// Whether `content_type` is that of server-sent events.
bool IsEventStream(const std::string& content_type);

// Ends with the empty line. What handlers put into headers cannot end a line: control characters
// become spaces, and a header whose name is no token, or is one that frames the body, is left out.
std::string FormatHead(const HttpHead& head, const ReplyFacts& facts);

}  // namespace omnikv::server
