#include "server/context_routes.h"

#include <fmt/format.h>

#include <string>
#include <string_view>

#include "base/printable.h"
#include "base/utf8.h"
#include "server/replies.h"

namespace omnikv::server {
namespace {

constexpr std::string_view kContexts = "/v1/contexts/";
constexpr size_t kTextChars = 80;

std::string_view NameOf(ListedContext::Where where) {
  switch (where) {
    case ListedContext::Where::kRunning:
      return "running";
    case ListedContext::Where::kSwapped:
      return "swapped";
    case ListedContext::Where::kKept:
      return "kept";
    case ListedContext::Where::kStored:
      break;
  }
  return "store";
}

// The first characters of what a context says, so that people know it again.
std::string TextOf(const EngineCore& core, const ListedContext& context) {
  if (core.text.tokenizer == nullptr) return "";
  const auto text = core.text.tokenizer->Decode(context.head, /*skip_special=*/true);
  if (!text.ok()) return "";
  size_t end = 0;
  for (size_t chars = 0; chars < kTextChars && end < text->size(); ++chars) {
    const Utf8Char c = Utf8CharAt(*text, end);
    if (c.size == 0) break;  // one that is cut off where the tokens end
    end += c.size;
  }
  return text->substr(0, end);
}

Json JsonOf(const EngineCore& core, const ListedContext& c) {
  Json json = {{"id", c.id},
               {"object", "context"},
               {"where", NameOf(c.where)},
               {"pinned", c.pinned},
               {"tokens", c.tokens},
               {"made_by", c.made_by},
               {"text", TextOf(core, c)}};
  if (c.where == ListedContext::Where::kStored) json["bytes"] = c.bytes;
  return json;
}

void SendStatus(HttpReply& reply, const Status& status) {
  SendError(reply, status, OpenAiError(status));
}

}  // namespace

void ContextRoutes::List(const std::shared_ptr<HttpReply>& reply) const {
  scheduler.Call([routes = *this, reply] {
    Json data = Json::array();
    for (const ListedContext& c : routes.scheduler.Contexts()) {
      data.push_back(JsonOf(routes.core, c));
    }
    SendJson(*reply, {{"object", "list"}, {"data", data}});
  });
}

void ContextRoutes::Change(const HttpRequest& request,
                           const std::shared_ptr<HttpReply>& reply) const {
  const std::string rest = request.path.substr(kContexts.size());
  const size_t slash = rest.find('/');
  const std::string id = rest.substr(0, slash);
  const std::string action = slash == std::string::npos ? "" : rest.substr(slash + 1);
  const bool drop = request.method == "DELETE";
  const bool known =
      drop ? action.empty()
           : action == "save" || action == "load" || action == "pin" || action == "unpin";
  if (id.empty() || !known) {
    return SendStatus(*reply, NotFound(fmt::format(
                                  "there is no {} {}, expected POST {}ID/save, load, pin or "
                                  "unpin, or DELETE {}ID",
                                  request.method, Printable(request.path), kContexts, kContexts)));
  }
  scheduler.Call([routes = *this, id, action, drop, reply] {
    Scheduler& of = routes.scheduler;
    // From the engine's thread alone.
    const auto show = [routes, reply](const std::string& shown) {
      for (const ListedContext& c : routes.scheduler.Contexts()) {
        if (c.id == shown) return SendJson(*reply, JsonOf(routes.core, c));
      }
      SendStatus(*reply, NotFound(fmt::format("there is no context {}", Printable(shown))));
    };
    if (action == "save") {
      // The scheduler may have gone when it is written, but not the store.
      return of.SaveContext(
          id, [&core = routes.core, store = routes.store, reply](const Result<std::string>& saved) {
            if (!saved.ok()) return SendStatus(*reply, saved.status());
            const auto file = store->Find(*saved);
            if (file) return SendJson(*reply, JsonOf(core, ListedOf(*store, *file)));
            SendStatus(*reply, NotFound(fmt::format("context {} is gone", *saved)));
          });
    }
    if (action == "load") {
      return of.LoadContext(id, [show, reply](const Result<std::string>& loaded) {
        loaded.ok() ? show(*loaded) : SendStatus(*reply, loaded.status());
      });
    }
    const Status done = drop ? of.DropContext(id) : of.PinContext(id, action == "pin");
    if (!done.ok()) return SendStatus(*reply, done);
    if (!drop) return show(id);
    SendJson(*reply, {{"id", id}, {"object", "context"}, {"deleted", true}});
  });
}

}  // namespace omnikv::server
