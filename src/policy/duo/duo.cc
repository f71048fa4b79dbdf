// DuoAttention (Xiao et al. 2024): heads that retrieve read everything, streaming heads read the
// first tokens and the last ones, in every layer and for every row, prompt rows included. Gates,
// trained or measured, say which heads are which. The rows of streaming heads that nobody reads
// again are given back.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "policy/number_table.h"
#include "policy/policy.h"
#include "policy/sinks_and_recent.h"

namespace omnikv {
namespace {

constexpr int32_t kStreaming = 1;  // the head class; 0: the heads that retrieve

constexpr const char* kGatesName = "duo.tsv";  // PathBesideModel

// The quantile `q` of some numbers, linear between two of them as NumPy's.
double Quantile(std::vector<double> numbers, double q) {
  std::sort(numbers.begin(), numbers.end());
  const double at = q * static_cast<double>(numbers.size() - 1);
  const auto low = static_cast<size_t>(at);
  const double a = numbers[low];
  const double b = numbers[std::min(low + 1, numbers.size() - 1)];
  const double t = at - std::floor(at);
  return t < 0.5 ? a + (b - a) * t : b - (b - a) * (1 - t);
}

class Duo : public Policy {
 public:
  Status Prepare(const PolicyContext& context, PolicySettings& settings) override {
    n_kv_heads_ = context.n_kv_heads;
    near_ = {.sinks = settings.Int("sinks"), .recent = settings.Int("recent")};
    if (n_kv_heads_ > kMaxMaskedHeads) {
      return InvalidArgument(
          fmt::format("policy duo: the model has {} KV heads, expected at most {}", n_kv_heads_,
                      kMaxMaskedHeads));
    }
    if (!settings.IsAuto("threshold") && !settings.IsAuto("sparsity")) {
      return InvalidArgument("policy duo: threshold and sparsity are both set, expected one");
    }
    OKV_ASSIGN_OR_RETURN(const std::string path, FindGates(context.model_path, settings));
    const auto read = ReadHeadNumbers(path, context.n_layers, n_kv_heads_, 0, 1);
    if (!read.ok()) return InvalidArgument("policy duo: gates: " + read.status().message());
    const std::vector<double>& gates = *read;
    // The published ones: models whose query heads share K/V have fewer heads to spare.
    if (settings.IsAuto("threshold") && settings.IsAuto("sparsity")) {
      settings.Resolve("sparsity", context.n_heads > n_kv_heads_ ? "0.5" : "0.75");
    }
    const size_t together = settings.Bool("by_layer") ? static_cast<size_t>(n_kv_heads_)
                                                      : gates.size();  // under one threshold
    for (size_t first = 0; first < gates.size(); first += together) {
      const auto begin = gates.begin() + static_cast<ptrdiff_t>(first);
      const std::vector<double> some(begin, begin + static_cast<ptrdiff_t>(together));
      const double threshold = ThresholdOf(some, settings);
      for (const double gate : some) classes_.push_back(gate < threshold ? kStreaming : 0);
    }
    return {};
  }

  bool DensePrompts() const override { return false; }
  int32_t HeadClasses() const override { return 2; }
  std::vector<int32_t> HeadsOf(int32_t layer, int32_t head_class) const override {
    std::vector<int32_t> heads;
    for (int32_t h = 0; h < n_kv_heads_; ++h) {
      if (ClassOf(layer, h) == head_class) heads.push_back(h);
    }
    return heads;
  }

  void Plan(const LayerStep& step, AttendArgs& attend) override {
    if (step.head_class == kStreaming) attend.plan = near_.Plan();
  }

  int64_t TokensRead(int32_t layer, const SeqLength& at) const override {
    return HeadTokensRead(layer, at, n_kv_heads_) / n_kv_heads_;
  }
  int64_t HeadTokensRead(int32_t layer, const SeqLength& at, int32_t n_kv_heads) const override {
    const int64_t near = std::min(at.tokens, near_.sinks + near_.recent);
    int64_t tokens = 0;
    for (int32_t h = 0; h < n_kv_heads; ++h) {
      tokens += ClassOf(layer, h) == kStreaming ? near : at.tokens;
    }
    return tokens;
  }
  bool Budgeted(int32_t layer) const override { return !HeadsOf(layer, kStreaming).empty(); }
  TokenRange Dropped(int64_t length, int32_t head_class) const override {
    const bool all_stream = std::find(classes_.begin(), classes_.end(), 0) == classes_.end();
    if (head_class != kStreaming && !all_stream) return {};
    return {near_.sinks, std::max(near_.sinks, length + 1 - near_.recent)};
  }

  // Which heads kept everything: another file of gates cannot go on from there.
  std::string SaveState(int32_t, int64_t) const override {
    return {classes_.begin(), classes_.end()};
  }
  bool LoadState(int32_t seq, int64_t length, std::string_view state) override {
    return state == SaveState(seq, length);
  }

