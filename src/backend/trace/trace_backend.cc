#include "backend/trace/trace_backend.h"

#include <fmt/format.h>

#include <type_traits>

#include "backend/attend_inputs.h"
#include "base/check.h"

namespace omnikv {
namespace {

class TracedStep : public Recording {
 public:
  TracedStep(std::vector<Op> list, std::unique_ptr<Recording> step)
      : ops(std::move(list)), inner(std::move(step)) {}
  std::vector<Op> ops;
  std::unique_ptr<Recording> inner;
};

// Copies on the host of what the cost of an op depends on.
class HostCopies : public HostArrays {
 public:
  explicit HostCopies(Backend& backend) : backend_(backend) {}

 private:
  const void* Bytes(const void* device, size_t bytes) override {
    if (device == nullptr || bytes == 0) return nullptr;
    std::vector<std::byte>& copy = copies_.emplace_back(bytes);
    backend_.Download(copy.data(), device, bytes);
    return copy.data();
  }

  Backend& backend_;
  std::vector<std::vector<std::byte>> copies_;
};

// Points the arrays that CostOf reads at copies on the host.
struct Localise {
  HostCopies& host;

  void operator()(AttendArgs& a) const {
    ForInputs(a, [&](auto*& array, int64_t n) {
      constexpr bool kIsData = std::is_same_v<decltype(array), const float*&>;
      if constexpr (!kIsData) array = host.Of(array, n);
    });
  }
  // Sequences up to the last one that has a row.
  static int32_t SeqsOf(const RowMeta* rows, int32_t n_rows) {
    int32_t n_seqs = 0;
    for (int32_t r = 0; r < n_rows; ++r) n_seqs = std::max(n_seqs, rows[r].seq + 1);
    return n_seqs;
  }
  // The lengths of `some`.
  void Lengths(SomeTokens& some, int32_t n_seqs, int32_t lists) const {
    some.count = host.Of(some.count, int64_t{n_seqs} * lists);
    some.bounds = host.Of(some.bounds, 2 * int64_t{n_seqs});
  }
  void operator()(ScoreReduceArgs& a) const {
    a.rows = host.Of(a.rows, a.n_rows);
    Lengths(a.only, SeqsOf(a.rows, a.n_rows), a.lists);
  }
  void operator()(ScoreArgs& a) const { a.seqs = host.Of(a.seqs, a.n_seqs); }
  void operator()(BlockSummaryArgs& a) const { a.seqs = host.Of(a.seqs, a.n_seqs); }
  void operator()(BlockScoreArgs& a) const { a.seqs = host.Of(a.seqs, a.n_seqs); }
  void operator()(KeyScoreArgs& a) const { a.seqs = host.Of(a.seqs, a.n_seqs); }
  void operator()(IndexKeysArgs& a) const { a.seqs = host.Of(a.seqs, a.n_seqs); }
  void operator()(IndexScoreArgs& a) const {
    a.rows = host.Of(a.rows, a.n_rows);
    Lengths(a.only, SeqsOf(a.rows, a.n_rows), 1);
  }
  void operator()(RescoreArgs& a) const {
    a.rows = host.Of(a.rows, a.n_rows);
    Lengths(a.tokens, a.n_seqs, a.lists);
  }
  void operator()(QueryMomentsArgs& a) const { a.steps = host.Of(a.steps, 1); }
  void operator()(ExpectedScoreArgs& a) const { a.seqs = host.Of(a.seqs, 1); }
  void operator()(AgedScoresArgs& a) const { a.seqs = host.Of(a.seqs, a.n_seqs); }
  void operator()(PoolArgs& a) const { a.n = host.Of(a.n, a.n_seqs); }
  void operator()(TopKArgs& a) const {
    a.n_candidates = host.Of(a.n_candidates, a.n_seqs);
    a.n_pick = host.Of(a.n_pick, a.n_seqs);
    Lengths(a.among, a.n_seqs, a.lists);
    a.keep = host.Of(a.keep, a.n_seqs);
  }
  void operator()(AverageScoresArgs& a) const {
    a.seqs = host.Of(a.seqs, a.n_seqs);
    a.n_candidates = host.Of(a.n_candidates, a.n_seqs);
    a.count = host.Of(a.count, a.n_seqs);
  }
  void operator()(WorkingSetArgs& a) const {
    a.seqs = host.Of(a.seqs, a.n_seqs);
    a.count = host.Of(a.count, a.n_seqs);
    a.bounds = host.Of(a.bounds, 2 * int64_t{a.n_seqs});
    a.n_miss = const_cast<int32_t*>(host.Of(a.n_miss, a.n_seqs));
    if (a.ahead != nullptr) a.n_ahead = const_cast<int32_t*>(host.Of(a.n_ahead, a.n_seqs));
  }
  void operator()(FetchRowsArgs& a) const { a.n = host.Of(a.n, a.lists); }
  void operator()(ListPiecesArgs& a) const {
    a.seqs = host.Of(a.seqs, a.n_seqs);
    a.count = host.Of(a.count, a.n_seqs);
  }
  void operator()(PieceTableArgs& a) const {
    a.seqs = host.Of(a.seqs, a.n_seqs);
    a.count = host.Of(a.count, a.n_seqs);
    a.bounds = host.Of(a.bounds, 2 * int64_t{a.n_seqs});
  }
  void operator()(PickLogitsArgs& a) const {
    a.rows = host.Of(a.rows, a.n_rows);
    a.count = host.Of(a.count, int64_t{a.n_seqs} * a.lists);
  }
  void operator()(SumValuesArgs& a) const {
    a.rows = host.Of(a.rows, a.n_rows);
    a.count = host.Of(a.count, int64_t{a.n_seqs} * a.lists);
  }
  void operator()(CompactArgs& a) const {
    const int64_t lists = int64_t{a.n_seqs} * a.lists;
    a.seqs = host.Of(a.seqs, a.n_seqs);
    a.index = host.Of(a.index, lists * a.capacity);
    a.count = host.Of(a.count, lists);
    a.bounds = host.Of(a.bounds, 2 * int64_t{a.n_seqs});
  }
  void operator()(EvictArgs& a) const { a.seqs = host.Of(a.seqs, a.n_seqs); }
  template <typename Args>
  void operator()(Args&) const {}
};

// CostOf an op whose lengths and counts lie in a device's memory.
Cost CostOnDevice(Backend& backend, Op op) {
  HostCopies host(backend);
  if (const auto* custom = std::get_if<CustomArgs>(&op)) return CostOf(*custom, host);
  std::visit(Localise{host}, op);
  return CostOf(op);
}

}  // namespace

std::unique_ptr<Recording> TraceBackend::Record(const std::function<void()>& body) {
  OKV_CHECK(!recording_now_);
  recordings_.emplace_back();
  recording_now_ = true;
  auto step = inner().Record(body);
  recording_now_ = false;
  if (step == nullptr) return nullptr;
  return std::make_unique<TracedStep>(recordings_.back(), std::move(step));
}

void TraceBackend::Replay(const Recording& recording) {
  const auto& step = static_cast<const TracedStep&>(recording);
  if (!logging_) return inner().Replay(*step.inner);
  for (const Op& op : step.ops) Run(op);
}

void TraceBackend::Enqueue(const Op& op, Lane lane) {
  if (recording_now_) recordings_.back().push_back(op);
  if (recording_now_ || !logging_) {
    inner().Enqueue(op, lane);
  } else {
    Run(op);
  }
}

void TraceBackend::Run(const Op& op) {
  const double seconds = inner().TimeAlone(op);
  const Cost cost = inner().OnDevice() ? CostOnDevice(inner(), op) : CostOf(op);
  entries_.push_back({op, cost, seconds});
}

Cost TraceBackend::Total() const {
  Cost total;
  for (const TraceEntry& e : entries_) total += e.cost;
  return total;
}

Cost TraceBackend::TotalOf(std::string_view name) const {
  Cost total;
  for (const TraceEntry& e : entries_) {
    if (OpName(e.op) == name) total += e.cost;
  }
  return total;
}

std::optional<std::string> TraceBackend::Difference(const std::vector<Op>& a,
                                                    const std::vector<Op>& b) {
  if (a.size() != b.size()) return fmt::format("{} ops, then {}", a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i] == b[i]) continue;
    return fmt::format("op {} is {}, then {}{}", i, OpName(a[i]), OpName(b[i]),
                       a[i].index() == b[i].index() ? " with other arguments" : "");
  }
  return std::nullopt;
}

}  // namespace omnikv
