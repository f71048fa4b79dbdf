// What the cases of several parity tests are made of.
#pragma once

#include <string>
#include <vector>

#include "parity.h"

namespace omnikv::parity {

inline constexpr DType kKvTypes[] = {DType::kBF16, DType::kF16, DType::kF32};
// All that K and V can have; those of blocks where KvFits.
inline constexpr DType kKvFormats[] = {DType::kBF16, DType::kF16, DType::kF32, DType::kQ8_0,
                                       DType::kQ4_0};
inline constexpr DType kFormats[] = {DType::kF32, DType::kF16, DType::kBF16, DType::kQ8_0};

// Whether rows of n_in values can have the format: Q8_0 has whole blocks only.
inline bool Fits(DType format, int64_t n_in) {
  return format != DType::kQ8_0 || n_in % static_cast<int64_t>(kQ8Block) == 0;
}

// Heads of an attention.
struct Shape {
  int32_t n_heads, n_kv_heads, dk, dv;
  DType dtype;
};

inline bool Fits(const Shape& s) {
  return KvFits(s.dtype, s.dk) && KvFits(s.dtype, s.dv);
}

// One attention over data made here: q_len[s] rows at the end of kv_len[s] tokens.
struct Attention {
  Attention(const Shape& s, const std::vector<int32_t>& q_len, const std::vector<int32_t>& lens,
            Random& random, int32_t block_tokens = 16, Planes planes = Planes::kTogether);
  // Without outputs.
  AttendArgs Args(const AttnPlan& plan) const;
  void Run(const std::string& what, const AttnPlan& plan, ScoreKind score = ScoreKind::kNone,
           float softcap = 0, bool with_o = true) const;

  Shape shape;
  std::vector<int32_t> kv_len;
  Bank bank;
  Step step;
  std::vector<float> q;
  int32_t busy_seqs = 0;  // as AttendArgs says
};

// That attention as two heads of a layer with 6 KV heads, of which the bank has no others: several
// pairs, and one of a pair.
void RunAlone(const std::string& what, const Attention& a, const AttnPlan& plan, Random& random);

// The lists of a plan, one or n_kv_heads a sequence, of up to n units each.
struct Lists {
  Lists(const std::vector<int32_t>& kv_len, int32_t per_seq, int32_t unit, int32_t n,
        Random& random);
  PlanSegment Segment(int32_t window = 0) const;
  SomeTokens Tokens() const {
    return {.index = index.data(), .count = count.data(), .capacity = capacity};
  }

  int32_t lists, unit_tokens, capacity;
  std::vector<int32_t> index, count;
};

// The residual prologue in all its forms.
struct ResidualCase {
  bool y, post_norm, norm;
};
inline constexpr ResidualCase kResiduals[] = {
    {true, false, true}, {false, false, true}, {true, true, true}, {true, false, false}};

struct ResidualData {
  ResidualData(const ResidualCase& c, int32_t rows, int32_t width, Random& random);
  Residual On(std::vector<float>& x_copy) const;  // x_copy becomes x

  ResidualCase form;
  int32_t d;
  std::vector<float> x, y, post_norm, norm;
};

inline std::vector<float> AsFloats(const std::vector<int32_t>& v) {
  return std::vector<float>(v.begin(), v.end());  // below 2^24: exact
}

// What the scores of a choice look like.
// kFalling: each fourth is higher than all others, and lower than those of them before it.
enum class Scores { kNormal, kManyTies, kAllEqual, kPositive, kNarrow, kFalling, kBroken };

std::vector<float> MakeScores(Scores kind, size_t n, Random& random);

struct Choice {
  int32_t kv_len, n_candidates, n_pick;
};

// TopK of one sequence a choice; `keep` [choices], as TopKArgs says, or empty: none. With `listed`,
// among so many of the candidates.
void CheckTopK(Scores kind, int32_t window, const std::vector<Choice>& choices, int32_t capacity,
               Random& random, int32_t lists = 1, const std::vector<int32_t>& keep = {},
               int32_t listed = 0, int32_t unit = 1);

}  // namespace omnikv::parity
