// HTTP as handlers see it: a request that is there whole, and a reply that goes out at once or
// piece by piece.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace omnikv::server {

struct HttpRequest {
  std::string method;                          // "GET"
  std::string path;                            // percent-decoded, without the query
  std::map<std::string, std::string> query;    // percent-decoded
  std::map<std::string, std::string> headers;  // names in lower case; repeated ones joined by ", "
  std::string body;
};

struct HttpHead {
  int status = 200;
  std::string content_type = "application/json";
  std::vector<std::pair<std::string, std::string>> headers = {};  // more of them
};

// The reply to one request: either Send, or Begin, any number of Write, and End. Calls may come
// from any thread, one at a time. What comes after the client has gone is dropped.
class HttpReply {
 public:
  virtual ~HttpReply() = default;
  virtual void Send(HttpHead head, std::string body) = 0;
  virtual void Begin(HttpHead head) = 0;
  virtual void Write(std::string bytes) = 0;
  virtual void End() = 0;
  // `gone` is called once, from a thread of the server, when the client goes before the reply has
  // ended; at once if it has gone already.
  virtual void OnGone(std::function<void()> gone) = 0;
};

// Called on a thread of the server, which it must not hold up.
using HttpHandler = std::function<void(HttpRequest request, std::shared_ptr<HttpReply> reply)>;

}  // namespace omnikv::server
