// omnikv serve: answers requests over HTTP.
#include <fmt/format.h>
#include <pthread.h>
#include <sys/resource.h>

#include <atomic>
#include <csignal>
#include <ctime>
#include <filesystem>
#include <memory>
#include <shared_mutex>
#include <thread>

#include "base/log.h"
#include "engine/core.h"
#include "engine/scheduler.h"
#include "flags.h"
#include "policy_file.h"
#include "report.h"
#include "server/http/http_server.h"
#include "server/service.h"

namespace omnikv::tools {
namespace {

using server::HttpReply;
using server::HttpRequest;
using server::HttpServer;
using server::Service;

struct ServeFlags {
  EngineFlags engine;
  PolicyFlags policy;
  SchedulerOptions scheduler;
  server::HttpOptions http;
  server::ServiceOptions service;
  std::string host = "127.0.0.1";
  int port = 8080;
  int64_t kv_tokens = EngineOptions::kAsManyAsFit;
  int32_t kept_contexts = 16;
  std::string api_key_file, max_body, store_size = "8GiB", swap_space = "1GiB";
  ContextStoreOptions store;
  double grace_seconds = 30;
};

// The keys of a file, a line each; empty lines and those that begin with # do not count.
Result<std::vector<std::string>> KeysOf(const std::string& path) {
  OKV_ASSIGN_OR_RETURN(const std::string text, ReadText("--api-key-file", path));
  std::vector<std::string> keys;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    std::string key = text.substr(at, end - at);
    while (!key.empty() && (key.back() == '\r' || key.back() == ' ')) key.pop_back();
    if (!key.empty() && key.front() != '#') keys.push_back(std::move(key));
    at = end + 1;
  }
  if (!keys.empty()) return keys;
  return InvalidArgument(
      fmt::format("--api-key-file is '{}', which has no key, expected one a line", path));
}

// SIGINT and SIGTERM, which every thread that starts from now on leaves to Await.
class Signals {
 public:
  Signals() {
    sigemptyset(&set_);
    sigaddset(&set_, SIGINT);
    sigaddset(&set_, SIGTERM);
    pthread_sigmask(SIG_BLOCK, &set_, nullptr);
  }
  // Whether one came within so many milliseconds.
  bool Await(int ms) const {
    const timespec wait{.tv_sec = ms / 1000, .tv_nsec = (ms % 1000) * 1'000'000L};
    return sigtimedwait(&set_, nullptr, &wait) > 0;
  }

 private:
  sigset_t set_;
};

// A connection is a file: as many as the system allows. Without it, later ones wait.
void AllowManyFiles() {
  rlimit files{};
  if (getrlimit(RLIMIT_NOFILE, &files) != 0) return;
  files.rlim_cur = files.rlim_max;
  setrlimit(RLIMIT_NOFILE, &files);
}

// Who answers: nobody while the model loads.
class Door {
 public:
  void Open(Service* service) {
    const std::unique_lock lock(mutex_);
    service_ = service;
  }
  void Handle(HttpRequest request, std::shared_ptr<HttpReply> reply) {
    const std::shared_lock lock(mutex_);
    if (service_ != nullptr) return service_->Handle(std::move(request), std::move(reply));
    if (request.method == "GET" && request.path == "/") return server::SendPage(*reply);
    reply->Send({.status = 503, .headers = {{"retry-after", "1"}}},
                server::ErrorBodyOf(request, 503, "the model is loading"));
  }

 private:
  std::shared_mutex mutex_;
  Service* service_ = nullptr;
};

Status Serve(ServeFlags f) {
  OKV_ASSIGN_OR_RETURN(EngineOptions options, ToEngineOptions(f.engine));
  OKV_ASSIGN_OR_RETURN(f.service.policy, ToPolicyOptions(f.policy));
  options.policy = f.service.policy;
  options.max_sessions = f.scheduler.seats;
  options.kv_tokens = f.kv_tokens;
  options.kept_contexts = f.kept_contexts;
  if (f.service.name.empty()) {
    f.service.name = std::filesystem::path(options.model).lexically_normal().stem().string();
  }
  if (!f.api_key_file.empty()) {
    OKV_ASSIGN_OR_RETURN(f.http.api_keys, KeysOf(f.api_key_file));
  }
  if (!f.max_body.empty()) {
    OKV_ASSIGN_OR_RETURN(f.http.max_body_bytes, ParseSize("--max-body", f.max_body));
    if (f.http.max_body_bytes == 0) return InvalidArgument("--max-body is 0, expected more");
  }
  if (f.http.listen.empty()) {
    const bool v6 = f.host.find(':') != std::string::npos;
    f.http.listen.push_back(v6 ? fmt::format("[{}]:{}", f.host, f.port)
                               : fmt::format("{}:{}", f.host, f.port));
  }
  f.http.error_body = server::ErrorBodyOf;
  f.http.public_paths = {"/", "/health"};
  OKV_ASSIGN_OR_RETURN(f.store.bytes, ParseSize("--store-size", f.store_size));
  OKV_ASSIGN_OR_RETURN(f.scheduler.swap_bytes, ParseSize("--swap-space", f.swap_space));

  AllowManyFiles();
  const Signals signals;
  Door door;
  OKV_ASSIGN_OR_RETURN(
      const auto http,
      HttpServer::Open(f.http, [&door](HttpRequest request, std::shared_ptr<HttpReply> reply) {
        door.Handle(std::move(request), std::move(reply));
      }));
  OKV_RETURN_IF_ERROR(http->Start());
  OKV_ASSIGN_OR_RETURN(const auto engine, LoadWithProgress(std::move(options)));
  OKV_RETURN_IF_ERROR(engine->CheckPolicy(f.service.policy));
  EngineCore& core = CoreOf(*engine);
  std::unique_ptr<ContextStore> store;
  if (!f.store.folder.empty()) {
    OKV_ASSIGN_OR_RETURN(store, ContextStore::Open(core, f.store));
    LogInfo("{} has {} contexts", f.store.folder, store->stats().contexts);
  }
  OKV_ASSIGN_OR_RETURN(const auto scheduler, Scheduler::Create(core, f.scheduler, store.get()));
  f.service.store = store.get();
  Service service(core, *scheduler, f.service);
  std::thread steps([&] { scheduler->Run(); });
  door.Open(&service);
  for (const std::string& address : http->addresses()) {
    const bool unix_socket = address.starts_with("unix:");
    LogInfo("{} answers on {}{}{}", f.service.name,
            unix_socket                       ? ""
            : f.http.certificate_file.empty() ? "http://"
                                              : "https://",
            address, unix_socket ? "" : f.http.prefix);
  }

  while (!signals.Await(1000)) {
  }
  LogInfo("stopping: what runs may take {} s more; a second signal ends it at once",
          f.grace_seconds);
  std::atomic<bool> closed{false};
  std::thread closing([&] {
    http->Stop(f.grace_seconds);
    closed = true;
  });
  while (!closed) {
    if (signals.Await(50)) scheduler->Stop(/*drain=*/false);
  }
  closing.join();
  scheduler->Stop(/*drain=*/false);
  steps.join();
  return {};
}

}  // namespace

