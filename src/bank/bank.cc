#include "bank/bank.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "base/check.h"

namespace omnikv {
namespace {

Status AllOpen(int32_t max_seqs) {
  return ResourceExhausted(fmt::format("all {} sequences are open", max_seqs));
}

}  // namespace

int64_t BankConfig::TableBlocks(const TableSpec& table) const {
  const int64_t all = BlocksFor(PoolTokens());
  if (table.max_held == 0) return all;
  // The held tokens may begin and end in the middle of a block. One block more, for steps ahead.
  const int64_t held = BlocksFor(table.max_held) + 2;
  return std::min(all, held * max_seqs + BlocksFor(step_tokens));
}

size_t BankConfig::LargestRowBytes() const {
  size_t largest = 0;
  for (size_t layer = 0; layer < layers.size(); ++layer) {
    largest = std::max(largest, RowBytes(layer));
  }
  return largest;
}

size_t BankConfig::StateBytes(const StateSpec& spec) const {
  OKV_CHECK(spec.unit > 0 && (block_tokens % spec.unit == 0 || spec.unit % block_tokens == 0),
            "states of units of {} tokens, in blocks of {}", spec.unit, block_tokens);
  const auto table = static_cast<size_t>(layers[static_cast<size_t>(spec.layer)].table);
  const int64_t units = std::max(1, block_tokens / spec.unit);  // of a block
  return static_cast<size_t>(TableBlocks(tables[table]) * units * spec.bytes_per_unit);
}

size_t Bank::BytesPerToken(const BankConfig& config) {
  size_t bytes = 0;
  for (size_t layer = 0; layer < config.layers.size(); ++layer) bytes += config.RowBytes(layer);
  return bytes;
}

size_t Bank::ReservedBytes(const BankConfig& config, TierKind tier) {
  size_t bytes = 0;
  for (size_t layer = 0; layer < config.layers.size(); ++layer) {
    const LayerSpec& spec = config.layers[layer];
    if (spec.tier != tier) continue;
    const int64_t blocks = config.TableBlocks(config.tables[static_cast<size_t>(spec.table)]);
    bytes += static_cast<size_t>(blocks * config.block_tokens) * config.RowBytes(layer);
  }
  return bytes;
}

Result<std::unique_ptr<Bank>> Bank::Create(Backend& backend, BankConfig config) {
  OKV_CHECK(config.block_tokens > 0 && config.max_tokens > 0 && config.max_seqs > 0 &&
            config.n_stages >= 2 && !config.tables.empty());
  config.pool_tokens = config.PoolTokens();
  const int64_t bt = config.block_tokens;
  // Positions, slots of the pool and entries of the tables are int32.
  const int64_t most = std::numeric_limits<int32_t>::max() - bt;
  if (std::max(config.max_tokens, config.pool_tokens) > most ||
      config.max_tokens > most / config.max_seqs) {
    return ResourceExhausted(
        fmt::format("{} sequences of {} tokens, {} in all, are too many, expected at most {}",
                    config.max_seqs, config.max_tokens, config.pool_tokens, most));
  }
  std::unique_ptr<Bank> bank(new Bank(backend, std::move(config)));
  OKV_RETURN_IF_ERROR(bank->Allocate());
  return bank;
}

Bank::Bank(Backend& backend, BankConfig config)
    : backend_(backend),
      config_(std::move(config)),
      lengths_(static_cast<size_t>(config_.max_seqs), 0) {
  for (const TableSpec& spec : config_.tables) {
    const auto n_blocks = static_cast<int32_t>(config_.TableBlocks(spec));
    tables_.push_back(
        {.blocks = BlockTable(n_blocks, config_.max_seqs, BlocksFor(config_.max_tokens)),
         .entries = {},
         .lost = std::vector<Lost>(static_cast<size_t>(config_.max_seqs))});
  }
}

Status Bank::Allocate() {
  const auto tier = [&](TierKind kind) {
    std::vector<TierLayer> layers(config_.layers.size());
    for (size_t i = 0; i < layers.size(); ++i) {
      if (config_.layers[i].tier != kind) continue;
      layers[i] = {.block_bytes = BlockBytes(i),
                   .n_blocks = TableOf(static_cast<int32_t>(i)).blocks.total_blocks()};
    }
    return MakeTier(backend_, kind, layers);
  };
  OKV_ASSIGN_OR_RETURN(own_, tier(TierKind::kOwn));
  OKV_ASSIGN_OR_RETURN(host_, tier(TierKind::kHost));
  const auto n_stages = static_cast<size_t>(config_.n_stages);
  if (const size_t bytes = StageBytes(config_) / n_stages; bytes > 0) {
    staged_.resize(n_stages);
    for (size_t i = 0; i < n_stages; ++i) {
      OKV_ASSIGN_OR_RETURN(Buffer stage, backend_.Allocate(bytes, "K/V on their way"));
      stages_.push_back(std::move(stage));
    }
  }
  for (Table& table : tables_) {
    const auto entries =
        static_cast<size_t>(table.blocks.max_blocks()) * static_cast<size_t>(config_.max_seqs);
    OKV_ASSIGN_OR_RETURN(table.entries,
                         backend_.Allocate(entries * sizeof(int32_t), "block tables"));
  }
  return {};
}

Result<int32_t> Bank::NewSequence() {
  int32_t seq = -1;
  for (Table& table : tables_) seq = table.blocks.NewSequence();  // the same in each
  if (seq < 0) return AllOpen(config_.max_seqs);
  lengths_[static_cast<size_t>(seq)] = 0;
  return seq;
}

Result<int32_t> Bank::Fork(int32_t seq) {
  int32_t fork = -1;
  for (Table& table : tables_) fork = table.blocks.Fork(seq);
  if (fork < 0) return AllOpen(config_.max_seqs);
  for (Table& table : tables_) {
    table.lost[static_cast<size_t>(fork)] = table.lost[static_cast<size_t>(seq)];
  }
  lengths_[static_cast<size_t>(fork)] = Length(seq);
  for (Table& table : tables_) Publish(table, fork, 0, table.blocks.n_blocks(fork));
  return fork;
}

void Bank::Free(int32_t seq) {
  Truncate(seq, 0);
  for (Table& table : tables_) table.blocks.Free(seq);
}

Status Bank::CheckLength(int32_t seq, int64_t n) const {
  if (n >= 0 && n <= config_.max_tokens - Length(seq)) return {};
  return ResourceExhausted(fmt::format("{} tokens in context and {} more exceed the context of {}",
                                       Length(seq), n, config_.max_tokens));
}

Status Bank::NoRoom(const Table& table, int64_t n) const {
  return ResourceExhausted(
      fmt::format("{} more tokens do not fit: {} of {} blocks of {} tokens are free", n,
                  table.blocks.free_blocks(), table.blocks.total_blocks(), config_.block_tokens));
}

Status Bank::Append(int32_t seq, int64_t n) {
  const int64_t length = Length(seq);
  OKV_RETURN_IF_ERROR(CheckLength(seq, n));
  for (size_t i = 0; i < tables_.size(); ++i) {
    const Status grown = Grow(i, seq, n);
    if (grown.ok()) continue;
    for (size_t done = 0; done < i; ++done) {
      tables_[done].blocks.Shrink(seq, BlocksFor(RowsOf(done, seq, length)));
    }
    return grown;
  }
  lengths_[static_cast<size_t>(seq)] = length + n;
  return {};
}

int64_t Bank::FirstKept(int32_t table, int64_t n) const {
  const TableSpec& spec = config_.tables[static_cast<size_t>(table)];
  if (spec.window == 0 || spec.max_held == 0) return 0;
  return std::max<int64_t>(0, n - spec.max_held) / config_.block_tokens * config_.block_tokens;
}

Status Bank::AppendWhole(int32_t seq, int64_t n, int64_t kept) {
  OKV_CHECK(Length(seq) == 0 && !HasHostLayers());
  OKV_RETURN_IF_ERROR(CheckLength(seq, n));
  for (size_t i = 0; i < tables_.size(); ++i) {
    Table& t = tables_[i];
    const int64_t rows = i == 0 && kept > 0 ? std::min(n, kept) : n;
    std::vector<bool> held(static_cast<size_t>(BlocksFor(rows)), true);
    std::fill_n(held.begin(), BlocksFor(FirstKept(static_cast<int32_t>(i), n)), false);
    if (!t.blocks.Place(seq, held)) {
      const Status full = NoRoom(t, n);
      for (size_t done = 0; done < i; ++done) tables_[done].blocks.Shrink(seq, 0);
      return full;
    }
    Publish(t, seq, 0, t.blocks.n_blocks(seq));
  }
  lengths_[static_cast<size_t>(seq)] = n;
  return {};
}

void Bank::CopyHome(int32_t layer, int32_t seq, int64_t begin, int64_t end, const std::byte* rows) {
  const LayerSpec& spec = config_.layers[static_cast<size_t>(layer)];
  std::byte* const home = (spec.tier == TierKind::kOwn ? *own_ : *host_).Base(layer);
  rows += static_cast<size_t>(begin) * config_.RowBytes(static_cast<size_t>(layer));
  ForRuns(layer, seq, begin, end, [&](int64_t offset, size_t bytes) {
    backend_.Upload(home + offset, rows, bytes);
    rows += bytes;
  });
}

int64_t Bank::RowsOf(size_t table, int32_t seq, int64_t length) const {
  const Lost& lost = tables_[table].lost[static_cast<size_t>(seq)];
  const int64_t rows = std::max<int64_t>(0, length - lost.gone);
  return lost.most > 0 ? std::min(rows, lost.most + 1) : rows;
}

Status Bank::Grow(size_t table, int32_t seq, int64_t n) {
  Table& t = tables_[table];
  const int32_t before = t.blocks.n_blocks(seq);
  const int64_t rows = RowsOf(table, seq, Length(seq));
  if (!t.blocks.Grow(seq, BlocksFor(RowsOf(table, seq, Length(seq) + n)))) {
    return NoRoom(t, n);
  }
  // Only what is written may not be shared: a partly filled last block, and rows that move.
  int64_t first = t.lost[static_cast<size_t>(seq)].moves ? 0 : rows / config_.block_tokens;
  ForStreams([&](const StateStream& s) {  // and the states of a partly filled unit
    if (TableIndex(s.spec.layer) != table) return;
    first = std::min(first, rows / s.spec.unit * s.spec.unit / config_.block_tokens);
  });
  if (n > 0) {
    const Status own = MakeOwn(table, seq, static_cast<int32_t>(first), before);
    if (!own.ok()) {
      t.blocks.Shrink(seq, before);
      return own;
    }
  }
  Publish(t, seq, before, t.blocks.n_blocks(seq));
  return {};
}

Status Bank::MakeOwn(size_t table, int32_t seq, int32_t first, int32_t last) {
  Table& t = tables_[table];
  for (int32_t i = first; i < last; ++i) {
    const auto [from, to] = t.blocks.MakeOwn(seq, i);
    if (from < 0) return ResourceExhausted("more tokens do not fit: no block is free");
    if (from == to) continue;
    Unstage(seq, int64_t{i} * config_.block_tokens);  // its place is another
    for (size_t layer = 0; layer < config_.layers.size(); ++layer) {
      if (static_cast<size_t>(config_.layers[layer].table) != table) continue;
      own_->CopyBlock(static_cast<int32_t>(layer), from, to);
      host_->CopyBlock(static_cast<int32_t>(layer), from, to);
    }
    ForStreams([&, from = from, to = to](const StateStream& s) {
      if (TableIndex(s.spec.layer) != table) return;
      backend_.Upload(s.Block(to), s.Block(from), s.BlockBytes());
    });
    Publish(t, seq, i, i + 1);
  }
  return {};
}

template <typename Visit>
void Bank::ForStreams(const Visit& visit) const {
  for (const auto& open : streams_) {
    if (const auto stream = open.lock()) visit(*stream);
  }
}

Result<StateStreams> Bank::OpenStates(const std::vector<StateSpec>& specs) {
  std::erase_if(streams_, [](const auto& open) { return open.expired(); });
  StateStreams opened;
  for (const StateSpec& spec : specs) {
    const auto same = std::find_if(streams_.begin(), streams_.end(),
                                   [&](const auto& open) { return open.lock()->spec == spec; });
    if (same != streams_.end()) {
      opened.push_back(same->lock());
      continue;
    }
    StateStream stream{.spec = spec};
    OKV_ASSIGN_OR_RETURN(stream.memory, backend_.Allocate(config_.StateBytes(spec), spec.name));
    stream.view = {.base = stream.memory.as<std::byte>(),
                   .block_table = TableOf(spec.layer).entries.as<int32_t>(),
                   .block_units = std::max(1, config_.block_tokens / spec.unit),
                   .unit_blocks = std::max(1, spec.unit / config_.block_tokens),
                   .row_bytes = spec.bytes_per_unit};
    opened.push_back(std::make_shared<const StateStream>(std::move(stream)));
    streams_.push_back(opened.back());
  }
  return opened;
}

size_t Bank::StateBytes() const {
  size_t bytes = 0;
  ForStreams([&](const StateStream& s) { bytes += config_.StateBytes(s.spec); });
  return bytes;
}

size_t Bank::BytesToOpen(const std::vector<StateSpec>& specs) const {
  size_t bytes = 0;
  for (const StateSpec& spec : specs) bytes += config_.StateBytes(spec);
  ForStreams([&](const StateStream& s) {
    if (std::find(specs.begin(), specs.end(), s.spec) != specs.end()) {
      bytes -= config_.StateBytes(s.spec);
    }
  });
  return bytes;
}

void Bank::Truncate(int32_t seq, int64_t length) {
  OKV_CHECK(length >= 0 && length <= Length(seq));
  Unstage(seq, length);
  for (size_t i = 0; i < tables_.size(); ++i) {
    tables_[i].blocks.Shrink(seq, BlocksFor(RowsOf(i, seq, length)));
    if (length == 0) tables_[i].lost[static_cast<size_t>(seq)] = {};
  }
  lengths_[static_cast<size_t>(seq)] = length;
}

void Bank::Lose(int32_t seq, int32_t table, LoseRows when, int64_t most) {
  Lost& lost = tables_[static_cast<size_t>(table)].lost[static_cast<size_t>(seq)];
  lost.moves = when != LoseRows::kNone;
  const int64_t limit = when == LoseRows::kToMost ? most : 0;
  if (limit == lost.most) return;
  // What came past the rows that stay has taken the place of others.
  if (lost.most > 0) Keep(seq, table, std::min(Length(seq) - lost.gone, lost.most));
  lost.most = limit;
}

void Bank::Keep(int32_t seq, int32_t table, int64_t n) {
  Table& t = tables_[static_cast<size_t>(table)];
  Lost& lost = t.lost[static_cast<size_t>(seq)];
  const int64_t gone = Length(seq) - n;
  OKV_CHECK(gone >= lost.gone, "{} rows of {}", n, Rows(seq, table));
  if (gone > lost.gone) lost.least = Length(seq);
  lost.gone = gone;
  t.blocks.Shrink(seq, BlocksFor(n));
}

int64_t Bank::LeastLength(int32_t seq) const {
  int64_t least = 0;
  for (const Table& table : tables_) {
    const Lost& lost = table.lost[static_cast<size_t>(seq)];
    const bool evicted = lost.most > 0 && Length(seq) - lost.gone > lost.most;
    least = std::max(least, evicted ? Length(seq) : lost.least);
  }
  return least;
}

size_t Bank::BytesInUse(TierKind tier) const {
  size_t bytes = 0;
  for (size_t layer = 0; layer < config_.layers.size(); ++layer) {
    if (config_.layers[layer].tier != tier) continue;
    const BlockTable& blocks = TableOf(static_cast<int32_t>(layer)).blocks;
    bytes += BlockBytes(layer) * static_cast<size_t>(blocks.total_blocks() - blocks.free_blocks());
  }
  if (tier != TierKind::kOwn) return bytes;
  ForStreams([&](const StateStream& s) {
    const BlockTable& blocks = TableOf(s.spec.layer).blocks;
    bytes += s.BlockBytes() * static_cast<size_t>(blocks.total_blocks() - blocks.free_blocks());
  });
  return bytes;
}

size_t Bank::BlocksOf(int32_t layer, int32_t seq) const {
  const BlockTable& table = TableOf(layer).blocks;
  const int32_t* blocks = table.entries(seq);
  return static_cast<size_t>(std::count_if(blocks, blocks + table.n_blocks(seq),
                                           [](int32_t block) { return block >= 0; }));
}

size_t Bank::OwnBytes(int32_t seq, const StateStreams& states) const {
  size_t bytes = 0;
  for (size_t layer = 0; layer < config_.layers.size(); ++layer) {
    if (config_.layers[layer].tier != TierKind::kOwn) continue;
    bytes += BlockBytes(layer) * BlocksOf(static_cast<int32_t>(layer), seq);
  }
  for (const auto& s : states) bytes += s->BlockBytes() * BlocksOf(s->spec.layer, seq);
  return bytes;
}

void Bank::Drop(int32_t seq, int32_t table, int64_t begin, int64_t end) {
  const auto last = static_cast<int32_t>(std::min(end, Length(seq)) / config_.block_tokens);
  const int32_t first = BlocksFor(begin);
  if (first < last) tables_[static_cast<size_t>(table)].blocks.Release(seq, first, last);
}

bool Bank::Holds(int32_t seq, int32_t table, int64_t begin, int64_t end) const {
  const int32_t* blocks = tables_[static_cast<size_t>(table)].blocks.entries(seq);
  return begin >= end || std::all_of(blocks + begin / config_.block_tokens, blocks + BlocksFor(end),
                                     [](int32_t block) { return block >= 0; });
}

void Bank::FillWithNoise(int32_t seq) {
  Unstage(seq, 0);
  // A pattern of a prime number of rows, repeated, so that no two near rows are alike; values in
  // (-1, 1) from a multiplicative generator.
  constexpr int64_t kPatternRows = 1021;
  uint64_t state = 0x9e3779b97f4a7c15u;
  std::vector<float> noise;
  const auto draw = [&](int64_t n) {
    noise.resize(static_cast<size_t>(n));
    for (float& value : noise) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      value = static_cast<float>(static_cast<int64_t>(state) >> 40) * 0x1p-23f;
    }
    return noise.data();
  };
  // The first n_rows of a layer's rows, K/V or states, of which a block has block_rows. `make`
  // writes a row.
  const auto fill = [&](int32_t layer, std::byte* base, int64_t row_bytes, int64_t block_rows,
                        int64_t n_rows, const auto& make) {
    // A block's rows more than the pattern, so that each block is one piece of it.
    std::vector<std::byte> pattern(static_cast<size_t>(kPatternRows * row_bytes));
    for (int64_t r = 0; r < kPatternRows; ++r) make(pattern.data() + r * row_bytes);
    pattern.reserve(pattern.size() + static_cast<size_t>(block_rows * row_bytes));
    for (int64_t r = 0; r < block_rows; ++r) {
      const auto row = pattern.begin() + static_cast<ptrdiff_t>(r * row_bytes);
      pattern.insert(pattern.end(), row, row + static_cast<ptrdiff_t>(row_bytes));
    }
    for (int64_t r = 0; r < n_rows; r += block_rows) {
      const int64_t block = TableOf(layer).blocks.entries(seq)[r / block_rows];
      if (block < 0) continue;  // dropped
      backend_.Upload(base + block * block_rows * row_bytes,
                      pattern.data() + r % kPatternRows * row_bytes,
                      static_cast<size_t>(std::min(block_rows, n_rows - r) * row_bytes));
    }
  };
  for (int32_t layer = 0; layer < static_cast<int32_t>(config_.layers.size()); ++layer) {
    const KvView view = View(layer);
    OKV_CHECK(view.Interleaved());
    fill(layer, view.k.base, view.k.row_bytes, config_.block_tokens,
         Rows(seq, config_.layers[static_cast<size_t>(layer)].table), [&](std::byte* row) {
           const KvView at = view.MovedTo(row);
           for (const auto& [plane, d] : {std::pair{at.k, at.dk}, {at.v, at.dv}}) {
             for (int32_t head = 0; head < at.n_kv_heads; ++head) {
               StoreKvHead(plane, head, d, draw(d), plane.base);
             }
           }
         });
  }
  ForStreams([&](const StateStream& s) {
    fill(s.spec.layer, s.view.base, s.view.row_bytes, s.view.block_units,
         int64_t{s.view.block_units} * TableOf(s.spec.layer).blocks.n_blocks(seq),
         [&](std::byte* row) {
           const auto bytes = static_cast<size_t>(s.view.row_bytes);
           std::memcpy(row, draw(s.view.row_bytes / int64_t{sizeof(float)}), bytes);
         });
  });
}

