#include "bench/cases.h"

#include <algorithm>
#include <chrono>
#include <map>

#include "engine/devices.h"
#include "model/generated.h"

namespace omnikv::tools {
namespace {

using Clock = std::chrono::steady_clock;

double Seconds(Clock::time_point since) {
  return std::chrono::duration<double>(Clock::now() - since).count();
}

std::vector<OpShare> OpShares(const TraceBackend& trace) {
  struct Sum {
    Cost cost;
    double seconds = 0;
  };
  std::map<std::string_view, Sum> sums;
  for (const TraceEntry& e : trace.entries()) {
    Sum& sum = sums[OpName(e.op)];
    sum.cost += e.cost;
    sum.seconds += e.seconds;
  }
  std::vector<OpShare> shares;
  for (const auto& [name, sum] : sums) {
    const double s = std::max(sum.seconds, 1e-12);
    shares.push_back({std::string(name), 1e3 * sum.seconds,
                      static_cast<double>(sum.cost.bytes_read + sum.cost.bytes_written) / s / 1e9,
                      static_cast<double>(sum.cost.flops) / s / 1e9});
  }
  std::sort(shares.begin(), shares.end(),
            [](const OpShare& a, const OpShare& b) { return a.ms > b.ms; });
  return shares;
}

std::vector<int32_t> RandomTokens(int64_t n, int32_t vocab) {
  std::vector<int32_t> tokens(static_cast<size_t>(n));
  uint64_t state = 1;
  for (int32_t& t : tokens) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    t = static_cast<int32_t>((state >> 33) % static_cast<uint64_t>(vocab));
  }
  return tokens;
}

}  // namespace

Result<BenchEngine> OpenBenchEngine(const EngineOptions& options, const std::string& geometry,
                                    DType format) {
  BenchEngine bench;
  OKV_ASSIGN_OR_RETURN(bench.backend, MakeBackend(options));
  auto trace = std::make_unique<TraceBackend>(*bench.backend);
  trace->set_logging(false);
  bench.trace = trace.get();
  auto core = std::make_unique<EngineCore>();
  core->options = options;
  const auto start = Clock::now();
  if (!options.model.empty()) {
    OKV_ASSIGN_OR_RETURN(const ModelFiles files, OpenModel(options.model));
    core->config = files.config;
    OKV_ASSIGN_OR_RETURN(core->weights, LoadWeights(files, *trace, {}));
  } else {
    OKV_ASSIGN_OR_RETURN(core->config, GeometryConfig(geometry));
    OKV_ASSIGN_OR_RETURN(core->weights, GenerateWeights(*trace, core->config, format));
  }
  core->backend = std::move(trace);
  bench.vocab = core->config.vocab;
  bench.weight_bytes = core->weights.bytes;
  OKV_ASSIGN_OR_RETURN(const MemoryPlan plan, PlanMemory(options, core->config, core->weights.bytes,
                                                         core->weights.all_f32));
  OKV_ASSIGN_OR_RETURN(bench.engine, MakeEngine(std::move(core), plan, Seconds(start)));
  return bench;
}

Result<DecodeCase> MeasureDecode(BenchEngine& bench, const PolicyOptions& policy, int64_t context,
                                 int steps) {
  OKV_ASSIGN_OR_RETURN(const auto session, bench.engine->NewSession(policy));
  OKV_RETURN_IF_ERROR(session->FillContext(context));
  const std::vector<int32_t> tokens = RandomTokens(steps + 3, bench.vocab);
  std::vector<double> ms;
  for (size_t i = 0; i < tokens.size(); ++i) {
    const auto start = Clock::now();
    OKV_RETURN_IF_ERROR(session->Step(tokens[i]));
    if (i >= 2) ms.push_back(1e3 * Seconds(start));  // the first records, the second warms up
  }
  DecodeCase result;
  std::sort(ms.begin(), ms.end());
  result.ms_per_token = ms[ms.size() / 2];
  result.best_ms = ms.front();
  bench.trace->Clear();
  bench.trace->set_logging(true);
  const Status traced = session->Step(tokens[0]);
  bench.trace->set_logging(false);
  OKV_RETURN_IF_ERROR(traced);
  const Cost cost = bench.trace->Total();
  const SessionStats stats = session->stats();
  result.policy = stats.policy;
  result.settings = stats.settings;
  result.context = context;
  result.floor_bytes = cost.bytes_read + cost.bytes_written;
  result.attended_tokens = stats.attended_tokens;
  result.ops = OpShares(*bench.trace);
  bench.trace->Clear();
  return result;
}

Result<PrefillCase> MeasurePrefill(BenchEngine& bench, const PolicyOptions& policy, int64_t tokens,
                                   int repeats) {
  PrefillCase result;
  result.tokens = tokens;
  const std::vector<int32_t> prompt = RandomTokens(tokens, bench.vocab);
  for (int i = 0; i < repeats; ++i) {
    OKV_ASSIGN_OR_RETURN(const auto session, bench.engine->NewSession(policy));
    bench.trace->Clear();
    bench.trace->set_logging(true);
    const auto start = Clock::now();
    const Status status = session->Prompt(prompt);
    const double seconds = Seconds(start);
    bench.trace->set_logging(false);
    OKV_RETURN_IF_ERROR(status);
    if (i == 0 || seconds < result.seconds) {
      result.seconds = seconds;
      result.flops = bench.trace->Total().flops;
      result.ops = OpShares(*bench.trace);
    }
    result.policy = session->stats().policy;
  }
  bench.trace->Clear();
  return result;
}

}  // namespace omnikv::tools
