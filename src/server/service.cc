#include "server/service.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <boost/asio/post.hpp>
#include <boost/asio/thread_pool.hpp>
#include <chrono>
#include <mutex>
#include <optional>
#include <random>
#include <utility>

#include "base/log.h"
#include "base/printable.h"
#include "omnikv/version.h"
#include "server/context_routes.h"
#include "server/generation.h"
#include "server/grammar/grammar.h"
#include "server/grammar_filter.h"
#include "server/metrics.h"
#include "server/page/page.h"
#include "server/pdf_text.h"
#include "server/prompts.h"
#include "server/protocol/anthropic_messages.h"
#include "server/protocol/conversation.h"
#include "server/protocol/fields.h"
#include "server/protocol/model_name.h"
#include "server/protocol/openai_chat.h"
#include "server/protocol/openai_completions.h"
#include "server/protocol/openai_responses.h"
#include "server/replies.h"

namespace omnikv::server {
namespace {

struct Protocol {
  Result<Question> (*parse)(const Json& body);
  std::unique_ptr<Answering> (*answer)(const Question& question, Reply reply,
                                       const AnswerForm& form);
  Json (*error)(const Status& status);
};

const Protocol kChat = {ParseChat, AnswerChat, OpenAiError};
const Protocol kCompletions = {ParseCompletions,
                               [](const Question& question, Reply reply, const AnswerForm&) {
                                 return AnswerCompletions(question, std::move(reply));
                               },
                               OpenAiError};
const Protocol kMessages = {ParseMessages, AnswerMessages, AnthropicError};
const Protocol kResponses = {ParseResponses, AnswerResponses, OpenAiError};

const Protocol& ProtocolOf(std::string_view path) {
  return path.starts_with("/v1/messages") ? kMessages : kChat;
}

std::string RandomId() {
  static thread_local std::mt19937_64 random{std::random_device{}()};
  return fmt::format("{:016x}", random());
}

void SendError(HttpReply& reply, const Protocol& protocol, const Status& status) {
  SendError(reply, status, protocol.error(status));
}

void SendResult(HttpReply& reply, const Protocol& protocol, const Result<Json>& body) {
  body.ok() ? SendJson(reply, *body) : SendError(reply, protocol, body.status());
}

}  // namespace

struct Service::Impl : std::enable_shared_from_this<Impl> {
  Impl(const EngineCore& engine, Scheduler& of, ServiceOptions given)
      : core(engine),
        scheduler(of),
        options(std::move(given)),
        started(Now()),
        work(static_cast<size_t>(std::max(1, options.threads))) {
    if (core.text.chat_template) form = DetectAnswerForm(core.text.chat_template->written());
  }

  static int64_t Now() {
    return std::chrono::duration_cast<std::chrono::seconds>(
               std::chrono::system_clock::now().time_since_epoch())
        .count();
  }

  struct Route {
    std::string_view method, path;
    void (Impl::*handle)(const HttpRequest& request, const std::shared_ptr<HttpReply>& reply);
    bool slow;  // reads a text, and so gets a thread of ours
  };
  static const std::vector<Route>& Routes() {
    static const std::vector<Route> routes = {
        {"GET", "/", &Impl::Page, false},
        {"GET", "/health", &Impl::Health, false},
        {"GET", "/v1/models", &Impl::Models, false},
        {"GET", "/v1/models/", &Impl::OneModel, false},
        {"GET", "/metrics", &Impl::MetricsPage, false},
        {"GET", "/props", &Impl::Props, false},
        {"GET", "/version", &Impl::Version, false},
        {"GET", "/slots", &Impl::Slots, false},
        {"GET", "/v1/contexts", &Impl::Contexts, false},
        {"POST", "/v1/contexts/", &Impl::ChangeContext, false},
        {"DELETE", "/v1/contexts/", &Impl::ChangeContext, false},
        {"POST", "/v1/completions", &Impl::Completions, true},
        {"POST", "/v1/chat/completions", &Impl::Chat, true},
        {"POST", "/v1/responses", &Impl::Responses, true},
        {"POST", "/v1/messages", &Impl::Messages, true},
        {"POST", "/v1/messages/count_tokens", &Impl::CountTokens, true},
        {"POST", "/v1/documents/text", &Impl::DocumentText, false},
        {"POST", "/v1/embeddings", &Impl::Embeddings, false},
        {"POST", "/tokenize", &Impl::Tokenize, true},
        {"POST", "/detokenize", &Impl::Detokenize, true},
        {"POST", "/apply-template", &Impl::ApplyTemplate, true},
    };
    return routes;
  }

