// omnikv bench: the machine's ceilings first, then each case against them.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <nlohmann/json.hpp>
#include <thread>

#include "backend/cpu/cpu_backend.h"
#include "backend/cpu/prefill/gemm_peak.h"
#include "base/log.h"
#include "base/memory.h"
#ifdef OMNIKV_HAVE_CUDA
#include "backend/cuda/ceiling.h"
#include "backend/cuda/cuda_backend.h"
#endif
#include "bench/cases.h"
#include "bench/ceiling.h"
#include "bench/hits.h"
#include "bench/scheduled.h"
#include "engine/kcache_model.h"
#include "flags.h"
#include "model/forward.h"
#include "model/limits.h"
#include "policy_file.h"
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
  int steps = 0;  // 0: by default
  int batch = 1;
  bool mix = false;
  int64_t beside = 0;  // tokens; 0: no prompt
  int beside_rows = 256;
  bool together = false;
  double beside_limit = 0;
  std::string file;
  std::vector<double> working_sets = {1, 1.5, 2, 3, 4, 8};
  int repeats = 3;
  double hit_rate = -1;
  bool computed = false;
  bool watch = false;
  bool ops = false;
  bool hits = false;
  bool scheduler = false;
  double token_ms = 50;
  int64_t kv_tokens = EngineOptions::kAsManyAsFit;
  std::string predict;  // of kcache; empty: nothing
  bool json = false;
};

// The most memory in use on the card, as its driver says, from its construction on; 0 without one.
class MemoryWatch {
 public:
  explicit MemoryWatch(bool on) {
    if (on) thread_ = std::thread([this] { Watch(); });
  }
  ~MemoryWatch() {
    done_ = true;
    if (thread_.joinable()) thread_.join();
  }
  size_t peak() const { return peak_; }
  // Looks at nothing as long as the lock is held.
  [[nodiscard]] std::unique_lock<std::mutex> Pause() { return std::unique_lock(looking_); }

 private:
  void Watch() {
#ifdef OMNIKV_HAVE_CUDA
    for (; !done_; std::this_thread::sleep_for(std::chrono::milliseconds(20))) {
      const auto looking = Pause();
      peak_ = std::max<size_t>(peak_, CudaMemoryInUse().value_or(0));
    }
#endif
  }

  std::atomic<size_t> peak_{0};
  std::atomic<bool> done_{false};
  std::mutex looking_;
  std::thread thread_;
};

struct Ceiling {
  MemoryCeiling memory;
  GemmRate gemm_bf16, gemm_f32;
  double amx = 0;  // floating-point operations a second; 0: the CPU has none
#ifdef OMNIKV_HAVE_CUDA
  CudaCeiling card;
#endif
};

Result<DType> ParseFormat(const std::string& name) {
  for (const DType t : {DType::kBF16, DType::kF16, DType::kF32, DType::kQ8_0}) {
    if (name == DTypeName(t)) return t;
  }
  return InvalidArgument(fmt::format("--format is '{}', expected bf16, f16, f32 or q8_0", name));
}

Result<Ceiling> MeasureCeiling(int threads, bool on_device, size_t cap = 0) {
  Ceiling c;
#ifdef OMNIKV_HAVE_CUDA
  if (on_device) {
    OKV_ASSIGN_OR_RETURN(c.card, MeasureCudaCeiling(0, cap));
    c.memory = {.read_gb_s = c.card.read_gb_s, .copy_gb_s = c.card.copy_gb_s};
    c.gemm_bf16 = {.flops = c.card.gemm_bf16, .by = "cuBLASLt bf16"};
    c.gemm_f32 = {.flops = c.card.gemm_f32, .by = "cuBLASLt f32"};
    return c;
  }
#endif
  static_cast<void>(on_device);
  static_cast<void>(cap);
  ThreadPool pool(threads);
  OKV_RETURN_IF_ERROR(pool.status());
  OKV_ASSIGN_OR_RETURN(c.memory, MeasureMemory(pool, size_t{1} << 30));
  c.gemm_bf16 = MeasureGemmPeak(pool, DType::kBF16);
  c.gemm_f32 = MeasureGemmPeak(pool, DType::kF32);
  c.amx = MeasureAmxPeak(pool);
  return c;
}

Ceiling Higher(const Ceiling& a, const Ceiling& b) {
  const auto rate = [](const GemmRate& x, const GemmRate& y) { return x.flops < y.flops ? y : x; };
  Ceiling c = b;
  c.memory = {.read_gb_s = std::max(a.memory.read_gb_s, b.memory.read_gb_s),
              .copy_gb_s = std::max(a.memory.copy_gb_s, b.memory.copy_gb_s)};
  c.gemm_bf16 = rate(a.gemm_bf16, b.gemm_bf16);
  c.gemm_f32 = rate(a.gemm_f32, b.gemm_f32);
  c.amx = std::max(a.amx, b.amx);
#ifdef OMNIKV_HAVE_CUDA
  c.card.h2d_gb_s = std::max(a.card.h2d_gb_s, b.card.h2d_gb_s);
#endif
  return c;
}

