// The offloading baseline of OmniKV's paper ("brutal offload", Table 7): every layer reads every
// token, and the K/V of the last layers live on the host, from where each decode step brings them
// whole, some layers ahead. The paper runs layers=20 of 32 and ahead=4. Exact, so also what lets a
// context run that does not fit on a card; its speed is that of the bus. On a host it is `full`.
#include <fmt/format.h>

#include "policy/policy.h"

namespace omnikv {
namespace {

constexpr int32_t kPaperAhead = 4;

class BrutalOffload : public Policy {
 public:
  Status Prepare(const PolicyContext& context, PolicySettings& settings) override {
    streamed_ = {.layers = context.n_layers, .min_ahead = 1, .max_ahead = kPaperAhead};
    if (!settings.IsAuto("layers")) {
      streamed_.layers = static_cast<int32_t>(settings.Int("layers"));
      streamed_.always = true;
    }
    if (streamed_.layers > context.n_layers) {
      return InvalidArgument(fmt::format(
          "policy brutal_offload: layers is {}, expected at most the model's {} layers of global "
          "attention",
          streamed_.layers, context.n_layers));
    }
    if (!settings.IsAuto("ahead")) {
      streamed_.min_ahead = streamed_.max_ahead = static_cast<int32_t>(settings.Int("ahead"));
    }
    return {};
  }
  void Plan(const LayerStep&, AttendArgs& attend) override { attend.plan = AttnPlan::Dense(); }
  DeclaredReads Reads() const override { return {.streamed = streamed_}; }
  int64_t TokensRead(int32_t, const SeqLength& at) const override { return at.tokens; }
  bool Budgeted(int32_t) const override { return false; }

 private:
  StreamedLayers streamed_;
};

}  // namespace

PolicyInfo BrutalOffloadPolicy() {
  return {.name = "brutal_offload",
          .summary = "every layer reads every token; the last layers' K/V come from the host whole",
          .facts = {.source = "the baseline of OmniKV, Hao et al. 2025",
                    .chooses = "never",
                    .keeps = "all rows, of the last layers on the host",
                    .reads = "N rows, which cross the bus in the last layers",
                    .holds = "N rows; on the device those of the first layers and a few stages",
                    .loses = "nothing: it equals full attention"},
          .kind = PolicyKind::kStreams,
          .settings = {{.key = "layers",
                        .default_value = "auto",
                        .help = "last layers on the host beside a GPU (the paper: 20 of 32); auto: "
                                "as few as fit",
                        .min = 1,
                        .max = 1e4,
                        .allow_auto = true},
                       {.key = "ahead",
                        .default_value = "auto",
                        .help = "layers that are on their way ahead of their use, each takes a "
                                "layer's K/V of GPU memory; auto: the paper's 4, or what fits",
                        .min = 1,
                        .max = 64,
                        .allow_auto = true}},
          .make = [] { return std::make_unique<BrutalOffload>(); },
          .batches = true,
          .covering =
              [](int64_t) {
                return std::vector<SettingList>{{}, {{"layers", "3"}}};
              },
          .exempt = "",
          .test_settings = {{{"ahead", "1"}}, {{"layers", "3"}, {"ahead", "2"}}},
          .recommended = nullptr};
}

}  // namespace omnikv
