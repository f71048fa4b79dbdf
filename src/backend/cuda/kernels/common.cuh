// What kernels share on the device: dependent launch, numbers, reductions, asynchronous copies,
// addresses of K/V rows. Warps have 32 lanes everywhere.
//
// Between two launches of a kernel in a step gigabytes of weights pass through the caches, so that
// its code comes from memory each time: the less code, the faster. Loops that mostly run once or
// not at all are therefore kept rolled (#pragma unroll 1).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>
#include <utility>

#include "backend/cuda/launch.h"

namespace omnikv::cuda {

inline constexpr uint32_t kAllLanes = 0xffffffffu;
inline constexpr float kLog2E = 1.44269504f;

// 2^v, to a few units in the last place; 0 for results below the least normal number.
__device__ __forceinline__ float Exp2(float v) {
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(v));
  return out;
}

// Returns when the kernels launched before have ended and what they wrote can be read. Our kernels
// call it, in every thread that touches memory of an op, before it does, but for prefetches, what
// only leads to one (LoadEarly, a table), and LoadMeta<true>, where what it finds is confirmed
// behind the wait (FindEarly) or known to be written (MergeKernel).
__device__ __forceinline__ void GridWait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel of the stream start (it waits by itself). Called early.
__device__ __forceinline__ void GridTrigger() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Asks for the memory line of `p` to come into the second-level cache, from which a step's weights
// evict what layers share. Before GridWait too: values may still be written, and are not looked at.
__device__ __forceinline__ void PrefetchL2(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}
// The same of `bytes`, a multiple of 16 as `data` is.
__device__ __forceinline__ void PrefetchL2(const std::byte* data, int32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(data), "r"(bytes) : "memory");
#endif
}

// A sequence before GridWait, which says what else to ask for. It may be as an earlier step left
// it (before the first, zeros, as such memory is made), so nothing follows from it that is not
// looked at again after GridWait. Past the first-level cache, which would give the old values then.
__device__ __forceinline__ SeqMeta LoadEarly(const SeqMeta* seq) {
  return {.q_begin = __ldcg(&seq->q_begin),
          .q_len = __ldcg(&seq->q_len),
          .kv_len = __ldcg(&seq->kv_len),
          .table_off = __ldcg(&seq->table_off),
          .prompt_len = __ldcg(&seq->prompt_len)};
}

// A launch of a kernel that may start before the kernels ahead of it in the stream have ended (on
// cards before sm_90: after they have).
class KernelLaunch {
 public:
  // `cluster`: how many blocks lie in one; 0 where the kernel asks for none. Before sm_90 there are
  // none.
  KernelLaunch(const Launch& launch, dim3 grid, dim3 block, size_t shared_bytes, int cluster = 0) {
    config_.gridDim = grid;
    config_.blockDim = block;
    config_.dynamicSmemBytes = shared_bytes;
    config_.stream = launch.stream;
    config_.attrs = attributes_;
    if (launch.device->arch < 90) return;
    cudaLaunchAttribute& early = attributes_[config_.numAttrs++];
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    if (cluster == 0) return;
    cudaLaunchAttribute& blocks = attributes_[config_.numAttrs++];
    blocks.id = cudaLaunchAttributeClusterDimension;
    blocks.val.clusterDim = {static_cast<uint32_t>(cluster), 1, 1};
  }
  KernelLaunch(const KernelLaunch&) = delete;

  // How many clusters the card can run at a time; 0 where it cannot run one.
  template <typename Kernel>
  int MaxClusters(Kernel* kernel) const {
    int clusters = 0;
    if (cudaOccupancyMaxActiveClusters(&clusters, kernel, &config_) == cudaSuccess) return clusters;
    cudaGetLastError();  // an answer, not a failure
    return 0;
  }

  template <typename... Params, typename... Args>
  void Run(void (*kernel)(Params...), Args&&... args) const {
    CheckLaunch(cudaLaunchKernelEx(&config_, kernel, std::forward<Args>(args)...), "launch");
  }

 private:
  cudaLaunchConfig_t config_{};
  cudaLaunchAttribute attributes_[2]{};
};

// Such a launch, where nothing else is asked of it.
template <typename... Params, typename... Args>
void LaunchKernel(void (*kernel)(Params...), const Launch& launch, dim3 grid, dim3 block,
                  size_t shared_bytes, Args&&... args) {
  KernelLaunch(launch, grid, block, shared_bytes).Run(kernel, std::forward<Args>(args)...);
}

// What a block takes beside its dynamic shared memory: a kilobyte of static one, to which the
// dynamic part is aligned, and one of the system's.
inline constexpr size_t kBesideDynamic = 2048;

