// The routes of the server: what is asked over HTTP becomes requests of a scheduler.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "engine/scheduler.h"
#include "server/http/http.h"

namespace omnikv::server {

struct ServiceOptions {
  std::string name;                     // of the model, as clients name it
  std::vector<std::string> aliases;     // further names of it; "*": any
  PolicyOptions policy;                 // of requests that name none
  int64_t max_tokens = 4096;            // of answers, where a request gives no limit
  double request_seconds = 0;           // until a request is ended, wherever it is; 0: never
  int threads = 2;                      // that render and tokenize prompts
  const ContextStore* store = nullptr;  // the scheduler's, to be listed; outlives the service
};

// Thread-safe. The engine's thread drives `scheduler` meanwhile; both outlive it.
class Service {
 public:
  Service(const EngineCore& core, Scheduler& scheduler, ServiceOptions options);
  // Waits for the threads that render and tokenize; replies under way go on without it.
  ~Service();
  Service(const Service&) = delete;
  Service& operator=(const Service&) = delete;

  // An HttpHandler.
  void Handle(HttpRequest request, std::shared_ptr<HttpReply> reply);

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

// The web page, which needs neither a model nor a key.
void SendPage(HttpReply& reply);

// The body of an error that HTTP itself found, in the form of the path's protocol (ErrorBody).
std::string ErrorBodyOf(const HttpRequest& request, int status, std::string_view message);

}  // namespace omnikv::server
