// Blocks of kQ4_0 as NormQkvRopeAppend stores them, bit by bit those of an implementation in
// NumPy, and what is read of them.
#include <bit>

#include "parity.h"
#include "q4_golden.h"

namespace omnikv::parity::parity_q4_test {
namespace {

constexpr auto kDim = static_cast<int32_t>(kBlockValues);
constexpr auto kHeads = static_cast<int32_t>(std::size(kQ4Goldens));

// Heads of one block each, whose values are biases: no product changes a bit of them.
TEST_F(ParityTest, Q4Goldens) {
  Random random(1);
  const int32_t d = 32;
  std::vector<float> values;
  for (const Q4Golden& golden : kQ4Goldens) {
    for (const uint32_t bits : golden.values) values.push_back(std::bit_cast<float>(bits));
  }
  const std::vector<float> zeros(static_cast<size_t>(kHeads * kDim * d), 0.0f);
  const WeightRef w{.format = DType::kF32,
                    .data = zeros.data(),
                    .n_out = kHeads * kDim,
                    .n_in = d,
                    .row_bytes = d * 4};
  const Bank bank(DType::kQ4_0, kHeads, kDim, kDim, 16, {0}, 16, random);
  const Step step({1}, {1}, [&](int32_t s) { return bank.TableOff(s); });
  Check("blocks of NumPy", [&](const Execute& run) {
    const Bank copy = bank;
    std::vector<float> x(static_cast<size_t>(d), 1.0f);
    std::vector<float> q(static_cast<size_t>(kHeads * kDim), kPoison);
    run(NormQkvRopeAppendArgs{.in = {.x = x.data(), .d = d},
                              .wq = w,
                              .wk = w,
                              .wv = w,
                              .bk = values.data(),
                              .bv = values.data(),
                              .q = q.data(),
                              .n_heads = kHeads,
                              .kv = copy.View(),
                              .rows = step.rows.data(),
                              .seqs = step.seqs.data(),
                              .n_rows = 1});
    const KvView view = copy.View();
    const int64_t row = view.RowIndex(step.seqs[0].table_off, 0);
    for (const KvPlane& plane : {view.k, view.v}) {
      for (int32_t h = 0; h < kHeads; ++h) {
        const Q4Golden& golden = kQ4Goldens[h];
        const std::byte* pairs = plane.Head(row, h);
        F16 scale;
        std::memcpy(&scale, pairs + plane.ToScales(h), sizeof(scale));
        if (std::isnan(F32FromF16(golden.scale))) {
          EXPECT_TRUE(std::isnan(F32FromF16(scale))) << h;
        } else {
          EXPECT_EQ(scale, golden.scale) << h;
        }
        EXPECT_EQ(std::memcmp(pairs, golden.pairs, sizeof(golden.pairs)), 0) << h;
        // (nibble - 8) * scale, low nibbles first.
        for (int32_t i = 0; i < kDim; ++i) {
          const int pair = golden.pairs[i % 16];
          const float code = static_cast<float>((i < 16 ? pair & 15 : pair >> 4) - 8);
          const float want = code * F32FromF16(golden.scale);
          const float got = LoadKvValue(plane, h, pairs, static_cast<size_t>(i));
          EXPECT_TRUE(got == want || (std::isnan(got) && std::isnan(want))) << h << ' ' << i;
        }
      }
    }
    return Outputs{{"q", q}};
  });
}

}  // namespace
}  // namespace omnikv::parity::parity_q4_test