// Lets a kernel take `bytes` of dynamic shared memory; cheap when it may already.
template <typename Kernel>
void AllowShared(Kernel* kernel, size_t bytes) {
  if (bytes + kBesideDynamic <= 48 * 1024) return;
  CheckLaunch(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   static_cast<int>(bytes)),
              "shared memory");
}

// Dynamic shared memory of a block of which four fill a multiprocessor and a fifth finds no room.
inline size_t QuarterShared(const Device& device) {
  return device.shared_per_block / 5 / 128 * 128;
}

__host__ __device__ constexpr int64_t CeilDiv(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// --- Numbers.

__device__ __forceinline__ float ToF32(float v) {
  return v;
}
__device__ __forceinline__ float ToF32(int8_t v) {
  return static_cast<float>(v);
}
__device__ __forceinline__ float ToF32(__half v) {
  return __half2float(v);
}
__device__ __forceinline__ float ToF32(__nv_bfloat16 v) {
  return __bfloat162float(v);
}

template <typename T>
__device__ __forceinline__ T FromF32(float v);
template <>
__device__ __forceinline__ float FromF32<float>(float v) {
  return v;
}
// Saturates, as StoreKvValue does; NaN stays NaN.
template <>
__device__ __forceinline__ __half FromF32<__half>(float v) {
  return __float2half_rn(v > 65504.0f ? 65504.0f : v < -65504.0f ? -65504.0f : v);
}
template <>
__device__ __forceinline__ __nv_bfloat16 FromF32<__nv_bfloat16>(float v) {
  return __float2bfloat16_rn(v);
}

__device__ __forceinline__ float Activate(Activation act, float v) {
  if (act == Activation::kSilu) return v / (1.0f + expf(-v));
  return 0.5f * v * (1.0f + tanhf(0.7978845608028654f * (v + 0.044715f * v * v * v)));
}

__device__ __forceinline__ float Softcap(float v, float cap) {
  return cap > 0 ? cap * tanhf(v / cap) : v;
}

// Value `i` of an array of a type known at run time.
__device__ __forceinline__ float LoadValue(DType type, const std::byte* data, int64_t i) {
  switch (type) {
    case DType::kF32:
      return reinterpret_cast<const float*>(data)[i];
    case DType::kF16:
      return ToF32(reinterpret_cast<const __half*>(data)[i]);
    case DType::kBF16:
      return ToF32(reinterpret_cast<const __nv_bfloat16*>(data)[i]);
    case DType::kQ8_0: {
      const std::byte* block = data + i / int64_t{kQ8Block} * int64_t{kQ8BlockBytes};
      const float scale = ToF32(*reinterpret_cast<const __half*>(block));
      return scale *
             static_cast<float>(reinterpret_cast<const int8_t*>(block + 2)[i % int64_t{kQ8Block}]);
    }
    case DType::kQ4_0:  // of K and V only: KvValue
      break;
  }
  return 0;
}

__device__ __forceinline__ void StoreValue(DType type, std::byte* data, int64_t i, float v) {
  if (type == DType::kF32) reinterpret_cast<float*>(data)[i] = v;
  if (type == DType::kF16) reinterpret_cast<__half*>(data)[i] = FromF32<__half>(v);
  if (type == DType::kBF16) reinterpret_cast<__nv_bfloat16*>(data)[i] = FromF32<__nv_bfloat16>(v);
}

// What K and V in kQ4_0 are: two values a byte (kv_format.h). Those in kQ8_0 are int8_t.
struct Q4 {
  uint8_t pair;
};
template <typename T>
inline constexpr bool kInBlocks = std::is_same_v<T, int8_t> || std::is_same_v<T, Q4>;

// The low nibbles of four bytes of kQ4_0 as int8.
__device__ __forceinline__ uint32_t Q4Bytes(uint32_t pairs) {
  return __vsub4(pairs & 0x0f0f0f0fu, 0x08080808u);
}

// Value i of a head of K or V, whose values begin at `values`, and with kInBlocks its scales
// `to_scales` bytes on.
template <typename T>
__device__ __forceinline__ float HeadValue(const std::byte* values, int64_t to_scales, int i) {
  if constexpr (kInBlocks<T>) {
    constexpr int kBlock = kBlockValues;
    float v;
    if constexpr (std::is_same_v<T, Q4>) {
      const int pair = reinterpret_cast<const Q4*>(values)[i / kBlock * 16 + i % 16].pair;
      v = static_cast<float>((i % kBlock < 16 ? pair & 15 : pair >> 4) - 8);
    } else {
      v = ToF32(reinterpret_cast<const T*>(values)[i]);
    }
    return v * ToF32(reinterpret_cast<const __half*>(values + to_scales)[i / kBlock]);
  } else {
    return ToF32(reinterpret_cast<const T*>(values)[i]);
  }
}

// The same of a format known at run time.
__device__ __forceinline__ float KvValue(const KvPlane& plane, const std::byte* values, int head,
                                         int i) {
  if (plane.dtype == DType::kQ8_0) return HeadValue<int8_t>(values, plane.ToScales(head), i);
  if (plane.dtype == DType::kQ4_0) return HeadValue<Q4>(values, plane.ToScales(head), i);
  return LoadValue(plane.dtype, values, i);
}

// --- Reductions. All lanes get the result, which does not depend on timing.

__device__ __forceinline__ float WarpSum(float v) {
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) v += __shfl_xor_sync(kAllLanes, v, lane);
  return v;
}