void Bank::Publish(const Table& table, int32_t seq, int32_t first, int32_t last) {
  if (last <= first) return;
  backend_.Upload(table.entries.as<int32_t>() + table.blocks.Offset(seq) + first,
                  table.blocks.entries(seq) + first,
                  static_cast<size_t>(last - first) * sizeof(int32_t));
}

KvView Bank::View(int32_t layer) const {
  const LayerSpec& spec = config_.layers[static_cast<size_t>(layer)];
  const Tier& tier = spec.tier == TierKind::kOwn ? *own_ : *host_;
  return MakeKvView(tier.Base(layer), TableOf(layer).entries.as<int32_t>(), config_.block_tokens,
                    config_.dtype, spec.n_kv_heads, spec.dk, spec.dv);
}

size_t Bank::StageOf(int32_t layer) const {
  size_t before = 0;  // layers of the host tier
  for (int32_t i = 0; i < layer; ++i) before += OnHost(i) ? 1 : 0;
  return before % stages_.size();
}

void Bank::Unstage(int32_t seq, int64_t length) {
  bool any = false;
  for (Staged& s : staged_) {
    if (s.seq != seq || s.tokens <= length) continue;
    s.tokens = length;
    any = true;
  }
  if (any) backend_.Join(Lane::kMain, Lane::kIn);
}

