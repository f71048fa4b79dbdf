// The context bank: the K/V of every token of every sequence. Policies name logical tokens; only
// the bank knows blocks, slots, tiers and bytes.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "backend/backend.h"
#include "bank/bank_config.h"
#include "bank/block_table.h"
#include "bank/state_stream.h"
#include "bank/tier.h"
#include "omnikv/status.h"

namespace omnikv {

// What a file says of a sequence of a bank: its length in tokens, and for each table what it lost
// (Bank::Lose) and which blocks it has, [first, last) of them in a row; the others are holes.
struct SequenceImage {
  struct Table {
    int64_t gone = 0;   // tokens
    int64_t least = 0;  // Bank::LeastLength
    int64_t most = 0;   // rows that stay in each step; 0: all
    std::vector<std::pair<int32_t, int32_t>> held;

    bool operator==(const Table&) const = default;
  };
  int64_t length = 0;
  std::vector<Table> tables;
  // By layer, rows that it has fewer than its table (Bank::Rows); empty: none in all.
  std::vector<int64_t> fewer;
  std::string layout;  // BankConfig::Layout

  bool operator==(const SequenceImage&) const = default;
};

// Some of the rows of a sequence: those of the tokens [begin, end) in the tables that keep all
// tokens (BankConfig::KeepsAll), and with `others` all rows in the other tables, too. `begin` is
// the first token of a block; `end` is one, or the length of the sequence.
struct RowRange {
  int64_t begin = 0;
  int64_t end = 0;
  bool others = false;
};

// The image of a sequence of so many tokens that holds all of them in every table.
SequenceImage WholeImage(const BankConfig& config, int64_t length);
// Whether it holds all its tokens in the tables that keep all.
bool IsWhole(const BankConfig& config, const SequenceImage& image);
// Bytes of some of its K/V. REQUIRES CheckImage.
size_t BytesOf(const BankConfig& config, const SequenceImage& image, const RowRange& which);

// Bytes of the bank's memory that lie side by side, of one stream.
struct RowRun {
  std::byte* at = nullptr;
  size_t bytes = 0;
  // Of which the rows, the first ones of a block, lie by head; -1: as they are sent. Rows are sent
  // with all heads side by side, so that any bank of the same layers can have them.
  int32_t layer_by_head = -1;
};

// A place in rows that lie in several runs.
class RowCursor {
 public:
  explicit RowCursor(std::vector<RowRun> runs);
  size_t left() const { return left_; }  // bytes behind it
  // The run of the next byte, and where in it. REQUIRES left().
  const RowRun& run() const { return runs_[next_]; }
  size_t at() const { return at_; }
  // The next bytes that lie side by side, `most` of them at most, and passes them. REQUIRES left().
  RowRun Next(size_t most);

 private:
  std::vector<RowRun> runs_;  // in their order
  size_t next_ = 0;           // the run of the next byte
  size_t at_ = 0;             // and where in it
  size_t left_;
};

class Bank;

// Rows of a sequence on their way to the bank, piece by piece, in the order of Bank::Export. Its
// calls are those of the thread that drives the backend, between two steps.
class IncomingRows {
 public:
  size_t left() const { return to_.left(); }  // bytes that are still to come
  // Takes the next ones, which the caller may reuse on return. REQUIRES at most left() of them.
  void Take(std::span<const std::byte> bytes);

 private:
  friend class Bank;
  IncomingRows(const Bank& bank, std::vector<RowRun> runs) : bank_(&bank), to_(std::move(runs)) {}

  const Bank* bank_;
  RowCursor to_;
  std::vector<std::byte> sent_;  // so far, of a run that lies by head
};

// The other way, under the same rules. The sequence stays as it is, and open, until all are copied.
class OutgoingRows {
 public:
  size_t left() const { return from_.left(); }  // bytes that are still to be copied
  // Copies the next ones: as many as there is room for in `to`, or all that are left. Returns
  // their number.
  size_t Copy(std::span<std::byte> to);

 private:
  friend class Bank;
  OutgoingRows(const Bank& bank, std::vector<RowRun> runs) : bank_(&bank), from_(std::move(runs)) {}

