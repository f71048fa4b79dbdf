// Logits that are NaN or infinite are an error, wherever they first appear and whoever draws the
// token: never a token that a caller takes for an answer.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <limits>

#include "as_device.h"
#include "engine/batch.h"
#include "engine/core.h"
#include "engine/devices.h"
#include "io/safetensors.h"

namespace omnikv::finite_test {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

constexpr int32_t kBad = 77;  // the token whose embedding is broken
const std::vector<int32_t> kPrompt = {5, 9, 14, 3};

// A copy of a small f32 model of 256 tokens; one value in the embedding of kBad, or of every token
// that is not in kPrompt, is `value`.
class Broken {
 public:
  explicit Broken(float value, bool all = false) {
    std::string pattern = fs::temp_directory_path() / "omnikv_finite_XXXXXX";
    folder_ = ::mkdtemp(pattern.data());
    const fs::path golden = OMNIKV_SOURCE_DIR "/tests/golden/models/llama_f32";
    for (const char* name : {"config.json", "model.safetensors"}) {
      fs::copy_file(golden / name, folder_ / name);
    }
    const auto tensors = SafetensorsModel::Open(folder_);
    const TensorView* embed = (*tensors)->Find("model.embed_tokens.weight");
    std::fstream file(folder_ / "model.safetensors",
                      std::ios::binary | std::ios::in | std::ios::out);
    for (int32_t token = 0; token < embed->shape[0]; ++token) {
      const bool prompted = std::find(kPrompt.begin(), kPrompt.end(), token) != kPrompt.end();
      if (token != kBad && (!all || prompted)) continue;
      file.seekp(static_cast<std::streamoff>(embed->offset) + 4 * (token * embed->shape[1] + 3));
      file.write(reinterpret_cast<const char*>(&value), sizeof(value));
    }
  }
  ~Broken() { fs::remove_all(folder_); }
  std::string path() const { return folder_; }

