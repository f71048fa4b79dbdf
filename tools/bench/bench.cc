// omnikv bench: the machine's ceilings first, then each case against them.
#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "backend/cpu/cpu_backend.h"
#include "backend/cpu/prefill/gemm_peak.h"
#include "base/log.h"
#include "base/memory.h"
#include "bench/cases.h"
#include "bench/ceiling.h"
#include "flags.h"
#include "report.h"

namespace omnikv::tools {
namespace {

struct BenchFlags {
  EngineFlags engine;
  PolicyFlags policy;
  std::string geometry = "tiny";
  std::string format = "bf16";
  std::vector<std::string> policies;
  std::vector<int64_t> contexts;
  std::vector<int64_t> prefill;
  std::vector<int64_t> attend;
  std::vector<int> threads;
  int steps = 16;
  int repeats = 3;
  bool ops = false;
  bool json = false;
};

struct Ceiling {
  MemoryCeiling memory;
  GemmRate gemm_bf16, gemm_f32;
  double amx = 0;  // floating-point operations a second; 0: the CPU has none
};

Result<DType> ParseFormat(const std::string& name) {
  for (const DType t : {DType::kBF16, DType::kF16, DType::kF32, DType::kQ8_0}) {
    if (name == DTypeName(t)) return t;
  }
  return InvalidArgument(fmt::format("--format is '{}', expected bf16, f16, f32 or q8_0", name));
}

// Raises `c` to what this machine does now. Machines are busy at times: measured before each case,
// the best of a run counts.
Status RaiseCeiling(int threads, Ceiling& c) {
  ThreadPool pool(threads == 0 ? PhysicalCores() : threads);
  OKV_ASSIGN_OR_RETURN(const MemoryCeiling memory, MeasureMemory(pool, size_t{1} << 30));
  c.memory.read_gb_s = std::max(c.memory.read_gb_s, memory.read_gb_s);
  c.memory.copy_gb_s = std::max(c.memory.copy_gb_s, memory.copy_gb_s);
  const auto raise = [&pool](DType type, GemmRate& best) {
    const GemmRate now = MeasureGemmPeak(pool, type);
    if (now.flops > best.flops) best = now;
  };
  raise(DType::kBF16, c.gemm_bf16);
  raise(DType::kF32, c.gemm_f32);
  c.amx = std::max(c.amx, MeasureAmxPeak(pool));
  return {};
}

nlohmann::ordered_json OpsJson(const std::vector<OpShare>& ops) {
  auto json = nlohmann::ordered_json::array();
  for (const OpShare& op : ops) {
    json.push_back({{"op", op.name}, {"ms", op.ms}, {"gb_s", op.gb_s}, {"gflop_s", op.gflop_s}});
  }
  return json;
}

void PrintOps(const std::vector<OpShare>& ops) {
  for (const OpShare& op : ops) {
    fmt::print("      {:<20} {:>9.3f} ms {:>8.1f} GB/s {:>9.1f} GFLOP/s\n", op.name, op.ms, op.gb_s,
               op.gflop_s);
  }
}

class Bench {
 public:
  explicit Bench(const BenchFlags& flags) : f_(flags) {}

  Status Run() {
    OKV_ASSIGN_OR_RETURN(options_, ToEngineOptions(f_.engine));
    if (f_.engine.model.empty()) options_.model.clear();  // generated weights
    OKV_ASSIGN_OR_RETURN(format_, ParseFormat(f_.format));
    json_ = {{"machine", {{"cpu", MakeCpuBackend({})->Describe()}, {"cores", PhysicalCores()}}},
             {"cases", nlohmann::ordered_json::array()}};
    for (const int threads : f_.threads.empty() ? std::vector<int>{options_.threads} : f_.threads) {
      OKV_RETURN_IF_ERROR(RunThreads(threads));
    }
    if (f_.json) fmt::print("{}\n", Dump(json_));
    return {};
  }

 private:
  Status RunThreads(int threads);
  void PrintCeiling() const;
  nlohmann::ordered_json CeilingJson() const;
  Status RunAttend();
  Status RunDecode(const PolicyOptions& policy);
  Status RunPrefill(const PolicyOptions& policy);
  int Threads() const { return options_.threads == 0 ? PhysicalCores() : options_.threads; }
  std::string Label() const {
    return options_.model.empty() ? f_.geometry + " " + f_.format : options_.model;
  }

