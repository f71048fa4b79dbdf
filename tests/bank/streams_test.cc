// Layers of several streams: head classes in tables of their own, and K and V apart.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <utility>

#include "backend/kv_format.h"
#include "backend/ref/ref_backend.h"
#include "bank/bank.h"

namespace omnikv::streams_test {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kBlock = 4;

BankConfig ConfigOf(std::vector<LayerSpec> layers, std::vector<TableSpec> tables) {
  return {.layers = std::move(layers),
          .tables = std::move(tables),
          .dtype = DType::kBF16,
          .block_tokens = kBlock,
          .max_tokens = 32,
          .pool_tokens = 64,
          .max_seqs = 3};
}

class StreamsTest : public ::testing::Test {
 protected:
  void Open(const BankConfig& config) {
    auto bank = Bank::Create(*backend_, config);
    ASSERT_TRUE(bank.ok()) << bank.status().message();
    bank_ = std::move(*bank);
  }
  // The bytes of one head of a plane in the row of token t.
  static std::byte* At(const KvView& view, const KvPlane& plane, int32_t off, int64_t t,
                       int32_t head) {
    return plane.Head(view.RowIndex(off, t), head);
  }
  int32_t TableOf(int32_t layer, int32_t head_class) const {
    const LayerSpec& spec = bank_->config().layers[static_cast<size_t>(layer)];
    return spec.streams[spec.HeadClasses()[static_cast<size_t>(head_class)].k].table;
  }
  // Calls each(bytes, n, mark) for K and V of each head of token t, in each class of each layer, if
  // the sequence holds it; marks differ.
  template <typename Each>
  void ForHeads(int32_t seq, int64_t t, const Each& each) {
    int mark = static_cast<int>(t);
    for (int32_t layer = 0; layer < bank_->n_layers(); ++layer) {
      for (int32_t c = 0; c < bank_->HeadClasses(layer); ++c) {
        const KvView view = bank_->View(layer, c);
        const int32_t off = bank_->TableOffset(seq);
        const bool held = bank_->Holds(seq, TableOf(layer, c), t, t + 1);
        for (int32_t head = 0; head < view.n_kv_heads; ++head) {
          for (const auto& [plane, d] : {std::pair{view.k, view.dk}, {view.v, view.dv}}) {
            mark += 7;
            if (!held) continue;
            const auto bytes = static_cast<size_t>(KvHeadBytes(plane.dtype, d));
            each(At(view, plane, off, t, head), bytes, mark);
            if (!InBlocks(plane.dtype)) continue;
            each(At(view, plane, off, t, head) + plane.ToScales(head),
                 static_cast<size_t>(KvScaleBytes(plane.dtype, d)), mark + 3);
          }
        }
      }
    }
  }
  void Write(int32_t seq, int64_t begin, int64_t end, int add = 0) {
    for (int64_t t = begin; t < end; ++t) {
      ForHeads(seq, t, [&](std::byte* to, size_t n, int mark) { std::memset(to, mark + add, n); });
    }
  }
  void Expect(int32_t seq, int64_t begin, int64_t end, int add = 0) {
    for (int64_t t = begin; t < end; ++t) {
      ForHeads(seq, t, [&](const std::byte* at, size_t n, int mark) {
        for (size_t i = 0; i < n; ++i) {
          EXPECT_EQ(static_cast<uint8_t>(at[i]), static_cast<uint8_t>(mark + add))
              << "token " << t << " mark " << mark;
        }
      });
    }
  }
  std::vector<std::byte> Exported(int32_t seq) const {
    std::vector<std::byte> bytes;
    bank_->Export(seq, {}, [&](const void* data, size_t n) {
      const auto* from = static_cast<const std::byte*>(data);
      bytes.insert(bytes.end(), from, from + n);
    });
    return bytes;
  }
  // A new sequence with what is exported of `seq`.
  int32_t Copy(int32_t seq) { return Imported(bank_->Image(seq), Exported(seq)); }
  int32_t Imported(const SequenceImage& image, const std::vector<std::byte>& bytes) {
    EXPECT_TRUE(CheckImage(bank_->config(), image).ok());
    const int32_t copy = *bank_->NewSequence();
    size_t at = 0;
    const Status read = bank_->Import(copy, image, {}, bytes.size(), [&](void* to, size_t n) {
      std::memcpy(to, bytes.data() + at, n);
      at += n;
      return Status();
    });
    EXPECT_TRUE(read.ok()) << read.message();
    return copy;
  }

