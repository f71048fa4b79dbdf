// SnapKV (Li et al. 2024), in the form that keeps one set per KV head (kvpress): once after the
// prompt, each KV head of each layer keeps the last `window` tokens of it and those before them to
// which the window's queries give the most weight, smoothed over neighbours.
#include "policy/window_choice.h"

namespace omnikv {

PolicyInfo SnapkvPolicy() {
  return {.name = "snapkv",
          .summary = "what the prompt's last queries weigh most, chosen once per KV head (SnapKV)",
          .facts = {.source = "SnapKV, Li et al. 2024; per KV head as in kvpress",
                    .chooses = "once after the prompt, by the weights of its last queries",
                    .keeps = "b rows of each KV head and all later ones, on the device",
                    .reads = "b rows and the later ones",
                    .holds = "b rows and the later ones",
                    .loses = "much of the prompt (8 of 8 answers with kernel=5, also at a "
                             "quarter of what full reads; 1 of 8 with kernel=31)"},
          .kind = PolicyKind::kForgets,
          .knob = {.key = "budget"},
          .settings = WindowChoiceSettings({}),
          .make = [] { return std::make_unique<WindowChoice>("snapkv"); },
          .batches = true,
          .covering =
              [](int64_t length) {
                return std::vector<SettingList>{
                    {{"budget", std::to_string(std::max<int64_t>(length, 8))}, {"window", "4"}}};
              },
          .exempt = "",
          .test_settings = {{{"budget", "24"}, {"window", "8"}},
                            {{"budget", "24"}, {"window", "20"}, {"kernel", "7"}, {"pool", "max"}},
                            {{"budget", "2"}, {"window", "1"}, {"kernel", "1"}}},
          .recommended = nullptr};
}

}  // namespace omnikv
