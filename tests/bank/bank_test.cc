#include "bank/bank.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <set>

#include "backend/ref/ref_backend.h"
#include "bank/noise_rows.h"
#include "bank/set_simulation.h"

namespace omnikv::bank_test {
namespace {

using ::testing::HasSubstr;

BankConfig SmallConfig() {
  BankConfig config;
  config.layers = {{.n_kv_heads = 2, .dk = 8, .dv = 8}, {.n_kv_heads = 1, .dk = 16, .dv = 4}};
  config.dtype = DType::kBF16;
  config.block_tokens = 4;
  config.max_tokens = 32;
  config.pool_tokens = 64;
  config.max_seqs = 3;
  return config;
}

class BankTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto bank = Bank::Create(*backend_, SmallConfig());
    ASSERT_TRUE(bank.ok()) << bank.status().message();
    bank_ = std::move(*bank);
  }
  // Marks the row of token t of `seq` in both layers with `mark`; reads it back.
  void Write(int32_t seq, int64_t t, uint8_t mark) {
    for (int32_t layer = 0; layer < 2; ++layer) {
      const KvView view = bank_->View(layer);
      std::memset(view.k.Head(view.RowIndex(bank_->TableOffset(seq), t), 0), mark + layer,
                  static_cast<size_t>(view.k.row_bytes));
    }
  }
  uint8_t Read(int32_t seq, int64_t t) {
    const KvView view = bank_->View(1);
    const auto* row =
        reinterpret_cast<uint8_t*>(view.k.Head(view.RowIndex(bank_->TableOffset(seq), t), 0));
    for (int64_t i = 0; i < view.k.row_bytes; ++i) EXPECT_EQ(row[i], row[0]);
    return static_cast<uint8_t>(row[0] - 1);
  }

  std::unique_ptr<Backend> backend_ = MakeRefBackend();
  std::unique_ptr<Bank> bank_;
};

TEST_F(BankTest, AccountsBytesExactly) {
  // Layer 0: 2 heads × (8 + 8) × 2 bytes, layer 1: (16 + 4) × 2 bytes.
  EXPECT_EQ(Bank::BytesPerToken(bank_->config()), 64u + 40u);
  EXPECT_EQ(bank_->DeviceBytes(), 0u);
  const int32_t seq = *bank_->NewSequence();
  ASSERT_TRUE(bank_->Append(seq, 5).ok());
  EXPECT_EQ(bank_->DeviceBytes(), 2u * 4u * 104u);  // two blocks of four tokens
  bank_->Truncate(seq, 4);
  EXPECT_EQ(bank_->DeviceBytes(), 4u * 104u);
}

TEST_F(BankTest, GrowthKeepsRowsWhereTheyAre) {
  const int32_t seq = *bank_->NewSequence();
  ASSERT_TRUE(bank_->Append(seq, 3).ok());
  for (int64_t t = 0; t < 3; ++t) Write(seq, t, static_cast<uint8_t>(10 + t));
  const std::byte* row =
      bank_->View(0).k.Head(bank_->View(0).RowIndex(bank_->TableOffset(seq), 1), 0);
  ASSERT_TRUE(bank_->Append(seq, 20).ok());
  EXPECT_EQ(bank_->View(0).k.Head(bank_->View(0).RowIndex(bank_->TableOffset(seq), 1), 0), row);
  for (int64_t t = 0; t < 3; ++t) EXPECT_EQ(Read(seq, t), 10 + t);
}

TEST_F(BankTest, ForksShareBlocksAndPartWhenWritten) {
  const int32_t a = *bank_->NewSequence();
  ASSERT_TRUE(bank_->Append(a, 6).ok());
  for (int64_t t = 0; t < 6; ++t) Write(a, t, static_cast<uint8_t>(20 + t));
  const size_t before = bank_->DeviceBytes();
  const int32_t b = *bank_->Fork(a);
  EXPECT_EQ(bank_->DeviceBytes(), before);
  ASSERT_TRUE(bank_->Append(b, 1).ok());
  Write(b, 6, 99);
  ASSERT_TRUE(bank_->Append(a, 1).ok());
  Write(a, 6, 55);
  for (int64_t t = 0; t < 6; ++t) {
    EXPECT_EQ(Read(a, t), 20 + t);
    EXPECT_EQ(Read(b, t), 20 + t);
  }
  EXPECT_EQ(Read(a, 6), 55);
  EXPECT_EQ(Read(b, 6), 99);
}

