// Ops that read and write rows of activations: embedding, rotation tables, residuals, norms,
// rotation and append, and what follows a product. All are bound by memory (many rows) or by
// latency (one row).
#include "backend/cuda/kernels/pack.cuh"

namespace omnikv::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kWide = 4;  // floats a thread moves at once, where alignment allows

// The dimensions of a grid of blocks of kThreads packs for each of n_rows rows.
dim3 RowGrid(int64_t n_rows, int64_t packs) {
  return {static_cast<uint32_t>(n_rows), static_cast<uint32_t>(CeilDiv(packs, kThreads))};
}

__global__ void __launch_bounds__(kThreads) EmbedKernel(EmbedArgs a) {
  GridTrigger();
  GridWait();
  const int64_t row = blockIdx.x;
  const int64_t i = int64_t{blockIdx.y} * kThreads + threadIdx.x;
  if (i >= a.table.n_in) return;
  const auto* data = static_cast<const std::byte*>(a.table.data);
  const std::byte* from = data + a.tokens[row] * a.table.row_bytes;
  a.x[row * a.table.n_in + i] = a.scale * LoadValue(a.table.format, from, i);
}

__global__ void __launch_bounds__(kThreads) RopeTableKernel(RopeTableArgs a) {
  GridTrigger();
  GridWait();
  const int64_t row = blockIdx.x;
  const int i = static_cast<int>(blockIdx.y * kThreads + threadIdx.x);
  if (i >= a.n_freq) return;
  // Rounded as the reference rounds: a product in f32, its functions in double.
  const float angle = __fmul_rn(static_cast<float>(a.rows[row].pos), a.inv_freq[i]);
  double s;
  double c;
  sincos(static_cast<double>(angle), &s, &c);
  float* out = a.cos_sin + (row * a.n_freq + i) * 2;
  out[0] = __fmul_rn(static_cast<float>(c), a.magnitude);
  out[1] = __fmul_rn(static_cast<float>(s), a.magnitude);
}

// 1 / rms(v), in every thread of the block. `sums` (32 floats) is free after the next barrier.
template <int N>
__device__ __forceinline__ float InverseRms(const float* v, int n, float eps, float* sums) {
  float sum = 0;
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x) * N; i < n; i += kThreads * N) {
    const Pack<float, N> p = LoadPack<N>(v + i);
#pragma unroll
    for (int j = 0; j < N; ++j) sum += p.v[j] * p.v[j];
  }
  return 1.0f / sqrtf(BlockSum(sum, sums) / static_cast<float>(n) + eps);
}

// Grid: x rows; y parts of a row, one where y is normed.
template <int N>
__global__ void __launch_bounds__(kThreads) AddResidualKernel(Residual in) {
  __shared__ float sums[32];
  GridTrigger();
  GridWait();
  float* x = in.x + int64_t{blockIdx.x} * in.d;
  const float* y = in.y + int64_t{blockIdx.x} * in.d;
  const bool normed = in.post_norm != nullptr;
  const float inv = normed ? InverseRms<N>(y, in.d, in.eps, sums) : 1.0f;
  const int step = static_cast<int>(gridDim.y) * kThreads * N;
#pragma unroll 4
  for (int i = static_cast<int>(blockIdx.y * kThreads + threadIdx.x) * N; i < in.d; i += step) {
    Pack<float, N> sum = LoadPack<N>(x + i);
    Pack<float, N> delta = LoadPack<N>(y + i);
    if (normed) {
      const Pack<float, N> w = LoadPack<N>(in.post_norm + i);
#pragma unroll
      for (int j = 0; j < N; ++j) delta.v[j] *= inv * w.v[j];
    }
#pragma unroll
    for (int j = 0; j < N; ++j) sum.v[j] += in.scale * delta.v[j];
    StorePack(x + i, sum);
  }
}

