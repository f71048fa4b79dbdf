#include "parity_data.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace omnikv::parity {
namespace {

std::string Name(const Shape& s) {
  return fmt::format("{}/{} heads of {}/{} {}", s.n_heads, s.n_kv_heads, s.dk, s.dv,
                     DTypeName(s.dtype));
}

}  // namespace

std::vector<float> MakeScores(Scores kind, size_t n, Random& random) {
  std::vector<float> v = random.Floats(n);
  for (size_t i = 0; i < n; ++i) {
    switch (kind) {
      case Scores::kNormal:
        break;
      case Scores::kManyTies:
        v[i] = std::round(v[i]);  // includes -0 and 0
        break;
      case Scores::kAllEqual:
        v[i] = -1.5f;
        break;
      case Scores::kPositive:
        v[i] = std::exp(8 * v[i]);
        break;
      case Scores::kNarrow:
        v[i] = 1.0f + 1e-6f * v[i];
        break;
      case Scores::kFalling:
        v[i] = i % 4 == 0 ? -static_cast<float>(i) : -1e9f;
        break;
      case Scores::kBroken:
        if (i % 5 == 0) v[i] = std::numeric_limits<float>::quiet_NaN();
        if (i % 7 == 0) v[i] = -std::numeric_limits<float>::infinity();
        if (i % 101 == 0) v[i] = std::numeric_limits<float>::infinity();
        break;
    }
  }
  return v;
}

Attention::Attention(const Shape& s, const std::vector<int32_t>& q_len,
                     const std::vector<int32_t>& lens, Random& random, int32_t block_tokens,
                     Planes planes)
    : shape(s),
      kv_len(lens),
      bank(s.dtype, s.n_kv_heads, s.dk, s.dv, block_tokens, lens,
           *std::max_element(lens.begin(), lens.end()), random, planes),
      step(q_len, lens, [&](int32_t seq) { return bank.TableOff(seq); }),
      q(random.Floats(static_cast<size_t>(step.n_rows() * s.n_heads * s.dk))) {}

AttendArgs Attention::Args(const AttnPlan& plan) const {
  return {.q = q.data(),
          .kv = bank.View(),
          .plan = plan,
          .rows = step.rows.data(),
          .seqs = step.seqs.data(),
          .n_rows = step.n_rows(),
          .n_seqs = step.n_seqs(),
          .n_heads = shape.n_heads,
          .scale = 0.125f,
          .busy_seqs = busy_seqs};
}

void Attention::Run(const std::string& what, const AttnPlan& plan, ScoreKind score, float softcap,
                    bool with_o) const {
  const std::string name =
      fmt::format("Attend {} rows {} seqs {} {}{}", Name(shape), step.n_rows(), step.n_seqs(), what,
                  bank.View().Interleaved() ? "" : ", planes apart");
  const auto n_rows = static_cast<size_t>(step.n_rows());
  const auto heads = static_cast<size_t>(shape.n_heads);
  const int64_t stride = *std::max_element(kv_len.begin(), kv_len.end()) + 3;
  const size_t score_rows = score == ScoreKind::kLogits ? n_rows * heads : n_rows;
  Check(name, [&](const Execute& run) {
    std::vector<float> o(with_o ? n_rows * heads * static_cast<size_t>(shape.dv) : 0, kPoison);
    std::vector<float> lse(n_rows * heads, kPoison);
    std::vector<float> scores(
        score == ScoreKind::kNone ? 0 : score_rows * static_cast<size_t>(stride), kPoison);
    AttendArgs args = Args(plan);
    args.o = with_o ? o.data() : nullptr;
    args.lse = lse.data();
    args.softcap = softcap;
    args.score = score;
    args.scores = score == ScoreKind::kNone ? nullptr : scores.data();
    args.score_stride = stride;
    run(args);
    return Outputs{{"o", o}, {"lse", lse}, {"scores", scores}};
  });
}

