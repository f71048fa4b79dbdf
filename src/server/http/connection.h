// One connection: requests come in, the handler is called, replies go out, and clocks run. Knows
// no sockets, only a Transport (io.h).
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "server/http/access.h"
#include "server/http/http.h"
#include "server/http/http_server.h"
#include "server/http/io.h"

namespace omnikv::server {

class Connection;

// What all connections of a server share. It outlives the server while a reply does.
class ConnectionSet : public std::enable_shared_from_this<ConnectionSet> {
 public:
  ConnectionSet(HttpOptions with, HttpHandler handles)
      : options(std::move(with)), keys(options.api_keys), handler(std::move(handles)) {}

  // Serves a new connection, or says 503 on it, or closes it. Thread-safe, like all below.
  void Serve(std::unique_ptr<Transport> transport);

  void Remove(Connection* connection);
  size_t size() const;

  void BeginStop();  // connections end as soon as they owe no reply
  // Whether none is left, after at most `seconds`.
  bool WaitUntilEmpty(double seconds);
  void CutAll();

  // Takes `bytes` more of max_bodies_bytes; false: too many.
  bool TakeBodyBytes(size_t bytes);
  void GiveBodyBytes(size_t bytes) { body_bytes_ -= bytes; }

  const HttpOptions options;
  const KeyRing keys;
  HttpHandler handler;  // freed by Stop when no thread runs any more

 private:
  std::vector<std::shared_ptr<Connection>> All() const;

  mutable std::mutex mutex_;
  std::condition_variable removed_;
  std::unordered_map<Connection*, std::shared_ptr<Connection>> open_;
  size_t refused_ = 0;  // of them, those that are told 503
  bool stopping_ = false;
  std::atomic<size_t> body_bytes_ = 0;
};

}  // namespace omnikv::server
