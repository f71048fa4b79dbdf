// Options of engines, sessions and requests. Names are those of the command line.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace omnikv {

// What an engine will hold, known before anything is loaded. Bytes, in host memory.
struct MemoryNeeds {
  size_t weights = 0;
  size_t activations = 0;
  size_t kv_host = 0;    // when every session is full; taken as contexts grow
  size_t available = 0;  // the cap given, or what the machine has
  int64_t context = 0;   // tokens a session can hold
};

struct EngineOptions {
  std::string model;            // a Hugging Face folder or a .gguf file
  std::string device = "auto";  // auto, cpu; ref is the slow reference backend
  int threads = 0;              // 0: physical cores of the control group
  size_t host_memory = 0;       // bytes weights, K/V and activations may take; 0: what is available
  int64_t context = 0;          // tokens a session can hold; 0: the model's
  std::string kv_dtype = "auto";  // auto, f16, bf16, f32; auto: f32 for f32 models, else f16
  // Of prefill: fast rounds activations to bf16 where the CPU multiplies bf16 faster; full does
  // not.
  std::string precision = "fast";
  int32_t prefill_chunk = 512;  // rows of a prefill step
  int32_t max_sessions = 1;     // open at once; they share the memory for K/V
  // Called once before anything is loaded.
  std::function<void(const MemoryNeeds&)> on_plan;
  // Called with the bytes of weights loaded so far and in all.
  std::function<void(size_t done, size_t total)> on_load;
};

struct PolicyOptions {
  std::string name = "auto";  // auto: omnikv where the model has measured filter layers, else full
  std::vector<std::pair<std::string, std::string>> settings;
  bool force_indices = false;  // no dense shortcut; for tests
};

struct SamplingOptions {
  double temperature = 0;     // 0: greedy
  int32_t top_k = 0;          // 0: off
  double top_p = 1;           // 1: off
  double min_p = 0;           // 0: off
  double repeat_penalty = 1;  // 1: off; over the whole context
  uint64_t seed = 0;
};

struct GenerateOptions {
  int64_t max_tokens = 256;
  SamplingOptions sampling;
  std::vector<std::string> stop;  // texts (or special tokens) that end it; not part of the answer
  bool ignore_eos = false;
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