void RunAlone(const std::string& what, const Attention& a, const AttnPlan& plan, Random& random) {
  constexpr int32_t kModelHeads = 6;
  const int32_t group = a.shape.n_heads / a.shape.n_kv_heads;
  const auto n_rows = static_cast<size_t>(a.step.n_rows());
  const auto row_heads = n_rows * static_cast<size_t>(kModelHeads * group);
  const std::vector<float> q = random.Floats(row_heads * static_cast<size_t>(a.shape.dk));
  for (const auto& [held, heads] : {std::pair{0x18, 0}, {0x21, 0}, {0x12, 0x12}, {0x0a, 0x08}}) {
    Check(fmt::format("Attend {} rows {} {}, heads {:#x} of {:#x} alone", n_rows, Name(a.shape),
                      what, heads, held),
          [&, held = held, heads = heads](const Execute& run) {
            std::vector<float> o(row_heads * static_cast<size_t>(a.shape.dv), kPoison);
            std::vector<float> lse(row_heads, kPoison);
            AttendArgs args = a.Args(plan);
            args.q = q.data();
            args.o = o.data();
            args.lse = lse.data();
            args.n_heads = kModelHeads * group;
            args.kv = args.kv.OfHeads({static_cast<uint64_t>(held)}, kModelHeads);
            args.heads = {static_cast<uint64_t>(heads)};
            run(args);
            for (size_t at = 0; at < row_heads; ++at) {
              const auto head = static_cast<int32_t>(at % static_cast<size_t>(kModelHeads * group));
              const bool takes = ((heads != 0 ? heads : held) >> (head / group) & 1) != 0;
              EXPECT_EQ(std::isnan(lse[at]), !takes) << "head " << head;
            }
            return Outputs{{"o", o}, {"lse", lse}};
          });
  }
}

Lists::Lists(const std::vector<int32_t>& kv_len, int32_t per_seq, int32_t unit, int32_t n,
             Random& random)
    : lists(per_seq), unit_tokens(unit), capacity(std::max(n, 1)) {
  for (int32_t len : kv_len) {
    for (int32_t l = 0; l < per_seq; ++l) {
      const int32_t units = (len + unit - 1) / unit;
      const int32_t take = std::min(units, std::max(0, n - l));  // of different lengths
      std::vector<int32_t> chosen = random.Ascending(take, units);
      count.push_back(take);
      chosen.resize(static_cast<size_t>(capacity), 1 << 30);  // never to be read
      index.insert(index.end(), chosen.begin(), chosen.end());
    }
  }
}

PlanSegment Lists::Segment(int32_t window) const {
  PlanSegment s;
  s.kind = SegmentKind::kList;
  s.window = window;
  s.unit = unit_tokens;
  s.lists = lists;
  s.capacity = capacity;
  s.index = index.data();
  s.count = count.data();
  return s;
}

ResidualData::ResidualData(const ResidualCase& c, int32_t rows, int32_t width, Random& random)
    : form(c),
      d(width),
      x(random.Floats(static_cast<size_t>(rows * width))),
      y(random.Floats(static_cast<size_t>(rows * width))),
      post_norm(random.Floats(static_cast<size_t>(width))),
      norm(random.Floats(static_cast<size_t>(width))) {}

Residual ResidualData::On(std::vector<float>& x_copy) const {
  x_copy = x;
  return {.x = x_copy.data(),
          .y = form.y ? y.data() : nullptr,
          .post_norm = form.post_norm ? post_norm.data() : nullptr,
          .norm = form.norm ? norm.data() : nullptr,
          .scale = 0.75f,
          .eps = 1e-5f,
          .d = d};
}

