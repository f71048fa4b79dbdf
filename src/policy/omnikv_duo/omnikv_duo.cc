// OmniKV (Hao et al. 2025) among the retrieval heads of DuoAttention (Xiao et al. 2024): streaming
// heads are those of policy duo, in every layer and for every row. The others do what policy omnikv
// does, and its filters score with their query heads alone.
#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "policy/policy.h"

namespace omnikv {

PolicyInfo DuoPolicy();
PolicyInfo OmnikvPolicy();

namespace {

constexpr std::string_view kName = "omnikv_duo";
constexpr int32_t kStreaming = 1;  // the head class; 0: the heads that retrieve

// Settings of the parts that have one value here.
struct Fixed {
  std::string_view key;
  std::string_view value;
  std::string_view why;
};
constexpr std::array<Fixed, 3> kFixed = {{
    {"lists", "one", "a KV head that retrieves in one layer may stream in the filter below it"},
    {"dense", "exact", "an index of K has the KV heads of all classes"},
    {"prefill", "dense", "chunks that choose gather the rows of all KV heads"},
}};

// The key of a part's setting; empty where there is none, because it says how to do what is not
// done here.
std::string OwnKey(std::string_view part, const std::string& key) {
  constexpr std::array<std::string_view, 4> kUnused = {"fetch", "rescore", "r", "chunk"};
  if (std::find(kUnused.begin(), kUnused.end(), key) != kUnused.end()) return "";
  const bool near = part == "duo" && (key == "sinks" || key == "recent");
  return near ? "stream_" + key : key;
}

std::vector<SettingSpec> Settings() {
  std::vector<SettingSpec> all;
  for (const PolicyInfo& part : {OmnikvPolicy(), DuoPolicy()}) {
    for (SettingSpec spec : part.settings) {
      spec.key = OwnKey(part.name, spec.key);
      if (!spec.key.empty()) all.push_back(std::move(spec));
    }
  }
  for (SettingSpec& spec : all) {
    for (const Fixed& fixed : kFixed) {
      if (spec.key == fixed.key) spec.help = fmt::format("{}: {}", fixed.value, fixed.why);
    }
  }
  return all;
}

Status CheckFixed(const PolicySettings& settings) {
  for (const Fixed& fixed : kFixed) {
    const std::string& value = settings.Text(std::string(fixed.key));
    if (value == fixed.value) continue;
    return Unsupported(fmt::format("policy {}: {} is {}, expected {}: {}", kName, fixed.key, value,
                                   fixed.value, fixed.why));
  }
  return {};
}

// Prepares a part by its share of the settings, and resolves these as it does.
Status PreparePart(const PolicyInfo& info, Policy& part, const PolicyContext& context,
                   PolicySettings& settings) {
  SettingList given;
  for (const SettingSpec& spec : info.settings) {
    const std::string own = OwnKey(info.name, spec.key);
    if (!own.empty()) given.emplace_back(spec.key, settings.Text(own));
  }
  OKV_ASSIGN_OR_RETURN(auto of_part, PolicySettings::Parse(info.name, info.settings, given));
  if (const Status status = part.Prepare(context, of_part); !status.ok()) {
    const std::string prefix = "policy " + info.name + ":";
    const std::string& message = status.message();
    if (!message.starts_with(prefix)) return status;
    return Status(status.code(), fmt::format("policy {}:{}", kName, message.substr(prefix.size())));
  }
  for (const auto& setting : given) {
    const std::string own = OwnKey(info.name, setting.first);
    if (settings.IsAuto(own)) settings.Resolve(own, of_part.Text(setting.first));
  }
  return {};
}

class OmnikvDuo : public Policy {
 public:
  Status Prepare(const PolicyContext& context, PolicySettings& settings) override;
  Status AfterPrefill(int64_t length) override { return tokens_->AfterPrefill(length); }
  int32_t Variant(const SeqLength& at) const override { return tokens_->Variant(at); }
  int32_t HeadClasses() const override { return heads_->HeadClasses(); }
  std::vector<int32_t> HeadsOf(int32_t layer, int32_t head_class) const override {
    return heads_->HeadsOf(layer, head_class);
  }
  void BeginStep(int32_t variant, const AttendArgs& step) override {
    tokens_->BeginStep(variant, step);
  }
  void Plan(const LayerStep& step, AttendArgs& attend) override { Of(step).Plan(step, attend); }
  void Observe(const LayerStep& step, const AttendArgs& attend) override {
    Of(step).Observe(step, attend);
  }
  bool DensePrompts() const override { return false; }
  int64_t WarmRows() const override { return std::max(tokens_->WarmRows(), heads_->WarmRows()); }

