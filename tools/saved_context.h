// Contexts that one call of the program saves and a later one goes on with (--save, --load).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "engine/context_file.h"
#include "flags.h"
#include "omnikv/engine.h"

namespace omnikv::tools {

// What the file of --load says before a model is loaded. kInvalidArgument, kNotFound and the like
// name the flag.
Result<ContextHead> ReadLoadFile(const std::string& path);

// Whether --save can write `path`, said before a long prompt is read rather than after it.
Status CheckSaveFile(const std::string& path);

// The policy of the file. kInvalidArgument where flags ask for another one, or for other settings.
Result<PolicyOptions> LoadedPolicy(const std::string& path, const SavedContext& saved,
                                   PolicyFlags flags);

// The tokens of a context, `pending` and `more` behind them. `pending` was drawn last and is not in
// the context (-1: nothing was); where it ends answers it is left out: what follows an answer says
// itself how it ends.
std::vector<int32_t> GoOn(const Engine& engine, std::span<const int32_t> tokens, int32_t pending,
                          std::span<const int32_t> more);
// Whether that token ends answers.
bool EndsAnswer(const Engine& engine, int32_t pending);

}  // namespace omnikv::tools
