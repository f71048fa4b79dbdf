#include "report.h"

#include <fmt/format.h>

#include <cstdio>

#include "base/log.h"
#include "base/memory.h"
#include "flags.h"

namespace omnikv::tools {
namespace {

using Json = nlohmann::ordered_json;

const char* g_activity = "reading the command line";

double SecondsSince(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

Json TiersJson(const TierBytes& bytes) {
  return {{"device", bytes.device}, {"host", bytes.host}, {"disk", bytes.disk}};
}

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
          {"read_fraction", s.read_fraction},
          {"held_bytes", TiersJson(s.held_bytes)},
          {"held_fraction", s.held_fraction},
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
      "{} memory: weights {}, activations {}, K/V up to {} for {} tokens{}; {} available",
      needs.on_device ? "GPU" : "host", HumanBytes(needs.weights), HumanBytes(needs.activations),
      HumanBytes(needs.kv), needs.kv_tokens > 0 ? needs.kv_tokens : needs.context,
      needs.prompt == 0 ? ""
                        : fmt::format(", {} more while a prompt is read", HumanBytes(needs.prompt)),
      HumanBytes(needs.available))};
  const bool disk = needs.kv_disk > 0;
  const bool both = disk && needs.kv_host > 0;
  const char* const beside = both ? "host memory and disk" : disk ? "disk" : "host memory";
  const char* const here = needs.on_device ? "on the GPU" : "in memory";
  const std::string kv = both ? fmt::format("{} in memory and {} on the disk",
                                            HumanBytes(needs.kv_host), HumanBytes(needs.kv_disk))
                              : HumanBytes(needs.kv_host + needs.kv_disk);
  if (!needs.host_values.empty()) {
    lines.push_back(fmt::format("{}: V of layers {}, up to {}; for prompts {}: {}{}", beside,
                                Ranges(needs.host_values, ", "), kv, here,
                                HumanBytes(needs.working_sets),
                                needs.sums_away ? "; the host sums those that steps read" : ""));
  }
  if (!needs.host_layers.empty()) {
    lines.push_back(
        fmt::format("{}: K/V of layers {}, up to {}; for them {}: {}, with {} {} tokens{}", beside,
                    Ranges(needs.host_layers, ", "), kv, here, HumanBytes(needs.working_sets),
                    needs.keeps_last ? "the last" : "working sets of", needs.working_set,
                    !needs.attends_away ? ""
                    : disk              ? "; the others are attended to on the disk"
                                        : "; the host attends to the others"));
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
               const GenerateOptions& options, const Reply& reply) {
  const SamplingOptions& sampling = options.sampling;
  return {{"text", reply.result.text},
          {"tokens", reply.result.tokens},
          {"prompt_tokens", prompt_tokens},
          {"finish_reason", FinishReasonName(reply.result.finish_reason)},
          {"seed", sampling.temperature > 0 ? Json(sampling.seed) : Json(nullptr)},
          {"stats", StatsJson(engine, stats, reply.ttft_s)}};
}

void PrintSummary(const Engine& engine, const SessionStats& s, const GenerateOptions& options,
                  const Reply& reply) {
  const SamplingOptions& sampling = options.sampling;
  const size_t written = reply.result.tokens.size();
  // The prompt's last step makes the first one.
  const std::string speed =
      s.decode_tokens > 0
          ? fmt::format(" at {:.1f} tok/s", PerSecond(s.decode_tokens, s.decode_seconds))
          : "";
  LogInfo("({} tokens read at {:.0f} tok/s, {} written{}, {} in context{})", s.prefill_tokens,
          PerSecond(s.prefill_tokens, s.prefill_seconds), written, speed, s.context_tokens,
          sampling.temperature > 0 ? fmt::format(", seed {}", sampling.seed) : "");
  if (reply.result.finish_reason == FinishReason::kLength && options.max_tokens > 0) {
    if (static_cast<int64_t>(written) >= options.max_tokens) {
      LogInfo("(the answer was cut after {} token{}, as many as -n allows)", options.max_tokens,
              options.max_tokens == 1 ? "" : "s");
    } else if (s.context_tokens < engine.context()) {
      LogInfo("(the answer was cut: policy {} has no room for more; raise its setting room)",
              s.policy);
    } else {
      LogInfo("(the answer was cut: the context of {} tokens is full; raise --ctx)",
              engine.context());
    }
  }
  LogVerbose("{}, policy {}{}{}", engine.device(), s.policy, s.settings.empty() ? "" : ": ",
             s.settings);
  LogVerbose(
      "load {:.2f} s | first token after {:.2f} s | {:.0f} of {} tokens read per layer and step | "
      "read {:.1f} % | held {:.1f} %, {} | weights {} | process {}",
      engine.load_seconds(), reply.ttft_s, s.attended_tokens, s.context_tokens,
      100 * s.read_fraction, 100 * s.held_fraction,
      HumanBytes(s.held_bytes.host + s.held_bytes.device + s.held_bytes.disk),
      HumanBytes(engine.weight_bytes()), HumanBytes(ResidentMemory()));
}

std::string Dump(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace omnikv::tools