  const Bank* bank_;
  RowCursor from_;
  std::vector<std::byte> sent_;  // all of a run that lies by head
};

// Unless a bank of this shape can have the sequence: kInvalidArgument where its layers keep other
// streams, else kCorrupt or kResourceExhausted, without a name before the sentence.
Status CheckImage(const BankConfig& config, const SequenceImage& image);

// Sequences of tokens and where their K/V lie. Thread-compatible; driven by the thread that drives
// the backend.
class Bank {
 public:
  // kResourceExhausted when the tokens exceed the cap, memory, or what int32 can number. Layers of
  // the host tier may be used once the backend's AwaitShared has returned ok.
  static Result<std::unique_ptr<Bank>> Create(Backend& backend, BankConfig config);

  // A new, empty sequence, or a copy of one that shares its blocks. kResourceExhausted when
  // max_seqs are open.
  Result<int32_t> NewSequence();
  Result<int32_t> Fork(int32_t seq);
  void Free(int32_t seq);

  // Makes room for `n` more tokens, and counts them as present: their rows are written by the step
  // that follows. Blocks shared with a fork are copied before they are written: the last one, and
  // in tables that lose rows in this step (LoseRows) all. On failure nothing has changed.
  Status Append(int32_t seq, int64_t n);
  // The same for a whole prompt that passes layer by layer (bank/prompt_stage.h), with room for
  // what stays of it alone: a table has its first `kept[table]` rows (empty or kAllRows: all),
  // those with a window the rows of the tokens from FirstKept on. REQUIRES an empty sequence.
  static constexpr int64_t kAllRows = -1;
  Status AppendWhole(int32_t seq, int64_t n, std::span<const int64_t> kept);
  int64_t FirstKept(int32_t table, int64_t n) const;
  // Rows of the tokens [begin, end) of a layer, which come from `rows`, the row of token 0 first.
  // REQUIRES LayerSpec::OneStream.
  void CopyHome(int32_t layer, int32_t seq, int64_t begin, int64_t end, const std::byte* rows);
  // The other way, on Lane::kIn: to `rows`, where that of token `begin` comes first.
  void CopyFromHome(int32_t layer, int32_t seq, int64_t begin, int64_t end, std::byte* rows);
  // Forgets the tokens from `length` on. REQUIRES length <= Length(seq).
  void Truncate(int32_t seq, int64_t length);

  // Gives back the memory of those blocks that lie whole in the tokens [begin, end), which nothing
  // may read from now on in the streams of `table`. `end` only grows from call to call, and `begin`
  // stays.
  void Drop(int32_t seq, int32_t table, int64_t begin, int64_t end);
  // Whether the rows of the tokens [begin, end) are there in the streams of `table`.
  bool Holds(int32_t seq, int32_t table, int64_t begin, int64_t end) const;

  // --- Tables that lose rows by choice (docs/decisions/045): row i of a sequence is there the i-th
  // of the tokens that it still holds.
  // What Append readies a table for.
  enum class LoseRows {
    kNone,
    kInStep,  // the step that follows moves rows: they are the sequence's own
    kToMost,  // and so does each step: a token past so many rows takes the place of another
  };
  // From now on. `most` > 0: of kToMost, rows that stay.
  void Lose(int32_t seq, int32_t table, LoseRows when, int64_t most = 0);
  // The first `n` rows stay, where the last step moved those that do; the memory of the others is
  // given back.
  void Keep(int32_t seq, int32_t table, int64_t n);
  // The same where layers of the table keep different numbers: the first `rows[layer]` of each. The
  // table has room for the most of them. REQUIRES layers whose heads are not apart.
  void Keep(int32_t seq, int32_t table, std::span<const int64_t> rows);
  // From now on the sequence cannot be cut back from its length, but to nothing or by steps that
  // nobody read.
  void Settle(int32_t seq, int32_t table) {
    tables_[static_cast<size_t>(table)].lost[static_cast<size_t>(seq)].least = Length(seq);
  }
  // Rows that are held, the last step's own included, and tokens lost before them. With kToMost the
  // row of a token at position p is min(p - gone, most).
  int64_t Rows(int32_t seq, int32_t table) const {
    return RowsOf(static_cast<size_t>(table), seq, Length(seq));
  }
  int64_t Gone(int32_t seq, int32_t table) const {
    return tables_[static_cast<size_t>(table)].lost[static_cast<size_t>(seq)].gone;
  }
  // The same of one layer, which may have lost more than its table. Where its heads are apart: of
  // the head that holds most.
  int64_t LayerRows(int32_t seq, int32_t layer) const;
  int64_t LayerGone(int32_t seq, int32_t layer) const;
  // The length below which `seq` cannot be cut back, but to nothing: rows of those tokens are gone.
  int64_t LeastLength(int32_t seq) const;