  void Page(const HttpRequest&, const std::shared_ptr<HttpReply>& reply) { SendPage(*reply); }
  void Health(const HttpRequest&, const std::shared_ptr<HttpReply>& reply) {
    SendJson(*reply, {{"status", "ok"}});
  }
  void Version(const HttpRequest&, const std::shared_ptr<HttpReply>& reply) {
    SendJson(*reply, {{"version", OMNIKV_VERSION}});
  }
  Json Model() const {
    return {{"id", options.name},
            {"object", "model"},
            {"created", started},
            {"owned_by", "omnikv"},
            {"max_model_len", core.bank->config().max_tokens}};
  }
  void Models(const HttpRequest&, const std::shared_ptr<HttpReply>& reply) {
    SendJson(*reply, {{"object", "list"}, {"data", Json::array({Model()})}});
  }
  void OneModel(const HttpRequest& request, const std::shared_ptr<HttpReply>& reply) {
    const std::string name = request.path.substr(std::string_view("/v1/models/").size());
    if (name == options.name) return SendJson(*reply, Model());
    SendError(*reply, kChat, NoModel(name));
  }
  void MetricsPage(const HttpRequest&, const std::shared_ptr<HttpReply>& reply) {
    std::optional<ContextStoreStats> stored;
    if (options.store != nullptr) stored = options.store->stats();
    reply->Send({.content_type = "text/plain; version=0.0.4; charset=utf-8"},
                metrics->Text(scheduler.stats(), stored, options.name));
  }
  void Props(const HttpRequest&, const std::shared_ptr<HttpReply>& reply) {
    const BankConfig& bank = core.bank->config();
    Json settings = Json::object();
    for (const auto& [key, value] : options.policy.settings) settings[key] = value;
    SendJson(*reply, {{"model", options.name},
                      {"version", OMNIKV_VERSION},
                      {"device", core.backend->Describe()},
                      {"context", bank.max_tokens},
                      {"kv_tokens", bank.PoolTokens()},
                      {"kv_dtype", DTypeName(bank.dtype)},
                      {"policy", options.policy.name},
                      {"settings", settings},
                      {"max_tokens", options.max_tokens},
                      {"has_chat_template", core.text.chat_template.has_value()}});
  }
  void Slots(const HttpRequest&, const std::shared_ptr<HttpReply>& reply) {
    scheduler.Call([&scheduler = scheduler, reply] {
      Json slots = Json::array();
      for (const ListedContext& c : scheduler.Contexts()) {
        if (c.request == 0) continue;
        slots.push_back({{"id", slots.size()},
                         {"is_processing", true},
                         {"request", c.request},
                         {"made_by", c.made_by},
                         {"n_ctx", c.tokens},
                         {"prompt_tokens", c.prompt_tokens},
                         {"answer_tokens", c.answer_tokens}});
      }
      SendJson(*reply, slots);
    });
  }
  void Contexts(const HttpRequest&, const std::shared_ptr<HttpReply>& reply) {
    ContextRoutes{core, scheduler, options.store}.List(reply);
  }
  void ChangeContext(const HttpRequest& request, const std::shared_ptr<HttpReply>& reply) {
    ContextRoutes{core, scheduler, options.store}.Change(request, reply);
  }
  // Calls task(request, reply) on a thread of `pool`. The bodies that wait for one are bounded.
  template <typename Task>
  void Post(boost::asio::thread_pool& pool, HttpRequest request,
            const std::shared_ptr<HttpReply>& reply, Task task) {
    constexpr size_t kMostWaiting = size_t{1} << 30;
    const size_t bytes = request.body.size();
    if (waiting_bytes.fetch_add(bytes) + bytes > kMostWaiting) {
      waiting_bytes -= bytes;
      return reply->Send({.status = 503, .headers = {{"retry-after", "1"}}},
                         ErrorBodyOf(request, 503, "too many bodies of requests wait"));
    }
    boost::asio::post(pool, [this, bytes, task, request = std::move(request), reply] {
      try {
        task(request, reply);
      } catch (const std::exception& error) {
        // The reply sends status 500 when it is freed.
        LogInfo("a handler of HTTP failed: {}", error.what());
      }
      waiting_bytes -= bytes;
    });
  }

