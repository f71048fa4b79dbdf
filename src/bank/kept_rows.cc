#include "bank/kept_rows.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "backend/kv_slices.h"
#include "base/check.h"

namespace omnikv {

std::vector<StateSpec> PositionsSpecs(const BankConfig& bank, const Keeps& keeps) {
  std::vector<StateSpec> specs;
  std::set<int32_t> pools;  // of heads that are apart
  for (size_t layer = 0; keeps.rows > 0 && layer < bank.layers.size(); ++layer) {
    if (!bank.IsGlobal(layer)) continue;
    const bool apart = bank.layers[layer].HeadsApart();
    if (apart && !pools.insert(bank.FirstSharing(bank.layers[layer].table())).second) continue;
    specs.push_back({.layer = static_cast<int32_t>(layer),
                     .unit = 1,
                     .bytes_per_unit = int64_t{4} * (apart ? 1 : keeps.lists),
                     .name = "positions"});
  }
  return specs;
}

void KeptRows::MakeClasses() {
  const BankConfig& bank = bank_.config();
  int32_t number = 0;
  for (int32_t layer = 0; layer < bank_.n_layers(); ++layer) {
    const auto l = static_cast<size_t>(layer);
    class_of_.push_back(-1);
    if (!bank.IsGlobal(l)) continue;
    const int32_t table = bank.layers[l].table();
    auto same = classes_.end();
    if (!keeps_.LayersDiffer()) {
      same = std::find_if(classes_.begin(), classes_.end(),
                          [&](const Class& c) { return c.table == table; });
    }
    class_of_.back() = static_cast<int32_t>(same - classes_.begin());
    if (same == classes_.end()) {
      const int32_t heads = bank_.HeadsApart(layer) ? bank_.HeadClasses(layer) : 1;
      classes_.push_back(
          {.table = table, .number = number, .layers = {}, .heads = heads, .first_head = n_heads_});
      n_heads_ += static_cast<size_t>(heads);
      for (int32_t of = table; of < table + heads; ++of) {
        if (std::find(tables_.begin(), tables_.end(), of) == tables_.end()) tables_.push_back(of);
      }
    }
    classes_[ClassOf(layer)].layers.push_back(layer);
    ++number;
  }
  OKV_CHECK(!keeps_.LayersDiffer() || keeps_.layer_rows.size() == classes_.size());
  OKV_CHECK(!keeps_.LayersDiffer() || !keeps_.every_step);
  if (!keeps_.LayersDiffer()) return;
  for (GoneOf& gone : gone_of_) gone.by_layer.assign(classes_.size(), 0);
}

Status KeptRows::OpenPositions() {
  OKV_ASSIGN_OR_RETURN(positions_, bank_.OpenStates(PositionsSpecs(bank_.config(), keeps_)));
  plane_of_layer_.assign(static_cast<size_t>(bank_.n_layers()), nullptr);
  std::vector<int32_t*> planes;
  for (Class& c : classes_) {
    c.first_plane = planes.size();
    for (const int32_t layer : c.layers) {
      // Of the last stream that begins no later: the layer's own, or that of its blocks.
      const auto after = std::ranges::find_if(
          positions_, [&](const auto& stream) { return stream->spec.layer > layer; });
      int32_t* const plane = reinterpret_cast<int32_t*>((*std::prev(after))->view.base);
      plane_of_layer_[static_cast<size_t>(layer)] = plane;
      planes.push_back(plane);
    }
  }
  OKV_ASSIGN_OR_RETURN(position_planes_,
                       backend_.Allocate(planes.size() * sizeof(planes[0]), "rows that are kept"));
  backend_.Upload(position_planes_.as(), planes.data(), position_planes_.size());
  return {};
}

Result<std::unique_ptr<KeptRows>> KeptRows::Create(Backend& backend, Bank& bank, const Keeps& keeps,
                                                   int32_t n_seqs, int32_t max_rows) {
  for (int32_t layer = 0; layer < bank.n_layers(); ++layer) {
    OKV_CHECK(bank.HeadClasses(layer) == 1 || (bank.HeadsApart(layer) && keeps.HeadsDiffer()));
  }
  std::unique_ptr<KeptRows> kept(new KeptRows(backend, bank, keeps, n_seqs));
  kept->MakeClasses();
  const auto take = [&](Buffer& buffer, size_t n, size_t bytes) -> Status {
    OKV_ASSIGN_OR_RETURN(buffer, backend.Allocate(n * bytes, "rows that are kept"));
    return {};
  };
  const auto seqs = static_cast<size_t>(n_seqs);
  const size_t heads = kept->n_heads_;
  OKV_RETURN_IF_ERROR(take(kept->gone_, heads * seqs, sizeof(int32_t)));
  for (const bool prefill : {false, true}) {
    Place& place = kept->places_[prefill ? 1 : 0];
    place.max_rows = static_cast<size_t>(prefill ? max_rows : n_seqs);  // a decode row a sequence
    OKV_RETURN_IF_ERROR(take(place.rows, heads * place.max_rows, sizeof(RowMeta)));
    OKV_RETURN_IF_ERROR(take(place.seqs, heads * seqs, sizeof(SeqMeta)));
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
  bool changed = false;
  for (const int32_t table : tables_) {
    const int64_t gone = bank_.Gone(seq, table);
    bank_.Lose(seq, table,
               every_step ? LoseRows::kToMost
               : chooses  ? LoseRows::kInStep
                          : LoseRows::kNone,
               keeps_.rows);
    changed = changed || bank_.Gone(seq, table) != gone;
  }
  if (changed) UploadGone(q, seq);
  OKV_RETURN_IF_ERROR(bank_.Append(seq, n));
  if (!keeps_.sums || !(keeps_.every_step || ChoosesAfterPrompt(q))) return {};
  for (const int32_t table : tables_) bank_.Settle(seq, table);
  return {};
}

Status KeptRows::CheckRoom(int32_t seq, int64_t n) const {
  if (keeps_.chunk > 0) n = std::min(n, keeps_.chunk);
  const std::vector<TableSpec>& specs = bank_.config().tables;
  for (size_t i = 0; i < tables_.size();) {
    // Tables that share blocks have room for so many rows in the mean.
    int64_t most = 0;
    int64_t rows = 0;
    const size_t first = i;
    do {
      most += specs[static_cast<size_t>(tables_[i])].max_held;
      rows +=
          std::min(bank_.Rows(seq, tables_[i]), keeps_.every_step ? keeps_.rows : int64_t{kToEnd});
    } while (++i < tables_.size() && specs[static_cast<size_t>(tables_[i])].shares);
    const auto tables = static_cast<int64_t>(i - first);
    if (most == 0 || rows + n * tables <= most) continue;
    return ResourceExhausted(fmt::format(
        "{} more tokens do not fit beside the {} that a layer holds, expected at most {} in all: "
        "the policy's setting room is for later turns and answers",
        n, rows / tables, most / tables));
  }
  return {};
}

std::vector<int64_t> KeptRows::RowsOf(const Class& c, int64_t tokens,
                                      std::span<const int64_t> rows_of) const {
  const auto lists = static_cast<size_t>(keeps_.lists);
  if (rows_of.empty()) return std::vector<int64_t>(lists, keeps_.RowsAfter(c.number, tokens));
  const auto of_class = rows_of.subspan(static_cast<size_t>(c.number) * lists, lists);
  return {of_class.begin(), of_class.end()};
}

Status KeptRows::AppendWhole(int32_t seq, int64_t n, std::span<const int64_t> rows_of) {
  std::vector<int64_t> kept(bank_.config().tables.size(), Bank::kAllRows);
  for (const Class& c : classes_) {
    const std::vector<int64_t> rows = RowsOf(c, n, rows_of);
    const auto first = kept.begin() + c.table;
    if (c.heads > 1) {
      std::ranges::copy(rows, first);
    } else {
      *first = std::max(*first, *std::ranges::max_element(rows));
    }
  }
  return bank_.AppendWhole(seq, n, kept);
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

void KeptRows::EndPrompt(int32_t q, int32_t seq, bool chose, std::span<const int64_t> rows_of) {
  prompted_[static_cast<size_t>(q)] = true;
  if (!chose) return;
  std::vector<int64_t> rows(static_cast<size_t>(bank_.n_layers()), 0);
  for (const Class& c : classes_) {
    const std::vector<int64_t> kept = RowsOf(c, bank_.Length(seq), rows_of);  // by list
    for (int32_t head = 0; c.heads > 1 && head < c.heads; ++head) {
      const int32_t table = c.table + head;
      bank_.Keep(seq, table, std::min(bank_.Rows(seq, table), kept[static_cast<size_t>(head)]));
    }
    for (const int32_t layer : c.layers) {
      rows[static_cast<size_t>(layer)] =
          std::min(bank_.LayerRows(seq, layer), *std::max_element(kept.begin(), kept.end()));
    }
  }
  for (const int32_t table : tables_) {
    if (keeps_.sums) bank_.Settle(seq, table);
    if (!bank_.SharesBlocks(table)) bank_.Keep(seq, table, rows);
  }
  UploadGone(q, seq);
}

void KeptRows::Begin(int32_t q, int32_t seq, const KeptRows* from, int32_t from_q) {
  const auto to = static_cast<size_t>(q);
  prompted_[to] = from != nullptr && from->prompted_[static_cast<size_t>(from_q)];
  UploadGone(q, seq);
}

void KeptRows::UploadGone(int32_t q, int32_t seq) {
  GoneOf& of = gone_of_[static_cast<size_t>(q)];
  for (size_t c = 0; c < classes_.size(); ++c) {
    const Class& in = classes_[c];
    const int64_t gone = bank_.LayerGone(seq, in.layers.front());
    of.least = c == 0 ? gone : std::min(of.least, gone);
    if (!of.by_layer.empty()) of.by_layer[c] = gone;
    std::vector<int32_t> by_head(static_cast<size_t>(in.heads), static_cast<int32_t>(gone));
    for (int32_t head = 0; in.heads > 1 && head < in.heads; ++head) {
      by_head[static_cast<size_t>(head)] = static_cast<int32_t>(bank_.Gone(seq, in.table + head));
    }
    backend_.Upload(GoneOfClass(in) + q * in.heads, by_head.data(), by_head.size() * 4);
  }
}

void KeptRows::Locate(const RowMeta* rows, int32_t n_rows, const SeqMeta* seqs, bool prefill,
                      const PromptStage* stage) {
  const bool every_step = keeps_.every_step && !prefill;
  for (size_t c = 0; c < classes_.size(); ++c) {
    if (stage != nullptr && classes_[c].heads == 1) continue;  // the step's own rows do
    const Located to = At(c, prefill);
    backend_.Enqueue(LocateRowsArgs{
        .rows = rows,
        .seqs = seqs,
        .gone = GoneOfClass(classes_[c]),
        .most = every_step ? static_cast<int32_t>(keeps_.rows) : kToEnd,
        .to_rows = to.rows,
        .to_seqs = to.seqs,
        .pos = position_planes_.as<int32_t*>() + classes_[c].first_plane,
        .block_table = bank_.View(classes_[c].layers[0]).block_table,
        .block_tokens = bank_.config().block_tokens,
        .n_pos = stage != nullptr ? 0 : static_cast<int32_t>(classes_[c].layers.size()),
        .lists = ListsOf(classes_[c]),
        .n_rows = n_rows,
        .n_seqs = n_seqs_,
        .heads = classes_[c].heads,
        .table_stride = bank_.HeadTableStride(),
        .by_head = prefill});
  }
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
  const Class& c = classes_[ClassOf(layer)];
  const SeqMeta* located = stage != nullptr && c.heads == 1 ? seqs : Of(layer, prefill).seqs;
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
  // Lists of heads that are apart are those of sequences.
  OKV_CHECK(c.heads == 1 || retained.scores.scores == nullptr);
  backend_.Enqueue(CompactArgs{.kv = bank_.View(layer),
                               .from = stage != nullptr ? stage->View(layer) : KvView{},
                               .seqs = located + retained.first_seq * c.heads,
                               .steps = seqs + retained.first_seq,
                               .index = list.index,
                               .count = list.count,
                               .bounds = retained.rows.segments[1].bounds,
                               .pos = PositionsOf(layer),
                               .scores = retained.scores,
                               .to_scores = retained.to_scores,
                               .capacity = list.capacity,
                               .lists = ListsOf(c),
                               .n_seqs = retained.n_seqs * c.heads});
}

}  // namespace omnikv