constexpr int64_t kMostFlag = int64_t{1} << 40;
constexpr double kMostSeconds = 1e8;

void AddServe(CLI::App& app, Command& command) {
  auto f = std::make_shared<ServeFlags>();
  CLI::App* sub = app.add_subcommand("serve", "answer requests over HTTP");
  sub->add_option("--host", f->host, "the address to listen on")->capture_default_str();
  sub->add_option("--port", f->port, "its port; 0: any that is free")
      ->check(CLI::Range(0, 65535))
      ->capture_default_str();
  AddRepeatable(*sub, "--listen", f->http.listen,
                "HOST:PORT or unix:PATH instead; may be repeated");
  sub->add_option("--seats", f->scheduler.seats, "requests that run at a time, up to 64")
      ->check(CLI::Range(1, 64))
      ->capture_default_str();
  sub->add_option("--kv-tokens", f->kv_tokens,
                  "tokens of K/V that all of them share, at least a context; default: as many as "
                  "there is room for")
      ->check(CLI::Range(int64_t{1}, kMostFlag));
  sub->add_option("--kept-contexts", f->kept_contexts,
                  "contexts of earlier requests that are kept while there is room")
      ->check(CLI::Range(0, 1 << 30))
      ->capture_default_str();
  CLI::Option* const store = sub->add_option(
      "--store", f->store.folder, "a folder where they are kept besides, for later servers, too");
  sub->add_option("--store-size", f->store_size, "bytes of it at most")
      ->needs(store)
      ->capture_default_str();
  sub->add_option("--swap-space", f->swap_space,
                  "bytes for requests that are preempted; 0: none is")
      ->capture_default_str();
  sub->add_option("--swap-folder", f->scheduler.swap_folder,
                  "a folder on whose disk they are; default: memory");
  sub->add_option("--max-waiting", f->scheduler.max_waiting,
                  "requests that may wait; more are refused")
      ->check(CLI::Range(0, 1 << 30))
      ->capture_default_str();
  sub->add_option("--token-ms", f->scheduler.token_ms,
                  "milliseconds between two tokens while other prompts are read")
      ->check(CLI::Range(0.0, kMostSeconds))
      ->capture_default_str();
  sub->add_option("-n,--max-tokens", f->service.max_tokens,
                  "of an answer whose request gives no limit")
      ->check(CLI::Range(int64_t{1}, kMostFlag))
      ->capture_default_str();
  sub->add_option("--request-timeout", f->service.request_seconds,
                  "seconds until a request is ended; 0: never")
      ->check(CLI::Range(0.0, kMostSeconds))
      ->capture_default_str();
  sub->add_option("--name", f->service.name, "of the model, for clients; default: its file's");
  AddRepeatable(*sub, "--alias", f->service.aliases,
                "one more name of it, or * for any; may be repeated");
  sub->add_option("--api-key-file", f->api_key_file,
                  "a file of keys that clients need, one a line");
  AddRepeatable(*sub, "--cors-origin", f->http.cors_origins,
                "an origin whose pages may ask, or * for any; may be repeated");
  sub->add_option("--api-prefix", f->http.prefix, "what comes before all paths, as /llm");
  sub->add_option("--ssl-cert-file", f->http.certificate_file, "a certificate, for https (PEM)");
  sub->add_option("--ssl-key-file", f->http.key_file, "its key (PEM)");
  sub->add_option("--max-body", f->max_body, "bytes of a request at most; default: 64MiB");
  sub->add_option("--sse-ping", f->http.ping_seconds,
                  "seconds without news until a stream gets a ping")
      ->check(CLI::Range(1.0, kMostSeconds))
      ->capture_default_str();
  sub->add_option("--grace", f->grace_seconds,
                  "seconds that requests have to end once the server is stopped")
      ->check(CLI::Range(0.0, kMostSeconds))
      ->capture_default_str();
  AddPolicyFlags(*sub, f->policy);
  AddEngineFlags(*sub, f->engine);
  sub->callback([&command, f] {
    command = [f]() -> Status {
      OKV_RETURN_IF_ERROR(ApplyPolicyFile(f->engine, f->policy));
      return Serve(*f);
    };
  });
}

}  // namespace omnikv::tools
