// Which selected rows are on the device already, and the copy of those that are not.
#include <algorithm>

#include "backend/cuda/kernels/cluster.cuh"
#include "backend/cuda/kernels/common.cuh"

namespace omnikv::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr int kSlotsAThread = 8;  // whose ages are on their way together
constexpr int kTokensAThread = 4;
constexpr int kSetBlocks = 8;  // of a sequence, at most: what any card places as a cluster
static_assert(kSlotAges == kThreads, "a thread counts the slots of one age");

// Of a block.
struct SetShared {
  int32_t ages[kSlotAges];            // its slots by age
  int32_t missed_of[kSetBlocks];      // of the tokens of each block, which writes it here
  int32_t last, of_last;              // the lowest age that is given, and how many slots of it
  int32_t older_before, last_before;  // older slots, and those of that age, in lower blocks
  int32_t own_slot, own_missed;       // of the step's own token, if it is one of them
  int32_t warps[kWarps], more_warps[kWarps];
};

__device__ BlockSums<int32_t> BlockScan(int32_t value, SetShared& s) {
  __syncthreads();  // the last use of `warps` is over
  return SumInBlock<kWarps>(value, s.warps);
}

// A block's part of 0 .. n - 1, of which it takes at_once together, and a thread `each`, one after
// the other.
struct Part {
  int32_t begin, end, each;

  __device__ int32_t at_once() const { return kThreads * each; }
  __device__ bool OnceIsAll() const { return end - begin <= at_once(); }
};

__device__ __forceinline__ Part PartOf(int32_t n, int32_t most_each) {
  const auto blocks = static_cast<int32_t>(gridDim.x);
  const int32_t width = (n + blocks - 1) / blocks;
  const int32_t begin = min(n, width * static_cast<int32_t>(blockIdx.x));
  return {begin, min(n, begin + width), min(most_each, (width + kThreads - 1) / kThreads)};
}

// The slots that a step gives to `missing` > 0 tokens, in ascending order. Ends with a barrier of
// the cluster.
__device__ void FindSlots(const WorkingSetArgs& a, uint32_t step, int32_t missing,
                          int32_t* free_slots, SetShared& s) {
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const auto blocks = static_cast<int32_t>(gridDim.x);
  const auto block = static_cast<int32_t>(blockIdx.x);
  const Part part = PartOf(a.n_slots, kSlotsAThread);
  s.ages[thread] = 0;
  __syncthreads();
  uint32_t age[kSlotsAThread];
  const auto load_ages = [&](int32_t begin) {
#pragma unroll
    for (int i = 0; i < kSlotsAThread; ++i) {
      const int32_t slot = begin + thread * part.each + i;
      age[i] = i < part.each && slot < part.end ? SlotAge(a.used[slot], step) : 0;
    }
  };
  for (int32_t begin = part.begin; begin < part.end; begin += part.at_once()) {
    load_ages(begin);
#pragma unroll
    for (int i = 0; i < kSlotsAThread; ++i) {
      if (i >= part.each) continue;
      // Few ages are frequent: each warp counts its slots of one age at once.
      const uint32_t alike = __match_any_sync(kAllLanes, age[i]);
      if (age[i] > 0 && thread % 32 == __ffs(static_cast<int>(alike)) - 1) {
        atomicAdd(&s.ages[age[i]], __popc(alike));
      }
    }
  }
  ClusterSync();
  const int32_t own_age = kThreads - 1 - thread;
  int32_t of_age = 0;
  int32_t before = 0;  // of them in lower blocks
#pragma unroll 4
  for (int32_t b = 0; b < blocks; ++b) {
    const int32_t n = *InBlock(&s.ages[own_age], b);
    of_age += n;
    before += b < block ? n : 0;
  }
  const int32_t older = BlockScan(of_age, s).before;
  const int32_t older_before = SumInBlock<kWarps>(before, s.more_warps).before;
  if (older < missing && missing <= older + of_age) {
    s.last = own_age;
    s.of_last = missing - older;
    s.older_before = older_before;
    s.last_before = before;
  }
  __syncthreads();

  const auto last = static_cast<uint32_t>(s.last);
  const int32_t of_last = s.of_last;
  int32_t found_older = s.older_before;
  int32_t found_last = s.last_before;
  static_assert(kThreads * kSlotsAThread < 1 << 15, "two counts of slots in one word");
  for (int32_t begin = part.begin; begin < part.end; begin += part.at_once()) {
    if (found_older + min(found_last, of_last) == missing) break;
    if (!part.OnceIsAll()) load_ages(begin);
    const int32_t first = begin + thread * part.each;
    int32_t counts = 0;  // slots that are older than the last age, and 1 << 16 of the last one
#pragma unroll
    for (int i = 0; i < kSlotsAThread; ++i) {
      counts += age[i] > last ? 1 : age[i] == last ? 1 << 16 : 0;
    }
    const BlockSums<int32_t> sums = BlockScan(counts, s);
    int32_t n_older = found_older + (sums.before & 0xffff);
    int32_t n_last = found_last + (sums.before >> 16);
#pragma unroll
    for (int i = 0; i < kSlotsAThread; ++i) {
      const bool of_last_age = age[i] == last && n_last < of_last;
      if (age[i] > last || of_last_age) free_slots[n_older + min(n_last, of_last)] = first + i;
      n_older += age[i] > last ? 1 : 0;
      n_last += age[i] == last ? 1 : 0;
    }
    found_older += sums.total & 0xffff;
    found_last += sums.total >> 16;
  }
  ClusterSync();
}

