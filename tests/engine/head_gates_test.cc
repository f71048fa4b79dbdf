// Gates of KV heads from their attention: they are what a softmax by hand gives, and they tell
// heads that look far from heads that do not.
#include "engine/head_gates.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "../made_up_model.h"
#include "../test_data.h"
#include "backend/forwarding_backend.h"
#include "backend/ref/ref_backend.h"
#include "model/generated.h"
#include "on_device.h"
#include "sessions.h"

namespace omnikv::head_gates_test {
namespace {

using ::testing::DoubleNear;
using ::testing::Pointwise;

const std::string kRandom = TestData("tests/golden/policy_model");    // 8 layers, 2 KV heads of 16
const std::string kWindows = TestData("tests/golden/models/gemma3");  // 1 of 4 layers is global
constexpr int32_t kWindow = 20;
const HeadGatesOptions kOptions{.near = {.sinks = 4, .recent = 30}, .window = kWindow};

using Texts = std::vector<std::vector<int32_t>>;

// Two that begin alike, and a third, whose last chunk has more rows than are measured.
Texts SomeTexts() {
  Texts texts{Numbers(203, 1), Numbers(160, 1), Numbers(126, 9)};
  texts[1].insert(texts[1].end(), {9, 8, 7, 6, 5, 4});
  return texts;
}

EngineOptions OptionsOf(const std::string& model, const std::string& device) {
  return {.model = model,
          .device = device,
          .threads = 2,
          .context = 256,
          .policy = {.name = "full"},
          .kv_dtype = "f32",
          .precision = "full",
          .prefill_chunk = 48};
}

// The reference backend, and beside it the share of each row's attention that lies on far tokens,
// summed over the weights of all tokens one by one.
class ByHand : public ForwardingBackend {
 public:
  explicit ByHand(std::unique_ptr<Backend> inner)
      : ForwardingBackend(*inner), owned_(std::move(inner)) {}

  void Enqueue(const Op& op, Lane lane = Lane::kMain) override {
    inner().Enqueue(op, lane);
    const auto* attend = std::get_if<AttendArgs>(&op);
    // Layers follow one another; a second attention of a layer has another plan.
    if (attend == nullptr || !(attend->plan == AttnPlan::Dense())) return;
    for (int32_t row = 0; row < attend->n_rows; ++row) Add(*attend, row);
    layer_ = (layer_ + 1) % n_layers;
  }

  // The gates of the text that ends at `length`, added to `gates`; forgets it.
  void AddGates(int64_t length, std::vector<double>& gates) {
    for (size_t gate = 0; gate < gates.size(); ++gate) {
      double highest = 0;
      for (int64_t p = length - kWindow; p < length; ++p) {
        const std::vector<double>& heads = shares_.at({static_cast<int32_t>(gate / 2), p});
        for (size_t h = gate % 2 * 2; h < gate % 2 * 2 + 2; ++h)
          highest = std::max(highest, heads[h]);
      }
      gates[gate] += highest;
    }
    shares_.clear();
  }

  int32_t n_layers = 1;  // with global attention

 private:
  void Add(const AttendArgs& a, int32_t row) {
    const int64_t p = a.rows[row].pos;
    const int32_t table = a.seqs[a.rows[row].seq].table_off;
    std::vector<double>& heads = shares_[{layer_, p}];
    heads.clear();
    for (int32_t h = 0; h < a.n_heads; ++h) {
      double far = 0;
      double all = 0;
      for (int64_t t = 0; t <= p; ++t) {
        const auto* k =
            reinterpret_cast<const float*>(a.kv.k.Head(a.kv.RowIndex(table, t), h / a.Group()));
        double logit = 0;
        for (int32_t i = 0; i < a.kv.dk; ++i) {
          logit += static_cast<double>(a.q[(row * a.n_heads + h) * a.kv.dk + i]) * k[i];
        }
        const double weight = std::exp(a.scale * logit);
        all += weight;
        if (t >= kOptions.near.sinks && t <= p - kOptions.near.recent) far += weight;
      }
      heads.push_back(far / all);
    }
  }