// What a fork writes to a layer of the host, in place or by way of a stage, is the fork's alone.
TEST_F(BankTest, ForksPartOnTheHostToo) {
  BankConfig config = SmallConfig();
  config.layers[1].streams[0].tier = TierKind::kHost;
  bank_ = *Bank::Create(*backend_, config);
  const int32_t a = *bank_->NewSequence();
  ASSERT_TRUE(bank_->Append(a, 6).ok());
  for (int64_t t = 0; t < 6; ++t) Write(a, t, static_cast<uint8_t>(20 + t));
  const size_t before = bank_->HostBytes();
  const int32_t b = *bank_->Fork(a);
  EXPECT_EQ(bank_->HostBytes(), before);
  const int64_t first = 5;  // of the rows that the fork has anew, in a block that it shares
  bank_->Truncate(b, first);
  ASSERT_TRUE(bank_->Append(b, 4).ok());
  EXPECT_EQ(bank_->HostBytes(), 2 * before);  // a copy of the second block, and a third
  bank_->StageIn(1, b, first);
  const KvView stage = bank_->StageView(1);
  for (int64_t t = 0; t < 9; ++t) {
    auto* row =
        reinterpret_cast<uint8_t*>(stage.k.Head(stage.RowIndex(bank_->TableOffset(b), t), 0));
    if (t < first) {
      EXPECT_EQ(row[0], 20 + t + 1) << "the past";
    } else {
      std::memset(row, static_cast<int>(40 + t + 1), static_cast<size_t>(stage.k.row_bytes));
    }
  }
  bank_->StageOut(1, b, first, 9);
  for (int64_t t = 0; t < 9; ++t) {
    EXPECT_EQ(Read(b, t), t < first ? 20 + t : 40 + t);
  }
  for (int64_t t = 0; t < 6; ++t) EXPECT_EQ(Read(a, t), 20 + t);
  bank_->Free(a);  // what was shared stays
  for (int64_t t = 0; t < first; ++t) EXPECT_EQ(Read(b, t), 20 + t);
}

TEST_F(BankTest, DropsWholeBlocksAndKeepsWhatForksShare) {
  const int32_t seq = *bank_->NewSequence();
  const int64_t bt = bank_->config().block_tokens;
  ASSERT_TRUE(bank_->Append(seq, 4 * bt).ok());
  const size_t block = bank_->DeviceBytes() / 4;
  bank_->Drop(seq, 0, 1, 3 * bt - 1);  // only the second block lies whole in it
  EXPECT_EQ(bank_->DeviceBytes(), 3 * block);
  const int32_t fork = *bank_->Fork(seq);
  bank_->Drop(seq, 0, 1, 3 * bt);
  EXPECT_EQ(bank_->DeviceBytes(), 3 * block);  // the fork still has it
  bank_->Drop(fork, 0, 1, 3 * bt);
  EXPECT_EQ(bank_->DeviceBytes(), 2 * block);
  ASSERT_TRUE(bank_->Append(seq, bt).ok());
  EXPECT_EQ(bank_->DeviceBytes(), 3 * block);
  // Kernels may load what lies in a hole: their table has blocks that are there.
  const int32_t other = *bank_->Fork(seq);
  const KvView view = bank_->View(0);
  const int32_t from = bank_->TableOffset(other);
  for (int32_t i = 0; i < 5; ++i) EXPECT_GE(view.block_table[from + i], 0) << i;
  bank_->Free(other);
  bank_->Truncate(seq, bt + 1);  // into the hole
  EXPECT_EQ(bank_->Length(seq), bt + 1);
  bank_->Free(seq);
  bank_->Free(fork);
  EXPECT_EQ(bank_->DeviceBytes(), 0u);
}

TEST_F(BankTest, RefusesWhatDoesNotFitAndChangesNothing) {
  const int32_t a = *bank_->NewSequence();
  const Status too_long = bank_->Append(a, 33);
  EXPECT_EQ(too_long.code(), StatusCode::kResourceExhausted);
  EXPECT_THAT(too_long.message(), HasSubstr("context of 32"));
  const int32_t b = *bank_->NewSequence();
  const int32_t c = *bank_->NewSequence();
  ASSERT_TRUE(bank_->Append(a, 32).ok());
  ASSERT_TRUE(bank_->Append(b, 30).ok());
  const Status pool = bank_->Append(c, 1);
  EXPECT_EQ(pool.code(), StatusCode::kResourceExhausted);
  EXPECT_THAT(pool.message(), HasSubstr("0 of 16 blocks of 4 tokens are free"));
  EXPECT_EQ(bank_->Length(c), 0);
  EXPECT_FALSE(bank_->NewSequence().ok());
  bank_->Free(a);
  EXPECT_TRUE(bank_->Append(c, 32).ok());
}

