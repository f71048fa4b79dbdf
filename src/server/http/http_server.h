// An HTTP server: it reads requests whole, hands them to a handler, and writes what the handler
// replies. It decides nothing about what is asked; limits, keys, CORS and every error that HTTP
// itself has are its own.
//
// What it does: HTTP/1.1 and 1.0 in plain text or TLS, on TCP and unix sockets; keep-alive;
// pipelined requests, one after the other; HEAD; Expect: 100-continue; chunked bodies of requests;
// replies with Content-Length (Send) or chunked (Begin; to HTTP/1.0 the connection's end ends
// them); pings in server-sent events. Every reply has an x-request-id, which handlers find among
// the headers of the request: the client's if it is 1 to 128 characters of A-Z a-z 0-9 . _ - : + /
// and =, else a random one.
//
// A client that has closed its connection while a reply is under way has gone (HttpReply::OnGone).
// One that has only ended what it sends (shutdown(SHUT_WR)) still gets its reply. TCP does not tell
// the two apart before something is sent, so the server sends what any client ignores: a ping in
// server-sent events, or "100 Continue" before the head of a reply to HTTP/1.1. A client that has
// gone refuses it. Nothing such exists for other replies that have begun and for HTTP/1.0: there
// the next Write finds out. With TLS the end of what the client sends is the end of the connection.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "omnikv/status.h"
#include "server/http/http.h"

namespace omnikv::server {

// The body of an error that the server found itself, as JSON: `message` is one sentence for the
// client. `request` holds what was understood of it, maybe nothing. Called on any thread of the
// server, several at once.
using ErrorBody =
    std::function<std::string(const HttpRequest& request, int status, std::string_view message)>;

// {"error": {"message": ..., "type": "invalid_request_error", "code": status}}; the type is
// "authentication_error" for 401 and "server_error" from 500 on.
std::string DefaultErrorBody(const HttpRequest& request, int status, std::string_view message);

// Seconds may be fractions. REQUIRES positive limits.
struct HttpOptions {
  std::vector<std::string> listen;  // "HOST:PORT", "[IPv6]:PORT" (PORT 0: any), "unix:PATH"
  // TLS on TCP; unix sockets stay plain text, their mode says who may use them.
  std::string certificate_file;  // PEM, the server's first; with `key_file`, or both empty
  std::string key_file;          // PEM without a pass phrase

  // A request needs one of them, as "Authorization: Bearer KEY" or "x-api-key: KEY". Empty: none.
  std::vector<std::string> api_keys;
  std::vector<std::string> public_paths = {"/health"};  // that need no key; without the prefix
  // Origins whose pages may read replies, "*" for all. Empty: none, and OPTIONS is the handler's.
  std::vector<std::string> cors_origins;
  std::string prefix;  // "/api": is taken off paths; other paths are 404. Empty: none

  size_t max_header_bytes = 16 << 10;
  size_t max_body_bytes = 64 << 20;
  size_t max_bodies_bytes = size_t{1} << 30;  // of all bodies being read, then 503
  double header_seconds = 10;                 // for a whole head, from its first byte; for TLS's
                                              // handshake; and for the first byte after it
  double body_seconds = 60;                   // without a byte of a body
  double min_body_rate = 512;                 // bytes/s of a body on average, after body_seconds
  double idle_seconds = 75;                   // between requests
  double write_seconds = 30;                  // a client that takes no byte for once to twice as
                                              // long is cut off
  size_t max_unsent_bytes = 8 << 20;  // a Write that finds more not sent yet cuts the client off
  double ping_seconds = 15;           // in server-sent events without a Write
  // Empty: none. Handlers Write whole events, since it may come after each Write.
  std::string ping = ": ping\n\n";
  // Further ones get 503 (with TLS: nothing) and are closed. Where the process may open fewer files
  // (RLIMIT_NOFILE), clients beyond that wait.
  size_t max_connections = 4096;
  int threads = 2;

  ErrorBody error_body = DefaultErrorBody;
};

// Thread-safe. Not to be stopped or destroyed from a handler or a callback of it.
class HttpServer {
 public:
  // Binds and listens; nothing is accepted before Start. kInvalidArgument names the field.
  static Result<std::unique_ptr<HttpServer>> Open(HttpOptions options, HttpHandler handler);
  ~HttpServer();  // Stop(0)
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  // What it listens on, with actual ports: "127.0.0.1:8080", "[::1]:8080", "unix:PATH".
  const std::vector<std::string>& addresses() const;
  size_t connections() const;  // open now

  Status Start();  // once

  // Accepts no more connections and closes those without a whole request; replies under way may
  // end within `grace_seconds`, then they are cut off (OnGone). Returns when no thread of the
  // server runs any more and the handler is freed. Replies may be used afterwards; they do nothing.
  void Stop(double grace_seconds);

 private:
  struct Impl;
  explicit HttpServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace omnikv::server