__device__ __forceinline__ int32_t RowOf(const WorkingSetArgs& a, int32_t table_off, int32_t t) {
  const int32_t in_table = a.block_table[table_off + t / a.block_tokens];
  return in_table * a.block_tokens + t % a.block_tokens;
}

// Gives slots to the tokens that come ahead, in order, by one block. free_slots null: those of
// their numbers, by lot.
__device__ void GiveAhead(const WorkingSetArgs& a, uint32_t step, const int32_t* free_slots,
                          SetShared& s) {
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const auto first_slot = static_cast<int32_t>(blockIdx.y) * a.n_slots;
  int32_t given = 0;
#pragma unroll 1
  for (int32_t begin = 0; begin < a.max_ahead; begin += kThreads) {
    const int32_t t = begin + thread < a.max_ahead ? a.ahead[begin + thread] : -1;
    const BlockSums<int32_t> rank = BlockScan(t >= 0 ? 1 : 0, s);
    const int32_t place = given + rank.before;
    given += rank.total;
    if (t < 0) continue;
    int32_t slot = place;
    if (free_slots != nullptr) {
      slot = free_slots[place];
      if (const int32_t old = a.owner[slot]; old >= 0) a.slot_of[old] = -1;
      a.owner[slot] = t;
      a.slot_of[t] = slot;
      a.used[slot] = SlotCame(2 * step);
    }
    a.ahead_row[place] = RowOf(a, a.seqs->table_off, t);
    a.ahead_slot[place] = first_slot + slot;
  }
}

