// What a bank keeps of each token: the streams of each layer (docs/decisions/048), and the tables
// that say which tokens have rows in them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "bank/declared_reads.h"
#include "bank/state_stream.h"
#include "bank/tier.h"
#include "base/dtype.h"

namespace omnikv {

enum class Planes {
  kBoth,  // K and V of a token in one row
  kK,
  kV,
};

// Rows that a layer keeps of its tokens: K, V or both, of some KV heads or all.
struct StreamSpec {
  std::vector<int32_t> heads;  // KV heads of the layer, ascending; empty: all
  Planes planes = Planes::kBoth;
  TierKind tier = TierKind::kDevice;
  bool on_disk = false;  // of kHost: on a disk, not in the host's memory
  int32_t table = 0;     // of BankConfig::tables
  // Each KV head has rows of its own, in a table of its own: that of head h is `table` + h, and
  // they draw on the same blocks (TableSpec::shares). REQUIRES K and V of all heads on the device.
  bool heads_apart = false;
  // Within a block the rows of each KV head follow one another (MakeKvViewByHead), as one who reads
  // other tokens of each head likes to have them. REQUIRES K and V of all heads, and KvFitsByHead.
  bool by_head = false;

  bool operator==(const StreamSpec&) const = default;
};

// KV heads that are read together, as one KvView, and the streams of their layer that have their K
// and their V: one, or one each.
struct HeadClass {
  std::vector<int32_t> heads = {};  // ascending; empty: all
  int32_t n_kv_heads = 0;
  size_t k = 0;
  size_t v = 0;
  int32_t table = 0;
};

// What one layer keeps of a token. Hybrid models are not uniform.
struct LayerSpec {
  int32_t n_kv_heads = 0;
  int32_t dk = 0;  // values of a K head
  int32_t dv = 0;  // values of a V head
  // Every KV head is in one of kBoth, or in one of kK and one of kV, of the same heads and table.
  std::vector<StreamSpec> streams = {StreamSpec{}};

  // By their first streams. REQUIRES streams as above.
  std::vector<HeadClass> HeadClasses() const;
  int32_t HeadsOf(const StreamSpec& stream) const {
    return stream.heads.empty() ? n_kv_heads : static_cast<int32_t>(stream.heads.size());
  }
  // Of the first head class; states go with it.
  int32_t table() const { return streams.front().table; }
  // Whether each KV head has rows of its own. Then that is a head class, and there is one stream.
  bool HeadsApart() const { return streams.front().heads_apart; }
  // Whether K and V of all heads lie in one row.
  bool OneStream() const { return streams.size() == 1 && !HeadsApart(); }
  bool OnHost() const;  // some stream is, or is on a disk
  bool OnDisk() const;  // some stream is
  bool InBothTiers() const;

  bool operator==(const LayerSpec&) const = default;
};

// The tokens whose rows the streams of one table keep. Those streams grow, fork, are cut and drop
// tokens together.
struct TableSpec {
  int32_t window = 0;  // tokens that a row reads, its own included; 0: no sliding window
  // At most so many tokens per sequence, besides those of a step under way; 0: all of them.
  int64_t max_held = 0;
  // Of the policy's: whose heads its streams have, where it tells them apart.
  int32_t head_class = 0;
  // Instead of max_held, if more: tokens of one sequence at a time whose rows are there until its
  // prompt ends in a choice, those of its steps included; 0: none.
  int64_t prompt_tokens = 0;
  // Draws on the blocks of the table before it, which are then as many more. Streams of several
  // layers may lie in such tables: then they lie in the same memory, and have rows of one size.
  bool shares = false;

  bool operator==(const TableSpec&) const = default;
};

struct BankConfig {
  std::vector<LayerSpec> layers;
  std::vector<TableSpec> tables = {TableSpec{}};
  DType dtype = DType::kBF16;
  int32_t block_tokens = 64;
  int64_t max_tokens = 0;   // of one sequence
  int64_t pool_tokens = 0;  // of all sequences together; 0: max_tokens
  int32_t max_seqs = 1;
  int64_t step_tokens = 0;  // appended before tokens are dropped, to one sequence at a time
  // Bank::StageIn: with one, nothing comes in while a layer is read; 0: no layer passes through
  // one.
  int32_t n_stages = 2;

  int64_t PoolTokens() const { return pool_tokens != 0 ? pool_tokens : max_tokens; }
  int64_t BlocksFor(int64_t tokens) const { return (tokens + block_tokens - 1) / block_tokens; }
  // Blocks that a table has for itself, of all sequences together.
  int64_t TableBlocks(const TableSpec& table) const;
  // Of a table's number: the first of the tables that draw on the same blocks, how many these are,
  // and the blocks that they have together.
  int32_t FirstSharing(int32_t table) const;
  int32_t Sharing(int32_t table) const;
  int64_t PoolBlocks(int32_t table) const;
  // The tables of a stream of a layer: one, or one for each KV head, after one another.
  int32_t TablesOf(const LayerSpec& layer, const StreamSpec& stream) const {
    return stream.heads_apart ? layer.n_kv_heads : 1;
  }
  // Bytes of a row of a stream of a layer; of one token in it, in all of them, and in the largest
  // of the layers.
  size_t StreamRowBytes(const LayerSpec& layer, const StreamSpec& stream) const;
  size_t StreamBytes(const LayerSpec& layer, const StreamSpec& stream) const;
  size_t RowBytes(size_t layer) const;
  size_t LargestRowBytes() const;
  // Rows of a stream of the layer, which is on the host, that a stage has room for: of one
  // sequence. Where other streams of the layer are on the device, the rows of all sequences, at
  // their places, since a KvView has one block table.
  int64_t StageRows(const LayerSpec& layer) const {
    return BlocksFor(layer.InBothTiers() ? PoolTokens() : max_tokens) * block_tokens;
  }
  // Whether the layer has no sliding window: policies govern it.
  bool IsGlobal(size_t layer) const {
    return tables[static_cast<size_t>(layers[layer].table())].window == 0;
  }
  // Whether all tokens of a sequence have rows in the table, unless a policy gives some up.
  bool KeepsAll(int32_t table) const {
    const TableSpec& spec = tables[static_cast<size_t>(table)];
    return spec.window == 0 && spec.max_held == 0;
  }
  bool HasHostLayers() const;  // some layer has streams there
  RowLayout Rows() const;      // of table 0
  // Bytes that a stream of states takes.
  size_t StateBytes(const StateSpec& spec) const;
  // Which streams the layers have, as text, of which the tiers are no part; empty where each layer
  // has one, of table 0 or of a sliding window.
  std::string Layout() const;
};

}  // namespace omnikv