TEST_F(BankTest, NoiseIsReproducibleAndVaries) {
  const int32_t a = *bank_->NewSequence();
  ASSERT_TRUE(bank_->Append(a, 8).ok());
  bank_->FillWithNoise(a);
  const KvView view = bank_->View(0);
  const auto row = [&](int64_t t) {
    const std::byte* r = view.k.Head(view.RowIndex(bank_->TableOffset(a), t), 0);
    return std::vector<std::byte>(r, r + view.k.row_bytes);
  };
  const auto first = row(0);
  EXPECT_NE(first, row(1));
  bank_->FillWithNoise(a);
  EXPECT_EQ(first, row(0));
}

// A pattern is made once, of rows that differ, and goes on from its end to its begin.
TEST(NoiseRowsTest, APatternRepeats) {
  NoiseRows rows;
  const NoiseRows::Kind kind{.row_bytes = 4, .block_rows = 3};
  int64_t made = 0;
  const auto at = [&](int64_t row) {
    return rows.Piece(kind, row, [&](std::byte* to, Noise& noise) {
      std::memcpy(to, noise.Draw(1), 4);
      ++made;
    });
  };
  at(0);
  const int64_t period = made;
  EXPECT_GT(period, 1000);
  std::set<float> values;
  for (int64_t r = 0; r < period; ++r) {
    float value = 0;
    std::memcpy(&value, at(r), 4);
    EXPECT_LT(std::abs(value), 1);
    values.insert(value);
  }
  EXPECT_GT(std::ssize(values), period - 10);
  EXPECT_EQ(std::memcmp(at(period - 1) + 4, at(period), 8), 0);
  EXPECT_EQ(made, period);
}

// States of layers 0 and 1 in units of half a block, and of layer 0 in units of two blocks.
class StatesTest : public BankTest {
 protected:
  void SetUp() override {
    BankTest::SetUp();
    for (const StateSpec& spec : specs_) {
      StateStreams opened = Take(bank_->OpenStates({spec}));
      streams_.push_back(opened.front());
    }
  }
  static StateStreams Take(Result<StateStreams> streams) {
    EXPECT_TRUE(streams.ok()) << streams.status().message();
    return std::move(*streams);
  }
  float& At(size_t stream, int32_t seq, int32_t unit) {
    return streams_[stream]->view.Row<float>(bank_->TableOffset(seq), unit)[1];
  }

  const std::vector<StateSpec> specs_ = {{.layer = 0, .unit = 2, .bytes_per_unit = 8, .name = "a"},
                                         {.layer = 1, .unit = 2, .bytes_per_unit = 12, .name = "a"},
                                         {.layer = 0, .unit = 8, .bytes_per_unit = 8, .name = "a"}};
  StateStreams streams_;
};

TEST_F(StatesTest, HaveTheBlocksOfTheirLayers) {
  // 16 blocks of two units each, and of one unit each.
  EXPECT_EQ(bank_->config().StateBytes(specs_[0]), 16u * 2u * 8u);
  EXPECT_EQ(bank_->config().StateBytes(specs_[2]), 16u * 8u);
  EXPECT_EQ(bank_->StateBytes(), 16u * (16u + 24u + 8u));
  const int32_t a = *bank_->NewSequence();
  const int32_t b = *bank_->NewSequence();
  for (int64_t i = 0; i < 10; ++i) {  // by turns, so that their blocks lie among each other
    ASSERT_TRUE(bank_->Append(a, 2).ok());
    ASSERT_TRUE(bank_->Append(b, 2).ok());
  }
  EXPECT_EQ(bank_->DeviceBytes(), 10u * (4u * 104u + 16u + 24u + 8u));
  EXPECT_EQ(bank_->DeviceBytes(a), 5u * 4u * 104u);
  EXPECT_EQ(bank_->DeviceBytes(a, {streams_[1]}), 5u * (4u * 104u + 24u));
  for (const int32_t seq : {a, b}) {
    for (size_t s = 0; s < 3; ++s) {
      for (int32_t u = 0; u < (s == 2 ? 3 : 10); ++u)
        At(s, seq, u) = static_cast<float>(100 * seq + u);
    }
  }
  ASSERT_TRUE(bank_->Append(a, 12).ok());  // grows in place
  for (const int32_t seq : {a, b}) {
    for (size_t s = 0; s < 3; ++s) {
      for (int32_t u = 0; u < (s == 2 ? 3 : 10); ++u) EXPECT_EQ(At(s, seq, u), 100 * seq + u);
    }
  }
}