// Grid: x the blocks of a cluster, which take consecutive parts of tokens and slots, y sequences.
// free_slots [n_seqs, capacity + max_ahead].
__global__ void __launch_bounds__(kThreads)
    UpdateWorkingSet(WorkingSetArgs all, int32_t* free_slots) {
  __shared__ SetShared s;
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const auto sequence = static_cast<int32_t>(blockIdx.y);
  const auto blocks = static_cast<int32_t>(gridDim.x);
  const auto block = static_cast<int32_t>(blockIdx.x);
  GridTrigger();
  if (thread < kSetBlocks) s.missed_of[thread] = 0;
  ClusterArrive();
  GridWait();
  const int32_t first_slot = sequence * all.n_slots;
  const WorkingSetArgs a = all.Of(sequence);
  free_slots += int64_t{sequence} * (a.capacity + a.max_ahead);
  // All asked for at once.
  const SeqMeta seq = *a.seqs;
  const uint32_t step = *a.clock + 1;
  const int32_t listed = *a.count;
  const int32_t first_recent = a.bounds[0];
  const int32_t end_recent = a.bounds[1];
  if (seq.q_len == 0) {
    ClusterWait();
    if (thread != 0 || block != 0) return;
    *a.own = -1;
    *a.n_own = 0;
    *a.n_miss = 0;
    if (a.ahead != nullptr) *a.n_ahead = 0;
    a.span[0] = a.span[1] = 0;
    *a.slot_seqs = SeqMeta{};
    return;
  }
  const int32_t n = listed + end_recent - first_recent;
  const Part part = PartOf(n, kTokensAThread);
  const auto token = [&](int32_t i) { return i < listed ? a.index[i] : first_recent + i - listed; };
  const auto row_of = [&](int32_t t) { return RowOf(a, seq.table_off, t); };
  // Tokens ascend: the step's own, whose row is yet to be made, is the last if it is there.
  const int32_t last = end_recent > first_recent ? end_recent - 1 : n > 0 ? a.index[n - 1] : -1;
  const int32_t own = last == seq.kv_len - 1 ? n - 1 : -1;
  const int32_t own_row = row_of(seq.kv_len - 1);
  ClusterWait();

  const bool simulated = a.simulated_hits >= 0;
  // By lot: in fact all have the slot of their number.
  const auto lot = [&](int32_t i) {
    return i != own && !IsSimulatedHit(a.simulated_hits, step, i);
  };
  int32_t tokens[kTokensAThread];
  int32_t slots[kTokensAThread];  // among those of all sequences; -1: none
  // Bits of the tokens that are missing.
  const auto missed_of = [&](int32_t begin) {
    uint32_t missed = 0;
#pragma unroll
    for (int j = 0; j < kTokensAThread; ++j) {
      const int32_t i = begin + thread * part.each + j;
      if (j >= part.each || i >= part.end) continue;
      if (simulated ? lot(i) : slots[j] < 0) missed |= 1u << j;
    }
    return missed;
  };
  int32_t own_missing = 0;  // of this thread
  for (int32_t begin = part.begin; begin < part.end; begin += part.at_once()) {
#pragma unroll
    for (int j = 0; j < kTokensAThread; ++j) {
      const int32_t i = begin + thread * part.each + j;
      if (j >= part.each || i >= part.end) continue;
      tokens[j] = token(i);
      const int32_t slot = simulated ? i : a.slot_of[tokens[j]];
      slots[j] = slot < 0 ? slot : first_slot + slot;
      a.slots[i] = slots[j];
      if (slot >= 0) a.used[slot] = SlotFound(a.used[slot], step);
    }
    own_missing += __popc(missed_of(begin));
  }
  own_missing = BlockScan(own_missing, s).total;
  if (thread < blocks) *InBlock(&s.missed_of[block], thread) = own_missing;
  ClusterSync();
  int32_t missing = 0;
  int32_t given = 0;  // in lower blocks
#pragma unroll
  for (int32_t b = 0; b < kSetBlocks; ++b) {
    const int32_t of_block = s.missed_of[b];
    missing += of_block;
    given += b < block ? of_block : 0;
  }
  int32_t ahead = 0;
#pragma unroll 1
  for (int32_t begin = 0; a.ahead != nullptr && begin < a.max_ahead; begin += kThreads) {
    const int32_t j = begin + thread;
    ahead += __syncthreads_count(j < a.max_ahead && a.ahead[j] >= 0 ? 1 : 0);
  }
  if (missing + ahead > 0 && !simulated) FindSlots(a, step, missing + ahead, free_slots, s);

  for (int32_t begin = part.begin; begin < part.end; begin += part.at_once()) {
    if (!part.OnceIsAll()) {
#pragma unroll
      for (int j = 0; j < kTokensAThread; ++j) {
        const int32_t i = begin + thread * part.each + j;
        if (j >= part.each || i >= part.end) continue;
        tokens[j] = token(i);
        slots[j] = a.slots[i];
      }
    }
    const uint32_t missed = missed_of(begin);
    const BlockSums<int32_t> rank = BlockScan(__popc(missed), s);
    int32_t place = given + rank.before;
    int32_t slot_given[kTokensAThread];
    int32_t owner[kTokensAThread];  // of that before
    if (!simulated) {
#pragma unroll
      for (int j = 0; j < kTokensAThread; ++j) {
        const int32_t lower = __popc(missed & ((1u << j) - 1));
        if ((missed >> j & 1) != 0) slot_given[j] = free_slots[place + lower];
      }
#pragma unroll
      for (int j = 0; j < kTokensAThread; ++j) {
        if ((missed >> j & 1) != 0) owner[j] = a.owner[slot_given[j]];
      }
    }
#pragma unroll
    for (int j = 0; j < kTokensAThread; ++j) {
      const int32_t i = begin + thread * part.each + j;
      if (j >= part.each || i >= part.end) continue;
      const bool misses = (missed >> j & 1) != 0;
      if (misses && !simulated) {
        const int32_t slot = slot_given[j];
        if (owner[j] >= 0) a.slot_of[owner[j]] = -1;
        a.owner[slot] = tokens[j];
        a.slot_of[tokens[j]] = slot;
        a.used[slot] = SlotCame(2 * step);
        slots[j] = first_slot + slot;
        a.slots[i] = slots[j];
      }
      if (i == own) {
        s.own_slot = slots[j];
        s.own_missed = misses ? 1 : 0;
      } else if (misses) {
        a.miss_row[place] = row_of(tokens[j]);
        a.miss_slot[place] = slots[j];
      }
      place += misses ? 1 : 0;
    }
    given += rank.total;
  }
  if (ahead > 0 && block == 0) GiveAhead(a, step, simulated ? nullptr : free_slots + missing, s);
  // All are given, and no block reads of another one that has left.
  ClusterSync();
  if (thread != 0 || (own >= 0 ? own < part.begin || own >= part.end : block != 0)) return;
  if (int32_t& slot = a.slot_of[seq.kv_len - 1]; own < 0 && slot >= 0) {
    a.owner[slot] = -1;
    a.used[slot] = 0;
    slot = -1;
  }
  int32_t own_missed = 0;
  *a.own = -1;
  *a.n_own = 0;
  if (own >= 0) {
    own_missed = s.own_missed;
    *a.own = s.own_slot;
    *a.own_row = own_row;
    *a.n_own = 1;
  }
  *a.n_miss = missing - own_missed;
  using Counter = unsigned long long;  // NOLINT: atomicAdd's
  auto* const counters = reinterpret_cast<Counter*>(a.counters);
  atomicAdd(counters, static_cast<Counter>(own >= 0 ? n - 1 : n));
  atomicAdd(counters + 1, static_cast<Counter>(missing - own_missed));
  atomicAdd(counters + 2, static_cast<Counter>(ahead));
  if (a.ahead != nullptr) *a.n_ahead = ahead;
  *a.clock = step;
  a.span[0] = 0;
  a.span[1] = n;
  *a.slot_seqs = {.q_begin = seq.q_begin,
                  .q_len = 1,
                  .kv_len = n,
                  .table_off = sequence * a.capacity,
                  .prompt_len = n};
}