KvView Bank::StageView(int32_t layer) const {
  return View(layer).MovedTo(Stage(layer));
}

template <typename Visit>
void Bank::ForRuns(int32_t layer, int32_t seq, int64_t begin, int64_t end,
                   const Visit& visit) const {
  const KvView view = View(layer);
  OKV_CHECK(view.Interleaved());
  const int64_t row_bytes = view.k.row_bytes;
  const int64_t bt = config_.block_tokens;
  const int32_t* blocks = TableOf(layer).blocks.entries(seq);
  for (int64_t t = begin; t < end;) {
    const int64_t first = t;
    const int64_t row = blocks[t / bt] * bt + t % bt;
    do {
      t = std::min(end, (t / bt + 1) * bt);
    } while (t < end && blocks[t / bt] == blocks[t / bt - 1] + 1);
    visit(row * row_bytes, static_cast<size_t>((t - first) * row_bytes));
  }
}

void Bank::StageIn(int32_t layer, int32_t seq, int64_t n) {
  Staged& s = staged_[StageOf(layer)];
  if (s.layer != layer || s.seq != seq) s = {.layer = layer, .seq = seq};
  if (s.tokens >= n) return;
  ForRuns(layer, seq, s.tokens, n, [&](int64_t offset, size_t bytes) {
    backend_.Copy(Stage(layer) + offset, host_->Base(layer) + offset, bytes, Lane::kIn);
    bytes_staged_ += bytes;
  });
  s.tokens = n;
  backend_.Signal(StageOf(layer), Lane::kIn);
}

void Bank::StageOut(int32_t layer, int32_t seq, int64_t begin, int64_t end) {
  ForRuns(layer, seq, begin, end, [&](int64_t offset, size_t bytes) {
    backend_.Copy(host_->Base(layer) + offset, Stage(layer) + offset, bytes, Lane::kOut);
  });
  Staged& s = staged_[StageOf(layer)];  // the step wrote there
  if (s.layer == layer && s.seq == seq && s.tokens == begin) s.tokens = end;
}

size_t Bank::StageBytes(const BankConfig& config) {
  size_t largest = 0;  // row
  for (size_t layer = 0; layer < config.layers.size(); ++layer) {
    if (config.layers[layer].tier != TierKind::kHost) continue;
    largest = std::max(largest, config.RowBytes(layer));
  }
  const int64_t blocks = config.BlocksFor(config.PoolTokens());
  return static_cast<size_t>(config.n_stages) * largest *
         static_cast<size_t>(blocks * config.block_tokens);
}

}  // namespace omnikv