// What a fork writes for the units of its new tokens is the fork's alone; other units are shared.
TEST_F(StatesTest, ForksShareThemAndPartWhenWritten) {
  for (const int64_t length : {13, 12, 16}) {
    SCOPED_TRACE(length);
    const int32_t a = *bank_->NewSequence();
    ASSERT_TRUE(bank_->Append(a, length).ok());
    const auto last = static_cast<int32_t>(length - 1);
    for (size_t s = 0; s < 3; ++s) {
      for (int32_t u = 0; u <= last / specs_[s].unit; ++u) At(s, a, u) = static_cast<float>(u + 1);
    }
    const int32_t b = *bank_->Fork(a);
    for (const int32_t writer : {b, a}) {
      ASSERT_TRUE(bank_->Append(writer, 1).ok());
      for (size_t s = 0; s < 3; ++s) {
        const auto u = static_cast<int32_t>(length) / specs_[s].unit;  // the new token's
        if (length % specs_[s].unit != 0) {
          EXPECT_EQ(At(s, writer, u), u + 1) << "a copy, stream " << s;
        }
        At(s, writer, u) = static_cast<float>(50 + writer);
      }
    }
    for (size_t s = 0; s < 3; ++s) {
      const auto u = static_cast<int32_t>(length) / specs_[s].unit;
      for (const int32_t seq : {a, b}) EXPECT_EQ(At(s, seq, u), 50 + seq) << "stream " << s;
      for (int32_t before = 0; before < u; ++before) {
        EXPECT_EQ(At(s, a, before), before + 1);
        EXPECT_EQ(At(s, b, before), before + 1);
      }
    }
    EXPECT_EQ(&At(0, a, 0), &At(0, b, 0));
    bank_->Free(a);
    bank_->Free(b);
  }
}

// A fork that finds no block for the states of a unit is as it was, and goes on once there is one.
TEST_F(StatesTest, AUnitOfSeveralBlocksNeedsABlockToPart) {
  const int32_t a = *bank_->NewSequence();
  ASSERT_TRUE(bank_->Append(a, 29).ok());
  At(2, a, 3) = 7;
  Write(a, 28, 30);
  const int32_t b = *bank_->Fork(a);
  const int32_t c = *bank_->NewSequence();
  ASSERT_TRUE(bank_->Append(c, 28).ok());  // one block is free, of the two that parting takes
  ASSERT_FALSE(bank_->Append(b, 1).ok());
  EXPECT_EQ(bank_->Length(b), 29);
  EXPECT_EQ(At(2, b, 3), 7);
  EXPECT_EQ(Read(b, 28), 30);
  bank_->Free(c);
  ASSERT_TRUE(bank_->Append(b, 1).ok());
  EXPECT_EQ(At(2, b, 3), 7);
  At(2, b, 3) = 8;
  EXPECT_EQ(At(2, a, 3), 7);
}

TEST_F(StatesTest, AreThoseOfTheTokensThatFollowAfterACutOrInAFreedPlace) {
  const int32_t a = *bank_->NewSequence();
  ASSERT_TRUE(bank_->Append(a, 12).ok());
  for (int32_t u = 0; u < 6; ++u) At(0, a, u) = static_cast<float>(u + 1);
  bank_->Truncate(a, 5);
  ASSERT_TRUE(bank_->Append(a, 1).ok());
  for (int32_t u = 0; u < 3; ++u) EXPECT_EQ(At(0, a, u), u + 1);
  float* const first = &At(0, a, 0);
  bank_->Free(a);
  const int32_t b = *bank_->NewSequence();
  ASSERT_TRUE(bank_->Append(b, 3).ok());
  EXPECT_EQ(&At(0, b, 0), first);
}