// GB/s from the host to a card; 0 without one.
double HostToDevice(const Ceiling& c) {
#ifdef OMNIKV_HAVE_CUDA
  return c.card.h2d_gb_s;
#else
  static_cast<void>(c);
  return 0;
#endif
}

nlohmann::ordered_json CeilingJson(const Ceiling& c, int threads) {
  nlohmann::ordered_json json = {
      {"threads", threads},
      {"read_gb_s", c.memory.read_gb_s},
      {"copy_gb_s", c.memory.copy_gb_s},
      {"gemm_tflop_s", {{"bf16", c.gemm_bf16.flops / 1e12}, {"f32", c.gemm_f32.flops / 1e12}}},
      {"gemm_by", {{"bf16", c.gemm_bf16.by}, {"f32", c.gemm_f32.by}}}};
  if (c.amx > 0) json["amx_tflop_s"] = c.amx / 1e12;
#ifdef OMNIKV_HAVE_CUDA
  if (c.card.h2d_gb_s > 0) {
    json["pcie_gb_s"] = {
        {"h2d", c.card.h2d_gb_s}, {"d2h", c.card.d2h_gb_s}, {"gather", c.card.gather_gb_s}};
  }
#endif
  return json;
}

nlohmann::ordered_json OpsJson(const std::vector<OpShare>& ops, double read_gb_s) {
  auto json = nlohmann::ordered_json::array();
  for (const OpShare& op : ops) {
    json.push_back({{"op", op.name},
                    {"calls", op.calls},
                    {"ms", op.ms},
                    {"share", op.share},
                    {"gb_s", op.gb_s},
                    {"share_of_read", op.gb_s / read_gb_s},
                    {"gflop_s", op.gflop_s}});
  }
  return json;
}

double Milliseconds(const std::vector<OpShare>& ops) {
  double ms = 0;
  for (const OpShare& op : ops) ms += op.ms;
  return ms;
}

void PrintOps(const std::vector<OpShare>& ops, double read_gb_s, bool on_device) {
  for (const OpShare& op : ops) {
    fmt::print(
        "      {:<20} {:>5} {:>9.3f} ms {:>5.1f} % {:>8.1f} GB/s {:>5.1f} % of read {:>9.1f} "
        "GFLOP/s\n",
        op.name, op.calls, op.ms, 100 * op.share, op.gb_s, 100 * op.gb_s / read_gb_s, op.gflop_s);
  }
  fmt::print("      {:<26} {:>9.3f} ms: every op alone{}\n", "sum", Milliseconds(ops),
             on_device ? ", without dependent launch, nothing beside it" : "");
}

nlohmann::ordered_json PredictPaper(bool print);

// Other programs and other guests of the host take their part of a machine, now more, now less. So
// the ceilings are measured between all cases, and each case is held against the higher of those
// before and after it.
class Bench {
 public:
  explicit Bench(const BenchFlags& flags) : f_(flags), watch_(flags.watch) {}

  Status Run() {
    SetActivity("measuring");
    if (f_.steps == 0) f_.steps = 16;
    if (f_.contexts.empty() && f_.prefill.empty() && f_.attend.empty()) {
      f_.contexts = {16, 16384};
      f_.prefill = {512};
      if (f_.policies.empty()) {
        f_.policies = {"full", f_.policy.file.empty() ? "omnikv" : f_.policy.policy};
      }
    }
    OKV_ASSIGN_OR_RETURN(options_, ToEngineOptions(f_.engine, /*shipped=*/false));
    options_.shared_products = f_.together;
    options_.max_sessions = f_.batch + (f_.beside > 0 ? 1 : 0);
    if (f_.scheduler) options_.kv_tokens = f_.kv_tokens;
    if (f_.mix) options_.max_sessions *= static_cast<int>(std::max<size_t>(1, f_.policies.size()));
    OKV_ASSIGN_OR_RETURN(format_, ParseFormat(f_.format));
    OKV_ASSIGN_OR_RETURN(policies_, Policies());
    if (options_.context == 0) {  // the geometry's own may be too short by the steps, or too long
      for (const int64_t n : f_.contexts) {
        options_.context = std::max(options_.context, n + f_.steps + 16);
        // Those whose prompts were read decode while others are read.
        if (f_.scheduler) {
          constexpr int64_t kLeastChunk = 512;
          options_.context += 512 + f_.batch * (n / kLeastChunk + 1);
        }
        // Each step takes a chunk of the prompt and a token.
        if (f_.beside > 0) {
          constexpr int kLeastPaced = 64;
          const int64_t beside =
              f_.beside / (f_.beside_limit > 0 ? kLeastPaced : f_.beside_rows) + 100;
          options_.context = std::max({options_.context, f_.beside + 8, n + beside});
        }
      }
      for (const int64_t n : f_.prefill) options_.context = std::max(options_.context, n + 8);
    }
    json_ = {{"machine", {{"cpu", MakeCpuBackend({})->Describe()}, {"cores", PhysicalCores()}}},
             {"ceiling", nullptr},
             {"cases", nlohmann::ordered_json::array()}};
    if (!f_.predict.empty()) json_["kcache_paper"] = PredictPaper(!f_.json);
    // The model is of rows that cross the bus.
    if (!f_.predict.empty() && options_.host_reads == "auto") options_.host_reads = "fetch";
    for (const int threads : f_.threads.empty() ? std::vector<int>{options_.threads} : f_.threads) {
      OKV_RETURN_IF_ERROR(RunThreads(threads));
    }
    if (f_.watch) json_.update({{"pid", getpid()}, {"card_peak_bytes", watch_.peak()}});
    if (f_.json) fmt::print("{}\n", Dump(json_));
    if (f_.watch && !f_.json) {
      fmt::print("in use on the card at most: {}\n", HumanBytes(watch_.peak()));
    }
    return {};
  }

