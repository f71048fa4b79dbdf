// Products of up to 16 rows of activations with bf16 weights on Hopper cards, by warp groups
// (wgmma): both operands lie in shared memory, weights as the bulk copy engine brings them, so that
// almost no instruction is spent on them.
//
// Activations are the sum of three bf16 values, which hold all 24 bits of a float. 16 rows of each
// part are 48 of the 64 rows of the first operand; whatever lies behind is multiplied as well, and
// ignored. Rows of weights are those of the second operand.
//
// A cluster of two blocks takes some rows of weights, as many as its sums find room for in
// registers (a pass), and each of its blocks half of k. k is taken in stages, each for all rows of
// the pass, so that a pass reads the activations once. The sums of a stage begin at zero, as those
// of tensor cores are cut off, not rounded, and are added to others in registers. The warps of a
// block:
// - Two warp groups multiply. They share the rows of weights or, where these are few, the stages.
//   At the end of a pass they send their sums to the block that finishes the row.
// - One warp has weights copied to a ring, as far ahead as there is room, from before GridWait on.
// - Six split activations: slices of 64 values of k, one after the other. They also finish what
//   the block has to of each pass, when they are ahead of the products of the next.
// - One finds the rows of K/V, three loads behind one another.
#include <algorithm>

#include "backend/cuda/kernels/hopper.cuh"
#include "backend/cuda/kernels/matvec.cuh"

namespace omnikv::cuda {
namespace {

constexpr int kBlocks = 2;  // of a cluster
constexpr int kRows = 16;   // of activations
constexpr int kParts = 3;
constexpr int kGroups = 2;  // warp groups that multiply
constexpr int kGroupWarps = 4;
constexpr int kSplitters = 6;                                // warps that split activations
constexpr int kFinder = kGroups * kGroupWarps + kSplitters;  // the warp that finds rows of K/V
constexpr int kCopier = kFinder + 1;                         // and the one that has weights copied
constexpr int kThreads = 32 * (kCopier + 1);
constexpr int kGroupRegisters = 152;
constexpr int kOtherRegisters = 104;

constexpr int kTileRows = 8;                            // of weights
constexpr int kTileBytes = kTileRows * 2 * kBoxValues;  // of 64 values of k
constexpr int kTileSums = kTileRows * kRows;
constexpr int kSliceBytes = kParts * kRows * 2 * kBoxValues;  // split
// A slice as it was asked for: its rows, and the norm's weights.
constexpr int kRawBytes = (kRows + 1) * kBoxValues * static_cast<int>(sizeof(float));

constexpr int kMaxSlots = 16;               // of the ring of weights
constexpr int kMaxSlices = 2 * kSplitters;  // of the ring of split activations
constexpr int kEarlyBytes = 64 * 1024;      // of weights that are asked for before the activations

// Up to kN rows of weights a pass (kSplitK: the warp groups share the stages) or 2 kN.
template <int kColumns, bool kShareStages>
struct Shape {
  static constexpr int kN = kColumns;
  static constexpr bool kSplitK = kShareStages;
  static constexpr int kTiles = kN / kTileRows * (kSplitK ? 1 : kGroups);
  static constexpr int kDepth = kSplitK ? 2 : 1;  // slices that a splitting warp has under way
  static constexpr int kSources = kBlocks * (kSplitK ? kGroups : 1) * kParts;  // of a sum
};

struct Maps {
  CUtensorMap part[3];
};

// A unit is kTileRows items, which one block finishes: a tile, or two where items have two rows. A
// box is what is copied at a time: tiles of neighbouring units. The clusters take turns over the
// boxes.
struct Plan {
  int32_t n_turns = 0;
  int32_t box_shift = 0;     // of a box, 1 << box_shift units; not 0: stage_slices is 1
  int32_t n_passes = 0;      // of a cluster
  int32_t n_stages = 0;      // of a pass
  int32_t stage_slices = 0;  // of a stage
  int32_t stage_bytes = 0;
  int32_t n_slots = 0;    // stages in the ring of weights
  int32_t n_early = 0;    // stages asked for before the activations
  int32_t n_slices = 0;   // in the ring of split activations: a multiple of kSplitters
  int32_t own_tiles = 0;  // at most, that a block finishes of a pass
};

// Shared memory behind the rings.
struct Control {
  // A barrier for each group that waits at it, so that it waits for every phase: of two phases of
  // the same parity it could not tell which one has ended.
  uint64_t full[kGroups][kMaxSlots];
  uint64_t empty[kMaxSlots];
  uint64_t slice_full[kGroups][kMaxSlices];
  uint64_t slice_empty[kMaxSlices];
  uint64_t received;  // all sums of a pass that this block finishes
  uint64_t read;      // they were read, in both blocks
  uint64_t squared;
  uint64_t found;
  KvTarget kv_rows[kRows];
  float squares[kBlocks][kSplitters][kRows];
};

struct Shared {
  std::byte* ring;
  std::byte* slices;  // [n_slices][kSliceBytes]
  std::byte* raw;     // [kSplitters][kDepth][kRawBytes]
  float* received;    // [kSources][own_tiles][kRows][kTileRows]
  Control* control;
};

// What all warps know of the block's work.
struct Share {
  int32_t cluster;
  int32_t n_clusters;
  int32_t rank;     // of the block in its cluster
  int32_t n_turns;  // of the cluster
  int32_t sides;    // rows of an item
  const Plan& plan;

