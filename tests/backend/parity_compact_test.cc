// Parity of the compaction of chosen rows.
#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "parity_data.h"

namespace omnikv::parity {
namespace {

struct Layout {
  DType dtype;
  int32_t n_kv_heads, dk, dv, block_tokens;
};

void CheckCompact(const Layout& l, Planes planes, Random& random) {
  const std::vector<int32_t> lens = {600, 1, 257, 0};
  const Bank bank(l.dtype, l.n_kv_heads, l.dk, l.dv, l.block_tokens, lens, 600, random, planes);
  const Step step(std::vector<int32_t>(lens.size(), 0), lens,
                  [&](int32_t s) { return bank.TableOff(s); });
  for (const int32_t most : {0, 1, 30, 270, 599, 600}) {
    const int32_t capacity = std::max(most, 1);
    std::vector<int32_t> index;
    std::vector<int32_t> count;
    for (const int32_t len : lens) {
      const int32_t n = std::min(most, len);
      std::vector<int32_t> chosen = random.Ascending(n, len);
      std::iota(chosen.begin(), chosen.begin() + std::min(n, 4), 0);  // stay where they are
      std::sort(chosen.begin(), chosen.end());
      chosen.erase(std::unique(chosen.begin(), chosen.end()), chosen.end());
      count.push_back(static_cast<int32_t>(chosen.size()));
      chosen.resize(static_cast<size_t>(capacity), 1 << 30);  // never to be read
      index.insert(index.end(), chosen.begin(), chosen.end());
    }
    const bool with_pos = most != 270;
    Check(fmt::format("Compact {} rows of {} {}{}{}", most, bank.View().TokenBytes(),
                      DTypeName(l.dtype), with_pos ? " and positions" : "",
                      planes == Planes::kApart ? ", planes apart" : ""),
          [&](const Execute& run) {
            Bank copy = bank;
            constexpr int32_t kStride = 603;
            std::vector<int32_t> pos(with_pos ? lens.size() * kStride : 0);
            for (size_t i = 0; i < pos.size(); ++i) pos[i] = static_cast<int32_t>(7 * i);
            run(CompactArgs{.kv = copy.View(),
                            .seqs = step.seqs.data(),
                            .index = index.data(),
                            .count = count.data(),
                            .pos = with_pos ? pos.data() : nullptr,
                            .pos_stride = kStride,
                            .capacity = capacity,
                            .n_seqs = step.n_seqs()});
            Array rows = copy.Values();
            rows.tolerance = 0;
            return Outputs{rows, {"pos", AsFloats(pos), 0}};
          });
  }
}

TEST_F(ParityTest, Compact) {
  Random random(41);
  // Rows in pieces of 16, 4 and 2 bytes; of several slices, and of less than one.
  for (const Layout& l : {Layout{DType::kF16, 1, 64, 64, 64}, Layout{DType::kBF16, 1, 6, 6, 16},
                          Layout{DType::kBF16, 3, 24, 21, 16}, Layout{DType::kF32, 2, 10, 9, 32}}) {
    CheckCompact(l, Planes::kTogether, random);
    CheckCompact(l, Planes::kApart, random);
  }
}

}  // namespace
}  // namespace omnikv::parity