  // The same in ranges of tokens, which end at `ends`, by pieces of `piece` bytes.
  int32_t CopyInRanges(int32_t seq, const std::vector<int64_t>& ends, size_t piece) {
    const SequenceImage image = bank_->Image(seq);
    const int32_t copy = *bank_->NewSequence();
    EXPECT_TRUE(bank_->Place(copy, image).ok());
    int64_t begin = 0;
    for (const int64_t end : ends) {
      const RowRange range{.begin = begin, .end = end, .others = end == image.length};
      OutgoingRows out = bank_->BeginExport(seq, range);
      IncomingRows in = bank_->BeginImport(copy, range);
      EXPECT_EQ(out.left(), in.left());
      EXPECT_EQ(out.left(), BytesOf(bank_->config(), image, range));
      std::vector<std::byte> bytes(piece);
      while (out.left() > 0) {
        const size_t n = out.Copy(bytes);
        in.Take({bytes.data(), n});
      }
      EXPECT_EQ(in.left(), 0u);
      begin = end;
    }
    return copy;
  }

  std::unique_ptr<Backend> backend_ = MakeRefBackend();
  std::unique_ptr<Bank> bank_;
};

// Heads 0 and 2 keep everything, head 1 the last tokens; the second layer has one stream.
BankConfig TwoClasses() {
  return ConfigOf({{.n_kv_heads = 3,
                    .dk = 8,
                    .dv = 8,
                    .streams = {{.heads = {0, 2}}, {.heads = {1}, .table = 1}}},
                   {.n_kv_heads = 1, .dk = 8, .dv = 4}},
                  {TableSpec{}, {.max_held = 8}});
}

TEST_F(StreamsTest, LeaveAndComeBackInRanges) {
  Open(TwoClasses());
  const int32_t a = *bank_->NewSequence();
  ASSERT_TRUE(bank_->Append(a, 14).ok());
  Write(a, 0, 14);
  EXPECT_TRUE(IsWhole(bank_->config(), bank_->Image(a)));
  EXPECT_TRUE(WholeImage(bank_->config(), 14) == bank_->Image(a));
  bank_->Drop(a, 1, 0, 9);  // which the last range has, with the other rows of that table
  EXPECT_TRUE(IsWhole(bank_->config(), bank_->Image(a)));
  for (const size_t piece : {size_t{1}, size_t{100}, size_t{10'000}}) {
    for (const std::vector<int64_t>& ends :
         std::vector<std::vector<int64_t>>{{14}, {4, 8, 14}, {12, 14}}) {
      const int32_t copy = CopyInRanges(a, ends, piece);
      EXPECT_TRUE(bank_->Image(copy) == bank_->Image(a));
      Expect(copy, 8, 14);
      bank_->Free(copy);
    }
  }
  bank_->Drop(a, 0, 0, 4);
  EXPECT_FALSE(IsWhole(bank_->config(), bank_->Image(a)));
}

TEST_F(StreamsTest, HeadClassesHaveTablesOfTheirOwn) {
  Open(TwoClasses());
  EXPECT_EQ(bank_->config().RowBytes(0), 96u);  // 3 heads × 16 values
  EXPECT_EQ(Bank::BytesPerToken(bank_->config()), 96u + 24u);
  ASSERT_EQ(bank_->HeadClasses(0), 2);
  EXPECT_EQ(bank_->HeadClasses(1), 1);
  EXPECT_EQ(bank_->View(0, 0).n_kv_heads, 2);
  EXPECT_EQ(bank_->View(0, 1).n_kv_heads, 1);
  EXPECT_EQ(bank_->View(0, 1).TokenBytes(), 32);
  EXPECT_NE(bank_->View(0, 0).block_table, bank_->View(0, 1).block_table);
  EXPECT_EQ(bank_->View(0, 0).block_table, bank_->View(1).block_table);

  const int32_t a = *bank_->NewSequence();
  ASSERT_TRUE(bank_->Append(a, 14).ok());
  Write(a, 0, 14);
  Expect(a, 0, 14);
  const auto rows = static_cast<size_t>(kBlock);
  EXPECT_EQ(bank_->DeviceBytes(), 4 * rows * 120);
  bank_->Drop(a, 1, 0, 9);  // two blocks of head 1 alone
  EXPECT_EQ(bank_->DeviceBytes(), rows * (4 * 88 + 2 * 32));
  EXPECT_EQ(bank_->DeviceBytes(a), bank_->DeviceBytes());
  EXPECT_TRUE(bank_->Holds(a, 0, 0, 14));
  EXPECT_FALSE(bank_->Holds(a, 1, 0, 14));
  EXPECT_TRUE(bank_->Holds(a, 1, 8, 14));

  // A fork shares what is there, and parts in the blocks of both tables.
  const int32_t b = *bank_->Fork(a);
  ASSERT_TRUE(bank_->Append(b, 3).ok());
  EXPECT_EQ(bank_->DeviceBytes(), rows * (6 * 88 + 4 * 32));
  Expect(b, 0, 14);
  Write(b, 12, 17, 100);
  Expect(a, 0, 14);
  Expect(b, 0, 12);
  Expect(b, 12, 17, 100);

  const int32_t copy = Copy(b);
  Expect(copy, 0, 12);
  Expect(copy, 12, 17, 100);
  EXPECT_FALSE(bank_->Holds(copy, 1, 7, 17));
  EXPECT_EQ(bank_->DeviceBytes(copy), bank_->DeviceBytes(b));
  bank_->Free(b);
  bank_->Truncate(a, 9);
  EXPECT_EQ(bank_->DeviceBytes(a), rows * (3 * 88 + 1 * 32));
  ASSERT_TRUE(bank_->Append(a, 2).ok());
  Write(a, 9, 11, 50);
  Expect(a, 8, 9);
  Expect(a, 9, 11, 50);
  Expect(copy, 8, 12);
  bank_->Free(a);
  bank_->Free(copy);
  EXPECT_EQ(bank_->DeviceBytes(), 0u);
}

// A table of few blocks fills up first, and then nothing has changed.
TEST_F(StreamsTest, WhatOneTableHasNoRoomForNoneTakes) {
  BankConfig config = TwoClasses();
  config.tables[1].max_held = 4;
  config.max_seqs = 1;
  Open(config);
  EXPECT_EQ(Bank::ReservedBytes(config, TierKind::kDevice), 4u * (16u * 88u + 3u * 32u));
  const int32_t a = *bank_->NewSequence();
  ASSERT_TRUE(bank_->Append(a, 12).ok());
  const size_t before = bank_->DeviceBytes();
  EXPECT_FALSE(bank_->Append(a, 1).ok());
  EXPECT_EQ(bank_->DeviceBytes(), before);
  EXPECT_EQ(bank_->Length(a), 12);
  bank_->Drop(a, 1, 0, 4);
  EXPECT_TRUE(bank_->Append(a, 4).ok());
}

// Each head has a table; those of a layer draw on the same blocks.
BankConfig HeadsApart() {
  return ConfigOf(
      {{.n_kv_heads = 3, .dk = 8, .dv = 8, .streams = {{.heads_apart = true}}},
       {.n_kv_heads = 2, .dk = 8, .dv = 4, .streams = {{.table = 3, .heads_apart = true}}}},
      {TableSpec{}, {.shares = true}, {.shares = true}, {}, {.shares = true}});
}

TEST_F(StreamsTest, HeadsApartHaveRowsOfTheirOwn) {
  const BankConfig config = HeadsApart();
  Open(config);
  EXPECT_EQ(config.RowBytes(0), 96u);
  EXPECT_EQ(Bank::BytesPerToken(config), 96u + 48u);
  EXPECT_EQ(Bank::ReservedBytes(config, TierKind::kDevice), 64u * (96u + 48u));
  EXPECT_TRUE(config.Rows().heads_apart);
  EXPECT_FALSE(TwoClasses().Rows().heads_apart);
  EXPECT_EQ(config.Layout(), "0: kv of each head []@0;1: kv of each head []@3;");
  EXPECT_FALSE(config.layers[0].OneStream());
  ASSERT_EQ(bank_->HeadClasses(0), 3);
  EXPECT_EQ(bank_->HeadsOf(0, 2), std::vector<int32_t>{2});
  for (int32_t head = 0; head < 3; ++head) {
    const KvView view = bank_->View(0, head);
    EXPECT_EQ(view.n_kv_heads, 1);
    EXPECT_EQ(view.k.base, bank_->View(0).k.base);
    EXPECT_EQ(view.block_table, bank_->View(0).block_table + head * bank_->HeadTableStride());
  }
  const auto streams = *bank_->OpenStates({{.layer = 0, .bytes_per_unit = 4, .name = "positions"}});
  EXPECT_EQ(bank_->StateBytes(), 64u * 3u * 4u);
  const int32_t a = *bank_->NewSequence();
  ASSERT_TRUE(bank_->Append(a, 14).ok());
  Write(a, 0, 14);
  Expect(a, 0, 14);
  const auto block = static_cast<size_t>(kBlock) * 32;  // bytes of a head's
  const auto states = static_cast<size_t>(kBlock) * 4;
  EXPECT_EQ(bank_->DeviceBytes(a), 4 * 3 * block + 4 * 2 * block * 3 / 4);
  EXPECT_EQ(bank_->DeviceBytes(a, streams), bank_->DeviceBytes());

  // Heads keep different numbers of rows, and give their blocks back.
  bank_->Lose(a, 1, Bank::LoseRows::kInStep);
  bank_->Keep(a, 0, 13);
  bank_->Keep(a, 1, 3);
  bank_->Keep(a, 2, 6);
  EXPECT_EQ(bank_->DeviceBytes(a, streams), (4 + 1 + 2) * (block + states) + 4 * 2 * block * 3 / 4);
  EXPECT_EQ(bank_->DeviceBytes(), bank_->DeviceBytes(a, streams));
  EXPECT_EQ(bank_->LayerRows(a, 0), 13);
  EXPECT_EQ(bank_->LayerGone(a, 0), 1);
  EXPECT_EQ(bank_->Gone(a, 1), 11);
  EXPECT_EQ(bank_->LayerRows(a, 1), 14);
  EXPECT_EQ(bank_->LeastLength(a), 14);

  // A fork shares what is there, and parts in the blocks of every head, states and all.
  const int32_t b = *bank_->Fork(a);
  std::memset(streams[0]->view.base, 9, bank_->StateBytes());
  ASSERT_TRUE(bank_->Append(b, 1).ok());
  EXPECT_EQ(bank_->Rows(b, 1), 4);
  EXPECT_EQ(bank_->Rows(b, 2), 7);
  for (int32_t head = 0; head < 3; ++head) {
    SCOPED_TRACE(head);
    const KvView view = bank_->View(0, head);
    const int64_t last = bank_->Rows(a, head) - 1;
    EXPECT_NE(view.RowIndex(bank_->TableOffset(a), last),
              view.RowIndex(bank_->TableOffset(b), last));
    for (int64_t t = 0; t <= last; ++t) {
      EXPECT_EQ(std::memcmp(At(view, view.k, bank_->TableOffset(a), t, 0),
                            At(view, view.k, bank_->TableOffset(b), t, 0), 32),
                0);
      const auto row = static_cast<size_t>(view.RowIndex(bank_->TableOffset(b), t));
      EXPECT_EQ(streams[0]->view.base[4 * row], std::byte{9});
    }
  }
  const int32_t copy = Copy(b);
  EXPECT_EQ(bank_->Image(copy), bank_->Image(b));
  EXPECT_EQ(bank_->DeviceBytes(copy), bank_->DeviceBytes(b));
  for (int32_t head = 0; head < 3; ++head) {
    const KvView view = bank_->View(0, head);
    for (int64_t t = 0; t < bank_->Rows(b, head); ++t) {
      EXPECT_EQ(std::memcmp(At(view, view.k, bank_->TableOffset(copy), t, 0),
                            At(view, view.k, bank_->TableOffset(b), t, 0), 32),
                0);
    }
  }
  for (const int32_t seq : {a, b, copy}) bank_->Free(seq);
  EXPECT_EQ(bank_->DeviceBytes(), 0u);
}

// What a head gives back serves the other heads of its layer.
TEST_F(StreamsTest, HeadsApartDrawOnTheSameBlocks) {
  BankConfig config = HeadsApart();
  config.pool_tokens = 32;
  config.max_seqs = 2;
  Open(config);
  const int32_t a = *bank_->NewSequence();
  ASSERT_TRUE(bank_->Append(a, 24).ok());
  const int32_t b = *bank_->NewSequence();
  ASSERT_TRUE(bank_->Append(b, 8).ok());
  const size_t before = bank_->DeviceBytes();
  EXPECT_FALSE(bank_->Append(b, 1).ok());
  EXPECT_EQ(bank_->DeviceBytes(), before);
  for (const int32_t table : {0, 3, 4}) bank_->Keep(a, table, 4);
  ASSERT_TRUE(bank_->Append(b, 4).ok()) << "with blocks of head 0 for heads 1 and 2";
  Write(b, 0, 12);
  Expect(b, 0, 12);
}

// Heads of several layers may draw on the same blocks: then the layers lie in the same memory, and
// what one gives back serves the others.
TEST_F(StreamsTest, LayersOfHeadsApartMayShareTheirMemory) {
  const LayerSpec layer{.n_kv_heads = 2, .dk = 8, .dv = 8, .streams = {{.heads_apart = true}}};
  BankConfig config = ConfigOf({layer, layer, {.n_kv_heads = 1, .dk = 8, .dv = 4}},
                               {{.max_held = 4, .prompt_tokens = 24},
                                {.max_held = 4, .prompt_tokens = 24, .shares = true},
                                {.max_held = 4, .prompt_tokens = 24, .shares = true},
                                {.max_held = 4, .prompt_tokens = 24, .shares = true},
                                {}});
  config.layers[1].streams[0].table = 2;
  config.layers[2].streams[0].table = 4;
  config.max_seqs = 2;
  Open(config);
  // Each table has room for one sequence's prompt, and for what stays of another.
  constexpr size_t kBlocks = 4 * ((1 + 2) + 6);
  const auto block = static_cast<size_t>(kBlock) * 32;  // bytes of a head's
  EXPECT_EQ(config.PoolBlocks(3), static_cast<int64_t>(kBlocks));
  EXPECT_EQ(Bank::ReservedBytes(config, TierKind::kDevice), kBlocks * block + 64 * 24);
  EXPECT_EQ(bank_->View(0).k.base, bank_->View(1).k.base);
  EXPECT_NE(bank_->View(0).block_table, bank_->View(1).block_table);
  const auto streams = *bank_->OpenStates({{.layer = 0, .bytes_per_unit = 4, .name = "positions"}});
  EXPECT_EQ(bank_->StateBytes(), kBlocks * static_cast<size_t>(kBlock) * 4);

  const int32_t a = *bank_->NewSequence();
  ASSERT_TRUE(bank_->Append(a, 24).ok());
  Write(a, 0, 24);
  Expect(a, 0, 24);
  EXPECT_EQ(bank_->DeviceBytes(a), 6 * (4 * block + 4 * 24));
  EXPECT_EQ(bank_->DeviceBytes(a), bank_->DeviceBytes() - 24 * static_cast<size_t>(kBlock) * 4);
  EXPECT_EQ(bank_->DeviceBytes(a, streams), bank_->DeviceBytes());
  const int32_t b = *bank_->NewSequence();
  ASSERT_TRUE(bank_->Append(b, 12).ok());
  EXPECT_FALSE(bank_->Append(b, 12).ok()) << "a second prompt beside the first";
  for (const int32_t table : {0, 1, 2}) bank_->Keep(a, table, 1);
  bank_->Keep(a, 3, 13);
  EXPECT_EQ(bank_->LayerRows(a, 0), 1);
  EXPECT_EQ(bank_->LayerGone(a, 0), 23);
  EXPECT_EQ(bank_->LayerRows(a, 1), 13);
  EXPECT_EQ(bank_->LayerGone(a, 1), 11);
  ASSERT_TRUE(bank_->Append(b, 12).ok());
  Write(b, 0, 24, 100);
  Expect(b, 0, 24, 100);
  bank_->Free(b);
  const int32_t copy = Copy(a);
  EXPECT_EQ(bank_->Image(copy), bank_->Image(a));
  EXPECT_EQ(bank_->DeviceBytes(copy), bank_->DeviceBytes(a));
}

// K of a layer in the backend's memory, V in the host's.
LayerSpec Apart() {
  return {.n_kv_heads = 2,
          .dk = 8,
          .dv = 16,
          .streams = {{.planes = Planes::kK}, {.planes = Planes::kV, .tier = TierKind::kHost}}};
}

TEST_F(StreamsTest, KAndVLieApart) {
  Open(ConfigOf({{.n_kv_heads = 2, .dk = 8, .dv = 16}, Apart()}, {TableSpec{}}));
  EXPECT_FALSE(bank_->OnHost(0));
  EXPECT_TRUE(bank_->OnHost(1));
  EXPECT_EQ(bank_->config().RowBytes(1), bank_->config().RowBytes(0));
  EXPECT_EQ(Bank::ReservedBytes(bank_->config(), TierKind::kDevice), 64u * (96u + 32u));
  EXPECT_EQ(Bank::ReservedBytes(bank_->config(), TierKind::kHost), 64u * 64u);
  EXPECT_EQ(Bank::StageBytes(bank_->config()), 2u * 64u * 64u) << "two stages, of V alone";
  const KvView view = bank_->View(1);
  EXPECT_FALSE(view.Interleaved());
  EXPECT_EQ(view.k.row_bytes, 32);
  EXPECT_EQ(view.v.row_bytes, 64);

  const int32_t a = *bank_->NewSequence();
  ASSERT_TRUE(bank_->Append(a, 6).ok());
  EXPECT_EQ(bank_->DeviceBytes(), 8u * (96u + 32u));
  EXPECT_EQ(bank_->HostBytes(), 8u * 64u);
  Write(a, 0, 6);
  const int32_t b = *bank_->Fork(a);
  bank_->Truncate(b, 5);
  ASSERT_TRUE(bank_->Append(b, 4).ok());
  EXPECT_EQ(bank_->HostBytes(), 16u * 64u);
  Expect(b, 0, 5);

  // The stage has V; K stays.
  bank_->StageIn(1, b, 5);
  EXPECT_EQ(bank_->BytesStaged(), 5u * 64u);
  const KvView stage = bank_->StageView(1);
  EXPECT_EQ(stage.k, view.k);
  EXPECT_NE(stage.v.base, view.v.base);
  EXPECT_EQ(stage.block_table, view.block_table);
  const int32_t off = bank_->TableOffset(b);
  for (int64_t t = 0; t < 9; ++t) {
    for (int32_t head = 0; head < 2; ++head) {
      std::byte* staged = At(stage, stage.v, off, t, head);
      if (t < 5) {
        EXPECT_EQ(std::memcmp(staged, At(view, view.v, off, t, head), 32), 0) << "token " << t;
      } else {
        std::memset(staged, static_cast<int>(100 + t), 32);
        std::memset(At(stage, stage.k, off, t, head), static_cast<int>(200 + t), 16);
      }
    }
  }
  bank_->StageOut(1, b, 5, 9);
  for (int64_t t = 5; t < 9; ++t) {
    EXPECT_EQ(static_cast<int64_t>(At(view, view.v, off, t, 1)[31]), 100 + t);
    EXPECT_EQ(static_cast<int64_t>(At(view, view.k, off, t, 1)[15]), 200 + t);
  }
  Expect(a, 0, 6);

  Write(b, 5, 9, 60);
  const int32_t copy = Copy(b);
  Expect(copy, 0, 5);
  Expect(copy, 5, 9, 60);
}

// Two layers of which the second lies by head, and the same with all heads side by side.
BankConfig RowsByHead(DType dtype, int32_t dk, int32_t dv, bool by_head) {
  LayerSpec away{.n_kv_heads = 2, .dk = dk, .dv = dv, .streams = {{.tier = TierKind::kHost}}};
  away.streams[0].by_head = by_head;
  BankConfig config =
      ConfigOf({{.n_kv_heads = 2, .dk = dk, .dv = dv}, std::move(away)}, {TableSpec{}});
  config.dtype = dtype;
  return config;
}

struct HeadSize {
  DType dtype;
  int32_t dk, dv;
};
constexpr HeadSize kByHead[] = {
    {DType::kBF16, 8, 16}, {DType::kQ8_0, 128, 128}, {DType::kQ4_0, 128, 128}};

// Within a block; and what passes through a stage comes and goes row by row, whole blocks or not.
TEST_F(StreamsTest, RowsOfAHeadFollowOneAnother) {
  for (const auto& [dtype, dk, dv] : kByHead) {
    const BankConfig config = RowsByHead(dtype, dk, dv, true);
    Open(config);
    EXPECT_EQ(config.RowBytes(1), config.RowBytes(0));
    const int32_t other = *bank_->NewSequence();
    const int32_t a = *bank_->NewSequence();
    ASSERT_TRUE(bank_->Append(other, 1).ok());
    ASSERT_TRUE(bank_->Append(a, 9).ok());
    bank_->Free(other);
    ASSERT_TRUE(bank_->Append(a, 5).ok());  // its last block is before the others
    Write(a, 0, 14);
    const KvView view = bank_->View(1);
    const auto row_bytes = static_cast<int64_t>(config.RowBytes(1)) / 2;
    EXPECT_EQ(view.TokenBytes(), 2 * row_bytes);
    EXPECT_FALSE(view.Interleaved());
    const int32_t off = bank_->TableOffset(a);
    for (int64_t t = 1; t < 14; ++t) {
      if (t % kBlock == 0) continue;
      for (int32_t head = 0; head < 2; ++head) {
        for (const KvPlane& plane : {view.k, view.v}) {
          EXPECT_EQ(At(view, plane, off, t, head) - At(view, plane, off, t - 1, head), row_bytes);
        }
      }
    }
    const int32_t b = *bank_->Fork(a);
    bank_->Truncate(b, 6);
    ASSERT_TRUE(bank_->Append(b, 8).ok());
    Write(b, 6, 14, 60);
    Expect(a, 0, 14);
    Expect(b, 0, 6);

    const KvView home = bank_->View(1);
    const KvView stage = bank_->StageView(1);
    const auto same = [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        for (int32_t head = 0; head < 2; ++head) {
          const std::byte* const row = home.k.Head(home.RowIndex(off, t), head);
          const std::byte* const staged = stage.k.Head(stage.RowIndex(off, t), head);
          EXPECT_EQ(std::memcmp(row, staged, static_cast<size_t>(row_bytes)), 0) << "token " << t;
        }
      }
    };
    bank_->StageIn(1, a, 7);
    same(0, 7);
    bank_->StageIn(1, a, 11);
    same(0, 11);
    EXPECT_EQ(bank_->BytesStaged(), 11 * config.RowBytes(1));
    for (int64_t t = 11; t < 14; ++t) {
      for (int32_t head = 0; head < 2; ++head) {
        std::memset(stage.k.Head(stage.RowIndex(off, t), head), static_cast<int>(100 + t),
                    static_cast<size_t>(row_bytes));
      }
    }
    bank_->StageOut(1, a, 11, 14);
    same(0, 14);
    Expect(a, 0, 11);

    std::vector<std::byte> rows(static_cast<size_t>(2 * row_bytes * 3 * kBlock));
    bank_->CopyFromHome(1, a, kBlock, 14, rows.data());
    const std::vector<int32_t> in_order = {0, 0, 1, 2};
    KvView copied = home.MovedTo(rows.data());
    copied.block_table = in_order.data();
    for (int64_t t = kBlock; t < 14; ++t) {
      for (int32_t head = 0; head < 2; ++head) {
        EXPECT_EQ(
            std::memcmp(home.k.Head(home.RowIndex(off, t), head),
                        copied.k.Head(copied.RowIndex(0, t), head), static_cast<size_t>(row_bytes)),
            0)
            << "token " << t;
      }
    }
  }
}

// A file has all heads of a token side by side, however they lie in the bank.
TEST_F(StreamsTest, RowsByHeadAreSentAsOthersAre) {
  for (const auto& [dtype, dk, dv] : kByHead) {
    std::vector<std::byte> bytes[2];
    SequenceImage image;
    for (const bool by_head : {true, false}) {
      Open(RowsByHead(dtype, dk, dv, by_head));
      const int32_t a = *bank_->NewSequence();
      ASSERT_TRUE(bank_->Append(a, 14).ok());
      Write(a, 0, 14);
      image = bank_->Image(a);
      bytes[by_head ? 1 : 0] = Exported(a);
      for (const size_t piece : {size_t{1}, size_t{100}, size_t{10'000}}) {
        for (const std::vector<int64_t>& ends :
             std::vector<std::vector<int64_t>>{{14}, {4, 8, 14}, {12, 14}}) {
          const int32_t copy = CopyInRanges(a, ends, piece);
          Expect(copy, 0, 14);
          bank_->Free(copy);
        }
      }
    }
    EXPECT_EQ(bytes[0], bytes[1]);
    Expect(Imported(image, bytes[1]), 0, 14);
    Open(RowsByHead(dtype, dk, dv, true));
    Expect(Imported(image, bytes[0]), 0, 14);
  }
}

// Two classes with streams on the host, in two tables, of which one lost tokens: a stage has room
// for all of them.
TEST_F(StreamsTest, AStageHoldsAllStreamsOfALayer) {
  const LayerSpec mixed = {
      .n_kv_heads = 3,
      .dk = 8,
      .dv = 8,
      .streams = {{.heads = {1, 2}, .tier = TierKind::kHost},
                  {.heads = {0}, .planes = Planes::kV, .tier = TierKind::kHost, .table = 1},
                  {.heads = {0}, .planes = Planes::kK, .table = 1}}};
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    BankConfig config = ConfigOf({mixed, mixed}, {TableSpec{}, TableSpec{}});
    config.dtype = dtype;
    Open(config);
    EXPECT_EQ(Bank::StageBytes(config), 2u * 64u * (64u + 16u) * DTypeBytes(dtype, 1) / 2);
    const int32_t a = *bank_->NewSequence();
    const int32_t other = *bank_->NewSequence();
    ASSERT_TRUE(bank_->Append(other, 1).ok());
    ASSERT_TRUE(bank_->Append(a, 8).ok());
    bank_->Free(other);
    ASSERT_TRUE(bank_->Append(a, 7).ok());
    Write(a, 0, 15);
    bank_->Drop(a, 1, 4, 8);  // a hole before block 0
    bank_->StageIn(0, a, 15);
    bank_->StageIn(1, a, 15);
    EXPECT_EQ(bank_->BytesStaged(), 2u * (15u * 64u + 11u * 16u) * DTypeBytes(dtype, 1) / 2);
    for (int32_t layer = 0; layer < 2; ++layer) {
      for (int32_t c = 0; c < 2; ++c) {
        const KvView home = bank_->View(layer, c);
        const KvView stage = bank_->StageView(layer, c);
        EXPECT_EQ(home.k == stage.k, c == 1);
        for (int64_t t = 0; t < 15; ++t) {
          if (c == 1 && t / kBlock == 1) continue;
          for (int32_t head = 0; head < home.n_kv_heads; ++head) {
            for (const auto& [from, to] : {std::pair{home.k, stage.k}, {home.v, stage.v}}) {
              EXPECT_EQ(std::memcmp(At(home, from, bank_->TableOffset(a), t, head),
                                    At(stage, to, bank_->TableOffset(a), t, head),
                                    static_cast<size_t>(from.head_bytes)),
                        0)
                  << "layer " << layer << " class " << c << " token " << t;
            }
          }
        }
      }
    }
    bank_->Free(a);
  }
}

TEST_F(StreamsTest, NoiseFillsEveryStream) {
  BankConfig apart = ConfigOf({Apart()}, {TableSpec{}});
  apart.layers[0].dk = apart.layers[0].dv = 128;
  for (BankConfig config : {apart, RowsByHead(DType::kF32, 128, 128, true)}) {
    for (const DType dtype : {DType::kF32, DType::kQ8_0, DType::kQ4_0}) {
      config.dtype = dtype;
      Open(config);
      const int32_t a = *bank_->NewSequence();
      ASSERT_TRUE(bank_->Append(a, 7).ok());
      bank_->FillWithNoise(a);
      const KvView view = bank_->View(bank_->n_layers() - 1);
      float last = 0;
      for (int64_t t = 0; t < 7; ++t) {
        for (int32_t head = 0; head < 2; ++head) {
          for (const KvPlane& plane : {view.k, view.v}) {
            const std::byte* at = At(view, plane, bank_->TableOffset(a), t, head);
            float top = 0;
            float sum = 0;
            for (size_t i = 0; i < 128; ++i) {
              top = std::max(top, std::abs(LoadKvValue(plane, head, at, i)));
              sum += LoadKvValue(plane, head, at, i);
            }
            EXPECT_GT(top, 0);
            EXPECT_LE(top, 1);
            EXPECT_NE(sum, std::exchange(last, sum)) << "as the row before";
          }
        }
      }
    }
  }
}

// A file of a bank of other streams would be read as other rows of as many bytes.
TEST_F(StreamsTest, ImagesOfOtherStreamsAreRefused) {
  const BankConfig plain = ConfigOf({{.n_kv_heads = 2, .dk = 8, .dv = 16}}, {TableSpec{}});
  BankConfig apart = ConfigOf({Apart()}, {TableSpec{}});
  EXPECT_EQ(plain.Layout(), "");
  EXPECT_EQ(apart.Layout(), "0: k[]@0 v[]@0;");
  EXPECT_EQ(TwoClasses().Layout(), "0: kv[0,2]@0 kv[1]@1;");
  Open(apart);
  const SequenceImage image = bank_->Image(*bank_->NewSequence());
  EXPECT_TRUE(CheckImage(apart, image).ok());
  const Status refused = CheckImage(plain, image);
  EXPECT_EQ(refused.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(refused.message(), HasSubstr("other streams"));
  apart.layers[0].streams[1].tier = TierKind::kDevice;  // where they lie is no matter
  EXPECT_TRUE(CheckImage(apart, image).ok());
}

}  // namespace
}  // namespace omnikv::streams_test