  __device__ __forceinline__ int32_t FirstTurn(int32_t pass) const {
    return n_turns * pass / plan.n_passes;
  }
  __device__ __forceinline__ int32_t Turns(int32_t pass) const {
    return FirstTurn(pass + 1) - FirstTurn(pass);
  }
  // Units of a pass; unit u is finished by block u % kBlocks.
  __device__ __forceinline__ int32_t Units(int32_t pass) const {
    return Turns(pass) << plan.box_shift;
  }
  __device__ __forceinline__ int32_t OwnUnits(int32_t pass) const {
    return (Units(pass) - rank + kBlocks - 1) / kBlocks;
  }
  // The first item of a unit.
  __device__ __forceinline__ int32_t Item(int32_t pass, int32_t unit) const {
    const int32_t turn = unit >> plan.box_shift;
    const int32_t box = (FirstTurn(pass) + turn) * n_clusters + cluster;
    return (((box - turn) << plan.box_shift) + unit) * kTileRows;
  }
  // Where a stage begins, in slices.
  __device__ __forceinline__ int32_t StageBegin(int32_t stage) const {
    return (rank * plan.n_stages + stage) * plan.stage_slices;
  }
};

// A place in a ring.
struct Cursor {
  int at = 0;
  uint32_t parity = 0;  // of how often the ring has been run through

  __device__ __forceinline__ void Advance(int by, int size) {
    at += by;
    while (at >= size) {
      at -= size;
      parity ^= 1;
    }
  }
};

// --- The warp that has weights copied, a lane a box.

template <typename S>
__device__ __forceinline__ void Copy(const Work& work, const Share& share, const Maps& maps,
                                     const Shared& shared) {
  const Plan& plan = share.plan;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int32_t box_bytes = (plan.stage_slices << plan.box_shift) * kTileBytes;
  Cursor slot;
  int32_t count = 0;
#pragma unroll 1
  for (int32_t pass = 0; pass < plan.n_passes; ++pass) {
    const int32_t n_boxes = share.Turns(pass) * share.sides;
    RowRef row{};
    if (lane < n_boxes) {
      const int32_t turn = lane / share.sides;
      row = FindRow(work, share.Item(pass, turn << plan.box_shift), lane - turn * share.sides);
    }
#pragma unroll 1
    for (int32_t stage = 0; stage < plan.n_stages; ++stage, ++count) {
      if (count == plan.n_early) GridWait();
      if (count >= plan.n_slots) Wait(&shared.control->empty[slot.at], slot.parity ^ 1);
      uint64_t* const full = &shared.control->full[S::kSplitK ? stage % kGroups : 0][slot.at];
      if (lane == 0) ArriveExpect(full, n_boxes * box_bytes);
      __syncwarp();
      if (lane < n_boxes) {
        CopyBox(shared.ring + slot.at * plan.stage_bytes + lane * box_bytes, &maps.part[row.part],
                full, 0, row.row, share.StageBegin(stage));
      }
      __syncwarp();
      slot.Advance(1, plan.n_slots);
    }
  }
}

// --- A warp that splits activations and finishes sums.

// Every kSplitters-th slice.
struct SliceCursor {
  int32_t stage;
  int32_t slice;  // of the stage
  int32_t index;  // of all passes