// Who opens what is open shares it; it goes with the last one.
TEST_F(StatesTest, StreamsAreSharedByTheirName) {
  const size_t all = bank_->StateBytes();
  const StateSpec other = {.layer = 0, .unit = 2, .bytes_per_unit = 8, .name = "b"};
  EXPECT_EQ(bank_->BytesToOpen({specs_[0], other}), 16u * 16u);
  StateStreams more = Take(bank_->OpenStates({specs_[0], other, specs_[1]}));
  EXPECT_EQ(more[0], streams_[0]);
  EXPECT_EQ(more[2], streams_[1]);
  EXPECT_NE(more[1]->view, streams_[0]->view);
  EXPECT_EQ(bank_->StateBytes(), all + 16u * 16u);
  streams_.clear();
  EXPECT_EQ(bank_->StateBytes(), 16u * (16u + 16u + 24u));
  more.clear();
  EXPECT_EQ(bank_->StateBytes(), 0u);
  const int32_t a = *bank_->NewSequence();
  ASSERT_TRUE(bank_->Append(a, 1).ok());
  EXPECT_EQ(bank_->DeviceBytes(), 4u * 104u);
  streams_ = Take(bank_->OpenStates(specs_));
  EXPECT_EQ(At(0, a, 0), 0);  // zeroed
}

TEST_F(StatesTest, NoiseFillsThemToo) {
  const int32_t a = *bank_->NewSequence();
  ASSERT_TRUE(bank_->Append(a, 20).ok());
  bank_->FillWithNoise(a);
  for (size_t s = 0; s < 3; ++s) {
    for (int32_t u = 0; u < 20 / specs_[s].unit; ++u) {
      EXPECT_GT(std::abs(At(s, a, u)), 0);
      EXPECT_LT(std::abs(At(s, a, u)), 1);
      EXPECT_TRUE(u == 0 || At(s, a, u) != At(s, a, u - 1));
      Bf16 halves[2];  // numbers as well
      std::memcpy(halves, &At(s, a, u), sizeof(halves));
      for (const Bf16 half : halves) EXPECT_LE(std::abs(F32FromBf16(half)), 1);
    }
  }
}

// A stage keeps what it has, of one layer of one sequence, until those tokens may change.
TEST_F(BankTest, StagesAreBroughtWhatTheyLack) {
  BankConfig config = SmallConfig();
  config.layers.assign(4, {.n_kv_heads = 1, .dk = 8, .dv = 8});
  for (const size_t layer : {1, 2, 3}) config.layers[layer].streams[0].tier = TierKind::kHost;
  auto made = Bank::Create(*backend_, config);
  ASSERT_TRUE(made.ok()) << made.status().message();
  Bank& bank = **made;
  EXPECT_EQ(Bank::StageBytes(config), 2u * 32u * 32u) << "two stages, of one sequence";
  const auto row = [&](const KvView& view, int32_t seq, int64_t t) -> uint8_t& {
    return *reinterpret_cast<uint8_t*>(view.k.Head(view.RowIndex(bank.TableOffset(seq), t), 0));
  };
  size_t before = 0;
  const auto brought = [&] {  // rows, since the last call
    const size_t rows = (bank.BytesStaged() - before) / 32;
    before = bank.BytesStaged();
    return rows;
  };
  const int32_t a = *bank.NewSequence();
  ASSERT_TRUE(bank.Append(a, 6).ok());
  for (int64_t t = 0; t < 6; ++t) row(bank.View(1), a, t) = static_cast<uint8_t>(10 + t);
  bank.StageIn(1, a, 6);
  EXPECT_EQ(brought(), 6u);
  for (int64_t t = 0; t < 6; ++t) EXPECT_EQ(row(bank.StageView(1), a, t), 10 + t);
  bank.StageIn(1, a, 6);
  EXPECT_EQ(brought(), 0u);
  // What a step writes to a stage goes home, and need not come again.
  ASSERT_TRUE(bank.Append(a, 1).ok());
  row(bank.StageView(1), a, 6) = 77;
  bank.StageOut(1, a, 6, 7);
  EXPECT_EQ(row(bank.View(1), a, 6), 77);
  bank.StageIn(1, a, 7);
  bank.StageIn(2, a, 7);  // in the other stage
  EXPECT_EQ(brought(), 7u);
  bank.StageIn(3, a, 7);  // in the first's
  EXPECT_EQ(brought(), 7u);
  bank.StageIn(1, a, 7);
  EXPECT_EQ(brought(), 7u);
  bank.Truncate(a, 5);
  ASSERT_TRUE(bank.Append(a, 3).ok());
  bank.StageIn(1, a, 8);
  EXPECT_EQ(brought(), 3u);
  // A fork parts in the block that both hold: its rows have another place from then on.
  ASSERT_TRUE(bank.Append(a, 2).ok());
  bank.StageIn(1, a, 10);
  EXPECT_EQ(brought(), 2u);
  const int32_t fork = *bank.Fork(a);
  ASSERT_TRUE(bank.Append(a, 1).ok());
  bank.StageIn(1, a, 10);
  EXPECT_EQ(brought(), 2u);
  bank.Free(fork);
  bank.Free(a);
  const int32_t again = *bank.NewSequence();
  EXPECT_EQ(again, a);
  ASSERT_TRUE(bank.Append(again, 4).ok());
  bank.StageIn(1, again, 4);
  EXPECT_EQ(brought(), 4u);
}