  // Memory for states of units of tokens, zeroed. Streams that are open already are shared; the
  // last holder of a stream gives it back. What a sequence's tokens have as states lives and goes
  // with their K/V. REQUIRES units as StateSpec says.
  Result<StateStreams> OpenStates(const std::vector<StateSpec>& specs);
  // Bytes of all that are open, and of those of `specs` that are not.
  size_t StateBytes() const;
  size_t BytesToOpen(const std::vector<StateSpec>& specs) const;

  // What a file needs to hold of `seq`: its image, then its K/V and `states`, which `write` takes
  // piece by piece. What steps wrote must have come home.
  SequenceImage Image(int32_t seq) const;
  void Export(int32_t seq, const StateStreams& states,
              const std::function<void(const void* data, size_t bytes)>& write) const;
  // Makes an empty `seq` what was exported so, with as many bytes as the pieces had. What `read`
  // fails with, kCorrupt for another number of bytes, and kResourceExhausted where blocks run out,
  // leave it to be freed. REQUIRES CheckImage.
  Status Import(int32_t seq, const SequenceImage& image, const StateStreams& states, size_t bytes,
                const std::function<Status(void* to, size_t bytes)>& read);
  // Rows that come or go while steps of other sequences run. Place makes an empty `seq` have its
  // length and its blocks, or returns kResourceExhausted and leaves it to be freed; nothing but
  // Free and Truncate may use it until all its rows are there. REQUIRES CheckImage.
  Status Place(int32_t seq, const SequenceImage& image);
  IncomingRows BeginImport(int32_t seq, const RowRange& which);
  // What steps wrote must have come home.
  OutgoingRows BeginExport(int32_t seq, const RowRange& which) const;

  // Writes made-up K/V, reproducible, to every token of `seq`, and made-up bf16 to all its states,
  // which are such numbers as f32 too: for benchmarks and tests, which need a context without the
  // time to compute one.
  void FillWithNoise(int32_t seq);

