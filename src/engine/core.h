// What an engine's sessions share: a backend, a model, the bank and the activations.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "backend/backend.h"
#include "bank/bank.h"
#include "model/forward.h"
#include "model/loader.h"
#include "omnikv/engine.h"

namespace omnikv {

struct EngineCore {
  EngineOptions options;
  std::unique_ptr<Backend> backend;
  ModelConfig config;
  Weights weights;
  ModelText text;      // tokenizer null for generated weights, and where the files have none
  Status text_status;  // not ok: why the files have none
  std::unique_ptr<Bank> bank;
  Workspace work;
  size_t policy_room = 0;   // bytes that the state of all sessions' policies may take
  size_t policy_bytes = 0;  // that it takes
};

// What a model takes, before anything is loaded.
struct MemoryPlan {
  size_t weights = 0;       // bytes
  size_t activations = 0;   // bytes
  size_t kv_per_token = 0;  // bytes, all layers
  int64_t context = 0;      // tokens a session can hold
  size_t kv = 0;            // bytes of `context` tokens in every session
  size_t policies = 0;      // bytes that are left for what policies keep beside the K/V
  size_t available = 0;     // bytes: what the machine has, at most --host-memory
  DType kv_dtype = DType::kF16;
};

// Sizes everything; kInvalidArgument for options out of range, kResourceExhausted with the numbers
// when a context that was asked for does not fit. Without one, the context is the model's, or what
// fits of it.
Result<MemoryPlan> PlanMemory(const EngineOptions& options, const ModelConfig& config,
                              size_t weight_bytes, bool all_f32);

// The bank of a model: one LayerSpec a layer.
BankConfig MakeBankConfig(const ModelConfig& config, const MemoryPlan& plan, int32_t max_sessions);

// An engine over parts that are already there (loaded, or made up for benchmarks and tests): opens
// the bank and the workspace by `plan`.
Result<std::unique_ptr<Engine>> MakeEngine(std::unique_ptr<EngineCore> core, const MemoryPlan& plan,
                                           double load_seconds);

// Ids of a text, and of messages in the model's chat format: what Engine::Tokenize and
// Engine::ChatPrompt give. REQUIRES a tokenizer. `model` names the model in messages.
Result<std::vector<int32_t>> TextTokens(const ModelText& text, std::string_view plain,
                                        EncodeOptions options);
Result<std::vector<int32_t>> ChatTokens(const ModelText& text, const std::string& model,
                                        const std::vector<ChatMessage>& messages);

// Ok when there is a tokenizer, else why there is none.
Status NeedTokenizer(const EngineCore& core);

// A session on `core`.
Result<std::unique_ptr<Session>> MakeSession(EngineCore& core, const PolicyOptions& policy);

}  // namespace omnikv
