// Parity of attentions over a part of the tokens or of the heads, and of their merge.
#include <fmt/format.h>

#include <algorithm>
#include <tuple>
#include <utility>

#include "backend/ref/ref_backend.h"
#include "backend/resolve_plan.h"
#include "parity_data.h"

namespace omnikv::parity::parity_partial_test {
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

TEST_F(ParityTest, PickHeads) {
  Random random(33);
  for (const auto& [n_rows, n_heads, width] :
       {std::tuple{1, 8, 512}, {3, 5, 7}, {40, 8, 128}, {2, 64, 4}}) {
    for (const uint64_t mask : {uint64_t{1}, uint64_t{0x16}, ~uint64_t{0}}) {
      const uint64_t heads = n_heads == 64 ? mask : mask & ((uint64_t{1} << n_heads) - 1);
      for (const bool back : {false, true}) {
        Check(fmt::format("PickHeads {:#x} of {} in {} rows of {}{}", heads, n_heads, n_rows, width,
                          back ? ", back" : ""),
              [&, n_rows = n_rows, n_heads = n_heads, width = width](const Execute& run) {
                PickHeadsArgs args{.heads = {heads},
                                   .n_heads = n_heads,
                                   .width = width,
                                   .n_rows = n_rows,
                                   .back = back};
                const auto all = static_cast<size_t>(n_rows) * static_cast<size_t>(n_heads * width);
                const auto some =
                    static_cast<size_t>(n_rows) * static_cast<size_t>(args.Named() * width);
                Random own(34);
                const std::vector<float> from = own.Floats(back ? some : all);
                std::vector<float> to(back ? all : some, kPoison);
                args.from = from.data();
                args.to = to.data();
                run(args);
                Array out{"to", to};
                out.tolerance = 0;
                return Outputs{out};
              });
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

// What is asked of an attention besides its plan.
struct Asked {
  HeadMask heads;
  const float* lse_in = nullptr;
  ScoreKind score = ScoreKind::kNone;
  bool each_query_head = false;  // has lists of its own
};

// The cost is that of the tokens that ResolvePlan gives: of each sequence's last row, since rows of
// a sequence share what they read.
void CheckCost(const AttendArgs& args) {
  const auto ref = MakeRefBackend();
  const std::vector<std::vector<int32_t>> tokens = ResolvePlan(*ref, args);
  int64_t head_tokens = 0;
  for (const SeqMeta& seq : std::vector<SeqMeta>(args.seqs, args.seqs + args.n_seqs)) {
    const int32_t last = seq.q_begin + seq.q_len - 1;
    for (int32_t h = 0; h < args.kv.n_kv_heads; ++h) {
      head_tokens +=
          static_cast<int64_t>(tokens[static_cast<size_t>(last * args.kv.n_kv_heads + h)].size());
    }
  }
  EXPECT_EQ(CostOf(args).kv_bytes, KvBytes(args.kv, head_tokens, /*values=*/true));
}

AttendArgs ArgsOf(const Attention& a, const AttnPlan& plan, const Asked& asked) {
  AttendArgs args = a.Args(plan);
  if (asked.each_query_head) args.kv = args.kv.EachQueryHead(args.Group());
  return args;
}

void CheckAttend(const std::string& name, const Attention& a, const AttnPlan& plan,
                 const Asked& asked) {
  const auto n_rows = static_cast<size_t>(a.step.n_rows());
  const auto row_heads = n_rows * static_cast<size_t>(a.shape.n_heads);
  const int64_t stride = *std::max_element(a.kv_len.begin(), a.kv_len.end());
  const size_t score_rows = asked.score == ScoreKind::kNone      ? 0
                            : asked.score == ScoreKind::kHeadMax ? n_rows
                                                                 : row_heads;
  Check(fmt::format("Attend {:#x} of {} KV heads, {} of {}/{} {}: {}", asked.heads.bits,
                    a.shape.n_kv_heads, a.shape.n_heads, a.shape.dk, a.shape.dv,
                    DTypeName(a.shape.dtype), name),
        [&](const Execute& run) {
          std::vector<float> o(row_heads * static_cast<size_t>(a.shape.dv), kPoison);
          std::vector<float> lse(row_heads, kPoison);
          std::vector<float> scores(score_rows * static_cast<size_t>(stride), kPoison);
          AttendArgs args = ArgsOf(a, plan, asked);
          args.o = o.data();
          args.lse = lse.data();
          args.lse_in = asked.lse_in;
          args.score = asked.score;
          args.scores = scores.data();
          args.score_stride = stride;
          args.heads = asked.heads;
          run(args);
          return Outputs{{"o", o}, {"lse", lse}, {"scores", scores}};
        });
  AttendArgs args = ArgsOf(a, plan, asked);
  std::vector<float> o(1);
  args.o = o.data();
  args.heads = asked.heads;
  CheckCost(args);
}

std::vector<Shape> ManyShapes(DType dtype) {
  return {{8, 4, 64, 64, dtype},
          {6, 3, 128, 128, dtype},
          {36, 2, 64, 64, dtype},
          {6, 3, 80, 64, dtype}};
}

AttnPlan Sinks(int32_t window) {
  AttnPlan plan;
  plan.Add({.begin = 0, .end = 4});
  plan.Add({.window = window, .begin = 4});
  return plan;
}

TEST_F(ParityTest, AttendSomeHeads) {
  Random random(33);
  for (DType dtype : kKvTypes) {
    for (const Shape& s : ManyShapes(dtype)) {
      for (const std::vector<int32_t>& q_len :
           {std::vector<int32_t>{1}, std::vector<int32_t>{1, 3}, std::vector<int32_t>{20, 1, 17}}) {
        const std::vector<int32_t> lens = {500, 61, 30};
        const std::vector<int32_t> kv_len(lens.begin(),
                                          lens.begin() + static_cast<ptrdiff_t>(q_len.size()));
        const Attention a(s, q_len, kv_len, random);
        const Lists lists(kv_len, s.n_kv_heads, 4, 90, random);
        AttnPlan listed;
        listed.Add(lists.Segment());
        const uint64_t all = (uint64_t{1} << s.n_kv_heads) - 1;
        for (const uint64_t heads : {all & 1, all & 2, all & 0xe, all & 0x5, all}) {
          CheckAttend("dense", a, AttnPlan::Dense(), {{heads}});
          CheckAttend("sinks and window", a, Sinks(20), {{heads}});
          CheckAttend("lists", a, listed, {{heads}});
        }
        if (q_len.size() != 2) continue;
        for (const ScoreKind score : {ScoreKind::kLogits, ScoreKind::kHeadMax}) {
          CheckAttend("scores", a, AttnPlan::Dense(), {.heads = {all & 0xa}, .score = score});
        }
      }
    }
  }
}

TEST_F(ParityTest, AttendSomeHeadsOfPlanesApart) {
  Random random(36);
  for (DType dtype : kKvTypes) {
    for (const Shape& s : ManyShapes(dtype)) {
      for (const std::vector<int32_t>& q_len :
           {std::vector<int32_t>{1, 3}, std::vector<int32_t>{20, 70}}) {
        const std::vector<int32_t> kv_len = {500, 71};
        const Attention a(s, q_len, kv_len, random, 16, Planes::kApart);
        const Lists lists(kv_len, s.n_kv_heads, 4, 90, random);
        AttnPlan listed;
        listed.Add(lists.Segment());
        const uint64_t all = (uint64_t{1} << s.n_kv_heads) - 1;
        for (const uint64_t heads : {all & 0x5, all & 0xa}) {
          CheckAttend("dense, planes apart", a, AttnPlan::Dense(), {{heads}});
          CheckAttend("lists, planes apart", a, listed, {{heads}});
        }
      }
    }
  }
}

// The bank has two of a layer's KV heads alone.
TEST_F(ParityTest, AttendHeadsThatLieAlone) {
  Random random(37);
  for (DType dtype : kKvFormats) {
    for (const Shape& s : ManyShapes(dtype)) {
      if (!Fits(s)) continue;
      for (const std::vector<int32_t>& q_len :
           {std::vector<int32_t>{1, 3}, std::vector<int32_t>{20, 70}}) {
        if (q_len.front() > 1 && (s.dk > 64 || s.n_heads > 8)) continue;  // many sums
        const Shape alone{s.n_heads / s.n_kv_heads * 2, 2, s.dk, s.dv, dtype};
        const Attention a(alone, q_len, {500, 71}, random);
        RunAlone("dense", a, AttnPlan::Dense(), random);
        RunAlone("sinks and window", a, Sinks(20), random);
      }
    }
  }
}

// Each query head of a group has a list of its own.
TEST_F(ParityTest, AttendListsOfQueryHeads) {
  Random random(38);
  for (DType dtype : kKvFormats) {
    for (const Shape& s : ManyShapes(dtype)) {
      if (!Fits(s)) continue;
      for (const Planes planes : {Planes::kApart, Planes::kTogether}) {
        const Attention a(s, {1, 1, 3}, {500, 71, 9}, random, 16, planes);
        const Lists lists(a.kv_len, s.n_heads, 1, 90, random);
        AttnPlan plan;
        plan.Add(lists.Segment());
        CheckAttend("lists of query heads", a, plan, {.each_query_head = true});
      }
    }
  }
}

TEST_F(ParityTest, AttendWithAnOutsideNormaliser) {
  Random random(34);
  for (DType dtype : kKvTypes) {
    for (const Shape& s : ManyShapes(dtype)) {
      for (const std::vector<int32_t>& q_len :
           {std::vector<int32_t>{1, 3}, std::vector<int32_t>{20, 1}}) {
        const std::vector<int32_t> kv_len = {500, 61};
        const Attention a(s, q_len, kv_len, random);
        std::vector<float> lse_in =
            random.Floats(static_cast<size_t>(a.step.n_rows() * s.n_heads), 0.5f);
        for (float& lse : lse_in) lse += 6;  // about that of the whole
        CheckAttend("outside normaliser", a, AttnPlan::Dense(), {.lse_in = lse_in.data()});
        CheckAttend("outside normaliser", a, Sinks(3), {{2}, lse_in.data()});
        const Lists lists(kv_len, s.n_kv_heads, 1, 3, random);  // some rows read none of theirs
        AttnPlan listed;
        listed.Add(lists.Segment());
        CheckAttend("outside normaliser, lists", a, listed, {.lse_in = lse_in.data()});
      }
    }
  }
}

// Rows of prompts, in which each row reads another part of its sequence's lists.
TEST_F(ParityTest, AttendListsOfKvHeads) {
  Random random(35);
  for (DType dtype : kKvTypes) {
    for (const Shape& s : ManyShapes(dtype)) {
      for (const std::vector<int32_t>& q_len :
           {std::vector<int32_t>{1, 1}, std::vector<int32_t>{3, 20}, std::vector<int32_t>{40, 7}}) {
        const Attention a(s, q_len, {200, 33}, random);
        std::vector<int32_t> before;
        for (const SeqMeta& seq : a.step.seqs) before.push_back(seq.kv_len - seq.q_len);
        for (const int32_t unit : {1, 4, 16}) {
          const Lists lists(a.kv_len, s.n_kv_heads, unit, 90, random);
          for (const int32_t window : {0, 30}) {
            AttnPlan plan;
            plan.Add(lists.Segment(window));
            CheckAttend(fmt::format("units of {}, window {}", unit, window), a, plan, {});
          }
        }
        AttnPlan plan;  // what was there before the step by lists, and the step's own rows
        const Lists chosen(before, s.n_kv_heads, 1, 40, random);
        std::vector<int32_t> bounds;
        for (const SeqMeta& seq : a.step.seqs) {
          bounds.insert(bounds.end(), {seq.kv_len - seq.q_len, seq.kv_len});
        }
        plan.Add(chosen.Segment());
        plan.Add({.bounds = bounds.data()});
        CheckAttend("lists and the step's rows", a, plan, {});
      }
    }
  }
}

}  // namespace
}  // namespace omnikv::parity::parity_partial_test