  __device__ __forceinline__ SliceCursor(int32_t first, const Plan& plan)
      : stage(0), slice(0), index(0) {
    Advance(first, plan);
  }
  __device__ __forceinline__ void Advance(int32_t by, const Plan& plan) {
    index += by;
    slice += by;
    while (slice >= plan.stage_slices) {
      slice -= plan.stage_slices;
      if (++stage == plan.n_stages) stage = 0;
    }
  }
};

// A lane has values 4 column to 4 column + 3 of each slice, of rows half, half + 2, ...
template <typename S>
class Splitter {
 public:
  __device__ __forceinline__ Splitter(const Work& work, const Share& share, const Shared& shared,
                                      int warp)
      : work_(work), share_(share), shared_(shared), warp_(warp) {}

  __device__ __forceinline__ void Run() {
    const Plan& plan = share_.plan;
    const int32_t pass_slices = plan.n_stages * plan.stage_slices;
    const int32_t n_slices = plan.n_passes * pass_slices;
    GridWait();
    const Product& p = work_.product;
    if (lane_ < p.n_rows) row_ = p.x_rows != nullptr ? p.x_rows[lane_] : lane_;
    SliceCursor asked(warp_, plan);
    SliceCursor split = asked;
    const auto ask = [&](int at) {
      Ask(asked, asked.index < n_slices, at);
      asked.Advance(kSplitters, plan);
    };
#pragma unroll 1
    for (int i = 0; i < S::kDepth; ++i) ask(i);
    ClusterWait();
    if (warp_ == 0 && lane_ == 0) {
      ArriveExpect(&shared_.control->squared, sizeof(shared_.control->squares));
      Expect(0);
    }

    Cursor slot;
    slot.Advance(warp_, plan.n_slices);
    int raw = 0;
    int32_t finished = 0;
#pragma unroll 1
    while (finished < plan.n_passes) {
      if (split.index < n_slices) {
        CopyAsyncWait<S::kDepth - 1>();
        __syncwarp();
        float v[8][4];
        Load(raw, split.index < pass_slices, v);
        __syncwarp();
        ask(raw);
        raw = raw + 1 == S::kDepth ? 0 : raw + 1;
        if (split.index >= plan.n_slices) {
          Wait(&shared_.control->slice_empty[slot.at], slot.parity ^ 1);
        }
        Store(slot.at, v);
        __syncwarp();
        const int group = S::kSplitK ? split.stage % kGroups : 0;
        if (lane_ == 0) Arrive(&shared_.control->slice_full[group][slot.at]);
        slot.Advance(kSplitters, plan.n_slices);
      }
      split.Advance(kSplitters, plan);
      // Passes, before this would wait for products of the next.
      while (finished < plan.n_passes &&
             (split.index >= n_slices ||
              split.index >= (finished + 1) * pass_slices + plan.n_slices)) {
        Finish(finished++);
      }
    }
  }