constexpr int kScoreThreads = 1024;
constexpr int kScoresAThread = 4;  // on their way together
constexpr int kScoreTokens = kScoreThreads * kScoresAThread;

// Grid: x the parts of a sequence's tokens that each name one to come ahead, y sequences. A warp
// takes tiles of a part.
__global__ void __launch_bounds__(kScoreThreads)
    AverageScoresKernel(const __grid_constant__ AverageScoresArgs all) {
  static_assert(kAheadTile == 32, "a lane takes a token of a tile");
  __shared__ uint32_t selected[kScoreTokens / kAheadTile];  // bits of tiles
  __shared__ uint32_t best_of[kScoreThreads / 32];
  __shared__ int32_t token_of[kScoreThreads / 32];
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const int32_t warp = thread / 32;
  const int32_t lane = thread % 32;
  const auto part = static_cast<int32_t>(blockIdx.x);
  const auto parts = static_cast<int32_t>(gridDim.x);
  GridTrigger();
  GridWait();
  const AverageScoresArgs a = all.Of(static_cast<int32_t>(blockIdx.y));
  const SeqMeta seq = *a.seqs;
  const int32_t n = seq.q_len == 0 ? 0 : seq.kv_len;
  const int32_t n_candidates = *a.n_candidates;
  const int32_t listed = *a.count;
  const uint32_t step = *a.clock + 1;
  uint32_t best = 0;
  int32_t token = -1;
  for (int32_t first = part; first * kAheadTile < n; first += parts * (kScoreTokens / kAheadTile)) {
    // Tile i of those at once is the part's i-th from `first` on.
    const auto begin = [&](int32_t i) { return (first + i * parts) * kAheadTile; };
    float score[kScoresAThread];
    uint32_t average[kScoresAThread];
    int32_t slot[kScoresAThread];
#pragma unroll
    for (int i = 0; i < kScoresAThread; ++i) {
      const int32_t t = begin(warp + i * (kScoreThreads / 32)) + lane;
      if (t >= n) continue;
      score[i] = t < n_candidates ? a.scores[t] : 1.0f;
      average[i] = a.average[t];
      slot[i] = a.slot_of[t];
    }
    if (thread < kScoreTokens / kAheadTile) selected[thread] = 0;
    __syncthreads();
    for (int32_t i = thread; i < listed; i += kScoreThreads) {
      const int32_t t = a.index[i];
      const int32_t tile = t / kAheadTile;
      const int32_t place = (tile - first) / parts;
      const bool here = tile >= first && place < kScoreTokens / kAheadTile && tile % parts == part;
      if (here) atomicOr(&selected[place], 1u << t % kAheadTile);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kScoresAThread; ++i) {
      const int32_t tile = warp + i * (kScoreThreads / 32);
      const int32_t t = begin(tile) + lane;
      if (t >= n) continue;
      const uint32_t now = AverageScore(average[i], __float_as_uint(score[i]));
      a.average[t] = now;
      if (slot[i] >= 0) {
        a.used[slot[i]] = SlotScored(now, step);
      } else if (t < n_candidates && t < n - 1 && now > best && (selected[tile] >> lane & 1) == 0) {
        best = now;
        token = t;
      }
    }
    __syncthreads();  // `selected` is read
  }
  // The first of equals.
  const auto best_of_lanes = [](uint32_t& best, int32_t& token) {
    const uint32_t most = __reduce_max_sync(kAllLanes, best);
    token = __reduce_min_sync(kAllLanes, best == most && token >= 0 ? token : INT32_MAX);
    best = most;
  };
  best_of_lanes(best, token);
  if (lane == 0) {
    best_of[warp] = best;
    token_of[warp] = token;
  }
  __syncthreads();
  if (warp != 0) return;
  best = best_of[lane];
  token = token_of[lane];
  best_of_lanes(best, token);
  if (lane == 0) a.ahead[part] = best == 0 ? -1 : token;
}

