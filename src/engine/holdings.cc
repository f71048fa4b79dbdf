#include "engine/holdings.h"

namespace omnikv {

Holdings HoldingsOf(const EngineCore& core) {
  const Bank& bank = *core.bank;
  Holdings held;
  const auto tables = static_cast<int32_t>(bank.config().tables.size());
  for (int32_t table = 0; table < tables; ++table) {
    if (bank.config().FirstSharing(table) != table) continue;
    const int64_t total = bank.TotalBlocks(table);
    held.blocks.push_back({.table = table, .used = total - bank.FreeBlocks(table), .total = total});
  }
  const size_t near =
      bank.DeviceBytes() + Bank::StageBytes(bank.config()) + core.policy_bytes + core.set_bytes;
  held.bytes = BytesByTier(core, near, bank.HostBytes(), bank.DiskBytes());
  return held;
}

TierBytes BytesByTier(const EngineCore& core, size_t near, size_t on_host, size_t on_disk) {
  TierBytes bytes{.host = on_host, .disk = on_disk};
  (core.backend->OnDevice() ? bytes.device : bytes.host) += near;
  return bytes;
}

}  // namespace omnikv
