#include "backend/cpu/attend.h"

#include <algorithm>

#include "base/check.h"
#include "base/round.h"

namespace omnikv {
namespace {

constexpr int32_t kPassRows = 64;        // rows planned together: bounds the scratch
constexpr int32_t kGroupRows = 8;        // rows of a sequence that share a walk over its tokens
constexpr int32_t kPiecesPerThread = 4;  // taken as threads become free
constexpr int64_t kMinPieceBytes = 32 << 10;  // of K and V: below, a merge costs more than it saves
constexpr int64_t kMergeInline = 16 << 10;    // floats that the calling thread merges by itself

// Lists that differ per KV head are walked head by head, and so are rows of single heads, unless
// one score is wanted of all heads.
bool PerHead(const AttendArgs& a) {
  for (int32_t i = 0; i < a.plan.n_segments; ++i) {
    const PlanSegment& s = a.plan.segments[static_cast<size_t>(i)];
    if (s.kind == SegmentKind::kList && s.lists != 1) return true;
  }
  return a.kv.ByHead() && a.score != ScoreKind::kHeadMax;
}

int64_t StateStride(const AttendArgs& a) {
  return kAttendStateHead + RoundUp(a.kv.dv, kPackMultiple);
}

}  // namespace

AttendAxis MakeAttendAxis(const AttendArgs& a, const AttendGroup& group, int32_t kv_head) {
  const int64_t first_pos = a.rows[group.row].pos;
  const int64_t last_pos = a.rows[group.row + group.n_rows - 1].pos;
  AttendAxis axis;
  for (int32_t i = 0; i < a.plan.n_segments; ++i) {
    const PlanSegment& s = a.plan.segments[static_cast<size_t>(i)];
    if (s.kind == SegmentKind::kRange) {
      const int64_t low = s.window > 0 ? std::max<int64_t>(0, first_pos + 1 - s.window) : 0;
      const int64_t begin = s.bounds != nullptr ? s.bounds[2 * group.seq] : s.begin;
      const int64_t end = s.bounds != nullptr ? s.bounds[2 * group.seq + 1] : s.end;
      axis.first[i] = std::max(begin, low);
      axis.tokens[i] = std::max<int64_t>(0, std::min(end, last_pos + 1) - axis.first[i]);
    } else {
      const int64_t list = s.ListOf(group.seq, kv_head);
      axis.tokens[i] = int64_t{s.count[list]} * s.unit;
    }
    axis.total += axis.tokens[i];
  }
  return axis;
}

int32_t EvenPieces(int32_t least, int32_t most, int64_t lists, int32_t threads) {
  // Of the time that the threads have until the last one ends, the share that they work.
  const auto share = [&](int32_t pieces) {
    const int64_t all = pieces * lists;
    const int64_t rounds = (all + threads - 1) / threads;
    return static_cast<double>(all) / static_cast<double>(rounds * threads);
  };
  int32_t best = least;
  for (int32_t pieces = least + 1; pieces <= std::min(2 * least, most); ++pieces) {
    if (share(pieces) > share(best) + 0.01) best = pieces;  // more pieces cost a little
  }
  return best;
}

CpuAttend::CpuAttend(ThreadPool& pool, const Isa& isa)
    : pool_(pool), kernels_(GetAttendKernels(isa)) {}

int32_t CpuAttend::MaxPieces(int32_t n_rows) const {
  return std::max(1, pool_.size() * kPiecesPerThread / std::max(1, n_rows / kGroupRows));
}

size_t CpuAttend::Reserve(const AttendArgs& a) {
  const int32_t rows = std::min(a.n_rows, kPassRows);
  const auto groups = static_cast<size_t>(rows);
  groups_.reserve(std::max(groups_.capacity(), groups));
  // Every row may be a group of its own, in every piece.
  int64_t most = 0;  // row pieces
  for (int32_t n = 1; n <= rows; ++n) most = std::max(most, int64_t{n} * MaxPieces(n));
  const auto items = static_cast<size_t>(most * (PerHead(a) ? a.KvHeads() : 1));
  items_.reserve(std::max(items_.capacity(), items));
  const int64_t q = int64_t{a.plan.n_segments} * rows * a.n_heads * PackedQueryFloats(a.kv.dk);
  return static_cast<size_t>(q + most * a.n_heads * StateStride(a));
}

void CpuAttend::Run(const AttendArgs& a, int32_t begin, int32_t end, float* scratch) {
  for (int32_t row = begin; row < end; row += kPassRows) {
    RunRows(a, row, std::min(end, row + kPassRows), scratch);
  }
}

void CpuAttend::MakeGroups(const AttendArgs& a, int32_t begin, int32_t end) {
  groups_.clear();
  for (int32_t row = begin; row < end; ++row) {
    const RowMeta meta = a.rows[row];
    AttendGroup* last = groups_.empty() ? nullptr : &groups_.back();
    if (last != nullptr && last->seq == meta.seq && last->n_rows < kGroupRows &&
        a.rows[row - 1].pos + 1 == meta.pos) {
      ++last->n_rows;
    } else {
      groups_.push_back({.seq = meta.seq, .row = row, .n_rows = 1, .pieces = 1, .state = nullptr});
    }
  }
}

void CpuAttend::RunRows(const AttendArgs& a, int32_t begin, int32_t end, float* scratch) {
  AttendJob job;
  job.args = &a;
  job.first_row = begin;
  job.state_stride = StateStride(a);

  // Queries in packed order; segments that share them share the copy.
  const int32_t n_rows = end - begin;
  const int64_t row_heads = int64_t{n_rows} * a.n_heads;
  const float* source[kMaxSegments] = {};
  for (int32_t i = 0; i < a.plan.n_segments; ++i) {
    const PlanSegment& s = a.plan.segments[static_cast<size_t>(i)];
    source[i] = s.q != nullptr ? s.q : a.q;
    const auto same = std::find(source, source + i, source[i]) - source;
    if (same < i) {
      job.q[i] = job.q[same];
      continue;
    }
    job.q[i] = scratch;
    const float* q = source[i] + int64_t{begin} * a.n_heads * a.kv.dk;
    for (int64_t h = 0; h < row_heads; h += a.Group()) {
      kernels_.pack_queries(a.kv, q + h * a.kv.dk, a.Group(), scratch);
      scratch += a.Group() * PackedQueryFloats(a.kv.dk);
    }
  }

  MakeGroups(a, begin, end);
  const bool per_head = PerHead(a);
  const int32_t lists = per_head ? a.KvHeads() : 1;
  const int64_t token_bytes =
      a.kv.TokenBytes() * a.kv.HeadRepeats() * a.KvHeads() / a.kv.heads.Count(a.kv.n_kv_heads);
  const auto work_of = [&](const AttendGroup& group) {
    int64_t tokens = 0;
    for (int32_t h = 0; h < lists; ++h) {
      tokens += MakeAttendAxis(a, group, a.KvHead(h)).total;
    }
    return tokens * group.n_rows * (token_bytes / lists);
  };
  int64_t total = 0;
  for (const AttendGroup& group : groups_) total += work_of(group);
  const int32_t max_pieces = MaxPieces(n_rows);
  const int64_t piece_bytes =
      std::max(kMinPieceBytes, total / (int64_t{pool_.size()} * kPiecesPerThread));

  items_.clear();
  for (AttendGroup& group : groups_) {
    const int64_t bytes = work_of(group) / lists;
    const auto pieces_of = [&](int64_t bytes_each, int32_t most) {
      return static_cast<int32_t>(
          std::clamp<int64_t>((bytes + bytes_each - 1) / bytes_each, 1, most));
    };
    const int32_t most = pieces_of(kMinPieceBytes, max_pieces);
    group.pieces = EvenPieces(pieces_of(piece_bytes, most), most,
                              lists * static_cast<int64_t>(groups_.size()), pool_.size());
    group.state = scratch;
    scratch += group.pieces * group.n_rows * a.n_heads * job.state_stride;
    for (int32_t p = 0; p < group.pieces; ++p) {
      for (int32_t h = 0; h < lists; ++h) {
        items_.push_back(
            {.group = &group, .piece = p, .first = h, .n_kv_heads = per_head ? 1 : a.KvHeads()});
      }
    }
  }
  pool_.ParallelFor(static_cast<int64_t>(items_.size()), 1, [&](int64_t from, int64_t to, int) {
    for (int64_t i = from; i < to; ++i) {
      // The others take the items between: threads are about equally fast.
      const auto after = static_cast<size_t>(i + pool_.size());
      kernels_.piece(job, items_[static_cast<size_t>(i)],
                     after < items_.size() ? &items_[after] : nullptr);
    }
  });

  const int32_t n_heads = a.Heads();
  for (const AttendGroup& group : groups_) {
    const int64_t merges = int64_t{group.n_rows} * n_heads;
    const auto merge = [&](int64_t from, int64_t to, int) {
      for (int64_t i = from; i < to;) {
        const auto row = static_cast<int32_t>(i / n_heads);
        const auto of_row = static_cast<int32_t>(i % n_heads);
        // Query heads of one KV head are neighbours.
        const int32_t left = a.Group() - of_row % a.Group();
        const auto n = static_cast<int32_t>(std::min<int64_t>(left, to - i));
        const int32_t head = a.Head(of_row);
        kernels_.merge(job, group, row, head, head + n);
        i += n;
      }
    };
    const bool small = merges * group.pieces * job.state_stride <= kMergeInline;
    pool_.ParallelFor(merges, small ? merges : RoundUp(merges, pool_.size()) / pool_.size(), merge);
  }
}

}  // namespace omnikv
