// Shapes that models have, crossed: every op, format, K/V type, head width, group of heads and
// number of rows. parity_cuda_test runs all of them, parity_test a sample.
#include <fmt/format.h>

#include "parity_data.h"

namespace omnikv::parity::parity_sweep_test {
namespace {

constexpr int32_t kHeadDims[] = {64, 80, 96, 128, 256};
constexpr int32_t kGroups[] = {1, 2, 3, 4, 5, 6, 7, 8, 12, 16};
constexpr int32_t kRows[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 40, 200};

using ParitySweepTest = ParityTest;

// Counts the cases of a sweep, and chooses those that are run.
class Sweep {
 public:
  bool Take() { return turn_++ % SweepStride() == 0; }

 private:
  int64_t turn_ = 0;
};

// Rows of a step spread over sequences, in one of three ways.
std::vector<int32_t> Spread(int32_t rows, int64_t way) {
  if (way % 3 == 0 || rows == 1) return {rows};               // a prompt, or a draft to verify
  if (way % 3 == 1) return {rows - rows / 3, rows / 3};       // two of them
  return std::vector<int32_t>(static_cast<size_t>(rows), 1);  // a batch
}

// Lengths with some past before the rows of each sequence.
std::vector<int32_t> Lengths(const std::vector<int32_t>& q_len, int32_t most, Random& random) {
  std::vector<int32_t> lens;
  for (int32_t n : q_len) lens.push_back(n + random.Int(0, most));
  return lens;
}

AttnPlan SinksAndWindow(int32_t sinks, int32_t window) {
  AttnPlan plan;
  plan.Add({.begin = 0, .end = sinks});
  plan.Add({.window = window, .begin = sinks});
  return plan;
}

// Attention over `lists` chosen from what lies before the last third of each sequence, then that
// third by bounds.
void RunListsAndBounds(const Attention& a, int32_t lists, int32_t unit, int32_t n, Random& random) {
  std::vector<int32_t> before;
  std::vector<int32_t> bounds;
  for (int32_t len : a.kv_len) {
    const int32_t split = len * 2 / 3 / unit * unit;
    before.push_back(split);
    bounds.insert(bounds.end(), {split, len});
  }
  const Lists chosen(before, lists, unit, n, random);
  AttnPlan plan;
  plan.Add(chosen.Segment());
  plan.Add({.bounds = bounds.data()});
  a.Run(fmt::format("{} lists of {} units of {} and bounds", lists, n, unit), plan);
}

// One of the plans that policies make. Scores are asked for by two of them.
constexpr int64_t kPlans = 10;
void RunPlan(const Attention& a, int64_t plan, Random& random) {
  const int32_t heads = a.shape.n_kv_heads;
  const auto only = [&](const Lists& lists, const std::string& what) {
    AttnPlan chosen;
    chosen.Add(lists.Segment());
    a.Run(what, chosen);
  };
  switch (plan) {
    case 0:
      return a.Run("dense", AttnPlan::Dense());
    case 1:
      return a.Run("dense, softcap", AttnPlan::Dense(), ScoreKind::kNone, 15.0f);
    case 2:
      return a.Run("window", AttnPlan::Dense(33));
    case 3:
      return a.Run("sinks and window", SinksAndWindow(4, 64));
    case 4:
      return RunListsAndBounds(a, 1, 1, 48, random);
    case 5:
      return RunListsAndBounds(a, heads, 16, 5, random);
    case 6:
      return only(Lists(a.kv_len, heads, 1, 70, random), "a list a head");
    case 7:
      return only(Lists(a.kv_len, 1, 16, 7, random), "a list of blocks");
    case 8:
      return a.Run("logits", AttnPlan::Dense(), ScoreKind::kLogits);
    case 9:
      return a.Run("maximum over heads", AttnPlan::Dense(), ScoreKind::kHeadMax);
  }
}

// Tokens of a block: the bank's, smaller, and a working set's, whose block table is its slots.
constexpr int32_t kBlocks[] = {64, 16, 1};

TEST_F(ParitySweepTest, AttendFewRows) {
  Random random(101);
  Sweep sweep;
  int32_t shape = 0;
  for (DType dtype : kKvTypes) {
    for (int32_t dim : kHeadDims) {
      for (int32_t group : kGroups) {
        const int32_t kv_heads = 1 << shape % 3;
        for (int32_t plan = 0; plan < kPlans; ++plan) {
          if (!sweep.Take()) continue;
          // Half of them one row: what a decode step has.
          const bool one = (shape / 10 + plan) % 2 == 0;
          const int32_t rows = one ? 1 : 2 + (shape * 7 + plan * 3 + shape / 10) % 15;
          const std::vector<int32_t> q_len = Spread(rows, shape + plan);
          const Attention a({kv_heads * group, kv_heads, dim, dim, dtype}, q_len,
                            Lengths(q_len, q_len.size() > 2 ? 120 : 300, random), random,
                            kBlocks[(shape + plan) % 3]);
          RunPlan(a, plan, random);
        }
        ++shape;
      }
    }
  }
}

TEST_F(ParitySweepTest, AttendManyRows) {
  Random random(102);
  Sweep sweep;
  int32_t turn = 0;
  for (int32_t dim : kHeadDims) {
    for (int32_t group : kGroups) {
      for (int32_t rows : {17, 40, 200}) {
        for (DType dtype : kKvTypes) {
          if (rows == 200 && group % 3 != 1) continue;
          ++turn;
          if (!sweep.Take()) continue;
          const int32_t kv_heads = rows == 200 ? 1 : 1 + turn % 2;
          // 200 rows as a batch would be 200 sequences.
          const std::vector<int32_t> q_len = Spread(rows, rows == 200 ? turn % 2 : turn);
          const Attention a({kv_heads * group, kv_heads, dim, dim, dtype}, q_len,
                            Lengths(q_len, turn % 4 == 0 ? 0 : 130, random), random,
                            kBlocks[turn / 2 % 2]);
          RunPlan(a, rows == 200 ? turn % 4 : turn % kPlans, random);
        }
      }
    }
  }
}

TEST_F(ParitySweepTest, AttendLongContexts) {
  Random random(103);
  Sweep sweep;
  struct Long {
    std::vector<int32_t> q_len, kv_len;
    Shape shape;
  };
  const Long cases[] = {
      {{1}, {40001}, {4, 1, 64, 64, DType::kF16}},
      {{2, 1}, {9000, 20000}, {8, 2, 128, 128, DType::kBF16}},
      {{1, 1, 1, 1}, {1, 16, 5000, 129}, {16, 2, 80, 80, DType::kF16}},
      {{8}, {6000}, {6, 2, 96, 96, DType::kBF16}},
      {{1}, {3000}, {4, 1, 256, 256, DType::kF32}},
      {{64}, {2100}, {4, 1, 128, 128, DType::kBF16}},
      {{600}, {600}, {2, 1, 64, 64, DType::kF16}},
      {{129, 1, 128}, {700, 350, 128}, {3, 1, 64, 64, DType::kF16}},
      {{257}, {400}, {7, 1, 128, 128, DType::kF16}},
  };
  for (const Long& c : cases) {
    if (!sweep.Take()) continue;
    const Attention a(c.shape, c.q_len, c.kv_len, random, 64);
    const bool few = a.step.n_rows() <= 16;
    for (int64_t plan = 0; plan < (few ? kPlans : 4); ++plan) RunPlan(a, plan, random);
    if (!few) continue;
    RunListsAndBounds(a, 1, 1, 2048, random);
    RunListsAndBounds(a, c.shape.n_kv_heads, 1, 1500, random);
    RunListsAndBounds(a, 1, 16, 128, random);
  }
}

void CheckLinear(const Weights& w, int32_t rows, const float* bias, Random& random) {
  const WeightRef ref = w.Ref();
  const std::vector<float> x = random.Floats(static_cast<size_t>(rows * ref.n_in));
  Check(fmt::format("Linear {} [{}, {}] rows {}", DTypeName(ref.format), ref.n_out, ref.n_in, rows),
        [&](const Execute& run) {
          std::vector<float> y(static_cast<size_t>(rows * ref.n_out), kPoison);
          run(LinearArgs{.x = x.data(), .w = ref, .bias = bias, .y = y.data(), .n_rows = rows});
          return Outputs{{"y", y}};
        });
}

TEST_F(ParitySweepTest, Linear) {
  Random random(104);
  Sweep sweep;
  for (DType format : kFormats) {
    for (const auto& [n_in, n_out] :
         {std::pair<int64_t, int64_t>{512, 264}, {1024, 72}, {96, 520}, {4096, 64}, {64, 2056}}) {
      const Weights w(format, n_out, n_in, random);
      const std::vector<float> bias = random.Floats(static_cast<size_t>(n_out));
      for (int32_t rows : kRows) {
        if (sweep.Take()) CheckLinear(w, rows, rows % 2 == 0 ? nullptr : bias.data(), random);
      }
    }
  }
}

TEST_F(ParitySweepTest, LinearOfLargeMatrices) {
  Random random(112);
  Sweep sweep;
  for (DType format : kFormats) {
    for (const auto& [n_in, n_out] :
         {std::pair<int64_t, int64_t>{14336, 512}, {4096, 2048}, {128, 32003}}) {
      if (!sweep.Take()) continue;
      const Weights w(format, n_out, n_in, random);
      for (int32_t rows : {1, 6, 20}) {
        if (rows == 20 && n_in != 4096) continue;
        CheckLinear(w, rows, nullptr, random);
      }
    }
  }
}

// Lengths that a card splits over more and fewer blocks, whole and with a tail.
TEST_F(ParitySweepTest, LinearOfLongRows) {
  Random random(113);
  Sweep sweep;
  for (const auto& [n_in, n_out] : {std::pair<int64_t, int64_t>{888, 130},
                                    {2048, 37},
                                    {2056, 4321},
                                    {3072, 40},
                                    {5120, 300},
                                    {6136, 19},
                                    {8192, 16},
                                    {11008, 300},
                                    {14328, 33},
                                    {16392, 24},
                                    {18944, 300}}) {
    const Weights w(DType::kBF16, n_out, n_in, random);
    const std::vector<float> bias = random.Floats(static_cast<size_t>(n_out));
    for (int32_t rows : {1, 2, 5, 8, 9, 16}) {
      if (sweep.Take()) CheckLinear(w, rows, rows % 2 == 0 ? nullptr : bias.data(), random);
    }
  }
}

// Of one row of activations: rows of weights that one block of a card splits over its warps in one
// piece each, in two, and longer ones.
TEST_F(ParitySweepTest, LinearOfOneRowByLongRows) {
  Random random(114);
  Sweep sweep;
  for (DType format : kFormats) {
    for (const auto& [n_in, n_out] : {std::pair<int64_t, int64_t>{16416, 40},
                                      {18944, 300},
                                      {20480, 133},
                                      {20512, 20},
                                      {29568, 150},
                                      {32768, 17},
                                      {32800, 17}}) {
      if (!sweep.Take()) continue;
      const Weights w(format, n_out, n_in, random);
      const std::vector<float> bias = random.Floats(static_cast<size_t>(n_out));
      CheckLinear(w, 1, bias.data(), random);
    }
  }
}

// Batches of sequences: products that fill a card in one pass over the activations and in several,
// with whole tiles of rows and without.
TEST_F(ParitySweepTest, LinearOfBatches) {
  Random random(115);
  Sweep sweep;
  for (const auto& [n_in, n_out] : {std::pair<int64_t, int64_t>{192, 8},
                                    {320, 61},
                                    {512, 4300},
                                    {128, 32003},
                                    {2304, 512},
                                    {3072, 1056},
                                    {3584, 300},
                                    {4096, 6144},
                                    {4104, 40},
                                    {8192, 200},
                                    {9216, 130},
                                    {14336, 264},
                                    {18944, 96}}) {
    const Weights w(DType::kBF16, n_out, n_in, random);
    const std::vector<float> bias = random.Floats(static_cast<size_t>(n_out));
    for (int32_t rows : {9, 12, 16}) {
      if (sweep.Take()) CheckLinear(w, rows, rows % 2 == 0 ? nullptr : bias.data(), random);
    }
  }
}

TEST_F(ParitySweepTest, NormGatedFfn) {
  Random random(105);
  Sweep sweep;
  int32_t turn = 0;
  for (DType format : kFormats) {
    for (const auto& [d, ffn] : {std::pair<int32_t, int32_t>{256, 136},
                                 {1024, 48},
                                 {4096, 21},
                                 {5128, 36},
                                 {4096, 1100}}) {
      const Weights gate(format, ffn, d, random);
      const Weights up(format, ffn, d, random);
      const std::vector<float> bias = random.Floats(static_cast<size_t>(ffn));
      for (int32_t rows : kRows) {
        ++turn;
        if ((d > 4000 && (format != DType::kBF16 || rows > 16)) || !sweep.Take()) continue;
        const ResidualData in(kResiduals[turn % 4], rows, d, random);
        Check(
            fmt::format("NormGatedFfn {} d {} ffn {} rows {}", DTypeName(format), d, ffn, rows),
            [&, ffn = ffn](const Execute& run) {
              std::vector<float> x;
              std::vector<float> out(static_cast<size_t>(rows * ffn), kPoison);
              run(NormGatedFfnArgs{.in = in.On(x),
                                   .gate = gate.Ref(),
                                   .up = up.Ref(),
                                   .gate_bias = turn % 5 == 0 ? bias.data() : nullptr,
                                   .up_bias = turn % 5 < 2 ? bias.data() : nullptr,
                                   .act = turn % 3 == 0 ? Activation::kGeluTanh : Activation::kSilu,
                                   .out = out.data(),
                                   .n_rows = rows});
              return Outputs{{"x", x, 2e-6}, {"out", out}};
            });
      }
    }
  }
}

TEST_F(ParitySweepTest, NormLogits) {
  Random random(106);
  Sweep sweep;
  constexpr int32_t kDim = 256;
  constexpr int32_t kVocab = 1001;
  int32_t turn = 0;
  for (DType format : kFormats) {
    const Weights head(format, kVocab, kDim, random);
    const std::vector<float> bias = random.Floats(kVocab);
    for (int32_t rows : kRows) {
      std::vector<int32_t> some;
      for (int32_t r = rows - 1; r >= 0; r -= 2) some.push_back(r);  // in any order
      for (const std::vector<int32_t>& chosen :
           {std::vector<int32_t>{}, std::vector<int32_t>{rows - 1}, some}) {
        ++turn;
        if (!sweep.Take() || (chosen.empty() && rows == 200)) continue;
        const ResidualData in(kResiduals[turn % 4], rows, kDim, random);
        const auto n_out = chosen.empty() ? rows : static_cast<int32_t>(chosen.size());
        Check(fmt::format("NormLogits {} rows {} of {}", DTypeName(format), n_out, rows),
              [&](const Execute& run) {
                std::vector<float> x;
                std::vector<float> logits(static_cast<size_t>(n_out) * kVocab, kPoison);
                run(NormLogitsArgs{.in = in.On(x),
                                   .head = head.Ref(),
                                   .bias = turn % 3 == 0 ? bias.data() : nullptr,
                                   .scale = turn % 2 == 0 ? 0.5f : 1.0f,
                                   .softcap = turn % 5 == 0 ? 30.0f : 0.0f,
                                   .out_rows = chosen.empty() ? nullptr : chosen.data(),
                                   .logits = logits.data(),
                                   .n_rows = rows,
                                   .n_out = n_out});
                return Outputs{{"x", x, 2e-6}, {"logits", logits}};
              });
      }
    }
  }
}

// The case of one shape, `d` wide; `turn` chooses what is not crossed.
void CheckQkv(DType format, int32_t d, int32_t dim, int32_t group, int32_t rows, int32_t turn,
              Random& random) {
  constexpr QkNorm kNorms[] = {QkNorm::kNone, QkNorm::kNone, QkNorm::kPerHead, QkNorm::kFull};
  const DType kv_type = kKvTypes[turn % 3];
  const QkNorm norm = kNorms[turn / 3 % 4];
  const int32_t n_freq = turn % 5 == 4 ? 0 : turn % 7 == 6 ? dim / 4 : dim / 2;
  const int32_t kv_heads = dim * group > 1500 ? 1 : 1 + turn % 3;
  const int32_t heads = kv_heads * group;
  const bool bias = turn / 2 % 2 == 1;
  const Weights wq(format, heads * dim, d, random);
  const Weights wk(format, kv_heads * dim, d, random);
  const Weights wv(format, kv_heads * dim, d, random);
  const auto bq = random.Floats(static_cast<size_t>(heads * dim));
  const auto bk = random.Floats(static_cast<size_t>(kv_heads * dim));
  const auto bv = random.Floats(static_cast<size_t>(kv_heads * dim));
  const auto q_norm = random.Floats(static_cast<size_t>(heads * dim));
  const auto k_norm = random.Floats(static_cast<size_t>(kv_heads * dim));
  const std::vector<int32_t> q_len = Spread(rows, rows == 200 ? 0 : turn);
  const std::vector<int32_t> kv_len = Lengths(q_len, 20, random);
  const Bank bank(kv_type, kv_heads, dim, dim, 16, std::vector<int32_t>(q_len.size(), 0), rows + 20,
                  random);
  const Step step(q_len, kv_len, [&](int32_t s) { return bank.TableOff(s); });
  const ResidualData in(kResiduals[turn / 5 % 4], rows, d, random);
  std::vector<float> cos_sin;
  for (int32_t i = 0; i < rows * n_freq; ++i) {
    const float angle = random.Floats(1)[0];
    cos_sin.push_back(std::cos(angle));
    cos_sin.push_back(std::sin(angle));
  }
  Check(fmt::format("NormQkvRopeAppend {} heads {}/{} of {} kv {} rows {} norm {} frequencies {}",
                    DTypeName(format), heads, kv_heads, dim, DTypeName(kv_type), rows,
                    static_cast<int>(norm), n_freq),
        [&](const Execute& run) {
          Bank copy = bank;
          std::vector<float> x;
          std::vector<float> q(static_cast<size_t>(rows * heads * dim), kPoison);
          run(NormQkvRopeAppendArgs{.in = in.On(x),
                                    .wq = wq.Ref(),
                                    .wk = wk.Ref(),
                                    .wv = wv.Ref(),
                                    .bq = bias ? bq.data() : nullptr,
                                    .bk = bias ? bk.data() : nullptr,
                                    .bv = bias ? bv.data() : nullptr,
                                    .qk_norm = norm,
                                    .q_norm = q_norm.data(),
                                    .k_norm = k_norm.data(),
                                    .qk_norm_eps = 1e-6f,
                                    .cos_sin = n_freq > 0 ? cos_sin.data() : nullptr,
                                    .n_freq = n_freq,
                                    .q = q.data(),
                                    .n_heads = heads,
                                    .kv = copy.View(),
                                    .rows = step.rows.data(),
                                    .seqs = step.seqs.data(),
                                    .n_rows = rows});
          return Outputs{{"x", x, 2e-6}, {"q", q, 2e-5}, copy.Values()};
        });
}

TEST_F(ParitySweepTest, NormQkvRopeAppend) {
  Random random(107);
  Sweep sweep;
  int32_t turn = 0;
  for (DType format : kFormats) {
    for (int32_t dim : kHeadDims) {
      for (int32_t group : kGroups) {
        for (int32_t rows : {1, kRows[static_cast<size_t>(turn * 3) % std::size(kRows)]}) {
          ++turn;
          if (sweep.Take()) CheckQkv(format, 128, dim, group, rows, turn, random);
        }
      }
    }
  }
}

TEST_F(ParitySweepTest, NormQkvRopeAppendOfLongRows) {
  Random random(114);
  Sweep sweep;
  int32_t turn = 0;
  for (int32_t d : {2304, 4096}) {
    for (int32_t rows : {2, 7, 8, 11, 16}) {
      for (int32_t dim : {64, 80}) {
        ++turn;
        if (sweep.Take()) CheckQkv(DType::kBF16, d, dim, 4, rows, turn, random);
      }
    }
  }
}

TEST_F(ParitySweepTest, Embed) {
  Random random(108);
  Sweep sweep;
  for (DType format : kFormats) {
    for (int64_t d : {512, 1056}) {
      const Weights table(format, 300, d, random);
      for (int32_t rows : kRows) {
        if (!sweep.Take()) continue;
        std::vector<int32_t> tokens;
        for (int32_t i = 0; i < rows; ++i) tokens.push_back(random.Int(0, 299));
        Check(fmt::format("Embed {} d {} rows {}", DTypeName(format), d, rows),
              [&](const Execute& run) {
                std::vector<float> x(static_cast<size_t>(rows * d), kPoison);
                run(EmbedArgs{.tokens = tokens.data(),
                              .table = table.Ref(),
                              .scale = rows % 2 == 0 ? 1.0f : 22.6f,
                              .x = x.data(),
                              .n_rows = rows});
                return Outputs{{"x", x, 1e-7}};
              });
      }
    }
  }
}

TEST_F(ParitySweepTest, RopeTable) {
  Random random(109);
  Sweep sweep;
  for (int32_t dim : kHeadDims) {
    std::vector<float> inv_freq;
    for (int32_t i = 0; i < dim / 2; ++i) {
      inv_freq.push_back(
          std::pow(500000.0f, -2.0f * static_cast<float>(i) / static_cast<float>(dim)));
    }
    for (int32_t rows : {1, 16, 17, 200}) {
      if (!sweep.Take()) continue;
      std::vector<RowMeta> meta;
      for (int32_t i = 0; i < rows; ++i) meta.push_back({0, random.Int(0, (4 << 20) - 1)});
      Check(fmt::format("RopeTable {} frequencies, rows {}", dim / 2, rows),
            [&](const Execute& run) {
              std::vector<float> cs(static_cast<size_t>(rows * dim), kPoison);
              run(RopeTableArgs{.rows = meta.data(),
                                .inv_freq = inv_freq.data(),
                                .magnitude = 1.0f,
                                .cos_sin = cs.data(),
                                .n_freq = dim / 2,
                                .n_rows = rows});
              return Outputs{{"cos_sin", cs, 0}};
            });
    }
  }
}

TEST_F(ParitySweepTest, ScoreReduce) {
  Random random(110);
  Sweep sweep;
  for (int32_t heads : {1, 8, 14, 32}) {
    for (int32_t rows : {1, 3, 16}) {
      for (int32_t last : {63, 1000, 20001}) {
        if (!sweep.Take() || (last > 10000 && rows * heads > 100)) continue;
        std::vector<RowMeta> meta;  // of consecutive positions, in two sequences
        for (int32_t r = 0; r < rows; ++r) meta.push_back({r % 2, last - rows / 2 + r / 2});
        const int64_t stride = last + 5;
        const auto logits = random.Floats(static_cast<size_t>(rows * heads * stride), 5.0f);
        const auto lse = random.Floats(static_cast<size_t>(rows * heads), 3.0f);
        Check(fmt::format("ScoreReduce heads {} rows {} last {}", heads, rows, last),
              [&](const Execute& run) {
                std::vector<float> out(static_cast<size_t>(2 * 8 * stride), kPoison);
                run(ScoreReduceArgs{.logits = logits.data(),
                                    .lse = last == 1000 ? nullptr : lse.data(),
                                    .out = out.data(),
                                    .rows = meta.data(),
                                    .stride = stride,
                                    .ring = 8,
                                    .n_heads = heads,
                                    .n_rows = rows});
                return Outputs{{"out", out, last == 1000 ? 0 : 1e-5}};
              });
      }
    }
  }
}

TEST_F(ParitySweepTest, TopK) {
  Random random(111);
  Sweep sweep;
  for (Scores kind : {Scores::kNormal, Scores::kManyTies, Scores::kAllEqual, Scores::kPositive,
                      Scores::kNarrow, Scores::kBroken}) {
    for (int32_t n : {31, 256, 1025, 4096, 16385, 150000}) {
      for (int32_t pick : {1, 31, 512, 2048}) {
        if (!sweep.Take()) continue;
        const int32_t window = n < 10000 && pick % 2 == 1 ? 4 : 1;
        std::vector<Choice> choices = {{n + 3, n, pick}};
        if (n < 10000) choices.push_back({n / 2 + 9, n / 2, pick / 2});
        CheckTopK(kind, window, choices, pick, random);
      }
    }
  }
}

}  // namespace
}  // namespace omnikv::parity::parity_sweep_test
