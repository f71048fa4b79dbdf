// Parity of the moments of queries, and of the scores by them.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "parity.h"
#include "parity_data.h"

namespace omnikv::parity::parity_expected_test {
namespace {

std::vector<float> Frequencies(int32_t n) {
  std::vector<float> inv_freq;
  for (int32_t f = 0; f < n; ++f) {
    inv_freq.push_back(std::pow(10000.0f, -static_cast<float>(f) / static_cast<float>(n)));
  }
  return inv_freq;
}

// Queries about a mean that is a few times larger than what they differ by.
std::vector<float> Queries(int32_t n_rows, int32_t width, Random& random) {
  std::vector<float> q = random.Floats(static_cast<size_t>(n_rows) * static_cast<size_t>(width));
  const std::vector<float> mean = random.Floats(static_cast<size_t>(width), 3);
  for (size_t i = 0; i < q.size(); ++i) q[i] += mean[i % mean.size()];
  return q;
}

// Steps of one row, of fewer than `skip`, of some that are skipped and some that are not, at
// positions far out; alone, and after others.
TEST_F(ParityTest, QueryMoments) {
  Random random(51);
  struct Case {
    int32_t n_heads, dk, n_freq;
    int32_t n_rows, kv_len;
    int32_t skip = 0;
    bool covariance = true;
  };
  for (const Case& c : std::vector<Case>{{4, 64, 32, 200, 200, 4},
                                         {2, 128, 64, 300, 100000, 4},
                                         {8, 128, 64, 1, 30, 4},
                                         {3, 37, 11, 70, 90, 40},
                                         {1, 300, 0, 65, 65, 64},
                                         {2, 96, 32, 5, 5, 7},
                                         {6, 16, 8, 2000, 2003, 3, false},
                                         {5, 256, 128, 129, 700, 0}}) {
    const std::vector<float> inv_freq = Frequencies(c.n_freq);
    const int32_t width = c.n_heads * c.dk;
    const std::vector<float> q = Queries(c.n_rows + 3, width, random);
    const std::vector<SeqMeta> step = {{.q_begin = 3, .q_len = c.n_rows, .kv_len = c.kv_len}};
    const auto values = static_cast<size_t>(width);
    const std::vector<float> held_mean = random.Floats(values, 3);
    std::vector<float> held(c.covariance ? values * static_cast<size_t>(c.dk) : 0);
    const auto dk = static_cast<size_t>(c.dk);
    for (size_t i = 0; i < held.size(); ++i) {  // symmetric
      held[i] = 0.01f * static_cast<float>((i / dk % dk + i % dk) % 97);
    }
    for (const bool accumulate : {false, true}) {
      Check(
          fmt::format("QueryMoments {} heads of {} freqs {} rows {} of {} skip {}{}", c.n_heads,
                      c.dk, c.n_freq, c.n_rows, c.kv_len, c.skip, accumulate ? " accumulates" : ""),
          [&](const Execute& run) {
            std::vector<float> mean(values, kPoison);
            std::vector<float> covariance(held.size(), kPoison);
            std::vector<int32_t> count = {-1};
            if (accumulate) mean = held_mean, covariance = held, count = {57};
            run(QueryMomentsArgs{.q = q.data(),
                                 .steps = step.data(),
                                 .inv_freq = c.n_freq > 0 ? inv_freq.data() : nullptr,
                                 .out = {.mean = mean.data(),
                                         .covariance = c.covariance ? covariance.data() : nullptr,
                                         .count = count.data()},
                                 .n_rows = c.n_rows,
                                 .n_heads = c.n_heads,
                                 .dk = c.dk,
                                 .n_freq = c.n_freq,
                                 .skip = c.skip,
                                 .accumulate = accumulate});
            return Outputs{{"mean", mean, 1e-5},
                           {"covariance", covariance, 1e-5},
                           {"count", AsFloats(count), 0}};
          });
    }
  }
}

// Lengths beside the edges of tiles, fewer tokens than sinks, values apart from keys.
TEST_F(ParityTest, ExpectedScore) {
  Random random(52);
  struct Case {
    Shape shape;
    int32_t kv_len;
    int32_t n_freq, future, sinks;
    Planes planes = Planes::kTogether;
    float epsilon = 0;
    bool covariance = true, values = true;
  };
  for (const Case& c : std::vector<Case>{
           {{8, 2, 64, 64, DType::kF16}, 700, 32, 512, 4},
           {{4, 2, 128, 128, DType::kBF16}, 1025, 64, 16, 4},
           {{4, 4, 32, 32, DType::kF32}, 300, 16, 1, 0, Planes::kTogether, 0.01f},
           {{6, 3, 96, 64, DType::kQ8_0}, 177, 32, 512, 7},
           {{6, 3, 96, 64, DType::kQ4_0}, 177, 32, 512, 7},
           {{2, 1, 256, 256, DType::kF16}, 129, 128, 32, 4, Planes::kTogether, 0, true, false},
           {{3, 3, 37, 11, DType::kBF16}, 65, 11, 7, 3, Planes::kApart},
           {{4, 2, 64, 64, DType::kF16}, 150, 16, 7, 3, Planes::kByHead},
           {{2, 2, 300, 20, DType::kF16}, 90, 0, 4, 1},
           {{8, 1, 16, 16, DType::kF16}, 20001, 8, 512, 4, Planes::kTogether, 0, false},
           {{5, 1, 64, 64, DType::kBF16}, 64, 32, 3, 0},
           {{4, 2, 64, 64, DType::kF16}, 4, 32, 8, 4},
           {{4, 2, 64, 64, DType::kF16}, 3, 32, 8, 4}}) {
    const Attention data(c.shape, {1}, {c.kv_len}, random, 16, c.planes);
    const KvView kv = data.bank.View();
    std::vector<SeqMeta> steps = {data.step.seqs[0]};
    steps[0].kv_len += 11;  // tokens whose rows are gone
    const std::vector<float> inv_freq = Frequencies(c.n_freq);
    const auto n_heads = static_cast<size_t>(c.shape.n_heads);
    const auto dk = static_cast<size_t>(c.shape.dk);
    std::vector<float> mean = random.Floats(n_heads * dk);
    std::vector<float> covariance;
    for (size_t h = 0; h < n_heads && c.covariance; ++h) {  // B B' is one
      const std::vector<float> b = random.Floats(dk * 3, 0.5f);
      for (size_t i = 0; i < dk; ++i) {
        for (size_t j = 0; j < dk; ++j) {
          float sum = i == j ? 0.1f : 0;
          for (size_t l = 0; l < 3; ++l) sum += b[3 * i + l] * b[3 * j + l];
          covariance.push_back(sum);
        }
      }
    }
    std::vector<int32_t> count = {100};
    const int64_t stride = c.kv_len + 7;
    Check(fmt::format("ExpectedScore {}/{} heads of {} {} tokens {} future {} sinks {}",
                      c.shape.n_heads, c.shape.n_kv_heads, c.shape.dk, DTypeName(c.shape.dtype),
                      c.kv_len, c.future, c.sinks),
          [&](const Execute& run) {
            std::vector<float> logits(n_heads * static_cast<size_t>(stride), kPoison);
            std::vector<float> out(
                static_cast<size_t>(c.shape.n_kv_heads) * static_cast<size_t>(stride), kPoison);
            run(ExpectedScoreArgs{
                .queries = {.mean = mean.data(),
                            .covariance = c.covariance ? covariance.data() : nullptr,
                            .count = count.data()},
                .kv = kv,
                .seqs = data.step.seqs.data(),
                .steps = steps.data(),
                .inv_freq = c.n_freq > 0 ? inv_freq.data() : nullptr,
                .logits = logits.data(),
                .out = out.data(),
                .stride = stride,
                .n_heads = c.shape.n_heads,
                .n_freq = c.n_freq,
                .future = c.future,
                .sinks = c.sinks,
                .scale = 1 / std::sqrt(static_cast<float>(c.shape.dk)),
                .epsilon = c.epsilon,
                .values = c.values});
            // Of what is compared with the largest of its array, the sinks would be that.
            std::vector<float> sinks;
            for (size_t g = 0; g < static_cast<size_t>(c.shape.n_kv_heads); ++g) {
              float* const list = out.data() + g * static_cast<size_t>(stride);
              for (int32_t i = 0; i < std::min(c.sinks, c.kv_len); ++i) {
                sinks.push_back(list[i]);
                list[i] = kPoison;
              }
            }
            return Outputs{{"logits", logits, 1e-5}, {"sinks", sinks, 0}, {"out", out, 1e-4}};
          });
  }
}

}  // namespace
}  // namespace omnikv::parity::parity_expected_test