// One block a row of h.
template <typename T, int N>
__global__ void __launch_bounds__(kThreads)
    NormKernel(const float* x, const float* norm, float eps, int d, T* h) {
  __shared__ float sums[32];
  GridTrigger();
  GridWait();
  const float* from = x + int64_t{blockIdx.x} * d;
  T* to = h + int64_t{blockIdx.x} * d;
  const float inv = norm != nullptr ? InverseRms<N>(from, d, eps, sums) : 1.0f;
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x) * N; i < d; i += kThreads * N) {
    Pack<float, N> v = LoadPack<N>(from + i);
    if (norm != nullptr) {
      const Pack<float, N> w = LoadPack<N>(norm + i);
#pragma unroll
      for (int j = 0; j < N; ++j) v.v[j] *= inv * w.v[j];
    }
    StorePack(to + i, v);
  }
}

template <typename T, int N>
__global__ void __launch_bounds__(kThreads) ConvertKernel(const float* in, int64_t n, T* out) {
  GridTrigger();
  GridWait();
  const int64_t i = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * N;
  if (i < n) StorePack(out + i, LoadPack<N>(in + i));
}

template <typename In, typename Out, int N>
__global__ void __launch_bounds__(kThreads)
    GatedKernel(Activation act, const In* gate, const In* up, Out* out, int64_t n) {
  GridTrigger();
  GridWait();
  const int64_t i = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * N;
  if (i >= n) return;
  const Pack<In, N> g = LoadPack<N>(gate + i);
  const Pack<In, N> u = LoadPack<N>(up + i);
  Pack<float, N> v;
#pragma unroll
  for (int j = 0; j < N; ++j) v.v[j] = Activate(act, ToF32(g.v[j])) * ToF32(u.v[j]);
  StorePack(out + i, v);
}

// One warp: out = head, normed (norm not null: times inv and its weights) and rotated. `out` may be
// `head`: a lane writes only what it alone has read.
template <int N, typename T>
__device__ __forceinline__ void RotateHead(const float* head, const float* norm, float inv,
                                           const float* cos_sin, int n_freq, int dk, T* out) {
  const int first = static_cast<int>(threadIdx.x) % 32 * N;
  const auto load = [&](int i) {
    Pack<float, N> v = LoadPack<N>(head + i);
    if (norm != nullptr) {
      const Pack<float, N> w = LoadPack<N>(norm + i);
#pragma unroll
      for (int j = 0; j < N; ++j) v.v[j] *= inv * w.v[j];
    }
    return v;
  };
  const auto store = [&](int i, const Pack<float, N>& v) { StorePack(out + i, v); };
#pragma unroll 1
  for (int i = first; i < n_freq; i += 32 * N) {
    Pack<float, N> low = load(i);
    Pack<float, N> high = load(i + n_freq);
    const Pack<float, 2 * N> cs = LoadPack<2 * N>(cos_sin + 2 * i);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const float c = cs.v[2 * j];
      const float s = cs.v[2 * j + 1];
      const float l = low.v[j];
      const float h = high.v[j];
      low.v[j] = l * c - h * s;
      high.v[j] = h * c + l * s;
    }
    store(i, low);
    store(i + n_freq, high);
  }
#pragma unroll 2
  for (int i = 2 * n_freq + first; i < dk; i += 32 * N) store(i, load(i));
}

// One warp: the same, in blocks (StoreBlock). `out` and `scales` are not `head`.
template <typename T>
__device__ __forceinline__ void RotateToBlocks(const float* head, const float* norm, float inv,
                                               const float* cos_sin, int n_freq, int dk,
                                               std::byte* out, std::byte* scales) {
  constexpr int kBlock = kBlockValues;
  constexpr int kBytes = std::is_same_v<T, Q4> ? kBlock / 2 : kBlock;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto load = [&](int i) { return norm != nullptr ? head[i] * (inv * norm[i]) : head[i]; };
  for (int first = 0; first < dk; first += kBlock) {
    const int i = first + lane;
    float v = load(i);
    if (i < 2 * n_freq) {
      const bool upper = i >= n_freq;
      const int at = upper ? i - n_freq : i;
      const float c = cos_sin[2 * at];
      const float s = cos_sin[2 * at + 1];
      const float other = load(upper ? at : i + n_freq);
      v = upper ? v * c + other * s : v * c - other * s;
    }
    StoreBlock<T>(v, out + first / kBlock * kBytes, scales + first / kBlock * 2);
  }
}