  int64_t Length(int32_t seq) const { return lengths_[static_cast<size_t>(seq)]; }
  // SeqMeta::table_off of the sequence.
  int32_t TableOffset(int32_t seq) const { return tables_.front().blocks.Offset(seq); }
  int32_t n_layers() const { return static_cast<int32_t>(config_.layers.size()); }
  // Of the heads of one class of the layer.
  KvView View(int32_t layer, int32_t head_class = 0) const {
    return MakeView(layer, head_class, /*staged=*/false);
  }
  // That of a layer on the host for Lane::kHost: the block table too is shared memory.
  KvView HostView(int32_t layer) const {
    KvView view = View(layer);
    view.block_table = tables_[TableIndex(layer)].shared_entries;
    return view;
  }
  int32_t HeadClasses(int32_t layer) const {
    return static_cast<int32_t>(classes_[static_cast<size_t>(layer)].size());
  }
  // The KV heads of one, ascending; empty: all.
  const std::vector<int32_t>& HeadsOf(int32_t layer, int32_t head_class) const {
    return classes_[static_cast<size_t>(layer)][static_cast<size_t>(head_class)].heads;
  }
  // Whether each KV head has rows of its own, and is a head class. Then View(layer) is also that of
  // head h, for a sequence whose table begins h * HeadTableStride() entries later.
  bool HeadsApart(int32_t layer) const {
    return config_.layers[static_cast<size_t>(layer)].HeadsApart();
  }
  bool SharesBlocks(int32_t table) const { return config_.Sharing(table) > 1; }
  // Entries from a table that kernels read to the next one, which is that of the next head where
  // heads are apart.
  int32_t HeadTableStride() const { return tables_.front().blocks.max_blocks() * config_.max_seqs; }
  // Whether some stream of it is on the host or on a disk; on a disk.
  bool OnDisk(int32_t layer) const { return config_.layers[static_cast<size_t>(layer)].OnDisk(); }
  bool OnHost(int32_t layer) const { return config_.layers[static_cast<size_t>(layer)].OnHost(); }
  bool HasHostLayers() const { return config_.HasHostLayers(); }
  // Whether host layers can pass through stages.
  bool HasStages() const { return !stages_.empty(); }
  // Blocks of the tables that draw on those of `table`: in all, free, and those of `seq` among
  // them.
  int64_t TotalBlocks(int32_t table) const {
    return tables_[static_cast<size_t>(table)].blocks.total_blocks();
  }
  int64_t FreeBlocks(int32_t table) const {
    return tables_[static_cast<size_t>(table)].blocks.free_blocks();
  }
  int64_t HeldBlocks(int32_t seq, int32_t table) const {
    return static_cast<int64_t>(BlocksOf(Sharing(table), seq));
  }
  // Bytes of the blocks in use in the backend's own memory, in the host's beside it and on a disk,
  // a shared one once.
  size_t DeviceBytes() const;
  size_t HostBytes() const;
  size_t DiskBytes() const;
  // The same of one sequence alone, shared blocks in full, with its states in `states`.
  size_t DeviceBytes(int32_t seq, const StateStreams& states = {}) const;
  size_t HostBytes(int32_t seq) const { return BytesOf(seq, TierKind::kHost); }
  size_t DiskBytes(int32_t seq) const { return BytesOf(seq, TierKind::kHost, /*on_disk=*/true); }
  // Bytes in all tiers of so many blocks of each table, with their states in `states`. Of tables
  // that draw on the same blocks, the first one has the number of all.
  size_t BytesOf(std::span<const int64_t> blocks, const StateStreams& states) const;

  // How a step that reads everything passes through a layer with streams on the host: their past
  // comes to one of the stages in the backend's memory, the step reads and writes there, and what
  // it wrote goes home. A stage has the rows of one sequence, in order, or all rows at their places
  // (BankConfig::StageRows): StageView is View with the planes that are on the host there instead.
  KvView StageView(int32_t layer, int32_t head_class = 0) const {
    return MakeView(layer, head_class, /*staged=*/true);
  }
  // Brings the tokens [0, n) of `seq` to the layer's stage, on Lane::kIn: those that are not there
  // yet. What was in the stage must have been read, and have gone home, by then.
  void StageIn(int32_t layer, int32_t seq, int64_t n);
  // What is enqueued on Lane::kMain from now on runs when they are there.
  void AwaitStage(int32_t layer) { backend_.WaitFor(StageOf(layer), Lane::kMain); }
  // Takes the tokens [begin, end) home, on Lane::kOut.
  void StageOut(int32_t layer, int32_t seq, int64_t begin, int64_t end);
  // Layers with streams on the host that can be on their way while one is read.
  int32_t StagesAhead() const { return config_.n_stages - 1; }
  // Bytes that StageIn has brought so far.
  size_t BytesStaged() const { return bytes_staged_; }
  // Bytes of the stages for a bank of this shape.
  static size_t StageBytes(const BankConfig& config);
  const BankConfig& config() const { return config_; }
  // Bytes that one token takes in all layers.
  static size_t BytesPerToken(const BankConfig& config);
  // Bytes of the streams in `tier`, reserved by Create.
  static size_t ReservedBytes(const BankConfig& config, TierKind tier);
  // The part of those in TierKind::kHost that lies on a disk.
  static size_t ReservedOnDisk(const BankConfig& config);

