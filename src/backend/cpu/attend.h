// Decode attention: the split of rows over pieces and threads, and their merge.
#pragma once

#include <vector>

#include "backend/cpu/attend_kernels.h"
#include "backend/cpu/matvec.h"
#include "base/thread_pool.h"

namespace omnikv {

// How many pieces a walk over the tokens of one list is cut into: `least`, or more of them, up to
// twice as many and at most `most`, where threads that take the pieces of `lists` such walks one by
// one then end together.
int32_t EvenPieces(int32_t least, int32_t most, int64_t lists, int32_t threads);

class CpuAttend {
 public:
  CpuAttend(ThreadPool& pool, const Isa& isa);

  // Makes room for `a`, and gives the floats of scratch that Run needs.
  size_t Reserve(const AttendArgs& a);

  // Rows [begin, end) of the step.
  void Run(const AttendArgs& a, int32_t begin, int32_t end, float* scratch);

 private:
  void RunRows(const AttendArgs& a, int32_t begin, int32_t end, float* scratch);
  void MakeGroups(const AttendArgs& a, int32_t begin, int32_t end);
  int32_t MaxPieces(int32_t n_rows) const;

  ThreadPool& pool_;
  const AttendKernels& kernels_;
  std::vector<AttendGroup> groups_;
  std::vector<AttendItem> items_;
};

}  // namespace omnikv
