#include "bench/cases.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <map>
#include <numeric>
#include <span>

#include "backend/forwarding_backend.h"
#include "backend/kv_format.h"
#include "base/log.h"
#include "base/memory.h"
#include "bench/ceiling.h"
#include "engine/batch.h"
#include "engine/chunk_pacer.h"
#include "engine/devices.h"
#include "engine/mixed_steps.h"
#include "model/generated.h"

namespace omnikv::tools {
namespace {

using Clock = std::chrono::steady_clock;

double Seconds(Clock::time_point since) {
  return std::chrono::duration<double>(Clock::now() - since).count();
}

// Of attention, what it reads or gives besides.
std::string ShareName(const Op& op) {
  std::string name(OpName(op));
  if (const auto* a = std::get_if<AttendArgs>(&op)) {
    if (a->score != ScoreKind::kNone) return name + ", scores";
    const PlanSegment& first = a->plan.segments[0];
    if (first.kind == SegmentKind::kList || first.bounds != nullptr) return name + ", chosen";
  }
  return name;
}

std::vector<OpShare> OpShares(const std::vector<TraceEntry>& entries) {
  struct Sum {
    int calls = 0;
    Cost cost;
    double seconds = 0;
  };
  std::map<std::string, Sum> sums;
  double all = 1e-12;
  for (const TraceEntry& e : entries) {
    Sum& sum = sums[ShareName(e.op)];
    ++sum.calls;
    sum.cost += e.cost;
    sum.seconds += e.seconds;
    all += e.seconds;
  }
  std::vector<OpShare> shares;
  for (const auto& [name, sum] : sums) {
    const double s = std::max(sum.seconds, 1e-12);
    const uint64_t bytes = sum.cost.bytes_read + sum.cost.bytes_written;
    shares.push_back({.name = name,
                      .calls = sum.calls,
                      .ms = 1e3 * sum.seconds,
                      .share = sum.seconds / all,
                      .gb_s = static_cast<double>(bytes) / s / 1e9,
                      .gflop_s = static_cast<double>(sum.cost.flops) / s / 1e9});
  }
  std::sort(shares.begin(), shares.end(),
            [](const OpShare& a, const OpShare& b) { return a.ms > b.ms; });
  return shares;
}

double SecondsOf(const std::vector<TraceEntry>& entries) {
  double seconds = 0;
  for (const TraceEntry& e : entries) seconds += e.seconds;
  return seconds;
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

// Pseudo-random values in [-1, 1), the same in every run.
std::vector<float> Noise(size_t n) {
  std::vector<float> values(n);
  uint32_t state = 1;
  for (float& v : values) {
    state = state * 1664525u + 1013904223u;
    v = static_cast<float>(state >> 8) / 8388608.0f - 1.0f;
  }
  return values;
}

template <typename T>
Result<Buffer> Uploaded(Backend& backend, const std::vector<T>& values) {
  OKV_ASSIGN_OR_RETURN(Buffer buffer,
                       backend.Allocate(values.size() * sizeof(T), "the benchmark's attention"));
  backend.Upload(buffer.as(), values.data(), values.size() * sizeof(T));
  return buffer;
}

// A backend whose working sets hit by lot: that share of what is selected.
class HitsByLot : public ForwardingBackend {
 public:
  HitsByLot(std::unique_ptr<Backend> inner, float share)
      : ForwardingBackend(*inner), owned_(std::move(inner)), share_(share) {}

  void Enqueue(const Op& op, Lane lane) override { inner().Enqueue(ByLot(op), lane); }
  double TimeAlone(const Op& op) override { return inner().TimeAlone(ByLot(op)); }

 private:
  Op ByLot(Op op) const {
    if (auto* set = std::get_if<WorkingSetArgs>(&op)) set->simulated_hits = share_;
    return op;
  }

  std::unique_ptr<Backend> owned_;
  float share_;
};

}  // namespace

Result<BenchEngine> OpenBenchEngine(const EngineOptions& options, const std::string& geometry,
                                    DType format, const std::vector<PolicyOptions>& others,
                                    float simulated_hits) {
  BenchEngine bench;
  EngineModel model;
  if (!options.model.empty()) {
    OKV_ASSIGN_OR_RETURN(model, ModelOfFiles(options.model));
  } else {
    OKV_ASSIGN_OR_RETURN(ModelConfig config, GeometryConfig(geometry));
    model = MadeUpModel(std::move(config), format);
  }
  bench.config = model.config;
  bench.vocab = bench.config.vocab;
  bench.format = model.format;
  const int64_t context = options.context != 0 ? options.context : bench.config.max_context;
  const auto drops = [&](const PolicyOptions& options_of) {
    const auto policy =
        PolicyFor(options_of, bench.config, context, DType::kF16, /*fetches=*/false);
    return policy.ok() && ((*policy)->Kept().rows > 0 || MaxHeld(**policy, context) > 0);
  };
  const auto heads_apart = [&](const PolicyOptions& options_of) {
    const auto policy =
        PolicyFor(options_of, bench.config, context, DType::kF16, /*fetches=*/false);
    return policy.ok() && (*policy)->Kept().HeadsDiffer();
  };
  EngineOptions planned = options;
  // An engine of a policy that has KV heads apart serves no other.
  const auto together = std::find_if_not(others.begin(), others.end(), heads_apart);
  if (together != others.end() && heads_apart(options.policy)) planned.policy = *together;
  // Room for every token, unless all policies drop some.
  const auto keeps_all = std::find_if_not(others.begin(), others.end(), drops);
  if (keeps_all != others.end() && drops(options.policy)) planned.policy = *keeps_all;
  planned.check = [&](const Engine& engine) -> Status {
    for (const PolicyOptions& policy : others) OKV_RETURN_IF_ERROR(engine.CheckPolicy(policy));
    return engine.CheckPolicy(options.policy);
  };
  OKV_ASSIGN_OR_RETURN(
      bench.engine,
      LoadEngine(planned, std::move(model), [&]() -> Result<std::unique_ptr<Backend>> {
        OKV_ASSIGN_OR_RETURN(bench.backend, MakeBackend(options));
        if (simulated_hits >= 0) {
          bench.backend = std::make_unique<HitsByLot>(std::move(bench.backend), simulated_hits);
        }
        auto trace = std::make_unique<TraceBackend>(*bench.backend);
        trace->set_logging(false);
        bench.trace = trace.get();
        return std::unique_ptr<Backend>(std::move(trace));
      }));
  EngineCore& core = CoreOf(*bench.engine);
  bench.weight_bytes = core.weights.bytes;
  bench.kv_dtype = core.plan.kv_dtype;
  bench.chunk = core.plan.chunk;
  for (int32_t layer = 0; layer < core.bank->n_layers(); ++layer) {
    bench.host_layers += core.bank->OnHost(layer) ? 1 : 0;
    bench.disk_layers += core.bank->OnDisk(layer) ? 1 : 0;
  }
  bench.working_set = core.plan.working_set;
  bench.kv_row_bytes = core.plan.kv_per_token / bench.config.layers.size();
  return bench;
}

namespace {

// The bytes of a step and the shares of its ops, of the fastest of a few calls of step(i).
Status TraceStep(BenchEngine& bench, const std::function<Status(int)>& step, DecodeCase& result) {
  constexpr int kTraced = 3;
  std::vector<TraceEntry> ops;
  for (int i = 0; i < kTraced; ++i) {
    bench.trace->Clear();
    bench.trace->set_logging(true);
    const Status traced = step(i);
    bench.trace->set_logging(false);
    OKV_RETURN_IF_ERROR(traced);
    const std::vector<TraceEntry>& now = bench.trace->entries();
    if (i == 0 || SecondsOf(now) < SecondsOf(ops)) ops = now;
  }
  Cost cost;
  for (const TraceEntry& e : ops) cost += e.cost;
  result.floor_bytes = cost.bytes_read + cost.bytes_written;
  result.ops = OpShares(ops);
  bench.trace->Clear();
  return {};
}

}  // namespace

Result<DecodeCase> MeasureDecode(BenchEngine& bench, const PolicyOptions& policy, int64_t context,
                                 int steps, bool computed) {
  OKV_ASSIGN_OR_RETURN(const auto session, bench.engine->NewSession(policy));
  OKV_RETURN_IF_ERROR(computed ? session->Prompt(RandomTokens(context, bench.vocab))
                               : session->FillContext(context));
  const std::vector<int32_t> tokens = RandomTokens(steps + 3, bench.vocab);
  DecodeCase result;
  if (bench.backend->OnDevice()) {
    // Steps follow each other there; one of them has no time of its own.
    GenerateOptions options{.max_tokens = 4, .ignore_eos = true};
    OKV_RETURN_IF_ERROR(session->Generate(options).status());  // records, warms up
    options.max_tokens = steps;
    const uint64_t read = BytesReadFromDisks();
    const auto start = Clock::now();
    OKV_RETURN_IF_ERROR(session->Generate(options).status());
    result.ms_per_token = result.best_ms = 1e3 * Seconds(start) / steps;
    result.disk_bytes = (BytesReadFromDisks() - read) / static_cast<uint64_t>(steps);
  } else {
    std::vector<double> ms;
    uint64_t read = 0;
    for (size_t i = 0; i < tokens.size(); ++i) {
      if (i == 2) read = BytesReadFromDisks();
      const auto start = Clock::now();
      OKV_RETURN_IF_ERROR(session->Step(tokens[i]));
      if (i >= 2) ms.push_back(1e3 * Seconds(start));  // the first records, the second warms up
    }
    result.disk_bytes = (BytesReadFromDisks() - read) / ms.size();
    std::sort(ms.begin(), ms.end());
    result.ms_per_token = ms[ms.size() / 2];
    result.best_ms = ms.front();
  }
  OKV_RETURN_IF_ERROR(TraceStep(
      bench, [&](int i) { return session->Step(tokens[static_cast<size_t>(i)]); }, result));
  const SessionStats stats = session->stats();
  result.policy = stats.policy;
  result.settings = stats.settings;
  result.context = context;
  result.attended_tokens = stats.attended_tokens;
  result.transfer_bytes = stats.transfer_bytes_per_step;
  result.hit_rate = stats.hit_rate;
  result.prefill_seconds = computed ? stats.prefill_seconds : 0;
  return result;
}

Result<DecodeCase> MeasureBatch(BenchEngine& bench, const PolicyOptions& policy, int64_t context,
                                int32_t batch, int steps) {
  OKV_ASSIGN_OR_RETURN(const auto sequences, Batch::Open(CoreOf(*bench.engine), policy, batch));
  std::vector<Batch::Next> next;
  for (const int32_t token : RandomTokens(batch, bench.vocab)) {
    OKV_ASSIGN_OR_RETURN(const int32_t member, sequences->JoinMadeUp(context));
    next.push_back({member, token});
  }
  OKV_RETURN_IF_ERROR(sequences->Generate(next, 4).status());  // records, warms up
  const auto counted = sequences->Count();
  const auto start = Clock::now();
  OKV_RETURN_IF_ERROR(sequences->Generate(next, steps).status());
  DecodeCase result{.policy = sequences->policy(),
                    .settings = sequences->settings(),
                    .context = context,
                    .batch = batch};
  result.ms_per_token = result.best_ms = 1e3 * Seconds(start) / steps;
  if (counted) {
    const auto now = *sequences->Count();
    result.transfer_bytes =
        (now.missed_bytes - counted->missed_bytes) / static_cast<uint64_t>(steps);
    result.hit_rate = now.HitRate(*counted);
  }
  OKV_RETURN_IF_ERROR(TraceStep(
      bench, [&](int) { return sequences->Step(next); }, result));
  result.attended_tokens = sequences->attended_tokens(next[0].member);
  return result;
}

namespace {

// Joins `batch` sequences with `context` tokens of made-up K/V, and appends their next rows.
Status JoinMadeUp(const BenchEngine& bench, Stepper& stepper, RowGroup& group, int64_t context,
                  int32_t batch, std::vector<DecodeRow>& rows) {
  for (const int32_t token : RandomTokens(batch, bench.vocab)) {
    OKV_ASSIGN_OR_RETURN(const int32_t member, group.Join());
    OKV_RETURN_IF_ERROR(stepper.MadeUpChunks(group, member, context));
    rows.push_back({.group = &group, .member = member, .token = token});
  }
  return {};
}

// Room for the logits of a step.
class RowLogits {
 public:
  RowLogits(size_t n_rows, int32_t vocab) : values_(n_rows * static_cast<size_t>(vocab)) {
    for (size_t r = 0; r < n_rows; ++r) {
      rows_.push_back(values_.data() + r * static_cast<size_t>(vocab));
    }
  }
  std::span<float* const> rows() const { return rows_; }