 private:
  // What a sequence has lost in a table.
  struct Lost {
    int64_t gone = 0;    // tokens
    int64_t least = 0;   // Length when it last lost some, or Settle
    int64_t most = 0;    // rows that stay in each step; 0: all
    bool moves = false;  // rows move in the steps that follow
  };
  // Which block of the streams holds which rows.
  struct Table {
    BlockTable blocks;
    int32_t first = 0;                  // number of the first table that draws on the same blocks
    int32_t* entries = nullptr;         // [max_seqs, max_blocks], for kernels
    int32_t* shared_entries = nullptr;  // the same in shared memory; without host layers: none
    std::vector<Lost> lost;             // [max_seqs]
  };

  // One of the streams of all layers, which the tiers number in this order.
  struct Stream {
    int32_t layer = 0;
    StreamSpec spec;
    size_t row_bytes = 0;
    size_t stage_at = 0;  // bytes: where it begins in its layer's stage, if it is on the host
    size_t memory = 0;    // the stream in whose memory it lies: itself, or one of the same blocks
  };

  Bank(Backend& backend, BankConfig config);
  Status Allocate();
  KvView MakeView(int32_t layer, int32_t head_class, bool staged) const;
  // Row 0 of a stream, by number.
  std::byte* Home(size_t stream) const {
    const bool own = streams_[stream].spec.tier == TierKind::kDevice;
    return (own ? *device_ : *host_).Base(static_cast<int32_t>(streams_[stream].memory));
  }
  std::byte* InStage(size_t stream) const {
    const Stream& s = streams_[stream];
    return stages_[StageOf(s.layer)].as<std::byte>() + s.stage_at;
  }
  // What lies at `home` in the stream, and at `in_order` in blocks of its sequence alone.
  std::byte* InStage(size_t stream, int64_t home, int64_t in_order) const {
    return InStage(stream) + (InOrder(streams_[stream].layer) ? in_order : home);
  }
  // Of a stream whose heads are not apart; of others that of head 0.
  const Table& TableOf(const Stream& s) const { return tables_[static_cast<size_t>(s.spec.table)]; }
  // All of a stream; of the first one of a layer.
  std::span<const Table> TablesOf(const Stream& s) const {
    const LayerSpec& layer = config_.layers[static_cast<size_t>(s.layer)];
    return std::span(tables_).subspan(static_cast<size_t>(s.spec.table),
                                      static_cast<size_t>(config_.TablesOf(layer, s.spec)));
  }
  std::span<const Table> TablesOf(int32_t layer) const {
    return TablesOf(streams_[classes_[static_cast<size_t>(layer)].front().k]);
  }
  // `table` is one of tables_.
  int32_t NumberOf(const Table& table) const {
    return static_cast<int32_t>(&table - tables_.data());
  }
  // All that draw on the blocks of a table, or on those of states.
  std::span<const Table> Sharing(int32_t table) const {
    const auto first = static_cast<size_t>(config_.FirstSharing(table));
    return std::span(tables_).subspan(first, static_cast<size_t>(config_.Sharing(table)));
  }
  // Of the states of a layer.
  int32_t TableNumber(int32_t layer) const {
    return config_.layers[static_cast<size_t>(layer)].table();
  }
  size_t TableIndex(int32_t layer) const { return static_cast<size_t>(TableNumber(layer)); }
  size_t FewerIndex(int32_t seq, int32_t layer) const {
    return static_cast<size_t>(seq) * config_.layers.size() + static_cast<size_t>(layer);
  }
  size_t BlockBytes(const Stream& s) const {
    return s.row_bytes * static_cast<size_t>(config_.block_tokens);
  }
  // Of the streams of which counts(spec) is true.
  template <typename Counts>
  size_t BytesInUse(const Counts& counts) const;
  size_t BytesOf(int32_t seq, TierKind tier, bool on_disk = false) const;
  // Rows that a sequence of `length` tokens has in a table.
  int64_t RowsOf(size_t table, int32_t seq, int64_t length) const;
  Status CheckLength(int32_t seq, int64_t n) const;
  Status NoRoom(const Table& table, int64_t n) const;
  // Makes room in one table for rows of `n` tokens more; on failure nothing has changed.
  Status Grow(size_t table, int32_t seq, int64_t n);
  // Makes the blocks [first, last) of `seq` its own, before they are written.
  Status MakeOwn(size_t table, int32_t seq, int32_t first, int32_t last);
  // Blocks that `seq` has in some tables.
  static size_t BlocksOf(std::span<const Table> tables, int32_t seq);
  RowRange AllRows(int32_t seq) const { return {.begin = 0, .end = Length(seq), .others = true}; }
  // Calls visit(stream, data, bytes) for those rows of `seq` in each block of each stream, then of
  // each of `states`, which have numbers behind those of the streams.
  template <typename Visit>
  void ForRows(int32_t seq, const StateStreams& states, const RowRange& which,
               const Visit& visit) const;
  std::vector<RowRun> RunsOf(int32_t seq, const StateStreams& states, const RowRange& which) const;
  // Of a run that lies by head: what is sent of it.
  friend class IncomingRows;
  friend class OutgoingRows;
  std::vector<std::byte> ReadByHead(const RowRun& run) const;
  void WriteByHead(const RowRun& run, std::vector<std::byte>& sent) const;
  // Calls visit(stream) for each open stream of states, or for each of those in the blocks that a
  // table draws on.
  template <typename Visit>
  void ForStates(const Visit& visit, std::optional<int32_t> first_table = {}) const;
  // Calls visit(number) for each stream of a layer that is on the host.
  template <typename Visit>
  void ForHostStreams(int32_t layer, const Visit& visit) const;
  // Calls visit(home, in_order, bytes) for each run of those of the tokens [begin, end) that are
  // held, and that lies in one piece: where it begins in the stream, and where in memory that has
  // the blocks of the sequence one after the other, in bytes.
  template <typename Visit>
  void ForRuns(const Stream& stream, int32_t seq, int64_t begin, int64_t end,
               const Visit& visit) const;
  // Whether stages have the layer's rows of one sequence, in order.
  bool InOrder(int32_t layer) const {
    const LayerSpec& spec = config_.layers[static_cast<size_t>(layer)];
    return spec.OnHost() && !spec.InBothTiers();
  }
  // Which stage a layer of the host tier has: they take turns.
  size_t StageOf(int32_t layer) const;
  // The tokens of `seq` from `length` on may be written anew: no stage has them, and nothing that
  // is on its way to one may come later than what is enqueued from now on.
  void Unstage(int32_t seq, int64_t length);
  // Copies the entries [first, last) of `seq` to the table that kernels read.
  void Publish(const Table& table, int32_t seq, int32_t first, int32_t last);
  int32_t BlocksFor(int64_t tokens) const {
    return static_cast<int32_t>(config_.BlocksFor(tokens));
  }

