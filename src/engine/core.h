// What an engine's sessions share: a backend, a model, the bank and the activations.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "backend/backend.h"
#include "bank/bank.h"
#include "engine/mixed_steps.h"
#include "engine/placement.h"
#include "model/forward.h"
#include "model/loader.h"
#include "omnikv/engine.h"

namespace omnikv {

class RowGroup;

// What steps that choose the next token share: its ring, the number of steps, and the state of each
// row's sampler. Taken when first needed.
struct ChoiceBuffers {
  Buffer chosen;   // int32 [ring, n_rows], shared
  Buffer count;    // uint32 [1]: steps
  Buffer samples;  // SampleMeta [kMaxBatch]
  Buffer seen;     // uint32 [kMaxBatch, SeenWords(vocab)]
};

struct EngineCore {
  EngineOptions options;
  std::unique_ptr<Backend> backend;
  ModelConfig config;
  Weights weights;
  ModelText text;      // tokenizer null for generated weights, and where the files have none
  Status text_status;  // not ok: why the files have none
  std::unique_ptr<Bank> bank;
  Workspace work;
  MemoryPlan plan;
  size_t policy_bytes = 0;    // that all sessions' policies take, streams of states not counted
  size_t set_bytes = 0;       // that the working sets of all sessions take
  bool all_by_layer = false;  // tests: first prompts of every policy pass layer by layer
  int64_t next_group = 0;     // RowGroup::id
  ChoiceBuffers choices;
  MixedSteps mixed_steps;
};

// An engine over parts that are already there (loaded, or made up for benchmarks and tests): opens
// the bank and the workspace by `plan`.
Result<std::unique_ptr<Engine>> MakeEngine(std::unique_ptr<EngineCore> core, const MemoryPlan& plan,
                                           double load_seconds);

// A model before any of its weights is read.
struct EngineModel {
  ModelConfig config;
  ModelText text;      // as EngineCore's
  Status text_status;  // not ok: why there is none
  size_t weight_bytes = 0;
  std::optional<DType> format;
  // Brings the weights into the memory of a backend; `progress` may be null.
  using Progress = std::function<void(size_t done, size_t total)>;
  std::function<Result<Weights>(Backend& backend, const Progress& progress)> load;
};
// Of the files at `path`; weights made up in `format` for a model of this shape.
Result<EngineModel> ModelOfFiles(const std::string& path);
EngineModel MadeUpModel(ModelConfig config, DType format);

// Plans memory, and makes an engine of a model. Before weights load, it calls options.on_plan and
// options.check.
using BackendMaker = std::function<Result<std::unique_ptr<Backend>>()>;
Result<std::unique_ptr<Engine>> LoadEngine(const EngineOptions& options, EngineModel model,
                                           const BackendMaker& make);
// Engine::Load on a backend that `make` makes once the model's files are found good.
Result<std::unique_ptr<Engine>> LoadEngine(const EngineOptions& options, const BackendMaker& make);

// Ids of a text, and of messages in the model's chat format: what Engine::Tokenize and
// Engine::ChatPrompt give. REQUIRES a tokenizer. `model` names the model in messages.
Result<std::vector<int32_t>> TextTokens(const ModelText& text, std::string_view plain,
                                        EncodeOptions options);
Result<std::vector<int32_t>> ChatTokens(const ModelText& text, const std::string& model,
                                        const std::vector<ChatMessage>& messages);
// The same of messages as templates take them, in two parts: rendered, and its ids. The begin and
// end tokens of `input` are the model's.
Result<std::vector<TextSpan>> RenderChat(const ModelText& text, const std::string& model,
                                         ChatInput input);
Result<std::vector<int32_t>> EncodeChat(const ModelText& text, const std::vector<TextSpan>& spans);

// What ends a user's turn in the model's chat format, up to where the answer begins. Empty where it
// has none. REQUIRES a tokenizer.
std::vector<int32_t> TurnEnd(const ModelText& text);

// What comes between an answer and the next one: the end of the assistant's turn, a user's turn
// that says `said`, and the beginning of the next answer. kUnsupported where there is no template,
// or where it does not show where an answer ends. REQUIRES a tokenizer.
Result<std::vector<int32_t>> NextTurn(const ModelText& text, const std::string& model,
                                      std::string_view said);

// Ok when there is a tokenizer, else why there is none.
Status NeedTokenizer(const EngineCore& core);

// A session on `core`. `own`, here and below: a policy of the engine's own that no registry has, in
// place of the one that `policy` names; it outlives the session.
Result<std::unique_ptr<Session>> MakeSession(EngineCore& core, const PolicyOptions& policy,
                                             const PolicyInfo* own = nullptr);
// The group of a session: its sequence is member 0.
const RowGroup& GroupOf(const Session& session);
// The token that its last Generate drew and that is not in tokens(): the next one goes on with it;
// -1: none.
int32_t PendingToken(const Session& session);
// One that Session::Save wrote to `path`.
Result<std::unique_ptr<Session>> RestoreSession(EngineCore& core, const std::string& path);

// What an engine of MakeEngine stands on. Lives as long as the engine.
EngineCore& CoreOf(Engine& engine);
const EngineCore& CoreOf(const Engine& engine);

// --- What groups of sequences (row_group.h) and steps (stepper.h) stand on.

struct PreparedPolicy {
  const PolicyInfo* info = nullptr;
  PolicySettings settings;
  std::unique_ptr<Policy> policy;
  StateStreams states;
};

// A policy for `max_seqs` sequences whose keys are rotated by `ropes`. What it keeps counts against
// plan.policies, streams of states that it shares with others once: kResourceExhausted where that
// is not enough. The owner takes policy->Bytes() off core.policy_bytes when it goes.
Result<PreparedPolicy> PreparePolicy(EngineCore& core, const PolicyOptions& options,
                                     const RopeState& ropes, int32_t max_seqs,
                                     const PolicyInfo* own = nullptr);

// kUnsupported where the bank, which is laid out for the engine's policy, cannot serve `policy`.
Status CheckLayout(const EngineCore& core, const std::string& name, const Policy& policy);

// kInvalidArgument unless `tokens` can be a prompt.
Status CheckTokens(const EngineCore& core, std::span<const int32_t> tokens);

// Not ok when one of the logits [vocab] after `length` tokens of context is NaN or infinite.
Status CheckLogits(const EngineCore& core, const float* logits, int64_t length);
// That status.
Status LogitsNotFinite(const EngineCore& core, int64_t length);

// Tokens that no row from position `length` on reads in the layers of a table of the bank: those
// that the policy drops, or those before the window.
Policy::TokenRange UnreadTokens(const Policy& policy, const TableSpec& table, int64_t length);
// Gives back the rows of the first `length` tokens of `seq` that no later row reads.
void DropTokens(EngineCore& core, const Policy& policy, int32_t seq, int64_t length);
// The same of rows of a pass, behind a prompt that ends at `prompt_end` and whose rows all stay.
void DropPassTokens(EngineCore& core, int32_t seq, int64_t prompt_end, int64_t length);
// Whether `seq` holds all rows that the rows from position `length` on read.
bool CanGoOnFrom(const EngineCore& core, const Policy& policy, int32_t seq, int64_t length);

// Tokens whose K/V a layer attended to in the last step of sequence `seq` of the policy, mean over
// all layers and KV heads.
double AttendedTokens(const ModelConfig& config, const Policy& policy, int32_t seq,
                      const SeqLength& at);

// Bytes of K/V that it read in the layers that the policy governs, passes for scores alone
// included, as a fraction of what full attention reads there; 1 without such layers.
double ReadFraction(const EngineCore& core, const Policy& policy, int32_t seq, const SeqLength& at);
// Bytes of V that a decode step reads in place on the host.
uint64_t BytesReadAway(const EngineCore& core, const Policy& policy, const SeqLength& at);

// Tokens whose rows a sequence of `length` tokens keeps in a stream of a layer after its prompt, in
// whole blocks: `table` is the stream's, and `global` the policy's number of a layer without a
// sliding window.
int64_t HeldTokens(const Policy& policy, int32_t global, const TableSpec& table, int64_t length,
                   int32_t block_tokens);

}  // namespace omnikv
