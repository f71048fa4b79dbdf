// PyramidKV (Cai et al. 2024): chooses as SnapKV does, but the first layers keep more tokens than
// the last ones, `budget` in the mean. The numbers fall by the same step from layer to layer.
#include "policy/window_choice.h"

namespace omnikv {
namespace {

// How many rows the layers keep, by the formula and the whole numbers of the published code.
struct Pyramid {
  int64_t budget;  // of a layer, in the mean, the window included
  int64_t window;  // last tokens, which every layer keeps
  int64_t beta;    // how steep it is: the last layer chooses 1 / beta of the mean
  int64_t layers;

  // Of a prompt of `tokens`.
  int64_t Rows(int64_t layer, int64_t tokens) const {
    if (tokens <= budget || layers == 1) return budget;
    const int64_t mean = budget - window;  // that is chosen
    int64_t least = mean / beta;
    int64_t most = 2 * mean - least;
    if (most >= tokens - window) {  // the first layer would choose more than there is
      most = tokens - window;
      least = 2 * mean - most;
    }
    return window + most - layer * ((most - least) / (layers - 1));
  }

  // Of any prompt of up to `tokens`, at most. While the first layer chooses all there is, a longer
  // prompt brings each layer nearer to its last number, up or down, but for the rounding of the
  // steps, which repeats within `layers` tokens. So the largest number is near one of the ends.
  int64_t MostRows(int64_t layer, int64_t tokens) const {
    const int64_t end = std::min(tokens, 2 * budget - window - (budget - window) / beta);
    int64_t rows = std::max(budget, Rows(layer, tokens));
    for (int64_t i = 0; i <= 2 * layers; ++i) {
      if (budget + i <= tokens) rows = std::max(rows, Rows(layer, budget + i));
      if (end - i > budget) rows = std::max(rows, Rows(layer, end - i));
    }
    return rows;
  }
};

class PyramidKv : public WindowChoice {
 public:
  PyramidKv() : WindowChoice("pyramidkv") {}

 protected:
  Status ReadSettings(const PolicySettings& settings) override {
    beta_ = settings.Int("beta");
    return WindowChoice::ReadSettings(settings);
  }

  void SetLayerRows(Keeps& keeps) const override {
    const Pyramid pyramid{.budget = budget(),
                          .window = std::min<int64_t>(Recent(), budget()),
                          .beta = beta_,
                          .layers = context().n_layers};
    for (int32_t layer = 0; layer < context().n_layers; ++layer) {
      keeps.layer_rows.push_back(pyramid.MostRows(layer, context().max_context));
      keeps.rows = std::max(keeps.rows, keeps.layer_rows.back());
    }
    keeps.rows_after = [pyramid](int32_t layer, int64_t tokens) {
      return pyramid.Rows(layer, tokens);
    };
  }

 private:
  int64_t beta_ = 1;
};

}  // namespace

PolicyInfo PyramidkvPolicy() {
  return {.name = "pyramidkv",
          .summary = "as snapkv, more tokens in the first layers than in the last (PyramidKV)",
          .facts = {.source = "PyramidKV, Cai et al. 2024; numbers of KVCache-Factory, sets per KV "
                              "head as in kvpress",
                    .chooses = "once after the prompt, by the weights of its last queries",
                    .keeps = "b rows of each KV head in the mean over layers, nearly 2 b in the "
                             "first one, and all later ones, on the device",
                    .reads = "the rows that the layer keeps and the later ones",
                    .holds = "b rows in the mean over layers and the later ones",
                    .loses = "much of the prompt (8 of 8 answers with kernel=5)"},
          .kind = PolicyKind::kForgets,
          .knob = {.key = "budget"},
          .settings = WindowChoiceSettings(
              {{.key = "beta",
                .type = SettingType::kInt,
                .default_value = "20",
                .help = "the last layer chooses this fraction of the mean; 1: all the same",
                .min = 1,
                .max = 1e9}}),
          .make = [] { return std::make_unique<PyramidKv>(); },
          .batches = true,
          .covering =
              [](int64_t length) {
                return std::vector<SettingList>{
                    {{"budget", std::to_string(std::max<int64_t>(length, 8))}, {"window", "4"}}};
              },
          .exempt = "",
          .test_settings = {{{"budget", "24"}, {"window", "8"}},
                            {{"budget", "24"}, {"window", "20"}, {"kernel", "7"}, {"pool", "max"}},
                            {{"budget", "40"}, {"window", "4"}, {"beta", "2"}},
                            {{"budget", "2"}, {"window", "1"}, {"kernel", "1"}}},
          .recommended = nullptr};
}

}  // namespace omnikv