__device__ __forceinline__ float WarpMax(float v) {
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) v = fmaxf(v, __shfl_xor_sync(kAllLanes, v, lane));
  return v;
}

// --- Formats of blocks.

// One warp: stores a block of K or V, of which each lane has a value, as StoreQ8Block and
// StoreQ4Block do. T: int8_t or Q4.
template <typename T>
__device__ __forceinline__ void StoreBlock(float v, std::byte* values, std::byte* scale_to) {
  static_assert(kInBlocks<T> && kBlockValues == 32);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const float most = WarpMax(fabsf(v));
  const bool spoiled = __any_sync(kAllLanes, isnan(v));  // the maximum loses a NaN
  __half stored;
  if constexpr (std::is_same_v<T, int8_t>) {
    stored = FromF32<__half>(spoiled ? NAN : __fdiv_rn(most, 127.0f));
    const float scale = ToF32(stored);
    const float q = scale > 0 ? rintf(__fdiv_rn(v, scale)) : 0.0f;
    reinterpret_cast<int8_t*>(values)[lane] = static_cast<int8_t>(fminf(fmaxf(q, -127.0f), 127.0f));
  } else {
    constexpr float kMost = 8 * 65504.0f;
    const int first = __ffs(__ballot_sync(kAllLanes, fabsf(v) == most)) - 1;
    const float signed_top = __shfl_sync(kAllLanes, v, max(first, 0));
    const float top = most > 0 ? fminf(fmaxf(signed_top, -kMost), kMost) : 0.0f;
    const float scale = spoiled ? NAN : __fdiv_rn(top, -8.0f);
    stored = FromF32<__half>(scale);
    const float inverse = ToF32(stored) != 0 ? __fdiv_rn(1.0f, scale) : 0.0f;
    const float near = __fadd_rn(__fmul_rn(v, inverse), 8.5f);
    const int code = near > 0 ? static_cast<int>(fminf(near, 15.0f)) : 0;
    const int upper = __shfl_down_sync(kAllLanes, code, 16);
    const auto pair = static_cast<uint8_t>(code | upper << 4);
    if (lane < 16) reinterpret_cast<Q4*>(values)[lane].pair = pair;
  }
  if (lane == 0) *reinterpret_cast<__half*>(scale_to) = stored;
}

// Sum over the block; `shared` holds 32 floats and may be used again after the next barrier.
__device__ __forceinline__ float BlockSum(float v, float* shared) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int n_warps = static_cast<int>(blockDim.x + 31) / 32;
  v = WarpSum(v);
  if (lane == 0) shared[warp] = v;
  __syncthreads();
  return WarpSum(lane < n_warps ? shared[lane] : 0.0f);
}

// --- Asynchronous copies, global to shared, 16 bytes a lane, past the first-level cache. Where a
// warp's 512 bytes start must be a multiple of 128 on both sides: a line that straddles two lines
// of shared memory is asked for twice, which costs a quarter of the bandwidth (measured, H200).

__device__ __forceinline__ uint32_t SharedAddress(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void CopyAsync16(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(SharedAddress(shared)), "l"(global)
               : "memory");
}

// Zeroes the 16 bytes instead when `valid` is false; `global` is then not read.
__device__ __forceinline__ void CopyAsync16(void* shared, const void* global, bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(SharedAddress(shared)),
               "l"(global), "r"(bytes)
               : "memory");
}

// A word, through the first-level cache; zero when `valid` is false.
__device__ __forceinline__ void CopyAsync4(void* shared, const void* global, bool valid) {
  const int bytes = valid ? 4 : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(SharedAddress(shared)),
               "l"(global), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void CopyAsyncCommit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most `kPending` of this thread's groups are under way.
template <int kPending>
__device__ __forceinline__ void CopyAsyncWait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace omnikv::cuda
