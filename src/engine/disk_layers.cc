#include "engine/disk_layers.h"

#include <algorithm>
#include <vector>

#include "backend/disk_memory.h"

namespace omnikv {

bool MayLieOnDisk(const ModelConfig& config, const DeclaredReads& reads, const MemoryPlan& plan,
                  size_t layer) {
  if (plan.attends_away || config.layers[layer].window > 0) return false;
  int32_t after = 0;  // global layers
  for (size_t i = layer + 1; i < config.layers.size(); ++i) {
    after += config.layers[i].window == 0 ? 1 : 0;
  }
  return (reads.selection_of[layer] >= 0 && (reads.by_token || plan.fetches_units)) ||
         after < reads.streamed.layers;
}

size_t WayBytes(const ModelConfig& config, const DeclaredReads& reads, const MemoryPlan& plan,
                int32_t max_sessions) {
  const size_t row_bytes = MakeBankConfig(config, plan, max_sessions).LargestRowBytes();
  const size_t copies = 2 * (DiskMemory::kPartIn + DiskMemory::kPartOut);
  if (reads.n_selections == 0) return copies;
  // What a layer of all sequences may miss in a step, and their new rows in all layers.
  const auto rows = static_cast<size_t>(reads.LeastSlots()) + config.layers.size();
  return copies + static_cast<size_t>(max_sessions) * rows * (row_bytes + 2 * sizeof(int32_t));
}

void SendToDisk(const ModelConfig& config, const DeclaredReads& reads, int32_t max_sessions,
                size_t host, bool all, MemoryPlan& plan) {
  std::vector<size_t> may_go;
  for (size_t layer = 0; layer < plan.tiers.size(); ++layer) {
    const bool beside = plan.tiers[layer] == TierKind::kHost;
    if (beside && MayLieOnDisk(config, reads, plan, layer)) may_go.push_back(layer);
  }
  plan.on_disk = false;
  plan.disk_layers.clear();
  plan.kv_disk = plan.disk_way = 0;
  if (may_go.empty()) return;
  const size_t way = WayBytes(config, reads, plan, max_sessions);
  for (size_t n = all ? may_go.size() : 0; n <= may_go.size(); ++n) {
    plan.on_disk = n > 0;
    plan.disk_layers.assign(n > 0 ? config.layers.size() : 0, false);
    for (size_t i = may_go.size() - n; i < may_go.size(); ++i) plan.disk_layers[may_go[i]] = true;
    plan.kv_disk = Bank::ReservedOnDisk(MakeBankConfig(config, plan, max_sessions));
    plan.disk_way = n > 0 ? way : 0;
    if (plan.OnHost() <= host) return;
  }
}

}  // namespace omnikv