 private:
  // The gate below which a head streams, of these gates.
  static double ThresholdOf(const std::vector<double>& gates, const PolicySettings& settings) {
    if (!settings.IsAuto("threshold")) return settings.Float("threshold");
    const double sparsity = settings.Float("sparsity");
    return sparsity < 1 ? Quantile(gates, sparsity) : std::numeric_limits<double>::infinity();
  }
  // The file that is named, or the one that stands beside the model.
  static Result<std::string> FindGates(const std::string& model_path, PolicySettings& settings) {
    if (!settings.IsAuto("gates")) return settings.Text("gates");
    if (auto found = FindBesideModel(model_path, kGatesName, settings, "gates")) return *found;
    return InvalidArgument(fmt::format(
        "policy duo: gates is not set{}, expected the path of a file of gates, a line for each "
        "layer",
        model_path.empty() ? "" : " and there is no " + PathBesideModel(model_path, kGatesName)));
  }
  int32_t ClassOf(int32_t layer, int32_t head) const {
    return classes_[static_cast<size_t>(layer * n_kv_heads_ + head)];
  }

  int32_t n_kv_heads_ = 0;
  SinksAndRecent near_;        // what streaming heads read
  std::vector<char> classes_;  // [layers, KV heads]
};

}  // namespace

PolicyInfo DuoPolicy() {
  return {.name = "duo",
          .summary =
              "everything for some KV heads, the first and the last tokens for the others, "
              "by a file of gates (DuoAttention)",
          .facts = {.source = "DuoAttention, Xiao et al. 2024; gates from its published files, or "
                              "measured (omnikv analyze heads)",
                    .chooses = "never: gates say which KV heads read everything",
                    .keeps = "all rows of retrieval heads, the first and last of the others",
                    .reads = "N rows of retrieval heads, sinks and recent rows of the others",
                    .holds = "as it reads",
                    .loses = "nothing (0 of 8 answers, at 16K also at a tenth of what full "
                             "reads), but what is far where every head streams (2 of 2), and where "
                             "gates name other heads (8 of 8 answers with the gates reversed)"},
          .kind = PolicyKind::kHeads,
          .knob = {.key = "sparsity", .falls = true},
          .settings = {{.key = "gates",
                        .type = SettingType::kFile,
                        .default_value = "auto",
                        .help = "numbers from 0 to 1, a line per layer, a column per KV head, "
                                "between tabs; auto: MODEL.duo.tsv beside MODEL.gguf, or duo.tsv "
                                "in the model's folder",
                        .allow_auto = true,
                        .beside = kGatesName},
                       {.key = "sinks",
                        .type = SettingType::kInt,
                        .default_value = std::to_string(SinksAndRecent{}.sinks),
                        .help = "first tokens that streaming heads read",
                        .min = 0,
                        .max = 1e6},
                       {.key = "recent",
                        .type = SettingType::kInt,
                        .default_value = std::to_string(SinksAndRecent{}.recent),
                        .help = "last tokens that streaming heads read",
                        .min = 1,
                        .max = 1e9},
                       {.key = "sparsity",
                        .type = SettingType::kFloat,
                        .default_value = "auto",
                        .help = "share of the heads that stream, those of the lowest gates; auto: "
                                "0.5, or 0.75 where query heads share no K/V",
                        .min = 0,
                        .max = 1,
                        .allow_auto = true},
                       {.key = "by_layer",
                        .type = SettingType::kBool,
                        .default_value = "0",
                        .help = "whether sparsity is that of each layer, instead of all together"},
                       {.key = "threshold",
                        .type = SettingType::kFloat,
                        .default_value = "auto",
                        .help = "gate below which a head streams; auto: by sparsity",
                        .min = 0,
                        .max = 2,
                        .allow_auto = true}},
          .make = [] { return std::make_unique<Duo>(); },
          .batches = true,
          .covering =
              [](int64_t length) {
                const std::string all = std::to_string(length);
                return std::vector<SettingList>{
                    {{"recent", all}}, {{"sinks", all}, {"recent", "1"}}, {{"sparsity", "0"}}};
              },
          .exempt = "",
          .test_settings = {{{"sinks", "4"}, {"recent", "16"}},
                            {{"sinks", "0"}, {"recent", "24"}, {"sparsity", "0.25"}},
                            {{"sinks", "3"}, {"recent", "10"}, {"threshold", "0.8"}},
                            {{"sinks", "4"}, {"recent", "20"}, {"sparsity", "1"}},
                            {{"sinks", "4"}, {"recent", "20"}, {"by_layer", "1"}}},
          .recommended = nullptr};
}

}  // namespace omnikv