  const BenchFlags& f_;
  EngineOptions options_;
  DType format_ = DType::kBF16;
  Ceiling ceiling_;
  BenchEngine bench_;
  nlohmann::ordered_json json_;
};

Status Bench::RunThreads(int threads) {
  options_.threads = threads;
  ceiling_ = {};
  OKV_RETURN_IF_ERROR(RaiseCeiling(threads, ceiling_));
  OKV_ASSIGN_OR_RETURN(bench_, OpenBenchEngine(options_, f_.geometry, format_));
  if (!f_.json) {
    fmt::print("{}\n{}: weights {}\n", bench_.engine->device(), Label(),
               HumanBytes(bench_.weight_bytes));
    PrintCeiling();
  }
  std::vector<std::string> policies = f_.policies;
  if (policies.empty()) policies.push_back(f_.policy.policy == "auto" ? "full" : f_.policy.policy);
  for (const std::string& name : policies) {
    PolicyFlags flags = f_.policy;
    flags.policy = name;
    if (name == "full") flags.set.clear();
    OKV_ASSIGN_OR_RETURN(const PolicyOptions policy, ToPolicyOptions(flags));
    OKV_RETURN_IF_ERROR(RunPrefill(policy));
    OKV_RETURN_IF_ERROR(RunDecode(policy));
  }
  OKV_RETURN_IF_ERROR(RunAttend());
  if (!f_.json) PrintCeiling();
  json_["ceiling"] = CeilingJson();
  return {};
}

void Bench::PrintCeiling() const {
  const Ceiling& c = ceiling_;
  fmt::print(
      "ceiling, {} threads: read {:.1f} GB/s, copy {:.1f} GB/s, GEMM {:.3f} TFLOP/s ({}) and "
      "{:.3f} TFLOP/s ({}){}\n",
      Threads(), c.memory.read_gb_s, c.memory.copy_gb_s, c.gemm_bf16.flops / 1e12, c.gemm_bf16.by,
      c.gemm_f32.flops / 1e12, c.gemm_f32.by,
      c.amx > 0 ? fmt::format(", AMX tiles {:.3f} TFLOP/s", c.amx / 1e12) : "");
}

nlohmann::ordered_json Bench::CeilingJson() const {
  const Ceiling& c = ceiling_;
  nlohmann::ordered_json json = {
      {"threads", Threads()},
      {"read_gb_s", c.memory.read_gb_s},
      {"copy_gb_s", c.memory.copy_gb_s},
      {"gemm_tflop_s", {{"bf16", c.gemm_bf16.flops / 1e12}, {"f32", c.gemm_f32.flops / 1e12}}},
      {"gemm_by", {{"bf16", c.gemm_bf16.by}, {"f32", c.gemm_f32.by}}}};
  if (c.amx > 0) json["amx_tflop_s"] = c.amx / 1e12;
  return json;
}

Status Bench::RunAttend() {
  for (const int64_t tokens : f_.attend) {
    for (const int32_t head_dim : {64, 128}) {
      OKV_RETURN_IF_ERROR(RaiseCeiling(options_.threads, ceiling_));
      const double bf16 = ceiling_.gemm_bf16.flops, f32 = ceiling_.gemm_f32.flops;
      OKV_ASSIGN_OR_RETURN(const AttendCase c,
                           MeasureAttend(bench_, head_dim, tokens, options_.prefill_chunk));
      const double rate = static_cast<double>(c.flops) / c.seconds;
      json_["cases"].push_back({{"attend_tokens", tokens},
                                {"heads", kAttendHeads},
                                {"kv_heads", kAttendKvHeads},
                                {"head_dim", head_dim},
                                {"threads", Threads()},
                                {"seconds", c.seconds},
                                {"tflop_s", rate / 1e12},
                                {"share_of_gemm", {{"bf16", rate / bf16}, {"f32", rate / f32}}}});
      if (ceiling_.amx > 0) json_["cases"].back()["share_of_amx"] = rate / ceiling_.amx;
      if (f_.json) continue;
      fmt::print(
          "attend  {}/{} heads of {:>3}, {:>7} tokens  {:>6.3f} TFLOP/s  {:>5.1f} % of bf16 GEMM, "
          "{:>5.1f} % of f32 GEMM{}\n",
          kAttendHeads, kAttendKvHeads, head_dim, tokens, rate / 1e12, 100 * rate / bf16,
          100 * rate / f32,
          ceiling_.amx > 0 ? fmt::format(", {:.1f} % of AMX tiles", 100 * rate / ceiling_.amx)
                           : "");
    }
  }
  return {};
}

Status Bench::RunPrefill(const PolicyOptions& policy) {
  for (const int64_t tokens : f_.prefill) {
    OKV_RETURN_IF_ERROR(RaiseCeiling(options_.threads, ceiling_));
    OKV_ASSIGN_OR_RETURN(const PrefillCase c, MeasurePrefill(bench_, policy, tokens, f_.repeats));
    const double rate = static_cast<double>(c.flops) / c.seconds;
    const double peak = std::max(ceiling_.gemm_bf16.flops, ceiling_.gemm_f32.flops);
    const double tok_s = static_cast<double>(tokens) / c.seconds;
    json_["cases"].push_back({{"geometry", Label()},
                              {"policy", c.policy},
                              {"device", options_.device},
                              {"threads", Threads()},
                              {"prefill_tokens", tokens},
                              {"prefill_tok_s", tok_s},
                              {"share_of_gemm", rate / peak},
                              {"process_bytes", ResidentMemory()},
                              {"ops", OpsJson(c.ops)}});
    if (f_.json) continue;
    fmt::print(
        "prefill {:<10} {:>7} tokens  {:>9.1f} tok/s  {:>6.3f} TFLOP/s  {:>5.1f} % of GEMM\n",
        c.policy, tokens, tok_s, rate / 1e12, 100 * rate / peak);
    if (f_.ops) PrintOps(c.ops);
  }
  return {};
}

Status Bench::RunDecode(const PolicyOptions& policy) {
  for (const int64_t context : f_.contexts) {
    OKV_RETURN_IF_ERROR(RaiseCeiling(options_.threads, ceiling_));
    OKV_ASSIGN_OR_RETURN(const DecodeCase c, MeasureDecode(bench_, policy, context, f_.steps));
    const double gb_s = static_cast<double>(c.floor_bytes) / c.ms_per_token / 1e6;
    json_["cases"].push_back({{"geometry", Label()},
                              {"policy", c.policy},
                              {"settings", c.settings},
                              {"device", options_.device},
                              {"threads", Threads()},
                              {"context", context},
                              {"batch", 1},
                              {"ms_per_token", c.ms_per_token},
                              {"tokens_per_s", 1e3 / c.ms_per_token},
                              {"floor_bytes", c.floor_bytes},
                              {"attended_tokens", c.attended_tokens},
                              {"share_of_read", gb_s / ceiling_.memory.read_gb_s},
                              {"process_bytes", ResidentMemory()},
                              {"ops", OpsJson(c.ops)}});
    if (f_.json) continue;
    fmt::print(
        "decode  {:<10} {:>7} context {:>8.3f} ms {:>8.1f} tok/s  {:>8.1f} MB a step  "
        "{:>6.1f} GB/s  {:>5.1f} % of read\n",
        c.policy, context, c.ms_per_token, 1e3 / c.ms_per_token,
        static_cast<double>(c.floor_bytes) / 1e6, gb_s, 100 * gb_s / ceiling_.memory.read_gb_s);
    if (f_.ops) PrintOps(c.ops);
  }
  return {};
}

}  // namespace

void AddBench(CLI::App& app, Command& command) {
  auto f = std::make_shared<BenchFlags>();
  CLI::App* sub = app.add_subcommand("bench", "speed, held against the machine's own ceilings");
  sub->add_option(
         "--geometry", f->geometry,
         "tiny, llama-1b, llama3-8b or a JSON file; weights are made up (-m: a real model)")
      ->capture_default_str();
  sub->add_option("--format", f->format, "of the made-up weights: bf16, f16, f32 or q8_0")
      ->capture_default_str();
  sub->add_option("--policies", f->policies, "policies to measure, full,omnikv")->delimiter(',');
  sub->add_option("--context", f->contexts, "decode at these lengths, over made-up K/V")
      ->delimiter(',');
  sub->add_option("--prefill", f->prefill, "prompts of these lengths")->delimiter(',');
  sub->add_option("--attend", f->attend,
                  "one layer's causal attention alone, of prompts of these lengths")
      ->delimiter(',');
  sub->add_option("--thread-counts", f->threads, "measure with each of these")->delimiter(',');
  sub->add_option("--steps", f->steps, "decode steps a case")->check(CLI::Range(1, 100000));
  sub->add_option("--repeats", f->repeats, "prompts a case")->check(CLI::Range(1, 1000));
  sub->add_flag("--ops", f->ops, "time by op");
  sub->add_flag("--json", f->json, "print one JSON object");
  AddPolicyFlags(*sub, f->policy);
  AddEngineFlags(*sub, f->engine);
  sub->callback([&command, f] { command = [f] { return Bench(*f).Run(); }; });
}

}  // namespace omnikv::tools
