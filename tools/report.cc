#include "report.h"

#include <fmt/format.h>

#include <atomic>
#include <csignal>
#include <cstdio>

#include "base/log.h"
#include "base/memory.h"
#include "flags.h"

namespace omnikv::tools {
namespace {

using Json = nlohmann::ordered_json;

const char* g_activity = "reading the command line";
std::atomic<Session*> g_session{nullptr};  // what Ctrl-C cancels: handlers reach only globals

extern "C" void OnInterrupt(int) {
  if (Session* session = g_session.load()) session->Cancel();
  std::signal(SIGINT, SIG_DFL);
}

double SecondsSince(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// The `stats` object of DESIGN §9.
Json StatsJson(const Engine& engine, const SessionStats& s, double ttft_s) {
  return {{"device", s.device},
          {"policy", s.policy},
          {"settings", s.settings},
          {"load_s", engine.load_seconds()},
          {"prefill_s", s.prefill_seconds},
          {"prefill_tok_s", PerSecond(s.prefill_tokens, s.prefill_seconds)},
          {"ttft_s", ttft_s},
          {"decode_tok_s", PerSecond(s.decode_tokens, s.decode_seconds)},
          {"ms_per_token",
           s.decode_tokens > 0 ? 1e3 * s.decode_seconds / static_cast<double>(s.decode_tokens) : 0},
          {"context_tokens", s.context_tokens},
          {"attended_tokens", s.attended_tokens},
          {"budget_tokens", s.budget_tokens},
          {"mem_fraction", s.mem_fraction},
          {"resident_bytes",
           {{"device", s.device_bytes}, {"host", s.host_bytes}, {"disk", s.disk_bytes}}},
          {"transfer_bytes_per_step", s.transfer_bytes_per_step},
          {"hit_rate", s.hit_rate ? Json(*s.hit_rate) : Json(nullptr)},
          {"process_bytes", ResidentMemory()}};
}

}  // namespace

void SetActivity(const char* activity) {
  g_activity = activity;
}
const char* Activity() {
  return g_activity;
}

double PerSecond(int64_t n, double seconds) {
  return seconds > 0 ? static_cast<double>(n) / seconds : 0;
}

CancelOnInterrupt::CancelOnInterrupt(Session& session) {
  g_session.store(&session);
  std::signal(SIGINT, OnInterrupt);
}

CancelOnInterrupt::~CancelOnInterrupt() {
  g_session.store(nullptr);
  std::signal(SIGINT, SIG_DFL);
}

std::string Ranges(const std::vector<int32_t>& numbers, std::string_view separator) {
  std::string text;
  for (size_t i = 0; i < numbers.size();) {
    size_t last = i;
    while (last + 1 < numbers.size() && numbers[last + 1] == numbers[last] + 1) ++last;
    text += fmt::format("{}{}", i == 0 ? "" : separator, numbers[i]);
    if (last > i) text += fmt::format("-{}", numbers[last]);
    i = last + 1;
  }
  return text;
}

std::vector<std::string> PlanLines(const MemoryNeeds& needs) {
  std::vector<std::string> lines = {fmt::format(
      "{} memory: weights {}, activations {}, K/V up to {} for {} tokens; {} available",
      needs.on_device ? "GPU" : "host", HumanBytes(needs.weights), HumanBytes(needs.activations),
      HumanBytes(needs.kv), needs.context, HumanBytes(needs.available))};
  if (!needs.host_layers.empty()) {
    lines.push_back(fmt::format(
        "host memory: K/V of layers {}, up to {}; for them on the GPU: {}, with working sets of {} "
        "tokens",
        Ranges(needs.host_layers, ", "), HumanBytes(needs.kv_host), HumanBytes(needs.cache),
        needs.cache_tokens));
  }
  return lines;
}

Result<std::unique_ptr<Engine>> LoadWithProgress(EngineOptions options, bool quiet) {
  SetActivity("loading the model");
  ProgressBar bar("loading");
  if (!quiet) {
    options.on_plan = [](const MemoryNeeds& needs) {
      for (const std::string& line : PlanLines(needs)) LogInfo("{}", line);
    };
  }
  options.on_load = [&](size_t done, size_t total) {
    bar.Update(static_cast<double>(done), static_cast<double>(total), HumanBytes(total));
  };
  return Engine::Load(options);
}

Status PromptWithProgress(Session& session, const std::vector<int32_t>& tokens) {
  SetActivity("reading the prompt");
  ProgressBar bar("reading");
  return session.Prompt(tokens, [&](int64_t done, int64_t total) {
    bar.Update(static_cast<double>(done), static_cast<double>(total),
               fmt::format("{} of {} tokens", done, total));
  });
}

Result<Reply> GenerateToStdout(Session& session, const GenerateOptions& options, bool quiet,
                               std::chrono::steady_clock::time_point since) {
  SetActivity("answering");
  Reply reply;
  bool shown = false;
  const auto show = [&](std::string_view piece) {
    if (!shown) reply.ttft_s = SecondsSince(since);
    shown = true;
    if (quiet) return true;
    return std::fwrite(piece.data(), 1, piece.size(), stdout) == piece.size() &&
           std::fflush(stdout) == 0;
  };
  OKV_ASSIGN_OR_RETURN(reply.result, session.Generate(options, show));
  if (!shown) reply.ttft_s = SecondsSince(since);
  if (!quiet) {
    std::fputc('\n', stdout);
    std::fflush(stdout);  // before what follows on stderr
  }
  return reply;
}

Json ReplyJson(const Engine& engine, const SessionStats& stats, size_t prompt_tokens,
               const Reply& reply) {
  return {{"text", reply.result.text},
          {"tokens", reply.result.tokens},
          {"prompt_tokens", prompt_tokens},
          {"finish_reason", FinishReasonName(reply.result.finish_reason)},
          {"stats", StatsJson(engine, stats, reply.ttft_s)}};
}

void PrintSummary(const Engine& engine, const SessionStats& s) {
  LogInfo("{}, policy {}{}{}", engine.device(), s.policy, s.settings.empty() ? "" : ": ",
          s.settings);
  LogInfo("load {:.2f} s | prefill {} tokens at {:.0f} tok/s | decode {} tokens at {:.1f} tok/s",
          engine.load_seconds(), s.prefill_tokens, PerSecond(s.prefill_tokens, s.prefill_seconds),
          s.decode_tokens, PerSecond(s.decode_tokens, s.decode_seconds));
  LogInfo(
      "{:.0f} of {} tokens read a layer and step | mem {:.1f} % | context {} | weights {} | "
      "process {}",
      s.attended_tokens, s.context_tokens, 100 * s.mem_fraction,
      HumanBytes(s.host_bytes + s.device_bytes), HumanBytes(engine.weight_bytes()),
      HumanBytes(ResidentMemory()));
}

std::string Dump(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace omnikv::tools
