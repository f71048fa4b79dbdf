#include "policy/kascade/tile_prompt.h"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "backend/kv_format.h"
#include "base/check.h"
#include "policy/kascade/map_lists.h"

namespace omnikv {
namespace {

// The stage has room for so many times a layer's rows, where one tile does not need more.
constexpr int64_t kStageLayers = 2;

template <typename T>
void UploadAll(Backend& backend, const Buffer& to, const std::vector<T>& from) {
  backend.Upload(to.as(), from.data(), from.size() * sizeof(T));
}

}  // namespace

Status TilePrompt::Prepare(const PolicyContext& context, PolicySettings& settings,
                           const RangeRule& rule, int32_t lists, PolicyMemory& memory) {
  context_ = context;
  rule_ = rule;
  lists_ = lists;
  on_ = settings.Text("prefill") == "sparse";
  tile_ = static_cast<int32_t>(settings.Int("tile"));
  if (!on_ || context.backend == nullptr) return {};
  if (tile_ > context.max_rows) {
    return InvalidArgument(fmt::format(
        "policy kascade: tile is {}, expected at most the {} rows of a step (`prefill_chunk`)",
        tile_, context.max_rows));
  }
  tiles_ = context.max_rows / tile_;
  return Allocate(memory);
}

Status TilePrompt::Allocate(PolicyMemory& memory) {
  Backend& backend = *context_.backend;
  const RowLayout& layout = context_.row_layout;
  const int64_t context = context_.max_context;
  capacity_ = static_cast<int32_t>(Chosen(context));
  stride_ = (context + 15) / 16 * 16;
  const int64_t slot = std::min<int64_t>(int64_t{capacity_} + tile_, context);
  together_ = static_cast<int32_t>(std::clamp<int64_t>(kStageLayers * context / slot, 1, tiles_));
  slot_blocks_ = static_cast<int32_t>((slot + layout.block_tokens - 1) / layout.block_tokens);
  const auto room = [&](Buffer& buffer, int64_t n, const char* what) -> Status {
    OKV_ASSIGN_OR_RETURN(buffer, memory.Take(backend, n, what));
    return {};
  };
  const auto words = [](int64_t n, size_t bytes) {
    return (n * static_cast<int64_t>(bytes) + 3) / 4;
  };
  const int64_t tiles = tiles_;
  OKV_RETURN_IF_ERROR(room(lse_, int64_t{context_.max_rows} * context_.n_heads, "weights"));
  OKV_RETURN_IF_ERROR(room(weights_, together_ * lists_ * stride_, "weights of a prompt"));
  OKV_RETURN_IF_ERROR(room(index_, tiles * lists_ * capacity_, "chosen tokens"));
  OKV_RETURN_IF_ERROR(room(mapped_, int64_t{together_} * lists_ * capacity_, "chosen tokens"));
  OKV_RETURN_IF_ERROR(room(count_, tiles * lists_, "chosen tokens"));
  OKV_RETURN_IF_ERROR(room(one_, 1, "weights"));
  OKV_RETURN_IF_ERROR(room(n_candidates_, tiles, "chosen tokens"));
  OKV_RETURN_IF_ERROR(room(n_pick_, tiles, "chosen tokens"));
  OKV_RETURN_IF_ERROR(room(bounds_, 2 * tiles, "chosen tokens"));
  OKV_RETURN_IF_ERROR(room(seqs_, words(tiles, sizeof(SeqMeta)), "tiles of a prompt"));
  OKV_RETURN_IF_ERROR(room(stage_seqs_, words(tiles, sizeof(SeqMeta)), "tiles of a prompt"));
  OKV_RETURN_IF_ERROR(
      room(stage_rows_, words(context_.max_rows, sizeof(RowMeta)), "tiles of a prompt"));
  const int64_t entries = int64_t{together_} * layout.seq_blocks;
  OKV_RETURN_IF_ERROR(room(source_blocks_, entries, "block tables"));
  OKV_RETURN_IF_ERROR(room(stage_blocks_, entries, "block tables"));
  const int64_t stage_rows = int64_t{together_} * slot_blocks_ * layout.block_tokens;
  OKV_RETURN_IF_ERROR(room(stage_, words(stage_rows, static_cast<size_t>(layout.token_bytes)),
                           "the K/V that tiles read"));
  std::vector<int32_t> blocks(static_cast<size_t>(entries), 0);
  for (int32_t t = 0; t < together_; ++t) {
    for (int32_t b = 0; b < std::min(slot_blocks_, layout.seq_blocks); ++b) {
      blocks[static_cast<size_t>(t * layout.seq_blocks + b)] = t * slot_blocks_ + b;
    }
  }
  UploadAll(backend, stage_blocks_, blocks);
  UploadAll(backend, one_, std::vector<float>{1});
  return {};
}

bool TilePrompt::Chooses(const LayerStep& step, int32_t n_rows) const {
  if (!on_ || !step.prefill) return false;
  const int64_t last = step.first_pos + int64_t{TilesOf(n_rows) - 1} * tile_;
  return context_.force_indices || Chosen(last) < last;
}

template <typename Visit>
void TilePrompt::ForGroups(int32_t n_rows, const Visit& visit) const {
  const int32_t tiles = TilesOf(n_rows);
  for (int32_t first = 0; first < tiles; first += together_) {
    visit(first, std::min(together_, tiles - first));
  }
}

KvView TilePrompt::Source(const KvView& kv) const {
  KvView source = kv;
  source.block_table = source_blocks_.as<int32_t>();
  return source;
}

void TilePrompt::UploadTiles(const LayerStep& step, const AttendArgs& attend) const {
  Backend& backend = *context_.backend;
  const auto seq_blocks = static_cast<size_t>(context_.row_layout.seq_blocks);
  SeqMeta seq;
  backend.Download(&seq, attend.seqs + step.seq, sizeof(seq));
  std::vector<int32_t> table(seq_blocks);
  backend.Download(table.data(), attend.kv.block_table + seq.table_off,
                   table.size() * sizeof(int32_t));
  std::vector<int32_t> tables;
  for (int32_t t = 0; t < together_; ++t) tables.insert(tables.end(), table.begin(), table.end());
  UploadAll(backend, source_blocks_, tables);
  std::vector<int32_t> candidates, picks, bounds;
  std::vector<SeqMeta> seqs, stage_seqs;
  std::vector<RowMeta> rows;
  for (int32_t t = 0; t < TilesOf(attend.n_rows); ++t) {
    const auto first = static_cast<int32_t>(step.first_pos) + t * tile_;
    const int32_t n_rows = std::min(tile_, attend.n_rows - t * tile_);
    const auto chosen = static_cast<int32_t>(Chosen(first));
    const int32_t slot = t % together_;
    candidates.push_back(first);
    picks.push_back(chosen);
    bounds.insert(bounds.end(), {first, first + n_rows});
    SeqMeta tile{.q_begin = seq.q_begin + t * tile_,
                 .q_len = n_rows,
                 .kv_len = first + n_rows,
                 .table_off = slot * context_.row_layout.seq_blocks,
                 .prompt_len = first + n_rows};
    seqs.push_back(tile);
    tile.q_begin = slot * tile_;
    tile.kv_len = tile.prompt_len = chosen + n_rows;
    stage_seqs.push_back(tile);
    for (int32_t r = 0; r < n_rows; ++r) rows.push_back({.seq = slot, .pos = chosen + r});
  }
  UploadAll(backend, n_candidates_, candidates);
  UploadAll(backend, n_pick_, picks);
  UploadAll(backend, bounds_, bounds);
  UploadAll(backend, seqs_, seqs);
  UploadAll(backend, stage_seqs_, stage_seqs);
  UploadAll(backend, stage_rows_, rows);
}

void TilePrompt::Choose(const LayerStep& step, const AttendArgs& attend) const {
  Backend& backend = *context_.backend;
  UploadTiles(step, attend);
  ForGroups(attend.n_rows, [&](int32_t first, int32_t n) {
    const SeqMeta* const seqs = seqs_.as<SeqMeta>() + first;
    backend.Enqueue(ScoreArgs{.q = attend.q,
                              .lse = attend.lse,
                              .kv = Source(attend.kv),
                              .seqs = seqs,
                              .out = weights_.as<float>(),
                              .stride = stride_,
                              .n_rows = attend.n_rows,
                              .n_seqs = n,
                              .n_heads = attend.n_heads,
                              .lists = lists_,
                              .heads = HeadReduce::kSum,
                              .queries = QueryReduce::kSum,
                              .scale = attend.scale,
                              .softcap = attend.softcap});
    backend.Enqueue(TopKArgs{.scores = weights_.as<float>(),
                             .weights = one_.as<float>(),
                             .seqs = seqs,
                             .n_candidates = n_candidates_.as<int32_t>() + first,
                             .n_pick = n_pick_.as<int32_t>() + first,
                             .index = index_.as<int32_t>() + int64_t{first} * lists_ * capacity_,
                             .count = count_.as<int32_t>() + int64_t{first} * lists_,
                             .stride = stride_,
                             .lists = lists_,
                             .capacity = capacity_,
                             .n_seqs = n});
  });
}

void TilePrompt::Gather(const AttendArgs& all, const int32_t* list_of, AttendArgs& last) const {
  OKV_CHECK(all.kv.Together(), "K and V of a token lie apart");
  Backend& backend = *context_.backend;
  const KvView stage = MakeKvViewOf(all.kv, stage_.as<std::byte>(), stage_blocks_.as<int32_t>());
  ForGroups(all.n_rows, [&](int32_t first, int32_t n) {
    const int32_t* index = index_.as<int32_t>() + int64_t{first} * lists_ * capacity_;
    const int32_t* const count = count_.as<int32_t>() + int64_t{first} * lists_;
    if (list_of != nullptr) {
      backend.Enqueue(MapLists({.index = index,
                                .count = count,
                                .list_of = list_of,
                                .out = mapped_.as<int32_t>(),
                                .n_seqs = n,
                                .lists = lists_,
                                .capacity = capacity_}));
      index = mapped_.as<int32_t>();
    }
    backend.Enqueue(CompactArgs{.kv = stage,
                                .from = Source(all.kv),
                                .seqs = seqs_.as<SeqMeta>() + first,
                                .index = index,
                                .count = count,
                                .bounds = bounds_.as<int32_t>() + 2 * first,
                                .capacity = capacity_,
                                .lists = lists_,
                                .n_seqs = n});
    const int32_t row = first * tile_;
    const int64_t row_head = int64_t{row} * all.n_heads;
    AttendArgs part = all;
    part.q += row_head * all.kv.dk;
    part.o += row_head * all.kv.dv;
    part.kv = stage;
    part.rows = stage_rows_.as<RowMeta>() + row;
    part.seqs = stage_seqs_.as<SeqMeta>() + first;
    part.n_rows = std::min(n * tile_, all.n_rows - row);
    part.n_seqs = part.busy_seqs = n;
    if (first + n < TilesOf(all.n_rows)) {
      backend.Enqueue(part);
    } else {
      last = part;
    }
  });
}

}  // namespace omnikv
