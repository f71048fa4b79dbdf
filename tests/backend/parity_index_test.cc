// Parity of the ops of an index of K.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "parity_data.h"

namespace omnikv::parity::parity_index_test {
namespace {

// Heads whose halves are whole vectors, or not, and that a card's tensor cores take, or not.
const std::vector<Shape>& Shapes() {
  static const std::vector<Shape> shapes = {
      {1, 1, 4, 4, DType::kF32},     {6, 2, 64, 64, DType::kF16},   {32, 8, 128, 128, DType::kBF16},
      {6, 6, 80, 80, DType::kF16},   {12, 2, 256, 64, DType::kF32}, {14, 2, 64, 64, DType::kQ8_0},
      {10, 5, 96, 96, DType::kBF16}, {20, 1, 32, 32, DType::kQ8_0}, {10, 1, 64, 32, DType::kBF16},
      {36, 9, 32, 32, DType::kF16},  {5, 1, 38, 8, DType::kF32},    {4, 2, 320, 320, DType::kF16},
      {14, 2, 64, 64, DType::kQ4_0}, {20, 1, 32, 32, DType::kQ4_0}};
  return shapes;
}

std::string NameOf(const char* op, const Shape& s) {
  return fmt::format("{} {}/{} heads of {} {}", op, s.n_heads, s.n_kv_heads, s.dk,
                     DTypeName(s.dtype));
}

int64_t RowFloats(const Shape& s) {
  return IndexRowBytes(s.n_kv_heads, s.dk) / 4;
}

TEST_F(ParityTest, IndexKeys) {
  Random random(61);
  for (const Shape& shape : Shapes()) {
    for (const std::vector<int32_t>& q_len :
         std::vector<std::vector<int32_t>>{{1, 0, 1, 1}, {130, 0, 1, 17}}) {
      const Planes planes = q_len[0] == 1 ? Planes::kTogether : Planes::kByHead;
      const Attention data(shape, q_len, {130, 5, 1, 70}, random, 16, planes);
      Check(NameOf("IndexKeys", shape), [&](const Execute& run) {
        std::vector<float> memory;
        const StateView out = data.bank.States(1, RowFloats(shape), memory);
        run(IndexKeysArgs{.kv = data.bank.View(),
                          .seqs = data.step.seqs.data(),
                          .out = out,
                          .n_rows = data.step.n_rows(),
                          .n_seqs = data.step.n_seqs()});
        // Byte by byte: what a bit says is no number.
        std::vector<uint8_t> bytes(memory.size() * sizeof(float));
        std::memcpy(bytes.data(), memory.data(), bytes.size());
        return Outputs{{"out", {bytes.begin(), bytes.end()}, 0}};
      });
    }
  }
}

// No value is further from its code than half of the scale, wherever the values of a key lie.
TEST_F(ParityTest, IndexKeysRoundToTheNearest) {
  Random random(69);
  const Shape shape = {2, 1, 64, 64, DType::kF32};
  constexpr int32_t kTokens = 40;
  const Attention data(shape, {kTokens}, {kTokens}, random);
  const KvView view = data.bank.View();
  const auto key = [&](int32_t t) {
    return reinterpret_cast<float*>(view.k.Head(view.RowIndex(0, t), 0));
  };
  for (int32_t t = 0; t < kTokens; ++t) {
    for (int32_t i = 0; i < shape.dk; ++i) key(t)[i] += static_cast<float>(t / 4 % 5 - 2) * 30;
  }
  Check("IndexKeys to the nearest", [&](const Execute& run) {
    std::vector<float> memory;
    const StateView out = data.bank.States(1, RowFloats(shape), memory);
    run(IndexKeysArgs{
        .kv = view, .seqs = data.step.seqs.data(), .out = out, .n_rows = kTokens, .n_seqs = 1});
    for (int32_t t = 0; t < kTokens; ++t) {
      const auto* row = out.Row<const uint8_t>(0, t);
      IndexRange range;
      std::memcpy(&range, row + IndexRangesAt(1, shape.dk), sizeof(range));
      for (int32_t i = 0; i < shape.dk; ++i) {
        const uint8_t both = row[i % (shape.dk / 2)];
        const int32_t code = i < shape.dk / 2 ? both & 15 : both >> 4;
        const double rounded = range.zero() + static_cast<double>(range.scale()) * code;
        EXPECT_LE(std::abs(rounded - key(t)[i]), 0.5001 * range.scale()) << t << " " << i;
      }
    }
    return Outputs{};
  });
}

// A key of equal values has no range, and outliers of any size are codes.
TEST_F(ParityTest, IndexKeysOfExtremes) {
  Random random(62);
  const Shape shape = {2, 1, 64, 64, DType::kF32};
  const Attention data(shape, {4}, {4}, random);
  const KvView view = data.bank.View();
  for (int32_t t = 0; t < 4; ++t) {
    auto* k = reinterpret_cast<float*>(view.k.Head(view.RowIndex(0, t), 0));
    if (t == 0) std::fill_n(k, 64, 3.25f);
    if (t == 1) k[5] = 1e30f;
    if (t == 2) k[63] = -1e30f;
    if (t == 3) std::fill_n(k, 64, 0.0f);
  }
  const Outputs want = Check("IndexKeys of extremes", [&](const Execute& run) {
    std::vector<float> memory;
    const StateView out = data.bank.States(1, RowFloats(shape), memory);
    run(IndexKeysArgs{
        .kv = view, .seqs = data.step.seqs.data(), .out = out, .n_rows = 4, .n_seqs = 1});
    std::vector<float> rows;  // ranges
    for (int32_t t = 0; t < 4; ++t) {
      const auto* row = out.Row<const std::byte>(0, t);
      IndexRange range;
      std::memcpy(&range, row + IndexRangesAt(1, 64), sizeof(range));
      rows.insert(rows.end(), {range.scale(), range.zero(), static_cast<float>(row[5])});
    }
    return Outputs{{"rows", rows, 0}};
  });
  EXPECT_EQ(want[0].values[0], 0.0f);
  EXPECT_EQ(want[0].values[1], 3.25f);
  EXPECT_EQ(want[0].values[2], 0.0f);
}

// Rows of codes and ranges as if they were of keys.
StateView RandomIndex(const Bank& bank, const Shape& s, std::vector<float>& memory,
                      Random& random) {
  const StateView index = bank.States(1, RowFloats(s), memory, 0.0f);
  const auto ranges_at = static_cast<size_t>(IndexRangesAt(s.n_kv_heads, s.dk));
  auto* bytes = reinterpret_cast<uint8_t*>(memory.data());
  const auto row_bytes = static_cast<size_t>(index.row_bytes);
  for (size_t row = 0; row < memory.size() * sizeof(float); row += row_bytes) {
    for (size_t i = 0; i < ranges_at; ++i) {
      bytes[row + i] = static_cast<uint8_t>(random.Int(0, 255));
    }
    for (size_t g = 0; g < static_cast<size_t>(s.n_kv_heads); ++g) {
      const float low = random.Floats(1)[0] - 1.5f;
      const IndexRange range = RangeOf(low, low + 3 + 1.5f * std::fabs(random.Floats(1)[0]));
      std::memcpy(bytes + row + ranges_at + g * sizeof(range), &range, sizeof(range));
    }
  }
  return index;
}

// Of all tokens, of units of them, and of so many listed ones and a range of last ones.
void CheckIndexScore(const Shape& shape, const std::vector<int32_t>& q_len,
                     const std::vector<int32_t>& kv_len, float softcap, Random& random,
                     int32_t block_tokens = 16, int32_t listed = 77) {
  const Attention data(shape, q_len, kv_len, random, block_tokens);
  std::vector<float> memory;
  const StateView index = RandomIndex(data.bank, shape, memory, random);
  const int32_t most = *std::max_element(kv_len.begin(), kv_len.end());
  const auto row_heads = static_cast<size_t>(data.step.n_rows() * shape.n_heads);
  std::vector<int32_t> before;
  std::vector<int32_t> bounds;
  for (const int32_t n : kv_len) {
    before.push_back(std::max(0, n - 5));
    bounds.insert(bounds.end(), {before.back(), n});
  }
  const Lists chosen(before, 1, 1, listed, random);
  struct Case {
    const char* name;
    int32_t unit;
    SomeTokens only;
    bool by_token = false;
  };
  SomeTokens some = chosen.Tokens();
  some.bounds = bounds.data();
  for (const Case& c : {Case{"", 1, {}}, Case{" in units", kIndexUnit, {}},
                        Case{" of some", 1, some}, Case{" of some, by token", 1, some, true}}) {
    const int64_t stride = UnitsOf(most, c.unit) + 3;
    Check(fmt::format("{} of {} cap {}{}", NameOf("IndexScore", shape), kv_len[0], softcap, c.name),
          [&](const Execute& run) {
            std::vector<float> logits(row_heads * static_cast<size_t>(stride), kPoison);
            std::vector<float> lse(row_heads, kPoison);
            run(IndexScoreArgs{.q = data.q.data(),
                               .index = index,
                               .rows = data.step.rows.data(),
                               .seqs = data.step.seqs.data(),
                               .logits = logits.data(),
                               .lse = lse.data(),
                               .stride = stride,
                               .n_rows = data.step.n_rows(),
                               .n_heads = shape.n_heads,
                               .n_kv_heads = shape.n_kv_heads,
                               .dk = shape.dk,
                               .unit = c.unit,
                               .scale = 1 / std::sqrt(static_cast<float>(shape.dk)),
                               .softcap = softcap,
                               .only = c.only,
                               .by_token = c.by_token});
            return Outputs{{"logits", logits}, {"lse", lse}};
          });
  }
}

TEST_F(ParityTest, IndexScore) {
  Random random(63);
  for (const Shape& shape : Shapes()) {
    for (const float softcap : {0.0f, 20.0f}) {
      CheckIndexScore(shape, {1, 0, 1, 1}, {1100, 5, 1, 530}, softcap, random);
    }
  }
}

// More tokens than a card has warps at a time: each takes several tiles.
TEST_F(ParityTest, IndexScoreOfManyTokens) {
  Random random(64);
  CheckIndexScore({6, 2, 64, 64, DType::kF16}, {1}, {70000}, 0, random);
  CheckIndexScore({16, 2, 128, 128, DType::kF16}, {1, 1}, {30011, 17}, 0, random);
  CheckIndexScore({2, 2, 40, 40, DType::kF16}, {1}, {20001}, 0, random, 16, 9000);
  CheckIndexScore({32, 8, 128, 128, DType::kF16}, {1}, {20003}, 0, random, 16, 12000);
}

// Blocks of several tiles, and of no whole ones, whose rows no card copies in long pieces.
TEST_F(ParityTest, IndexScoreInBlocksOfAnySize) {
  Random random(68);
  for (const int32_t block : {32, 64, 256, 24, 1}) {
    CheckIndexScore({32, 8, 128, 128, DType::kF16}, {1, 1}, {3001, 33}, 0, random, block);
    CheckIndexScore({4, 1, 64, 64, DType::kF16}, {1}, {5017}, 0, random, block);
    CheckIndexScore({4, 2, 256, 256, DType::kF16}, {1}, {1000}, 0, random, block);
  }
}

// One row per sequence, with so many last tokens that all lists leave out.
void CheckRescore(const Shape& shape, const std::vector<int32_t>& q_len,
                  const std::vector<int32_t>& kv_len, int32_t listed, int32_t last, bool per_head,
                  float softcap, Random& random) {
  const Planes planes = random.Int(0, 1) == 0 ? Planes::kTogether : Planes::kByHead;
  const bool by_token = random.Int(0, 1) == 0;
  const Attention data(shape, q_len, kv_len, random, 16, planes);
  const int32_t lists = per_head ? shape.n_kv_heads : 1;
  std::vector<int32_t> before;
  std::vector<int32_t> bounds;
  for (const int32_t n : kv_len) {
    before.push_back(std::max(0, n - last));
    bounds.insert(bounds.end(), {before.back(), n});
  }
  const Lists chosen(before, lists, 1, listed, random);
  SomeTokens tokens = chosen.Tokens();
  tokens.bounds = bounds.data();
  const int64_t stride = *std::max_element(kv_len.begin(), kv_len.end()) + 3;
  const auto n_heads = static_cast<size_t>(shape.n_heads);
  std::vector<float> lse;
  std::vector<float> logits;
  for (int32_t r = 0; r < data.step.n_rows(); ++r) {
    const int32_t pos = data.step.rows[static_cast<size_t>(r)].pos;
    for (size_t h = 0; h < n_heads; ++h) {
      const std::vector<float> own = random.Floats(static_cast<size_t>(stride), 1.5f);
      double sum = 0;
      for (int32_t t = 0; t <= pos; ++t) sum += std::exp(double{own[static_cast<size_t>(t)]});
      lse.push_back(static_cast<float>(std::log(sum)));
      logits.insert(logits.end(), own.begin(), own.end());
    }
  }
  if (by_token) {
    const std::vector<float> by_head = logits;
    const auto tokens_of_row = static_cast<size_t>(stride);
    for (size_t at = 0; at < logits.size(); ++at) {
      const size_t row = at / (n_heads * tokens_of_row);
      const size_t h = at / tokens_of_row % n_heads;
      logits[(row * tokens_of_row + at % tokens_of_row) * n_heads + h] = by_head[at];
    }
  }
  Check(fmt::format("{} {} of {} listed{} cap {}{}", NameOf("Rescore", shape), listed, kv_len[0],
                    per_head ? " per head" : "", softcap, by_token ? " by token" : ""),
        [&](const Execute& run) {
          std::vector<float> new_logits = logits;
          std::vector<float> new_lse = lse;
          run(RescoreArgs{.q = data.q.data(),
                          .kv = data.bank.View(),
                          .rows = data.step.rows.data(),
                          .seqs = data.step.seqs.data(),
                          .tokens = tokens,
                          .logits = new_logits.data(),
                          .lse = new_lse.data(),
                          .stride = stride,
                          .lists = lists,
                          .n_rows = data.step.n_rows(),
                          .n_seqs = data.step.n_seqs(),
                          .n_heads = shape.n_heads,
                          .scale = 1 / std::sqrt(static_cast<float>(shape.dk)),
                          .softcap = softcap,
                          .by_token = by_token});
          return Outputs{{"logits", new_logits}, {"lse", new_lse}};
        });
}

TEST_F(ParityTest, Rescore) {
  Random random(65);
  for (const Shape& shape : Shapes()) {
    for (const bool per_head : {false, true}) {
      const float softcap = per_head ? 20.0f : 0.0f;
      CheckRescore(shape, {1, 0, 1, 1}, {900, 5, 1, 530}, 300, 40, per_head, softcap, random);
    }
  }
}

// All tokens listed, none, and a range of all of them.
TEST_F(ParityTest, RescoreOfAllTokens) {
  Random random(66);
  const Shape shape = {6, 2, 64, 64, DType::kF16};
  CheckRescore(shape, {1, 1}, {1500, 3}, 2000, 1, false, 0, random);
  CheckRescore(shape, {1, 1}, {1500, 3}, 0, 1, false, 0, random);
  CheckRescore(shape, {1, 1}, {1500, 3}, 10, 2000, true, 0, random);
}

}  // namespace
}  // namespace omnikv::parity::parity_index_test
