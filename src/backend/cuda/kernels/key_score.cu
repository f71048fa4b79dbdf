// Scores of tokens by their keys alone: KeyScore.
#include <algorithm>
#include <cstdint>

#include "backend/cuda/kernels/pack.cuh"

namespace omnikv::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kTokens = 4;       // that a lane loads before it uses one
constexpr int kMostParts = 128;  // of a sequence, whose directions are added up apart
constexpr int kPartTokens = 512;

// Lanes in groups, one for each token that a warp loads at a time: a lane has N neighbouring values
// of a key, and of keys that are longer than the lanes of a group, those lanes * N on.
template <typename T, int N>
struct Lanes {
  int lanes;  // of a group: a power of two
  int group, lane;

  __device__ explicit Lanes(int dk) : lanes(1) {
    while (lanes < 32 && lanes * N < dk) lanes *= 2;
    group = static_cast<int>(threadIdx.x) % 32 / lanes;
    lane = static_cast<int>(threadIdx.x) % lanes;
  }
  __device__ int Groups() const { return 32 / lanes; }
  __device__ float Sum(float v) const {
    for (int step = lanes / 2; step > 0; step /= 2) v += __shfl_xor_sync(kAllLanes, v, step);
    return v;
  }
};

template <typename T, int N>
__device__ __forceinline__ Pack<float, N> LoadKey(const KvPlane& plane, const std::byte* key,
                                                  int64_t to_scales, int at) {
  Pack<float, N> out;
  if constexpr (kInBlocks<T>) {
#pragma unroll
    for (int j = 0; j < N; ++j) out.v[j] = HeadValue<T>(key, to_scales, at + j);
  } else {
    const auto raw = LoadPack<N>(reinterpret_cast<const T*>(key) + at);
#pragma unroll
    for (int j = 0; j < N; ++j) out.v[j] = ToF32(raw.v[j]);
  }
  return out;
}

__device__ __forceinline__ const std::byte* KeyOf(const KvView& kv, const SeqMeta& seq, int t,
                                                  int head) {
  return kv.k.Head(kv.RowIndex(seq.table_off, t), head);
}

// How a sequence is cut, the same on every card.
struct Parts {
  int n, tokens;
  __device__ explicit Parts(int kv_len) {
    n = min(kMostParts, (kv_len + kPartTokens - 1) / kPartTokens);
    tokens = n == 0 ? 0 : (kv_len + n - 1) / n;
  }
};

// sums [n_seqs, n_kv_heads, kMostParts, dk]: of k / |k| over the tokens of a part. Grid: x parts,
// y KV heads, z sequences. Shared memory: f32 [groups of the block, dk].
template <typename T, int N>
__global__ void __launch_bounds__(kThreads)
    DirectionsKernel(const __grid_constant__ KeyScoreArgs a, float* sums) {
  extern __shared__ float found[];
  GridTrigger();
  GridWait();
  const SeqMeta seq = a.seqs[blockIdx.z];
  const Parts parts(seq.q_len == 0 ? 0 : seq.kv_len);
  const auto part = static_cast<int>(blockIdx.x);
  if (part >= parts.n) return;
  const auto head = static_cast<int>(blockIdx.y);
  const int dk = a.kv.dk;
  const Lanes<T, N> of(dk);
  const int64_t to_scales = a.kv.k.ToScales(head);
  const int turn = static_cast<int>(threadIdx.x) / of.lanes;  // group of the block
  const int turns = kThreads / of.lanes;
  const int end = min(seq.kv_len, (part + 1) * parts.tokens);
  for (int i = static_cast<int>(threadIdx.x); i < turns * dk; i += kThreads) found[i] = 0;
  __syncthreads();
  float* own = found + turn * dk;
  // All lanes of a warp go round together: Sum is of all of them.
  for (int first = part * parts.tokens; first < end; first += turns) {
    const int t = first + turn;
    const std::byte* key = KeyOf(a.kv, seq, min(t, end - 1), head);
    float square = 0;
    for (int at = of.lane * N; at < dk; at += of.lanes * N) {
      const auto k = LoadKey<T, N>(a.kv.k, key, to_scales, at);
#pragma unroll
      for (int j = 0; j < N; ++j) square += k.v[j] * k.v[j];
    }
    square = of.Sum(square);
    if (t >= end || square == 0) continue;
    const float inverse = 1.0f / sqrtf(square);
    for (int at = of.lane * N; at < dk; at += of.lanes * N) {
      const auto k = LoadKey<T, N>(a.kv.k, key, to_scales, at);
#pragma unroll
      for (int j = 0; j < N; ++j) own[at + j] += k.v[j] * inverse;
    }
  }
  __syncthreads();
  float* out = sums + ((int64_t{blockIdx.z} * gridDim.y + head) * kMostParts + part) * dk;
  for (int i = static_cast<int>(threadIdx.x); i < dk; i += kThreads) {
    float sum = 0;
    for (int other = 0; other < turns; ++other) sum += found[other * dk + i];
    out[i] = sum;
  }
}