 private:
  Result<std::vector<PolicyOptions>> Policies() const;
  Status RunThreads(int threads);
  // Ends a case that ran since the last call (or since the start): its ceiling.
  Result<Ceiling> Ceilings();
  // What a case has in common with the others.
  nlohmann::ordered_json& AddCase(const Ceiling& c);
  Status RunAttend(int32_t head_dim, int64_t tokens);
  Status RunDecode(const PolicyOptions& policy, int64_t context);
  Status RunMix(int64_t context);
  Status ReportDecode(const DecodeCase& c);
  // The model of kcache beside the case that was measured last.
  Status PredictKcache(const DecodeCase& c, const PolicyOptions& policy);
  Status RunBeside(const PolicyOptions& policy, int64_t context);
  Status RunPrefill(const PolicyOptions& policy, int64_t tokens);
  Status RunScheduled(const PolicyOptions& policy, int64_t context);
  bool Capped() const { return options_.gpu_memory != 0; }
  // The buffers of a measurement, up to 4 GiB, are no memory of a case.
  Result<Ceiling> Measure(bool on_device, size_t cap = 0) {
    const auto paused = watch_.Pause();
    return MeasureCeiling(Threads(), on_device, cap);
  }
  int Threads() const { return options_.threads == 0 ? PhysicalCores() : options_.threads; }
  std::string Label() const {
    return options_.model.empty() ? f_.geometry + " " + f_.format : options_.model;
  }

  BenchFlags f_;
  MemoryWatch watch_;
  EngineOptions options_;
  std::vector<PolicyOptions> policies_;
  DType format_ = DType::kBF16;
  Ceiling last_;     // measured last
  Ceiling highest_;  // of this number of threads
  BenchEngine bench_;
  nlohmann::ordered_json json_;
};

Result<std::vector<PolicyOptions>> Bench::Policies() const {
  std::vector<std::string> names = f_.policies;
  if (names.empty()) names.push_back(f_.policy.policy == "auto" ? "full" : f_.policy.policy);
  std::vector<PolicyOptions> policies;
  for (const std::string& name : names) {
    PolicyFlags flags = f_.policy;
    flags.policy = name;
    if (name == "full" && names.size() > 1) flags.set.clear();  // meant for the others
    OKV_ASSIGN_OR_RETURN(policies.emplace_back(), ToPolicyOptions(flags));
  }
  return policies;
}

Status Bench::RunThreads(int threads) {
  options_.threads = threads;
  options_.policy = policies_.back();  // placed for the last, which reads the least
  // Under a cap the card's ceilings are measured once, before the model takes what there is.
  if (Capped()) {
    bench_.engine.reset();  // before what it runs on
    bench_ = {};
    OKV_ASSIGN_OR_RETURN(last_, Measure(/*on_device=*/true, options_.gpu_memory));
  }
  OKV_ASSIGN_OR_RETURN(bench_, OpenBenchEngine(options_, f_.geometry, format_, policies_,
                                               static_cast<float>(f_.hit_rate)));
  if (!Capped()) {
    OKV_ASSIGN_OR_RETURN(last_, Measure(bench_.backend->OnDevice()));
  }
  highest_ = last_;
  if (!f_.json) {
    fmt::print("{}\n{}: weights {}\n", bench_.engine->device(), Label(),
               HumanBytes(bench_.weight_bytes));
    fmt::print(
        "ceiling, {} threads: read {:.1f} GB/s, copy {:.1f} GB/s, GEMM {:.3f} TFLOP/s ({}) and "
        "{:.3f} TFLOP/s ({}){}\n",
        Threads(), last_.memory.read_gb_s, last_.memory.copy_gb_s, last_.gemm_bf16.flops / 1e12,
        last_.gemm_bf16.by, last_.gemm_f32.flops / 1e12, last_.gemm_f32.by,
        last_.amx > 0 ? fmt::format(", AMX tiles {:.3f} TFLOP/s", last_.amx / 1e12) : "");
  }
  for (const PolicyOptions& policy : policies_) {
    for (const int64_t tokens : f_.prefill) OKV_RETURN_IF_ERROR(RunPrefill(policy, tokens));
    if (f_.mix) continue;  // measured together below
    for (const int64_t context : f_.contexts) {
      OKV_RETURN_IF_ERROR(f_.scheduler    ? RunScheduled(policy, context)
                          : f_.beside > 0 ? RunBeside(policy, context)
                                          : RunDecode(policy, context));
    }
  }
  for (const int64_t context : f_.contexts) {
    if (f_.mix) OKV_RETURN_IF_ERROR(RunMix(context));
  }
  for (const int64_t tokens : f_.attend) {
    for (const int32_t head_dim : {64, 128}) OKV_RETURN_IF_ERROR(RunAttend(head_dim, tokens));
  }
  // One object, or with several numbers of threads one each.
  const auto ceiling = CeilingJson(highest_, Threads());
  if (f_.threads.size() < 2) {
    json_["ceiling"] = ceiling;
  } else {
    json_["ceiling"].push_back(ceiling);
  }
  return {};
}

