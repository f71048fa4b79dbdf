// What an engine's sessions share: a backend, a model, the bank and the activations.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "backend/backend.h"
#include "bank/bank.h"
#include "engine/placement.h"
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
  size_t policy_room = 0;     // bytes that the state of all sessions' policies may take
  size_t policy_bytes = 0;    // that it takes
  float simulated_hits = -1;  // benchmarks: WorkingSetArgs
  OnChoice on_choice;         // benchmarks: may be empty
  int32_t cache_tokens = 0;   // slots of a working set, where layers live on the host
};

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
