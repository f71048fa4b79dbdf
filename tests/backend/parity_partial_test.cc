// Parity of attentions over a part of the tokens or of the heads, and of their merge.
#include <fmt/format.h>

#include <algorithm>
#include <tuple>

#include "parity_data.h"

namespace omnikv::parity {
namespace {

constexpr float kNoTokens = -std::numeric_limits<float>::infinity();

TEST_F(ParityTest, MergeStates) {
  Random random(31);
  for (int32_t n_parts = 1; n_parts <= kMaxStates; ++n_parts) {
    for (const auto& [n_rows, n_heads, dv] :
         {std::tuple{1, 8, 128}, {3, 5, 7}, {2, 4, 200}, {40, 32, 64}}) {
      const auto row_heads = static_cast<size_t>(n_rows * n_heads);
      std::vector<std::vector<float>> o;
      std::vector<std::vector<float>> lse;
      for (int32_t i = 0; i < n_parts; ++i) {
        o.push_back(random.Floats(row_heads * static_cast<size_t>(dv)));
        lse.push_back(random.Floats(row_heads, 5.0f));
        for (size_t h = 0; h < row_heads; ++h) {
          // Every third head of a part read nothing, the first of them in all parts.
          if (h != 1 && (h + static_cast<size_t>(i)) % 3 != 0) continue;
          lse.back()[h] = kNoTokens;
          std::fill_n(o.back().begin() + static_cast<ptrdiff_t>(h) * dv, dv, kPoison);
        }
      }
      for (const bool in_place : {false, true}) {
        for (const bool with_lse : {false, true}) {
          Check(fmt::format("MergeStates {} parts of {} rows {} heads of {}{}", n_parts, n_rows,
                            n_heads, dv, in_place ? ", in place" : ""),
                [&, n_rows = n_rows, n_heads = n_heads, dv = dv](const Execute& run) {
                  std::vector<float> out(row_heads * static_cast<size_t>(dv), kPoison);
                  std::vector<float> out_lse(with_lse ? row_heads : 0, kPoison);
                  MergeStatesArgs args{.n_parts = n_parts,
                                       .o = out.data(),
                                       .lse = with_lse ? out_lse.data() : nullptr,
                                       .n_rows = n_rows,
                                       .n_heads = n_heads,
                                       .dv = dv};
                  for (size_t i = 0; i < o.size(); ++i) {
                    args.parts[i] = {o[i].data(), lse[i].data()};
                  }
                  if (in_place) {
                    out = o.back();
                    args.parts[o.size() - 1].o = out.data();
                    if (with_lse) args.parts[o.size() - 1].lse = (out_lse = lse.back()).data();
                  }
                  run(args);
                  return Outputs{{"o", out}, {"lse", out_lse}};
                });
        }
      }
    }
  }
}

// Attentions over parts of the tokens, merged, are the attention over all of them.
TEST_F(ParityTest, MergeStatesOfAnAttention) {
  Random random(32);
  const Attention a({6, 2, 64, 64, DType::kF16}, {1, 3}, {300, 20}, random);
  Check("MergeStates of an attention", [&](const Execute& run) {
    const std::vector<float> fresh(a.q.size(), kPoison);  // dk == dv
    const std::vector<float> fresh_lse(a.q.size() / 64, kPoison);
    std::vector<float> whole = fresh;
    std::vector<float> whole_lse = fresh_lse;
    AttendArgs attend = a.Args(AttnPlan::Dense());
    attend.o = whole.data();
    attend.lse = whole_lse.data();
    run(attend);
    MergeStatesArgs merge{.n_rows = attend.n_rows, .n_heads = attend.n_heads, .dv = attend.kv.dv};
    std::vector<std::vector<float>> o(3, fresh);
    std::vector<std::vector<float>> lse(3, fresh_lse);
    for (size_t i = 0; i < o.size(); ++i) {
      const auto begin = static_cast<int32_t>(i) * 50;
      attend.plan = {};
      attend.plan.Add({.begin = begin, .end = i == 2 ? kToEnd : begin + 50});
      attend.o = o[i].data();
      attend.lse = lse[i].data();
      run(attend);
      merge.parts[i] = {o[i].data(), lse[i].data()};
    }
    merge.n_parts = 3;
    merge.o = o[0].data();
    merge.lse = lse[0].data();
    run(merge);
    for (size_t i = 0; i < whole.size(); ++i) EXPECT_NEAR(o[0][i], whole[i], 2e-5);
    for (size_t i = 0; i < whole_lse.size(); ++i) EXPECT_NEAR(lse[0][i], whole_lse[i], 2e-5);
    return Outputs{{"o", o[0]}, {"lse", lse[0]}};
  });
}

}  // namespace
}  // namespace omnikv::parity