  void DocumentText(const HttpRequest& request, const std::shared_ptr<HttpReply>& reply) {
    Post(documents, request, reply,
         [](const HttpRequest& document, const std::shared_ptr<HttpReply>& to) {
           const Result<std::string> text = PdfText(document.body);
           if (text.ok()) return SendJson(*to, {{"object", "document.text"}, {"text", *text}});
           if (text.status().code() != StatusCode::kUnsupported) {
             return SendError(*to, kChat, text.status());
           }
           to->Send({.status = 501}, Dump(OpenAiError(text.status())));
         });
  }
  void Embeddings(const HttpRequest&, const std::shared_ptr<HttpReply>& reply) {
    SendError(*reply, kChat,
              Unsupported("this server has no embeddings: it answers /v1/chat/completions, "
                          "/v1/completions, /v1/responses and /v1/messages"));
  }

  void Completions(const HttpRequest& request, const std::shared_ptr<HttpReply>& reply) {
    Generate(kCompletions, request, reply);
  }
  void Chat(const HttpRequest& request, const std::shared_ptr<HttpReply>& reply) {
    Generate(kChat, request, reply);
  }
  void Responses(const HttpRequest& request, const std::shared_ptr<HttpReply>& reply) {
    Generate(kResponses, request, reply);
  }
  void Messages(const HttpRequest& request, const std::shared_ptr<HttpReply>& reply) {
    Generate(kMessages, request, reply);
  }

  // The policy that a question wants.
  Result<PolicyOptions> PolicyOf(const Question& question, const ModelName& name) const {
    PolicyOptions policy;
    policy.name = !question.policy.empty() ? question.policy : name.policy;
    policy.settings = name.settings;
    // Settings without a policy change those of the server's.
    if (policy.name.empty()) {
      policy.name = options.policy.name;
      policy.settings.insert(policy.settings.begin(), options.policy.settings.begin(),
                             options.policy.settings.end());
    }
    for (const auto& [key, value] : question.settings) {
      std::erase_if(policy.settings, [&](const auto& setting) { return setting.first == key; });
      policy.settings.emplace_back(key, value);
    }
    OKV_RETURN_IF_ERROR(CheckFiles(policy));
    return policy;
  }

  // Files are the server's: a request may name those that it was started with, and no others.
  Status CheckFiles(const PolicyOptions& policy) const {
    const auto info = ResolvePolicy(policy.name, core.config.name, GlobalLayers(core.config));
    if (!info.ok()) return {};  // who opens it says so
    for (const SettingSpec& spec : (*info)->settings) {
      if (spec.type != SettingType::kFile) continue;
      for (const auto& setting : policy.settings) {
        const SettingList& own = options.policy.settings;
        if (setting.first != spec.key || setting.second == spec.default_value ||
            std::find(own.begin(), own.end(), setting) != own.end()) {
          continue;
        }
        return InvalidArgument(fmt::format(
            "policy {}: {} is {}, expected what the server was started with: a request cannot name "
            "files of the server",
            policy.name, spec.key, Printable(setting.second)));
      }
    }
    return {};
  }

  static Status CheckBuilt(const Question& question) {
    if (question.echo && question.top_logprobs >= 0) {
      return Unsupported("log-probabilities of the prompt (echo with logprobs) are not built");
    }
    return {};
  }

  // How the model is to write its answer to the question, which may change for it: calls of tools
  // that must come, in another format than Hermes', follow a schema, and so does the rest of a
  // conversation with calls whose format is not known.
  AnswerForm FormOf(Question& question) const {
    AnswerForm of = form;
    if (question.tools.is_null()) return of;
    if (MustCall(question) && of.tools != ToolFormat::kHermes) of.tools = ToolFormat::kGeneric;
    // Where a call is only offered, a template that shows no tools leaves the answer free.
    if (of.tools == ToolFormat::kGeneric && (MustCall(question) || HasCalls(question))) {
      UseGenericForm(&question);
    }
    return of;
  }
  static bool HasCalls(const Question& question) {
    return std::any_of(question.messages.begin(), question.messages.end(), [](const Json& message) {
      return message.contains("tool_calls") || message.value("role", "") == "tool";
    });
  }
  static bool MustCall(const Question& question) {
    return question.tool_choice.kind == ToolChoice::Kind::kRequired ||
           question.tool_choice.kind == ToolChoice::Kind::kNamed;
  }