Result<Ceiling> Bench::Ceilings() {
  if (Capped()) return last_;
  OKV_ASSIGN_OR_RETURN(const Ceiling now, Measure(bench_.backend->OnDevice()));
  const Ceiling ceiling = Higher(last_, now);
  last_ = now;
  highest_ = Higher(highest_, now);
  return ceiling;
}

nlohmann::ordered_json& Bench::AddCase(const Ceiling& c) {
  json_["cases"].push_back({{"geometry", Label()},
                            {"device", options_.device},
                            {"threads", Threads()},
                            {"ceiling", CeilingJson(c, Threads())}});
  return json_["cases"].back();
}

Status Bench::RunAttend(int32_t head_dim, int64_t tokens) {
  OKV_ASSIGN_OR_RETURN(const AttendCase c, MeasureAttend(bench_, head_dim, tokens));
  OKV_ASSIGN_OR_RETURN(const Ceiling ceiling, Ceilings());
  const double rate = static_cast<double>(c.flops) / c.seconds;
  const double of_bf16 = rate / ceiling.gemm_bf16.flops;
  const double of_f32 = rate / ceiling.gemm_f32.flops;
  auto& json = AddCase(ceiling);
  json.update({{"attend_tokens", tokens},
               {"heads", kAttendHeads},
               {"kv_heads", kAttendKvHeads},
               {"head_dim", head_dim},
               {"seconds", c.seconds},
               {"tflop_s", rate / 1e12},
               {"share_of_gemm", {{"bf16", of_bf16}, {"f32", of_f32}}}});
  if (ceiling.amx > 0) json["share_of_amx"] = rate / ceiling.amx;
  if (f_.json) return {};
  fmt::print(
      "attend  {}/{} heads of {:>3}, {:>7} tokens  {:>6.3f} TFLOP/s  {:>5.1f} % of bf16 GEMM, "
      "{:>5.1f} % of f32 GEMM{}\n",
      kAttendHeads, kAttendKvHeads, head_dim, tokens, rate / 1e12, 100 * of_bf16, 100 * of_f32,
      ceiling.amx > 0 ? fmt::format(", {:.1f} % of AMX tiles", 100 * rate / ceiling.amx) : "");
  return {};
}

Status Bench::RunPrefill(const PolicyOptions& policy, int64_t tokens) {
  OKV_ASSIGN_OR_RETURN(const PrefillCase c, MeasurePrefill(bench_, policy, tokens, f_.repeats));
  OKV_ASSIGN_OR_RETURN(const Ceiling ceiling, Ceilings());
  const double rate = static_cast<double>(c.flops) / c.seconds;
  const bool f32 = options_.precision == "full" || bench_.format == DType::kF32;
  const GemmRate& peak = f32 ? ceiling.gemm_f32 : ceiling.gemm_bf16;
  const double tok_s = static_cast<double>(tokens) / c.seconds;
  AddCase(ceiling).update({{"policy", c.policy},
                           {"settings", c.settings},
                           {"prefill_tokens", tokens},
                           {"prefill_tok_s", tok_s},
                           {"tflop_s", rate / 1e12},
                           {"share_of_gemm", rate / peak.flops},
                           {"process_bytes", ResidentMemory()},
                           {"ops_alone_ms", Milliseconds(c.ops)},
                           {"ops", OpsJson(c.ops, ceiling.memory.read_gb_s)}});
  if (f_.json) return {};
  fmt::print(
      "prefill {:<14} {:>7} tokens  {:>9.1f} tok/s  {:>6.3f} TFLOP/s  {:>5.1f} % of {:.3f} GEMM\n",
      c.policy, tokens, tok_s, rate / 1e12, 100 * rate / peak.flops, peak.flops / 1e12);
  if (f_.ops) PrintOps(c.ops, ceiling.memory.read_gb_s, bench_.backend->OnDevice());
  return {};
}

