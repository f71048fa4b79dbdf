// The replies of routes: a JSON, or an error in the form of a protocol.
#pragma once

#include "server/http/http.h"
#include "server/protocol/fields.h"

namespace omnikv::server {

inline void SendJson(HttpReply& reply, const Json& body) {
  reply.Send({}, Dump(body));
}

// `body`: the protocol's, of `status`.
inline void SendError(HttpReply& reply, const Status& status, const Json& body) {
  reply.Send({.status = HttpStatus(status.code())}, Dump(body));
}

}  // namespace omnikv::server