// What bench --hit-rate promises: that share of hits, in every step.
TEST(SimulatedHits, AreTheShareThatIsAskedFor) {
  constexpr int32_t kRows = 2048;
  for (const float share : {0.0f, 0.3f, 0.6f, 0.9f, 1.0f}) {
    for (uint32_t step = 1; step <= 20; ++step) {
      int32_t hits = 0;
      for (int32_t i = 0; i < kRows; ++i) hits += IsSimulatedHit(share, step, i) ? 1 : 0;
      EXPECT_NEAR(static_cast<float>(hits) / kRows, share, 0.05) << "step " << step;
    }
  }
}

// A set keeps what it has room for: with as many slots as a choice, what is chosen anew goes.
TEST(SetSimulation, MissesWhatItHadNoRoomFor) {
  const auto reference = MakeRefBackend();
  for (const auto& [slots, missed] :
       {std::pair<int32_t, uint64_t>{5, 12}, {9, 9}, {10, 8}, {20, 8}}) {
    SetSimulation set(*reference, {.max_tokens = 5}, 100, slots);
    for (int32_t step = 0; step < 3; ++step) {
      const int32_t end = 61 + step;  // the step's own row is past it
      set.Step({.index = step == 1 ? std::vector<int32_t>{2, 6, 8, 41}
                                   : std::vector<int32_t>{1, 5, 9, 40},
                .bounds = {end - 1, end},
                .kv_len = end});
    }
    EXPECT_EQ(set.Count().selected, 12u);  // no step's own row is counted
    EXPECT_EQ(set.Count().missed, missed) << slots << " slots";
  }
}

// Of what no step selects, that comes first which scores highest, and goes last.
TEST(SetSimulation, RowsThatScoreHighComeAheadAndStay) {
  const auto reference = MakeRefBackend();
  std::vector<float> scores(60, 0.001f);
  scores[7] = 0.5f;
  scores[1] = 0.2f;
  scores[2] = 0.1f;
  for (const bool ahead : {false, true}) {
    SetSimulation set(*reference, {.max_tokens = 3, .max_ahead = ahead ? 1 : 0}, 100, 8);
    const auto step = [&](std::vector<int32_t> index, int32_t end) {
      set.Step({.index = std::move(index),
                .bounds = {end - 1, end},
                .kv_len = end,
                .scores = {scores.begin(), scores.begin() + end - 1}});
    };
    step({1, 3}, 21);  // 20 is its own row, and 7 comes ahead
    step({4, 5}, 22);  // and 2
    EXPECT_EQ(set.Count().missed, 4u);
    step({2, 7}, 23);  // all eight slots have tokens: one goes for 22
    EXPECT_EQ(set.Count().missed, ahead ? 4u : 6u);
    step({1, 7}, 24);  // which scored high, and was read longest ago
    EXPECT_EQ(set.Count().missed, ahead ? 4u : 7u);
    EXPECT_EQ(set.Count().selected, 8u);
    EXPECT_EQ(set.Count().ahead, ahead ? 4u : 0u);
  }
}

TEST_F(BankTest, RefusesWhatItCannotNumber) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  for (const int64_t tokens : {int64_t{3} << 30, kMost}) {
    BankConfig config = SmallConfig();
    config.max_tokens = tokens;
    EXPECT_EQ(Bank::Create(*backend_, config).status().code(), StatusCode::kResourceExhausted);
    config = SmallConfig();
    config.pool_tokens = tokens;
    EXPECT_EQ(Bank::Create(*backend_, config).status().code(), StatusCode::kResourceExhausted);
  }
  const int32_t seq = *bank_->NewSequence();
  ASSERT_TRUE(bank_->Append(seq, 5).ok());
  EXPECT_EQ(bank_->Append(seq, kMost).code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(bank_->Length(seq), 5);
}

}  // namespace
}  // namespace omnikv::bank_test
