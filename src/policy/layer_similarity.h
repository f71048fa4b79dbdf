// Measures how well the tokens that a KV head of one layer chooses serve the heads of later layers,
// and how much the attention of a layer changes the residual (Kascade, arXiv 2512.16391, sections
// 3.3 and 3.4). No user chooses it, and no registry has it: the engine opens it to choose the
// anchors of policy `kascade` (engine/anchors.h).
#pragma once

#include <vector>

#include "backend/score_ops.h"
#include "policy/policy.h"
#include "policy/policy_memory.h"

namespace omnikv {

// What is measured of each text, and how heads choose.
struct SimilarityOptions {
  int32_t window = 32;  // the last rows of a text
  // Rows of them that choose together, the last ones first; at most the window. 1: as steps of
  // decoding, among all tokens. More: as rows of a prompt, among the tokens before them, besides
  // which they read their own.
  int32_t tile = 1;
  double share = 0.1;   // of those tokens, which a head chooses
  int32_t least = 128;  // tokens that it chooses though the share is less

  // Rows of a tile, and tiles, of a text with `rows` rows in the window.
  int32_t TileRows(int32_t rows) const { return tile < rows ? tile : rows; }
  int32_t Tiles(int32_t rows) const { return rows / TileRows(rows); }
  // Tokens that a tile chooses of n.
  int64_t Chosen(int64_t n) const;
};

// Of `n_layers` global-attention layers with `n_kv_heads` KV heads each.
struct LayerSimilarity {
  LayerSimilarity(int32_t n_layers, int32_t n_kv_heads);
  // S[i -> j][u][v], 0 to 1 but for rounding, of layers i <= j: of the weight that head u of layer
  // j gives to the tokens of its own choice, how much lies on the choice of head v of layer i.
  double& At(int32_t i, int32_t j, int32_t u, int32_t v) { return shares[Index(i, j, u, v)]; }
  double At(int32_t i, int32_t j, int32_t u, int32_t v) const { return shares[Index(i, j, u, v)]; }
  // The mean over the heads of layer j of the best that a head of layer i does for it.
  double Of(int32_t i, int32_t j) const;

  int32_t n_layers = 0;
  int32_t n_kv_heads = 0;
  std::vector<double> shares;      // [n_layers, n_layers, n_kv_heads, n_kv_heads]
  std::vector<double> importance;  // [n_layers]: 1 - cos(x, x + what attention adds to x), 0 to 2

 private:
  size_t Index(int32_t i, int32_t j, int32_t u, int32_t v) const {
    return static_cast<size_t>(((i * n_layers + j) * n_kv_heads + u) * n_kv_heads + v);
  }
};

// Reads everything, as `full`. In every layer, tiles of a prompt's last rows sum the weights that
// their queries give to each token (Score), over rows and over the query heads of a KV head; the
// rest is the host's. Of one sequence. Thread-compatible.
class MeasureSimilarity : public Policy {
 public:
  explicit MeasureSimilarity(const SimilarityOptions& options) : options_(options) {}

  Status Prepare(const PolicyContext& context, PolicySettings& settings) override;
  void Plan(const LayerStep& step, AttendArgs& attend) override;
  void Observe(const LayerStep& step, const AttendArgs& attend) override;
  void ObserveResidual(const LayerStep& step, const ResidualRows& rows) override;

  int64_t TokensRead(int32_t, const SeqLength& at) const override { return at.tokens; }
  bool Budgeted(int32_t) const override { return false; }
  size_t Bytes() const override { return memory_.bytes(); }
  // The rows are computed anew for every prompt, in one step.
  int64_t WarmRows() const override { return options_.window; }
  int32_t LastRows() const override { return options_.window; }

  // Of the last prompt: the least of its tiles, and the mean importance of its rows.
  const LayerSimilarity& measured() const { return measured_; }

 private:
  // What a KV head chose, ascending, by tile and head: [tiles * n_kv_heads].
  using Choices = std::vector<std::vector<int32_t>>;

  bool Measures(const LayerStep& step, int32_t n_rows) const;
  void EnqueueWeights(const LayerStep& step, const AttendArgs& attend);
  void Compare(int32_t layer, const float* weights);

  SimilarityOptions options_;
  PolicyContext context_;
  PolicyMemory memory_;
  int64_t stride_ = 0;  // tokens
  Buffer lse_;          // f32 [max_rows, n_heads]
  Buffer weights_;      // f32 [tiles, n_kv_heads, stride]
  Buffer tiles_;        // SeqMeta [tiles]: each counts as a sequence of its rows
  std::vector<SeqMeta> tile_seqs_;
  std::vector<Choices> chosen_;     // by layer
  std::vector<float> before_;       // of the layer under way: its residual
  LayerSimilarity measured_{0, 0};  // of the prompt under way, and then of the last one
};

}  // namespace omnikv
