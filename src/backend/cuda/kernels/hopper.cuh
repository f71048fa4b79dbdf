// Instructions of Hopper cards (sm_90a): barriers in shared memory, bulk tensor copies, products of
// warp groups. Elsewhere they do nothing; no kernel that uses them is launched there.
#pragma once

#include "backend/cuda/kernels/cluster.cuh"
#include "backend/cuda/kernels/tensor_map.h"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define OMNIKV_SM90A 1
#else
#define OMNIKV_SM90A 0
#endif

namespace omnikv::cuda {

// Whether what uses this file does something there.
inline bool RunsHopperCode([[maybe_unused]] const Device& device) {
#ifdef OMNIKV_HAVE_SM90A
  return device.arch == 90;
#else
  return false;
#endif
}

// --- Barriers in shared memory: `count` arrivals and the bytes of copies complete a phase. Phases
// are numbered by their parity, 0 first.

__device__ __forceinline__ void InitBarrier(uint64_t* barrier, int count) {
#if OMNIKV_SM90A
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(SharedAddress(barrier)), "r"(count)
               : "memory");
#endif
}

// Behind the initialisations, before the block's barrier that lets other threads at them.
__device__ __forceinline__ void FenceBarrierInit() {
#if OMNIKV_SM90A
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

__device__ __forceinline__ void Arrive(uint64_t* barrier) {
#if OMNIKV_SM90A
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(SharedAddress(barrier))
               : "memory");
#endif
}

// At the barrier of block `block` of the cluster; tells nothing of what this thread wrote.
__device__ __forceinline__ void ArriveAt(uint64_t* barrier, int block) {
#if OMNIKV_SM90A
  asm volatile(
      "{.reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [there];}" ::"r"(
          SharedAddress(barrier)),
      "r"(block)
      : "memory");
#endif
}

// The address that shared memory of block `block` of the cluster has for what lies at `shared`
// here.
__device__ __forceinline__ uint32_t AddressIn(const void* shared, int block) {
  uint32_t there = 0;
#if OMNIKV_SM90A
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(there)
      : "r"(SharedAddress(shared)), "r"(block));
#endif
  return there;
}

// Sends values to such an address; their bytes count at `barrier`, one of the same block, behind
// which they can be read.
__device__ __forceinline__ void Send(uint32_t to, float v, uint32_t barrier) {
#if OMNIKV_SM90A
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(to),
      "f"(v), "r"(barrier)
      : "memory");
#endif
}
__device__ __forceinline__ void Send(uint32_t to, float v, float w, uint32_t barrier) {
#if OMNIKV_SM90A
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::
          "r"(to),
      "f"(v), "f"(w), "r"(barrier)
      : "memory");
#endif
}

// Arrives, and has the phase wait for `bytes` of copies as well.
__device__ __forceinline__ void ArriveExpect(uint64_t* barrier, int bytes) {
#if OMNIKV_SM90A
  asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(
                   SharedAddress(barrier)),
               "r"(bytes)
               : "memory");
#endif
}

// Waits for the end of a phase.
__device__ __forceinline__ void Wait(uint64_t* barrier, uint32_t parity) {
#if OMNIKV_SM90A
  for (;;) {
    uint32_t done;
    asm volatile(
        "{.reg .pred p;\n"
        "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\n"
        "selp.b32 %0, 1, 0, p;}"
        : "=r"(done)
        : "r"(SharedAddress(barrier)), "r"(parity)
        : "memory");
    if (done != 0) return;
  }
#endif
}

// A barrier of kThreads threads of the block, whole warps of them: some only arrive.
template <int kThreads>
__device__ __forceinline__ void SyncArrive() {
  asm volatile("barrier.cta.arrive.aligned 1, %0;" ::"n"(kThreads) : "memory");
}
template <int kThreads>
__device__ __forceinline__ void Sync() {
  asm volatile("barrier.cta.sync.aligned 1, %0;" ::"n"(kThreads) : "memory");
}

// --- Copies and fences.

// A box of `map`, at these coordinates, to shared memory; its bytes count at the barrier.
__device__ __forceinline__ void CopyBox(void* to, const CUtensorMap* map, uint64_t* barrier, int i,
                                        int j, int k) {
#if OMNIKV_SM90A
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(SharedAddress(to)),
      "l"(map), "r"(SharedAddress(barrier)), "r"(i), "r"(j), "r"(k)
      : "memory");
#endif
}

// `bytes` in one piece, a multiple of 16 as both addresses are.
__device__ __forceinline__ void CopyBulk(void* to, const void* from, uint64_t* barrier, int bytes) {
#if OMNIKV_SM90A
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %3, [%2];" ::
          "r"(SharedAddress(to)),
      "l"(from), "r"(SharedAddress(barrier)), "r"(bytes)
      : "memory");
#endif
}

// The same of bytes that are read once: they leave the L2 cache before all others.
__device__ __forceinline__ void CopyBulkOnce(void* to, const void* from, uint64_t* barrier,
                                             int bytes) {
#if OMNIKV_SM90A
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1], "
      "%3, [%2], %4;" ::"r"(SharedAddress(to)),
      "l"(from), "r"(SharedAddress(barrier)), "r"(bytes), "l"(policy)
      : "memory");
#endif
}

__device__ __forceinline__ void PrefetchMap(const CUtensorMap* map) {
#if OMNIKV_SM90A
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
#endif
}

