// Which of the layers that leave a card lie on a disk, and not in the host's memory.
#pragma once

#include <cstdint>

#include "engine/placement.h"

namespace omnikv {

// Whether `layer` of a plan, whose K/V leave the card, may lie on a disk: steps bring it whole, or
// fetch its rows to slots. The card and the host reach no file in place. `reads`: by layer.
bool MayLieOnDisk(const ModelConfig& config, const DeclaredReads& reads, const MemoryPlan& plan,
                  size_t layer);

// Bytes of the host's memory through which K/V of a disk pass on their way to a card and back,
// within such a plan.
size_t WayBytes(const ModelConfig& config, const DeclaredReads& reads, const MemoryPlan& plan,
                int32_t max_sessions);

// Sends as few of those layers to the disk as make the others fit in `host` bytes, the last first,
// or `all` that may lie there; all too where that is not enough. Sets on_disk, disk_layers, kv_disk
// and disk_way of the plan, whose tiers and sets are made.
void SendToDisk(const ModelConfig& config, const DeclaredReads& reads, int32_t max_sessions,
                size_t host, bool all, MemoryPlan& plan);

}  // namespace omnikv
