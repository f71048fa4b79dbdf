#include "bank/bank_config.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "backend/kv_format.h"
#include "base/check.h"

namespace omnikv {

std::vector<HeadClass> LayerSpec::HeadClasses() const {
  std::vector<HeadClass> classes;
  std::vector<int32_t> k_of(static_cast<size_t>(n_kv_heads));  // streams that have the K of a head
  std::vector<int32_t> v_of(static_cast<size_t>(n_kv_heads));
  for (size_t i = 0; i < streams.size(); ++i) {
    const StreamSpec& s = streams[i];
    for (int32_t n = 0; n < HeadsOf(s); ++n) {
      const auto head = static_cast<size_t>(s.heads.empty() ? n : s.heads[static_cast<size_t>(n)]);
      OKV_CHECK(head < k_of.size(), "head {} of {}", head, n_kv_heads);
      k_of[head] += s.planes != Planes::kV ? 1 : 0;
      v_of[head] += s.planes != Planes::kK ? 1 : 0;
    }
    if (s.heads_apart) {
      OKV_CHECK(s.planes == Planes::kBoth && s.heads.empty() && s.tier == TierKind::kDevice);
      for (int32_t h = 0; h < n_kv_heads; ++h) {
        classes.push_back({.heads = {h}, .n_kv_heads = 1, .k = i, .v = i, .table = s.table + h});
      }
      continue;
    }
    OKV_CHECK(!s.by_head || (s.planes == Planes::kBoth && s.heads.empty()));
    HeadClass of{.heads = s.heads, .n_kv_heads = HeadsOf(s), .k = i, .v = i, .table = s.table};
    if (s.planes == Planes::kBoth) classes.push_back(of);
    if (s.planes != Planes::kK) continue;
    const auto v = std::find_if(streams.begin(), streams.end(), [&](const StreamSpec& other) {
      return other.planes == Planes::kV && other.heads == s.heads && other.table == s.table;
    });
    OKV_CHECK(v != streams.end(), "stream {} has K alone", i);
    of.v = static_cast<size_t>(v - streams.begin());
    classes.push_back(of);
  }
  const auto once = [](int32_t n) { return n == 1; };
  OKV_CHECK(
      std::all_of(k_of.begin(), k_of.end(), once) && std::all_of(v_of.begin(), v_of.end(), once),
      "not each of {} heads is in one stream", n_kv_heads);
  return classes;
}

bool BankConfig::HasHostLayers() const {
  return std::any_of(layers.begin(), layers.end(),
                     [](const LayerSpec& layer) { return layer.OnHost(); });
}

bool LayerSpec::OnHost() const {
  return std::any_of(streams.begin(), streams.end(),
                     [](const StreamSpec& s) { return s.tier == TierKind::kHost; });
}

bool LayerSpec::OnDisk() const {
  return std::any_of(streams.begin(), streams.end(), [](const StreamSpec& s) { return s.on_disk; });
}

bool LayerSpec::InBothTiers() const {
  return OnHost() && std::any_of(streams.begin(), streams.end(),
                                 [](const StreamSpec& s) { return s.tier == TierKind::kDevice; });
}

int64_t BankConfig::TableBlocks(const TableSpec& table) const {
  const int64_t all = BlocksFor(PoolTokens());
  if (table.max_held == 0) return all;
  // The held tokens may begin and end in the middle of a block. One block more, for steps ahead.
  const int64_t held = BlocksFor(table.max_held) + 2;
  const int64_t in_prompt = table.prompt_tokens > 0 ? std::max(held, BlocksFor(table.prompt_tokens))
                                                    : held + BlocksFor(step_tokens);
  return std::min(all, held * (max_seqs - 1) + in_prompt);
}

int32_t BankConfig::FirstSharing(int32_t table) const {
  while (tables[static_cast<size_t>(table)].shares) --table;
  return table;
}

int32_t BankConfig::Sharing(int32_t table) const {
  const int32_t first = FirstSharing(table);
  auto end = static_cast<size_t>(first) + 1;
  while (end < tables.size() && tables[end].shares) ++end;
  return static_cast<int32_t>(end) - first;
}

int64_t BankConfig::PoolBlocks(int32_t table) const {
  const int32_t first = FirstSharing(table);
  int64_t blocks = 0;
  for (int32_t i = 0; i < Sharing(table); ++i) {
    blocks += TableBlocks(tables[static_cast<size_t>(first + i)]);
  }
  return blocks;
}

size_t BankConfig::StreamRowBytes(const LayerSpec& layer, const StreamSpec& stream) const {
  return static_cast<size_t>(KvRowBytes(dtype, stream.heads_apart ? 1 : layer.HeadsOf(stream),
                                        stream.planes != Planes::kV ? layer.dk : 0,
                                        stream.planes != Planes::kK ? layer.dv : 0));
}

size_t BankConfig::StreamBytes(const LayerSpec& layer, const StreamSpec& stream) const {
  const size_t rows = stream.heads_apart ? static_cast<size_t>(layer.n_kv_heads) : 1;
  return rows * StreamRowBytes(layer, stream);
}

size_t BankConfig::RowBytes(size_t layer) const {
  size_t bytes = 0;
  for (const StreamSpec& s : layers[layer].streams) bytes += StreamBytes(layers[layer], s);
  return bytes;
}

size_t BankConfig::LargestRowBytes() const {
  size_t largest = 0;
  for (size_t layer = 0; layer < layers.size(); ++layer) {
    largest = std::max(largest, RowBytes(layer));
  }
  return largest;
}

RowLayout BankConfig::Rows() const {
  const auto seq_blocks = static_cast<int32_t>(BlocksFor(max_tokens));
  return {.token_bytes = static_cast<int64_t>(LargestRowBytes()),
          .block_tokens = block_tokens,
          .seq_blocks = seq_blocks,
          .table_entries = seq_blocks * max_seqs,
          .heads_apart = std::any_of(layers.begin(), layers.end(),
                                     [](const LayerSpec& layer) { return layer.HeadsApart(); })};
}

size_t BankConfig::StateBytes(const StateSpec& spec) const {
  OKV_CHECK(spec.unit > 0 && (block_tokens % spec.unit == 0 || spec.unit % block_tokens == 0),
            "states of units of {} tokens, in blocks of {}", spec.unit, block_tokens);
  const int32_t table = layers[static_cast<size_t>(spec.layer)].table();
  const int64_t units = std::max(1, block_tokens / spec.unit);  // of a block
  return static_cast<size_t>(PoolBlocks(table) * units * spec.bytes_per_unit);
}

std::string BankConfig::Layout() const {
  std::string text;
  for (size_t layer = 0; layer < layers.size(); ++layer) {
    const auto table = static_cast<size_t>(layers[layer].table());
    if (layers[layer].OneStream() && (table == 0 || tables[table].window > 0)) continue;
    text += fmt::format("{}:", layer);
    for (const StreamSpec& s : layers[layer].streams) {
      const char* planes = s.heads_apart               ? "kv of each head "
                           : s.planes == Planes::kBoth ? "kv"
                           : s.planes == Planes::kK    ? "k"
                                                       : "v";
      text += fmt::format(" {}[{}]@{}", planes, fmt::join(s.heads, ","), s.table);
    }
    text += ";";
  }
  return text;
}

}  // namespace omnikv