// 1 / rms of a head, in every lane of a warp.
template <int N>
__device__ __forceinline__ float HeadInverseRms(const float* head, int dk, float eps) {
  float sum = 0;
  for (int i = static_cast<int>(threadIdx.x) % 32 * N; i < dk; i += 32 * N) {
    const Pack<float, N> v = LoadPack<N>(head + i);
#pragma unroll
    for (int j = 0; j < N; ++j) sum += v.v[j] * v.v[j];
  }
  const float inv = 1.0f / sqrtf(WarpSum(sum) / static_cast<float>(dk) + eps);
  __syncwarp();  // other lanes write what this one has read
  return inv;
}

// Grid: x rows; y shares the heads of a row, a warp each (QkNorm::kFull: one block a row, which
// needs all heads). T: the bank's type.
template <typename T, int N>
__global__ void __launch_bounds__(kThreads)
    RopeAppendKernel(const NormQkvRopeAppendArgs a, const float* k, const float* v) {
  __shared__ float sums[2][32];
  GridTrigger();
  GridWait();
  const int64_t row = blockIdx.x;
  const int dk = a.kv.dk;
  const int dv = a.kv.dv;
  const int n_kv = a.kv.n_kv_heads;
  float* q_row = a.q + row * a.n_heads * dk;
  const float* k_row = k + row * n_kv * dk;
  const float* v_row = v + row * n_kv * dv;
  const RowMeta meta = a.rows[row];
  const KvTarget to = TargetOf(a, meta);
  const bool rotated = a.cos_sin != nullptr;
  const float* cos_sin = rotated ? a.cos_sin + row * a.n_freq * 2 : nullptr;
  const int n_freq = rotated ? a.n_freq : 0;

  const bool full = a.qk_norm == QkNorm::kFull;
  const bool per_head = a.qk_norm == QkNorm::kPerHead;
  const float q_inv = full ? InverseRms<N>(q_row, a.n_heads * dk, a.qk_norm_eps, sums[0]) : 1.0f;
  const float k_inv = full ? InverseRms<N>(k_row, n_kv * dk, a.qk_norm_eps, sums[1]) : 1.0f;
  const auto rotate = [&](const float* head, const float* norm, int h, float inv, auto* out,
                          [[maybe_unused]] std::byte* scales) {
    if (per_head) inv = HeadInverseRms<N>(head, dk, a.qk_norm_eps);
    const float* weights = full ? norm + h * dk : per_head ? norm : nullptr;
    using Out = std::remove_pointer_t<decltype(out)>;
    if constexpr (kInBlocks<Out>) {
      RotateToBlocks<Out>(head, weights, inv, cos_sin, n_freq, dk,
                          reinterpret_cast<std::byte*>(out), scales);
    } else {
      RotateHead<N>(head, weights, inv, cos_sin, n_freq, dk, out);
    }
  };

  const int warp = static_cast<int>(blockIdx.y * kWarps + threadIdx.x / 32);
  for (int item = warp; item < a.n_heads + 2 * n_kv; item += static_cast<int>(gridDim.y) * kWarps) {
    if (item < a.n_heads) {
      float* head = q_row + item * dk;
      rotate(head, a.q_norm, item, q_inv, head, nullptr);
    } else if (item < a.n_heads + n_kv) {
      const int h = item - a.n_heads;
      std::byte* out = to.k + h * a.kv.k.head_bytes;
      rotate(k_row + h * dk, a.k_norm, h, k_inv, reinterpret_cast<T*>(out),
             out + a.kv.k.ToScales(h));
    } else {
      const int h = item - a.n_heads - n_kv;
      std::byte* out = to.v + h * a.kv.v.head_bytes;
      if constexpr (kInBlocks<T>) {
        RotateToBlocks<T>(v_row + h * dv, nullptr, 1.0f, nullptr, 0, dv, out,
                          out + a.kv.v.ToScales(h));
      } else {
        RotateHead<N>(v_row + h * dv, nullptr, 1.0f, nullptr, 0, dv, reinterpret_cast<T*>(out));
      }
    }
  }
}