Status Bench::RunDecode(const PolicyOptions& policy, int64_t context) {
  OKV_ASSIGN_OR_RETURN(const DecodeCase c,
                       f_.batch > 1
                           ? MeasureBatch(bench_, policy, context, f_.batch, f_.steps)
                           : MeasureDecode(bench_, policy, context, f_.steps, f_.computed));
  OKV_RETURN_IF_ERROR(ReportDecode(c));
  return f_.predict.empty() ? Status() : PredictKcache(c, policy);
}

nlohmann::ordered_json StepJson(const KcacheStep& step) {
  return {{"weight_bytes", step.weights}, {"k_bytes", step.k},
          {"v_bytes", step.v_card},       {"v_bytes_over_bus", step.v_bus},
          {"ms", 1e3 * step.seconds},     {"tokens_per_s", step.tokens_s}};
}

void PrintStep(const std::string& what, const KcacheStep& step) {
  fmt::print(
      "      {:<24} weights {:>8.1f} MB, K {:>8.1f}, V {:>8.1f}, V over the bus {:>7.1f}: "
      "{:>8.3f} ms, {:>7.1f} tok/s\n",
      what, step.weights / 1e6, step.k / 1e6, step.v_card / 1e6, step.v_bus / 1e6,
      1e3 * step.seconds, step.tokens_s);
}

// What the bytes of a step say of the paper's card, which nobody here has.
nlohmann::ordered_json PredictPaper(bool print) {
  constexpr int64_t kContext = 15 * 1024;
  const CardRates card = PaperCard();
  auto cases = nlohmann::ordered_json::array();
  if (print) {
    fmt::print(
        "kcache by bytes, the paper's card (64 GB, 1 TB/s; bus of 32 GB/s assumed), Llama-2-7B "
        "f16, {} tokens; s/N above {:.1f} pays off\n",
        kContext, BreakEven(card));
  }
  const auto add = [&](const std::string& what, int32_t batch, int64_t top,
                       const KcacheStep& step) {
    auto json = StepJson(step);
    json.update({{"policy", what}, {"batch", batch}});
    if (top > 0) json["budget"] = top;
    cases.push_back(json);
    const std::string name = top > 0 ? fmt::format("{} N={} x {}", what, top, batch)
                                     : fmt::format("{} x {}", what, batch);
    if (print) PrintStep(name, step);
  };
  for (const int32_t batch : {1, 3}) {
    add("full", batch, 0, FullStep(card, PaperLoad(batch, kContext, 0)));
  }
  for (const int32_t batch : {1, 5}) {
    for (const int64_t top : {32, 64, 128}) {
      add("kcache", batch, top, KcacheStepOf(card, PaperLoad(batch, kContext, top)));
    }
  }
  return {{"context", kContext}, {"break_even", BreakEven(card)}, {"cases", cases}};
}

Status Bench::PredictKcache(const DecodeCase& c, const PolicyOptions& policy) {
  OKV_ASSIGN_OR_RETURN(const PolicyInfo* kcache, FindPolicy("kcache"));
  const bool is_kcache = policy.name == kcache->name;
  OKV_ASSIGN_OR_RETURN(
      const PolicySettings settings,
      PolicySettings::Parse(kcache->name, kcache->settings,
                            is_kcache ? policy.settings : decltype(policy.settings){}));
  const CardRates card{.read_bytes_s = 1e9 * last_.memory.read_gb_s,
                       .from_host_bytes_s = 1e9 * HostToDevice(last_),
                       .flops = last_.gemm_bf16.flops};
  const ModelConfig& config = bench_.config;
  const KcacheLoad load{.weight_bytes = static_cast<double>(bench_.weight_bytes),
                        .layers = GlobalLayers(config),
                        .kv_heads = config.n_kv_heads,
                        .head_dim = config.head_dim,
                        .value_bytes = static_cast<double>(bench_.kv_row_bytes) /
                                       (2.0 * config.n_kv_heads * config.head_dim),
                        .batch = c.batch,
                        .context = c.context,
                        .top = settings.Int("budget"),
                        .first_layers = static_cast<int32_t>(settings.Int("first_layers"))};
  const KcacheStep step = is_kcache ? KcacheStepOf(card, load) : FullStep(card, load);
  auto json = StepJson(step);
  json["break_even"] = BreakEven(card);
  json["measured_over_predicted"] = c.ms_per_token / (1e3 * step.seconds);
  json_["cases"].back()["kcache_model"] = json;
  if (f_.json) return {};
  PrintStep("by bytes", step);
  fmt::print("      measured: {:.2f} times that; {}\n", c.ms_per_token / (1e3 * step.seconds),
             BreakEven(card) > 0
                 ? fmt::format("s/N is {:.1f}, above {:.1f} it pays off",
                               static_cast<double>(load.context) / static_cast<double>(load.top),
                               BreakEven(card))
                 : "no bus here, V are read where K lie");
  return {};
}

Status Bench::RunMix(int64_t context) {
  OKV_ASSIGN_OR_RETURN(const DecodeCase c,
                       MeasureMix(bench_, policies_, context, f_.batch, f_.steps));
  return ReportDecode(c);
}

