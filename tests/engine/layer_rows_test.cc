// Layers that keep different numbers of rows (docs/decisions/057): what is held is the sum over
// them, whatever the order of the prompt, and sessions of any policy go on with it as ever.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "../policy_settings.h"
#include "../test_data.h"
#include "engine/core.h"
#include "engine/row_group.h"
#include "golden_data.h"
#include "io/checked_file.h"
#include "on_device.h"
#include "sessions.h"

namespace omnikv::layer_rows_test {
namespace {

using ::testing::HasSubstr;
namespace fs = std::filesystem;

const std::string kRandom = TestData("tests/golden/policy_model");  // 8 layers, vocabulary 128
constexpr int64_t kBlock = 64;

PolicyOptions Pyramid(SettingList more = {}) {
  more.insert(more.begin(), {{"budget", "200"}, {"window", "8"}, {"room", "300"}});
  return {.name = "pyramidkv", .settings = more};
}
// Of Pyramid(), of a prompt of 384 tokens or more: 367 + 8 to 3 + 8.
const std::vector<int64_t> kRows = {383, 331, 279, 227, 175, 123, 71, 19};

class LayerRows : public OnDevice {
 protected:
  std::unique_ptr<Engine> Open(const PolicyOptions& policy, int64_t context = 1024) const {
    return Load({.model = kRandom,
                 .device = GetParam(),
                 .context = context,
                 .policy = policy,
                 .precision = "full",
                 .prefill_chunk = 48,
                 .max_sessions = 3});
  }
  // The same bits on ref, whose sums do not depend on where rows lie.
  static void ExpectSame(const Logits& got, const Logits& expected) {
    ASSERT_EQ(got.size(), expected.size());
    for (size_t i = 0; i < got.size(); ++i) {
      if (GetParam() == "ref") {
        ASSERT_EQ(got[i], expected[i]) << i;
      } else {
        ASSERT_LE(Error(got[i].data(), expected[i]), F32Tolerance(GetParam())) << i;
      }
    }
  }
};

std::vector<int64_t> RowsOf(const Engine& engine, const Session& session) {
  const Bank& bank = *CoreOf(engine).bank;
  std::vector<int64_t> rows;
  for (int32_t layer = 0; layer < bank.n_layers(); ++layer) {
    rows.push_back(bank.LayerRows(GroupOf(session).seq(0), layer));
  }
  return rows;
}

size_t BlocksOf(const Engine& engine, const Session& session) {
  const Bank& bank = *CoreOf(engine).bank;
  return bank.DeviceBytes(GroupOf(session).seq(0)) /
         (static_cast<size_t>(kBlock) * bank.config().RowBytes(0));
}

size_t SumOfBlocks(const std::vector<int64_t>& rows, int64_t more = 0) {
  int64_t blocks = 0;
  for (const int64_t n : rows) blocks += (n + more + kBlock - 1) / kBlock;
  return static_cast<size_t>(blocks);
}

TEST_P(LayerRows, HoldTheirSum) {
  const auto own = Open(Pyramid());  // its prompts pass layer by layer
  const auto chunks = Open(Pyramid({{"room", "100000"}}));
  const auto shared = Open({.name = "full"});
  ASSERT_TRUE(CoreOf(*own).plan.by_layer);
  ASSERT_FALSE(CoreOf(*chunks).plan.by_layer);
  const auto session = Take(own->NewSession(Pyramid()));
  const auto by_chunk = Take(chunks->NewSession(Pyramid()));
  const auto in_one_table = Take(shared->NewSession(Pyramid()));
  for (Session* s : {session.get(), by_chunk.get(), in_one_table.get()}) {
    ASSERT_TRUE(s->Prompt(Numbers(600, 1)).ok());
  }
  EXPECT_EQ(RowsOf(*own, *session), kRows);
  EXPECT_EQ(RowsOf(*chunks, *by_chunk), kRows);
  EXPECT_EQ(RowsOf(*shared, *in_one_table), kRows);
  EXPECT_EQ(BlocksOf(*own, *session), SumOfBlocks(kRows));
  EXPECT_EQ(BlocksOf(*chunks, *by_chunk), SumOfBlocks(kRows));
  EXPECT_EQ(BlocksOf(*shared, *in_one_table), SumOfBlocks(std::vector<int64_t>(8, kRows[0])));
  const Logits expected = Decode(*own, *session, 50);
  ExpectSame(Decode(*chunks, *by_chunk, 50), expected);
  ExpectSame(Decode(*shared, *in_one_table, 50), expected);
  EXPECT_EQ(BlocksOf(*own, *session), SumOfBlocks(kRows, 50));
  // What a step reads is the mean of what the layers hold.
  EXPECT_EQ(session->stats().attended_tokens, (383 + 19) / 2 + 50);
  EXPECT_NEAR(session->stats().read_fraction, 251.0 / 650, 1e-9);
  EXPECT_EQ(session->stats().budget_tokens, 200);
}

// A prompt of one token more than the budget loses one row in some layers, one of the budget none.
TEST_P(LayerRows, ShortPromptsKeepTheirs) {
  const auto own = Open(Pyramid());
  const auto session = Take(own->NewSession(Pyramid()));
  ASSERT_TRUE(session->Prompt(Numbers(200, 1)).ok());
  EXPECT_EQ(RowsOf(*own, *session), std::vector<int64_t>(8, 200));
  ASSERT_TRUE(session->Prompt(Numbers(260, 2)).ok());  // steps of 120 / 7 rows from 252 + 8
  EXPECT_EQ(RowsOf(*own, *session), (std::vector<int64_t>{260, 243, 226, 209, 192, 175, 158, 141}));
}

TEST_P(LayerRows, PlansReserveTheSum) {
  const auto own = Open(Pyramid());
  const EngineCore& core = CoreOf(*own);
  const BankConfig& bank = core.bank->config();
  ASSERT_EQ(bank.tables.size(), 8u);
  size_t reserved = 0;
  for (size_t layer = 0; layer < 8; ++layer) {
    EXPECT_EQ(bank.layers[layer].table(), static_cast<int32_t>(layer));
    // No prompt leaves more than the budget in the last layers; one as long as it leaves that.
    const int64_t held = std::max<int64_t>(kRows[layer], 200) + 300;
    EXPECT_EQ(bank.tables[layer].max_held, core.plan.layer_held[layer]);
    EXPECT_GE(bank.tables[layer].max_held, held);
    EXPECT_LE(bank.tables[layer].max_held, held + 4);  // rounding of the steps
    reserved +=
        static_cast<size_t>(bank.TableBlocks(bank.tables[layer]) * kBlock) * bank.RowBytes(layer);
  }
  EXPECT_EQ(core.plan.kv, reserved);
  const auto uniform = Open({.name = "snapkv", .settings = {{"budget", "383"}, {"room", "300"}}});
  EXPECT_LT(core.plan.kv, CoreOf(*uniform).plan.kv);
  EXPECT_EQ(CoreOf(*uniform).bank->config().tables.size(), 1u);
}

// A later turn keeps its tokens, or chooses anew of what is left; a cut into what came since the
// choice is exact, and one below it starts over.
TEST_P(LayerRows, TurnsAndCuts) {
  for (const bool anew : {false, true}) {
    const PolicyOptions policy = anew ? Pyramid({{"turn", "recompress"}}) : Pyramid();
    SCOPED_TRACE(anew);
    const auto own = Open(policy);
    const auto shared = Open({.name = "full"});
    Logits said;
    for (const auto& [engine, differ] : {std::pair{own.get(), true}, {shared.get(), false}}) {
      const auto session = Take(engine->NewSession(policy));
      ASSERT_TRUE(session->Prompt(Numbers(600, 1)).ok());
      Logits logits = Decode(*engine, *session, 40);
      std::vector<int32_t> turn = session->tokens();
      turn.resize(620);
      const auto more = Numbers(30, 7);
      turn.insert(turn.end(), more.begin(), more.end());
      ASSERT_TRUE(session->Prompt(turn).ok());  // 20 tokens of the answer stay
      EXPECT_EQ(session->stats().prefill_tokens, 30);
      EXPECT_EQ(session->stats().recomputed_tokens, 0);
      for (size_t layer = 0; layer < 8; ++layer) {
        EXPECT_EQ(RowsOf(*engine, *session)[layer], kRows[layer] + (anew ? 0 : 50));
      }
      if (differ) {
        EXPECT_EQ(BlocksOf(*engine, *session), SumOfBlocks(kRows, anew ? 0 : 50));
      }
      const Logits after = Decode(*engine, *session, 10, 3);
      logits.insert(logits.end(), after.begin(), after.end());
      // As if the 20 tokens that were cut off had never been.
      const auto straight = Take(engine->NewSession(policy));
      ASSERT_TRUE(straight->Prompt(Numbers(600, 1)).ok());
      Decode(*engine, *straight, 20);
      ASSERT_TRUE(straight->Prompt(turn).ok());
      EXPECT_EQ(Decode(*engine, *straight, 10, 3), after);
      if (said.empty()) said = logits;
      ExpectSame(logits, said);
      turn.resize(599);
      ASSERT_TRUE(session->Prompt(turn).ok());
      EXPECT_EQ(session->stats().prefill_tokens, 599);
      EXPECT_EQ(RowsOf(*engine, *session), kRows);
    }
  }
}

TEST_P(LayerRows, ForksPart) {
  for (const PolicyOptions& of_engine : {Pyramid(), PolicyOptions{.name = "full"}}) {
    const auto engine = Open(of_engine);
    const auto session = Take(engine->NewSession(Pyramid()));
    ASSERT_TRUE(session->Prompt(Numbers(600, 1)).ok());
    const auto fork = Take(session->Fork());
    EXPECT_EQ(RowsOf(*engine, *fork), kRows);
    const auto alone = Take(engine->NewSession(Pyramid()));
    ASSERT_TRUE(alone->Prompt(Numbers(600, 1)).ok());
    const Logits expected = Decode(*engine, *alone, 20);
    EXPECT_NE(Decode(*engine, *fork, 20, 5), expected);
    EXPECT_EQ(Decode(*engine, *session, 20), expected);
  }
}

// A table for each layer is as good as one for all, for every policy that can run there.
TEST_P(LayerRows, OtherPoliciesRunBesides) {
  const auto own = Open(Pyramid({{"room", "100000"}}), 512);
  const auto other = Open({.name = "full"}, 512);
  ASSERT_EQ(CoreOf(*own).bank->config().tables.size(), 8u);
  for (const PolicyInfo& info : AllPolicies()) {
    SCOPED_TRACE(info.name);
    const PolicyOptions policy = {info.name, WithFiles(info, SmallDefaults(info), 8, 2)};
    const auto run = [&](Engine& engine) {
      const auto session = Take(engine.NewSession(policy));
      EXPECT_TRUE(session->Prompt(Numbers(203, 1)).ok());
      Logits logits = Decode(engine, *session, 20);
      std::vector<int32_t> turn = session->tokens();
      turn.insert(turn.end(), {4, 5, 6});
      EXPECT_TRUE(session->Prompt(turn).ok());
      const Logits more = Decode(engine, *session, 5);
      logits.insert(logits.end(), more.begin(), more.end());
      return logits;
    };
    EXPECT_EQ(run(*own), run(*other));
  }
}

TEST_P(LayerRows, GoThroughFiles) {
  const std::string file =
      fs::path(testing::TempDir()) / ("omnikv_layers_" + std::to_string(::getpid()) + GetParam());
  const auto shared = Open({.name = "full"});
  const auto own = Open(Pyramid());
  for (Engine* engine : {own.get(), shared.get()}) {
    const auto stays = Take(engine->NewSession(Pyramid()));
    ASSERT_TRUE(stays->Prompt(Numbers(600, 1)).ok());
    Decode(*engine, *stays, 10);
    ASSERT_TRUE(stays->Save(file).ok());
    const auto goes = Take(engine->Restore(file));
    EXPECT_EQ(RowsOf(*engine, *goes), RowsOf(*engine, *stays));
    EXPECT_EQ(BlocksOf(*engine, *goes), BlocksOf(*engine, *stays));
    EXPECT_EQ(Decode(*engine, *goes, 10), Decode(*engine, *stays, 10));
    const auto refused = (engine == own.get() ? *shared : *own).Restore(file);
    ASSERT_FALSE(refused.ok());
    EXPECT_THAT(refused.status().message(), HasSubstr("in other streams than those here"));
  }
  // The last one stood in one table: files of other numbers are refused.
  const CheckedFile whole = std::move(*CheckedFile::Open(
      std::move(*InputFile::Open(file)), {.magic = "omnikvcx", .version = 1, .name = "it"}));
  const nlohmann::json text = nlohmann::json::parse(whole.text());
  ASSERT_EQ(text["fewer_rows"].size(), 8u);
  std::string data(whole.size(), '\0');
  ASSERT_TRUE(whole.Read(0, data.size(), data.data()).ok());
  using Json = nlohmann::json;
  const struct {
    Json fewer;
    const char* why;
  } kCases[] = {
      {{0, 0, 0}, "rows of 3 layers are lost, expected 8"},
      {{0, -1, 0, 0, 0, 0, 0, 0}, "layer 1 has -1 rows fewer"},
      {{0, 0, 0, 0, 0, 0, 0, 394}, "layer 7 has 394 rows fewer than the 393"},
      {{0, 0, 0, 0, 0, 0, 0, 1}, "its K/V take"},
      {{0, "x"}, "'fewer_rows' has what is no number"},
      {7, "'fewer_rows' is missing or of another type"},
  };
  for (const auto& c : kCases) {
    Json changed = text;
    changed["fewer_rows"] = c.fewer;
    const auto writer = std::move(*CheckedFileWriter::Create(
        file, {.magic = "omnikvcx", .version = 1, .name = "it"}, changed.dump()));
    writer->Write(data.data(), data.size());
    ASSERT_TRUE(writer->Commit().ok());
    const auto refused = shared->Restore(file);
    ASSERT_FALSE(refused.ok()) << c.why;
    EXPECT_EQ(refused.status().code(), StatusCode::kCorrupt);
    EXPECT_THAT(refused.status().message(), HasSubstr(c.why));
  }
  {
    const auto snapkv = Take(shared->NewSession({.name = "snapkv"}));
    ASSERT_TRUE(snapkv->Prompt(Numbers(60, 1)).ok());
    ASSERT_TRUE(snapkv->Save(file).ok());
  }
  const CheckedFile of_snapkv = std::move(*CheckedFile::Open(
      std::move(*InputFile::Open(file)), {.magic = "omnikvcx", .version = 1, .name = "it"}));
  Json changed = Json::parse(of_snapkv.text());
  changed["fewer_rows"] = {0, 0, 0, 0, 0, 0, 0, 1};
  const auto writer = std::move(*CheckedFileWriter::Create(
      file, {.magic = "omnikvcx", .version = 1, .name = "it"}, changed.dump()));
  ASSERT_TRUE(writer->Commit().ok());
  const auto refused = shared->Restore(file);
  ASSERT_FALSE(refused.ok());
  EXPECT_THAT(refused.status().message(), HasSubstr("which policy snapkv never keeps"));
  fs::remove(file);
}

INSTANTIATE_TEST_SUITE_P(Devices, LayerRows, testing::Values("ref", "cpu", "cuda"), NameOf);

}  // namespace
}  // namespace omnikv::layer_rows_test
