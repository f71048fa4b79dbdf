// The routes of contexts: /v1/contexts and what is below it.
#pragma once

#include <memory>

#include "engine/scheduler.h"
#include "server/http/http.h"

namespace omnikv::server {

// What the replies need, all of which outlives them; `store` is the scheduler's (null: none).
struct ContextRoutes {
  const EngineCore& core;
  Scheduler& scheduler;
  const ContextStore* store;

  // GET /v1/contexts: all that run, are kept and are stored.
  void List(const std::shared_ptr<HttpReply>& reply) const;
  // POST /v1/contexts/ID/ACTION, with save, load, pin or unpin, and DELETE /v1/contexts/ID.
  void Change(const HttpRequest& request, const std::shared_ptr<HttpReply>& reply) const;
};

}  // namespace omnikv::server
