// Options of engines, sessions and requests. A Status that finds one wrong names its field in
// backticks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "omnikv/status.h"

namespace omnikv {

class Engine;

// What an engine will hold, known before anything is loaded. Bytes, in the device's memory where
// there is a device, else in the host's. What lies beside that memory is on the host, or on a disk
// (EngineOptions::kv_folder).
struct MemoryNeeds {
  bool on_device = false;
  size_t weights = 0;
  size_t activations = 0;   // and what the device works with
  size_t kv = 0;            // when all of it is in use; taken as contexts grow
  size_t kv_host = 0;       // beside a device: K/V in host memory
  size_t kv_disk = 0;       // beside either: K/V in `kv_folder`
  size_t prompt = 0;        // taken while a prompt is read, where its K/V do not all stay
  size_t working_sets = 0;  // what the device, or the memory, holds of those, and their way there
  std::vector<int32_t> host_layers;  // whose K/V those are, on the host or on a disk
  std::vector<int32_t> host_values;  // layers of which V alone are there
  int64_t working_set = 0;           // tokens of each of them, that the device holds
  bool keeps_last = false;           // the last ones
  bool attends_away = false;         // and the host attends to the others
  bool sums_away = false;            // the host sums what steps read of host_values
  size_t available = 0;              // the cap given, or what there is
  int64_t context = 0;               // tokens a session can hold
  int64_t kv_tokens = 0;             // and all together, in layers that keep every token
};

struct PolicyOptions {
  std::string name = "auto";  // auto: omnikv where the model has measured filter layers, else full
  std::vector<std::pair<std::string, std::string>> settings;
  bool force_indices = false;  // no dense shortcut; for tests
};

struct EngineOptions {
  std::string model;  // a Hugging Face folder or a .gguf file
  // auto (a card where there is one), cpu, cuda or cuda:N; ref is the slow reference backend.
  std::string device = "auto";
  int threads = 0;  // 0: physical cores of the control group
  // Bytes that weights, K/V and all else may take on the host and on the card; 0: what is
  // available.
  size_t host_memory = 0;
  size_t gpu_memory = 0;
  int64_t context = 0;  // tokens a session can hold; 0: the model's
  // Where K/V live. On a card: auto (the card, and where that is too small the host for layers that
  // the policy reads sparsely or streams), device, or host (all of those layers). With `kv_folder`,
  // auto sends those layers to the disk for which the host's memory is too small, too, and disk
  // sends all that may lie there.
  std::string place = "auto";
  // A folder for K/V that do not fit in memory. They lie there in files without a name, whose
  // room on the disk is taken when the engine loads and is free again when it ends. Empty: all K/V
  // are in memory.
  std::string kv_folder;
  // Bytes that K/V may take there; 0: what is free.
  size_t disk_space = 0;
  // How decode steps read layers on the host: fetch (what is missing of a selection comes to the
  // card), attend (the host attends to what was selected, where it is, and the card to the last
  // tokens; or it sums V, where V alone are there), or auto (fetch, where the policy selects single
  // tokens for all heads, else attend).
  // The same of layers on a disk, where auto is fetch for all that can be fetched.
  std::string host_reads = "auto";
  // Tokens that the card keeps of each layer on the host, all that a layer reads in a step at
  // least; 0: as many as there is room for. Of fetch.
  int64_t working_set = 0;
  PolicyOptions policy;  // that sessions will have, for `place`
  // auto, f16, bf16, f32, q8_0, q4_0; auto: f32 for f32 models, else f16
  std::string kv_dtype = "auto";
  // Of prefill, and of steps of more than 16 sequences: fast rounds activations to bf16 where the
  // device multiplies bf16 faster; full does not.
  std::string precision = "fast";
  static constexpr int32_t kMaxPrefillChunk = 65536;
  int32_t prefill_chunk = 0;  // rows of a prefill step; 0: the device's
  // Whether rows that decode are multiplied together with rows of a prompt in the same step: that
  // reads each weight matrix once, but the bits of a decoding row then depend on the prompt.
  bool shared_products = false;
  int32_t max_sessions = 1;  // open at once
  // Tokens of K/V that all sessions share, in layers that keep every token, at least a context; 0:
  // a context for each session; kAsManyAsFit: what there is room for, up to that.
  static constexpr int64_t kAsManyAsFit = -1;
  int64_t kv_tokens = 0;
  // Contexts of requests that have ended, kept beside the open sessions while there is room in the
  // K/V of all (a scheduler's).
  int32_t kept_contexts = 0;
  // Called once before any weight is read.
  std::function<void(const MemoryNeeds&)> on_plan;
  // Called after it, and still before any weight is read: the place to find a mistake while it is
  // cheap. `engine` turns text into tokens and back, checks prompts and policies, and knows its
  // context, its vocabulary and its device; it makes no sessions yet. A Status that is not ok ends
  // Load with it.
  std::function<Status(const Engine& engine)> check;
  // Called with the bytes of weights loaded so far and in all.
  std::function<void(size_t done, size_t total)> on_load;
};

struct SamplingOptions {
  double temperature = 0;     // 0: greedy
  int32_t top_k = 0;          // 0: off
  double top_p = 1;           // 1: off
  double min_p = 0;           // 0: off
  double repeat_penalty = 1;  // 1: off; over the whole context
  // Of the tokens of one Generate so far: the first is taken off the logit of each that came, the
  // second off it for each time that it came. -2 to 2; 0: off.
  double presence_penalty = 0;
  double frequency_penalty = 0;
  // Added to the logits of these tokens, -100 to 100.
  std::vector<std::pair<int32_t, float>> logit_bias;
  // The same seed gives the same tokens. The library draws no seed by itself: who wants another
  // answer each time passes a random one, as the program does where no seed is given.
  uint64_t seed = 0;
};

struct GenerateOptions {
  int64_t max_tokens = 256;
  SamplingOptions sampling;
  std::vector<std::string> stop;  // texts (or special tokens) that end it; not part of the answer
  bool ignore_eos = false;
  // Special tokens of the answer come as text, such as the marks of a call of a tool; not those
  // that end it.
  bool special_text = false;
};

enum class FinishReason { kStop, kLength, kCancelled };

inline const char* FinishReasonName(FinishReason reason) {
  switch (reason) {
    case FinishReason::kStop:
      return "stop";
    case FinishReason::kLength:
      return "length";
    case FinishReason::kCancelled:
      return "cancelled";
  }
  return "?";
}

struct GenerateResult {
  std::string text;
  std::vector<int32_t> tokens;  // end-of-sequence included, where one was sampled
  FinishReason finish_reason = FinishReason::kLength;
};

struct ChatMessage {
  std::string role;
  std::string content;
};

}  // namespace omnikv
