// Parity of the ops that read weights, and of the row ops around them.
#include <fmt/format.h>

#include "parity_data.h"

namespace omnikv::parity::parity_linear_test {
namespace {

TEST_F(ParityTest, Embed) {
  Random random(1);
  for (DType format : kFormats) {
    for (int64_t d : {32, 40, 96, 7}) {
      if (!Fits(format, d)) continue;
      const Weights table(format, 50, d, random);
      for (int32_t n_rows : {1, 3, 64}) {
        std::vector<int32_t> tokens;
        for (int32_t i = 0; i < n_rows; ++i) tokens.push_back(random.Int(0, 49));
        for (float scale : {1.0f, 5.5f}) {
          Check(fmt::format("Embed {} d {} rows {}", DTypeName(format), d, n_rows),
                [&](const Execute& run) {
                  std::vector<float> x(static_cast<size_t>(n_rows * d), kPoison);
                  run(EmbedArgs{.tokens = tokens.data(),
                                .table = table.Ref(),
                                .scale = scale,
                                .x = x.data(),
                                .n_rows = n_rows});
                  return Outputs{{"x", x, 1e-7}};
                });
        }
      }
    }
  }
}

TEST_F(ParityTest, RopeTable) {
  Random random(2);
  const std::vector<RowMeta> rows = {{0, 0}, {0, 1}, {1, 31999}, {2, 1048575}, {0, 77}};
  for (int32_t n_freq : {1, 32, 40}) {
    std::vector<float> inv_freq;
    for (int32_t i = 0; i < n_freq; ++i) {
      inv_freq.push_back(std::pow(10000.0f, -static_cast<float>(i) / static_cast<float>(n_freq)));
    }
    for (int32_t n_rows : {1, 5}) {
      Check(fmt::format("RopeTable {} frequencies, rows {}", n_freq, n_rows),
            [&](const Execute& run) {
              std::vector<float> cs(static_cast<size_t>(n_rows * n_freq * 2), kPoison);
              run(RopeTableArgs{.rows = rows.data(),
                                .inv_freq = inv_freq.data(),
                                .magnitude = 1.25f,
                                .cos_sin = cs.data(),
                                .n_freq = n_freq,
                                .n_rows = n_rows});
              return Outputs{{"cos_sin", cs, 0}};
            });
    }
  }
}

struct LinearCase {
  int64_t n_in, n_out;
};

TEST_F(ParityTest, Linear) {
  Random random(3);
  for (DType format : kFormats) {
    for (const LinearCase c :
         {LinearCase{32, 1}, LinearCase{64, 37}, LinearCase{416, 130}, LinearCase{100, 21},
          LinearCase{33, 18}, LinearCase{1, 5}, LinearCase{1056, 66}}) {
      if (!Fits(format, c.n_in)) continue;
      const Weights w(format, c.n_out, c.n_in, random);
      const std::vector<float> bias = random.Floats(static_cast<size_t>(c.n_out));
      for (int32_t n_rows : {1, 2, 3, 5, 8, 17, 64}) {
        const std::vector<float> x = random.Floats(static_cast<size_t>(n_rows * c.n_in));
        Check(fmt::format("Linear {} [{}, {}] rows {}", DTypeName(format), c.n_out, c.n_in, n_rows),
              [&](const Execute& run) {
                std::vector<float> y(static_cast<size_t>(n_rows * c.n_out), kPoison);
                run(LinearArgs{.x = x.data(),
                               .w = w.Ref(),
                               .bias = n_rows % 2 == 0 ? nullptr : bias.data(),
                               .y = y.data(),
                               .n_rows = n_rows});
                return Outputs{{"y", y}};
              });
      }
    }
  }
}

TEST_F(ParityTest, NormGatedFfn) {
  Random random(4);
  for (DType format : kFormats) {
    for (const auto& [d, ffn] : {std::pair<int32_t, int32_t>{64, 70}, {96, 33}, {50, 16}}) {
      if (!Fits(format, d)) continue;
      const Weights gate(format, ffn, d, random);
      const Weights up(format, ffn, d, random);
      const std::vector<float> bias = random.Floats(static_cast<size_t>(ffn));
      for (int32_t n_rows : {1, 2, 3, 8, 17, 64}) {
        const ResidualData in(kResiduals[n_rows % 4], n_rows, d, random);
        for (Activation act : {Activation::kSilu, Activation::kGeluTanh}) {
          Check(fmt::format("NormGatedFfn {} d {} ffn {} rows {} act {}", DTypeName(format), d, ffn,
                            n_rows, static_cast<int>(act)),
                [&](const Execute& run) {
                  std::vector<float> x;
                  std::vector<float> out(static_cast<size_t>(n_rows * ffn), kPoison);
                  run(NormGatedFfnArgs{.in = in.On(x),
                                       .gate = gate.Ref(),
                                       .up = up.Ref(),
                                       .gate_bias = n_rows == 3 ? bias.data() : nullptr,
                                       .up_bias = n_rows == 2 ? bias.data() : nullptr,
                                       .act = act,
                                       .out = out.data(),
                                       .n_rows = n_rows});
                  return Outputs{{"x", x, 2e-6}, {"out", out}};
                });
        }
      }
    }
  }
}

TEST_F(ParityTest, NormLogits) {
  Random random(5);
  const int32_t d = 96;
  for (DType format : kFormats) {
    const Weights head(format, 203, d, random);
    const std::vector<float> bias = random.Floats(203);
    for (int32_t n_rows : {1, 3, 8, 17}) {
      const ResidualData in(kResiduals[n_rows % 4], n_rows, d, random);
      for (const std::vector<int32_t>& chosen :
           {std::vector<int32_t>{}, std::vector<int32_t>{n_rows - 1}, std::vector<int32_t>{0, 0}}) {
        for (float softcap : {0.0f, 30.0f}) {
          const auto n_out = chosen.empty() ? n_rows : static_cast<int32_t>(chosen.size());
          Check(fmt::format("NormLogits {} rows {} of {} softcap {}", DTypeName(format), n_out,
                            n_rows, softcap),
                [&](const Execute& run) {
                  std::vector<float> x;
                  std::vector<float> logits(static_cast<size_t>(n_out) * 203, kPoison);
                  run(NormLogitsArgs{.in = in.On(x),
                                     .head = head.Ref(),
                                     .bias = softcap > 0 ? bias.data() : nullptr,
                                     .scale = softcap > 0 ? 0.5f : 1.0f,
                                     .softcap = softcap,
                                     .out_rows = chosen.empty() ? nullptr : chosen.data(),
                                     .logits = logits.data(),
                                     .n_rows = n_rows,
                                     .n_out = n_out});
                  return Outputs{{"x", x, 2e-6}, {"logits", logits}};
                });
        }
      }
    }
  }
}

// More rows, and more outputs, than one product takes.
TEST_F(ParityTest, NormLogitsOfManyRows) {
  Random random(16);
  const int32_t d = 64;
  for (const int64_t n_out : {int64_t{500}, int64_t{32 * 1024 + 233}}) {
    const Weights head(DType::kBF16, n_out, d, random);
    const std::vector<float> bias = random.Floats(static_cast<size_t>(n_out));
    const int32_t n_rows = n_out > 1000 ? 20 : 70;
    const ResidualData in(kResiduals[0], n_rows, d, random);
    std::vector<int32_t> chosen;
    for (int32_t r = n_rows - 1; r > 0; r -= n_rows > 60 ? 1 : 2) chosen.push_back(r % 18);
    chosen.resize(std::max<size_t>(chosen.size(), 17), 3);
    for (const bool all : {true, false}) {
      const auto rows = all ? n_rows : static_cast<int32_t>(chosen.size());
      Check(fmt::format("NormLogits of {} rows of {}, {} outputs", rows, n_rows, n_out),
            [&](const Execute& run) {
              std::vector<float> x;
              std::vector<float> logits(static_cast<size_t>(rows * n_out), kPoison);
              run(NormLogitsArgs{.in = in.On(x),
                                 .head = head.Ref(),
                                 .bias = all ? bias.data() : nullptr,
                                 .scale = 0.5f,
                                 .softcap = all ? 0.0f : 30.0f,
                                 .out_rows = all ? nullptr : chosen.data(),
                                 .logits = logits.data(),
                                 .n_rows = n_rows,
                                 .n_out = rows});
              return Outputs{{"x", x, 2e-6}, {"logits", logits}};
            });
    }
  }
}

TEST_F(ParityTest, NormLogitsOfNoRowStillUpdatesTheResidual) {
  Random random(6);
  const Weights head(DType::kBF16, 40, 64, random);
  const ResidualData in(kResiduals[0], 5, 64, random);
  const int32_t unused = 0;
  Check("NormLogits, no rows", [&](const Execute& run) {
    std::vector<float> x;
    run(NormLogitsArgs{
        .in = in.On(x), .head = head.Ref(), .out_rows = &unused, .n_rows = 5, .n_out = 0});
    return Outputs{{"x", x, 2e-6}};
  });
}

struct QkvCase {
  int32_t n_heads, n_kv_heads, dk, dv, n_freq;
  QkNorm norm;
  bool bias;
};

// K of the step's rows in the bank, [n_rows, n_kv_heads, dk].
std::vector<float> KeysOf(const KvView& kv, const Step& step) {
  std::vector<float> keys;
  for (const RowMeta& row : step.rows) {
    const int64_t at = kv.RowIndex(step.seqs[static_cast<size_t>(row.seq)].table_off, row.pos);
    for (int32_t h = 0; h < kv.n_kv_heads; ++h) {
      for (size_t i = 0; i < static_cast<size_t>(kv.dk); ++i) {
        keys.push_back(LoadKvValue(kv.k, h, kv.k.Head(at, h), i));
      }
    }
  }
  return keys;
}

TEST_F(ParityTest, NormQkvRopeAppend) {
  Random random(7);
  const int32_t d = 64;
  constexpr QkvCase kCases[] = {
      {6, 2, 64, 64, 32, QkNorm::kNone, false},      {4, 4, 32, 32, 16, QkNorm::kPerHead, true},
      {8, 1, 80, 96, 40, QkNorm::kFull, false},      {3, 3, 24, 40, 8, QkNorm::kPerHead, false},
      {4, 2, 128, 128, 0, QkNorm::kNone, true},      {4, 2, 96, 64, 48, QkNorm::kNone, true},
      {2, 1, 256, 256, 64, QkNorm::kPerHead, false}, {5, 1, 13, 9, 6, QkNorm::kFull, true},
  };
  int turn = 0;
  for (const QkvCase& c : kCases) {
    for (DType format : kFormats) {
      const bool blocks = KvFits(DType::kQ8_0, c.dk) && KvFits(DType::kQ8_0, c.dv);
      const DType kv_type = (++turn % 3 == 0) ? DType::kF32
                            : (turn % 3 == 1) ? DType::kBF16
                            : blocks          ? (turn % 2 == 0 ? DType::kQ4_0 : DType::kQ8_0)
                                              : DType::kF16;
      const Weights wq(format, c.n_heads * c.dk, d, random);
      const Weights wk(turn % 5 == 0 ? DType::kQ8_0 : format, c.n_kv_heads * c.dk, d, random);
      const Weights wv(turn % 5 == 1 ? DType::kBF16 : format, c.n_kv_heads * c.dv, d, random);
      const auto bq = random.Floats(static_cast<size_t>(c.n_heads * c.dk));
      const auto bk = random.Floats(static_cast<size_t>(c.n_kv_heads * c.dk));
      const auto bv = random.Floats(static_cast<size_t>(c.n_kv_heads * c.dv));
      const auto q_norm = random.Floats(static_cast<size_t>(c.n_heads * c.dk));
      const auto k_norm = random.Floats(static_cast<size_t>(c.n_kv_heads * c.dk));
      for (const std::vector<int32_t>& q_len :
           {std::vector<int32_t>{1}, std::vector<int32_t>{2, 1}, std::vector<int32_t>{1, 9, 7}}) {
        constexpr Planes kPlanes[] = {Planes::kTogether, Planes::kApart, Planes::kByHead};
        const Planes planes = kPlanes[(turn + static_cast<int>(q_len.size())) % 3];
        std::vector<int32_t> kv_len;
        for (int32_t n : q_len) kv_len.push_back(n + random.Int(0, 20));
        const Bank bank(kv_type, c.n_kv_heads, c.dk, c.dv, 16,
                        std::vector<int32_t>(q_len.size(), 0), 48, random, planes);
        const Step step(q_len, kv_len, [&](int32_t s) { return bank.TableOff(s); });
        const int32_t n_rows = step.n_rows();
        const ResidualData in(kResiduals[turn % 4], n_rows, d, random);
        std::vector<float> cos_sin;
        for (int32_t i = 0; i < n_rows * c.n_freq; ++i) {
          const float angle = random.Floats(1)[0];
          cos_sin.push_back(std::cos(angle));
          cos_sin.push_back(std::sin(angle));
        }
        // Either, both and none of the outputs of K.
        const bool keys = (turn + n_rows) % 2 != 0;
        const bool raw_keys = (turn + n_rows) / 2 % 2 != 0;
        const auto k_values = static_cast<size_t>(n_rows * c.n_kv_heads * c.dk);
        Check(
            fmt::format("NormQkvRopeAppend {} heads {}/{} of {}/{} kv {} rows {}{}{}{}",
                        DTypeName(format), c.n_heads, c.n_kv_heads, c.dk, c.dv, DTypeName(kv_type),
                        n_rows, keys ? ", keys" : "", raw_keys ? ", raw keys" : "",
                        planes == Planes::kApart    ? ", planes apart"
                        : planes == Planes::kByHead ? ", by head"
                                                    : ""),
            [&](const Execute& run) {
              Bank copy = bank;
              std::vector<float> x;
              std::vector<float> k(keys ? k_values : 0, kPoison);
              std::vector<float> k_raw(raw_keys ? k_values : 0, kPoison);
              std::vector<float> q(static_cast<size_t>(n_rows * c.n_heads * c.dk), kPoison);
              run(NormQkvRopeAppendArgs{.in = in.On(x),
                                        .wq = wq.Ref(),
                                        .wk = wk.Ref(),
                                        .wv = wv.Ref(),
                                        .bq = c.bias ? bq.data() : nullptr,
                                        .bk = c.bias ? bk.data() : nullptr,
                                        .bv = c.bias ? bv.data() : nullptr,
                                        .qk_norm = c.norm,
                                        .q_norm = q_norm.data(),
                                        .k_norm = k_norm.data(),
                                        .qk_norm_eps = 1e-6f,
                                        .cos_sin = c.n_freq > 0 ? cos_sin.data() : nullptr,
                                        .n_freq = c.n_freq,
                                        .q = q.data(),
                                        .k_out = keys ? k.data() : nullptr,
                                        .k_raw_out = raw_keys ? k_raw.data() : nullptr,
                                        .n_heads = c.n_heads,
                                        .kv = copy.View(),
                                        .rows = step.rows.data(),
                                        .seqs = step.seqs.data(),
                                        .n_rows = n_rows});
              const Array rows = copy.Values();
              EXPECT_EQ(k, keys ? KeysOf(copy.View(), step) : k);
              return Outputs{{"x", x, 2e-6},
                             {"q", q, 2e-5},
                             {"k", k, rows.tolerance, rows.rounding},
                             {"k_raw", k_raw, 2e-5},
                             rows};
            });
      }
    }
  }
}

}  // namespace
}  // namespace omnikv::parity::parity_linear_test
