#include "omnikv/engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>

#include "base/check.h"
#include "base/log.h"
#include "base/memory.h"
#include "engine/core.h"
#include "engine/devices.h"
#include "model/limits.h"

namespace omnikv {
namespace {

constexpr int32_t kBlockTokens = 64;

// Rows of logits that PromptLogits may ask for at once: bounded by memory, at least one.
int32_t MaxOutRows(const ModelConfig& config, int32_t chunk) {
  constexpr int64_t kLogitsBytes = int64_t{8} << 20;
  return static_cast<int32_t>(
      std::clamp<int64_t>(kLogitsBytes / (int64_t{4} * config.vocab), 1, chunk));
}

Result<DType> KvDType(const std::string& name, bool all_f32) {
  if (name == "auto") return all_f32 ? DType::kF32 : DType::kF16;
  for (const DType t : {DType::kF16, DType::kBF16, DType::kF32}) {
    if (name == DTypeName(t)) return t;
  }
  return InvalidArgument(fmt::format("--kv-dtype is '{}', expected auto, f16, bf16 or f32", name));
}

Status CheckOptions(const EngineOptions& o) {
  if (o.threads < 0 || o.threads > 1024) {
    return InvalidArgument(
        fmt::format("--threads is {}, expected 0 (physical cores) to 1024", o.threads));
  }
  if (o.context < 0 || o.context > ModelLimits::kContext) {
    return InvalidArgument(fmt::format("--ctx is {}, expected tokens, 0 (the model's) to {}",
                                       o.context, ModelLimits::kContext));
  }
  if (o.prefill_chunk < 1 || o.prefill_chunk > 65536) {
    return InvalidArgument(fmt::format("--chunk is {}, expected 1 to 65536 rows", o.prefill_chunk));
  }
  if (o.max_sessions < 1 || o.max_sessions > 4096) {
    return InvalidArgument(fmt::format("max_sessions is {}, expected 1 to 4096", o.max_sessions));
  }
  return {};
}

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

