// From the bytes of a connection to one request, with everything refused that two readers of HTTP
// could understand differently (request smuggling). Opens no socket and has no thread:
// thread-compatible. Boost.Beast parses; what it lets pass is refused here (request_reader.cc).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "server/http/http.h"

namespace omnikv::server {

struct ReaderLimits {
  size_t max_header_bytes = 16 << 10;  // of the request line and the fields; of a chunk's line
  size_t max_body_bytes = 64 << 20;
};

class RequestReader {
 public:
  enum class State {
    kHead,      // the head has not ended
    kHeadDone,  // it has: the facts about it below hold, no byte of the body was taken
    kBody,      // the body has not ended
    kDone,      // request() is whole
    kFailed,    // status() and message() say why; the connection cannot go on
  };

  explicit RequestReader(const ReaderLimits& limits);
  ~RequestReader();
  RequestReader(const RequestReader&) = delete;
  RequestReader& operator=(const RequestReader&) = delete;

  // Takes bytes from the front of `bytes` and returns how many. The caller brings those not taken
  // again, with more behind them. Stops at the end of the head and at that of the request.
  // REQUIRES state() is none of kDone and kFailed.
  size_t Put(std::string_view bytes);

  State state() const;
  int status() const;                  // of kFailed: 400, 413, 414, 431, 501 or 505
  const std::string& message() const;  // one sentence for the client

  // What is known so far; whole at kDone. The caller may move it out then.
  HttpRequest& request();

  // From kHeadDone on.
  bool http10() const;      // HTTP/1.0, else HTTP/1.1
  bool keep_alive() const;  // the client lets the connection serve another request
  bool has_body() const;    // bytes of a body follow; without, the request is whole
  std::optional<uint64_t> content_length() const;

 private:
  class Parser;
  std::unique_ptr<Parser> parser_;
};

// Splits the target of a request line into the path and query of `request`. False, and `why` is a
// sentence: it is not of the form "/PATH", "http://HOST/PATH" or, with OPTIONS, "*".
bool ParseTarget(std::string_view target, HttpRequest* request, std::string* why);

}  // namespace omnikv::server
