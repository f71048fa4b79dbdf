#include "report.h"

#include <fmt/format.h>

#include <atomic>
#include <csignal>

#include "base/log.h"
#include "base/memory.h"
#include "flags.h"

namespace omnikv::tools {
namespace {

std::atomic<Session*> g_session{nullptr};  // what Ctrl-C cancels: handlers reach only globals

extern "C" void OnInterrupt(int) {
  if (Session* session = g_session.load()) session->Cancel();
  std::signal(SIGINT, SIG_DFL);
}

double PerSecond(int64_t n, double seconds) {
  return seconds > 0 ? static_cast<double>(n) / seconds : 0;
}

}  // namespace

CancelOnInterrupt::CancelOnInterrupt(Session& session) {
  g_session.store(&session);
  std::signal(SIGINT, OnInterrupt);
}

CancelOnInterrupt::~CancelOnInterrupt() {
  g_session.store(nullptr);
  std::signal(SIGINT, SIG_DFL);
}

Result<std::unique_ptr<Engine>> LoadWithProgress(EngineOptions options) {
  ProgressBar bar("loading");
  options.on_load = [&](size_t done, size_t total) {
    bar.Update(static_cast<double>(done), static_cast<double>(total), HumanBytes(total));
  };
  return Engine::Load(options);
}

Status PromptWithProgress(Session& session, const std::vector<int32_t>& tokens) {
  ProgressBar bar("reading");
  return session.Prompt(tokens, [&](int64_t done, int64_t total) {
    bar.Update(static_cast<double>(done), static_cast<double>(total),
               fmt::format("{} of {} tokens", done, total));
  });
}

nlohmann::ordered_json StatsJson(const Engine& engine, const SessionStats& s) {
  return {{"device", s.device},
          {"policy", s.policy},
          {"settings", s.settings},
          {"load_s", engine.load_seconds()},
          {"prefill_s", s.prefill_seconds},
          {"prefill_tok_s", PerSecond(s.prefill_tokens, s.prefill_seconds)},
          {"ttft_s", engine.load_seconds() + s.prefill_seconds},
          {"decode_tok_s", PerSecond(s.decode_tokens, s.decode_seconds)},
          {"ms_per_token",
           s.decode_tokens > 0 ? 1e3 * s.decode_seconds / static_cast<double>(s.decode_tokens) : 0},
          {"context_tokens", s.context_tokens},
          {"attended_tokens", s.attended_tokens},
          {"budget_tokens", s.budget_tokens},
          {"mem_fraction", s.mem_fraction},
          {"resident_bytes",
           {{"device", s.device_bytes}, {"host", s.host_bytes}, {"disk", s.disk_bytes}}},
          {"process_bytes", ResidentMemory()}};
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
      s.attended_tokens, s.context_tokens, 100 * s.mem_fraction, HumanBytes(s.host_bytes),
      HumanBytes(engine.weight_bytes()), HumanBytes(ResidentMemory()));
}

std::string Dump(const nlohmann::ordered_json& json) {
  return json.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

}  // namespace omnikv::tools
