#include "omnikv/engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>

#include "base/check.h"
#include "base/log.h"
#include "base/memory.h"
#include "engine/core.h"
#include "engine/devices.h"
#include "engine/supported.h"
#include "model/generated.h"
#include "model/limits.h"

namespace omnikv {
namespace {

Status CheckTextSize(size_t bytes) {
  if (bytes <= Tokenizer::kMaxTextBytes) return {};
  return InvalidArgument(
      fmt::format("the text has {} bytes, expected at most {}", bytes, Tokenizer::kMaxTextBytes));
}

class EngineImpl : public Engine {
 public:
  EngineImpl(std::unique_ptr<EngineCore> core, double load_seconds)
      : core_(std::move(core)), load_seconds_(load_seconds) {}

  Result<std::unique_ptr<Session>> NewSession(const PolicyOptions& policy) override {
    return MakeSession(*core_, policy);
  }
  Result<std::unique_ptr<Session>> Restore(const std::string& path) override {
    return RestoreSession(*core_, path);
  }
  Result<std::vector<int32_t>> Tokenize(std::string_view text, bool add_special,
                                        bool parse_special) const override {
    OKV_RETURN_IF_ERROR(NeedTokenizer(*core_));
    return TextTokens(core_->text, text,
                      {.add_special = add_special, .parse_special = parse_special});
  }
  Result<std::string> Detokenize(const std::vector<int32_t>& tokens) const override {
    OKV_RETURN_IF_ERROR(NeedTokenizer(*core_));
    return core_->text.tokenizer->Decode(tokens, /*skip_special=*/false);
  }
  Result<std::vector<int32_t>> ChatPrompt(const std::vector<ChatMessage>& messages) const override {
    OKV_RETURN_IF_ERROR(NeedTokenizer(*core_));
    return ChatTokens(core_->text, core_->options.model, messages);
  }

  bool has_chat_template() const override {
    return core_->text.chat_template.has_value() || !core_->text.chat_template_status.ok();
  }

  Status CheckPrompt(const std::vector<int32_t>& tokens) const override {
    return CheckTokens(*core_, tokens);
  }
  Status CheckPolicy(const PolicyOptions& policy) const override {
    const bool fetches = core_->plan.host_layers > 0;
    OKV_ASSIGN_OR_RETURN(
        const std::unique_ptr<Policy> prepared,
        PolicyFor(policy, core_->config, context(), core_->bank->config().dtype, fetches));
    return CheckLayout(*core_, policy.name, *prepared);
  }

  int64_t context() const override { return core_->bank->config().max_tokens; }
  int32_t vocab() const override { return core_->config.vocab; }
  std::string device() const override { return core_->backend->Describe(); }
  double load_seconds() const override { return load_seconds_; }
  size_t weight_bytes() const override { return core_->weights.bytes; }
  EngineCore& core() { return *core_; }
  const EngineCore& core() const { return *core_; }
  void set_load_seconds(double seconds) { load_seconds_ = seconds; }