// Grid: x walks tiles of tokens, y KV heads, z sequences. Shared memory, of kUnlike: f32 [dk].
template <typename T, int N>
__global__ void __launch_bounds__(kThreads)
    KeyScoreKernel(const __grid_constant__ KeyScoreArgs a, const float* sums) {
  extern __shared__ float mean[];
  __shared__ float shared[32];
  GridTrigger();
  GridWait();
  const SeqMeta seq = a.seqs[blockIdx.z];
  if (seq.q_len == 0) return;
  const auto head = static_cast<int>(blockIdx.y);
  const int dk = a.kv.dk;
  const bool unlike = a.kind == KeyScoreKind::kUnlike;
  float mean_norm = 0;
  if (unlike) {
    const int64_t list = int64_t{blockIdx.z} * gridDim.y + head;
    const Parts parts(seq.kv_len);
    float square = 0;
    for (int i = static_cast<int>(threadIdx.x); i < dk; i += kThreads) {
      float sum = 0;
#pragma unroll 8
      for (int p = 0; p < parts.n; ++p) sum += sums[(list * kMostParts + p) * dk + i];
      mean[i] = sum;
      square += sum * sum;
    }
    mean_norm = sqrtf(BlockSum(square, shared));
    __syncthreads();
  }
  const Lanes<T, N> of(dk);
  const int64_t to_scales = a.kv.k.ToScales(head);
  const int groups = kThreads / of.lanes;
  const int turn = static_cast<int>(threadIdx.x) / of.lanes;
  const int tile = groups * kTokens;
  float* out = a.out + (int64_t{blockIdx.z} * gridDim.y + head) * a.stride;
  for (int64_t begin = int64_t{blockIdx.x} * tile; begin < seq.kv_len;
       begin += int64_t{gridDim.x} * tile) {
    const int first = static_cast<int>(begin) + turn;  // a group's tokens lie `groups` apart
    const std::byte* key[kTokens];
    float square[kTokens] = {};
    float dot[kTokens] = {};
#pragma unroll
    for (int u = 0; u < kTokens; ++u) {
      key[u] = KeyOf(a.kv, seq, min(first + u * groups, seq.kv_len - 1), head);
    }
    for (int at = of.lane * N; at < dk; at += of.lanes * N) {
      Pack<float, N> k[kTokens];
#pragma unroll
      for (int u = 0; u < kTokens; ++u) k[u] = LoadKey<T, N>(a.kv.k, key[u], to_scales, at);
#pragma unroll
      for (int u = 0; u < kTokens; ++u) {
#pragma unroll
        for (int j = 0; j < N; ++j) {
          square[u] += k[u].v[j] * k[u].v[j];
          if (unlike) dot[u] += k[u].v[j] * mean[at + j];
        }
      }
    }
#pragma unroll
    for (int u = 0; u < kTokens; ++u) {
      float score = sqrtf(of.Sum(square[u]));
      if (unlike) {
        const float product = of.Sum(dot[u]);
        const float norms = score * mean_norm;
        score = norms > 0 ? product / norms : 0.0f;
      }
      const int t = first + u * groups;
      if (of.lane == 0 && t < seq.kv_len) out[t] = -score;
    }
  }
}

template <typename T, int N>
void LaunchKeyScore(const KeyScoreArgs& args, const Launch& launch) {
  const auto heads = static_cast<uint32_t>(args.kv.n_kv_heads);
  const auto seqs = static_cast<uint32_t>(args.n_seqs);
  const auto row = sizeof(float) * static_cast<size_t>(args.kv.dk);
  int lanes = 1;
  while (lanes < 32 && lanes * N < args.kv.dk) lanes *= 2;
  auto* sums = reinterpret_cast<float*>(launch.scratch);
  if (args.kind == KeyScoreKind::kUnlike) {
    const size_t shared = row * static_cast<size_t>(kThreads / lanes);
    AllowShared(DirectionsKernel<T, N>, shared);
    LaunchKernel(DirectionsKernel<T, N>, launch, dim3(kMostParts, heads, seqs), kThreads, shared,
                 args, sums);
  }
  const int64_t tiles = CeilDiv(args.stride, int64_t{kThreads} / lanes * kTokens);
  const int64_t walkers = std::max<int64_t>(1, 8 * launch.device->sm_count / heads);
  LaunchKernel(KeyScoreKernel<T, N>, launch,
               dim3(static_cast<uint32_t>(std::min(tiles, walkers)), heads, seqs), kThreads, row,
               args, sums);
}

}  // namespace

size_t KeyScoreScratch(const KeyScoreArgs& args) {
  if (args.kind != KeyScoreKind::kUnlike) return 0;
  return sizeof(float) *
         static_cast<size_t>(int64_t{args.n_seqs} * args.kv.n_kv_heads * kMostParts * args.kv.dk);
}

void KeyScore(const KeyScoreArgs& args, const Launch& launch) {
  if (args.n_seqs == 0 || args.stride == 0) return;
  const KvView& kv = args.kv;
  WithKvType(kv.k.dtype, [&](auto t) {
    using T = decltype(t);
    // In blocks: a run of neighbours that the compiler joins.
    constexpr int kWide = kInBlocks<T> ? 4 : 16 / sizeof(T);
    const bool wide =
        kv.dk % kWide == 0 && AreMultiples(16, kv.k.base, kv.k.row_bytes, kv.k.head_bytes);
    if (wide) return LaunchKeyScore<T, kWide>(args, launch);
    LaunchKeyScore<T, 1>(args, launch);
  });
}

}  // namespace omnikv::cuda