  int64_t context() const override { return core_->bank->config().max_tokens; }
  int32_t vocab() const override { return core_->config.vocab; }
  std::string device() const override { return core_->backend->Describe(); }
  double load_seconds() const override { return load_seconds_; }
  size_t weight_bytes() const override { return core_->weights.bytes; }

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

Result<std::vector<int32_t>> ChatTokens(const ModelText& text, const std::string& model,
                                        const std::vector<ChatMessage>& messages) {
  OKV_RETURN_IF_ERROR(text.chat_template_status);
  if (!text.chat_template) {
    return Unsupported(fmt::format("{} has no chat template: use --raw", model));
  }
  ChatInput input;
  input.messages = nlohmann::ordered_json::array();
  size_t bytes = 0;
  for (const ChatMessage& m : messages) {
    bytes += m.content.size();
    input.messages.push_back({{"role", m.role}, {"content", m.content}});
  }
  OKV_RETURN_IF_ERROR(CheckTextSize(bytes));
  input.add_generation_prompt = true;
  input.bos_token = text.bos_token;
  input.eos_token = text.eos_token;
  auto spans = text.chat_template->Render(input);
  if (!spans.ok()) return spans.status().Prefixed("chat template of " + model);
  bytes = 0;  // a template may repeat what it is given
  for (const TextSpan& span : *spans) bytes += span.text.size();
  OKV_RETURN_IF_ERROR(CheckTextSize(bytes));
  // The template writes the special tokens itself.
  return text.tokenizer->EncodeSpans(*spans, /*add_special=*/false);
}

Status NeedTokenizer(const EngineCore& core) {
  if (core.text.tokenizer != nullptr || !core.text_status.ok()) return core.text_status;
  return Unsupported(fmt::format("{} has no tokenizer", core.options.model));
}

BankConfig MakeBankConfig(const ModelConfig& config, const MemoryPlan& plan, int32_t max_sessions) {
  BankConfig bank;
  bank.layers.assign(
      config.layers.size(),
      {.n_kv_heads = config.n_kv_heads, .dk = config.head_dim, .dv = config.head_dim});
  bank.dtype = plan.kv_dtype;
  bank.block_tokens = kBlockTokens;
  bank.max_tokens = plan.context;
  // Forks and sessions each round up to a block.
  bank.pool_tokens = (plan.context + kBlockTokens) * max_sessions;
  bank.max_seqs = max_sessions;
  return bank;
}

Result<MemoryPlan> PlanMemory(const EngineOptions& options, const ModelConfig& config,
                              size_t weight_bytes, bool all_f32) {
  OKV_RETURN_IF_ERROR(CheckOptions(options));
  MemoryPlan plan;
  OKV_ASSIGN_OR_RETURN(plan.kv_dtype, KvDType(options.kv_dtype, all_f32));
  plan.weights = weight_bytes;
  plan.activations =
      Workspace::BytesFor(config, options.prefill_chunk, MaxOutRows(config, options.prefill_chunk));
  plan.context = options.context != 0 ? options.context : config.max_context;
  plan.kv_per_token = Bank::BytesPerToken(MakeBankConfig(config, plan, options.max_sessions));
  const size_t machine = AvailableMemory();
  const bool capped = options.host_memory != 0 && options.host_memory <= machine;
  plan.available = capped ? options.host_memory : machine;
  const auto sessions = static_cast<size_t>(options.max_sessions);
  const size_t fixed = plan.weights + plan.activations;
  const size_t room = plan.available > fixed ? plan.available - fixed : 0;
  const size_t fits = room / plan.kv_per_token / sessions;
  const auto asked = static_cast<size_t>(plan.context);
  if (fits < asked + kBlockTokens) {
    const std::string sizes = fmt::format(
        "weights {} and activations {} leave room for {} tokens of K/V at {} each in {}",
        HumanBytes(plan.weights), HumanBytes(plan.activations), fits, HumanBytes(plan.kv_per_token),
        capped ? "--host-memory " + HumanBytes(plan.available)
               : HumanBytes(plan.available) + " of available memory");
    if (options.context != 0 || fits < 2 * kBlockTokens) {
      return ResourceExhausted(
          fmt::format("a context of {} tokens does not fit: {}", asked, sizes));
    }
    // What a policy keeps beside the K/V takes room too, by default well below a part in sixteen.
    plan.context = static_cast<int64_t>(fits - fits / 16) - kBlockTokens;
    LogInfo("the context is cut from {} to {} tokens: {}", asked, plan.context, sizes);
  }
  if (options.host_memory != 0 && !capped) {
    LogInfo("--host-memory is {}, but {} are available: planned with that",
            HumanBytes(options.host_memory), HumanBytes(machine));
  }
  plan.kv = static_cast<size_t>(plan.context) * plan.kv_per_token * sessions;
  plan.policies =
      room - static_cast<size_t>(plan.context + kBlockTokens) * plan.kv_per_token * sessions;
  return plan;
}

Result<std::unique_ptr<Engine>> MakeEngine(std::unique_ptr<EngineCore> core, const MemoryPlan& plan,
                                           double load_seconds) {
  OKV_ASSIGN_OR_RETURN(
      core->bank,
      Bank::Create(*core->backend, MakeBankConfig(core->config, plan, core->options.max_sessions)));
  core->policy_room = plan.policies;
  const int32_t chunk = core->options.prefill_chunk;
  OKV_ASSIGN_OR_RETURN(core->work, Workspace::Create(*core->backend, core->config, chunk,
                                                     MaxOutRows(core->config, chunk)));
  return std::unique_ptr<Engine>(std::make_unique<EngineImpl>(std::move(core), load_seconds));
}

Result<std::unique_ptr<Engine>> Engine::Load(const EngineOptions& options) {
  const auto start = std::chrono::steady_clock::now();
  auto core = std::make_unique<EngineCore>();
  core->options = options;
  OKV_ASSIGN_OR_RETURN(const ModelFiles files, OpenModel(options.model));
  OKV_ASSIGN_OR_RETURN(const size_t weight_bytes, WeightBytes(files));
  OKV_ASSIGN_OR_RETURN(const MemoryPlan plan,
                       PlanMemory(options, files.config, weight_bytes, AllF32(files)));
  if (plan.context > files.config.max_context) {
    LogInfo("--ctx is {}, but the model was trained for {} tokens: past them its answers may fail",
            plan.context, files.config.max_context);
  }
  if (options.on_plan) {
    options.on_plan({.weights = plan.weights,
                     .activations = plan.activations,
                     .kv_host = plan.kv,
                     .available = plan.available,
                     .context = plan.context});
  }
  OKV_ASSIGN_OR_RETURN(core->backend, MakeBackend(options));
  core->config = files.config;
  auto text = LoadText(files);
  // Weights alone can still be run on token ids.
  if (!text.ok() && text.status().code() != StatusCode::kNotFound) return text.status();
  core->text_status = text.status();
  if (text.ok()) core->text = std::move(*text);
  OKV_ASSIGN_OR_RETURN(core->weights, LoadWeights(files, *core->backend, options.on_load));
  for (const std::string& note : core->weights.notes) LogVerbose("{}: {}", options.model, note);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  return MakeEngine(std::move(core), plan, seconds.count());
}

}  // namespace omnikv