 private:
  // Asks for a slice; where there is none, for zeros. A lane asks for what it reads itself later,
  // and for weights of the norm.
  __device__ __forceinline__ void Ask(const SliceCursor& slice, bool valid, int at) {
    const Product& p = work_.product;
    const int32_t k = (share_.StageBegin(slice.stage) + slice.slice) * kBoxValues + 4 * column_;
    valid = valid && k < work_.n_in;
    std::byte* const to = Raw(at) + lane_ * 16;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int32_t row = __shfl_sync(kAllLanes, row_, 2 * i + half_);
      CopyAsync16(to + i * 512, p.x + int64_t{row} * work_.n_in + k, valid && row >= 0);
    }
    if (p.norm != nullptr && half_ == 0) CopyAsync16(to + 8 * 512, p.norm + k, valid);
    CopyAsyncCommit();
  }

  __device__ __forceinline__ std::byte* Raw(int at) const {
    return shared_.raw + (warp_ * S::kDepth + at) * kRawBytes;
  }

  // Activations times the norm's weights. `counts`: their squares do.
  __device__ __forceinline__ void Load(int at, bool counts, float (&v)[8][4]) {
    const auto* const from = reinterpret_cast<const float*>(Raw(at));
#pragma unroll
    for (int i = 0; i < 8; ++i) LoadFour(from + 128 * i + 4 * lane_, v[i]);
    if (work_.product.norm == nullptr) return;
    float norm[4];
    LoadFour(from + 128 * 8 + 4 * column_, norm);
    if (counts) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) square_[i] += v[i][j] * v[i][j];
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) v[i][j] *= norm[j];
    }
  }

  // Row r of a part begins at 128 r; its 16 bytes i lie at i ^ r % 8.
  __device__ __forceinline__ void Store(int slot, float (&v)[8][4]) const {
    std::byte* const to = shared_.slices + slot * kSliceBytes;
    const int place = half_ * 128 + ((column_ / 2 ^ half_) * 16 | column_ % 2 * 8);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const uint2 words = {TopHalves(v[i][0], v[i][1]), TopHalves(v[i][2], v[i][3])};
        *reinterpret_cast<uint2*>(to + (part * kRows + 2 * i) * 128 + (place ^ i % 4 * 32)) = words;
#pragma unroll
        for (int j = 0; j < 4; ++j) v[i][j] = WithoutTop(v[i][j]);
      }
    }
  }

  // Says how many sums of a pass will come. One thread does, before any of them may be sent.
  __device__ __forceinline__ void Expect(int32_t pass) const {
    ArriveExpect(&shared_.control->received, S::kSources * share_.OwnUnits(pass) * share_.sides *
                                                 kTileSums * static_cast<int>(sizeof(float)));
  }

  // Finishes the block's units of a pass. A warp takes four rows of activations of a unit at a
  // time, two such pieces together.
  __device__ __forceinline__ void Finish(int32_t pass) {
    constexpr int kTogether = 2;
    constexpr int kPieces = kRows / 4;  // of a unit
    const Plan& plan = share_.plan;
    const Product& p = work_.product;
    if (pass == 0 && p.norm != nullptr) ShareSquares();
    if (pass == 0 && p.finish == Finish::kRope) Wait(&shared_.control->found, 0);
    const int32_t n = share_.OwnUnits(pass) * kPieces;
    const auto row_of = [&](int32_t piece) { return piece % kPieces * 4 + lane_ / 8; };
    const auto item_of = [&](int32_t piece) {  // none: negative
      const int32_t item =
          share_.Item(pass, piece / kPieces * kBlocks + share_.rank) + lane_ % kTileRows;
      return piece < n && row_of(piece) < p.n_rows && item < work_.n_items ? item : -1;
    };
    bool waited = false;
#pragma unroll 1
    for (int32_t first = warp_; first < n || !waited; first += kTogether * kSplitters) {
      Operands operands[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int32_t piece = first + i * kSplitters;
        const int32_t item = item_of(piece);
        if (item >= 0) operands[i] = LoadOperands(work_, item, row_of(piece));
      }
      if (!waited) Wait(&shared_.control->received, static_cast<uint32_t>(pass & 1));
      waited = true;
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int32_t piece = first + i * kSplitters;
        const int32_t item = item_of(piece);
        const int32_t r = row_of(piece);
        const float scale = __shfl_sync(kAllLanes, scale_, r);
        if (item < 0) continue;
        const float* const from = shared_.received + piece / kPieces * share_.sides * kTileSums +
                                  piece % kPieces * 32 + lane_;
        float a = 0;
        float b = 0;
#pragma unroll
        for (int source = 0; source < S::kSources; ++source) {
          a += from[source * plan.own_tiles * kTileSums];
          if (share_.sides == 2) b += from[source * plan.own_tiles * kTileSums + kTileSums];
        }
        FinishItem(work_, item, r, shared_.control->kv_rows[r], operands[i], scale * a, scale * b);
      }
    }
    if (pass + 1 == plan.n_passes) return;
    if (warp_ == 0 && lane_ == 0) Expect(pass + 1);
    __syncwarp();
    if (lane_ < kBlocks) ArriveAt(&shared_.control->read, lane_);
  }

  // The scale of each row's norm, from the squares of all warps of the cluster.
  __device__ __forceinline__ void ShareSquares() {
    auto& all = shared_.control->squares;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
      for (int d = 8; d > 0; d /= 2) square_[i] += __shfl_xor_sync(kAllLanes, square_[i], d);
      if (column_ < kBlocks) {
        Send(AddressIn(&all[share_.rank][warp_][2 * i + half_], column_), square_[i],
             AddressIn(&shared_.control->squared, column_));
      }
    }
    Wait(&shared_.control->squared, 0);
    float mean = 0;
