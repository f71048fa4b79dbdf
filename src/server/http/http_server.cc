#include "server/http/http_server.h"

#include <fmt/format.h>

#include <algorithm>
#include <mutex>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/printable.h"
#include "server/http/connection.h"
#include "server/http/io.h"
#include "server/http/listen.h"

namespace omnikv::server {
namespace {

Status CheckPositive(const char* field, double value) {
  if (value > 0) return Status();
  return InvalidArgument(fmt::format("`{}` is {}, expected more than 0", field, value));
}

Status CheckOptions(const HttpOptions& options) {
  if (options.listen.empty()) {
    return InvalidArgument("`listen` is empty, expected HOST:PORT, [IPv6]:PORT or unix:PATH");
  }
  if (options.certificate_file.empty() != options.key_file.empty()) {
    return InvalidArgument(options.key_file.empty()
                               ? "`key_file` is empty, expected the key of `certificate_file`"
                               : "`certificate_file` is empty, expected that of `key_file`");
  }
  for (const std::string& key : options.api_keys) {
    if (key.empty() || std::any_of(key.begin(), key.end(), [](char c) {
          return static_cast<unsigned char>(c) <= 0x20 || c == 0x7f;
        })) {
      return InvalidArgument(
          "`api_keys` has a key that is empty or has spaces or control characters, which no "
          "header can carry");
    }
  }
  const std::string& prefix = options.prefix;
  if (!prefix.empty() && (prefix.front() != '/' || prefix.back() == '/')) {
    return InvalidArgument(
        fmt::format("`prefix` is {}, expected a path that begins with a slash and ends without one",
                    Printable(prefix)));
  }
  if (options.threads < 1 || options.threads > 256) {
    return InvalidArgument(
        fmt::format("`threads` is {}, expected a number from 1 to 256", options.threads));
  }
  OKV_RETURN_IF_ERROR(
      CheckPositive("max_header_bytes", static_cast<double>(options.max_header_bytes)));
  OKV_RETURN_IF_ERROR(
      CheckPositive("max_connections", static_cast<double>(options.max_connections)));
  OKV_RETURN_IF_ERROR(CheckPositive("header_seconds", options.header_seconds));
  OKV_RETURN_IF_ERROR(CheckPositive("body_seconds", options.body_seconds));
  OKV_RETURN_IF_ERROR(CheckPositive("min_body_rate", options.min_body_rate));
  OKV_RETURN_IF_ERROR(CheckPositive("idle_seconds", options.idle_seconds));
  OKV_RETURN_IF_ERROR(CheckPositive("write_seconds", options.write_seconds));
  return CheckPositive("ping_seconds", options.ping_seconds);
}

}  // namespace

std::string DefaultErrorBody(const HttpRequest&, int status, std::string_view message) {
  const char* type = status == 401   ? "authentication_error"
                     : status >= 500 ? "server_error"
                                     : "invalid_request_error";
  const nlohmann::ordered_json body = {
      {"error", {{"message", message}, {"type", type}, {"code", status}}}};
  return body.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

struct HttpServer::Impl {
  std::vector<Listener> listeners;  // their files are removed when the server goes
  std::vector<std::string> addresses;
  std::shared_ptr<TlsContext> tls;
  std::shared_ptr<ConnectionSet> set;
  IoLoop loop;
  std::mutex mutex;  // Start and Stop
  bool started = false;
  bool stopped = false;
};

HttpServer::HttpServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

HttpServer::~HttpServer() {
  Stop(0);
}

Result<std::unique_ptr<HttpServer>> HttpServer::Open(HttpOptions options, HttpHandler handler) {
  OKV_RETURN_IF_ERROR(CheckOptions(options));
  auto impl = std::make_unique<Impl>();
  if (!options.certificate_file.empty()) {
    OKV_ASSIGN_OR_RETURN(impl->tls, TlsContext::Load(options.certificate_file, options.key_file));
  }
  for (const std::string& where : options.listen) {
    OKV_ASSIGN_OR_RETURN(std::vector<Listener> listeners, ListenOn(where));
    for (Listener& listener : listeners) {
      impl->addresses.push_back(listener.address());
      impl->listeners.push_back(std::move(listener));
    }
  }
  impl->set = std::make_shared<ConnectionSet>(std::move(options), std::move(handler));
  return std::unique_ptr<HttpServer>(new HttpServer(std::move(impl)));
}

const std::vector<std::string>& HttpServer::addresses() const {
  return impl_->addresses;
}

size_t HttpServer::connections() const {
  return impl_->set->size();
}

Status HttpServer::Start() {
  const std::lock_guard lock(impl_->mutex);
  if (impl_->started || impl_->stopped) return Failed("the server of HTTP was started already");
  for (Listener& listener : impl_->listeners) {
    // A unix socket is served in plain text: its file says who may use it.
    OKV_RETURN_IF_ERROR(impl_->loop.Listen(
        listener.Release(), listener.family(), listener.is_path() ? nullptr : impl_->tls,
        [set = impl_->set](std::unique_ptr<Transport> transport) {
          set->Serve(std::move(transport));
        }));
  }
  OKV_RETURN_IF_ERROR(impl_->loop.Start(impl_->set->options.threads));
  impl_->started = true;
  return Status();
}

void HttpServer::Stop(double grace_seconds) {
  const std::lock_guard lock(impl_->mutex);
  if (impl_->stopped) return;
  impl_->stopped = true;
  if (impl_->started) {
    impl_->loop.CloseListeners();
    impl_->set->BeginStop();
    impl_->set->WaitUntilEmpty(grace_seconds);
    impl_->set->CutAll();
    impl_->loop.Join();
  }
  impl_->listeners.clear();
  impl_->set->handler = nullptr;
}

}  // namespace omnikv::server
