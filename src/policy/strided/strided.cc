// A cache whose resolution falls with age, chosen by positions alone: each layer keeps `budget`
// tokens, all of the last ones, every second one of those before them, then every fourth, and so
// on. The token that goes is the oldest by its stride, the highest (age + 1/2) / gcd(position,
// 2^30) (AgeRule::kStrided). It is what a choice by attention must beat.
#include "policy/step_choice.h"

namespace omnikv {
namespace {

class Strided : public StepChoice {
 protected:
  void ReadSettings(const PolicySettings& settings) override {
    sinks_ = static_cast<int32_t>(std::min(settings.Int("sinks"), int64_t{budget()} - 1));
  }
  void Score(const AttendArgs& attend, const Scored& scored) override {
    context().backend->Enqueue(AgedScoresArgs{.kv = attend.kv,
                                              .seqs = scored.seqs,
                                              .steps = scored.steps,
                                              .out = scored.out,
                                              .stride = scored.stride,
                                              .n_seqs = scored.n_seqs,
                                              .sinks = sinks_,
                                              .rule = AgeRule::kStrided});
  }

 private:
  int32_t sinks_ = 0;  // tokens, in the budget
};

}  // namespace

PolicyInfo StridedPolicy() {
  return {.name = "strided",
          .summary = "the last tokens, every second one before them, then every fourth, and so on",
          .facts = {.source = "ours, a baseline without scores",
                    .chooses = "after the prompt and at every step, by position alone",
                    .keeps = "b rows of each layer, on the device",
                    .reads = "b + 1 rows",
                    .holds = "b rows",
                    .loses = "most single tokens of the past (8 of 8 answers, also at a quarter "
                             "of what full reads)"},
          .kind = PolicyKind::kForgets,
          .knob = {.key = "budget"},
          .settings = {{.key = "budget",
                        .default_value = "1024",
                        .help = "tokens that a layer keeps, sinks included",
                        .min = 1,
                        .max = 1e9},
                       {.key = "sinks",
                        .default_value = "4",
                        .help = "first tokens that stay, below the budget",
                        .max = 1e9},
                       RoomSetting()},
          .make = [] { return std::make_unique<Strided>(); },
          .batches = true,
          .covering =
              [](int64_t length) {
                return std::vector<SettingList>{{{"budget", std::to_string(length)}}};
              },
          .exempt = "",
          .test_settings = {{{"budget", "24"}}, {{"budget", "1"}, {"sinks", "0"}}},
          .recommended = nullptr};
}

}  // namespace omnikv