// What this thread stored to shared memory, or others before a barrier that it waited for, can be
// read by products of warp groups. It waits for all copies to shared memory that this thread has
// under way.
__device__ __forceinline__ void FenceForProducts() {
#if OMNIKV_SM90A
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// The registers of each thread of the warp group.
template <int kRegisters>
__device__ __forceinline__ void TakeRegisters() {
#if OMNIKV_SM90A
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}
template <int kRegisters>
__device__ __forceinline__ void LeaveRegisters() {
#if OMNIKV_SM90A
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}

// --- Products of warp groups, bf16 (or f16) with sums in f32: d [64, kN] += a [64, 16] b [kN,
// 16]^T, both in shared memory. Warp w of the group has rows 16 w to 16 w + 15 of d; lane l of it,
// g = l / 4 and t = l % 4, has in d[4 j .. 4 j + 3] columns 8 j + 2 t and 8 j + 2 t + 1, first of
// row g, then of row g + 8.

// Where an operand lies: rows of 128 bytes (64 values), swizzled within 8 of them; each 8 rows lie
// together at a multiple of 1024 bytes, `stride` bytes from the next 8. Values 16 i to 16 i + 15 of
// each row begin 32 i bytes further.
__device__ __forceinline__ uint64_t Descriptor(const void* rows, int stride) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  return kSwizzle128 | static_cast<uint64_t>(stride / 16) << 32 | uint64_t{1} << 16 |
         (SharedAddress(rows) & 0x3ffff) >> 4;
}
// The descriptor `bytes` further on.
__device__ __forceinline__ uint64_t Advance(uint64_t descriptor, int bytes) {
  return descriptor + static_cast<uint32_t>(bytes) / 16;
}

__device__ __forceinline__ void ProductsFence() {
#if OMNIKV_SM90A
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void ProductsCommit() {
#if OMNIKV_SM90A
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
// Until all are done. The sums, which the compiler must not read before.
template <int kSums>
__device__ __forceinline__ void ProductsWait(float (&d)[kSums]) {
#if OMNIKV_SM90A
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#endif
#pragma unroll
  for (int i = 0; i < kSums; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

#define OMNIKV_F8(i)                                                                          \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define OMNIKV_F32 OMNIKV_F8(0), OMNIKV_F8(8), OMNIKV_F8(16), OMNIKV_F8(24)
#define OMNIKV_R32                                                         \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define OMNIKV_R48 \
  OMNIKV_R32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define OMNIKV_R64 \
  OMNIKV_R48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
// `n`, `type`, registers of d, and the operands that follow them: a, b, add.
#define OMNIKV_PRODUCTS(n, type, registers, a_at, b_at, add_at)                             \
  "{.reg .pred p;\nsetp.ne.b32 p, %" add_at                                                 \
  ", 0;\n"                                                                                  \
  "wgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type " {" registers "}, %" a_at \
  ", %" b_at ", p, 1, 1, 0, 0;}"

// `add`: false: d = a b^T.
template <int kN, bool kF16 = false>
__device__ __forceinline__ void Products(float (&d)[kN / 2], uint64_t a, uint64_t b, bool add) {
#if OMNIKV_SM90A
  static_assert(kN == 128 || (!kF16 && (kN == 64 || kN == 96 || kN == 112)));
  if constexpr (kN == 64) {
    asm volatile(OMNIKV_PRODUCTS("64", "bf16", OMNIKV_R32, "32", "33", "34")
                 : OMNIKV_F32
                 : "l"(a), "l"(b), "r"(int{add}));
  } else if constexpr (kN == 96) {
    asm volatile(OMNIKV_PRODUCTS("96", "bf16", OMNIKV_R48, "48", "49", "50")
                 : OMNIKV_F32, OMNIKV_F8(32), OMNIKV_F8(40)
                 : "l"(a), "l"(b), "r"(int{add}));
  } else if constexpr (kN == 112) {
    asm volatile(
        OMNIKV_PRODUCTS("112", "bf16", OMNIKV_R48 ", %48, %49, %50, %51, %52, %53, %54, %55", "56",
                        "57", "58")
        : OMNIKV_F32, OMNIKV_F8(32), OMNIKV_F8(40), OMNIKV_F8(48)
        : "l"(a), "l"(b), "r"(int{add}));
  } else if constexpr (kF16) {
    asm volatile(OMNIKV_PRODUCTS("128", "f16", OMNIKV_R64, "64", "65", "66")
                 : OMNIKV_F32, OMNIKV_F8(32), OMNIKV_F8(40), OMNIKV_F8(48), OMNIKV_F8(56)
                 : "l"(a), "l"(b), "r"(int{add}));
  } else {
    asm volatile(OMNIKV_PRODUCTS("128", "bf16", OMNIKV_R64, "64", "65", "66")
                 : OMNIKV_F32, OMNIKV_F8(32), OMNIKV_F8(40), OMNIKV_F8(48), OMNIKV_F8(56)
                 : "l"(a), "l"(b), "r"(int{add}));
  }
#endif
}

#undef OMNIKV_F8
#undef OMNIKV_F32
#undef OMNIKV_R32
#undef OMNIKV_R48
#undef OMNIKV_R64
#undef OMNIKV_PRODUCTS

}  // namespace omnikv::cuda
