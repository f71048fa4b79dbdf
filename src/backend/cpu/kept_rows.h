#pragma once

#include "backend/ops.h"
#include "base/thread_pool.h"

namespace omnikv {

void CpuStoreRows(const StoreRowsArgs& a, ThreadPool& pool);
void CpuCompact(const CompactArgs& a, ThreadPool& pool);
void CpuEvict(const EvictArgs& a, ThreadPool& pool);
void CpuUndoEvict(const UndoEvictArgs& a);

}  // namespace omnikv