#pragma unroll
    for (int i = 0; i < kBlocks * kSplitters; ++i) {
      mean += all[i / kSplitters][i % kSplitters][lane_ % kRows];
    }
    mean /= static_cast<float>(work_.n_in);
    scale_ = 1.0f / sqrtf(mean + work_.product.eps);
  }

  const Work& work_;
  const Share& share_;
  const Shared& shared_;
  const int warp_;
  const int lane_ = static_cast<int>(threadIdx.x) % 32;
  const int column_ = lane_ % 16;
  const int half_ = lane_ / 16;
  int32_t row_ = -1;      // of x, for the product's row of the lane's number; none: negative
  float scale_ = 1;       // of the row of the lane's number
  float square_[8] = {};  // sums of the lane's rows
};

// --- A warp group that multiplies. Its warp w has the sums of part w.

template <typename S>
__device__ __forceinline__ void MultiplyGroup(const Share& share, const Shared& shared, int group) {
  constexpr int kSumBytes = kTileSums * static_cast<int>(sizeof(float));
  const Plan& plan = share.plan;
  Control& control = *shared.control;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int part = static_cast<int>(threadIdx.x) / 32 % kGroupWarps;
  const int stage_group = S::kSplitK ? group : 0;  // whose stages it takes
  const int first_tile = S::kSplitK ? 0 : group * (S::kN / kTileRows);
  const int source = (share.rank * (S::kSplitK ? kGroups : 1) + stage_group) * kParts + part;
  const float* const place = shared.received + source * plan.own_tiles * kTileSums + 2 * lane;
  const uint64_t slices = Descriptor(shared.slices, kTileBytes);
  const int tile_stride = plan.stage_slices * kTileBytes;
  const uint64_t ring = Descriptor(shared.ring + first_tile * tile_stride, tile_stride);
  ClusterWait();
  Cursor slot;
  Cursor slice;
  uint32_t full = 0;  // parities of the phases to come, a bit a slot
  uint32_t slice_full = 0;
#pragma unroll 1
  for (int32_t pass = 0; pass < plan.n_passes; ++pass) {
    float total[S::kN / 2] = {};
#pragma unroll 1
    for (int32_t stage = 0; stage < plan.n_stages; ++stage) {
      if (S::kSplitK && stage % kGroups != group) {
        slice.Advance(plan.stage_slices, plan.n_slices);
        slot.Advance(1, plan.n_slots);
        continue;
      }
      const int first_slice = slice.at;
      float sum[S::kN / 2];
      Wait(&control.full[stage_group][slot.at], full >> slot.at & 1);
      full ^= 1u << slot.at;
      ProductsFence();
#pragma unroll 1
      for (int i = 0; i < plan.stage_slices; ++i) {
        Wait(&control.slice_full[stage_group][slice.at], slice_full >> slice.at & 1);
        slice_full ^= 1u << slice.at;
        // Here, not where slices are stored: there it would wait for the activations under way.
        FenceForProducts();
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          Products<S::kN>(sum, Advance(slices, slice.at * kSliceBytes + k * 32),
                          Advance(ring, slot.at * plan.stage_bytes + i * kTileBytes + k * 32),
                          i + k > 0);
        }
        slice.Advance(1, plan.n_slices);
      }
      ProductsCommit();
      ProductsWait(sum);
      if (lane < plan.stage_slices) {
        const int at = first_slice + lane;
        Arrive(&control.slice_empty[at < plan.n_slices ? at : at - plan.n_slices]);
      }
      if (lane == 31) Arrive(&control.empty[slot.at]);
#pragma unroll
      for (int i = 0; i < S::kN / 2; ++i) total[i] += sum[i];
      slot.Advance(1, plan.n_slots);
    }

    if (pass > 0) Wait(&control.read, static_cast<uint32_t>((pass - 1) & 1));
    if (part >= kParts) continue;
    const int32_t n_units = share.Units(pass);
#pragma unroll
    for (int i = 0; i < S::kN / kTileRows; ++i) {
      // Where items have two rows, every other box is of second ones.
      const int tile = first_tile + i;
      const int box = tile >> plan.box_shift;
      const int side = share.sides == 2 ? box % 2 : 0;
      const int earlier = share.sides == 2 ? (box + 1) / 2 : 0;  // boxes that are not of its side
      const int unit = tile - (earlier << plan.box_shift);
      if (unit >= n_units) continue;
      const int own = unit / kBlocks * share.sides + side;
      const uint32_t to = AddressIn(place + own * kTileSums, unit % kBlocks);
      const uint32_t barrier = AddressIn(&control.received, unit % kBlocks);
      Send(to, total[4 * i], total[4 * i + 1], barrier);
      Send(to + kSumBytes / 2, total[4 * i + 2], total[4 * i + 3], barrier);
    }
  }
}

