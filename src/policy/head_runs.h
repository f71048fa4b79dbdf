// KV heads of a layer that take part in an attention: some of those of its view, in runs.
#pragma once

#include <cstdint>
#include <span>

#include "backend/backend.h"

namespace omnikv {

// KV heads after one another whose rows lie in one view.
struct HeadRun {
  int32_t begin = 0;  // AttendArgs::kv_head_begin
  int32_t count = 0;  // AttendArgs::kv_head_count; 0: all
  KvView kv;
};

// Of all runs, bit h for KV head h; 0: all heads, where there is no run.
inline uint64_t MaskOf(std::span<const HeadRun> runs) {
  uint64_t mask = 0;
  for (const HeadRun& run : runs) {
    for (int32_t h = run.begin; h < run.begin + run.count; ++h) mask |= uint64_t{1} << h;
  }
  return mask;
}

// Enqueues `attend` for the heads of each run, or as it is where there is no run.
inline void EnqueueRuns(Backend& backend, std::span<const HeadRun> runs, AttendArgs attend) {
  if (runs.empty()) backend.Enqueue(attend);
  for (const HeadRun& run : runs) {
    attend.kv = run.kv;
    attend.kv_head_begin = run.begin;
    attend.kv_head_count = run.count;
    backend.Enqueue(attend);
  }
}

}  // namespace omnikv