 private:
  std::unique_ptr<EngineCore> core_;
  double load_seconds_;
};

}  // namespace

Result<std::vector<int32_t>> TextTokens(const ModelText& text, std::string_view plain,
                                        EncodeOptions options) {
  OKV_RETURN_IF_ERROR(CheckTextSize(plain.size()));
  return text.tokenizer->Encode(plain, options);
}

Result<std::vector<TextSpan>> RenderChat(const ModelText& text, const std::string& model,
                                         ChatInput input) {
  OKV_RETURN_IF_ERROR(text.chat_template_status);
  if (!text.chat_template) {
    return Unsupported(fmt::format("{} has no chat template", model));
  }
  input.bos_token = text.bos_token;
  input.eos_token = text.eos_token;
  return text.chat_template->Render(input);
}

Result<std::vector<int32_t>> EncodeChat(const ModelText& text, const std::vector<TextSpan>& spans) {
  size_t bytes = 0;  // a template may repeat what it is given
  for (const TextSpan& span : spans) bytes += span.text.size();
  OKV_RETURN_IF_ERROR(CheckTextSize(bytes));
  // The template writes the special tokens itself.
  return text.tokenizer->EncodeSpans(spans, /*add_special=*/false);
}

Result<std::vector<int32_t>> ChatTokens(const ModelText& text, const std::string& model,
                                        const std::vector<ChatMessage>& messages) {
  ChatInput input;
  input.messages = nlohmann::ordered_json::array();
  size_t bytes = 0;
  for (const ChatMessage& m : messages) {
    bytes += m.content.size();
    input.messages.push_back({{"role", m.role}, {"content", m.content}});
  }
  OKV_RETURN_IF_ERROR(CheckTextSize(bytes));
  input.add_generation_prompt = true;
  OKV_ASSIGN_OR_RETURN(const std::vector<TextSpan> spans,
                       RenderChat(text, model, std::move(input)));
  return EncodeChat(text, spans);
}

std::vector<int32_t> TurnEnd(const ModelText& text) {
  if (!text.chat_template) return {};
  ChatInput input;
  input.messages = nlohmann::ordered_json::array({{{"role", "user"}, {"content", "a"}}});
  input.add_generation_prompt = true;
  input.bos_token = text.bos_token;
  input.eos_token = text.eos_token;
  auto spans = text.chat_template->Render(input);
  if (!spans.ok()) return {};
  const auto said = std::find_if(spans->rbegin(), spans->rend(),
                                 [](const TextSpan& span) { return span.literal; });
  if (said == spans->rend()) return {};
  const std::vector<TextSpan> rest(said.base(), spans->end());
  auto tokens = text.tokenizer->EncodeSpans(rest, /*add_special=*/false);
  return tokens.ok() ? *tokens : std::vector<int32_t>{};
}

Result<std::vector<int32_t>> NextTurn(const ModelText& text, const std::string& model,
                                      std::string_view said) {
  OKV_RETURN_IF_ERROR(CheckTextSize(said.size()));
  const std::string answer = "b";
  ChatInput input;
  input.messages = nlohmann::ordered_json::array({{{"role", "user"}, {"content", "a"}},
                                                  {{"role", "assistant"}, {"content", answer}},
                                                  {{"role", "user"}, {"content", said}}});
  input.add_generation_prompt = true;
  OKV_ASSIGN_OR_RETURN(const std::vector<TextSpan> spans,
                       RenderChat(text, model, std::move(input)));
  const auto answered = std::find_if(spans.begin(), spans.end(), [&](const TextSpan& span) {
    return span.literal && span.text == answer;
  });
  if (answered == spans.end()) {
    return Unsupported(
        fmt::format("{}: its chat template does not show where an answer ends", model));
  }
  return EncodeChat(text, {std::next(answered), spans.end()});
}

Status NeedTokenizer(const EngineCore& core) {
  if (core.text.tokenizer != nullptr || !core.text_status.ok()) return core.text_status;
  return Unsupported(fmt::format("{} has no tokenizer", core.options.model));
}

EngineCore& CoreOf(Engine& engine) {
  return static_cast<EngineImpl&>(engine).core();
}
const EngineCore& CoreOf(const Engine& engine) {
  return static_cast<const EngineImpl&>(engine).core();
}

namespace {

// Needs the backend and the model's config, and no weights yet.
Status OpenBank(EngineCore& core) {
  OKV_ASSIGN_OR_RETURN(
      core.bank, Bank::Create(*core.backend,
                              MakeBankConfig(core.config, core.plan, core.options.max_sessions)));
  return {};
}

// What an engine needs beside its weights and its bank, which are there.
Status OpenWorkspace(EngineCore& core) {
  const MemoryPlan& plan = core.plan;
  OKV_ASSIGN_OR_RETURN(
      core.work, Workspace::Create(*core.backend, core.config, plan.chunk,
                                   MaxOutRows(core.config, plan.chunk, core.options.max_sessions)));
  return core.backend->AwaitShared();
}

}  // namespace

Result<std::unique_ptr<Engine>> MakeEngine(std::unique_ptr<EngineCore> core, const MemoryPlan& plan,
                                           double load_seconds) {
  core->plan = plan;
  OKV_RETURN_IF_ERROR(OpenBank(*core));
  OKV_RETURN_IF_ERROR(OpenWorkspace(*core));
  return std::unique_ptr<Engine>(std::make_unique<EngineImpl>(std::move(core), load_seconds));
}

Result<EngineModel> ModelOfFiles(const std::string& path) {
  OKV_ASSIGN_OR_RETURN(ModelFiles opened, OpenModel(path));
  const auto files = std::make_shared<const ModelFiles>(std::move(opened));
  EngineModel model{.config = files->config, .format = FormatOfAll(*files)};
  OKV_ASSIGN_OR_RETURN(model.weight_bytes, WeightBytes(*files));
  auto text = LoadText(*files);
  model.text_status = text.status();
  if (text.ok()) model.text = std::move(*text);
  model.load = [files](Backend& backend, const EngineModel::Progress& progress) {
    return LoadWeights(*files, backend, progress);
  };
  return model;
}

EngineModel MadeUpModel(ModelConfig config, DType format) {
  const size_t bytes = GeneratedWeightBytes(config, format);
  const auto generate = [config, format](Backend& backend, const EngineModel::Progress&) {
    return GenerateWeights(backend, config, format);
  };
  return {.config = std::move(config), .weight_bytes = bytes, .format = format, .load = generate};
}

Result<std::unique_ptr<Engine>> Engine::Load(const EngineOptions& options) {
  return LoadEngine(options, [&] { return MakeBackend(options); });
}

Result<std::unique_ptr<Engine>> LoadEngine(const EngineOptions& options, const BackendMaker& make) {
  OKV_RETURN_IF_ERROR(CheckOptions(options));
  OKV_ASSIGN_OR_RETURN(EngineModel model, ModelOfFiles(options.model));
  // Weights alone can still be run on token ids.
  const Status& text = model.text_status;
  if (!text.ok() && text.code() != StatusCode::kNotFound) return text;
  return LoadEngine(options, std::move(model), make);
}

Result<std::unique_ptr<Engine>> LoadEngine(const EngineOptions& options, EngineModel model,
                                           const BackendMaker& make) {
  using Clock = std::chrono::steady_clock;
  auto start = Clock::now();
  OKV_RETURN_IF_ERROR(CheckOptions(options));
  auto owned = std::make_unique<EngineImpl>(std::make_unique<EngineCore>(), 0);
  EngineCore& core = owned->core();
  core.options = options;
  core.config = std::move(model.config);
  core.text = std::move(model.text);
  core.text_status = model.text_status;
  OKV_ASSIGN_OR_RETURN(core.backend, make());
  OKV_ASSIGN_OR_RETURN(
      core.plan, PlanMemory(options, core.config, model.weight_bytes, model.format, *core.backend));
  const MemoryPlan& plan = core.plan;
  if (plan.context > core.config.max_context) {
    LogInfo(
        "`context` is {}, but the model was trained for {} tokens: past them its answers may fail",
        plan.context, core.config.max_context);
  }
  OKV_RETURN_IF_ERROR(
      PolicyFor(options.policy, core.config, plan.context, plan.kv_dtype, plan.host_layers > 0)
          .status());
  if (options.on_plan) options.on_plan(NeedsOf(plan, *core.backend));
  OKV_RETURN_IF_ERROR(OpenBank(core));  // its memory of the host comes while weights load
  if (options.check) {
    const auto before = Clock::now();
    OKV_RETURN_IF_ERROR(options.check(*owned));
    start += Clock::now() - before;  // the caller's own time
  }
  OKV_RETURN_IF_ERROR(CheckSupported(core, options.policy, 1));
  OKV_ASSIGN_OR_RETURN(core.weights, model.load(*core.backend, options.on_load));
  for (const std::string& note : core.weights.notes) LogVerbose("{}: {}", options.model, note);
  OKV_RETURN_IF_ERROR(OpenWorkspace(core));
  owned->set_load_seconds(std::chrono::duration<double>(Clock::now() - start).count());
  return std::unique_ptr<Engine>(std::move(owned));
}

}  // namespace omnikv