 private:
  fs::path folder_;
};

struct Where {
  const char* device;
  bool as_device;
};

class FiniteTest : public testing::TestWithParam<Where> {
 protected:
  std::unique_ptr<Engine> Load(const Broken& model, const std::string& kv_dtype = "f32") {
    const EngineOptions options{.model = model.path(),
                                .device = GetParam().device,
                                .threads = 2,
                                .context = 64,
                                .kv_dtype = kv_dtype,
                                .max_sessions = 4};
    auto engine = LoadEngine(options, [&]() -> Result<std::unique_ptr<Backend>> {
      auto backend = MakeBackend(options);
      if (!backend.ok() || !GetParam().as_device) return backend;
      return std::unique_ptr<Backend>(std::make_unique<AsDevice>(std::move(*backend)));
    });
    EXPECT_TRUE(engine.ok()) << engine.status().message();
    return engine.ok() ? std::move(*engine) : nullptr;
  }
};

void ExpectNotFinite(const Status& status, const std::string& place) {
  EXPECT_EQ(status.code(), StatusCode::kFailed);
  EXPECT_THAT(status.message(), HasSubstr("NaN or infinite"));
  EXPECT_THAT(status.message(), HasSubstr(place));
  EXPECT_THAT(status.message(), HasSubstr("download"));
}

TEST_P(FiniteTest, APromptIsRefused) {
  for (const float value :
       {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
    const Broken model(value);
    const auto engine = Load(model);
    ASSERT_NE(engine, nullptr);
    auto session = *engine->NewSession({.name = "full"});
    std::vector<int32_t> prompt = kPrompt;
    ASSERT_TRUE(session->Prompt(prompt).ok());
    prompt.push_back(kBad);
    ExpectNotFinite(session->Prompt(prompt), "after 5 tokens");
    EXPECT_FALSE(session->Generate({.max_tokens = 1}).ok()) << "there is nothing to go on from";
    EXPECT_TRUE(session->Prompt(kPrompt).ok()) << "and nothing broken stays";
    int rows = 0;
    prompt = {5, kBad, 9};
    ExpectNotFinite(session->PrefillLogits(prompt, [&](int64_t, const float*) { ++rows; }),
                    "after 2 tokens");
    EXPECT_EQ(rows, 1);
  }
}

TEST_P(FiniteTest, TheSentenceNamesTheKvTypeWhereItMayBeTheCause) {
  const Broken model(std::numeric_limits<float>::quiet_NaN());
  const auto message = [&](const char* kv_dtype) {
    const auto engine = Load(model, kv_dtype);
    return (*engine->NewSession({.name = "full"}))->Prompt({kBad}).message();
  };
  EXPECT_THAT(message("f16"), HasSubstr("kv_dtype"));
  EXPECT_THAT(message("f32"), testing::Not(HasSubstr("kv_dtype")));
}

TEST_P(FiniteTest, AStepIsRefused) {
  const Broken model(std::numeric_limits<float>::quiet_NaN());
  const auto engine = Load(model);
  ASSERT_NE(engine, nullptr);
  auto session = *engine->NewSession({.name = "full"});
  ASSERT_TRUE(session->Prompt(kPrompt).ok());
  ExpectNotFinite(session->Step(kBad), "after 5 tokens");
  EXPECT_EQ(session->tokens(), kPrompt);
  EXPECT_TRUE(session->Step(6).ok());
}

// Greedy or drawn, on the host or by NextToken: the tokens before the broken one, then an error.
TEST_P(FiniteTest, AnAnswerIsRefused) {
  const Broken model(std::numeric_limits<float>::quiet_NaN(), /*all=*/true);
  const auto engine = Load(model);
  ASSERT_NE(engine, nullptr);
  for (const SamplingOptions& sampling :
       {SamplingOptions{}, SamplingOptions{.repeat_penalty = 1.3},
        SamplingOptions{.temperature = 1, .seed = 1},
        SamplingOptions{.temperature = 3, .top_k = 200, .top_p = 0.99, .seed = 2},
        SamplingOptions{.temperature = 2, .min_p = 1e-6, .repeat_penalty = 1.5, .seed = 3}}) {
    auto session = *engine->NewSession({.name = "full"});
    ASSERT_TRUE(session->Prompt(kPrompt).ok());
    const auto result =
        session->Generate({.max_tokens = 40, .sampling = sampling, .ignore_eos = true});
    ExpectNotFinite(result.status(), "tokens of context");
    EXPECT_FALSE(session->Generate({.max_tokens = 1, .ignore_eos = true}).ok());
    EXPECT_TRUE(session->Prompt(kPrompt).ok());
  }
}

TEST_P(FiniteTest, ABatchIsRefused) {
  const Broken model(std::numeric_limits<float>::quiet_NaN(), /*all=*/true);
  const auto engine = Load(model);
  ASSERT_NE(engine, nullptr);
  const auto batch = *Batch::Open(CoreOf(*engine), {.name = "full"}, 2);
  const int32_t a = *batch->Join(kPrompt);
  const int32_t b = *batch->Join({9, 5});
  ExpectNotFinite(batch->Step(std::vector<Batch::Next>{{a, 3}, {b, kBad}}), "after 3 tokens");
  EXPECT_EQ(batch->length(a), 4);
  EXPECT_EQ(batch->length(b), 2);
  const auto tokens = batch->Generate(std::vector<Batch::Next>{{a, 3}, {b, kBad}}, 5);
  ExpectNotFinite(tokens.status(), "after 3 tokens");
  EXPECT_EQ(batch->length(b), 2);
  batch->Leave(b);
  ExpectNotFinite(batch->Join({5, kBad}).status(), "after 2 tokens");
  EXPECT_TRUE(batch->Step(std::vector<Batch::Next>{{a, 3}}).ok());
}

INSTANTIATE_TEST_SUITE_P(Backends, FiniteTest,
                         testing::Values(Where{"cpu", false}, Where{"ref", false},
                                         Where{"cpu", true}, Where{"ref", true}),
                         [](const auto& of) {
                           return std::string(of.param.device) +
                                  (of.param.as_device ? "_as_a_device" : "");
                         });

}  // namespace
}  // namespace omnikv::finite_test
