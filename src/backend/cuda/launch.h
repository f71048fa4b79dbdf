// What the kernels of this folder share on the host: where a launch goes, and the launchers, one
// for each form of an op. Launchers only enqueue: they neither allocate nor wait, and so can be
// captured in a graph. They REQUIRE arguments that CudaBackend::Supports took.
//
// Programmatic dependent launch: our kernels, and those of policies, are launched so that each may
// start while the one before it still runs (but for a fetch behind a fetch, in working_set.cu). So
// a kernel calls GridWait() (common.cuh) before it first touches memory that an op reads or writes.
// Before, it may load weights, which nothing writes, ask for what the second-level cache should
// have (PrefetchL2, with numbers that may be old: LoadEarly), and read what is known to be there
// (LoadMeta<true>).
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "backend/ops.h"

namespace omnikv::cuda {

struct Device {
  int ordinal = 0;
  int sm_count = 0;
  int arch = 0;                        // 10 * major + minor: 80, 90, ...
  size_t shared_per_block = 0;         // bytes, opted in
  double memory_bytes_per_second = 0;  // by its clock
};

// A card of the machine, as its driver describes it; nothing where it cannot be asked.
struct NamedDevice {
  Device device;
  std::string name;
};
std::optional<NamedDevice> ReadDevice(int ordinal);

// Where a launch goes.
struct Launch {
  const Device* device = nullptr;
  cudaStream_t stream = nullptr;
  // Device memory that lives as long as the launch may run, at least what the launcher's XxxScratch
  // said. Launches of one stream share it: it holds nothing from one launcher to the next.
  std::byte* scratch = nullptr;
};

// Whether this build has code for the current card, which is `device`.
bool HasCodeFor(const Device& device);

// Aborts when a launch failed: shapes and sizes were checked before, so it is our own mistake. What
// goes wrong while a kernel runs is seen later, by CudaBackend::Synchronize.
void CheckLaunch(cudaError_t error, const char* what);

// Rows of a step that the decode kernels take; larger steps multiply as prompts do.
inline constexpr int32_t kMaxDecodeRows = 16;

// --- kernels/rows.cu: ops that read and write rows of activations, any number of rows.

void Embed(const EmbedArgs& args, const Launch& launch);
void RopeTable(const RopeTableArgs& args, const Launch& launch);
// The residual's prologue without its norm: x += scale * [post_norm](y). REQUIRES y.
void AddResidual(const Residual& in, int32_t n_rows, const Launch& launch);
// h = norm(x) (norm null: x), as `format` (f32, f16 or bf16; f16 saturates), [n_rows, d].
void NormRows(const Residual& in, int32_t n_rows, DType format, void* h, const Launch& launch);
// out = `in` as `format`, n values.
void ConvertRows(const float* in, int64_t n, DType format, void* out, const Launch& launch);
// q, k, v hold W h + b of `args`, [n_rows, heads * dk]: norms and rotates q in place, norms and
// rotates k, appends k and v to the bank.
void RopeAppend(const NormQkvRopeAppendArgs& args, float* k, float* v, const Launch& launch);
// args.k_raw_out, of the same k, before RopeAppend or after it. REQUIRES k_raw_out.
void KeepRawKeys(const NormQkvRopeAppendArgs& args, const float* k, const Launch& launch);
// args.k_out, after the rows were appended. REQUIRES k_out.
void KeepKeys(const NormQkvRopeAppendArgs& args, const Launch& launch);
// out = act(gate) * up, where gate and up already hold their biases; n values. `in`, of gate and
// up, and `format`, of out: f32 or bf16. out may be gate where both are f32.
void GatedRows(Activation act, DType in, const void* gate, const void* up, DType format, void* out,
               int64_t n, const Launch& launch);

// --- kernels/logits.cu: logits of many rows, around the product (many_logits.h).

// Some rows and some outputs of the logits.
struct LogitsBand {
  int32_t first_row = 0;
  int32_t n_rows = 0;
  int64_t first_out = 0;
  int64_t n_out = 0;
};

// halves [2, n_rows, d], bf16: h = norm(x) of the rows from the `first` that is wanted, rounded;
// then what rounding left of it, rounded.
void SplitNormed(const NormLogitsArgs& args, int32_t first, int32_t n_rows, void* halves,
                 const Launch& launch);
// The band's logits, of `products` [2, band.n_rows, band.n_out]: W by both halves.
void FinishLogits(const NormLogitsArgs& args, const LogitsBand& band, const float* products,
                  const Launch& launch);

// --- kernels/matvec.cu: products of few rows (1 to kMaxDecodeRows) with a weight matrix, each
// weight read once (f32 once a row), at the speed of memory. The norm is part: h = norm(x).

// What becomes of the products y[r][o] of a Product.
enum class Finish : int32_t {
  kStore,   // part p's y = W x + b
  kAdd,     // y[r][o] += scale * (W h + b): y is the residual of the op that follows
  kGated,   // parts 0 and 1: y0 = act(W0 h + b0) * (W1 h + b1)
  kLogits,  // y = softcap(scale * (W h + b))
  kRope,    // parts q, k, v: rotated q stored, rotated k and v appended to the bank
};

struct ProductPart {
  WeightRef w;
  const float* bias = nullptr;  // [n_out]
  float* y = nullptr;           // [n_rows, n_out]
};

struct Product {
  const float* x = nullptr;         // [*, n_in]
  const int32_t* x_rows = nullptr;  // [n_rows]: row r of the product is row x_rows[r] of x; null: r
  const float* norm = nullptr;      // [n_in]; null: h = x
  float eps = 0;
  int32_t n_rows = 0;
  ProductPart parts[3];
  int32_t n_parts = 1;  // all with the same n_in and format
  Finish finish = Finish::kStore;
  float scale = 1;    // of kLogits and kAdd
  float softcap = 0;  // of kLogits
  Activation act = Activation::kSilu;
  // kRope: q_norm, k_norm are not for it (REQUIRES QkNorm::kNone, 2 * n_freq == dk or no rotation).
  const NormQkvRopeAppendArgs* qkv = nullptr;
};

void Multiply(const Product& product, const Launch& launch);
// Whether kRope takes these arguments; otherwise kStore and then RopeAppend.
bool CanMultiplyRope(const NormQkvRopeAppendArgs& args);

// --- kernels/attend.cu: attention of any number of rows, each weighed alone; meant for few.

size_t AttendScratch(const AttendArgs& args, const Device& device);
void Attend(const AttendArgs& args, const Launch& launch);

// --- kernels/merge_states.cu

void MergeStates(const MergeStatesArgs& args, const Launch& launch);
void PickHeads(const PickHeadsArgs& args, const Launch& launch);

// --- kernels/values.cu

void PickLogits(const PickLogitsArgs& args, const Launch& launch);
void SumValues(const SumValuesArgs& args, const Launch& launch);

// --- kernels/prefill_attend.cu: attention of many rows of consecutive positions.

// Where tiles of queries are fewer than the card holds blocks, the tokens of each are dealt to
// several blocks, at most so many.
inline constexpr int kMaxPromptParts = 32;
// Parts a tile that finish soonest, for blocks that all take equally long: as few rounds over the
// `slots` of the card for as little work a block.
int PartsFor(int64_t blocks, int64_t slots);

// Whether it takes these arguments: otherwise Attend.
bool CanAttendPrefill(const AttendArgs& args, const Device& device);
size_t AttendPrefillScratch(const AttendArgs& args, const Device& device);
void AttendPrefill(const AttendArgs& args, const Launch& launch);

// --- kernels/prefill_hopper.cu: the same by FlashInfer's kernel for Hopper, about twice as fast,
// in builds that have it (cmake/FlashInfer.cmake): dense plans, heads of 64, 96, 128 or 256.

// Whether it takes these arguments and gains: otherwise AttendPrefill.
bool CanAttendHopper(const AttendArgs& args, const Device& device);
size_t AttendHopperScratch(const AttendArgs& args, const Device& device);
// `o_bf16`: where o goes instead of args.o, as bf16; null: args.o.
void AttendHopper(const AttendArgs& args, void* o_bf16, const Launch& launch);

// --- kernels/score.cu: scores of tokens.

// Whether it takes these arguments.
bool CanScore(const ScoreArgs& args, const Device& device);
void Score(const ScoreArgs& args, const Launch& launch);

// --- kernels/score_hopper.cu: the same, with queries rounded to the type of K.

bool CanScoreHopper(const ScoreArgs& args, const Device& device);
size_t ScoreHopperScratch(const ScoreArgs& args);
void ScoreHopper(const ScoreArgs& args, const Launch& launch);

// --- kernels/summary.cu: summaries of units of tokens, and scores by them.

void BlockSummary(const BlockSummaryArgs& args, const Launch& launch);
void BlockScore(const BlockScoreArgs& args, const Launch& launch);

// --- kernels/key_score.cu

size_t KeyScoreScratch(const KeyScoreArgs& args);
void KeyScore(const KeyScoreArgs& args, const Launch& launch);

// --- kernels/index.cu, index_score.cu: an index of K, scores by it, and by K of listed tokens.

void IndexKeys(const IndexKeysArgs& args, const Launch& launch);
size_t IndexScoreScratch(const IndexScoreArgs& args, const Device& device);
void IndexScore(const IndexScoreArgs& args, const Launch& launch);
size_t RescoreScratch(const RescoreArgs& args, const Device& device);
void Rescore(const RescoreArgs& args, const Launch& launch);

// --- kernels/expected.cu: moments of queries, and scores by them.

size_t QueryMomentsScratch(const QueryMomentsArgs& args);
void QueryMomentsOf(const QueryMomentsArgs& args, const Launch& launch);
size_t ExpectedScoreScratch(const ExpectedScoreArgs& args);
void ExpectedScore(const ExpectedScoreArgs& args, const Launch& launch);

// --- kernels/select.cu and topk.cu: from scores to chosen tokens.

void ScoreReduce(const ScoreReduceArgs& args, const Launch& launch);
void AgedScores(const AgedScoresArgs& args, const Launch& launch);
void Pool(const PoolArgs& args, const Launch& launch);
void PlanRange(const PlanRangeArgs& args, const Launch& launch);
size_t TopKScratch(const TopKArgs& args, const Device& device);
void TopK(const TopKArgs& args, const Launch& launch);

// --- kernels/sample.cu

size_t NextTokenScratch(const NextTokenArgs& args, const Device& device);
void NextToken(const NextTokenArgs& args, const Launch& launch);

// --- kernels/working_set.cu: rows of K/V that live on the host.

void AverageScores(const AverageScoresArgs& args, const Launch& launch);
size_t WorkingSetScratch(const WorkingSetArgs& args);
void WorkingSet(const WorkingSetArgs& args, const Launch& launch);
// `behind_fetch`: the launch before it in the stream is a fetch, and nothing else was waited for in
// between: it may start before that one has ended.
void FetchRows(const FetchRowsArgs& args, const Launch& launch, bool behind_fetch = false);
void ListPieces(const ListPiecesArgs& args, const Launch& launch);
void PieceTable(const PieceTableArgs& args, const Launch& launch);

// --- kernels/host_lane.cu: what the card and the host tell each other (host_lane.h).

// Pieces that go to pinned memory; then *flag = ++*count, for the host.
struct HostPost {
  static constexpr int kMaxPieces = 24;
  struct Piece {
    const void* from;
    void* to;      // of 16 bytes
    size_t bytes;  // of 4
  };
  Piece pieces[kMaxPieces];
  int n_pieces = 0;
  uint64_t* count = nullptr;
  uint64_t* flag = nullptr;
};
void PostToHost(const HostPost& post, const Launch& launch);
// Waits until *done, which the host writes, has come up to *count.
void AwaitHost(const uint64_t* count, const uint64_t* done, const Launch& launch);

// --- kernels/kept_rows.cu

void StoreRows(const StoreRowsArgs& args, const Launch& launch);
void LocateRows(const LocateRowsArgs& args, const Launch& launch);
void Compact(const CompactArgs& args, const Launch& launch);
void Evict(const EvictArgs& args, const Launch& launch);
void UndoEvict(const UndoEvictArgs& args, const Launch& launch);

// --- kernels/ceiling.cu: for measurements.

// Reads `bytes` bytes (of 16) once, each block a stretch of memory after the other (`together`) or
// all of them together several. Cards of one kind differ in which is faster.
void ReadAll(const std::byte* data, int64_t bytes, bool together, uint32_t* sink,
             const Launch& launch);
// n bf16 values in [-1, 1).
void FillNoise(uint16_t* data, int64_t n, const Launch& launch);

// --- kernels/dequant.cu: weights as the library that multiplies many rows wants them.

// out[o][i] = W[first + o][i] as `format` (f32 or bf16), dense, n_rows rows.
void DequantiseRows(const WeightRef& w, int64_t first, int64_t n_rows, DType format, void* out,
                    const Launch& launch);

}  // namespace omnikv::cuda
