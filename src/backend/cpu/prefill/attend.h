// Causal attention of many rows of one sequence over its plan: the O(n²) part of prefill.
//
// Rows are taken in blocks that share a KV head's queries; each block walks its tokens in tiles
// (FlashAttention: running maximum, running sum), a tile of K and V being converted once into
// cache-sized scratch and used by every query of the block. Tiles stand at multiples of
// prefill::kTileTokens from position 0, so results depend neither on the number of threads nor on
// how rows are cut into steps.
#pragma once

#include <cstdint>
#include <string>

#include "backend/cpu/prefill/gemm.h"
#include "backend/cpu/prefill/kernels.h"
#include "backend/ops.h"
#include "base/memory.h"
#include "base/thread_pool.h"
#include "omnikv/status.h"

namespace omnikv {

// Whether PrefillAttention runs these arguments: range segments only, no scores and no lse_in, head
// sizes in multiples of 8.
bool PrefillAttendSupports(const AttendArgs& args);

// Owns the scratch of one backend; one caller at a time.
class PrefillAttention {
 public:
  // kFast: K/V that are not f32 are multiplied in bf16 where the CPU does that faster (queries,
  // softmax weights and K/V rounded, sums in f32). kFull, and f32 K/V always: in f32.
  // `kernels` (tests): what runs K/V that are not f32, instead of the best that the CPU has.
  explicit PrefillAttention(ThreadPool& pool, GemmPrecision precision = GemmPrecision::kFast,
                            const prefill::AttendKernels* kernels = nullptr);

  // Takes the memory that attention of this geometry (heads, dk, dv, dtype) needs; outside of
  // steps, since Run never allocates. Fails with kResourceExhausted.
  Status Reserve(const AttendArgs& args);

  // o and lse of every row of sequence `seq`. REQUIRES PrefillAttendSupports and Reserve.
  void Run(const AttendArgs& args, int32_t seq);

  std::string Describe(const KvView& kv) const;  // "AMX bf16", "AVX512 bf16", "f32 (AVX3)"

 private:
  struct Layout;
  class Task;

  const prefill::AttendKernels& KernelsFor(const KvView& kv) const;

  ThreadPool& pool_;
  const GemmPrecision precision_;
  const prefill::VectorKernels& vector_;
  const prefill::AttendKernels* amx_;  // null: the CPU has none, like the next
  const prefill::AttendKernels* bf16_;
  Pages scratch_;  // [threads, Layout::words]
};

}  // namespace omnikv
