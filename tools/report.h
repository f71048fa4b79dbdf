// What the subcommands print about a run, and how they show that it goes on.
#pragma once

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "omnikv/engine.h"

namespace omnikv::tools {

// Engine::Load with a progress bar.
Result<std::unique_ptr<Engine>> LoadWithProgress(EngineOptions options);
// Session::Prompt with a progress bar.
Status PromptWithProgress(Session& session, const std::vector<int32_t>& tokens);

// The `stats` object of DESIGN §9.
nlohmann::ordered_json StatsJson(const Engine& engine, const SessionStats& stats);
// A few lines on stderr that a person can read at a glance.
void PrintSummary(const Engine& engine, const SessionStats& stats);

// JSON on one line; text that is not UTF-8 (a cut-off character) is replaced, never an exception.
std::string Dump(const nlohmann::ordered_json& json);

// While alive, the first Ctrl-C cancels `session`; the second one ends the program.
class CancelOnInterrupt {
 public:
  explicit CancelOnInterrupt(Session& session);
  ~CancelOnInterrupt();
  CancelOnInterrupt(const CancelOnInterrupt&) = delete;
  CancelOnInterrupt& operator=(const CancelOnInterrupt&) = delete;
};

}  // namespace omnikv::tools