// Blocks of one warp, so that one finds room on a multiprocessor that two kernels of a step share
// already; as many as fill the bus beside them, since more would take from the step (measured).
constexpr int64_t kFetchBlocks = 128;
// Where an eighth or more is there already, the step can wait for the bus a little; what it loses
// is then the room that fetches take, and so fewer of them work.
constexpr int32_t kQuietBlocks = 112;
// The same of several sequences that miss less than a quarter of their rows (measured).
constexpr int32_t kQuietSharedBlocks = 96;
// Bytes that a block brings where few rows are missing: so many fewer blocks work, for longer, but
// less long than the layers of a step take, which grow with the sequences.
constexpr int64_t kLeastBlockBytes = 32 * 1024;
constexpr int64_t kLeastBlockBytesASequence = 4 * 1024;
constexpr int kInFlight = 4;  // pieces of a lane
// Units that each block of a fetch still has when the next fetch may start.
constexpr int kLastUnits = 4;
// Blocks that the card places together, where it can: the step is then a little faster (measured).
constexpr int kFetchCluster = 8;
// Of a lane. A quarter of the registers of a multiprocessor has room for two such warps beside four
// warps of products; of 52 registers, for one.
constexpr int kFetchRegisters = 40;

// The rows of all lists, one list after the other.
struct FetchLists {
  const FetchRowsArgs& a;
  int32_t list = 0;   // the last row was of this one,
  int32_t first = 0;  // which begins at this row

  __device__ int32_t Rows() const {
    int32_t n = 0;
    for (int32_t l = 0; l < a.lists; ++l) n += a.n[l];
    return n;
  }
  // Where a row is in from_row and to_row. REQUIRES rows in ascending order, below Rows().
  __device__ int64_t Place(int32_t row) {
    if (a.lists == 1) return row;
    while (row >= first + a.n[list]) first += a.n[list++];
    return int64_t{list} * a.capacity + row - first;
  }
};

