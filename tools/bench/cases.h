// The benchmark's cases: a model of some geometry, a policy, a context, measured against the
// machine's ceilings. Floors are the ops' own Cost, summed over a traced step.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "backend/trace/trace_backend.h"
#include "engine/core.h"
#include "omnikv/engine.h"

namespace omnikv::tools {

// The ops of one name in a step, each run alone: nothing starts early or runs beside another.
struct OpShare {
  std::string name;
  int calls = 0;
  double ms = 0;
  double share = 0;  // of all ops' time
  double gb_s = 0;
  double gflop_s = 0;
};

struct DecodeCase {
  std::string policy, settings;
  int64_t context = 0;
  int32_t batch = 1;
  double ms_per_token = 0;  // median over steps: of a step, whatever the batch
  double best_ms = 0;
  uint64_t floor_bytes = 0;
  double attended_tokens = 0;
  uint64_t transfer_bytes = 0;  // a step, from the host or from a disk
  uint64_t disk_bytes = 0;      // a step, of those that the page cache did not have
  std::optional<double> hit_rate;
  double prefill_seconds = 0;  // where the context was computed
  std::vector<OpShare> ops;
};

struct PrefillCase {
  std::string policy, settings;
  int64_t tokens = 0;
  double seconds = 0;  // best of the repeats
  uint64_t flops = 0;
  std::vector<OpShare> ops;
};

// Attention of a prompt alone, one layer: kAttendHeads query heads over kAttendKvHeads KV heads.
struct AttendCase {
  int32_t head_dim = 0;
  int64_t tokens = 0;
  double seconds = 0;
  uint64_t flops = 0;
};

inline constexpr int32_t kAttendHeads = 32;
inline constexpr int32_t kAttendKvHeads = 8;

// An engine whose backend is traced: costs when asked, full speed otherwise.
struct BenchEngine {
  std::unique_ptr<Backend> backend;  // behind the trace
  TraceBackend* trace = nullptr;     // owned by the engine
  std::unique_ptr<Engine> engine;
  ModelConfig config;
  int32_t vocab = 0;
  size_t weight_bytes = 0;
  std::optional<DType> format;
  DType kv_dtype = DType::kF16;
  int32_t chunk = 0;        // rows of a prefill step
  int32_t host_layers = 0;  // of whose K/V some live beside the device
  int32_t disk_layers = 0;  // of them, on a disk
  int32_t working_set = 0;  // tokens of each of them, near the device
  size_t kv_row_bytes = 0;  // K and V of a token in one layer
};

// `geometry` as model/generated.h has it, weights in `format`; or, with options.model, that model.
// Placed for options.policy; what the model has against it or `others` is told before weights load.
// simulated_hits >= 0: the share of hits in working sets, by lot.
Result<BenchEngine> OpenBenchEngine(const EngineOptions& options, const std::string& geometry,
                                    DType format, const std::vector<PolicyOptions>& others = {},
                                    float simulated_hits = -1);

// `steps` decode steps over a context of made-up K/V, or `computed` from random tokens.
Result<DecodeCase> MeasureDecode(BenchEngine& bench, const PolicyOptions& policy, int64_t context,
                                 int steps, bool computed = false);

// The same of `batch` sequences of `context` tokens each, a token of each in a step.
Result<DecodeCase> MeasureBatch(BenchEngine& bench, const PolicyOptions& policy, int64_t context,
                                int32_t batch, int steps);

// The same with `batch` sequences of each policy, which share every step.
Result<DecodeCase> MeasureMix(BenchEngine& bench, const std::vector<PolicyOptions>& policies,
                              int64_t context, int32_t batch, int steps);

// `batch` sequences of `context` tokens that decode while a prompt is computed beside them, `chunk`
// rows per step; or, with a `limit`, as many as keep steps within `limit` times the steps alone.
struct BesideCase {
  std::string policy, settings;
  int32_t chunk = 0;          // rows of the prompt in a step, a mean
  double alone_p95_ms = 0;    // 95th percentile of the time between tokens, without the prompt
  double beside_p95_ms = 0;   // and with it
  double longest_ms = 0;      // the longest such time
  double prompt_seconds = 0;  // the prompt alone, in the device's chunks
  double beside_seconds = 0;  // and beside the sequences
};
Result<BesideCase> MeasureBeside(BenchEngine& bench, const PolicyOptions& policy, int64_t context,
                                 int32_t batch, int64_t prompt, int32_t chunk, double limit);

// Prompts of `tokens` random tokens, `repeats` times.
Result<PrefillCase> MeasurePrefill(BenchEngine& bench, const PolicyOptions& policy, int64_t tokens,
                                   int repeats);

// One layer's causal attention of `tokens` rows, a prefill step at a time.
Result<AttendCase> MeasureAttend(BenchEngine& bench, int32_t head_dim, int64_t tokens);

}  // namespace omnikv::tools
