#include "policy/key_choice.h"

#include <utility>

#include "policy/prompt_choice.h"

namespace omnikv {
namespace {

class KeyChoice : public PromptChoice {
 public:
  explicit KeyChoice(KeyScoreKind kind) : kind_(kind) {}

 protected:
  const float* Score(const LayerStep&, const AttendArgs& attend, const SeqMeta* seq) override {
    backend().Enqueue(KeyScoreArgs{.kv = attend.kv,
                                   .seqs = seq,
                                   .out = scores(),
                                   .stride = context().max_context,
                                   .n_seqs = 1,
                                   .kind = kind_});
    return scores();
  }

 private:
  KeyScoreKind kind_;
};

}  // namespace

PolicyInfo KeyChoicePolicy(std::string name, std::string summary, PolicyFacts facts,
                           KeyScoreKind kind) {
  facts.keeps = "b rows of each KV head and all later ones, on the device";
  facts.reads = facts.holds = "b rows and the later ones";
  return {.name = std::move(name),
          .summary = std::move(summary),
          .facts = std::move(facts),
          .kind = PolicyKind::kForgets,
          .knob = {.key = "budget"},
          .settings = PromptChoiceSettings({}, 1),
          .make = [kind] { return std::make_unique<KeyChoice>(kind); },
          .batches = true,
          .covering =
              [](int64_t length) {
                return std::vector<SettingList>{{{"budget", std::to_string(length)}}};
              },
          .exempt = "",
          .test_settings = {{{"budget", "24"}}, {{"budget", "1"}}},
          .recommended = nullptr};
}

}  // namespace omnikv
