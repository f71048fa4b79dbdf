// Sequences of the bank on their way to files and back.
#include <fmt/format.h>

#include <algorithm>

#include "backend/kv_slices.h"
#include "bank/bank.h"
#include "base/check.h"

namespace omnikv {
namespace {

constexpr size_t kPiece = size_t{1} << 20;  // bytes that Import and Export move at once

// A run of rows that lie by head, the first ones of a block.
class BlockByHead {
 public:
  BlockByHead(const BankConfig& config, const RowRun& run)
      : config_(config),
        layer_(config.layers[static_cast<size_t>(run.layer_by_head)]),
        head_row_bytes_(KvRowBytes(config.dtype, 1, layer_.dk, layer_.dv)),
        rows_(static_cast<int64_t>(run.bytes) / (layer_.n_kv_heads * head_row_bytes_)) {}

  size_t bytes() const {
    return static_cast<size_t>(layer_.n_kv_heads * config_.block_tokens * head_row_bytes_);
  }
  KvView ByHead(std::byte* block) const {
    return MakeKvViewByHead(block, nullptr, config_.block_tokens, config_.dtype, layer_.n_kv_heads,
                            layer_.dk, layer_.dv);
  }
  KvView Sent(std::byte* rows) const {
    return MakeKvView(rows, nullptr, config_.block_tokens, config_.dtype, layer_.n_kv_heads,
                      layer_.dk, layer_.dv);
  }
  void CopyRows(const KvView& from, const KvView& to) const {
    for (int64_t row = 0; row < rows_; ++row) {
      const KvTarget source{from.k.Head(row, 0), from.v.Head(row, 0)};
      const KvTarget target{to.k.Head(row, 0), to.v.Head(row, 0)};
      for (int32_t head = 0; head < layer_.n_kv_heads; ++head) {
        CopyHead(from, source, head, to, target, head);
      }
    }
  }