 private:
  std::vector<float> values_;
  std::vector<float*> rows_;  // [n_rows]: [vocab]
};

}  // namespace

Result<DecodeCase> MeasureMix(BenchEngine& bench, const std::vector<PolicyOptions>& policies,
                              int64_t context, int32_t batch, int steps) {
  EngineCore& core = CoreOf(*bench.engine);
  Stepper stepper(core);
  std::vector<std::unique_ptr<RowGroup>> groups;
  std::vector<DecodeRow> rows;
  DecodeCase result{.policy = "", .settings = "", .context = context};
  for (const PolicyOptions& policy : policies) {
    OKV_ASSIGN_OR_RETURN(auto opened, RowGroup::Open(core, policy, batch));
    RowGroup& group = *groups.emplace_back(std::move(opened));
    OKV_RETURN_IF_ERROR(JoinMadeUp(bench, stepper, group, context, batch, rows));
    result.policy += (result.policy.empty() ? "" : " + ") + group.policy_name();
    result.settings += (result.settings.empty() ? "" : " + ") + group.settings().ToString();
  }
  result.batch = static_cast<int32_t>(rows.size());
  StepsAhead ahead(stepper, rows, std::vector<Sampler*>(rows.size(), nullptr));
  const int64_t warm = int64_t{MixedSteps::kFirstRecorded} * StepsAhead::kMost;
  for (int64_t left = warm; left > 0; --left) OKV_RETURN_IF_ERROR(ahead.Read(left).status());
  const auto start = Clock::now();
  for (int64_t left = steps; left > 0; --left) OKV_RETURN_IF_ERROR(ahead.Read(left).status());
  result.ms_per_token = result.best_ms = 1e3 * Seconds(start) / steps;
  ahead.End();
  const RowLogits logits(rows.size(), bench.vocab);
  OKV_RETURN_IF_ERROR(TraceStep(
      bench, [&](int) { return stepper.Step(rows, logits.rows()); }, result));
  return result;
}

Result<BesideCase> MeasureBeside(BenchEngine& bench, const PolicyOptions& policy, int64_t context,
                                 int32_t batch, int64_t prompt, int32_t chunk, double limit) {
  EngineCore& core = CoreOf(*bench.engine);
  Stepper stepper(core);
  OKV_ASSIGN_OR_RETURN(const auto group, RowGroup::Open(core, policy, batch + 1));
  BesideCase result{.policy = group->policy_name(), .settings = group->settings().ToString()};
  const int32_t most = core.work.max_rows - batch;
  std::vector<DecodeRow> rows;
  OKV_RETURN_IF_ERROR(JoinMadeUp(bench, stepper, *group, context, batch, rows));
  const RowLogits logits(rows.size(), bench.vocab);
  const std::vector<int32_t> tokens = RandomTokens(prompt, bench.vocab);
  // Computes the prompt in chunks of `rows_of` a pacer, each in a step with `decoding`; returns
  // seconds.
  std::vector<double> ms;  // of the steps
  const auto compute = [&](std::span<const DecodeRow> decoding, auto&& rows_of,
                           ChunkPacer& pacer) -> Result<double> {
    OKV_ASSIGN_OR_RETURN(const int32_t member, group->Join());
    ms.clear();
    const auto start = Clock::now();
    for (int64_t pos = 0; pos < prompt;) {
      const auto length = static_cast<size_t>(std::min<int64_t>(rows_of(pacer), prompt - pos));
      const PromptChunk part{.group = group.get(),
                             .member = member,
                             .tokens = {tokens.data() + pos, length},
                             .prompt_end = prompt};
      const auto step = Clock::now();
      OKV_RETURN_IF_ERROR(stepper.Step(decoding, logits.rows().first(decoding.size()), &part));
      core.backend->Synchronize();
      ms.push_back(1e3 * Seconds(step));
      pacer.Took(ms.back());
      pos += static_cast<int64_t>(length);
    }
    const double seconds = Seconds(start);
    group->Leave(member);
    return seconds;
  };
  const auto p95 = [](std::vector<double> times) {
    std::sort(times.begin(), times.end());
    return times[times.size() * 95 / 100];
  };
  ChunkPacer none(0, 0, 1, 0, 1);
  const auto whole = [&](const ChunkPacer&) { return core.work.max_rows; };
  OKV_RETURN_IF_ERROR(compute({}, whole, none).status());  // warms up
  OKV_ASSIGN_OR_RETURN(result.prompt_seconds, compute({}, whole, none));
  std::vector<double> alone;
  constexpr int kAlone = 64;
  for (int i = 0; i < kAlone + 4; ++i) {  // the first ones record
    const auto step = Clock::now();
    OKV_RETURN_IF_ERROR(stepper.Step(rows, logits.rows()));
    if (i >= 4) alone.push_back(1e3 * Seconds(step));
  }
  result.alone_p95_ms = p95(alone);
  const bool on_card = core.backend->OnDevice();
  ChunkPacer pacer(limit * result.alone_p95_ms, result.alone_p95_ms,
                   on_card ? ChunkPacer::kTileOfCard : ChunkPacer::kTileOfHost, batch, most);
  const auto paced = [&](const ChunkPacer& by) {
    return limit > 0 ? by.rows() : std::min(chunk, most);
  };
  OKV_ASSIGN_OR_RETURN(result.beside_seconds, compute(rows, paced, pacer));
  result.beside_p95_ms = p95(ms);
  result.longest_ms = *std::max_element(ms.begin(), ms.end());
  result.chunk = static_cast<int32_t>(prompt / static_cast<int64_t>(ms.size()));
  return result;
}

Result<PrefillCase> MeasurePrefill(BenchEngine& bench, const PolicyOptions& policy, int64_t tokens,
                                   int repeats) {
  PrefillCase result;
  result.tokens = tokens;
  const std::vector<int32_t> prompt = RandomTokens(tokens, bench.vocab);
  // The first prompt is traced. On a device that takes its ops apart: it is not timed there.
  const bool on_device = bench.backend->OnDevice();
  for (int i = 0; i < repeats + (on_device ? 1 : 0); ++i) {
    OKV_ASSIGN_OR_RETURN(const auto session, bench.engine->NewSession(policy));
    bench.trace->Clear();
    bench.trace->set_logging(i == 0);
    const auto start = Clock::now();
    const Status status = session->Prompt(prompt);
    const double seconds = Seconds(start);
    bench.trace->set_logging(false);
    OKV_RETURN_IF_ERROR(status);
    if (i == 0) {
      result.flops = bench.trace->Total().flops;
      result.ops = OpShares(bench.trace->entries());
    }
    if (i == 0 && on_device) continue;
    if (result.seconds == 0 || seconds < result.seconds) result.seconds = seconds;
    result.policy = session->stats().policy;
    result.settings = session->stats().settings;
  }
  bench.trace->Clear();
  return result;
}

Result<AttendCase> MeasureAttend(BenchEngine& bench, int32_t head_dim, int64_t tokens) {
  constexpr int32_t kBlock = 64;
  const int32_t chunk = bench.chunk;
  TraceBackend& backend = *bench.trace;
  const int64_t blocks = (tokens + kBlock - 1) / kBlock;
  std::vector<float> noise =
      Noise(static_cast<size_t>(chunk) * kAttendHeads * static_cast<size_t>(head_dim));
  OKV_ASSIGN_OR_RETURN(const Buffer q, Uploaded(backend, noise));
  OKV_ASSIGN_OR_RETURN(const Buffer o, Uploaded(backend, noise));
  const int64_t row_bytes = KvRowBytes(bench.kv_dtype, kAttendKvHeads, head_dim, head_dim);
  std::vector<std::byte> rows_of_kv;
  // Twice: the values are made on the host, and uploaded.
  if (const auto bytes = static_cast<size_t>(2 * blocks * kBlock * row_bytes);
      bytes > AvailableMemory()) {
    return ResourceExhausted(
        fmt::format("--attend is {}, whose K/V take {} while they are made, expected at most {} of "
                    "available memory",
                    tokens, HumanBytes(bytes), HumanBytes(AvailableMemory())));
  }
  rows_of_kv.resize(static_cast<size_t>(blocks * kBlock * row_bytes));
  const KvView made = MakeKvView(rows_of_kv.data(), nullptr, kBlock, bench.kv_dtype, kAttendKvHeads,
                                 head_dim, head_dim);
  const size_t heads = noise.size() / static_cast<size_t>(head_dim);
  size_t next = 0;  // head of the noise
  for (int64_t row = 0; row < blocks * kBlock; ++row) {
    for (const KvPlane& plane : {made.k, made.v}) {
      for (int32_t head = 0; head < kAttendKvHeads; ++head) {
        StoreKvHead(plane, head, head_dim, &noise[next++ % heads * static_cast<size_t>(head_dim)],
                    plane.Head(row, 0));
      }
    }
  }
  OKV_ASSIGN_OR_RETURN(const Buffer kv, Uploaded(backend, rows_of_kv));
  std::vector<int32_t> table(static_cast<size_t>(blocks));
  std::iota(table.begin(), table.end(), 0);
  OKV_ASSIGN_OR_RETURN(const Buffer block_table, Uploaded(backend, table));
  std::vector<RowMeta> rows(static_cast<size_t>(chunk));
  OKV_ASSIGN_OR_RETURN(const Buffer row_meta, Uploaded(backend, rows));
  OKV_ASSIGN_OR_RETURN(const Buffer seq_meta, Uploaded(backend, std::vector<SeqMeta>(1)));

  AttendArgs args;
  args.q = q.as<float>();
  args.o = o.as<float>();
  args.kv = MakeKvView(kv.as<std::byte>(), block_table.as<int32_t>(), kBlock, bench.kv_dtype,
                       kAttendKvHeads, head_dim, head_dim);
  args.plan = AttnPlan::Dense();
  args.rows = row_meta.as<RowMeta>();
  args.seqs = seq_meta.as<SeqMeta>();
  args.n_seqs = 1;
  args.n_heads = kAttendHeads;
  args.scale = 1 / std::sqrt(static_cast<float>(head_dim));

  AttendCase result{.head_dim = head_dim, .tokens = tokens};
  backend.Clear();
  backend.set_logging(true);
  for (int64_t done = 0; done < tokens; done += args.n_rows) {
    args.n_rows = static_cast<int32_t>(std::min<int64_t>(chunk, tokens - done));
    for (size_t r = 0; r < rows.size(); ++r)
      rows[r] = {0, static_cast<int32_t>(done + static_cast<int64_t>(r))};
    const auto context = static_cast<int32_t>(done + args.n_rows);
    const SeqMeta seq{0, args.n_rows, context, 0, context};
    backend.Upload(row_meta.as(), rows.data(), rows.size() * sizeof(RowMeta));
    backend.Upload(seq_meta.as(), &seq, sizeof(seq));
    const auto step = backend.Record([&] { backend.Enqueue(args); });
    const auto start = Clock::now();
    backend.Replay(*step);
    backend.Synchronize();
    result.seconds += Seconds(start);
  }
  backend.set_logging(false);
  result.flops = backend.Total().flops;
  backend.Clear();
  return result;
}

}  // namespace omnikv::tools
