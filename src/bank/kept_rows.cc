#include "bank/kept_rows.h"

#include <fmt/format.h>

#include <algorithm>

#include "backend/kv_slices.h"
#include "base/check.h"

namespace omnikv {

StateSpec PositionsSpec(int32_t layer, const Keeps& keeps) {
  return {
      .layer = layer, .unit = 1, .bytes_per_unit = int64_t{4} * keeps.lists, .name = "positions"};
}

Status KeptRows::OpenPositions() {
  std::vector<StateSpec> specs;
  for (int32_t layer = 0; layer < bank_.n_layers(); ++layer) {
    plane_of_layer_.push_back(Governs(layer) ? static_cast<int32_t>(specs.size()) : -1);
    if (Governs(layer)) specs.push_back(PositionsSpec(layer, keeps_));
  }
  OKV_ASSIGN_OR_RETURN(positions_, bank_.OpenStates(specs));
  std::vector<std::byte*> planes;
  for (const StateView& view : ViewsOf(positions_)) planes.push_back(view.base);
  OKV_ASSIGN_OR_RETURN(position_planes_,
                       backend_.Allocate(planes.size() * sizeof(planes[0]), "rows that are kept"));
  backend_.Upload(position_planes_.as(), planes.data(), position_planes_.size());
  return {};
}

Result<std::unique_ptr<KeptRows>> KeptRows::Create(Backend& backend, Bank& bank, const Keeps& keeps,
                                                   int32_t n_seqs, int32_t max_rows) {
  for (int32_t layer = 0; layer < bank.n_layers(); ++layer) {
    OKV_CHECK(bank.HeadClasses(layer) == 1);
  }
  std::unique_ptr<KeptRows> kept(new KeptRows(backend, bank, keeps, n_seqs));
  const auto take = [&](Buffer& buffer, size_t n, size_t bytes) -> Status {
    OKV_ASSIGN_OR_RETURN(buffer, backend.Allocate(n * bytes, "rows that are kept"));
    return {};
  };
  const auto seqs = static_cast<size_t>(n_seqs);
  OKV_RETURN_IF_ERROR(take(kept->gone_, seqs, sizeof(int32_t)));
  for (Place& place : kept->places_) {
    OKV_RETURN_IF_ERROR(take(place.rows, static_cast<size_t>(max_rows), sizeof(RowMeta)));
    OKV_RETURN_IF_ERROR(take(place.seqs, seqs, sizeof(SeqMeta)));
  }
  OKV_RETURN_IF_ERROR(kept->OpenPositions());
  if (!keeps.every_step) return kept;
  const size_t entries = static_cast<size_t>(bank.n_layers()) * seqs * kEvictionLog;
  const KvView view = bank.View(0);
  OKV_RETURN_IF_ERROR(take(kept->log_rows_, entries, static_cast<size_t>(PackedRowBytes(view))));
  OKV_RETURN_IF_ERROR(take(kept->log_length_, entries * static_cast<size_t>(keeps.lists), 4));
  OKV_RETURN_IF_ERROR(take(kept->log_victim_, entries * static_cast<size_t>(keeps.lists), 4));
  OKV_RETURN_IF_ERROR(take(kept->log_pos_, entries * static_cast<size_t>(keeps.lists), 4));
  return kept;
}

size_t KeptRows::Bytes() const {
  size_t bytes = gone_.size() + position_planes_.size() + log_rows_.size() + log_length_.size() +
                 log_victim_.size() + log_pos_.size();
  for (const Place& place : places_) bytes += place.rows.size() + place.seqs.size();
  return bytes;
}

Status KeptRows::Append(int32_t q, int32_t seq, int64_t n, bool prefill, bool chooses) {
  using LoseRows = Bank::LoseRows;
  const bool every_step = keeps_.every_step && !prefill;
  if (!every_step && !prefill) OKV_RETURN_IF_ERROR(CheckRoom(seq, n));
  const int64_t gone = bank_.Gone(seq, 0);
  bank_.Lose(seq, 0,
             every_step ? LoseRows::kToMost
             : chooses  ? LoseRows::kInStep
                        : LoseRows::kNone,
             keeps_.rows);
  if (bank_.Gone(seq, 0) != gone) UploadGone(q, seq);
  OKV_RETURN_IF_ERROR(bank_.Append(seq, n));
  if (keeps_.sums && (keeps_.every_step || ChoosesAfterPrompt(q))) bank_.Settle(seq, 0);
  return {};
}

Status KeptRows::CheckRoom(int32_t seq, int64_t n) const {
  const int64_t most = bank_.config().tables[0].max_held;
  int64_t rows = bank_.Rows(seq, 0);
  if (keeps_.chunk > 0) n = std::min(n, keeps_.chunk);
  if (keeps_.every_step) rows = std::min(rows, keeps_.rows);
  if (most == 0 || rows + n <= most) return {};
  return ResourceExhausted(fmt::format(
      "{} more tokens do not fit beside the {} that a layer holds, expected at most {} in all: the "
      "policy's setting room is for later turns and answers",
      n, rows, most));
}

Status KeptRows::AppendWhole(int32_t seq, int64_t n) {
  return bank_.AppendWhole(seq, n, keeps_.rows);
}

void KeptRows::Truncate(int32_t q, int32_t seq, int64_t length) {
  const int64_t now = bank_.Length(seq);
  if (length > 0 && length < bank_.LeastLength(seq)) {
    OKV_CHECK(keeps_.every_step && now - length <= kEvictionLog, "{} tokens cut to {}", now,
              length);
    for (int32_t layer = 0; layer < bank_.n_layers(); ++layer) {
      if (!Governs(layer)) continue;
      backend_.Enqueue(UndoEvictArgs{.kv = bank_.View(layer),
                                     .pos = PositionsOf(layer),
                                     .log = LogOf(layer),
                                     .seq = q,
                                     .table_off = bank_.TableOffset(seq),
                                     .lists = keeps_.lists,
                                     .from = length,
                                     .to = now});
    }
  }
  bank_.Truncate(seq, length);
  if (length > 0) return;
  prompted_[static_cast<size_t>(q)] = false;
  UploadGone(q, seq);
}

void KeptRows::EndPrompt(int32_t q, int32_t seq, bool chose) {
  prompted_[static_cast<size_t>(q)] = true;
  if (!chose) return;
  if (keeps_.sums) bank_.Settle(seq, 0);
  bank_.Keep(seq, 0, std::min(bank_.Rows(seq, 0), keeps_.rows));
  UploadGone(q, seq);
}

void KeptRows::Begin(int32_t q, int32_t seq, const KeptRows* from, int32_t from_q) {
  const auto to = static_cast<size_t>(q);
  prompted_[to] = from != nullptr && from->prompted_[static_cast<size_t>(from_q)];
  UploadGone(q, seq);
}

void KeptRows::UploadGone(int32_t q, int32_t seq) {
  const auto gone = static_cast<int32_t>(bank_.Gone(seq, 0));
  backend_.Upload(gone_.as<int32_t>() + q, &gone, sizeof(gone));
}

void KeptRows::Locate(const RowMeta* rows, int32_t n_rows, const SeqMeta* seqs, bool prefill) {
  const Place& place = places_[prefill ? 1 : 0];
  const bool every_step = keeps_.every_step && !prefill;
  backend_.Enqueue(LocateRowsArgs{.rows = rows,
                                  .seqs = seqs,
                                  .gone = gone_.as<int32_t>(),
                                  .most = every_step ? static_cast<int32_t>(keeps_.rows) : kToEnd,
                                  .to_rows = place.rows.as<RowMeta>(),
                                  .to_seqs = place.seqs.as<SeqMeta>(),
                                  .pos = position_planes_.as<int32_t*>(),
                                  .block_table = positions_.front()->view.block_table,
                                  .block_tokens = bank_.config().block_tokens,
                                  .n_pos = static_cast<int32_t>(positions_.size()),
                                  .lists = keeps_.lists,
                                  .n_rows = n_rows,
                                  .n_seqs = n_seqs_});
}

EvictionLog KeptRows::LogOf(int32_t layer) const {
  const int64_t entry = int64_t{layer} * n_seqs_ * kEvictionLog;
  return {.rows = log_rows_.as<std::byte>() + entry * PackedRowBytes(bank_.View(layer)),
          .length = log_length_.as<int32_t>() + entry * keeps_.lists,
          .victim = log_victim_.as<int32_t>() + entry * keeps_.lists,
          .pos = log_pos_.as<int32_t>() + entry * keeps_.lists};
}

void KeptRows::Retain(int32_t layer, const Retained& retained, const SeqMeta* seqs, bool prefill,
                      const PromptStage* stage) {
  const SeqMeta* located = stage != nullptr ? seqs : Of(prefill).seqs;
  if (!prefill) {
    backend_.Enqueue(EvictArgs{.kv = bank_.View(layer),
                               .seqs = located,
                               .steps = seqs,
                               .scores = retained.scores,
                               .pos = PositionsOf(layer),
                               .log = LogOf(layer),
                               .most = static_cast<int32_t>(keeps_.rows),
                               .recent = retained.recent,
                               .lists = keeps_.lists,
                               .n_seqs = n_seqs_});
    return;
  }
  const PlanSegment& list = retained.rows.segments[0];
  OKV_CHECK(retained.rows.n_segments == 2 && list.kind == SegmentKind::kList && list.unit == 1 &&
            list.lists == keeps_.lists);
  backend_.Enqueue(CompactArgs{.kv = bank_.View(layer),
                               .from = stage != nullptr ? stage->View(layer) : KvView{},
                               .seqs = located + retained.first_seq,
                               .steps = seqs + retained.first_seq,
                               .index = list.index,
                               .count = list.count,
                               .bounds = retained.rows.segments[1].bounds,
                               .pos = PositionsOf(layer),
                               .scores = retained.scores,
                               .to_scores = retained.to_scores,
                               .capacity = list.capacity,
                               .lists = keeps_.lists,
                               .n_seqs = retained.n_seqs});
}

}  // namespace omnikv