// --- The kernel. Grid: clusters.

template <typename S>
__global__ void __launch_bounds__(kThreads, 1)
    HopperKernel(const __grid_constant__ Work work, const __grid_constant__ Plan plan,
                 const __grid_constant__ Maps maps) {
  extern __shared__ __align__(1024) std::byte memory[];
  Shared shared;
  shared.ring = memory;
  shared.slices = shared.ring + plan.n_slots * plan.stage_bytes;
  shared.raw = shared.slices + plan.n_slices * kSliceBytes;
  shared.received = reinterpret_cast<float*>(shared.raw + kSplitters * S::kDepth * kRawBytes);
  shared.control =
      reinterpret_cast<Control*>(shared.received + S::kSources * plan.own_tiles * kTileSums);
  const auto n_clusters = static_cast<int32_t>(gridDim.x / kBlocks);
  const auto cluster = static_cast<int32_t>(blockIdx.x / kBlocks);
  const int32_t n_turns = (plan.n_turns - cluster + n_clusters - 1) / n_clusters;
  const Share share{cluster, n_clusters,         static_cast<int32_t>(blockIdx.x % kBlocks),
                    n_turns, work.rows_per_item, plan};
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (warp == kCopier) {
    const int i = static_cast<int>(threadIdx.x) % 32;
    constexpr int kReaders = kGroupWarps * (S::kSplitK ? 1 : kGroups);
    Control& control = *shared.control;
    if (i < work.product.n_parts) PrefetchMap(&maps.part[i]);
    for (int group = 0; group < kGroups; ++group) {
      if (i < plan.n_slots) InitBarrier(&control.full[group][i], 1);
      if (i < plan.n_slices) InitBarrier(&control.slice_full[group][i], 1);
    }
    if (i < plan.n_slots) InitBarrier(&control.empty[i], kReaders);
    if (i < plan.n_slices) InitBarrier(&control.slice_empty[i], kReaders);
    if (i == 0) {
      InitBarrier(&control.received, 1);
      InitBarrier(&control.read, kBlocks * kSplitters);
      InitBarrier(&control.squared, 1);
      InitBarrier(&control.found, 1);
    }
    FenceBarrierInit();
    __syncwarp();
    SyncArrive<kThreads>();  // copies begin while the others come
  } else {
    Sync<kThreads>();
  }
  ClusterArriveRelaxed();
  GridTrigger();
  if (warp < kGroups * kGroupWarps) {
    TakeRegisters<kGroupRegisters>();
    MultiplyGroup<S>(share, shared, warp / kGroupWarps);
  } else {
    LeaveRegisters<kOtherRegisters>();
    if (warp == kCopier) {
      Copy<S>(work, share, maps, shared);
    } else if (warp < kFinder) {
      Splitter<S>(work, share, shared, warp - kGroups * kGroupWarps).Run();
    } else if (work.product.finish == Finish::kRope) {
      GridWait();
      const auto r = static_cast<int32_t>(threadIdx.x % 32);
      if (r < work.product.n_rows) shared.control->kv_rows[r] = FindKvRow(work, r);
      __syncwarp();
      if (r == 0) Arrive(&shared.control->found);
    }
  }
}

