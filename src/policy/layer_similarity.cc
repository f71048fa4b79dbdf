#include "policy/layer_similarity.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/check.h"

namespace omnikv {
namespace {

// The k highest of weights [n], ascending; of equals the first.
std::vector<int32_t> Best(const float* weights, int64_t n, int64_t k) {
  std::vector<int32_t> order(static_cast<size_t>(n));
  std::iota(order.begin(), order.end(), 0);
  std::nth_element(order.begin(), order.begin() + std::min(k, n - 1), order.end(),
                   [&](int32_t a, int32_t b) {
                     return weights[a] != weights[b] ? weights[a] > weights[b] : a < b;
                   });
  order.resize(static_cast<size_t>(k));
  std::sort(order.begin(), order.end());
  return order;
}

double SumOver(const float* weights, const std::vector<int32_t>& tokens) {
  return std::accumulate(tokens.begin(), tokens.end(), 0.0,
                         [&](double sum, int32_t t) { return sum + weights[t]; });
}

// 1 - cos(a, b).
double Angle(const float* a, const float* b, int32_t d) {
  double ab = 0;
  double aa = 0;
  double bb = 0;
  for (int32_t i = 0; i < d; ++i) {
    ab += static_cast<double>(a[i]) * b[i];
    aa += static_cast<double>(a[i]) * a[i];
    bb += static_cast<double>(b[i]) * b[i];
  }
  return aa > 0 && bb > 0 ? 1 - ab / std::sqrt(aa * bb) : 0;
}

}  // namespace

int64_t SimilarityOptions::Chosen(int64_t n) const {
  const auto most = static_cast<int32_t>(n);
  return std::min<int64_t>(BudgetAt(most, share * (1 + 1e-12), n, least), n);
}

LayerSimilarity::LayerSimilarity(int32_t layers, int32_t kv_heads)
    : n_layers(layers),
      n_kv_heads(kv_heads),
      shares(static_cast<size_t>(layers * layers * kv_heads * kv_heads), 0.0),
      importance(static_cast<size_t>(layers), 0.0) {}

double LayerSimilarity::Of(int32_t i, int32_t j) const {
  double sum = 0;
  for (int32_t u = 0; u < n_kv_heads; ++u) {
    double best = At(i, j, u, 0);
    for (int32_t v = 1; v < n_kv_heads; ++v) best = std::max(best, At(i, j, u, v));
    sum += best;
  }
  return sum / n_kv_heads;
}

Status MeasureSimilarity::Prepare(const PolicyContext& context, PolicySettings& settings) {
  static_cast<void>(settings);
  context_ = context;
  stride_ = (context.max_context + 15) / 16 * 16;
  chosen_.resize(static_cast<size_t>(context.n_layers));
  measured_ = LayerSimilarity(context.n_layers, context.n_kv_heads);
  if (context.backend == nullptr) return {};
  OKV_CHECK(options_.window <= context.max_rows, "{} rows, of {} in a step", options_.window,
            context.max_rows);
  // Texts of fewer rows than the window have fewer tiles, and those of fewer rows than a tile one.
  const int64_t tiles = options_.Tiles(options_.window);
  return memory_.Take(*context.backend, "weights of tokens",
                      {{lse_, int64_t{context.max_rows} * context.n_heads},
                       {weights_, tiles * context.n_kv_heads * stride_},
                       {tiles_, tiles * static_cast<int64_t>(sizeof(SeqMeta) / 4)}});
}

bool MeasureSimilarity::Measures(const LayerStep& step, int32_t n_rows) const {
  return step.prefill && step.first_pos + n_rows == step.prompt_end;
}

void MeasureSimilarity::Plan(const LayerStep& step, AttendArgs& attend) {
  if (Measures(step, attend.n_rows)) attend.lse = lse_.as<float>();
}

void MeasureSimilarity::Observe(const LayerStep& step, const AttendArgs& attend) {
  if (!Measures(step, attend.n_rows)) return;
  EnqueueWeights(step, attend);
  std::vector<float> weights(tile_seqs_.size() * static_cast<size_t>(context_.n_kv_heads) *
                             static_cast<size_t>(stride_));
  context_.backend->Download(weights.data(), weights_.as<float>(), weights.size() * sizeof(float));
  Compare(step.layer, weights.data());
}

void MeasureSimilarity::EnqueueWeights(const LayerStep& step, const AttendArgs& attend) {
  Backend& backend = *context_.backend;
  SeqMeta seq;
  backend.Download(&seq, attend.seqs + step.seq, sizeof(seq));
  const int32_t rows = std::min(options_.window, attend.n_rows);
  const int32_t tile_rows = options_.TileRows(rows);
  const auto end = static_cast<int32_t>(step.prompt_end);
  tile_seqs_.clear();
  for (int32_t left = options_.Tiles(rows); left-- > 0;) {
    SeqMeta tile = seq;
    tile.q_begin = seq.q_begin + attend.n_rows - (left + 1) * tile_rows;
    tile.q_len = tile_rows;
    tile.kv_len = end - left * tile_rows;
    tile_seqs_.push_back(tile);
  }
  backend.Upload(tiles_.as(), tile_seqs_.data(), tile_seqs_.size() * sizeof(SeqMeta));
  backend.Enqueue(ScoreArgs{.q = attend.q,
                            .lse = attend.lse,
                            .kv = attend.kv,
                            .seqs = tiles_.as<SeqMeta>(),
                            .out = weights_.as<float>(),
                            .stride = stride_,
                            .n_rows = attend.n_rows,
                            .n_seqs = static_cast<int32_t>(tile_seqs_.size()),
                            .n_heads = attend.n_heads,
                            .lists = attend.kv.n_kv_heads,
                            .heads = HeadReduce::kSum,
                            .queries = QueryReduce::kSum,
                            .scale = attend.scale,
                            .softcap = attend.softcap});
}

// A layer's choices, and what those of the layers before it are worth to it.
void MeasureSimilarity::Compare(int32_t layer, const float* weights) {
  const auto heads = static_cast<size_t>(context_.n_kv_heads);
  Choices& own = chosen_[static_cast<size_t>(layer)];
  own.clear();
  for (size_t tile = 0; tile < tile_seqs_.size(); ++tile) {
    const SeqMeta& seq = tile_seqs_[tile];
    const int64_t n = options_.tile == 1 ? seq.kv_len : seq.kv_len - seq.q_len;
    const float* const of_tile = weights + tile * heads * static_cast<size_t>(stride_);
    for (size_t u = 0; u < heads; ++u) {
      own.push_back(Best(of_tile + u * static_cast<size_t>(stride_), n, options_.Chosen(n)));
    }
    for (size_t u = 0; u < heads; ++u) {
      const float* const of_head = of_tile + u * static_cast<size_t>(stride_);
      const double inside = std::accumulate(of_head + n, of_head + seq.kv_len, 0.0);
      const double most = SumOver(of_head, own[tile * heads + u]) + inside;
      for (int32_t i = 0; i <= layer; ++i) {
        for (size_t v = 0; v < heads; ++v) {
          const auto& tokens = chosen_[static_cast<size_t>(i)][tile * heads + v];
          const double share = most > 0 ? (SumOver(of_head, tokens) + inside) / most : 1;
          double& least = measured_.At(i, layer, static_cast<int32_t>(u), static_cast<int32_t>(v));
          least = tile == 0 ? share : std::min(least, share);
        }
      }
    }
  }
}

void MeasureSimilarity::ObserveResidual(const LayerStep& step, const ResidualRows& rows) {
  if (!Measures(step, rows.n_rows)) return;
  const int32_t n = std::min(options_.window, rows.n_rows);
  std::vector<float> x(static_cast<size_t>(n) * static_cast<size_t>(rows.d));
  context_.backend->Download(x.data(), rows.x + int64_t{rows.n_rows - n} * rows.d,
                             x.size() * sizeof(float));
  if (!rows.attended) {
    before_ = std::move(x);
    return;
  }
  double sum = 0;
  for (int32_t row = 0; row < n; ++row) {
    const int64_t at = int64_t{row} * rows.d;
    sum += Angle(before_.data() + at, x.data() + at, rows.d);
  }
  measured_.importance[static_cast<size_t>(step.layer)] = sum / n;
}

}  // namespace omnikv