  // What the answer must fit; nothing: it is free.
  static std::optional<Constraint> ConstraintOf(const Question& question, const AnswerForm& of) {
    if (MustCall(question) && of.tools == ToolFormat::kHermes) {
      Calls calls{.several = question.parallel_tool_calls, .separator = "\n"};
      for (const Json& tool : question.tools) {
        const Json& function = tool["function"];
        const Json& name = function["name"];
        const bool named = question.tool_choice.kind == ToolChoice::Kind::kNamed;
        if (named && name != question.tool_choice.name) continue;
        const bool any = !function.contains("parameters") || !function["parameters"].is_object();
        calls.forms.push_back(
            {.prefix = fmt::format("<tool_call>\n{{\"name\": {}, \"arguments\": ", Dump(name)),
             .schema = any ? R"({"type": "object"})" : Dump(function["parameters"]),
             .suffix = "}\n</tool_call>"});
      }
      return calls;
    }
    switch (question.format.kind) {
      case AnswerFormat::Kind::kJsonObject:
        return JsonObject{};
      case AnswerFormat::Kind::kJsonSchema:
        return JsonSchema{.text = Dump(question.format.schema)};
      case AnswerFormat::Kind::kText:
        break;
    }
    return {};
  }

  // Made when it is first asked for: it looks at every token of the vocabulary.
  Result<GrammarEngine*> Grammars() {
    const std::lock_guard lock(grammar_mutex);
    if (grammars == nullptr) {
      OKV_RETURN_IF_ERROR(NeedTokenizer(core));
      OKV_ASSIGN_OR_RETURN(grammars, GrammarEngine::Create(*core.text.tokenizer, core.config.vocab,
                                                           core.config.eos_ids));
    }
    return grammars.get();
  }
  Result<Generation::MakeFilter> FilterOf(const Question& question, const AnswerForm& of) {
    const std::optional<Constraint> constraint = ConstraintOf(question, of);
    if (!constraint) return Generation::MakeFilter();
    if (question.generate.ignore_eos) {
      return InvalidArgument("ignore_eos is true, but an answer that fits a form ends with it");
    }
    OKV_ASSIGN_OR_RETURN(GrammarEngine* const engine, Grammars());
    OKV_ASSIGN_OR_RETURN(const std::shared_ptr<const Grammar> grammar,
                         engine->Compile(*constraint));
    return Generation::MakeFilter([grammar, self = shared_from_this()] {
      return std::make_shared<GrammarFilter>(Matcher(grammar), self->core.config.vocab,
                                             self->masks);
    });
  }

  Status NoModel(const std::string& name) const {
    return NotFound(
        fmt::format("there is no model {} here, but {}", Printable(name), options.name));
  }

  // The common part of all requests of a question; kNotFound for another model.
  Result<Request> RequestOf(Question& question) const {
    OKV_ASSIGN_OR_RETURN(const ModelName name, ParseModelName(question.model));
    const std::vector<std::string>& also = options.aliases;
    const bool known = name.name.empty() || name.name == options.name ||
                       std::find(also.begin(), also.end(), name.name) != also.end() ||
                       std::find(also.begin(), also.end(), "*") != also.end();
    if (!known) return NoModel(name.name);
    Request request;
    OKV_ASSIGN_OR_RETURN(request.policy, PolicyOf(question, name));
    OKV_RETURN_IF_ERROR(CheckBuilt(question));
    request.generate = question.generate;
    // Marks of calls are special tokens in many models.
    request.generate.special_text = !question.tools.is_null();
    if (!question.limited) request.generate.max_tokens = options.max_tokens;
    if (!question.seeded) request.generate.sampling.seed = std::random_device{}();
    request.top_logprobs = question.top_logprobs;
    request.priority = question.priority;
    if (options.request_seconds > 0) {
      request.deadline =
          Scheduler::Clock::now() + std::chrono::duration_cast<Scheduler::Clock::duration>(
                                        std::chrono::duration<double>(options.request_seconds));
    }
    return request;
  }

