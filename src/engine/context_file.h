// A session's context as a file says it, beside the bytes of its K/V (docs/decisions/047).
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bank/bank.h"
#include "engine/core.h"
#include "io/checked_file.h"

namespace omnikv {

inline constexpr FileKind kContextFile = {
    .magic = "omnikvcx", .version = 1, .name = "a saved context"};

// The text of such a file. Behind it come the tokens (int32 [length]), the logits after them
// (f32 [vocab]), the policy's own state, and what Bank::Export gives.
struct SavedContext {
  nlohmann::json model;  // ModelMarks of the engine that saved it
  PolicyOptions policy;
  std::string resolved;  // its settings, PolicySettings::ToString
  std::vector<StateSpec> streams;
  uint64_t policy_bytes = 0;  // of its own state
  SequenceImage image;
  // Of the session, in tokens.
  int64_t prompt_length = 0;
  int64_t rope_length = 0;
  int64_t dense_rows = 0;
  std::vector<std::pair<int64_t, int64_t>> chunks;  // PromptChunks::runs
  int32_t pending = -1;                             // sampled, not in context
  bool settled = false;
  bool prompted = false;  // Residency::AwaitsChoice, negated
  bool has_logits = false;
  struct Random {
    uint64_t seed = 0;
    uint64_t state = 0;

    bool operator==(const Random&) const = default;
  };
  std::optional<Random> random;
};

// What K/V depend on: geometry, rotations, the format of K/V, and the weights, of which a hash goes
// over the first bytes of each matrix.
nlohmann::json ModelMarks(const EngineCore& core);

std::string TextOf(const SavedContext& saved);
// The tokens, from behind the text of such a file. kCorrupt, with the file, where it ends before.
Result<std::vector<int32_t>> TokensOf(const CheckedFile& file, const SavedContext& saved);

// What a file that Session::Save wrote says of its context, and the tokens, without the K/V: damage
// to those is not found.
struct ContextHead {
  SavedContext saved;
  std::vector<int32_t> tokens;
};
Result<ContextHead> ReadContextHead(const std::string& path);
// kCorrupt, without a name before the sentence, unless `text` is one. Numbers are in the ranges
// that their own meanings and `image.length` give; CheckImage is still to come.
Result<SavedContext> ParseSavedContext(std::string_view text);
// kInvalidArgument, as above, with what differs, unless it is one of this engine's model.
Status CheckModelMarks(const nlohmann::json& here, const nlohmann::json& there);

}  // namespace omnikv
