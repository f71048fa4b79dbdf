#include "engine/read_picture.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "backend/kv_format.h"
#include "policy/kv_bytes_read.h"

namespace omnikv {
namespace {

template <typename T>
std::vector<T> Fetched(Backend& backend, const T* from, int64_t n) {
  std::vector<T> values(from != nullptr && n > 0 ? static_cast<size_t>(n) : 0);
  if (!values.empty()) backend.Download(values.data(), from, values.size() * sizeof(T));
  return values;
}

// Where the tokens that the rows of a sequence hold stand.
class Positions {
 public:
  // `seq`: of AttendArgs::seqs. `n`: rows.
  Positions(Backend& backend, const AttendArgs& attend, int32_t seq, int64_t n) : kv_(attend.kv) {
    if (kv_.pos == nullptr) return;
    const SeqMeta meta = Fetched(backend, attend.seqs + seq, 1).front();
    const int64_t blocks = (n + kv_.block_tokens - 1) / kv_.block_tokens;
    const int64_t of_block = int64_t{kv_.block_tokens} * kv_.pos_lists;
    for (const int32_t block : Fetched(backend, kv_.block_table + meta.table_off, blocks)) {
      const std::vector<int32_t> pos = Fetched(backend, kv_.pos + block * of_block, of_block);
      pos_.insert(pos_.end(), pos.begin(), pos.end());
    }
  }
  bool Numbered() const { return kv_.pos == nullptr; }  // a row's number is its position
  int64_t Of(int64_t row, int32_t kv_head) const {
    return pos_[static_cast<size_t>(row * kv_.pos_lists + (kv_.pos_lists > 1 ? kv_head : 0))];
  }

 private:
  const KvView& kv_;
  std::vector<int32_t> pos_;
};

// A segment of a plan with what it points at of one sequence.
struct Segment {
  Segment(Backend& backend, const AttendArgs& attend, const PlanSegment& segment, int32_t seq)
      : s(segment),
        bounds(Fetched(backend, s.bounds != nullptr ? s.bounds + 2 * seq : nullptr, 2)),
        count(Fetched(backend, s.count != nullptr ? s.count + int64_t{seq} * s.lists : nullptr,
                      s.lists)),
        list_of(Fetched(backend, s.list_of, attend.kv.n_kv_heads)) {
    for (size_t list = 0; list < count.size(); ++list) {
      const int64_t at = (int64_t{seq} * s.lists + static_cast<int64_t>(list)) * s.capacity;
      index.push_back(Fetched(backend, s.index + at, count[list]));
    }
  }
  // Calls visit(begin, end) with the rows that a row at `pos` reads for a KV head.
  template <typename Visit>
  void ForRanges(int32_t pos, int32_t kv_head, const Visit& visit) const {
    const auto add = [&](int64_t begin, int64_t end) {
      begin = std::max<int64_t>({begin, s.window > 0 ? int64_t{pos} + 1 - s.window : 0, 0});
      end = std::min<int64_t>(end, int64_t{pos} + 1);
      if (begin < end) visit(begin, end);
    };
    if (s.kind == SegmentKind::kRange) {
      return bounds.empty() ? add(s.begin, s.end) : add(bounds[0], bounds[1]);
    }
    PlanSegment of = s;
    of.list_of = list_of.empty() ? nullptr : list_of.data();
    for (const int64_t unit : index[static_cast<size_t>(of.ListOf(0, kv_head))]) {
      add(unit * s.unit, (unit + 1) * s.unit);
    }
  }