  Backend& backend_;
  BankConfig config_;
  std::vector<Stream> streams_;                  // of all layers, layer after layer
  std::vector<std::vector<HeadClass>> classes_;  // [layers]; k and v by number in streams_
  std::unique_ptr<Tier> device_, host_;
  std::vector<Buffer> stages_;  // [n_stages]; none without streams on the host
  Buffer stage_entries_;        // a table for each sequence: block i of it is the i-th of a stage
  // What a stage holds, once Lane::kIn gets there: the first `tokens` of a sequence in a layer.
  struct Staged {
    int32_t layer = -1;
    int32_t seq = -1;
    int64_t tokens = 0;
  };
  std::vector<Staged> staged_;  // [n_stages]
  size_t bytes_staged_ = 0;
  // Streams of states, with the first table that draws on their blocks.
  struct OpenStream {
    int32_t table = 0;
    std::weak_ptr<const StateStream> stream;
  };
  std::vector<OpenStream> states_;
  std::vector<Table> tables_;
  Buffer entries_, shared_entries_;  // int32 [tables, max_seqs, max_blocks]
  std::vector<int64_t> lengths_;     // tokens, [max_seqs]
  std::vector<int64_t> fewer_;       // SequenceImage::fewer, [max_seqs, layers]
};

}  // namespace omnikv