Status Bench::RunBeside(const PolicyOptions& policy, int64_t context) {
  OKV_ASSIGN_OR_RETURN(
      const BesideCase c,
      MeasureBeside(bench_, policy, context, f_.batch, f_.beside, f_.beside_rows, f_.beside_limit));
  OKV_ASSIGN_OR_RETURN(const Ceiling ceiling, Ceilings());
  AddCase(ceiling).update(
      {{"policy", c.policy},
       {"settings", c.settings},
       {"context", context},
       {"batch", f_.batch},
       {"beside_tokens", f_.beside},
       {"beside_rows", c.chunk},
       {"together", f_.together},
       {"beside_limit", f_.beside_limit},
       {"longest_ms", c.longest_ms},
       {"p95_ms", {{"alone", c.alone_p95_ms}, {"beside", c.beside_p95_ms}}},
       {"prompt_s", {{"alone", c.prompt_seconds}, {"beside", c.beside_seconds}}}});
  if (f_.json) return {};
  fmt::print(
      "beside  {:<14} {:>7} context x {}: 95 % of tokens in {:.3f} ms, with a prompt of {} in "
      "{:.3f} ms ({:.2f} x), {:.3f} ms at most; the prompt in {:.2f} s, alone in {:.2f} s ({:.2f} "
      "x)\n",
      c.policy, context, f_.batch, c.alone_p95_ms, f_.beside, c.beside_p95_ms,
      c.beside_p95_ms / c.alone_p95_ms, c.longest_ms, c.beside_seconds, c.prompt_seconds,
      c.beside_seconds / c.prompt_seconds);
  return {};
}

Status Bench::RunScheduled(const PolicyOptions& policy, int64_t context) {
  OKV_ASSIGN_OR_RETURN(const ScheduledCase c, MeasureScheduled(bench_, policy, context, f_.batch,
                                                               f_.steps, f_.beside, f_.token_ms));
  OKV_ASSIGN_OR_RETURN(const Ceiling ceiling, Ceilings());
  const double tokens_s = 1e3 * c.together / c.ms_per_step;
  auto& json = AddCase(ceiling);
  json.update(
      {{"policy", c.policy},
       {"settings", c.settings},
       {"context", context},
       {"requests", c.requests},
       {"together", c.together},
       {"prompts_s", c.prompts_s},
       {"ms_per_step", c.ms_per_step},
       {"tokens_per_s", tokens_s},
       {"p95_ms", c.p95_ms},
       {"held_bytes", {{"device", c.held.device}, {"host", c.held.host}, {"disk", c.held.disk}}},
       {"host_layers", bench_.host_layers},
       {"fetched_bytes", c.fetched_bytes}});
  if (c.hit_rate) json.update({{"hit_rate", *c.hit_rate}, {"simulated", f_.hit_rate >= 0}});
  if (c.beside > 0) {
    json.update({{"beside_tokens", c.beside},
                 {"beside_p95_ms", c.beside_p95_ms},
                 {"prompt_s", {{"alone", c.alone_s}, {"beside", c.beside_s}}}});
  }
  if (f_.json) return {};
  fmt::print(
      "scheduler {:<12} {:>7} context, {} of {} requests at a time: {:.3f} ms a step, {:.1f} "
      "tok/s, "
      "95 % of tokens in {:.3f} ms; prompts in {:.2f} s; {} on the device, {} beside it{}\n",
      c.policy, context, c.together, c.requests, c.ms_per_step, tokens_s, c.p95_ms, c.prompts_s,
      HumanBytes(c.held.device), HumanBytes(c.held.host + c.held.disk),
      c.hit_rate ? fmt::format(", {:.1f} % hits, {:.1f} MB fetched a step", 100 * *c.hit_rate,
                               static_cast<double>(c.fetched_bytes) / 1e6)
                 : "");
  if (c.beside == 0) return {};
  fmt::print(
      "      with a prompt of {} beside them: 95 % of tokens in {:.3f} ms ({:.2f} x); the prompt "
      "in "
      "{:.2f} s, alone in {:.2f} s ({:.2f} x)\n",
      c.beside, c.beside_p95_ms, c.beside_p95_ms / c.p95_ms, c.beside_s, c.alone_s,
      c.beside_s / c.alone_s);
  return {};
}

