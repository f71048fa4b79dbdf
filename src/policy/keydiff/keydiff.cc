// KeyDiff (Park et al. 2025, "KeyDiff: Key Similarity-Based KV Cache Eviction"; kvpress's
// KeyDiffPress): once after the prompt, each KV head of each layer keeps the keys that are least
// like the mean direction of all.
#include "policy/key_choice.h"

namespace omnikv {

PolicyInfo KeydiffPolicy() {
  return KeyChoicePolicy(
      "keydiff", "the keys least like their mean direction, chosen once per KV head (KeyDiff)",
      {.source = "KeyDiff, Park et al. 2025, as in kvpress",
       .chooses = "once after the prompt, by the directions of its keys",
       .loses = "little of the prompt (1 of 8 answers; 3 of 8 at a tenth of what full reads, 0 "
                "at a quarter; 0 of 16 at 16K)"},
      KeyScoreKind::kUnlike);
}

}  // namespace omnikv
