// The public API: an Engine holds a model, a Session one context. See examples/hello_generate.cc.
//
//   auto engine = omnikv::Engine::Load({.model = "model.gguf"});
//   if (!engine.ok()) ...engine.status().message()...
//   auto session = (*engine)->NewSession({.name = "omnikv"});
//   auto prompt = (*engine)->ChatPrompt({{"user", "Hello"}});
//   (*session)->Prompt(*prompt);
//   auto answer = (*session)->Generate({.max_tokens = 64});
//
// Threads: an engine and all of its sessions are driven by one thread at a time; Cancel() may be
// called from any. No exceptions are thrown; every failure is a Status with one sentence.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "omnikv/options.h"
#include "omnikv/stats.h"
#include "omnikv/status.h"

namespace omnikv {

class Session;

class Engine {
 public:
  virtual ~Engine() = default;

  // Loads a model, weights included.
  static Result<std::unique_ptr<Engine>> Load(const EngineOptions& options);

  // A session with its own context and policy. It must not outlive the engine.
  virtual Result<std::unique_ptr<Session>> NewSession(const PolicyOptions& policy) = 0;

  // The session that Session::Save wrote to `path`, which goes on as that would have. Its policy
  // has the settings that it had; a longer or shorter context, another device and other numbers of
  // sessions are no hindrance. The whole file is checked before a session is made: kCorrupt when it
  // is cut off or damaged, kUnsupported for another version of the format, kInvalidArgument when it
  // is of another model, of other weights or another `kv_dtype`, or its policy would do otherwise
  // here, kResourceExhausted when there is no room for it. What the checksum covers is taken as it
  // is: a file from an untrusted source can hold any tokens and any K/V.
  virtual Result<std::unique_ptr<Session>> Restore(const std::string& path) = 0;

  // Ids of plain text: no template, special tokens not parsed unless `parse_special`;
  // `add_special` lets the tokenizer add what it adds by itself (a begin-of-text token).
  // kNotFound, here and below, names the file that is missing when the model has no tokenizer.
  virtual Result<std::vector<int32_t>> Tokenize(std::string_view text, bool add_special,
                                                bool parse_special) const = 0;
  virtual Result<std::string> Detokenize(const std::vector<int32_t>& tokens) const = 0;

  // The messages in the model's chat format, ready for the assistant's answer. Text of messages is
  // never parsed as special tokens. kUnsupported when the model has no chat template; when it has
  // one that cannot be parsed, why.
  virtual Result<std::vector<int32_t>> ChatPrompt(
      const std::vector<ChatMessage>& messages) const = 0;
  // Whether the model's files have a chat template, one that can be parsed or not.
  virtual bool has_chat_template() const = 0;

  // Whether a session can take `tokens` as its prompt: kInvalidArgument when there are none, more
  // than its context holds, or one that is not in the vocabulary.
  virtual Status CheckPrompt(const std::vector<int32_t>& tokens) const = 0;

  // Whether a session can have this policy: kInvalidArgument when its name, a setting or the model
  // is against it.
  virtual Status CheckPolicy(const PolicyOptions& policy) const = 0;

  virtual int64_t context() const = 0;  // tokens a session can hold
  virtual int32_t vocab() const = 0;
  virtual std::string device() const = 0;  // for people
  virtual double load_seconds() const = 0;
  virtual size_t weight_bytes() const = 0;
};

class Session {
 public:
  virtual ~Session() = default;

  using Progress = std::function<void(int64_t done, int64_t total)>;  // tokens
  // New text of the answer, whole UTF-8 characters; return false to stop.
  using OnText = std::function<bool(std::string_view text)>;

  // Makes `tokens` the context: what the session already holds of them is kept, the rest is
  // computed. kInvalidArgument when they exceed the context (nothing is cut); kCancelled after
  // Cancel(), and what was computed stays. kFailed, here and below, where the logits are NaN or
  // infinite, which damaged weights and values beyond their format bring about.
  virtual Status Prompt(const std::vector<int32_t>& tokens, const Progress& progress = {}) = 0;

  // Generates after the last prompt. REQUIRES a Prompt before, or a Generate that may go on: with
  // the same options and seed, several calls in a row give the tokens of one, unless tokens are
  // penalised by how often they came.
  virtual Result<GenerateResult> Generate(const GenerateOptions& options,
                                          const OnText& on_text = {}) = 0;

  // Appends one token and computes the logits after it: one decode step, for callers that sample
  // themselves.
  virtual Status Step(int32_t token) = 0;

  // Logits of the last position, [vocab]. Valid until the next call.
  virtual const float* logits() const = 0;

  // Prompt(tokens) on a fresh context, handing out the logits of every position in order:
  // `sink(position, logits [vocab])`. They are full attention's under every policy whose prompt
  // rows read everything, as omnikv's do; under `streaming` a prompt row reads what a decode step
  // at its position would. A policy's own logits come from Step().
  virtual Status PrefillLogits(const std::vector<int32_t>& tokens,
                               const std::function<void(int64_t, const float*)>& sink) = 0;

  // Another session with the same context, sharing its memory until they part.
  virtual Result<std::unique_ptr<Session>> Fork() = 0;
  // A session of another policy whose prompt was tokens(), with its logits. It shares the rows that
  // its policy would have made too, and computes the others: both policies' prompt rows must read
  // everything, and this session must have lost no rows. Generated rows are shared where this
  // session's policy has no budget in any layer (full, brutal_offload). The last rows are computed
  // anew where the policy's state comes of them. SessionStats::recomputed_tokens counts what was
  // not shared besides.
  virtual Result<std::unique_ptr<Session>> Fork(const PolicyOptions& policy) = 0;

  // Writes the context to a file for Engine::Restore: tokens, logits, K/V as they are held, and all
  // that the policy knows of them. The file is there whole or as it was before, and readable for
  // its owner alone: it tells what the context says. kNotFound, with the reason, when it cannot be
  // written there, kFailed when writing fails.
  virtual Status Save(const std::string& path) = 0;

  // Fills the context with `tokens` made-up tokens without computing them, for benchmarks.
  // kInvalidArgument unless it holds them.
  virtual Status FillContext(int64_t tokens) = 0;

  // Stops a running Prompt after the chunk it is at, be it the last, or a running Generate before
  // its next token. Between a Prompt and a Generate, stops that Generate before its first token.
  // A request that met nothing to stop is forgotten when the next Prompt begins. Any thread.
  virtual void Cancel() = 0;

  // The tokens in context.
  virtual const std::vector<int32_t>& tokens() const = 0;
  virtual SessionStats stats() const = 0;
};

}  // namespace omnikv
