// Which kernels a recorded graph holds, for tests that must know what they tested.
#pragma once

#include <cuda_runtime.h>

#include <string>
#include <string_view>
#include <vector>

namespace omnikv::cuda {

// Names of the graph's kernels as ShortName gives them, in the order of its nodes; "library", with
// the name where the runtime knows it, for kernels that are not ours, as cuBLASLt's.
std::vector<std::string> KernelNames(cudaGraph_t graph);

// A kernel's demangled name without its result, namespaces and parameters:
// "AttendKernel<__half, 128, 1, 16>".
std::string ShortName(std::string_view demangled);

}  // namespace omnikv::cuda