// The same without norms, where heads of q, k and v have one size and are rotated whole: a block
// for each row, whose threads have kTogether items under way, four values of the lower half of a
// head and four of the upper.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    RotateAppendKernel(const NormQkvRopeAppendArgs a, const float* k, const float* v) {
  constexpr int kTogether = 3;
  GridTrigger();
  GridWait();
  const int64_t row = blockIdx.x;
  const int dk = a.kv.dk;
  const int n_kv = a.kv.n_kv_heads;
  const int head_items = dk / (2 * kWide);
  const int n_items = (a.n_heads + 2 * n_kv) * head_items;
  float* const q_row = a.q + row * a.n_heads * dk;
  const float* const k_row = k + row * n_kv * dk;
  const float* const v_row = v + row * n_kv * dk;
  const float* const cos_sin = a.cos_sin + row * dk;
  const KvTarget to = TargetOf(a, a.rows[row]);
  for (int first = static_cast<int>(threadIdx.x); first < n_items; first += kTogether * kThreads) {
    Pack<float, kWide> low[kTogether];
    Pack<float, kWide> high[kTogether];
    Pack<float, 2 * kWide> turn[kTogether];  // cosines and sines
    const auto each = [&](auto&& use) {
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        const int item = first + j * kThreads;
        const int head = item / head_items;
        if (item < n_items) use(j, head, (item - head * head_items) * kWide);
      }
    };
    each([&](int j, int head, int i) {
      const int kv_head = head - a.n_heads;
      const float* from = kv_head < 0      ? q_row + head * dk
                          : kv_head < n_kv ? k_row + kv_head * dk
                                           : v_row + (kv_head - n_kv) * dk;
      low[j] = LoadPack<kWide>(from + i);
      high[j] = LoadPack<kWide>(from + dk / 2 + i);
      if (kv_head < n_kv) turn[j] = LoadPack<2 * kWide>(cos_sin + 2 * i);
    });
    each([&](int j, int head, int i) {
      const int kv_head = head - a.n_heads;
      if (kv_head < n_kv) {
#pragma unroll
        for (int x = 0; x < kWide; ++x) {
          const float c = turn[j].v[2 * x];
          const float s = turn[j].v[2 * x + 1];
          const float l = low[j].v[x];
          const float h = high[j].v[x];
          low[j].v[x] = l * c - h * s;
          high[j].v[x] = h * c + l * s;
        }
      }
      const auto store = [&](auto* out) {
        StorePack(out + i, low[j]);
        StorePack(out + dk / 2 + i, high[j]);
      };
      if (kv_head < 0) return store(q_row + head * dk);
      store(reinterpret_cast<T*>(kv_head < n_kv ? to.k + kv_head * a.kv.k.head_bytes
                                                : to.v + (kv_head - n_kv) * a.kv.v.head_bytes));
    });
  }
}

