// What the subcommands print about a run, and how they show that it goes on.
#pragma once

#include <chrono>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "omnikv/engine.h"

namespace omnikv::tools {

// What the program is at, for the sentence when memory runs out: "reading the prompt". `activity`
// is kept as it is.
void SetActivity(const char* activity);
const char* Activity();

// What each tier will hold, and of which layers: a line each.
std::vector<std::string> PlanLines(const MemoryNeeds& needs);
// Engine::Load with a progress bar and, unless `quiet`, the plan's lines before it.
Result<std::unique_ptr<Engine>> LoadWithProgress(EngineOptions options, bool quiet = false);
// Session::Prompt with a progress bar.
Status PromptWithProgress(Session& session, const std::vector<int32_t>& tokens);

// Session::Generate on stdout, piece by piece unless `quiet`, and a line break after it. Stops when
// stdout takes no more.
struct Reply {
  GenerateResult result;
  double ttft_s = 0;  // from `since` to the first text of the answer
};
Result<Reply> GenerateToStdout(Session& session, const GenerateOptions& options, bool quiet,
                               std::chrono::steady_clock::time_point since);

// A reply as one object; `prompt_tokens` of the whole prompt. Its `ttft_s` counts from when a
// loaded engine has the prompt's text: tokenization, prefill and the first token; `load_s` is
// apart. `seed` is null where no token was drawn.
nlohmann::ordered_json ReplyJson(const Engine& engine, const SessionStats& stats,
                                 size_t prompt_tokens, const GenerateOptions& options,
                                 const Reply& reply);
// Tokens a second; 0 when no time passed.
double PerSecond(int64_t tokens, double seconds);
// After an answer, on stderr: a line that a person can read at a glance (with -v more of them), and
// another when the answer was cut by its limit or by a full context.
void PrintSummary(const Engine& engine, const SessionStats& stats, const GenerateOptions& options,
                  const Reply& reply);

// Ascending numbers, short: "3-7, 9, 20-31", here with ", " between.
std::string Ranges(const std::vector<int32_t>& numbers, std::string_view separator);

// JSON on one line; text that is not UTF-8 (a cut-off character) is replaced, never an exception.
std::string Dump(const nlohmann::ordered_json& json);

}  // namespace omnikv::tools