Status Bench::ReportDecode(const DecodeCase& c) {
  const int64_t context = c.context;
  OKV_ASSIGN_OR_RETURN(const Ceiling ceiling, Ceilings());
  const double gb_s = static_cast<double>(c.floor_bytes) / c.ms_per_token / 1e6;
  const double peak = ceiling.memory.read_gb_s;
  AddCase(ceiling).update({{"policy", c.policy},
                           {"settings", c.settings},
                           {"context", context},
                           {"batch", c.batch},
                           {"ms_per_token", c.ms_per_token},
                           {"tokens_per_s", 1e3 * c.batch / c.ms_per_token},
                           {"floor_bytes", c.floor_bytes},
                           {"attended_tokens", c.attended_tokens},
                           {"transfer_bytes", c.transfer_bytes},
                           {"host_layers", bench_.host_layers},
                           {"share_of_read", gb_s / peak},
                           {"process_bytes", ResidentMemory()},
                           {"ops_alone_ms", Milliseconds(c.ops)},
                           {"ops", OpsJson(c.ops, peak)}});
  if (c.prefill_seconds > 0) {
    json_["cases"].back()["prefill_tokens"] = context;
    json_["cases"].back()["prefill_tok_s"] = static_cast<double>(context) / c.prefill_seconds;
  }
  if (c.hit_rate) {
    json_["cases"].back()["hit_rate"] = *c.hit_rate;
    json_["cases"].back()["simulated"] = f_.hit_rate >= 0;
  }
  const double bus = HostToDevice(ceiling);
  const double bus_gb_s = static_cast<double>(c.transfer_bytes) / c.ms_per_token / 1e6;
  if (c.transfer_bytes > 0 && bus > 0) json_["cases"].back()["share_of_h2d"] = bus_gb_s / bus;
  DiskCeiling disk;
  if (bench_.disk_layers > 0) {
    const BankConfig& bank = CoreOf(*bench_.engine).bank->config();
    OKV_ASSIGN_OR_RETURN(disk, MeasureDisk(options_.kv_folder, bank.LargestRowBytes()));
    json_["cases"].back()["disk"] = {{"layers", bench_.disk_layers},
                                     {"bytes", c.disk_bytes},
                                     {"read_bytes", disk.read_bytes},
                                     {"random_gb_s", disk.random_gb_s},
                                     {"sequential_gb_s", disk.sequential_gb_s}};
  }
  if (f_.json) return {};
  fmt::print(
      "decode  {:<14} {:>7} context{} {:>8.3f} ms {:>8.1f} tok/s  {:>8.1f} MB a step  "
      "{:>6.1f} GB/s  {:>5.1f} % of {:.1f} read\n",
      c.policy, context, c.batch > 1 ? fmt::format(" x {}", c.batch) : "", c.ms_per_token,
      1e3 * c.batch / c.ms_per_token, static_cast<double>(c.floor_bytes) / 1e6, gb_s,
      100 * gb_s / peak, peak);
  if (bench_.host_layers > 0 && (c.transfer_bytes > 0 || c.hit_rate)) {
    fmt::print(
        "      {} layers on the {}{}, {:.1f} MB a step from there, {:.3f} GB/s{}{}\n",
        bench_.host_layers, bench_.disk_layers == bench_.host_layers ? "disk" : "host",
        bench_.disk_layers == 0 || bench_.disk_layers == bench_.host_layers
            ? ""
            : fmt::format(", {} of them on the disk", bench_.disk_layers),
        static_cast<double>(c.transfer_bytes) / 1e6, bus_gb_s,
        bus > 0 ? fmt::format(", {:.1f} % of {:.1f} from host to device", 100 * bus_gb_s / bus, bus)
                : "",
        c.hit_rate ? fmt::format(", {:.1f} % hits", 100 * *c.hit_rate) : "");
  }
  if (disk.read_bytes > 0) {
    const double rate = static_cast<double>(c.disk_bytes) / c.ms_per_token / 1e6;
    fmt::print(
        "      disk: {:.1f} MB a step past the page cache, {:.3f} GB/s; it gives {:.3f} GB/s in "
        "random "
        "reads of {} bytes and {:.3f} GB/s in order\n",
        static_cast<double>(c.disk_bytes) / 1e6, rate, disk.random_gb_s, disk.read_bytes,
        disk.sequential_gb_s);
  }
  if (f_.ops) PrintOps(c.ops, peak, bench_.backend->OnDevice());
  return {};
}

Status RunHits(const BenchFlags& f) {
  HitsOptions options{.file = f.file,
                      .lengths = f.contexts.empty() ? std::vector<int64_t>{8192} : f.contexts,
                      .working_sets = f.working_sets,
                      .steps = f.steps == 0 ? 256 : f.steps,
                      .json = f.json};
  OKV_ASSIGN_OR_RETURN(options.engine, ToEngineOptions(f.engine));
  OKV_ASSIGN_OR_RETURN(options.policy, ToPolicyOptions(f.policy));
  return BenchHits(options);
}

// Contexts are those of the cases, whatever --policy-file says.
Status ApplyFile(BenchFlags& f) {
  const bool has = std::find(f.policies.begin(), f.policies.end(), "blocks") != f.policies.end();
  if (!f.policy.file.empty() && !f.policies.empty() && !has) {
    return InvalidArgument(
        fmt::format("--policies is {}, but --policy-file '{}' is of policy blocks",
                    fmt::join(f.policies, ","), f.policy.file));
  }
  f.engine.given.insert("--ctx");
  return ApplyPolicyFile(f.engine, f.policy);
}

}  // namespace

