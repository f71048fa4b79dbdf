// Knorm (Devoto et al. 2024, "A Simple and Effective L2 Norm-Based Strategy for KV Cache
// Compression"; kvpress's KnormPress): once after the prompt, each KV head of each layer keeps the
// keys of the smallest norm, which queries tend to give the most weight.
#include "policy/key_choice.h"

namespace omnikv {

PolicyInfo KnormPolicy() {
  return KeyChoicePolicy("knorm", "the keys of the smallest norm, chosen once per KV head (Knorm)",
                         {.source = "Devoto et al. 2024, as in kvpress",
                          .chooses = "once after the prompt, by the norms of its keys",
                          .loses = "most of the prompt (8 of 8 answers, also at a quarter of "
                                   "what full reads)"},
                         KeyScoreKind::kNorm);
}

}  // namespace omnikv