// A warp's unit is up to 32 * kInFlight pieces of one row, all asked for before the first is there;
// where the next unit lies is asked for meanwhile. Host memory is read past the caches: once.
//
// `behind_fetch`: the kernel launched before is a fetch, and reads nothing that this one waits for.
// This one then starts at the last units of that one, so that the bus never idles between the two,
// and ends after it.
//
// `kPart`: of rows with a gap. The step waits for such a part.
template <typename Word, bool kPart>
__global__ void __maxnreg__(kFetchRegisters) Fetch(FetchRowsArgs a, bool behind_fetch) {
  if (!behind_fetch) GridWait();
  constexpr int32_t kUnit = 32 * kInFlight;
  constexpr int64_t kWord = sizeof(Word);
  const auto pieces = static_cast<int32_t>(a.CopiedBytes() / kWord);
  const int32_t parts = (pieces + kUnit - 1) / kUnit;  // of a row
  FetchLists lists{a};
  const int32_t n = lists.Rows();
  const int32_t n_units = n * parts;
  const auto lane = static_cast<int32_t>(threadIdx.x);
  const int32_t capacity = a.capacity * a.lists;
  const bool quiet = !kPart && n <= capacity - capacity / 8;
  const int32_t most = a.lists > 1 && n <= capacity / 4 ? kQuietSharedBlocks : kQuietBlocks;
  const int64_t block_bytes = kLeastBlockBytes + a.lists * kLeastBlockBytesASequence;
  const auto wanted = static_cast<int32_t>(CeilDiv(n * a.CopiedBytes(), block_bytes));
  const auto all = static_cast<int32_t>(gridDim.x);
  const int32_t n_blocks = quiet ? min(all, max(kFetchCluster, min(wanted, most))) : all;
  auto unit = static_cast<int32_t>(blockIdx.x);
  if (unit > 0 && (unit >= n_blocks || unit >= n_units)) return;
  int64_t place = 0;
  int32_t from = 0;
  int32_t to = 0;
  const auto find_rows = [&] {
    if (unit >= n_units) return;
    place = lists.Place(unit / parts);
    from = a.from_row[place];
    to = a.to_row[place];
  };
  find_rows();
  while (unit < n_units) {
    // Not earlier: all fetches of a selection would wait on multiprocessors that the step needs.
    if (unit + kLastUnits * n_blocks >= n_units) GridTrigger();
    const int32_t first = unit % parts * kUnit + lane;
    const auto* in = reinterpret_cast<const Word*>(a.from + from * a.row_bytes);
    auto* out = reinterpret_cast<Word*>(a.to + to * a.row_bytes);
    const auto at = [&](int u) {
      const int32_t i = first + 32 * u;
      return !kPart || i < a.gap / kWord ? i : i + static_cast<int32_t>(a.gap_bytes / kWord);
    };
    Word piece[kInFlight];
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      if (first + 32 * u < pieces) piece[u] = __ldcv(in + at(u));
    }
    unit += n_blocks;
    find_rows();
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      if (first + 32 * u < pieces) out[at(u)] = piece[u];
    }
  }
  if (blockIdx.x > 0) return;
  GridTrigger();  // where it had no unit
  GridWait();
}

constexpr int kPieceThreads = 256;

// Grid: x walks pieces, y sequences.
dim3 PieceGrid(int32_t capacity, int32_t n_seqs) {
  constexpr int64_t kMost = 32;
  return {static_cast<unsigned>(std::clamp<int64_t>(CeilDiv(capacity, kPieceThreads), 1, kMost)),
          static_cast<unsigned>(n_seqs)};
}

__device__ __forceinline__ int32_t PieceThread() {
  return static_cast<int32_t>(blockIdx.x * kPieceThreads + threadIdx.x);
}
__device__ __forceinline__ int32_t PieceThreads() {
  return static_cast<int32_t>(gridDim.x) * kPieceThreads;
}

__global__ void __launch_bounds__(kPieceThreads)
    ListPiecesKernel(const __grid_constant__ ListPiecesArgs a) {
  GridTrigger();
  GridWait();
  const auto s = static_cast<int32_t>(blockIdx.y);
  const SeqMeta seq = a.seqs[s];
  const int32_t n = seq.q_len == 0 ? 0 : a.count[s] * a.per_unit;
  const int32_t* const index = a.index + int64_t{s} * a.capacity;
  int32_t* const to = a.to_index + int64_t{s} * a.to_capacity;
  for (int32_t i = PieceThread(); i < n; i += PieceThreads()) {
    to[i] = index[i / a.per_unit] * a.per_unit + i % a.per_unit;
  }
  if (PieceThread() != 0) return;
  a.to_count[s] = n;
  SeqMeta by_piece = seq;
  by_piece.kv_len = UnitsOf(seq.kv_len, a.piece_tokens);
  a.by_piece[s] = by_piece;
  SeqMeta by_table = seq;
  by_table.table_off = s * a.table_stride;
  a.by_table[s] = by_table;
}

