#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "backend/kv_format.h"
#include "policy/infllm/infllm.h"
#include "policy/turn_queries.h"

namespace omnikv {
namespace {

// Where far tokens are read.
const KvView& HomeOf(const LayerStep& step, const AttendArgs& attend) {
  return step.home != nullptr ? *step.home : attend.kv;
}

}  // namespace

Status FarMemory::Prepare(const PolicyContext& context, const FarShape& shape,
                          int32_t representatives, int32_t rows) {
  context_ = context;
  shape_ = shape;
  representatives_ = representatives;
  rows_ = rows;
  max_blocks_ = shape.Blocks(context.max_context);
  stride_ = static_cast<int32_t>(std::min<int64_t>(
      context.max_context, int64_t{shape.recent} + shape.block + std::max(rows, 1)));
  score_stride_ = (max_blocks_ + 15) / 16 * 16;
  if (context.backend == nullptr) return {};
  Backend& backend = *context.backend;
  const int64_t seqs = context.max_seqs;
  const int64_t layers = int64_t{context.n_layers} * seqs;
  const int64_t heads = context.n_heads;
  const int64_t far_tokens = int64_t{shape.Slots()} * shape.block;
  const auto words = [](size_t bytes) { return static_cast<int64_t>((bytes + 3) / 4); };
  const auto room = [&](Buffer& buffer, int64_t n, std::string_view what) -> Status {
    OKV_ASSIGN_OR_RETURN(buffer, memory_.Take(backend, std::max<int64_t>(n, 1), what));
    return {};
  };
  const auto of_seqs = [&](size_t bytes) { return words(static_cast<size_t>(seqs) * bytes); };
  if (context.max_context > shape.recent) {
    const auto row_bytes = static_cast<size_t>(context.row_layout.token_bytes);
    OKV_RETURN_IF_ERROR(
        room(far_, words(static_cast<size_t>(layers * far_tokens) * row_bytes), "far memory"));
  }
  OKV_RETURN_IF_ERROR(room(pos_, layers * far_tokens, "far memory"));
  OKV_RETURN_IF_ERROR(room(table_, layers * shape.Entries(), "far memory"));
  OKV_RETURN_IF_ERROR(room(owner_, layers * shape.cache, "far memory"));
  OKV_RETURN_IF_ERROR(room(stamp_, layers * shape.cache, "far memory"));
  OKV_RETURN_IF_ERROR(room(clock_, layers, "far memory"));
  OKV_RETURN_IF_ERROR(room(copied_, layers, "far memory"));
  if (HasBlocks()) {
    OKV_RETURN_IF_ERROR(room(sums_, layers * kWeightRing * heads * stride_, "weights of tokens"));
    OKV_RETURN_IF_ERROR(room(keys_, layers * max_blocks_ * KeyFloats(), "keys of blocks"));
  }
  OKV_RETURN_IF_ERROR(room(q_, context.max_rows * KeyFloats(), "far queries"));
  OKV_RETURN_IF_ERROR(room(far_o_, context.max_rows * KeyFloats(), "far queries"));
  OKV_RETURN_IF_ERROR(room(far_lse_, context.max_rows * heads, "far queries"));
  OKV_RETURN_IF_ERROR(room(mean_q_, KeyFloats(), "far queries"));
  OKV_RETURN_IF_ERROR(room(scores_, seqs * score_stride_, "scores of blocks"));
  OKV_RETURN_IF_ERROR(room(index_, seqs * shape.most, "chosen blocks"));
  OKV_RETURN_IF_ERROR(room(count_, seqs, "chosen blocks"));
  OKV_RETURN_IF_ERROR(room(miss_, seqs * 2 * shape.most, "chosen blocks"));
  OKV_RETURN_IF_ERROR(room(n_miss_, seqs, "chosen blocks"));
  OKV_RETURN_IF_ERROR(room(range_, 2 * seqs, "chosen blocks"));
  for (Located& at : located_) {
    OKV_RETURN_IF_ERROR(room(
        at.to_rows, words(static_cast<size_t>(context.max_rows) * sizeof(RowMeta)), "far places"));
    OKV_RETURN_IF_ERROR(room(at.to_seqs, of_seqs(sizeof(SeqMeta)), "far places"));
    OKV_RETURN_IF_ERROR(room(at.units, of_seqs(sizeof(SeqMeta)), "far places"));
    OKV_RETURN_IF_ERROR(room(at.bounds, 2 * seqs, "far places"));
    OKV_RETURN_IF_ERROR(room(at.n_candidates, seqs, "chosen blocks"));
    OKV_RETURN_IF_ERROR(room(at.n_pick, seqs, "chosen blocks"));
  }
  OKV_RETURN_IF_ERROR(room(one_, 1, "chosen blocks"));
  OKV_RETURN_IF_ERROR(room(numbers_, seqs, "chosen blocks"));
  const float one = 1;
  backend.Upload(one_.as(), &one, sizeof(one));
  std::vector<int32_t> numbers(static_cast<size_t>(seqs));
  std::iota(numbers.begin(), numbers.end(), 0);
  backend.Upload(numbers_.as(), numbers.data(), numbers.size() * sizeof(int32_t));
  Forget();
  return {};
}

void FarMemory::Forget() const {
  const auto zero = [&](const Buffer& buffer, int byte) {
    std::vector<std::byte> bytes(buffer.size(), static_cast<std::byte>(byte));
    context_.backend->Upload(buffer.as(), bytes.data(), bytes.size());
  };
  zero(owner_, 0xff);  // -1: no block
  for (const Buffer* buffer : {&stamp_, &clock_, &copied_}) zero(*buffer, 0);
}

void FarMemory::Locate(const AttendArgs& step, int32_t skip, bool prefill) const {
  const Located& at = At(prefill);
  context_.backend->Enqueue(LocateFar({.rows = step.rows,
                                       .seqs = step.seqs,
                                       .to_rows = at.to_rows.as<RowMeta>(),
                                       .to_seqs = at.to_seqs.as<SeqMeta>(),
                                       .units = at.units.as<SeqMeta>(),
                                       .bounds = at.bounds.as<int32_t>(),
                                       .n_candidates = at.n_candidates.as<int32_t>(),
                                       .n_pick = at.n_pick.as<int32_t>(),
                                       .shape = shape_,
                                       .n_rows = step.n_rows,
                                       .n_seqs = step.n_seqs,
                                       .skip = skip,
                                       .prefill = prefill ? 1 : 0}));
}

KvView FarMemory::View(int32_t layer, const KvView& kv) const {
  const int64_t rows = int64_t{context_.max_seqs} * shape_.Slots() * shape_.block;
  std::byte* const base =
      far_.as<std::byte>() + layer * rows * int64_t{context_.row_layout.token_bytes};
  KvView view = MakeKvView(base, Of(table_, layer, shape_.Entries()), shape_.block, kv.k.dtype,
                           kv.n_kv_heads, kv.dk, kv.dv);
  view.pos = pos_.as<int32_t>() + layer * rows;
  return view;
}

void FarMemory::Choose(const LayerStep& step, const AttendArgs& attend) const {
  Backend& backend = *context_.backend;
  const Located& at = At(step.prefill);
  const float* q = q_.as<float>();
  if (step.prefill) {
    q = mean_q_.as<float>();
    backend.Enqueue(MeanRows({.in = q_.as<float>(),
                              .out = mean_q_.as<float>(),
                              .n_rows = attend.n_rows,
                              .width = static_cast<int32_t>(KeyFloats())}));
  }
  // Every query head has a key of its own in a block, so it is its own KV head here.
  backend.Enqueue(
      BlockScoreArgs{.q = q,
                     .summaries = {.base = reinterpret_cast<std::byte*>(Keys(step.layer)),
                                   .block_table = numbers_.as<int32_t>(),
                                   .block_units = max_blocks_,
                                   .row_bytes = KeyFloats() * static_cast<int64_t>(sizeof(float))},
                     .seqs = at.units.as<SeqMeta>(),
                     .out = scores_.as<float>(),
                     .stride = score_stride_,
                     .n_seqs = attend.n_seqs,
                     .n_heads = attend.n_heads,
                     .n_kv_heads = attend.n_heads,
                     .dk = context_.dk,
                     .heads = HeadReduce::kSum});
  backend.Enqueue(TopKArgs{.scores = scores_.as<float>(),
                           .weights = one_.as<float>(),
                           .seqs = at.units.as<SeqMeta>(),
                           .n_candidates = at.n_candidates.as<int32_t>(),
                           .n_pick = at.n_pick.as<int32_t>(),
                           .index = index_.as<int32_t>(),
                           .count = count_.as<int32_t>(),
                           .stride = score_stride_,
                           .capacity = shape_.most,
                           .n_seqs = attend.n_seqs});
}

void FarMemory::Keep(const LayerStep& step, const AttendArgs& attend) const {
  context_.backend->Enqueue(KeepBlocks(
      {.seqs = attend.seqs,
       .index = index_.as<int32_t>(),
       .count = count_.as<int32_t>(),
       .owner = Of(owner_, step.layer, shape_.cache),
       .stamp = stamp_.as<uint32_t>() + int64_t{step.layer} * context_.max_seqs * shape_.cache,
       .clock = clock_.as<uint32_t>() + int64_t{step.layer} * context_.max_seqs,
       .table = Of(table_, step.layer, shape_.Entries()),
       .miss = miss_.as<int32_t>(),
       .n_miss = n_miss_.as<int32_t>(),
       .copied = Of(copied_, step.layer, 1),
       .range = range_.as<int32_t>(),
       .shape = shape_,
       .n_seqs = attend.n_seqs}));
}

void FarMemory::Attend(const LayerStep& step, const AttendArgs& attend, int32_t skip) {
  Backend& backend = *context_.backend;
  // All rows, since a chunk chooses by their mean.
  backend.Enqueue(TurnQueries({.q = attend.q,
                               .out = q_.as<float>(),
                               .rows = attend.rows,
                               .inv_freq = InvFreq(step.layer),
                               .n_rows = attend.n_rows,
                               .n_heads = attend.n_heads,
                               .dk = attend.kv.dk,
                               .n_freq = context_.n_freq,
                               .least = shape_.recent,
                               .most = shape_.recent}));
  if (HasBlocks()) Choose(step, attend);
  Keep(step, attend);
  AttendArgs far = attend;
  far.kv = View(step.layer, attend.kv);
  backend.Enqueue(CopyFar(
      copies_.At({.from = HomeOf(step, attend),
                  .to = far.kv,
                  .pos = const_cast<int32_t*>(far.kv.pos),  // NOLINT: it is this policy's own
                  .seqs = attend.seqs,
                  .miss = miss_.as<int32_t>(),
                  .n_miss = n_miss_.as<int32_t>(),
                  .range = range_.as<int32_t>(),
                  .inv_freq = InvFreq(step.layer),
                  .shape = shape_,
                  .n_freq = context_.n_freq,
                  .n_seqs = attend.n_seqs,
                  .n_rows = attend.n_rows})));
  far.q = q_.as<float>() + skip * KeyFloats();
  far.o = far_o_.as<float>();
  far.lse = far_lse_.as<float>();
  far.rows = At(step.prefill).to_rows.as<RowMeta>();
  far.seqs = At(step.prefill).to_seqs.as<SeqMeta>();
  far.n_rows = attend.n_rows - skip;
  far.plan = AttnPlan::Dense();
  far.score = ScoreKind::kNone;
  if (!step.prefill) far.plan.segments[0].bounds = At(false).bounds.as<int32_t>();
  backend.Enqueue(far);
}

void FarMemory::Weigh(const LayerStep& step, const AttendArgs& attend) {
  if (!HasBlocks()) return;
  Backend& backend = *context_.backend;
  if (!step.prefill) {
    backend.Enqueue(AddWeights({.logits = attend.scores,
                                .lse = attend.lse,
                                .seqs = attend.seqs,
                                .sums = Sums(step.layer),
                                .logit_stride = attend.score_stride,
                                .shape = shape_,
                                .n_seqs = attend.n_seqs,
                                .n_heads = attend.n_heads,
                                .stride = stride_}));
  } else {
    backend.Enqueue(WeighLocal(weighings_.At({.kv = attend.kv,
                                              .q = attend.q,
                                              .lse = attend.lse,
                                              .seqs = attend.seqs,
                                              .sums = Sums(step.layer),
                                              .shape = shape_,
                                              .n_seqs = attend.n_seqs,
                                              .n_heads = attend.n_heads,
                                              .stride = stride_,
                                              .scale = attend.scale,
                                              .softcap = attend.softcap})));
  }
  backend.Enqueue(Represent(keys_made_.At({.kv = HomeOf(step, attend),
                                           .seqs = attend.seqs,
                                           .sums = Sums(step.layer),
                                           .keys = Keys(step.layer),
                                           .inv_freq = InvFreq(step.layer),
                                           .shape = shape_,
                                           .n_freq = context_.n_freq,
                                           .n_seqs = attend.n_seqs,
                                           .n_heads = attend.n_heads,
                                           .n_rows = attend.n_rows,
                                           .stride = stride_,
                                           .representatives = representatives_,
                                           .max_blocks = max_blocks_})));
}

}  // namespace omnikv
