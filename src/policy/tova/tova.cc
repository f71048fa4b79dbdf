// TOVA (Oren et al. 2024, the published src/tova_cache.py): each layer keeps `budget` tokens. After
// a prompt, those that its last query gives the most weight, mean over heads; then every step gives
// up the one that its own query weighs least.
#include "policy/step_choice.h"

namespace omnikv {
namespace {

class Tova : public StepChoice {
 public:
  void Plan(const LayerStep& step, AttendArgs& attend) override {
    if (!step.prefill || step.chooses) attend.lse = lse_.as<float>();
  }
  int64_t TokensScored(int32_t layer, const SeqLength& at) const override {
    return TokensRead(layer, at);
  }

 protected:
  Status Allocate() override {
    const int64_t sums = int64_t{context().max_rows} * context().n_heads;
    OKV_ASSIGN_OR_RETURN(lse_, memory().Take(*context().backend, sums, "sums"));
    return {};
  }
  void Score(const AttendArgs& attend, const Scored& scored) override {
    context().backend->Enqueue(ScoreArgs{.q = attend.q,
                                         .lse = attend.lse,
                                         .kv = attend.kv,
                                         .seqs = scored.seqs,
                                         .out = scored.out,
                                         .stride = scored.stride,
                                         .n_rows = attend.n_rows,
                                         .n_seqs = scored.n_seqs,
                                         .n_heads = attend.n_heads,
                                         .heads = HeadReduce::kMean,
                                         .queries = QueryReduce::kLast,
                                         .scale = attend.scale,
                                         .softcap = attend.softcap});
  }

 private:
  Buffer lse_;  // f32 [max_rows, n_heads]
};

}  // namespace

PolicyInfo TovaPolicy() {
  return {.name = "tova",
          .summary = "the tokens of the most weight, one given up at each step (TOVA)",
          .facts = {.source = "TOVA, Oren et al. 2024",
                    .chooses = "after the prompt and at every step, by the weights of the last "
                               "query, mean of all heads",
                    .keeps = "b rows of each layer, on the device",
                    .reads = "b + 1 rows, and their K once more",
                    .holds = "b rows",
                    .loses = "most of the prompt (8 of 8 answers, also at a quarter of what full "
                             "reads)"},
          .kind = PolicyKind::kForgets,
          .knob = {.key = "budget"},
          .settings = {{.key = "budget",
                        .type = SettingType::kInt,
                        .default_value = "1024",
                        .help = "tokens that a layer keeps",
                        .min = 1,
                        .max = 1e9},
                       RoomSetting()},
          .make = [] { return std::make_unique<Tova>(); },
          .batches = true,
          .covering =
              [](int64_t length) {
                return std::vector<SettingList>{{{"budget", std::to_string(length)}}};
              },
          .exempt = "",
          .test_settings = {{{"budget", "1"}}},
          .recommended = nullptr};
}

}  // namespace omnikv