  PlanSegment s;
  std::vector<int32_t> bounds, count, list_of;
  std::vector<std::vector<int32_t>> index;  // [lists]
};

}  // namespace

int64_t ReadWatch::BinTokens(int64_t tokens, int32_t max_bins) {
  return std::max<int64_t>(1, (tokens + max_bins - 1) / max_bins);
}

int32_t ReadWatch::Add(const RowGroup& group, int32_t member, int32_t max_bins) {
  watched_.push_back(
      {.group = &group,
       .member = member,
       .max_bins = max_bins,
       .before = group.residency().Count(member),
       .rows = std::vector<std::vector<int64_t>>(static_cast<size_t>(core_.config.n_layers))});
  return static_cast<int32_t>(watched_.size()) - 1;
}

void ReadWatch::Planned(const StepGroup& group, int32_t layer, const AttendArgs& attend,
                        int32_t apart) {
  std::vector<RowMeta> rows;
  for (Watched& watched : watched_) {
    if (&watched.group->residency() != &group.residency) continue;
    if (rows.empty()) rows = Fetched(*core_.backend, attend.rows, attend.n_rows);
    const int64_t tokens = watched.group->length(watched.member);
    const int64_t bin = BinTokens(tokens, watched.max_bins);
    std::vector<int64_t>& bins = watched.rows[static_cast<size_t>(layer)];
    bins.resize(static_cast<size_t>((tokens + bin - 1) / bin));
    const auto add = [&](int64_t begin, int64_t end) {
      while (begin < end) {
        const int64_t stop = std::min(end, (begin / bin + 1) * bin);
        bins[static_cast<size_t>(begin / bin)] += stop - begin;
        begin = stop;
      }
    };
    for (const RowMeta& row : rows) {
      // Of heads that are apart, each one is a sequence.
      if ((apart > 0 ? row.seq / apart : row.seq) != watched.member) continue;
      const Positions positions(*core_.backend, attend, row.seq, int64_t{row.pos} + 1);
      for (int32_t i = 0; i < attend.plan.n_segments; ++i) {
        const Segment segment(*core_.backend, attend, attend.plan.segments[static_cast<size_t>(i)],
                              row.seq);
        for (int32_t h = 0; h < attend.KvHeads(); ++h) {
          const int32_t kv_head = attend.KvHead(h);
          segment.ForRanges(row.pos, kv_head, [&](int64_t begin, int64_t end) {
            if (positions.Numbered()) return add(begin, end);
            for (int64_t r = begin; r < end; ++r) {
              const int64_t token = positions.Of(r, kv_head);
              add(token, token + 1);
            }
          });
        }
      }
    }
  }
}

ReadPicture ReadWatch::Take(int32_t number) const {
  const Watched& watched = watched_[static_cast<size_t>(number)];
  const RowGroup& group = *watched.group;
  const int32_t n_kv_heads = core_.config.n_kv_heads;
  const DeclaredReads reads = group.policy().Reads();
  const SeqLength at = group.lengths(watched.member);
  ReadPicture picture{.tokens = at.tokens, .bin_tokens = BinTokens(at.tokens, watched.max_bins)};
  int32_t global = 0;
  for (int32_t layer = 0; layer < core_.config.n_layers; ++layer) {
    const std::vector<int64_t>& bins = watched.rows[static_cast<size_t>(layer)];
    const int32_t window = core_.config.layers[static_cast<size_t>(layer)].window;
    int32_t heads = n_kv_heads;
    int64_t read = std::min<int64_t>(window, at.tokens) * heads;
    if (window == 0) {
      KvView kv = core_.bank->View(layer);
      kv.n_kv_heads = n_kv_heads;  // of all classes
      heads *= reads.ListsOf(global);
      read = group.policy().HeadTokensReadLast(global, watched.member, at, n_kv_heads);
      picture.bytes += KvBytesRead(group.policy(), global++, at, kv, read);
    }
    picture.attended.push_back(static_cast<double>(read) / heads);
    std::vector<float> shares;
    const bool told = std::accumulate(bins.begin(), bins.end(), int64_t{0}) == read;
    for (size_t b = 0; told && b < bins.size(); ++b) {
      const int64_t begin = static_cast<int64_t>(b) * picture.bin_tokens;
      const int64_t size = std::min(picture.bin_tokens, at.tokens - begin) * heads;
      shares.push_back(
          static_cast<float>(static_cast<double>(bins[b]) / static_cast<double>(size)));
    }
    picture.shares.push_back(std::move(shares));
  }
  if (const auto now = group.residency().Count(watched.member); now && watched.before) {
    picture.hit_rate = now->HitRate(*watched.before);
  }
  return picture;
}

}  // namespace omnikv