  std::unique_ptr<Backend> owned_;
  int32_t layer_ = 0;
  std::map<std::pair<int32_t, int64_t>, std::vector<double>> shares_;  // [layer, position][head]
};

// Both models have 4 query heads and 2 KV heads.
std::vector<double> GatesByHand(const std::string& model, const Texts& texts,
                                std::vector<double>* measured) {
  ByHand* by_hand = nullptr;
  const auto engine =
      LoadEngine(OptionsOf(model, "ref"), [&]() -> Result<std::unique_ptr<Backend>> {
        auto backend = std::make_unique<ByHand>(MakeRefBackend());
        by_hand = backend.get();
        return std::unique_ptr<Backend>(std::move(backend));
      });
  EXPECT_TRUE(engine.ok()) << engine.status().message();
  EngineCore& core = CoreOf(**engine);
  by_hand->n_layers = GlobalLayers(core.config);
  std::vector<double> gates(static_cast<size_t>(2 * by_hand->n_layers), 0.0);
  size_t n = 0;  // texts that came to their end
  const auto got = MeasureHeadGates(core, texts, kOptions, [&](double done) {
    const double texts_done = done * static_cast<double>(texts.size());
    if (texts_done < static_cast<double>(n + 1) - 1e-9) return;
    by_hand->AddGates(static_cast<int64_t>(texts[n++].size()), gates);
  });
  EXPECT_TRUE(got.ok()) << got.status().message();
  EXPECT_EQ(n, texts.size());
  for (double& gate : gates) gate /= static_cast<double>(texts.size());
  if (got.ok()) *measured = *got;
  return gates;
}

class HeadGatesOn : public OnDevice {};

TEST_P(HeadGatesOn, AreWhatASoftmaxByHandGives) {
  for (const std::string& model : {kRandom, kWindows}) {
    SCOPED_TRACE(model);
    std::vector<double> on_ref;
    const std::vector<double> expected = GatesByHand(model, SomeTexts(), &on_ref);
    EXPECT_THAT(on_ref, Pointwise(DoubleNear(1e-6), expected));
    const auto [low, high] = std::minmax_element(expected.begin(), expected.end());
    EXPECT_LT(*low + 0.005, *high);  // heads differ
    const auto engine = Load(OptionsOf(model, GetParam()));
    const auto gates = MeasureHeadGates(CoreOf(*engine), SomeTexts(), kOptions);
    ASSERT_TRUE(gates.ok()) << gates.status().message();
    EXPECT_THAT(*gates, Pointwise(DoubleNear(GetParam() == "cuda" ? 1e-3 : 1e-5), expected));
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, HeadGatesOn, testing::Values("ref", "cpu", "cuda"), NameOf);

// A layer without rotation whose query heads attend alike to all tokens, but for head 2, of KV head
// 1, which attends to the token kMarker alone.
constexpr int32_t kMarker = 40;
Result<Weights> MarkerWeights(Backend& backend, const ModelConfig& config) {
  OKV_ASSIGN_OR_RETURN(Weights w, GenerateWeights(backend, config, DType::kF32));
  const auto d = static_cast<size_t>(config.d_model);
  const auto write = [&](const WeightRef& to, const std::vector<float>& values) {
    backend.Upload(const_cast<void*>(to.data), values.data(), values.size() * sizeof(float));
  };
  // The marker's embedding is the first axis, which no other token has a part of.
  std::vector<float> embed(static_cast<size_t>(config.vocab) * d, 0.0f);
  for (size_t t = 0; t < static_cast<size_t>(config.vocab); ++t) {
    embed[t * d + (t == kMarker ? 0 : 1 + t % (d - 1))] = 1;
  }
  write(w.embed, embed);
  LayerWeights& layer = w.layers[0];
  const auto dim = static_cast<size_t>(config.head_dim);
  write(layer.wq, std::vector<float>(4 * dim * d, 0.0f));
  std::vector<float> wk(2 * dim * d, 0.0f);
  wk[dim * d] = 1;  // the first value of KV head 1
  write(layer.wk, wk);
  OKV_ASSIGN_OR_RETURN(Buffer bias, backend.Allocate(4 * dim * sizeof(float), "a bias"));
  std::vector<float> bq(4 * dim, 0.0f);
  bq[2 * dim] = 100;
  backend.Upload(bias.as(), bq.data(), bq.size() * sizeof(float));
  layer.bq = bias.as<float>();
  w.memory.push_back(std::move(bias));
  return w;
}

TEST(HeadGates, TellWhoLooksFar) {
  ModelConfig config = SmallLlama({.n_layers = 1, .max_context = 256});
  config.layers[0].rope = -1;
  EngineModel model = MadeUpModel(config, DType::kF32);
  model.load = [&](Backend& backend, const EngineModel::Progress&) {
    return MarkerWeights(backend, config);
  };
  const auto engine = LoadEngine(OptionsOf("", "ref"), std::move(model),
                                 [] { return Result<std::unique_ptr<Backend>>(MakeRefBackend()); });
  ASSERT_TRUE(engine.ok()) << engine.status().message();
  const auto gates_with_marker_at = [&](size_t place) {
    std::vector<int32_t> text = Numbers(200, 1);
    std::replace(text.begin(), text.end(), kMarker, 3);
    text[place] = kMarker;
    const auto gates = MeasureHeadGates(CoreOf(**engine), Texts{text}, kOptions);
    EXPECT_TRUE(gates.ok()) << gates.status().message();
    return *gates;
  };
  const double alike = (200.0 - 4 - 30) / 200;  // of who attends alike to all tokens
  const auto gates_are = [](double head_0, double head_1) {
    return Pointwise(DoubleNear(1e-5), std::vector<double>{head_0, head_1});
  };
  EXPECT_THAT(gates_with_marker_at(100), gates_are(alike, 1));
  EXPECT_THAT(gates_with_marker_at(4), gates_are(alike, 1));        // the first that is far
  EXPECT_THAT(gates_with_marker_at(3), gates_are(alike, alike));    // the last sink
  EXPECT_THAT(gates_with_marker_at(169), gates_are(alike, 1));      // far from the last row alone
  EXPECT_THAT(gates_with_marker_at(170), gates_are(alike, alike));  // near it
}

TEST(HeadGates, WhatCannotBeMeasuredIsASentence) {
  const auto refusal = [](const std::string& model, const Texts& texts, int32_t window = kWindow) {
    const auto engine = Load(OptionsOf(model, "cpu"));
    HeadGatesOptions options = kOptions;
    options.window = window;
    return MeasureHeadGates(CoreOf(*engine), texts, options).status();
  };
  EXPECT_TRUE(refusal(kRandom, {Numbers(35, 1)}).ok());
  EXPECT_EQ(refusal(kRandom, {Numbers(35, 1), Numbers(34, 1)}).message(),
            "text 2: has 34 tokens, expected more than the 34 that a streaming head reads");
  EXPECT_EQ(refusal(kRandom, {Numbers(257, 1)}).message(),
            "text 1: the prompt has 257 tokens, but the context holds 256: shorten it or raise "
            "`context`");
  EXPECT_TRUE(refusal(kRandom, {Numbers(90, 1)}, 48).ok());
  EXPECT_EQ(refusal(kRandom, {Numbers(90, 1)}, 49).message(),
            "the last 49 rows of a text are to be measured, expected at most the 48 rows of a step "
            "(`prefill_chunk`)");
  const std::string windows = TestData("tests/golden/models/mistral");
  EXPECT_EQ(
      refusal(windows, {Numbers(90, 1)}).message(),
      windows + ": every layer has a sliding window, expected some that attend to all tokens");
}

}  // namespace
}  // namespace omnikv::head_gates_test