  void Generate(const Protocol& protocol, const HttpRequest& http,
                const std::shared_ptr<HttpReply>& reply) {
    const Status status = [&]() -> Status {
      OKV_ASSIGN_OR_RETURN(const Json body, ParseBody(http.body));
      OKV_ASSIGN_OR_RETURN(Question question, protocol.parse(body));
      OKV_ASSIGN_OR_RETURN(const Request request, RequestOf(question));
      AnswerForm answer_form = FormOf(question);
      OKV_ASSIGN_OR_RETURN(const Generation::MakeFilter filter, FilterOf(question, answer_form));
      OKV_ASSIGN_OR_RETURN(const Prompts prompts, PromptsOf(core, question));
      answer_form.in_reasoning = EndsInReasoning(prompts.end, answer_form);
      server::Reply made{.id = RandomId(), .model = options.name, .created = Now()};
      for (const auto& prompt : prompts.tokens) made.prompt_tokens += std::ssize(prompt);
      auto answering = protocol.answer(question, std::move(made), answer_form);
      const auto generation = std::make_shared<Generation>(
          Engines{core, scheduler, metrics}, std::move(question), std::move(answering), reply,
          [error = protocol.error](const Status& failed) { return Dump(error(failed)); });
      generation->Run(prompts, request, filter);
      return {};
    }();
    if (!status.ok()) SendError(*reply, protocol, status);
  }

  void CountTokens(const HttpRequest& http, const std::shared_ptr<HttpReply>& reply) {
    const auto counted = [&]() -> Result<Json> {
      OKV_ASSIGN_OR_RETURN(const Json body, ParseBody(http.body));
      OKV_ASSIGN_OR_RETURN(const Question question, ParseCountTokens(body));
      OKV_ASSIGN_OR_RETURN(const Prompts prompts, PromptsOf(core, question));
      return Json{{"input_tokens", prompts.tokens.front().size()}};
    }();
    SendResult(*reply, kMessages, counted);
  }

  // The bytes of text that each token stands for, so that clients find tokens in a text. Of tokens
  // that are parts of one character, the last one has all of it.
  Result<Json> LengthsOf(const std::vector<int32_t>& tokens) const {
    constexpr size_t kMostParts = 8;
    Json lengths = Json::array();
    std::vector<int32_t> parts;
    for (const int32_t token : tokens) {
      parts.push_back(token);
      OKV_ASSIGN_OR_RETURN(const std::string text,
                           core.text.tokenizer->Decode(parts, /*skip_special=*/false));
      const bool cut = text.find("\uFFFD") != std::string::npos && parts.size() < kMostParts;
      lengths.push_back(cut ? 0 : text.size());
      if (!cut) parts.clear();
    }
    return lengths;
  }

  void Tokenize(const HttpRequest& http, const std::shared_ptr<HttpReply>& reply) {
    const auto answer = [&]() -> Result<Json> {
      OKV_RETURN_IF_ERROR(NeedTokenizer(core));
      OKV_ASSIGN_OR_RETURN(const Json body, ParseBody(http.body));
      FieldReader fields(body);
      std::string content;
      EncodeOptions encode{.add_special = false, .parse_special = true};
      if (!fields.String("content", &content)) fields.Fail("content", "a text");
      fields.Bool("add_special", &encode.add_special);
      bool with_lengths = false;
      fields.Bool("with_lengths", &with_lengths);
      fields.Bool("parse_special", &encode.parse_special);
      OKV_RETURN_IF_ERROR(fields.status());
      OKV_ASSIGN_OR_RETURN(const std::vector<int32_t> tokens,
                           TextTokens(core.text, content, encode));
      Json said = {{"tokens", tokens}};
      if (!with_lengths) return said;
      OKV_ASSIGN_OR_RETURN(said["lengths"], LengthsOf(tokens));
      return said;
    }();
    SendResult(*reply, kChat, answer);
  }

  void Detokenize(const HttpRequest& http, const std::shared_ptr<HttpReply>& reply) {
    const auto answer = [&]() -> Result<Json> {
      OKV_RETURN_IF_ERROR(NeedTokenizer(core));
      OKV_ASSIGN_OR_RETURN(const Json body, ParseBody(http.body));
      FieldReader fields(body);
      const Json* tokens = fields.Array("tokens");
      if (tokens == nullptr) fields.Fail("tokens", "an array of tokens");
      OKV_RETURN_IF_ERROR(fields.status());
      std::vector<int32_t> ids;
      for (const Json& token : *tokens) {
        const auto* id = token.get_ptr<const int64_t*>();
        if (id == nullptr || *id < 0 || *id >= core.config.vocab) {
          return Wrong("tokens", token, fmt::format("tokens from 0 to {}", core.config.vocab - 1));
        }
        ids.push_back(static_cast<int32_t>(*id));
      }
      OKV_ASSIGN_OR_RETURN(const std::string text,
                           core.text.tokenizer->Decode(ids, /*skip_special=*/false));
      return Json{{"content", text}};
    }();
    SendResult(*reply, kChat, answer);
  }