// False where the card lacks the shared memory, or the driver what encodes maps.
template <typename S>
bool LaunchHopper(const Work& work, Plan plan, const Launch& launch) {
  const int32_t sides = work.rows_per_item;
  const int32_t n_clusters = std::min(plan.n_turns, launch.device->sm_count / kBlocks);
  const auto most_turns = static_cast<int32_t>(CeilDiv(plan.n_turns, n_clusters));
  plan.n_passes = static_cast<int32_t>(CeilDiv(most_turns, S::kTiles / sides >> plan.box_shift));
  const auto pass_units = static_cast<int32_t>(CeilDiv(most_turns, plan.n_passes))
                          << plan.box_shift;
  // More where there is much to split, and passes to finish meanwhile.
  const bool is_long = plan.n_passes * plan.n_stages * plan.stage_slices > 64;
  plan.n_slices = is_long ? kMaxSlices : kSplitters;
  plan.stage_bytes = pass_units * sides * plan.stage_slices * kTileBytes;
  plan.own_tiles = static_cast<int32_t>(CeilDiv(pass_units, kBlocks)) * sides;
  const int behind_ring =
      plan.n_slices * kSliceBytes + kSplitters * S::kDepth * kRawBytes +
      S::kSources * plan.own_tiles * kTileSums * static_cast<int>(sizeof(float)) +
      static_cast<int>(sizeof(Control));
  // Products are of kTiles tiles, even where the pass has fewer.
  const int past_stage = S::kTiles * plan.stage_slices * kTileBytes - plan.stage_bytes;
  const int rest = std::max(behind_ring, past_stage);
  const int room = static_cast<int>(launch.device->shared_per_block) - rest;
  plan.n_slots = std::min(room / plan.stage_bytes, kMaxSlots);
  if (plan.n_slots < 2) return false;
  plan.n_early =
      std::min(plan.n_slots, static_cast<int32_t>(CeilDiv(kEarlyBytes, plan.stage_bytes)));

  Maps maps{};
  const Product& p = work.product;
  for (int i = 0; i < p.n_parts; ++i) {
    const WeightRef& w = p.parts[i].w;
    const TensorShape shape{.sizes = {kBoxValues, w.n_out, w.n_in / kBoxValues},
                            .strides = {w.row_bytes, 2 * kBoxValues},
                            .box = {kTileRows << plan.box_shift, plan.stage_slices},
                            .promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B};
    if (EncodeTensorMap(&maps.part[i], CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, w.data, shape) !=
        cudaSuccess) {
      return false;
    }
  }
  const auto bytes = static_cast<size_t>(plan.n_slots * plan.stage_bytes + rest);
  AllowShared(HopperKernel<S>, bytes);
  KernelLaunch(launch, dim3(static_cast<unsigned>(n_clusters * kBlocks)), dim3(kThreads), bytes,
               kBlocks)
      .Run(HopperKernel<S>, work, plan, maps);
  return true;
}

