// What decode steps of a policy read in bytes: by the same formula as the Cost of the ops.
#pragma once

#include <cstdint>

#include "policy/policy.h"

namespace omnikv {

// Bytes of K/V that `layer`, whose rows lie in `kv`, reads in a decode step under `policy`, with
// those of states: where it attends to so many tokens times KV heads, or to HeadTokensRead.
inline uint64_t KvBytesRead(const Policy& policy, int32_t layer, const SeqLength& at,
                            const KvView& kv, int64_t head_tokens) {
  return KvBytes(kv, head_tokens, /*values=*/true) +
         KvBytes(kv, policy.HeadTokensScored(layer, at, kv.n_kv_heads), /*values=*/false) +
         static_cast<uint64_t>(policy.StateBytesRead(layer, at));
}
inline uint64_t KvBytesRead(const Policy& policy, int32_t layer, const SeqLength& at,
                            const KvView& kv) {
  return KvBytesRead(policy, layer, at, kv, policy.HeadTokensRead(layer, at, kv.n_kv_heads));
}

}  // namespace omnikv