void AddBench(CLI::App& app, Command& command) {
  auto f = std::make_shared<BenchFlags>();
  CLI::App* sub = app.add_subcommand("bench", "speed, held against the machine's own ceilings");
  CLI::Option* geometry =
      sub->add_option(
             "--geometry", f->geometry,
             "tiny, llama-1b, llama3-8b or a JSON file; weights are made up (-m: a real model)")
          ->capture_default_str();
  sub->add_option("--format", f->format, "of the made-up weights: bf16, f16, f32 or q8_0")
      ->capture_default_str();
  sub->add_option("--policies", f->policies, "policies to measure, full,omnikv")->delimiter(',');
  sub->footer("without --context, --prefill and --attend: a prompt of 512, decode at 16 and 16384");
  const CLI::Range tokens(int64_t{1}, ModelLimits::kContext);
  sub->add_option("--context", f->contexts, "decode at these lengths, over made-up K/V")
      ->delimiter(',')
      ->check(tokens);
  sub->add_flag("--computed", f->computed, "decode over K/V of a prompt instead of made-up ones");
  sub->add_option("--prefill", f->prefill, "prompts of these lengths")
      ->delimiter(',')
      ->check(tokens);
  sub->add_option("--attend", f->attend,
                  "one layer's causal attention alone, of prompts of these lengths")
      ->delimiter(',')
      ->check(tokens);
  sub->add_option("--thread-counts", f->threads, "measure with each of these")
      ->delimiter(',')
      ->check(CLI::Range(1, ThreadPool::kMaxThreads));
  sub->add_option("--steps", f->steps, "decode steps a case; default: 16, with --hits 256")
      ->check(CLI::Range(1, 100000));
  sub->add_option("--batch", f->batch, "sequences that decode together, each of such a length")
      ->check(CLI::Range(1, kMaxBatch));
  CLI::Option* mix =
      sub->add_flag("--mix", f->mix, "all policies share the steps, with --batch sequences each");
  CLI::Option* beside = sub->add_option("--beside", f->beside,
                                        "compute a prompt of this length beside the sequences");
  beside->check(tokens)->excludes(mix)->needs(sub->get_option("--context"));
  sub->add_option("--beside-rows", f->beside_rows, "rows of that prompt per step")
      ->capture_default_str()
      ->needs(beside)
      ->check(CLI::Range(1, 1 << 16));
  sub->add_option("--beside-limit", f->beside_limit,
                  "as many rows as keep a step within so many times one without them")
      ->needs(beside)
      ->check(CLI::Range(1.0, 1000.0));
  sub->add_flag("--together", f->together, "multiply those rows together with the decoding ones")
      ->needs(beside);
  CLI::Option* scheduler = sub->add_flag(
      "--scheduler", f->scheduler,
      "the sequences are --batch requests to the scheduler of the server, with computed prompts: "
      "how many decode at a time, and how fast");
  scheduler->excludes(mix)->needs(sub->get_option("--context"));
  sub->add_option("--kv-tokens", f->kv_tokens,
                  "tokens of K/V that the requests share; default: as many as fit")
      ->needs(scheduler)
      ->check(tokens);
  sub->add_option("--token-ms", f->token_ms,
                  "the scheduler's limit on the time between two tokens, as that of serve")
      ->capture_default_str()
      ->needs(scheduler)
      ->check(CLI::NonNegativeNumber);
  sub->add_option("--repeats", f->repeats, "prompts a case")->check(CLI::Range(1, 1000));
  sub->add_option("--hit-rate", f->hit_rate,
                  "simulate this share of hits in working sets (layers on the host)")
      ->check(CLI::Range(0.0, 1.0));
  CLI::Option* hits = sub->add_flag(
      "--hits", f->hits,
      "the share of hits in working sets by their size, on real text: documents of --context "
      "tokens (8192) or -f, with --policy");
  for (const char* other : {"--geometry", "--policies", "--prefill", "--attend", "--hit-rate"}) {
    hits->excludes(sub->get_option(other));
  }
  sub->add_option("-f,--file", f->file, "a text for --hits; - is stdin")
      ->needs(hits)
      ->excludes(sub->get_option("--context"));
  sub->add_option(
         "--working-sets", f->working_sets,
         "sizes of working sets for --hits, times what a layer reads (omnikv: budget and tail)")
      ->needs(hits)
      ->delimiter(',')
      ->check(CLI::Range(1.0, 1e6));
  sub->add_option("--predict", f->predict,
                  "kcache: what the bytes of each decode step say of its time, here and on the "
                  "card of KCache's paper; with --policies full,kcache")
      ->check(CLI::IsMember({"kcache"}));
  sub->add_flag("--watch-memory", f->watch, "tell the most memory in use on the card meanwhile");
  sub->add_flag("--ops", f->ops, "time by op, each alone");
  sub->add_flag("--json", f->json, "print one JSON object");
  AddPolicyFlags(*sub, f->policy);
  AddEngineFlags(*sub, f->engine);
  sub->get_option("--model")->excludes(geometry);
  sub->callback([&command, f] {
    command = [f]() -> Status {
      OKV_RETURN_IF_ERROR(ApplyFile(*f));
      return f->hits ? RunHits(*f) : Bench(*f).Run();
    };
  });
}

}  // namespace omnikv::tools