// Whether boxes of so many items are rows that lie together: none straddles parts, nor halves of a
// head.
bool HasWholeBoxes(const Work& work, int32_t items) {
  const Product& p = work.product;
  for (int32_t i = 0; i + 1 < p.n_parts && p.finish != Finish::kGated; ++i) {
    if (work.item_end[i] % items != 0) return false;
  }
  const KvView& kv = work.qkv.kv;
  return p.finish != Finish::kRope || (kv.dk / 2 % items == 0 && kv.dv / 2 % items == 0);
}

}  // namespace

bool MultiplyHopper(const Work& work, const Launch& launch) {
  const Product& p = work.product;
  if (!RunsHopperCode(*launch.device) || p.parts[0].w.format != DType::kBF16 || p.n_rows > kRows ||
      work.n_in % kBoxValues != 0 || !HasWholeBoxes(work, kTileRows)) {
    return false;
  }
  const int64_t n_units = CeilDiv(work.n_items, kTileRows);
  const int64_t n_clusters = std::min<int64_t>(n_units, launch.device->sm_count / kBlocks);
  const int64_t tiles = CeilDiv(n_units, n_clusters) * work.rows_per_item;  // of a cluster
  const auto n_slices = static_cast<int32_t>(CeilDiv(work.n_in / kBoxValues, kBlocks));
  Plan plan;
  const auto launch_as = [&](auto shape, int32_t stage_slices, int32_t box_shift) {
    plan.stage_slices = std::min(stage_slices, n_slices);
    plan.n_stages = static_cast<int32_t>(CeilDiv(n_slices, plan.stage_slices));
    plan.box_shift = box_shift;
    plan.n_turns = static_cast<int32_t>(CeilDiv(n_units, 1 << box_shift));
    return LaunchHopper<decltype(shape)>(work, plan, launch);
  };
  // A copy of less than 2 KB takes longer to ask for than to bring.
  using Narrow = Shape<64, true>;
  using Middle = Shape<96, true>;
  using Wide = Shape<112, false>;
  if (tiles <= Narrow::kTiles) return launch_as(Narrow{}, 4, 0);
  if (tiles <= Middle::kTiles) return launch_as(Middle{}, 2, 0);
  // Nor may some clusters get much more than others.
  const auto most_units = [&](int32_t shift) {
    return CeilDiv(CeilDiv(n_units, 1 << shift), n_clusters) << shift;
  };
  int32_t box_shift = work.rows_per_item == 2 ? 1 : 2;
  if (32 * most_units(box_shift) > 33 * most_units(0)) box_shift = 1;
  if (!HasWholeBoxes(work, kTileRows << box_shift)) box_shift = 0;
  return launch_as(Wide{}, 1, box_shift);
}

}  // namespace omnikv::cuda