  void ApplyTemplate(const HttpRequest& http, const std::shared_ptr<HttpReply>& reply) {
    const auto answer = [&]() -> Result<Json> {
      OKV_ASSIGN_OR_RETURN(const Json body, ParseBody(http.body));
      OKV_ASSIGN_OR_RETURN(const Question question, ParseChat(body));
      OKV_ASSIGN_OR_RETURN(const std::vector<TextSpan> spans, RenderQuestion(core, question));
      std::string text;
      for (const TextSpan& span : spans) text += span.text;
      return Json{{"prompt", text}};
    }();
    SendResult(*reply, kChat, answer);
  }

  const EngineCore& core;
  Scheduler& scheduler;
  ServiceOptions options;
  int64_t started;
  AnswerForm form;
  std::shared_ptr<Metrics> metrics = std::make_shared<Metrics>();
  std::mutex grammar_mutex;
  std::unique_ptr<GrammarEngine> grammars;
  boost::asio::thread_pool work;
  std::atomic<size_t> waiting_bytes{0};  // of bodies in tasks of these (Post)
  boost::asio::thread_pool masks{1};     // of grammars
  // One PDF at a time: a long one holds up no prompt.
  boost::asio::thread_pool documents{1};
};

Service::Service(const EngineCore& core, Scheduler& scheduler, ServiceOptions options)
    : impl_(std::make_shared<Impl>(core, scheduler, std::move(options))) {}

Service::~Service() {
  impl_->work.join();
  impl_->documents.stop();
  impl_->documents.join();
}

void Service::Handle(HttpRequest request, std::shared_ptr<HttpReply> reply) {
  std::string allowed;
  for (const Impl::Route& route : Impl::Routes()) {
    // A path that ends with a slash is the beginning of others.
    const bool beginning = route.path.size() > 1 && route.path.back() == '/';
    const bool here = beginning ? request.path.starts_with(route.path) : request.path == route.path;
    if (!here) continue;
    const bool head = request.method == "HEAD" && route.method == "GET";
    if (route.method != request.method && !head) {
      allowed = route.method;
      continue;
    }
    Impl* const impl = impl_.get();  // which waits for what is posted
    const auto handle = route.handle;
    if (!route.slow) return (impl->*handle)(request, reply);
    return impl->Post(impl->work, std::move(request), reply,
                      [impl, handle](const HttpRequest& of, const std::shared_ptr<HttpReply>& to) {
                        (impl->*handle)(of, to);
                      });
  }
  const Protocol& protocol = ProtocolOf(request.path);
  if (!allowed.empty()) {
    const Status wrong = InvalidArgument(
        fmt::format("{} takes {}, not {}", request.path, allowed, Printable(request.method)));
    return reply->Send({.status = 405, .headers = {{"allow", allowed}}},
                       Dump(protocol.error(wrong)));
  }
  SendError(*reply, protocol, NotFound(fmt::format("there is no {}", Printable(request.path))));
}

void SendPage(HttpReply& reply) {
  reply.Send({.content_type = "text/html; charset=utf-8",
              .headers = {{"content-security-policy",
                           "default-src 'none'; style-src 'unsafe-inline'; script-src "
                           "'unsafe-inline'; connect-src 'self'; img-src data: blob:; "
                           "frame-ancestors 'none'"},
                          {"cache-control", "no-cache"},
                          {"x-content-type-options", "nosniff"}}},
             std::string(PageHtml()));
}

std::string ErrorBodyOf(const HttpRequest& request, int status, std::string_view message) {
  const StatusCode code = status == 404   ? StatusCode::kNotFound
                          : status == 503 ? StatusCode::kResourceExhausted
                          : status >= 500 ? StatusCode::kFailed
                                          : StatusCode::kInvalidArgument;
  return Dump(ProtocolOf(request.path).error(Status(code, std::string(message))));
}

}  // namespace omnikv::server