void CheckTopK(Scores kind, int32_t window, const std::vector<Choice>& choices, int32_t capacity,
               Random& random, int32_t lists, const std::vector<int32_t>& keep, int32_t listed,
               int32_t unit) {
  std::vector<SeqMeta> seqs;
  std::vector<int32_t> n_candidates;
  std::vector<int32_t> n_pick;
  int64_t stride = 1;
  for (const Choice& c : choices) {
    seqs.push_back({.q_begin = 0, .q_len = 1, .kv_len = c.kv_len, .table_off = 0, .prompt_len = 0});
    n_candidates.push_back(c.n_candidates);
    n_pick.push_back(c.n_pick);
    stride = std::max<int64_t>(stride, UnitsOf(c.kv_len, unit));
  }
  const auto n_seqs = static_cast<int32_t>(choices.size());
  const auto scores =
      MakeScores(kind, static_cast<size_t>(n_seqs * lists * window * stride), random);
  std::vector<float> weights = random.Floats(static_cast<size_t>(window));
  weights[0] = 1.0f;
  const Lists among(n_candidates, lists, 1, listed, random);
  Check(fmt::format("TopK kind {} window {} of {} first {} lists {}{} listed {} unit {}",
                    static_cast<int>(kind), window, n_seqs, choices[0].n_candidates, lists,
                    keep.empty() ? "" : " some kept", listed, unit),
        [&](const Execute& run) {
          std::vector<int32_t> index(static_cast<size_t>(n_seqs * lists * capacity), -1);
          std::vector<int32_t> count(static_cast<size_t>(n_seqs * lists), -1);
          TopKArgs args{.scores = scores.data(),
                        .weights = weights.data(),
                        .seqs = seqs.data(),
                        .n_candidates = n_candidates.data(),
                        .n_pick = n_pick.data(),
                        .keep = keep.empty() ? nullptr : keep.data(),
                        .index = index.data(),
                        .count = count.data(),
                        .stride = stride,
                        .window = window,
                        .lists = lists,
                        .capacity = capacity,
                        .n_seqs = n_seqs,
                        .unit = unit,
                        .among = listed > 0 ? among.Tokens() : SomeTokens{}};
          run(args);
          const std::vector<int32_t> first_index = index;
          const std::vector<int32_t> first_count = count;
          const auto run_again = [&](const TopKArgs& other, const char* how) {
            for (size_t l = 0; l < count.size(); ++l) {
              const size_t s = l / static_cast<size_t>(lists);
              if (!keep.empty() && keep[s] != 0) continue;
              count[l] = -1;
              std::fill_n(index.begin() + static_cast<ptrdiff_t>(l) * capacity, capacity, -1);
            }
            run(other);
            EXPECT_EQ(index, first_index) << how;
            EXPECT_EQ(count, first_count) << how;
          };
          if (window == 1 && listed > 0) {  // with the scores of what is listed side by side
            TopKArgs places = args;
            places.among.by_place = true;
            std::vector<float> by_place(scores.size(), std::numeric_limits<float>::max());
            for (int64_t l = 0; l < int64_t{n_seqs} * lists; ++l) {
              for (int32_t i = 0; i < args.CandidatesOf(l); ++i) {
                by_place[static_cast<size_t>(l * stride + i)] =
                    scores[static_cast<size_t>(l * stride + args.Candidate(l, i))];
              }
            }
            places.scores = by_place.data();
            run_again(places, "by place");
          }
          if (window == 1 && n_seqs > 1) {  // the same by rows, in another order than the sequences
            std::vector<float> rows = scores;
            std::rotate(rows.begin(), rows.end() - lists * stride, rows.end());
            std::vector<SeqMeta> steps = seqs;
            for (int32_t s = 0; s < n_seqs; ++s) {
              steps[static_cast<size_t>(s)].q_begin = (s + 1) % n_seqs;
            }
            args.scores = rows.data();
            args.seqs = steps.data();
            args.by_row = true;
            run_again(args, "by row");
          }
          return Outputs{{"count", AsFloats(count), 0}, {"index", AsFloats(index), 0}};
        });
}

}  // namespace omnikv::parity