  int64_t TokensRead(int32_t layer, const SeqLength& at) const override {
    return HeadTokensRead(layer, at, n_kv_heads_) / n_kv_heads_;
  }
  int64_t HeadTokensRead(int32_t layer, const SeqLength& at, int32_t n_kv_heads) const override {
    return Streamed(layer, at, n_kv_heads) + tokens_->HeadTokensRead(layer, at, Retrieving(layer));
  }
  bool ReadsByScore() const override { return tokens_->ReadsByScore(); }
  int64_t HeadTokensReadLast(int32_t layer, int32_t seq, const SeqLength& at,
                             int32_t n_kv_heads) const override {
    return Streamed(layer, at, n_kv_heads) +
           tokens_->HeadTokensReadLast(layer, seq, at, Retrieving(layer));
  }
  int64_t TokensScored(int32_t layer, const SeqLength& at) const override {
    return HeadTokensScored(layer, at, n_kv_heads_) / n_kv_heads_;
  }
  int64_t HeadTokensScored(int32_t layer, const SeqLength& at, int32_t) const override {
    return tokens_->HeadTokensScored(layer, at, Retrieving(layer));
  }
  bool Budgeted(int32_t layer) const override {
    return tokens_->Budgeted(layer) || heads_->Budgeted(layer);
  }
  int64_t Budget(int64_t length) const override { return tokens_->Budget(length); }
  int64_t Besides(const SeqLength& at) const override { return tokens_->Besides(at); }
  int64_t LayerAllows(int32_t layer, const SeqLength& at) const override {
    const int64_t of_head = tokens_->Budgeted(layer) ? tokens_->LayerAllows(layer, at) : at.tokens;
    return (Streamed(layer, at, n_kv_heads_) + Retrieving(layer) * of_head) / n_kv_heads_;
  }
  TokenRange Dropped(int64_t length, int32_t head_class) const override {
    return heads_->Dropped(length, head_class);
  }
  size_t Bytes() const override { return tokens_->Bytes() + heads_->Bytes(); }

  void CopyState(const Policy& from) override {
    const auto& other = static_cast<const OmnikvDuo&>(from);
    tokens_->CopyState(*other.tokens_);
    heads_->CopyState(*other.heads_);
  }
  // The state of the heads, which has one size whatever the length, and then that of the tokens.
  std::string SaveState(int32_t seq, int64_t length) const override {
    return heads_->SaveState(seq, length) + tokens_->SaveState(seq, length);
  }
  bool LoadState(int32_t seq, int64_t length, std::string_view state) override {
    const size_t of_heads = std::min(state.size(), heads_->SaveState(seq, length).size());
    return heads_->LoadState(seq, length, state.substr(0, of_heads)) &&
           tokens_->LoadState(seq, length, state.substr(of_heads));
  }

 private:
  Policy& Of(const LayerStep& step) const {
    return step.head_class == kStreaming ? *heads_ : *tokens_;
  }
  int32_t Retrieving(int32_t layer) const { return retrieving_[static_cast<size_t>(layer)]; }
  // Tokens that the streaming heads of a layer read together.
  int64_t Streamed(int32_t layer, const SeqLength& at, int32_t n_kv_heads) const {
    return heads_->HeadTokensRead(layer, at, n_kv_heads) - Retrieving(layer) * at.tokens;
  }
  Status CheckFilters(const PolicySettings& settings) const;