 private:
  const BankConfig& config_;
  const LayerSpec& layer_;
  int64_t head_row_bytes_;
  int64_t rows_;
};

// Rows that a table has of a sequence.
int64_t RowsOf(const SequenceImage::Table& table, int64_t length) {
  const int64_t rows = length - table.gone;
  return table.most > 0 ? std::min(rows, table.most + 1) : rows;
}

Status CheckTable(const BankConfig& config, const SequenceImage::Table& table, int64_t length) {
  const auto out_of_range = [&](int64_t tokens) { return tokens < 0 || tokens > length; };
  if (out_of_range(table.gone) || out_of_range(table.least) || table.most < 0 ||
      table.most > config.max_tokens) {
    return Corrupt(fmt::format("a table of {} tokens has lost {}, the last at {}, and keeps {}",
                               length, table.gone, table.least, table.most));
  }
  const int64_t n_blocks = config.BlocksFor(RowsOf(table, length));
  int64_t end = 0;  // of the blocks so far
  for (const auto& [first, last] : table.held) {
    if (first < end || last <= first || last > n_blocks) {
      return Corrupt(fmt::format("a table of {} blocks holds those from {} to {} behind block {}",
                                 n_blocks, first, last, end));
    }
    end = last;
  }
  // A row that stands by the number of tokens before it has no holes before it.
  const bool loses = table.gone > 0 || table.most > 0;
  const bool whole = n_blocks == 0 ? table.held.empty()
                                   : table.held.size() == 1 && table.held.front().first == 0 &&
                                         table.held.front().second == n_blocks;
  if (loses && !whole) return Corrupt("a table that lost rows by choice has holes");
  return {};
}

}  // namespace

Status CheckImage(const BankConfig& config, const SequenceImage& image) {
  if (image.layout != config.Layout()) {
    return InvalidArgument(
        "its layers keep K/V in other streams than those here, as an engine opened with another "
        "policy or on another device has them");
  }
  if (image.tables.size() != config.tables.size()) {
    return Corrupt(fmt::format("{} tables of blocks are there, expected {}", image.tables.size(),
                               config.tables.size()));
  }
  if (image.length < 0 || image.length > config.max_tokens) {
    return ResourceExhausted(
        fmt::format("it has {} tokens, but the context holds {}", image.length, config.max_tokens));
  }
  for (const SequenceImage::Table& table : image.tables) {
    OKV_RETURN_IF_ERROR(CheckTable(config, table, image.length));
  }
  if (!image.fewer.empty() && image.fewer.size() != config.layers.size()) {
    return Corrupt(fmt::format("rows of {} layers are lost, expected {}", image.fewer.size(),
                               config.layers.size()));
  }
  for (size_t layer = 0; layer < image.fewer.size(); ++layer) {
    const int64_t fewer = image.fewer[layer];
    const auto table = static_cast<size_t>(config.layers[layer].table());
    const int64_t rows = RowsOf(image.tables[table], image.length);
    if (fewer < 0 || fewer > rows || (fewer > 0 && !config.IsGlobal(layer))) {
      return Corrupt(
          fmt::format("layer {} has {} rows fewer than the {} of others", layer, fewer, rows));
    }
  }
  return {};
}

SequenceImage WholeImage(const BankConfig& config, int64_t length) {
  SequenceImage image{.length = length, .tables = {}, .fewer = {}, .layout = config.Layout()};
  image.tables.resize(config.tables.size());
  const auto blocks = static_cast<int32_t>(config.BlocksFor(length));
  for (SequenceImage::Table& table : image.tables) {
    if (blocks > 0) table.held = {{0, blocks}};
  }
  return image;
}

bool IsWhole(const BankConfig& config, const SequenceImage& image) {
  const SequenceImage whole = WholeImage(config, image.length);
  for (size_t table = 0; table < image.tables.size(); ++table) {
    const bool keeps_all = config.KeepsAll(static_cast<int32_t>(table));
    if (keeps_all && image.tables[table] != whole.tables[table]) return false;
  }
  return image.fewer.empty() && image.layout == whole.layout;
}

size_t BytesOf(const BankConfig& config, const SequenceImage& image, const RowRange& which) {
  const int64_t bt = config.block_tokens;
  size_t bytes = 0;
  for (size_t layer = 0; layer < config.layers.size(); ++layer) {
    const LayerSpec& spec = config.layers[layer];
    const int64_t fewer = image.fewer.empty() ? 0 : image.fewer[layer];
    for (const StreamSpec& stream : spec.streams) {
      for (int32_t t = stream.table; t < stream.table + config.TablesOf(spec, stream); ++t) {
        if (!config.KeepsAll(t) && !which.others) continue;
        const SequenceImage::Table& table = image.tables[static_cast<size_t>(t)];
        const int64_t least = config.KeepsAll(t) ? which.begin : 0;
        int64_t most = RowsOf(table, image.length) - fewer;
        if (config.KeepsAll(t)) most = std::min(most, config.BlocksFor(which.end) * bt);
        for (const auto& [first, last] : table.held) {
          const int64_t rows = std::min(most, last * bt) - std::max(least, first * bt);
          if (rows <= 0) continue;
          bytes += static_cast<size_t>(rows) * config.StreamRowBytes(spec, stream);
        }
      }
    }
  }
  return bytes;
}

template <typename Visit>
void Bank::ForRows(int32_t seq, const StateStreams& states, const RowRange& which,
                   const Visit& visit) const {
  const int64_t bt = config_.block_tokens;
  // each(block, its rows). A layer with fewer rows than its table may have none in the last blocks.
  const auto blocks = [&](std::span<const Table> tables, int32_t layer, const auto& each) {
    for (const Table& t : tables) {
      const bool keeps_all = config_.KeepsAll(NumberOf(t));
      if (!keeps_all && !which.others) continue;
      const int64_t rows = Rows(seq, NumberOf(t)) - fewer_[FewerIndex(seq, layer)];
      const auto first = keeps_all ? static_cast<int32_t>(which.begin / bt) : 0;
      const int32_t last = keeps_all ? std::min(t.blocks.n_blocks(seq), BlocksFor(which.end))
                                     : t.blocks.n_blocks(seq);
      for (int32_t i = first; i < last && i * bt < rows; ++i) {
        const int32_t block = t.blocks.entries(seq)[i];
        if (block >= 0) each(block, std::min(bt, rows - i * bt));
      }
    }
  };
  for (size_t stream = 0; stream < streams_.size(); ++stream) {
    const Stream& s = streams_[stream];
    blocks(TablesOf(s), s.layer, [&](int32_t block, int64_t rows) {
      visit(stream, Home(stream) + static_cast<size_t>(block) * BlockBytes(s),
            static_cast<size_t>(rows) * s.row_bytes);
    });
  }
  for (size_t state = 0; state < states.size(); ++state) {
    const auto& s = states[state];
    blocks(Sharing(TableNumber(s->spec.layer)), s->spec.layer, [&](int32_t block, int64_t rows) {
      const int64_t units = (rows + s->spec.unit - 1) / s->spec.unit;
      visit(streams_.size() + state, s->Block(block),
            static_cast<size_t>(units * s->view.row_bytes));
    });
  }
}

SequenceImage Bank::Image(int32_t seq) const {
  SequenceImage image{.length = Length(seq), .tables = {}, .fewer = {}, .layout = config_.Layout()};
  const int64_t* const fewer = &fewer_[FewerIndex(seq, 0)];
  if (std::any_of(fewer, fewer + n_layers(), [](int64_t n) { return n != 0; })) {
    image.fewer.assign(fewer, fewer + n_layers());
  }
  for (const Table& table : tables_) {
    const Lost& lost = table.lost[static_cast<size_t>(seq)];
    SequenceImage::Table& to = image.tables.emplace_back(
        SequenceImage::Table{.gone = lost.gone, .least = lost.least, .most = lost.most});
    for (int32_t i = 0; i < table.blocks.n_blocks(seq); ++i) {
      if (table.blocks.entries(seq)[i] < 0) continue;
      const bool goes_on = !to.held.empty() && to.held.back().second == i;
      if (goes_on) to.held.back().second = i + 1;
      if (!goes_on) to.held.push_back({i, i + 1});
    }
  }
  return image;
}

std::vector<RowRun> Bank::RunsOf(int32_t seq, const StateStreams& states,
                                 const RowRange& which) const {
  std::vector<RowRun> runs;
  size_t last = streams_.size() + states.size();
  ForRows(seq, states, which, [&](size_t stream, std::byte* at, size_t bytes) {
    if (bytes == 0) return;
    const bool by_head = stream < streams_.size() && streams_[stream].spec.by_head;
    // Memory of two streams is not one copy's, even side by side.
    const bool goes_on = stream == last && !by_head && runs.back().at + runs.back().bytes == at;
    if (goes_on) runs.back().bytes += bytes;
    if (!goes_on) runs.push_back({at, bytes, by_head ? streams_[stream].layer : -1});
    last = stream;
  });
  return runs;
}

void Bank::Export(int32_t seq, const StateStreams& states,
                  const std::function<void(const void*, size_t)>& write) const {
  OutgoingRows rows(*this, RunsOf(seq, states, AllRows(seq)));
  std::vector<std::byte> piece(std::min(rows.left(), kPiece));
  while (rows.left() > 0) write(piece.data(), rows.Copy(piece));
}

std::vector<std::byte> Bank::ReadByHead(const RowRun& run) const {
  std::vector<std::byte> sent(run.bytes);
  const BlockByHead block(config_, run);
  std::vector<std::byte> bytes(block.bytes());
  backend_.Download(bytes.data(), run.at, bytes.size());
  block.CopyRows(block.ByHead(bytes.data()), block.Sent(sent.data()));
  return sent;
}

void Bank::WriteByHead(const RowRun& run, std::vector<std::byte>& sent) const {
  const BlockByHead block(config_, run);
  std::vector<std::byte> bytes(block.bytes());
  block.CopyRows(block.Sent(sent.data()), block.ByHead(bytes.data()));
  backend_.Upload(run.at, bytes.data(), bytes.size());  // rows of no token as zeros
}

namespace {

size_t BytesOf(const std::vector<RowRun>& runs) {
  size_t bytes = 0;
  for (const RowRun& run : runs) bytes += run.bytes;
  return bytes;
}

}  // namespace

RowCursor::RowCursor(std::vector<RowRun> runs) : runs_(std::move(runs)), left_(BytesOf(runs_)) {}

RowRun RowCursor::Next(size_t most) {
  const RowRun& run = runs_[next_];
  const RowRun part = {.at = run.at + at_, .bytes = std::min(most, run.bytes - at_)};
  at_ += part.bytes;
  left_ -= part.bytes;
  if (at_ == run.bytes) {
    ++next_;
    at_ = 0;
  }
  return part;
}

void IncomingRows::Take(std::span<const std::byte> bytes) {
  OKV_CHECK(bytes.size() <= left(), "{} bytes, but {} are to come", bytes.size(), left());
  while (!bytes.empty()) {
    const RowRun run = to_.run();
    const RowRun part = to_.Next(bytes.size());
    if (run.layer_by_head < 0) {
      bank_->backend_.Upload(part.at, bytes.data(), part.bytes);
    } else {
      sent_.insert(sent_.end(), bytes.begin(), bytes.begin() + static_cast<ptrdiff_t>(part.bytes));
      if (sent_.size() == run.bytes) {
        bank_->WriteByHead(run, sent_);
        sent_.clear();
      }
    }
    bytes = bytes.subspan(part.bytes);
  }
}

size_t OutgoingRows::Copy(std::span<std::byte> to) {
  const size_t all = std::min(to.size(), left());
  for (to = to.first(all); !to.empty();) {
    const bool by_head = from_.run().layer_by_head >= 0;
    const size_t at = from_.at();
    if (by_head && at == 0) sent_ = bank_->ReadByHead(from_.run());
    const RowRun part = from_.Next(to.size());
    if (by_head) {
      std::copy_n(sent_.data() + at, part.bytes, to.data());
    } else {
      bank_->backend_.Download(to.data(), part.at, part.bytes);
    }
    to = to.subspan(part.bytes);
  }
  return all;
}

Status Bank::Place(int32_t seq, const SequenceImage& image) {
  OKV_CHECK(Length(seq) == 0 && image.tables.size() == tables_.size());
  for (size_t i = 0; i < tables_.size(); ++i) {
    const SequenceImage::Table& from = image.tables[i];
    Table& table = tables_[i];
    std::vector<bool> held(
        static_cast<size_t>(config_.BlocksFor(omnikv::RowsOf(from, image.length))));
    for (const auto& [first, last] : from.held) {
      std::fill(held.begin() + first, held.begin() + last, true);
    }
    if (!table.blocks.Place(seq, held)) {
      return ResourceExhausted(fmt::format("{} tokens do not fit: {} of {} blocks are free",
                                           image.length, table.blocks.free_blocks(),
                                           table.blocks.total_blocks()));
    }
    table.lost[static_cast<size_t>(seq)] = {
        .gone = from.gone, .least = from.least, .most = from.most};
    Publish(table, seq, 0, table.blocks.n_blocks(seq));
  }
  lengths_[static_cast<size_t>(seq)] = image.length;
  std::copy(image.fewer.begin(), image.fewer.end(), &fewer_[FewerIndex(seq, 0)]);
  return {};
}

IncomingRows Bank::BeginImport(int32_t seq, const RowRange& which) {
  return {*this, RunsOf(seq, {}, which)};
}

OutgoingRows Bank::BeginExport(int32_t seq, const RowRange& which) const {
  return {*this, RunsOf(seq, {}, which)};
}

Status Bank::Import(int32_t seq, const SequenceImage& image, const StateStreams& states,
                    size_t bytes, const std::function<Status(void*, size_t)>& read) {
  OKV_RETURN_IF_ERROR(Place(seq, image));
  IncomingRows rows(*this, RunsOf(seq, states, AllRows(seq)));
  if (rows.left() != bytes) {
    return Corrupt(fmt::format("its K/V take {} bytes, expected {}", bytes, rows.left()));
  }
  std::vector<std::byte> piece(std::min(bytes, kPiece));
  while (rows.left() > 0) {
    const size_t n = std::min(rows.left(), piece.size());
    OKV_RETURN_IF_ERROR(read(piece.data(), n));
    rows.Take({piece.data(), n});
  }
  return {};
}

}  // namespace omnikv