// Grid: rows. A warp a head.
__global__ void __launch_bounds__(kThreads)
    RawKeysKernel(const NormQkvRopeAppendArgs a, const float* k) {
  __shared__ float sums[32];
  GridTrigger();
  GridWait();
  const int dk = a.kv.dk;
  const int n_kv = a.kv.n_kv_heads;
  const int64_t row = int64_t{blockIdx.x} * n_kv * dk;
  const bool full = a.qk_norm == QkNorm::kFull;
  const bool per_head = a.qk_norm == QkNorm::kPerHead;
  const float row_inv = full ? InverseRms<1>(k + row, n_kv * dk, a.qk_norm_eps, sums) : 1.0f;
  for (int h = static_cast<int>(threadIdx.x) / 32; h < n_kv; h += kWarps) {
    const float* head = k + row + h * dk;
    const float inv = per_head ? HeadInverseRms<1>(head, dk, a.qk_norm_eps) : row_inv;
    const float* weights = full ? a.k_norm + h * dk : per_head ? a.k_norm : nullptr;
    RotateHead<1>(head, weights, inv, nullptr, 0, dk, a.k_raw_out + row + h * dk);
  }
}

// Grid: rows.
__global__ void __launch_bounds__(kThreads) KeysKernel(const NormQkvRopeAppendArgs a) {
  GridTrigger();
  GridWait();
  const int n = a.kv.n_kv_heads * a.kv.dk;
  const KvPlane& plane = a.kv.k;
  const std::byte* from = TargetOf(a, a.rows[blockIdx.x]).k;
  for (int i = static_cast<int>(threadIdx.x); i < n; i += kThreads) {
    const int h = i / a.kv.dk;
    const std::byte* head = from + h * plane.head_bytes;
    a.k_out[int64_t{blockIdx.x} * n + i] = KvValue(plane, head, h, i - h * a.kv.dk);
  }
}

template <int N, typename T>
bool CanRopeAppendWide(const NormQkvRopeAppendArgs& a, const float* k, const float* v) {
  const bool normed = a.qk_norm != QkNorm::kNone;
  return AreMultiples(N, int64_t{a.kv.dk}, int64_t{a.kv.dv}, int64_t{a.n_freq}) &&
         AreMultiples(N * sizeof(float), a.q, k, v, normed ? a.q_norm : nullptr,
                      normed ? a.k_norm : nullptr) &&
         AreMultiples(2 * N * sizeof(float), a.cos_sin) &&
         AreMultiples(N * sizeof(T), a.kv.k.base, a.kv.v.base, a.slot.k, a.slot.v, a.kv.k.row_bytes,
                      a.kv.v.row_bytes, a.kv.k.head_bytes, a.kv.v.head_bytes);
}

template <typename T>
bool CanRotateAppend(const NormQkvRopeAppendArgs& a, const float* k, const float* v) {
  return CanRopeAppendWide<kWide, T>(a, k, v) && a.qk_norm == QkNorm::kNone &&
         a.cos_sin != nullptr && 2 * a.n_freq == a.kv.dk && a.kv.dk == a.kv.dv;
}

}  // namespace

void Embed(const EmbedArgs& args, const Launch& launch) {
  if (args.n_rows == 0) return;
  LaunchKernel(EmbedKernel, launch, RowGrid(args.n_rows, args.table.n_in), kThreads, 0, args);
}

void RopeTable(const RopeTableArgs& args, const Launch& launch) {
  if (args.n_rows == 0 || args.n_freq == 0) return;
  LaunchKernel(RopeTableKernel, launch, RowGrid(args.n_rows, args.n_freq), kThreads, 0, args);
}

void AddResidual(const Residual& in, int32_t n_rows, const Launch& launch) {
  if (n_rows == 0) return;
  const bool wide =
      in.d % kWide == 0 && AreMultiples(kWide * sizeof(float), in.x, in.y, in.post_norm);
  const int64_t packs = in.post_norm != nullptr ? 1 : CeilDiv(in.d, wide ? kWide : 1);
  LaunchKernel(wide ? AddResidualKernel<kWide> : AddResidualKernel<1>, launch,
               RowGrid(n_rows, packs), kThreads, 0, in);
}

