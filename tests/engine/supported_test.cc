// What a backend cannot run is refused where an engine or a group of sequences opens, by one
// sentence, before it has run or taken anything.
#include "engine/supported.h"

#include <gtest/gtest.h>

#include <string>

#include "../made_up_model.h"
#include "backend/forwarding_backend.h"
#include "backend/ref/ref_backend.h"
#include "engine/batch.h"
#include "model/generated.h"

namespace omnikv::supported_test {
namespace {

// The reference, but for one op. It passes for a card, so that layers can live on the host.
class Without : public ForwardingBackend {
 public:
  explicit Without(std::unique_ptr<Backend> inner)
      : ForwardingBackend(*inner), owned_(std::move(inner)) {}

  bool OnDevice() const override { return true; }
  Support Supports(const Op& op) const override {
    if (OpName(op) == refused) return {false, "it is left out"};
    return inner().Supports(op);
  }
  void Enqueue(const Op& op, Lane lane) override {
    ++uses;
    inner().Enqueue(op, lane);
  }
  Result<Buffer> Allocate(size_t bytes, std::string_view what) override {
    ++uses;
    return inner().Allocate(bytes, what);
  }
  void Upload(void* dst, const void* src, size_t bytes) override {
    ++uses;
    inner().Upload(dst, src, bytes);
  }

  std::string refused;
  int64_t uses = 0;

 private:
  std::unique_ptr<Backend> owned_;
};

const PolicyOptions kFull{.name = "full"};
const PolicyOptions kSelecting{
    .name = "omnikv", .settings = {{"filters", "1,3"}, {"dense_below", "0"}, {"budget", "24"}}};
const PolicyOptions kQuest{.name = "quest", .settings = {{"budget", "64"}}};
const PolicyOptions kTova{.name = "tova", .settings = {{"budget", "24"}}};
const PolicyOptions kSnapKv{.name = "snapkv", .settings = {{"budget", "24"}, {"window", "8"}}};

EngineOptions Options(const std::string& place) {
  EngineOptions options;
  options.context = 400;
  options.kv_dtype = "f32";
  options.prefill_chunk = 48;
  options.max_sessions = 4;
  options.place = place;
  options.policy = place == "host" ? kSelecting : kFull;
  return options;
}

ModelConfig Model() {
  ModelConfig config = SmallLlama({.max_context = 400});
  config.name = "small";
  return config;
}

struct Opened {
  explicit Opened(const std::string& place = "device") {
    auto core = std::make_unique<EngineCore>();
    auto without = std::make_unique<Without>(MakeRefBackend());
    backend = without.get();
    core->backend = std::move(without);
    core->options = Options(place);
    core->config = Model();
    core->weights = *GenerateWeights(*core->backend, core->config, DType::kF32);
    const auto plan =
        PlanMemory(core->options, core->config, core->weights.bytes, DType::kF32, *core->backend);
    EXPECT_EQ(plan->host_layers > 0, place == "host");
    engine = *MakeEngine(std::move(core), *plan, 0);
  }

  std::unique_ptr<Engine> engine;
  Without* backend;
};

struct Need {
  const PolicyOptions& policy;
  const char* op;
};

// Ops of the model, of prompts, of their end, and of decode steps.
TEST(Supported, WhatIsMissingIsNamed) {
  const Opened opened;
  for (const Need& need :
       {Need{kFull, "Attend"}, Need{kFull, "NormGatedFfn"}, Need{kSelecting, "TopK"},
        Need{kSelecting, "PlanRange"}, Need{kSelecting, "ScoreReduce"},
        Need{kQuest, "BlockSummary"}, Need{kQuest, "BlockScore"}, Need{kTova, "Score"},
        Need{kTova, "Compact"}, Need{kTova, "Evict"}, Need{kTova, "LocateRows"},
        Need{kSnapKv, "Pool"}}) {
    SCOPED_TRACE(need.op);
    opened.backend->refused = "";
    EXPECT_TRUE(opened.engine->NewSession(need.policy).ok());
    opened.backend->refused = need.op;
    const int64_t before = opened.backend->uses;
    const std::string expected = "small under `policy` " + need.policy.name + " needs " + need.op +
                                 ", which ref does not run: it is left out";
    for (const Status& status : {opened.engine->NewSession(need.policy).status(),
                                 RowGroup::Open(CoreOf(*opened.engine), need.policy, 1).status()}) {
      EXPECT_EQ(status.code(), StatusCode::kUnsupported);
      EXPECT_EQ(status.message(), expected);
    }
    EXPECT_EQ(opened.backend->uses, before) << "something was run or taken";
    // Who does not need it gets a session.
    if (need.policy.name != kFull.name) {
      EXPECT_TRUE(opened.engine->NewSession(kFull).ok());
    }
  }
}

TEST(Supported, WhatHostLayersNeed) {
  const Opened opened("host");
  EXPECT_TRUE(opened.engine->NewSession(kSelecting).ok());
  for (const std::string op : {"WorkingSet", "FetchRows"}) {
    opened.backend->refused = op;
    const Status status = opened.engine->NewSession(kSelecting).status();
    EXPECT_EQ(status.message(), "small under `policy` omnikv needs " + op +
                                    ", which ref does not run: it is left out");
  }
}

TEST(Supported, ABatch) {
  const Opened opened;
  EXPECT_TRUE(Batch::Open(CoreOf(*opened.engine), kSelecting, 3).ok());
  opened.backend->refused = "TopK";
  EXPECT_EQ(Batch::Open(CoreOf(*opened.engine), kSelecting, 3).status().code(),
            StatusCode::kUnsupported);
}

// Where an engine loads, its policy's ops are asked for before a weight is read.
TEST(Supported, BeforeWeightsAreRead) {
  EngineOptions options = Options("device");
  options.policy = kSelecting;
  options.on_load = [](size_t, size_t) { ADD_FAILURE() << "weights are read"; };
  EngineModel model = MadeUpModel(Model(), DType::kF32);
  model.load = [](Backend&, const EngineModel::Progress&) -> Result<Weights> {
    ADD_FAILURE() << "weights are read";
    return Failed("");
  };
  const auto engine = LoadEngine(options, std::move(model), [] {
    auto backend = std::make_unique<Without>(MakeRefBackend());
    backend->refused = "TopK";
    return Result<std::unique_ptr<Backend>>(std::move(backend));
  });
  EXPECT_EQ(engine.status().message(),
            "small under `policy` omnikv needs TopK, which ref does not run: it is left out");
}

}  // namespace
}  // namespace omnikv::supported_test
