// Who may ask: keys, origins of pages, and the ids of requests.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "server/http/http.h"

namespace omnikv::server {

// Keys that requests may have. Holds their digests only. Thread-safe once made.
class KeyRing {
 public:
  explicit KeyRing(const std::vector<std::string>& keys);

  // Takes the same time for all keys of a length, right or wrong.
  bool Admits(const HttpRequest& request) const;

 private:
  using Digest = std::array<uint8_t, 32>;  // SHA-256
  std::vector<Digest> digests_;
};

using Headers = std::vector<std::pair<std::string, std::string>>;

// The headers that let a page of the request's origin read the reply; none if no Origin came, but
// for Vary.
Headers CorsHeaders(const HttpRequest& request, const std::vector<std::string>& origins);

// Whether a browser asks if it may ask.
bool IsPreflight(const HttpRequest& request);
// The headers of the reply to it besides CorsHeaders.
Headers PreflightHeaders(const HttpRequest& request);

// The client's x-request-id if it is sane (http_server.h), else a random one.
std::string RequestId(const HttpRequest& request);

}  // namespace omnikv::server
