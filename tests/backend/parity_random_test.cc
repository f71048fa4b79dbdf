// Parity of random plans over random streams. A seed draws the K/V (format, planes, blocks, holes,
// rows that were lost), the step (sequences, rows) and the plan. LocateRows, Score, TopK, Attend
// and MergeStates then run over them. OMNIKV_SEED draws other cases than the usual ones: case i of
// a run is the first case of the seed i higher.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <numeric>
#include <optional>

#include "backend/ref/ref_backend.h"
#include "backend/resolve_plan.h"
#include "parity_data.h"
#include "random_features.h"

namespace omnikv::parity::parity_random_test {
namespace {

using ParityRandomTest = ParityTest;

constexpr uint64_t kCases = 1000;
constexpr uint64_t kUsualSeed = 20260;
constexpr int32_t kManyRows = 16;  // a step of more rows is a prompt's, for all backends
constexpr int32_t kHole = -1;  // in a block table: the bank's mark of a block that was given back
constexpr int32_t kNeverRead = 1 << 30;

class RandomCase {
 public:
  explicit RandomCase(uint64_t seed);
  // Runs all its ops, on the candidates whose turn it is.
  void Run(int64_t turn);
  const Features& features() const { return features_; }
  std::string Name() const;

 private:
  bool Chance(int32_t percent) { return random_.Int(1, 100) <= percent; }
  template <typename T>
  T Pick(std::initializer_list<T> of) {
    return of.begin()[random_.Int(0, static_cast<int32_t>(of.size()) - 1)];
  }
  size_t n_seqs() const { return held_.size(); }
  int32_t UnitsHeld(size_t s, int32_t unit) const { return UnitsOf(held_[s], unit); }
  KvView View() const;
  // Some of these heads, or none: then all are meant.
  HeadMask DrawHeads(uint64_t of) { return {of & static_cast<uint64_t>(random_.Int(0, 15))}; }

  void DrawShape();
  void DrawSequences();
  void DrawRows();
  void DrawTables();
  void DrawPositions();
  void DrawScore();
  void DrawPlan();
  PlanSegment DrawRange(std::vector<int32_t>& from, bool last);
  PlanSegment DrawBounds(std::vector<int32_t>& from, size_t i, bool last);
  PlanSegment DrawList(std::vector<int32_t>& from, size_t i, bool last);
  void DrawAttend();

  bool TakesPart(int32_t kv_head) const {
    const uint64_t heads = asked_.heads.bits != 0 ? asked_.heads.bits : alone_.bits;
    return heads == 0 || (heads >> kv_head & 1) != 0;
  }
  bool Reads(const PlanSegment& s, RowMeta row, int32_t kv_head, int32_t t) const;
  void GiveBlocksBack();

  void FindFeatures();
  void FindFeatures(const PlanSegment& s);
  AttendArgs Attention() const;
  void RunLocateRows(int64_t turn);
  void RunScoreAndTopK(int64_t turn);
  void RunAttend(int64_t turn);
  void RunMerge(int64_t turn, const Outputs& whole);
  void CheckResolved();

  const uint64_t seed_;
  Random random_;
  Features features_;

  Shape shape_{};
  HeadMask alone_;  // KvView::heads
  int32_t block_tokens_ = 1;
  std::vector<int32_t> q_len_;  // [n_seqs]: rows
  std::vector<int32_t> held_;   // [n_seqs]: tokens in the table, the step's included
  std::vector<int32_t> gone_;   // [n_seqs]: tokens lost before those; empty: none of any sequence
  std::vector<int32_t> later_;  // [n_seqs]: how much further than the last place the row is
  int32_t most_ = kToEnd;       // LocateRowsArgs::most
  std::optional<Bank> bank_;
  std::vector<int32_t> table_;              // [n_seqs * blocks]
  int32_t blocks_ = 0;                      // of a sequence
  std::vector<RowMeta> rows_, token_rows_;  // by row of the table, by position
  std::vector<SeqMeta> seqs_, token_seqs_;
  int32_t pos_lists_ = 1;
  std::vector<int32_t> old_pos_,
      pos_;  // [rows of the table, pos_lists]: before the step, and after
  std::vector<float> q_;

  bool scored_ = false;
  ScoreArgs score_;
  std::vector<float> score_lse_, score_held_;
  TopKArgs top_k_;
  std::vector<int32_t> candidates_, picks_, keep_;  // [n_seqs]