void NormRows(const Residual& in, int32_t n_rows, DType format, void* h, const Launch& launch) {
  if (n_rows == 0) return;
  WithType(format, [&](auto zero) {
    using T = decltype(zero);
    const bool wide = in.d % kWide == 0 && AreMultiples(kWide * sizeof(float), in.x, in.norm) &&
                      AreMultiples(kWide * sizeof(T), h);
    LaunchKernel(wide ? NormKernel<T, kWide> : NormKernel<T, 1>, launch, RowGrid(n_rows, 1),
                 kThreads, 0, in.x, in.norm, in.eps, in.d, static_cast<T*>(h));
  });
}

void ConvertRows(const float* in, int64_t n, DType format, void* out, const Launch& launch) {
  if (n == 0) return;
  WithType(format, [&](auto zero) {
    using T = decltype(zero);
    constexpr int kN = 2 * kWide;  // less would be too little under way
    const bool wide = n % kN == 0 && AreMultiples(16, in, out);
    LaunchKernel(wide ? ConvertKernel<T, kN> : ConvertKernel<T, 1>, launch,
                 static_cast<uint32_t>(CeilDiv(n, kThreads * (wide ? kN : 1))), kThreads, 0, in, n,
                 static_cast<T*>(out));
  });
}

void RopeAppend(const NormQkvRopeAppendArgs& args, float* k, float* v, const Launch& launch) {
  if (args.n_rows == 0) return;
  WithKvType(args.kv.k.dtype, [&](auto zero) {
    using T = decltype(zero);
    if constexpr (!kInBlocks<T>) {
      if (CanRotateAppend<T>(args, k, v)) {
        LaunchKernel(RotateAppendKernel<T>, launch, static_cast<uint32_t>(args.n_rows), kThreads, 0,
                     args, k, v);
        return;
      }
    }
    const int64_t items = args.n_heads + 2 * int64_t{args.kv.n_kv_heads};
    const int64_t blocks = args.qk_norm == QkNorm::kFull ? 1 : CeilDiv(items, kWarps);
    const dim3 grid(static_cast<uint32_t>(args.n_rows), static_cast<uint32_t>(blocks));
    LaunchKernel(
        CanRopeAppendWide<2, T>(args, k, v) ? RopeAppendKernel<T, 2> : RopeAppendKernel<T, 1>,
        launch, grid, kThreads, 0, args, k, v);
  });
}

void KeepRawKeys(const NormQkvRopeAppendArgs& args, const float* k, const Launch& launch) {
  if (args.n_rows == 0) return;
  LaunchKernel(RawKeysKernel, launch, static_cast<uint32_t>(args.n_rows), kThreads, 0, args, k);
}

void KeepKeys(const NormQkvRopeAppendArgs& args, const Launch& launch) {
  if (args.n_rows == 0) return;
  LaunchKernel(KeysKernel, launch, static_cast<uint32_t>(args.n_rows), kThreads, 0, args);
}

void GatedRows(Activation act, DType in, const void* gate, const void* up, DType format, void* out,
               int64_t n, const Launch& launch) {
  if (n == 0) return;
  const auto run = [&](auto in_zero, auto out_zero) {
    using In = decltype(in_zero);
    using Out = decltype(out_zero);
    constexpr int kN = 2 * kWide;
    const bool wide = n % kN == 0 && AreMultiples(16, gate, up, out);
    LaunchKernel(wide ? GatedKernel<In, Out, kN> : GatedKernel<In, Out, 1>, launch,
                 static_cast<uint32_t>(CeilDiv(n, kThreads * (wide ? kN : 1))), kThreads, 0, act,
                 static_cast<const In*>(gate), static_cast<const In*>(up), static_cast<Out*>(out),
                 n);
  };
  const auto from = [&](auto in_zero) {
    format == DType::kBF16 ? run(in_zero, __nv_bfloat16{}) : run(in_zero, float{});
  };
  in == DType::kBF16 ? from(__nv_bfloat16{}) : from(float{});
}

}  // namespace omnikv::cuda