__global__ void __launch_bounds__(kPieceThreads)
    PieceTableKernel(const __grid_constant__ PieceTableArgs a) {
  GridTrigger();
  GridWait();
  const auto s = static_cast<int32_t>(blockIdx.y);
  if (a.seqs[s].q_len == 0) return;
  const int64_t first = int64_t{s} * a.capacity;
  int32_t* const table = a.table + int64_t{s} * a.table_stride;
  const int32_t listed = a.count[s];
  for (int32_t i = PieceThread(); i < listed; i += PieceThreads()) {
    table[a.index[first + i]] = a.slots[first + i];
  }
  const int32_t end = UnitsOf(a.bounds[2 * s + 1], a.piece_tokens);
  const int32_t begin = a.bounds[2 * s] / a.piece_tokens;
  for (int32_t p = begin + PieceThread(); p < end; p += PieceThreads()) table[p] = a.OfLast(s, p);
}

}  // namespace

size_t WorkingSetScratch(const WorkingSetArgs& args) {
  const auto given = static_cast<size_t>(args.capacity + args.max_ahead);
  return static_cast<size_t>(args.n_seqs) * given * sizeof(int32_t);
}

void WorkingSet(const WorkingSetArgs& args, const Launch& launch) {
  const auto wanted = static_cast<int>(CeilDiv(args.capacity, kThreads));
  const int blocks = launch.device->arch < 90 ? 1 : std::clamp(wanted, 1, kSetBlocks);
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(args.n_seqs));
  KernelLaunch(launch, grid, kThreads, 0, blocks)
      .Run(UpdateWorkingSet, args, reinterpret_cast<int32_t*>(launch.scratch));
}

void AverageScores(const AverageScoresArgs& args, const Launch& launch) {
  const dim3 grid(static_cast<unsigned>(args.max_ahead), static_cast<unsigned>(args.n_seqs));
  LaunchKernel(AverageScoresKernel, launch, grid, dim3(kScoreThreads), 0, args);
}

void FetchRows(const FetchRowsArgs& args, const Launch& launch, bool behind_fetch) {
  const int64_t bits = args.row_bytes | args.gap | args.gap_bytes;
  const auto of_word = [&](auto word) {
    using Word = decltype(word);
    return args.gap_bytes > 0 ? Fetch<Word, true> : Fetch<Word, false>;
  };
  const auto fetch = bits % 16 == 0  ? of_word(uint4{})
                     : bits % 4 == 0 ? of_word(uint32_t{})
                                     : of_word(uint16_t{});
  // Room for the step's kernels beside it: where a fetch comes first, its division of shared memory
  // stays until the multiprocessor runs empty (with a smaller one steps are 3 to 5 % slower).
  CheckLaunch(cudaFuncSetAttribute(fetch, cudaFuncAttributePreferredSharedMemoryCarveout,
                                   cudaSharedmemCarveoutMaxShared),
              "fetch");
  constexpr int64_t kUnitBytes = 32 * kInFlight * 16;
  const int64_t blocks =
      CeilDiv(int64_t{args.lists} * args.capacity * args.CopiedBytes(), kUnitBytes);
  // As many bytes under way where rows are shorter than a unit, in parts that a step waits for.
  const int64_t most =
      args.gap_bytes == 0
          ? kFetchBlocks
          : kFetchBlocks * kUnitBytes / std::clamp<int64_t>(args.CopiedBytes(), 512, kUnitBytes);
  const auto clusters = static_cast<unsigned>(CeilDiv(std::min(most, blocks), kFetchCluster));
  KernelLaunch(launch, dim3(clusters * kFetchCluster), dim3(32), 0, kFetchCluster)
      .Run(fetch, args, behind_fetch);
}

void ListPieces(const ListPiecesArgs& args, const Launch& launch) {
  LaunchKernel(ListPiecesKernel, launch, PieceGrid(args.to_capacity, args.n_seqs),
               dim3(kPieceThreads), 0, args);
}

void PieceTable(const PieceTableArgs& args, const Launch& launch) {
  LaunchKernel(PieceTableKernel, launch, PieceGrid(args.capacity, args.n_seqs), dim3(kPieceThreads),
               0, args);
}

}  // namespace omnikv::cuda