  std::unique_ptr<Policy> heads_ = DuoPolicy().make();
  std::unique_ptr<Policy> tokens_ = OmnikvPolicy().make();
  int32_t n_kv_heads_ = 0;
  std::vector<int32_t> retrieving_;  // [layers]: KV heads
};

Status OmnikvDuo::Prepare(const PolicyContext& context, PolicySettings& settings) {
  n_kv_heads_ = context.n_kv_heads;
  OKV_RETURN_IF_ERROR(CheckFixed(settings));
  OKV_RETURN_IF_ERROR(PreparePart(DuoPolicy(), *heads_, context, settings));
  int64_t retrieving = 0;
  for (int32_t layer = 0; layer < context.n_layers; ++layer) {
    retrieving_.push_back(static_cast<int32_t>(heads_->HeadsOf(layer, 0).size()));
    retrieving += retrieving_.back();
  }
  PolicyContext of_tokens = context;
  // Layers on the host come whole, and no selection of theirs is fetched.
  of_tokens.fetches = false;
  // Of the heads that a selection spares, a layer reads more tokens in the same time.
  if (retrieving > 0) {
    of_tokens.selection_tokens =
        context.selection_tokens * context.n_layers * n_kv_heads_ / retrieving;
  }
  OKV_RETURN_IF_ERROR(PreparePart(OmnikvPolicy(), *tokens_, of_tokens, settings));
  return CheckFilters(settings);
}

// A filter scores with the heads that retrieve there.
Status OmnikvDuo::CheckFilters(const PolicySettings& settings) const {
  const std::vector<int32_t> filters = settings.IntList("filters");
  const bool every_layer = settings.Bool("select_every_layer");
  const auto n_layers = static_cast<int32_t>(retrieving_.size());
  for (int32_t layer = filters.front(); layer < n_layers; ++layer) {
    const bool chooses = every_layer || std::binary_search(filters.begin(), filters.end(), layer);
    if (!chooses || Retrieving(layer) > 0) continue;
    const std::string key = every_layer ? "select_every_layer" : "filters";
    return InvalidArgument(fmt::format(
        "policy {}: {} is {}, but all KV heads of layer {} stream by its gates, expected "
        "one that retrieves, to choose by",
        kName, key, settings.Text(key), layer));
  }
  return {};
}

std::vector<SettingList> Covering(int64_t length) {
  const std::string all = std::to_string(length);
  return {
      {{"budget", all}, {"stream_recent", all}},
      {{"budget", all}, {"stream_sinks", all}, {"stream_recent", "1"}, {"score", "raw"}},
      {{"budget", all}, {"sparsity", "0"}, {"selector", "exp"}},
      {{"mem", "1"}, {"stream_recent", all}, {"dense_after_filter", "0"}},
      {{"budget", all}, {"stream_recent", all}, {"by_layer", "1"}, {"select_every_layer", "1"}}};
}

std::vector<SettingList> TestSettings() {
  const SettingList small = {{"filters", "0,2"},      {"dense_after_filter", "0"},
                             {"tail", "4"},           {"stream_sinks", "4"},
                             {"stream_recent", "16"}, {"dense_below", "0"}};
  std::vector<SettingList> all = {
      {{"budget", "24"}},
      {{"mem", "0.6"}, {"by_layer", "1"}},
      {{"budget", "24"}, {"score", "raw"}, {"threshold", "0.5"}},
      {{"budget", "24"}, {"selector", "uniform"}, {"window", "5"}, {"sparsity", "0.25"}},
      {{"budget", "24"}, {"selector", "exp"}, {"score", "raw"}, {"by_layer", "1"}},
      {{"budget", "20"}, {"select_every_layer", "1"}, {"by_layer", "1"}},
      {{"budget", "40"}, {"top_p", "0.5"}},
      {{"budget", "12"}, {"sinks", "3"}, {"sparsity", "0.25"}}};
  for (SettingList& settings : all) settings.insert(settings.end(), small.begin(), small.end());
  return all;
}

}  // namespace

PolicyInfo OmnikvDuoPolicy() {
  return {.name = std::string(kName),
          .summary =
              "omnikv among the KV heads that retrieve, the first and the last tokens for the "
              "others, by a file of gates (OmniKV and DuoAttention)",
          .facts = {.source = "OmniKV, Hao et al. 2025, among the retrieval heads of DuoAttention, "
                              "Xiao et al. 2024",
                    .chooses = "at every step in filter layers, by the weights of the last query, "
                               "highest of the retrieval heads; gates say which heads these are",
                    .keeps = "all rows of retrieval heads, the first and last of the others",
                    .reads = "of retrieval heads N rows in filter and dense layers, b and the last "
                             "generated ones in the others; of the other heads sinks and recent "
                             "rows",
                    .holds = "N rows of retrieval heads, sinks and recent rows of the others",
                    .loses = "nothing (0 of 8 answers, at a quarter of what full reads); tokens "
                             "far back that no retrieval head of a filter looks for"},
          .kind = PolicyKind::kHeadsSelect,
          .combines = {"omnikv", "duo"},
          .knob = {.key = "budget", .with = {{"dense_below", "0"}}},
          .settings = Settings(),
          .make = [] { return std::make_unique<OmnikvDuo>(); },
          .batches = true,
          .covering = Covering,
          .exempt = "",
          .test_settings = TestSettings(),
          .recommended = nullptr};
}

}  // namespace omnikv
