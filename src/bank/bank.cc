#include "bank/bank.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <set>

#include "backend/kv_format.h"
#include "bank/noise_rows.h"
#include "base/check.h"

namespace omnikv {
namespace {

Status AllOpen(int32_t max_seqs) {
  return ResourceExhausted(fmt::format("all {} sequences are open", max_seqs));
}

}  // namespace

size_t Bank::BytesPerToken(const BankConfig& config) {
  size_t bytes = 0;
  for (size_t layer = 0; layer < config.layers.size(); ++layer) bytes += config.RowBytes(layer);
  return bytes;
}

size_t Bank::ReservedBytes(const BankConfig& config, TierKind tier) {
  size_t bytes = 0;
  std::set<int32_t> pools;  // of heads that are apart, by their first table
  for (const LayerSpec& layer : config.layers) {
    for (const StreamSpec& s : layer.streams) {
      if (s.tier != tier) continue;
      if (s.heads_apart && !pools.insert(config.FirstSharing(s.table)).second) continue;
      const int64_t blocks = config.PoolBlocks(s.table);
      bytes += static_cast<size_t>(blocks * config.block_tokens) * config.StreamRowBytes(layer, s);
    }
  }
  return bytes;
}

size_t Bank::ReservedOnDisk(const BankConfig& config) {
  BankConfig on_disk = config;
  for (LayerSpec& layer : on_disk.layers) {
    std::erase_if(layer.streams, [](const StreamSpec& s) { return !s.on_disk; });
  }
  return ReservedBytes(on_disk, TierKind::kHost);
}

Result<std::unique_ptr<Bank>> Bank::Create(Backend& backend, BankConfig config) {
  OKV_CHECK(config.block_tokens > 0 && config.max_tokens > 0 && config.max_seqs > 0 &&
            config.n_stages >= 0 && !config.tables.empty());
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
  int64_t of_token = 1;  // rows
  for (const LayerSpec& layer : config.layers) {
    if (layer.streams.front().by_head) of_token = std::max<int64_t>(of_token, layer.n_kv_heads);
  }
  for (size_t table = 0; table < config.tables.size(); ++table) {
    const int64_t rows = config.PoolBlocks(static_cast<int32_t>(table)) * bt * of_token;
    if (rows <= most) continue;
    return ResourceExhausted(fmt::format(
        "{} rows of KV heads that share memory are too many, expected at most {}", rows, most));
  }
  std::unique_ptr<Bank> bank(new Bank(backend, std::move(config)));
  OKV_RETURN_IF_ERROR(bank->Allocate());
  return bank;
}

Bank::Bank(Backend& backend, BankConfig config)
    : backend_(backend),
      config_(std::move(config)),
      lengths_(static_cast<size_t>(config_.max_seqs), 0),
      fewer_(static_cast<size_t>(config_.max_seqs) * config_.layers.size(), 0) {
  for (size_t i = 0; i < config_.tables.size(); ++i) {
    const auto number = static_cast<int32_t>(i);
    const auto pool =
        config_.tables[i].shares
            ? tables_.back().blocks.pool()
            : std::make_shared<BlockPool>(static_cast<int32_t>(config_.PoolBlocks(number)));
    tables_.push_back({.blocks = BlockTable(pool, config_.max_seqs, BlocksFor(config_.max_tokens)),
                       .first = config_.FirstSharing(number),
                       .lost = std::vector<Lost>(static_cast<size_t>(config_.max_seqs))});
  }
  for (size_t layer = 0; layer < config_.layers.size(); ++layer) {
    const LayerSpec& spec = config_.layers[layer];
    classes_.push_back(spec.HeadClasses());
    for (HeadClass& c : classes_.back()) {
      c.k += streams_.size();
      c.v += streams_.size();
    }
    const auto stage_rows = static_cast<size_t>(config_.StageRows(spec));
    size_t stage_at = 0;
    for (const StreamSpec& s : spec.streams) {
      const size_t row_bytes = config_.StreamRowBytes(spec, s);
      const auto same = std::ranges::find_if(streams_, [&](const Stream& other) {
        return s.heads_apart && TableOf(other).first == config_.FirstSharing(s.table);
      });
      OKV_CHECK(same == streams_.end() || same->row_bytes == row_bytes);
      streams_.push_back({.layer = static_cast<int32_t>(layer),
                          .spec = s,
                          .row_bytes = row_bytes,
                          .stage_at = stage_at,
                          .memory = static_cast<size_t>(same - streams_.begin())});
      if (s.tier == TierKind::kHost) stage_at += stage_rows * streams_.back().row_bytes;
    }
  }
}

Status Bank::Allocate() {
  const auto tier = [&](TierKind kind) {
    std::vector<TierStream> streams(streams_.size());
    for (size_t i = 0; i < streams.size(); ++i) {
      if (streams_[i].spec.tier != kind || streams_[i].memory != i) continue;
      streams[i] = {.block_bytes = BlockBytes(streams_[i]),
                    .n_blocks = TableOf(streams_[i]).blocks.total_blocks(),
                    .on_disk = streams_[i].spec.on_disk};
    }
    return MakeTier(backend_, kind, streams);
  };
  OKV_ASSIGN_OR_RETURN(device_, tier(TierKind::kDevice));
  OKV_ASSIGN_OR_RETURN(host_, tier(TierKind::kHost));
  const auto n_stages = static_cast<size_t>(config_.n_stages);
  if (const size_t all = StageBytes(config_); all > 0) {
    const size_t bytes = all / n_stages;
    staged_.resize(n_stages);
    for (size_t i = 0; i < n_stages; ++i) {
      OKV_ASSIGN_OR_RETURN(Buffer stage, backend_.Allocate(bytes, "K/V on their way"));
      stages_.push_back(std::move(stage));
    }
  }
  // One after another, so that the tables of a layer's heads are one array.
  const auto entries = static_cast<size_t>(HeadTableStride());
  const size_t bytes = tables_.size() * entries * sizeof(int32_t);
  OKV_ASSIGN_OR_RETURN(entries_, backend_.Allocate(bytes, "block tables"));
  if (HasStages()) {
    OKV_ASSIGN_OR_RETURN(stage_entries_,
                         backend_.Allocate(entries * sizeof(int32_t), "block tables"));
    std::vector<int32_t> in_order(entries);
    for (size_t i = 0; i < entries; ++i) {
      in_order[i] = static_cast<int32_t>(i) % tables_.front().blocks.max_blocks();
    }
    backend_.Upload(stage_entries_.as(), in_order.data(), stage_entries_.size());
  }
  if (HasHostLayers()) {
    OKV_ASSIGN_OR_RETURN(shared_entries_, backend_.AllocateShared(bytes, "block tables"));
  }
  for (size_t i = 0; i < tables_.size(); ++i) {
    tables_[i].entries = entries_.as<int32_t>() + i * entries;
    if (HasHostLayers()) tables_[i].shared_entries = shared_entries_.as<int32_t>() + i * entries;
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
  for (int32_t layer = 0; layer < n_layers(); ++layer) {
    fewer_[FewerIndex(fork, layer)] = fewer_[FewerIndex(seq, layer)];
  }
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

Status Bank::AppendWhole(int32_t seq, int64_t n, std::span<const int64_t> kept) {
  OKV_CHECK(Length(seq) == 0 && !HasHostLayers());
  OKV_RETURN_IF_ERROR(CheckLength(seq, n));
  for (size_t i = 0; i < tables_.size(); ++i) {
    Table& t = tables_[i];
    const int64_t rows = i < kept.size() && kept[i] != kAllRows ? std::min(n, kept[i]) : n;
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
  OKV_CHECK(config_.layers[static_cast<size_t>(layer)].OneStream());
  const size_t stream = classes_[static_cast<size_t>(layer)].front().k;
  std::byte* const home = Home(stream);
  ForRuns(streams_[stream], seq, begin, end, [&](int64_t to, int64_t from, size_t bytes) {
    backend_.Upload(home + to, rows + from, bytes);
  });
}

void Bank::CopyFromHome(int32_t layer, int32_t seq, int64_t begin, int64_t end, std::byte* rows) {
  OKV_CHECK(config_.layers[static_cast<size_t>(layer)].OneStream());
  const size_t stream = classes_[static_cast<size_t>(layer)].front().k;
  OKV_CHECK(begin % config_.block_tokens == 0);
  const std::byte* const home = Home(stream);
  const int64_t first = begin * static_cast<int64_t>(streams_[stream].row_bytes);
  ForRuns(streams_[stream], seq, begin, end, [&](int64_t from, int64_t to, size_t bytes) {
    backend_.Copy(rows + (to - first), home + from, bytes, Lane::kIn);
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
  ForStates(  // and the states of a partly filled unit
      [&](const StateStream& s) {
        first = std::min(first, rows / s.spec.unit * s.spec.unit / config_.block_tokens);
      },
      t.first);
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
    for (size_t stream = 0; stream < streams_.size(); ++stream) {
      if (streams_[stream].memory != stream || TableOf(streams_[stream]).first != t.first) continue;
      device_->CopyBlock(static_cast<int32_t>(stream), from, to);
      host_->CopyBlock(static_cast<int32_t>(stream), from, to);
    }
    ForStates(
        [&, from = from, to = to](const StateStream& s) {
          backend_.Upload(s.Block(to), s.Block(from), s.BlockBytes());
        },
        t.first);
    Publish(t, seq, i, i + 1);
  }
  return {};
}

template <typename Visit>
void Bank::ForStates(const Visit& visit, std::optional<int32_t> first_table) const {
  for (const OpenStream& open : states_) {
    if (first_table && open.table != *first_table) continue;
    if (const auto stream = open.stream.lock()) visit(*stream);
  }
}

Result<StateStreams> Bank::OpenStates(const std::vector<StateSpec>& specs) {
  std::erase_if(states_, [](const OpenStream& open) { return open.stream.expired(); });
  StateStreams opened;
  for (const StateSpec& spec : specs) {
    const auto same = std::ranges::find_if(
        states_, [&](const OpenStream& open) { return open.stream.lock()->spec == spec; });
    if (same != states_.end()) {
      opened.push_back(same->stream.lock());
      continue;
    }
    const int32_t table = TableNumber(spec.layer);
    StateStream stream{.spec = spec};
    OKV_ASSIGN_OR_RETURN(stream.memory, backend_.Allocate(config_.StateBytes(spec), spec.name));
    stream.view = {.base = stream.memory.as<std::byte>(),
                   .block_table = tables_[static_cast<size_t>(table)].entries,
                   .block_units = std::max(1, config_.block_tokens / spec.unit),
                   .unit_blocks = std::max(1, spec.unit / config_.block_tokens),
                   .row_bytes = spec.bytes_per_unit};
    opened.push_back(std::make_shared<const StateStream>(std::move(stream)));
    states_.push_back({config_.FirstSharing(table), opened.back()});
  }
  return opened;
}

size_t Bank::StateBytes() const {
  size_t bytes = 0;
  ForStates([&](const StateStream& s) { bytes += config_.StateBytes(s.spec); });
  return bytes;
}

size_t Bank::BytesToOpen(const std::vector<StateSpec>& specs) const {
  size_t bytes = 0;
  for (const StateSpec& spec : specs) bytes += config_.StateBytes(spec);
  ForStates([&](const StateStream& s) {
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
    Lost& lost = tables_[i].lost[static_cast<size_t>(seq)];
    lost.least = std::min(lost.least, length);
    if (length == 0) lost = {};
  }
  lengths_[static_cast<size_t>(seq)] = length;
  if (length == 0) std::fill_n(&fewer_[FewerIndex(seq, 0)], config_.layers.size(), 0);
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

void Bank::Keep(int32_t seq, int32_t table, std::span<const int64_t> rows) {
  int64_t most = 0;
  bool loses = false;
  const auto for_layers = [&](const auto& visit) {
    for (int32_t layer = 0; layer < n_layers(); ++layer) {
      if (TableNumber(layer) == table) visit(layer, rows[static_cast<size_t>(layer)]);
    }
  };
  for_layers([&](int32_t layer, int64_t n) {
    most = std::max(most, n);
    loses = loses || n < LayerRows(seq, layer);
  });
  for_layers([&](int32_t layer, int64_t n) { fewer_[FewerIndex(seq, layer)] = most - n; });
  if (loses) Settle(seq, table);  // also where the table itself has all rows still
  Keep(seq, table, most);
}

int64_t Bank::LayerRows(int32_t seq, int32_t layer) const {
  int64_t most = 0;
  for (const Table& table : TablesOf(layer)) {
    most = std::max(most, Rows(seq, NumberOf(table)));
  }
  return most - fewer_[FewerIndex(seq, layer)];
}

int64_t Bank::LayerGone(int32_t seq, int32_t layer) const {
  int64_t least = Length(seq);
  for (const Table& table : TablesOf(layer)) {
    least = std::min(least, table.lost[static_cast<size_t>(seq)].gone);
  }
  return least + fewer_[FewerIndex(seq, layer)];
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

template <typename Counts>
size_t Bank::BytesInUse(const Counts& counts) const {
  const auto in_use = [](const Table& table) {
    return static_cast<size_t>(table.blocks.total_blocks() - table.blocks.free_blocks());
  };
  size_t bytes = 0;
  for (size_t stream = 0; stream < streams_.size(); ++stream) {
    const Stream& s = streams_[stream];
    if (counts(s.spec) && s.memory == stream) bytes += BlockBytes(s) * in_use(TableOf(s));
  }
  return bytes;
}

size_t Bank::DeviceBytes() const {
  size_t bytes =
      BytesInUse([](const StreamSpec& stream) { return stream.tier == TierKind::kDevice; });
  ForStates([&](const StateStream& s) {
    const Table& table = tables_[TableIndex(s.spec.layer)];
    const int64_t blocks = table.blocks.total_blocks() - table.blocks.free_blocks();
    bytes += s.BlockBytes() * static_cast<size_t>(blocks);
  });
  return bytes;
}

size_t Bank::HostBytes() const {
  return BytesInUse(
      [](const StreamSpec& stream) { return stream.tier == TierKind::kHost && !stream.on_disk; });
}

size_t Bank::DiskBytes() const {
  return BytesInUse([](const StreamSpec& stream) { return stream.on_disk; });
}

size_t Bank::BlocksOf(std::span<const Table> tables, int32_t seq) {
  size_t held = 0;
  for (const Table& t : tables) {
    const int32_t* blocks = t.blocks.entries(seq);
    held += static_cast<size_t>(std::count_if(blocks, blocks + t.blocks.n_blocks(seq),
                                              [](int32_t block) { return block >= 0; }));
  }
  return held;
}

size_t Bank::BytesOf(int32_t seq, TierKind tier, bool on_disk) const {
  size_t bytes = 0;
  for (const Stream& s : streams_) {
    if (s.spec.tier == tier && s.spec.on_disk == on_disk)
      bytes += BlockBytes(s) * BlocksOf(TablesOf(s), seq);
  }
  return bytes;
}

size_t Bank::BytesOf(std::span<const int64_t> blocks, const StateStreams& states) const {
  const auto of = [&](int32_t table) {
    return static_cast<size_t>(blocks[static_cast<size_t>(config_.FirstSharing(table))]);
  };
  size_t bytes = 0;
  for (size_t stream = 0; stream < streams_.size(); ++stream) {
    const Stream& s = streams_[stream];
    if (s.memory == stream) bytes += BlockBytes(s) * of(s.spec.table);
  }
  for (const auto& s : states) bytes += s->BlockBytes() * of(TableNumber(s->spec.layer));
  return bytes;
}

size_t Bank::DeviceBytes(int32_t seq, const StateStreams& states) const {
  size_t bytes = BytesOf(seq, TierKind::kDevice);
  for (const auto& s : states) {
    bytes += s->BlockBytes() * BlocksOf(Sharing(TableNumber(s->spec.layer)), seq);
  }
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
  NoiseRows noise_rows;
  // The first n_rows of the rows of K/V or states, from row `from` of their pattern on. `make`
  // writes a row.
  const auto fill = [&](const Table& table, std::byte* base, const NoiseRows::Kind& kind,
                        int64_t from, int64_t n_rows, const auto& make) {
    for (int64_t r = 0; r < n_rows; r += kind.block_rows) {
      const int64_t block = table.blocks.entries(seq)[r / kind.block_rows];
      if (block < 0) continue;  // dropped
      backend_.Upload(base + block * kind.block_rows * kind.row_bytes,
                      noise_rows.Piece(kind, from + r, make),
                      static_cast<size_t>(std::min(kind.block_rows, n_rows - r) * kind.row_bytes));
    }
  };
  constexpr int64_t kApart = 257;  // rows of a pattern from one stream's first to the next one's
  for (size_t stream = 0; stream < streams_.size(); ++stream) {
    const Stream& s = streams_[stream];
    const LayerSpec& spec = config_.layers[static_cast<size_t>(s.layer)];
    const int32_t of_token = s.spec.by_head ? spec.n_kv_heads : 1;
    const NoiseRows::Kind kind{
        .row_bytes = static_cast<int64_t>(s.row_bytes) / of_token,
        .block_rows = int64_t{config_.block_tokens} * of_token,
        .heads = s.spec.heads_apart || s.spec.by_head ? 1 : spec.HeadsOf(s.spec),
        .dk = s.spec.planes != Planes::kV ? spec.dk : 0,
        .dv = s.spec.planes != Planes::kK ? spec.dv : 0};
    for (const Table& table : TablesOf(s)) {
      int64_t rows = Rows(seq, NumberOf(table)) - fewer_[FewerIndex(seq, s.layer)];
      if (s.spec.by_head) rows = config_.BlocksFor(rows) * kind.block_rows;
      fill(table, Home(stream), kind, kApart * static_cast<int64_t>(stream), rows,
           [&](std::byte* row, Noise& noise) {
             const KvView at = MakeKvView(row, nullptr, config_.block_tokens, config_.dtype,
                                          kind.heads, kind.dk, kind.dv);
             for (const auto& [plane, d] : {std::pair{at.k, at.dk}, {at.v, at.dv}}) {
               for (int32_t head = 0; d > 0 && head < at.n_kv_heads; ++head) {
                 StoreKvHead(plane, head, d, noise.Draw(d), plane.base);
               }
             }
           });
    }
  }
  ForStates([&](const StateStream& s) {
    const NoiseRows::Kind kind{.row_bytes = s.view.row_bytes, .block_rows = s.view.block_units};
    for (const Table& table : Sharing(TableNumber(s.spec.layer))) {
      fill(table, s.view.base, kind, kApart * s.spec.layer,
           kind.block_rows * table.blocks.n_blocks(seq), [&](std::byte* row, Noise& noise) {
             const auto n = static_cast<size_t>(kind.row_bytes) / sizeof(Bf16);
             const float* values = noise.Draw(static_cast<int64_t>(n));
             for (size_t i = 0; i < n; ++i) StoreFromF32(DType::kBF16, row, i, values[i]);
           });
    }
  });
}

void Bank::Publish(const Table& table, int32_t seq, int32_t first, int32_t last) {
  // Kernels that go by tiles may load rows of a hole, which they then weigh with zero: any block
  // will do.
  const int32_t* const entries = table.blocks.entries(seq);
  while (first < last) {
    const bool hole = entries[first] < 0;
    int32_t end = first + 1;
    while (end < last && (entries[end] < 0) == hole) ++end;
    const std::vector<int32_t> any(hole ? static_cast<size_t>(end - first) : 0);
    for (int32_t* to : {table.entries, table.shared_entries}) {
      if (to == nullptr) continue;
      backend_.Upload(to + table.blocks.Offset(seq) + first, hole ? any.data() : entries + first,
                      static_cast<size_t>(end - first) * sizeof(int32_t));
    }
    first = end;
  }
}

KvView Bank::MakeView(int32_t layer, int32_t head_class, bool staged) const {
  const LayerSpec& spec = config_.layers[static_cast<size_t>(layer)];
  const HeadClass& heads = classes_[static_cast<size_t>(layer)][static_cast<size_t>(head_class)];
  const auto base = [&](size_t stream) {
    const bool away = streams_[stream].spec.tier == TierKind::kHost;
    return staged && away ? InStage(stream) : Home(stream);
  };
  const int32_t* entries = staged && InOrder(layer)
                               ? stage_entries_.as<int32_t>()
                               : tables_[static_cast<size_t>(heads.table)].entries;
  if (streams_[heads.k].spec.by_head) {
    return MakeKvViewByHead(base(heads.k), entries, config_.block_tokens, config_.dtype,
                            heads.n_kv_heads, spec.dk, spec.dv);
  }
  return heads.k == heads.v
             ? MakeKvView(base(heads.k), entries, config_.block_tokens, config_.dtype,
                          heads.n_kv_heads, spec.dk, spec.dv)
             : MakeKvPlanes(base(heads.k), base(heads.v), entries, config_.block_tokens,
                            config_.dtype, heads.n_kv_heads, spec.dk, spec.dv);
}

size_t Bank::StageOf(int32_t layer) const {
  size_t before = 0;  // layers with streams on the host
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

template <typename Visit>
void Bank::ForHostStreams(int32_t layer, const Visit& visit) const {
  for (size_t stream = 0; stream < streams_.size(); ++stream) {
    const Stream& s = streams_[stream];
    if (s.layer == layer && s.spec.tier == TierKind::kHost) visit(stream);
  }
}

template <typename Visit>
void Bank::ForRuns(const Stream& stream, int32_t seq, int64_t begin, int64_t end,
                   const Visit& visit) const {
  const auto row_bytes = static_cast<int64_t>(stream.row_bytes);
  const int64_t bt = config_.block_tokens;
  const int32_t* blocks = TableOf(stream).blocks.entries(seq);
  // A block by head is one piece if all of it goes, else a piece for each head.
  const bool by_head = stream.spec.by_head;
  const int64_t end_of_whole = by_head ? end / bt * bt : end;
  const auto part = [&](int64_t first, int64_t n) {
    const int32_t heads = config_.layers[static_cast<size_t>(stream.layer)].n_kv_heads;
    const auto at = [&](int64_t block, int32_t head) {
      return ((block * heads + head) * bt + first % bt) * row_bytes / heads;
    };
    for (int32_t head = 0; head < heads; ++head) {
      visit(at(blocks[first / bt], head), at(first / bt, head),
            static_cast<size_t>(n * row_bytes / heads));
    }
  };
  for (int64_t t = begin; t < end;) {
    const int64_t first = t;
    const int64_t row = blocks[t / bt] * bt + t % bt;
    if (by_head && (t % bt != 0 || t >= end_of_whole)) {
      t = std::min(end, (t / bt + 1) * bt);
      if (row >= 0) part(first, t - first);
      continue;
    }
    do {
      t = std::min(end_of_whole, (t / bt + 1) * bt);
    } while (row >= 0 && t < end_of_whole && blocks[t / bt] == blocks[t / bt - 1] + 1);
    if (row < 0) continue;
    visit(row * row_bytes, first * row_bytes, static_cast<size_t>((t - first) * row_bytes));
  }
}

void Bank::StageIn(int32_t layer, int32_t seq, int64_t n) {
  Staged& s = staged_[StageOf(layer)];
  // Rows of another sequence may be on their way to where the step is going to write.
  if (s.seq != seq && s.tokens > 0) backend_.Join(Lane::kMain, Lane::kIn);
  if (s.layer != layer || s.seq != seq) s = {.layer = layer, .seq = seq};
  if (s.tokens >= n) return;
  ForHostStreams(layer, [&](size_t stream) {
    ForRuns(streams_[stream], seq, s.tokens, n, [&](int64_t home, int64_t in_order, size_t bytes) {
      backend_.Copy(InStage(stream, home, in_order), Home(stream) + home, bytes, Lane::kIn);
      bytes_staged_ += bytes;
    });
  });
  s.tokens = n;
  backend_.Signal(StageOf(layer), Lane::kIn);
}

void Bank::StageOut(int32_t layer, int32_t seq, int64_t begin, int64_t end) {
  ForHostStreams(layer, [&](size_t stream) {
    ForRuns(streams_[stream], seq, begin, end, [&](int64_t home, int64_t in_order, size_t bytes) {
      backend_.Copy(Home(stream) + home, InStage(stream, home, in_order), bytes, Lane::kOut);
    });
  });
  Staged& s = staged_[StageOf(layer)];  // the step wrote there
  if (s.layer == layer && s.seq == seq && s.tokens == begin) s.tokens = end;
}

size_t Bank::StageBytes(const BankConfig& config) {
  size_t largest = 0;  // bytes that a layer takes there
  for (const LayerSpec& layer : config.layers) {
    size_t away = 0;
    for (const StreamSpec& s : layer.streams) {
      if (s.tier == TierKind::kHost) away += config.StreamBytes(layer, s);
    }
    largest = std::max(largest, away * static_cast<size_t>(config.StageRows(layer)));
  }
  return static_cast<size_t>(config.n_stages) * largest;
}

}  // namespace omnikv
