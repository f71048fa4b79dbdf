#include <algorithm>

#include "policy/blocks/block_ops.h"

namespace omnikv {

// Bytes and operations as if each value that is named were read, or written, once.
Cost HoldChoiceCost(const void* raw, HostArrays&) {
  const auto& a = *static_cast<const HoldChoiceArgs*>(raw);
  return {.bytes_read = static_cast<uint64_t>(a.n_seqs) * (sizeof(SeqMeta) + 12),
          .bytes_written = static_cast<uint64_t>(a.n_seqs) * 16};
}
Cost BlockKeysCost(const void* raw, HostArrays& arrays) {
  const auto& a = *static_cast<const BlockKeysArgs*>(raw);
  const KvView view{.k = a.k.Plane(), .n_kv_heads = a.n_kv_heads, .dk = a.dk};
  const SeqMeta* seqs = arrays.Of(a.seqs, a.n_seqs);
  Cost cost;
  for (int32_t s = 0; s < a.n_seqs; ++s) {
    const SeqMeta seq = seqs[s];
    const UnitRange units = UnitsMade(a, seq);
    const int64_t tokens =
        std::max(0, std::min(seq.kv_len, units.end * a.unit) - units.begin * a.unit);
    const uint64_t bytes = KvBytes(view, tokens * a.n_kv_heads, /*values=*/false);
    cost.bytes_read += bytes;
    cost.kv_bytes += bytes;
    cost.bytes_written += static_cast<uint64_t>(units.end - units.begin) *
                          (HasBounds(a.keys) ? 8 : 4) * static_cast<uint64_t>(a.heads * a.dk);
  }
  return cost;
}
Cost ListScoresCost(const void* raw, HostArrays& arrays) {
  const auto& a = *static_cast<const ListScoresArgs*>(raw);
  const SeqMeta* seqs = arrays.Of(a.seqs, a.n_seqs);
  Cost cost;
  for (int32_t s = 0; s < a.n_seqs; ++s) {
    const auto blocks = static_cast<uint64_t>(UnitsOf(seqs[s].kv_len, a.block));
    cost.bytes_read += 4 * blocks * static_cast<uint64_t>(a.n_in + (a.bias ? a.lists : 0));
    cost.bytes_written += 4 * blocks * static_cast<uint64_t>(a.lists);
  }
  return cost;
}
Cost TokenWeightsCost(const void* raw, HostArrays& arrays) {
  const auto& a = *static_cast<const TokenWeightsArgs*>(raw);
  const KvView view{.k = a.k.Plane(), .n_kv_heads = a.n_kv_heads, .dk = a.dk};
  const int64_t tokens = arrays.Of(a.seqs, 1)->kv_len;
  const auto n = static_cast<uint64_t>(tokens);
  const auto heads = static_cast<uint64_t>(a.n_heads);
  const uint64_t bytes = KvBytes(view, tokens * a.n_kv_heads, /*values=*/false);
  return {.bytes_read = bytes,
          .kv_bytes = bytes,
          .bytes_written = 4 * n * heads,
          .flops = 2 * n * heads * static_cast<uint64_t>(a.dk) * static_cast<uint64_t>(a.window)};
}
Cost BlockWeightsCost(const void* raw, HostArrays& arrays) {
  const auto& a = *static_cast<const BlockWeightsArgs*>(raw);
  const auto n = static_cast<uint64_t>(arrays.Of(a.seqs, 1)->kv_len);
  return {
      .bytes_read = 4 * n * static_cast<uint64_t>(a.n_in),
      .bytes_written = 4 * n / static_cast<uint64_t>(a.rule.block) * static_cast<uint64_t>(a.lists),
      .flops = n * static_cast<uint64_t>(a.n_in)};
}
Cost ExcludeCost(const void* raw, HostArrays&) {
  const auto& a = *static_cast<const ExcludeArgs*>(raw);
  return {.bytes_written = 4 * static_cast<uint64_t>(a.lists) * static_cast<uint64_t>(a.stride)};
}

}  // namespace omnikv