  AttnPlan plan_;
  std::vector<int32_t> bounds_[kMaxSegments], index_[kMaxSegments], count_[kMaxSegments];
  std::vector<int32_t> list_of_[kMaxSegments];
  std::vector<float> own_q_[kMaxSegments];
  AttendArgs asked_;  // what an attention asks besides its plan
  bool with_o_ = true, with_lse_ = true;
  std::vector<float> lse_in_;
};

RandomCase::RandomCase(uint64_t seed) : seed_(seed), random_(seed) {
  DrawShape();
  DrawSequences();
  DrawRows();
  DrawTables();
  DrawPositions();
  DrawScore();
  DrawAttend();
  DrawPlan();
  GiveBlocksBack();
}

void RandomCase::DrawShape() {
  const int32_t n_kv_heads = random_.Int(1, 4);
  const DType dtype = kKvFormats[random_.Int(0, static_cast<int32_t>(std::size(kKvFormats)) - 1)];
  const auto width = [&] {
    return InBlocks(dtype) ? Pick({32, 64, 64, 96, 128})
                           : Pick({64, 64, 32, 128, 80, 40, 24, 13, 7});
  };
  const int32_t dk = width();
  shape_ = {n_kv_heads * Pick({1, 2, 3, 4, 7, 8}), n_kv_heads, dk, Chance(60) ? dk : width(),
            dtype};
  if (Chance(40)) alone_ = DrawHeads((uint64_t{1} << n_kv_heads) - 1);
  block_tokens_ = Pick({1, 16, 16, 32, 64});
}

// Steps of decode rows, of few rows a sequence, and of a prompt's chunk beside others.
void RandomCase::DrawSequences() {
  const int32_t kind = random_.Int(0, 9);
  const bool decode = kind < 4;
  const bool batch = kind == 0;  // of more rows than other decode steps have
  const int32_t n = batch ? random_.Int(17, 24) : random_.Int(1, 4);
  const int32_t chunk = kind >= 7 ? random_.Int(0, n - 1) : -1;
  if (decode && Chance(40)) most_ = random_.Int(0, 150);
  const bool lost = most_ < kToEnd || Chance(40);
  for (int32_t s = 0; s < n; ++s) {
    const bool idle = Chance(batch ? 4 : 20) && s != chunk && n > 1;
    const int32_t rows = decode ? 1 : s == chunk ? random_.Int(17, 80) : random_.Int(1, 5);
    q_len_.push_back(idle ? 0 : rows);
    const int32_t past = Chance(15) ? 0 : random_.Int(0, batch ? 80 : chunk >= 0 ? 150 : 300);
    held_.push_back(std::min(q_len_.back() + past, most_ < kToEnd ? most_ + 1 : kToEnd));
    if (!lost) continue;
    gone_.push_back(Chance(30) ? 0 : random_.Int(1, 500));
    later_.push_back(held_.back() == most_ + int64_t{1} ? random_.Int(0, 20) : 0);
  }
  if (*std::max_element(q_len_.begin(), q_len_.end()) == 0) {  // at least one row
    q_len_[0] = 1;
    held_[0] = std::max(held_[0], 1);
  }
}

void RandomCase::DrawRows() {
  std::vector<size_t> order(n_seqs());
  std::iota(order.begin(), order.end(), size_t{0});
  if (Chance(40)) {
    for (size_t i = order.size(); i > 1; --i) {
      std::swap(order[i - 1],
                order[static_cast<size_t>(random_.Int(0, static_cast<int32_t>(i) - 1))]);
    }
  }
  blocks_ = UnitsOf(std::max(1, *std::max_element(held_.begin(), held_.end())), block_tokens_);
  for (size_t s = 0; s < n_seqs(); ++s) {
    const auto table_off = static_cast<int32_t>(s) * blocks_;
    seqs_.push_back({.q_begin = 0,
                     .q_len = q_len_[s],
                     .kv_len = held_[s],
                     .table_off = table_off,
                     .prompt_len = 0});
  }
  token_seqs_ = seqs_;
  for (const size_t s : order) {
    if (q_len_[s] == 0) continue;
    const int32_t shift = gone_.empty() ? 0 : gone_[s] + later_[s];
    seqs_[s].q_begin = token_seqs_[s].q_begin = static_cast<int32_t>(rows_.size());
    token_seqs_[s].kv_len += shift;
    for (int32_t i = held_[s] - q_len_[s]; i < held_[s]; ++i) {
      rows_.push_back({static_cast<int32_t>(s), i});
      token_rows_.push_back({static_cast<int32_t>(s), i + shift});
    }
  }
  if (!gone_.empty()) {
    for (SeqMeta& seq : seqs_) seq.kv_len = seq.q_len > 0 ? seq.kv_len : 0;
  }
  q_ = random_.Floats(rows_.size() * static_cast<size_t>(shape_.n_heads * shape_.dk));
}

void RandomCase::DrawTables() {
  bank_.emplace(shape_.dtype, alone_.Count(shape_.n_kv_heads), shape_.dk, shape_.dv, block_tokens_,
                held_, blocks_ * block_tokens_, random_,
                Chance(33)                    ? Planes::kApart
                : gone_.empty() && Chance(50) ? Planes::kByHead
                                              : Planes::kTogether);
  const int32_t* drawn = bank_->View().block_table;
  for (size_t s = 0; s < n_seqs(); ++s) {
    for (int32_t b = 0; b < blocks_; ++b) {
      const bool used = b < UnitsHeld(s, block_tokens_);
      table_.push_back(used ? drawn[table_.size()] - 1 : kHole);
    }
  }
  if (n_seqs() < 2 || Chance(50)) return;
  // What two sequences share lies before the rows of both.
  const int32_t shared = std::min(held_[0] - q_len_[0], held_[1] - q_len_[1]) / block_tokens_;
  std::copy_n(table_.begin(), shared, table_.begin() + blocks_);
}

// Block -1 of the view is the bank's block of no token: who reads a hole reads NaN.
KvView RandomCase::View() const {
  KvView view = bank_->View().OfHeads(alone_, shape_.n_kv_heads);
  view.k = view.k.MovedTo(view.k.base + view.BlockRows() * view.k.row_bytes);
  view.v = view.v.MovedTo(view.v.base + view.BlockRows() * view.v.row_bytes);
  view.block_table = table_.data();
  view.pos = gone_.empty() ? nullptr : pos_.data();
  view.pos_lists = pos_lists_;
  return view;
}

// The tokens that each row holds, in ascending order, for all heads or each.
void RandomCase::DrawPositions() {
  if (gone_.empty()) return;
  pos_lists_ = Chance(50) ? shape_.n_kv_heads : 1;
  pos_.assign(table_.size() * static_cast<size_t>(block_tokens_ * pos_lists_), -1);
  for (size_t s = 0; s < n_seqs(); ++s) {
    const int32_t past = held_[s] - q_len_[s];
    for (int32_t l = 0; l < pos_lists_; ++l) {
      const std::vector<int32_t> tokens = random_.Ascending(past, past + gone_[s]);
      for (int32_t i = 0; i < past; ++i) {
        const int64_t row = View().RowIndex(seqs_[s].table_off, i);
        pos_[static_cast<size_t>(row * pos_lists_ + l)] = tokens[static_cast<size_t>(i)];
      }
    }
  }
  old_pos_ = pos_;
  for (size_t r = 0; r < rows_.size(); ++r) {
    const SeqMeta& seq = seqs_[static_cast<size_t>(rows_[r].seq)];
    const int64_t row = View().RowIndex(seq.table_off, rows_[r].pos);
    std::fill_n(pos_.begin() + row * pos_lists_, pos_lists_, token_rows_[r].pos);
  }
}

void RandomCase::DrawScore() {
  scored_ = alone_.All() && Chance(50);
  if (!scored_) return;
  score_ = {.unit = Pick({1, 1, 4, 16, 48}),
            .window = Chance(50) ? random_.Int(1, 20) : 0,
            .heads = Pick({HeadReduce::kMax, HeadReduce::kMean, HeadReduce::kSum}),
            .queries = Pick(
                {QueryReduce::kLast, QueryReduce::kSum, QueryReduce::kMax, QueryReduce::kDecay}),
            .scale = 0.125f,
            .softcap = Chance(40) ? 1.5f : 0.0f,
            .decay = 0.9f,
            .accumulate = Chance(50)};
  score_.lists = Chance(50) ? shape_.n_kv_heads : 1;
  score_.stride = UnitsOf(blocks_ * block_tokens_, score_.unit) + random_.Int(0, 3);
  if (Chance(50)) {
    score_lse_ = random_.Floats(rows_.size() * static_cast<size_t>(shape_.n_heads), 0.3f);
    for (float& lse : score_lse_) lse += 4;
  }
  const auto lists = static_cast<size_t>(score_.lists);
  score_held_.assign(n_seqs() * lists * static_cast<size_t>(score_.stride), kPoison);
  top_k_ = {.stride = score_.stride,
            .lists = score_.lists,
            .capacity = random_.Int(1, 40),
            .n_seqs = static_cast<int32_t>(n_seqs())};
  const bool keeps = Chance(50);
  const auto capacity = static_cast<size_t>(top_k_.capacity);
  for (size_t s = 0; s < n_seqs(); ++s) {
    const int32_t old = UnitsOf(held_[s] - q_len_[s], score_.unit);
    candidates_.push_back(q_len_[s] > 0 ? random_.Int(0, UnitsHeld(s, score_.unit)) : 0);
    picks_.push_back(random_.Int(0, 50));
    if (keeps) keep_.push_back(Chance(50) ? 1 : 0);
    for (size_t l = 0; l < lists; ++l) {
      if (score_.accumulate) {
        const std::vector<float> values = random_.Floats(static_cast<size_t>(old));
        std::copy(values.begin(), values.end(),
                  score_held_.begin() + static_cast<int64_t>(s * lists + l) * score_.stride);
      }
      // What is kept of an earlier choice.
      const int32_t n = random_.Int(0, std::min(top_k_.capacity, candidates_[s]));
      std::vector<int32_t> kept = random_.Ascending(n, candidates_[s]);
      kept.resize(capacity, kNeverRead);
      index_[0].insert(index_[0].end(), kept.begin(), kept.end());
      count_[0].push_back(n);
    }
  }
}

void RandomCase::DrawAttend() {
  asked_.softcap = Chance(30) ? 15.0f : 0.0f;
  if (Chance(30)) {
    asked_.score = Chance(50) ? ScoreKind::kLogits : ScoreKind::kHeadMax;
    with_o_ = Chance(60);
  }
  with_lse_ = Chance(75) || !with_o_;
  if (with_o_ && Chance(30)) {
    lse_in_ = random_.Floats(rows_.size() * static_cast<size_t>(shape_.n_heads), 0.5f);
    for (float& lse : lse_in_) lse += 4;
  }
  if (shape_.n_kv_heads > 1 && Chance(50)) {
    asked_.heads = DrawHeads(alone_.All() ? (uint64_t{1} << shape_.n_kv_heads) - 1 : alone_.bits);
  }
  if (Chance(50)) {
    asked_.busy_seqs = static_cast<int32_t>(
        std::count_if(q_len_.begin(), q_len_.end(), [](int32_t n) { return n > 0; }));
  }
}

// Segments follow one another in each sequence: `from` is where the next one may begin.
PlanSegment RandomCase::DrawRange(std::vector<int32_t>& from, bool last) {
  PlanSegment s;
  s.begin = *std::max_element(from.begin(), from.end()) + (Chance(40) ? random_.Int(1, 100) : 0);
  s.end = last && Chance(70) ? kToEnd : s.begin + random_.Int(0, 100);
  std::fill(from.begin(), from.end(), s.end);
  return s;
}

PlanSegment RandomCase::DrawBounds(std::vector<int32_t>& from, size_t i, bool last) {
  for (size_t s = 0; s < n_seqs(); ++s) {
    const int32_t first = std::min(from[s], held_[s]);
    const int32_t begin = Chance(40) ? random_.Int(first, held_[s]) : first;
    const int32_t end = last && Chance(60) ? held_[s] : random_.Int(begin, held_[s]);
    bounds_[i].insert(bounds_[i].end(), {begin, end});
    from[s] = std::max(from[s], end);
  }
  return {.bounds = bounds_[i].data(), .expected = 512};  // a hint, which changes nothing
}

PlanSegment RandomCase::DrawList(std::vector<int32_t>& from, size_t i, bool last) {
  PlanSegment segment{.kind = SegmentKind::kList,
                      .unit = Pick({1, 1, 2, 5, 16, 48}),
                      .lists = Chance(50) ? shape_.n_kv_heads : 1,
                      .capacity = random_.Int(1, 60)};
  for (size_t s = 0; s < n_seqs(); ++s) {
    const int32_t first = UnitsOf(from[s], segment.unit);
    const int32_t end = last ? UnitsHeld(s, segment.unit)
                             : random_.Int(std::min(from[s], held_[s]), held_[s]) / segment.unit;
    const int32_t units = std::max(0, end - first);
    for (int32_t l = 0; l < segment.lists; ++l) {
      const int32_t n = random_.Int(0, std::min(segment.capacity, units));
      std::vector<int32_t> chosen = random_.Ascending(n, units);
      for (int32_t& u : chosen) u += first;
      chosen.resize(static_cast<size_t>(segment.capacity), kNeverRead);
      index_[i].insert(index_[i].end(), chosen.begin(), chosen.end());
      count_[i].push_back(n);
    }
    from[s] = std::max(from[s], end * segment.unit);
  }
  segment.index = index_[i].data();
  segment.count = count_[i].data();
  if (segment.lists == 1 || Chance(60)) return segment;
  for (int32_t h = 0; h < shape_.n_kv_heads; ++h) {
    list_of_[i].push_back(random_.Int(0, segment.lists - 1));
  }
  segment.list_of = list_of_[i].data();
  return segment;
}

void RandomCase::DrawPlan() {
  const bool scores = asked_.score != ScoreKind::kNone;  // needs one range without window
  const size_t n = scores ? 1 : Pick<size_t>({1, 2, 2, 3, 4, 4});
  std::vector<int32_t> from(n_seqs(), 0);
  for (size_t i = 0; i < n; ++i) {
    const bool last = i + 1 == n;
    PlanSegment s;
    if (i == 0 && scored_ && !scores) {  // what is to be chosen
      s = {.kind = SegmentKind::kList,
           .unit = score_.unit,
           .lists = score_.lists,
           .capacity = top_k_.capacity,
           .index = index_[0].data(),
           .count = count_[0].data()};
      for (size_t q = 0; q < n_seqs(); ++q) from[q] = candidates_[q] * score_.unit;
    } else if (!scores && Chance(50)) {
      s = DrawList(from, i, last);
    } else {
      s = Chance(50) ? DrawRange(from, last) : DrawBounds(from, i, last);
    }
    if (!scores && Chance(30)) s.window = random_.Int(1, 80);
    if (!scores && n > 1 && Chance(25)) {
      own_q_[i] = random_.Floats(q_.size());
      s.q = own_q_[i].data();
    }
    plan_.Add(s);
  }
}

// By the words of attn_plan.h, token by token.
bool RandomCase::Reads(const PlanSegment& s, RowMeta row, int32_t kv_head, int32_t t) const {
  if (t > row.pos || (s.window > 0 && t <= row.pos - s.window)) return false;
  if (s.kind == SegmentKind::kRange) {
    const int32_t* bounds = s.bounds != nullptr ? s.bounds + 2 * row.seq : &s.begin;
    const int32_t end = s.bounds != nullptr ? bounds[1] : s.end;
    return t >= bounds[0] && t < end;
  }
  const int32_t its = s.list_of != nullptr ? s.list_of[kv_head] : kv_head;
  const int64_t list = s.lists == 1 ? row.seq : int64_t{row.seq} * s.lists + its;
  const int32_t* units = s.index + list * s.capacity;
  return std::binary_search(units, units + s.count[list], t / s.unit);
}

// The blocks that no row reads or makes become holes, where nothing is scored.
void RandomCase::GiveBlocksBack() {
  if (scored_ || Chance(20)) return;
  const bool ring = Chance(80);
  const bool inner = Chance(80);
  std::vector<bool> needed(table_.size(), false);
  for (const RowMeta row : rows_) {
    const auto first = static_cast<size_t>(row.seq * blocks_);
    needed[first + static_cast<size_t>(row.pos / block_tokens_)] = true;
    for (int32_t t = 0; t <= row.pos; ++t) {
      for (int32_t i = 0; i < plan_.n_segments; ++i) {
        for (int32_t h = 0; h < shape_.n_kv_heads; ++h) {
          if (Reads(plan_.segments[static_cast<size_t>(i)], row, h, t)) {
            needed[first + static_cast<size_t>(t / block_tokens_)] = true;
          }
        }
      }
    }
  }
  for (size_t s = 0; s < n_seqs(); ++s) {
    bool leading = true;
    for (int32_t b = 0; b < UnitsHeld(s, block_tokens_); ++b) {
      const size_t i = s * static_cast<size_t>(blocks_) + static_cast<size_t>(b);
      leading = leading && !needed[i];
      if (!needed[i] && (leading ? ring : inner && Chance(80))) table_[i] = kHole;
    }
  }
}

void RandomCase::FindFeatures() {
  const auto had = [&](Feature f, bool is) { features_[f] = features_[f] || is; };
  const KvView view = View();
  had(kBf16, view.k.dtype == DType::kBF16);
  had(kF16, view.k.dtype == DType::kF16);
  had(kF32, view.k.dtype == DType::kF32);
  had(kQ8, view.k.dtype == DType::kQ8_0);
  had(kQ4, view.k.dtype == DType::kQ4_0);
  had(kPlanesApart, !view.Interleaved() && !view.ByHead());
  had(kRowsByHead, view.ByHead());
  had(kDkIsNotDv, view.dk != view.dv);
  had(kOneTokenBlocks, view.block_tokens == 1);
  had(kSharedBlocks, n_seqs() > 1 && held_[1] > 0 && table_[0] != kHole &&
                         table_[0] == table_[static_cast<size_t>(blocks_)]);
  had(kLostRows, std::any_of(gone_.begin(), gone_.end(), [](int32_t n) { return n > 0; }));
  had(kLastPlace, std::any_of(later_.begin(), later_.end(), [](int32_t n) { return n > 0; }));
  had(kHeadPos, view.pos != nullptr && view.pos_lists > 1);
  const auto most = *std::max_element(q_len_.begin(), q_len_.end());
  int32_t with_rows = 0;
  int32_t last_begin = -1;
  for (size_t s = 0; s < n_seqs(); ++s) {
    const int32_t* entry = view.block_table + seqs_[s].table_off;
    had(kIdleSeq, q_len_[s] == 0);
    if (q_len_[s] == 0) continue;
    had(kRing, entry[0] == kHole);
    int32_t b = 0;
    while (entry[b] == kHole) ++b;
    had(kInnerHole, std::find(entry + b, entry + UnitsHeld(s, block_tokens_), kHole) !=
                        entry + UnitsHeld(s, block_tokens_));
    had(kUnordered, seqs_[s].q_begin < last_begin);
    last_begin = seqs_[s].q_begin;
    ++with_rows;
  }
  had(kSeveralSeqs, with_rows > 1);
  had(kDecode, most == 1);
  had(kChunk, rows_.size() > kManyRows);
  had(kFewRows, most > 1 && rows_.size() <= kManyRows);

  for (int32_t i = 0; i < plan_.n_segments; ++i) {
    FindFeatures(plan_.segments[static_cast<size_t>(i)]);
  }
  had(kSegments, plan_.n_segments > 1);
  had(kFourSegments, plan_.n_segments == 4);
  had(kSoftcap, asked_.softcap > 0);
  had(kLseIn, !lse_in_.empty());
  had(kSomeHeads, Attention().KvHeads() < view.heads.Count(shape_.n_kv_heads));
  had(kHeadsAlone, view.heads.Count(shape_.n_kv_heads) < shape_.n_kv_heads);
  had(kLogits, asked_.score == ScoreKind::kLogits);
  had(kHeadMax, asked_.score == ScoreKind::kHeadMax);
  had(kScoresOnly, !with_o_);
  if (!scored_) return;
  had(kKeptList, !keep_.empty());
  had(kScoreOfHeads, score_.lists > 1);
  had(kScoreUnits, score_.unit > 1);
  had(kScoreWindow, score_.window > 0);
  had(kScoreSoftmax, !score_lse_.empty());
  had(kScoreSoftcap, score_.softcap > 0);
  had(kAccumulated, score_.accumulate);
  had(kMeanHeads, score_.heads == HeadReduce::kMean);
  had(kSumHeads, score_.heads == HeadReduce::kSum);
  had(kSumQueries, score_.queries == QueryReduce::kSum);
  had(kMaxQueries, score_.queries == QueryReduce::kMax);
  had(kDecayedQueries, score_.queries == QueryReduce::kDecay);
}

void RandomCase::FindFeatures(const PlanSegment& s) {
  const bool list = s.kind == SegmentKind::kList;
  const auto had = [&](Feature f, bool is) { features_[f] = features_[f] || is; };
  had(kRange, !list && s.bounds == nullptr);
  had(kBounds, !list && s.bounds != nullptr);
  had(kWindow, !list && s.window > 0);
  had(kList, list);
  had(kHeadLists, list && s.lists > 1);
  had(kListsByMap, s.list_of != nullptr);
  had(kUnits, list && s.unit > 1);
  had(kListWindow, list && s.window > 0);
  had(kOwnQueries, s.q != nullptr);
  had(kChosenList, list && scored_ && s.index == index_[0].data());
}

std::string RandomCase::Name() const {
  std::string had;
  for (size_t f = 0; f < kFeatures; ++f) {
    if (features_[f]) had += fmt::format(", {}", kFeatureNames[f]);
  }
  return fmt::format("seed {}: {}/{} heads of {}/{}, blocks of {}, rows [{}] of tokens [{}]{}",
                     seed_, shape_.n_heads, shape_.n_kv_heads, shape_.dk, shape_.dv, block_tokens_,
                     fmt::join(q_len_, ", "), fmt::join(held_, ", "), had);
}

AttendArgs RandomCase::Attention() const {
  AttendArgs a = asked_;
  a.q = q_.data();
  a.lse_in = lse_in_.empty() ? nullptr : lse_in_.data();
  a.kv = View();
  a.plan = plan_;
  a.rows = rows_.data();
  a.seqs = seqs_.data();
  a.n_rows = static_cast<int32_t>(rows_.size());
  a.n_seqs = static_cast<int32_t>(seqs_.size());
  a.n_heads = shape_.n_heads;
  a.scale = 0.125f;
  return a;
}

std::vector<int32_t> Flat(const std::vector<RowMeta>& rows, const std::vector<SeqMeta>& seqs) {
  std::vector<int32_t> values;
  for (const RowMeta& row : rows) values.insert(values.end(), {row.seq, row.pos});
  for (const SeqMeta& seq : seqs) {
    values.insert(values.end(),
                  {seq.q_begin, seq.q_len, seq.kv_len, seq.table_off, seq.prompt_len});
  }
  return values;
}

void RandomCase::RunLocateRows(int64_t turn) {
  if (gone_.empty()) return;
  const Outputs located = Check(
      "LocateRows, " + Name(),
      [&](const Execute& run) {
        std::vector<RowMeta> rows(rows_.size());
        std::vector<SeqMeta> seqs(seqs_.size());
        std::vector<int32_t> pos = old_pos_;
        std::vector<int32_t*> layers = {pos.data()};
        run(LocateRowsArgs{.rows = token_rows_.data(),
                           .seqs = token_seqs_.data(),
                           .gone = gone_.data(),
                           .most = most_,
                           .to_rows = rows.data(),
                           .to_seqs = seqs.data(),
                           .pos = layers.data(),
                           .block_table = table_.data(),
                           .block_tokens = block_tokens_,
                           .n_pos = 1,
                           .lists = pos_lists_,
                           .n_rows = static_cast<int32_t>(rows.size()),
                           .n_seqs = static_cast<int32_t>(seqs.size())});
        return Outputs{{"rows", AsFloats(Flat(rows, seqs)), 0}, {"positions", AsFloats(pos), 0}};
      },
      turn);
  EXPECT_EQ(located[0].values, AsFloats(Flat(rows_, seqs_)));
  EXPECT_EQ(located[1].values, AsFloats(pos_));
}

// The scores of the reference are what all choose of, so that the chosen ones must be the same.
void RandomCase::RunScoreAndTopK(int64_t turn) {
  if (!scored_) return;
  const Outputs scored = Check(
      "Score, " + Name(),
      [&](const Execute& run) {
        std::vector<float> out = score_held_;
        ScoreArgs args = score_;
        args.q = q_.data();
        args.lse = score_lse_.empty() ? nullptr : score_lse_.data();
        args.kv = View();
        args.seqs = seqs_.data();
        args.out = out.data();
        args.n_rows = static_cast<int32_t>(rows_.size());
        args.n_seqs = static_cast<int32_t>(n_seqs());
        args.n_heads = shape_.n_heads;
        run(args);
        return Outputs{{"out", out}};
      },
      turn);
  const std::vector<float>& scores = scored[0].values;
  for (size_t list = 0; list < count_[0].size(); ++list) {
    const auto first = scores.begin() + static_cast<int64_t>(list) * score_.stride;
    const size_t s = list / static_cast<size_t>(score_.lists);
    EXPECT_TRUE(
        std::all_of(first, first + candidates_[s], [](float v) { return std::isfinite(v); }))
        << "a token has no score; " << Name();
  }
  const std::vector<float> weight = {1};  // a vector, which a card reads too
  const Outputs chosen = Check(
      "TopK, " + Name(),
      [&](const Execute& run) {
        std::vector<int32_t> index = index_[0];
        std::vector<int32_t> count = count_[0];
        TopKArgs args = top_k_;
        args.scores = scores.data();
        args.weights = weight.data();
        args.seqs = seqs_.data();
        args.n_candidates = candidates_.data();
        args.n_pick = picks_.data();
        args.keep = keep_.empty() ? nullptr : keep_.data();
        args.index = index.data();
        args.count = count.data();
        run(args);
        return Outputs{{"index", AsFloats(index), 0}, {"count", AsFloats(count), 0}};
      },
      turn);
  const auto to_ints = [](const Array& from, std::vector<int32_t>& to) {
    std::transform(from.values.begin(), from.values.end(), to.begin(),
                   [](float v) { return static_cast<int32_t>(v); });
  };
  to_ints(chosen[0], index_[0]);  // in place: the plan points at them
  to_ints(chosen[1], count_[0]);
}

// Which tokens are read, in their positions, by two ways to say it.
void RandomCase::CheckResolved() {
  const auto ref = MakeRefBackend();
  const AttendArgs a = Attention();
  const std::vector<std::vector<int32_t>> resolved = ResolvePlan(*ref, a);
  for (size_t r = 0; r < rows_.size(); ++r) {
    for (int32_t h = 0; h < shape_.n_kv_heads; ++h) {
      if (!TakesPart(h)) continue;
      std::vector<int32_t> tokens;
      for (int32_t t = 0; t <= rows_[r].pos; ++t) {
        for (int32_t i = 0; i < plan_.n_segments; ++i) {
          if (!Reads(plan_.segments[static_cast<size_t>(i)], rows_[r], h, t)) continue;
          const int64_t row = a.kv.RowIndex(seqs_[static_cast<size_t>(rows_[r].seq)].table_off, t);
          const int32_t list = pos_lists_ > 1 ? h : 0;
          tokens.push_back(gone_.empty() ? t : pos_[static_cast<size_t>(row * pos_lists_ + list)]);
        }
      }
      if (tokens.empty()) features_[kNothingRead] = true;
      std::sort(tokens.begin(), tokens.end());
      ASSERT_EQ(resolved[r * static_cast<size_t>(shape_.n_kv_heads) + static_cast<size_t>(h)],
                tokens)
          << "row " << r << " head " << h << "; " << Name();
    }
  }
}

void RandomCase::RunAttend(int64_t turn) {
  const AttendArgs a = Attention();
  const auto row_heads = rows_.size() * static_cast<size_t>(shape_.n_heads);
  const int64_t stride = *std::max_element(held_.begin(), held_.end()) + 3;
  const size_t score_rows = a.score == ScoreKind::kNone      ? 0
                            : a.score == ScoreKind::kHeadMax ? rows_.size()
                                                             : row_heads;
  const Outputs whole = Check(
      "Attend, " + Name(),
      [&](const Execute& run) {
        std::vector<float> o(with_o_ ? row_heads * static_cast<size_t>(shape_.dv) : 0, kPoison);
        std::vector<float> lse(with_lse_ ? row_heads : 0, kPoison);
        std::vector<float> scores(score_rows * static_cast<size_t>(stride), kPoison);
        AttendArgs args = a;
        args.o = with_o_ ? o.data() : nullptr;
        args.lse = with_lse_ ? lse.data() : nullptr;
        args.scores = score_rows > 0 ? scores.data() : nullptr;
        args.score_stride = stride;
        run(args);
        return Outputs{{"o", o}, {"lse", lse}, {"scores", scores}};
      },
      turn);
  // What is read is the K/V of a token, on the reference too.
  for (size_t i = 0; i < 2; ++i) {
    const size_t values = i == 0 ? static_cast<size_t>(shape_.dv) : 1;
    for (size_t at = 0; at < whole[i].values.size(); ++at) {
      const auto head = static_cast<int32_t>(at / values % static_cast<size_t>(shape_.n_heads));
      ASSERT_EQ(std::isnan(whole[i].values[at]), !TakesPart(head / a.Group()))
          << whole[i].name << "; " << Name();
    }
  }
  RunMerge(turn, whole);
}

// Attentions over a segment each, merged.
void RandomCase::RunMerge(int64_t turn, const Outputs& whole) {
  if (plan_.n_segments < 2 || !alone_.All() || Chance(30)) return;
  features_[kMerged] = true;
  const auto ref = MakeRefBackend();
  const auto n_parts = static_cast<size_t>(plan_.n_segments);
  const auto row_heads = rows_.size() * static_cast<size_t>(shape_.n_heads);
  const std::vector<float> no_o(row_heads * static_cast<size_t>(shape_.dv), kPoison);
  std::vector<std::vector<float>> o(n_parts, no_o);
  std::vector<std::vector<float>> lse(n_parts, std::vector<float>(row_heads, kPoison));
  for (size_t i = 0; i < n_parts; ++i) {
    AttendArgs part = Attention();
    part.lse_in = nullptr;
    part.heads = {};
    part.plan = {};
    part.plan.Add(plan_.segments[i]);
    part.o = o[i].data();
    part.lse = lse[i].data();
    ref->Enqueue(part);
  }
  const Outputs merged = Check(
      "MergeStates, " + Name(),
      [&](const Execute& run) {
        std::vector<float> to = no_o;
        std::vector<float> to_lse(row_heads, kPoison);
        MergeStatesArgs args{.n_parts = plan_.n_segments,
                             .o = to.data(),
                             .lse = to_lse.data(),
                             .n_rows = static_cast<int32_t>(rows_.size()),
                             .n_heads = shape_.n_heads,
                             .dv = shape_.dv};
        for (size_t i = 0; i < n_parts; ++i) args.parts[i] = {o[i].data(), lse[i].data()};
        run(args);
        return Outputs{{"o", to}, {"lse", to_lse}};
      },
      turn);
  if (features_[kSomeHeads] || features_[kLseIn]) return;
  for (size_t i = 0; i < merged.size(); ++i) {
    for (size_t at = 0; at < whole[i].values.size(); ++at) {
      const float want = whole[i].values[at];
      if (std::isinf(want)) {
        ASSERT_EQ(merged[i].values[at], want) << Name();
      } else {
        ASSERT_NEAR(merged[i].values[at], want, 2e-5) << merged[i].name << "; " << Name();
      }
    }
  }
}

void RandomCase::Run(int64_t turn) {
  FindFeatures();
  RunLocateRows(turn);
  RunScoreAndTopK(turn);
  if (!testing::Test::HasFatalFailure()) CheckResolved();
  if (!testing::Test::HasFatalFailure()) RunAttend(turn);
}

// Cases that had two features, [feature, feature].
using Counts = std::vector<std::array<int64_t, kFeatures>>;

void ExpectAllDrawn(const Counts& counts) {
  for (size_t a = 0; a < kFeatures; ++a) {
    EXPECT_GT(counts[a][a], 0) << kFeatureNames[a] << " was never drawn";
    for (size_t b = 0; b < a; ++b) {
      EXPECT_EQ(counts[a][b] > 0, GoTogether(a, b))
          << kFeatureNames[b] << " with " << kFeatureNames[a] << " was drawn " << counts[a][b]
          << " times";
    }
  }
}

TEST_F(ParityRandomTest, PlansOverStreams) {
  const char* const given = std::getenv("OMNIKV_SEED");
  const uint64_t seed = given != nullptr ? std::strtoull(given, nullptr, 10) : kUsualSeed;
  Counts counts(kFeatures);
  for (uint64_t i = 0; i < kCases; ++i) {
    RandomCase drawn(seed + i);
    drawn.Run(static_cast<int64_t>(i));
    if (HasFailure()) {
      FAIL() << "OMNIKV_SEED=" << seed + i << " begins with case " << i << " of seed " << seed
             << ": " << drawn.Name();
    }
    for (size_t a = 0; a < kFeatures; ++a) {
      for (size_t b = 0; b < kFeatures; ++b) {
        if (drawn.features()[a] && drawn.features()[b]) ++counts[a][b];
      }
    }
  }
  ExpectAllDrawn(counts);
}

}  // namespace
}  // namespace omnikv::parity::parity_random_test
