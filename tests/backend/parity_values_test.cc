// Parity of sums of V by logits that are known, which are attentions to the same tokens.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <tuple>
#include <vector>

#include "parity_data.h"

namespace omnikv::parity::parity_values_test {
namespace {

constexpr const char* kNames[] = {"together", "apart", "by head"};

// One attention of one row per sequence, and its logits by token.
class ValuesCase {
 public:
  ValuesCase(const Attention& a, const Lists& lists, bool with_lse) : lists_(lists) {
    AttnPlan plan;
    plan.Add(lists.Segment());
    listed_ = a.Args(plan);
    if (lists.lists > listed_.kv.n_kv_heads) {  // of each query head
      listed_.kv = listed_.kv.EachQueryHead(listed_.Group());
    }
    dense_ = a.Args(AttnPlan::Dense());
    row_heads_ = static_cast<size_t>(listed_.n_rows) * static_cast<size_t>(listed_.n_heads);
    with_lse_ = with_lse;
  }

  Outputs Run(const Execute& run) const {
    constexpr int64_t kStride = 640;
    std::vector<float> logits(row_heads_ * kStride, kPoison);
    std::vector<float> all(row_heads_, kPoison);  // log of the sums of all tokens
    AttendArgs score = dense_;
    score.lse = all.data();
    score.score = ScoreKind::kLogits;
    score.scores = logits.data();
    score.score_stride = kStride;
    run(score);
    std::vector<float> picked(row_heads_ * static_cast<size_t>(lists_.capacity), kPoison);
    run(PickLogitsArgs{.logits = logits.data(),
                       .rows = listed_.rows,
                       .index = lists_.index.data(),
                       .count = lists_.count.data(),
                       .out = picked.data(),
                       .stride = kStride,
                       .capacity = lists_.capacity,
                       .lists = lists_.lists,
                       .n_rows = listed_.n_rows,
                       .n_seqs = listed_.n_seqs,
                       .n_heads = listed_.n_heads});
    std::vector<float> o(row_heads_ * static_cast<size_t>(dense_.kv.dv), kPoison);
    std::vector<float> lse(row_heads_, kPoison);
    run(SumValuesArgs{.logits = picked.data(),
                      .lse_in = with_lse_ ? all.data() : nullptr,
                      .kv = listed_.kv,
                      .index = lists_.index.data(),
                      .count = lists_.count.data(),
                      .rows = listed_.rows,
                      .seqs = listed_.seqs,
                      .o = o.data(),
                      .lse = with_lse_ ? nullptr : lse.data(),
                      .capacity = lists_.capacity,
                      .lists = lists_.lists,
                      .n_rows = listed_.n_rows,
                      .n_seqs = listed_.n_seqs,
                      .n_heads = listed_.n_heads});
    // Attention computes the logits itself.
    std::vector<float> own_o(o.size(), kPoison);
    std::vector<float> own_lse(lse.size(), kPoison);
    AttendArgs attend = listed_;
    attend.o = own_o.data();
    attend.lse = with_lse_ ? nullptr : own_lse.data();
    attend.lse_in = with_lse_ ? all.data() : nullptr;
    run(attend);
    double most = 1;
    double error = 0;
    for (size_t i = 0; i < o.size(); ++i) {
      most = std::max<double>(most, std::abs(own_o[i]));
      error = std::max(error, std::isnan(o[i]) ? 1e9 : std::abs(double{o[i]} - own_o[i]));
    }
    EXPECT_LE(error, 1e-4 * most);
    for (size_t i = 0; i < lse.size() && !with_lse_; ++i) {
      const bool none = own_lse[i] == lse[i];  // minus infinity
      EXPECT_TRUE(none || std::abs(lse[i] - own_lse[i]) < 1e-4) << i;
    }
    if (with_lse_) return {{"logits", picked}, {"o", o}};
    return {{"logits", picked}, {"o", o}, {"lse", lse}};
  }

 private:
  const Lists& lists_;
  AttendArgs listed_, dense_;
  size_t row_heads_ = 0;
  bool with_lse_ = false;
};

TEST_F(ParityTest, SumValues) {
  Random random(71);
  int64_t turn = 0;
  for (const DType dtype : kKvFormats) {
    for (const auto& [n_heads, n_kv_heads, dk, dv] :
         {std::tuple{4, 4, 128, 128}, {8, 2, 64, 64}, {20, 1, 96, 32}, {2, 2, 40, 72}}) {
      const Shape shape{n_heads, n_kv_heads, dk, dv, dtype};
      if (!Fits(shape)) continue;
      for (const Planes planes : {Planes::kApart, Planes::kTogether, Planes::kByHead}) {
        if (planes == Planes::kByHead && !KvFitsByHead(dtype, n_kv_heads, dk, dv)) continue;
        const Attention a(shape, {1, 1, 1, 1}, {600, 1, 33, 257}, random, 16, planes);
        for (const int32_t n : {0, 1, 5, 70, 300}) {
          for (const int32_t per_seq : {1, n_kv_heads, n_heads}) {
            const Lists lists(a.kv_len, per_seq, 1, n, random);
            for (const bool with_lse : {false, true}) {
              const ValuesCase values(a, lists, with_lse);
              Check(
                  fmt::format("SumValues {} of {} heads of {}, {} {}, up to {} of {} lists{}",
                              n_heads, n_kv_heads, dv, DTypeName(dtype),
                              kNames[static_cast<size_t>(planes)], n, per_seq,
                              with_lse ? ", by sums of all tokens" : ""),
                  [&](const Execute& run) { return values.Run(run); }, turn++);
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace omnikv::parity::parity_values_test
