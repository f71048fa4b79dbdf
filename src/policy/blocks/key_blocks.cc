#include "policy/blocks/key_blocks.h"

#include <fmt/format.h>

#include <cstring>
#include <numeric>
#include <vector>

#include "policy/first_layers.h"

namespace omnikv {

Result<BlockChoice::Rule> KeyBlocks::ReadRule(const PolicyContext& context,
                                              PolicySettings& settings) {
  const auto block = static_cast<int32_t>(settings.Int("block"));
  OKV_ASSIGN_OR_RETURN(const int32_t budget, WholeBlocks("blocks", "block", block, settings));
  kt_ = settings.Text("compat") == "kt";
  Rule rule{.blocks = {.block = block,
                       .budget = budget,
                       .sinks = static_cast<int32_t>((settings.Int("sinks") + block - 1) / block),
                       .recent = static_cast<int32_t>(settings.Int("recent") / block + 1),
                       .token_step = static_cast<int32_t>(settings.Int("token_step")),
                       .prompt_alone = kt_ ? 1 : 0},
            .dense_layers = static_cast<int32_t>(settings.Int("dense_layers")),
            .layer_step = static_cast<int32_t>(settings.Int("layer_step")),
            .per_kv_head = settings.Text("lists") == "per_kv_head",
            .own_keys = kt_,
            .key_heads = context.n_heads,
            .current = !kt_};
  OKV_RETURN_IF_ERROR(CheckFirstLayers("blocks", "dense_layers", rule.dense_layers, context));
  if (rule.blocks.sinks + rule.blocks.recent >= budget) {
    return InvalidArgument(fmt::format(
        "policy blocks: budget is {}, or {} blocks, of which sinks take {} and recent takes {} "
        "with the block in the making, expected at least one more",
        settings.Int("budget"), budget, rule.blocks.sinks, rule.blocks.recent));
  }
  OKV_RETURN_IF_ERROR(ReadKeys(settings, rule));
  OKV_RETURN_IF_ERROR(ReadPrompt(context, settings, rule));
  holds_ = rule.blocks.token_step > 1;
  return rule;
}

Status KeyBlocks::ReadKeys(const PolicySettings& settings, Rule& rule) {
  const std::string kind = settings.Text("representative");
  const int32_t block = rule.blocks.block;
  representatives_ = static_cast<int32_t>(settings.Int("representatives"));
  by_weight_ = kind == "dynamic";
  if (by_weight_ && representatives_ > block) {
    return InvalidArgument(
        fmt::format("policy blocks: representatives is {}, expected at most block, which is {}",
                    representatives_, block));
  }
  // The mean of a block's representatives chooses as their sum does: each block has as many.
  if (kind == "fixed" && block % representatives_ == 0) rule.every = block / representatives_;
  const int32_t expected = by_weight_ ? representatives_ : kind == "fixed" ? block / rule.every : 1;
  if (representatives_ != expected) {
    return InvalidArgument(
        fmt::format("policy blocks: representatives is {}, expected {}", representatives_,
                    kind == "fixed" ? fmt::format("a divisor of block, which is {}", block)
                                    : fmt::format("1 with representative={}", kind)));
  }
  if (kt_) {
    rule.kind = SummaryKind::kMinMax;
    keys_of_prompt_ = by_weight_        ? BlockKeys::kBoundsBest
                      : kind == "max"   ? BlockKeys::kBoundsMax
                      : kind == "quest" ? BlockKeys::kBoundsQuest
                      : kind == "fixed" ? BlockKeys::kBoundsOf
                                        : BlockKeys::kBoundsMean;
    return {};
  }
  if (kind == "max") rule.kind = SummaryKind::kMax;
  if (kind == "quest") rule.kind = SummaryKind::kMinMax;
  if (!by_weight_) return {};
  rule.own_keys = true;  // they follow from queries, too, so no other sequence may share them
  keys_of_prompt_ = BlockKeys::kBest;
  return {};
}

Status KeyBlocks::ReadPrompt(const PolicyContext& context, PolicySettings& settings, Rule& rule) {
  if (!kt_) rule.key_heads = context.n_kv_heads;
  preselects_ = settings.Text("preselect") != "off";
  if (preselects_) rule.blocks.preselect = static_cast<int32_t>(settings.Int("preselect"));
  if (settings.IsAuto("widen")) {
    settings.Resolve("widen", std::to_string(kt_ ? rule.blocks.block / 4 : 0));
  }
  widen_ = static_cast<int32_t>(settings.Int("widen"));
  queries_ = looks_back() ? static_cast<int32_t>(settings.Int("queries")) : 1;
  if (context.backend == nullptr || queries_ <= context.max_rows) return {};
  return InvalidArgument(
      fmt::format("policy blocks: queries is {}, expected at most the {} rows of a step "
                  "(`prefill_chunk`)",
                  queries_, context.max_rows));
}

Status KeyBlocks::Allocate() {
  Backend& backend = *context().backend;
  const int64_t seqs = context().max_seqs;
  weight_stride_ = (context().max_context + 15) / 16 * 16;
  const auto take = [&](Buffer& buffer, int64_t n, const char* what) -> Status {
    OKV_ASSIGN_OR_RETURN(buffer, memory().Take(backend, n, what));
    return {};
  };
  OKV_RETURN_IF_ERROR(take(keep_, seqs, "chosen blocks"));
  if (holds_) OKV_RETURN_IF_ERROR(take(made_, 2 * seqs, "chosen blocks"));
  if (rule().own_keys) {
    OKV_RETURN_IF_ERROR(take(keys_, n_choosers() * seqs * stride() * KeyWords(), "keys of blocks"));
    OKV_RETURN_IF_ERROR(take(own_table_, seqs * stride(), "keys of blocks"));
    OKV_RETURN_IF_ERROR(
        take(own_seqs_, seqs * static_cast<int64_t>(sizeof(SeqMeta)) / 4, "keys of blocks"));
    std::vector<int32_t> rows(static_cast<size_t>(seqs * stride()));
    std::iota(rows.begin(), rows.end(), 0);
    backend.Upload(own_table_.as(), rows.data(), rows.size() * sizeof(int32_t));
  }
  if (kt_) OKV_RETURN_IF_ERROR(take(of_heads_, seqs * context().n_heads * stride(), "scores"));
  if (looks_back()) {
    OKV_RETURN_IF_ERROR(take(weights_, WeightRows() * weight_stride_, "weights of a prompt"));
    const int64_t heads = context().n_heads;
    OKV_RETURN_IF_ERROR(kt_ ? take(norms_, 2 * queries_ * heads, "weights of a prompt")
                            : take(lse_, context().max_rows * heads, "weights of a prompt"));
  }
  if (!preselects_) return {};
  OKV_RETURN_IF_ERROR(take(bias_, n_choosers() * seqs * lists() * stride(), "kept blocks"));
  OKV_RETURN_IF_ERROR(take(block_weights_, SelectedLists() * stride(), "kept blocks"));
  const int64_t most = int64_t{rule().blocks.sinks} + rule().blocks.preselect;
  return selected_.Prepare(backend, memory(), {}, /*n_seqs=*/1, SelectedLists(),
                           static_cast<int32_t>(std::clamp<int64_t>(most, 1, stride())),
                           "kept blocks");
}

void KeyBlocks::SplitBlocks(const AttendArgs& step) {
  if (!holds_ && !preselects_ && !rule().own_keys) return;
  context().backend->Enqueue(
      HoldChoice({.seqs = step.seqs,
                  .n_candidates = choice().n_candidates(),
                  .n_pick = choice().n_pick(),
                  .keep = keep_.as<int32_t>(),
                  .made = holds_ ? made_.as<int32_t>() : nullptr,
                  .index = choice().index(),
                  .count = choice().count(),
                  .own_seqs = rule().own_keys ? own_seqs_.as<SeqMeta>() : nullptr,
                  .rule = rule().blocks,
                  .n_seqs = step.n_seqs,
                  .choices = n_choosers(),
                  .lists = lists(),
                  .list_words = lists() * choice().capacity(),
                  .own_stride = static_cast<int32_t>(stride())}));
}

BlockKeysArgs KeyBlocks::KeysOf(int32_t chooser, const AttendArgs& attend) const {
  return {.k = KeyRows::Of(attend.kv),
          .seqs = attend.seqs,
          .scores = nullptr,
          .out = Keys(chooser, 0),
          .n_kv_heads = context().n_kv_heads,
          .heads = rule().key_heads,
          .dk = context().dk,
          .unit = rule().blocks.block,
          .best = representatives_,
          .every = 1,
          .stride = static_cast<int32_t>(weight_stride_),
          .units = static_cast<int32_t>(stride()),
          .n_seqs = attend.n_seqs,
          .keys = BlockKeys::kMean};
}

void KeyBlocks::MakeKeys(int32_t chooser, const AttendArgs& attend) {
  if (!rule().own_keys) return BlockChoice::MakeKeys(chooser, attend);
  if (rule().current) context().backend->Enqueue(MakeBlockKeys(KeysOf(chooser, attend)));
}

void KeyBlocks::Plan(const LayerStep& step, AttendArgs& attend) {
  BlockChoice::Plan(step, attend);
  if (looks_back() && !kt_ && EndsPrompt(step, attend)) attend.lse = lse_.as<float>();
}

void KeyBlocks::EnqueueWeights(const AttendArgs& attend, const SeqMeta* seq) const {
  if (kt_) {
    context().backend->Enqueue(
        TokenWeights({.k = KeyRows::Of(attend.kv),
                      .q = attend.q,
                      .seqs = seq,
                      .norms = norms_.as<float>(),
                      .out = weights_.as<float>(),
                      .n_heads = context().n_heads,
                      .n_kv_heads = context().n_kv_heads,
                      .dk = context().dk,
                      .window = queries_,
                      .stride = static_cast<int32_t>(weight_stride_),
                      .scale_bits = std::bit_cast<uint32_t>(attend.scale),
                      .softcap_bits = std::bit_cast<uint32_t>(attend.softcap),
                      .max_rows = std::min(queries_, attend.n_rows)}));
    return;
  }
  context().backend->Enqueue(ScoreArgs{.q = attend.q,
                                       .lse = attend.lse,
                                       .kv = attend.kv,
                                       .seqs = seq,
                                       .out = weights_.as<float>(),
                                       .stride = weight_stride_,
                                       .n_rows = attend.n_rows,
                                       .n_seqs = 1,
                                       .n_heads = attend.n_heads,
                                       .lists = context().n_kv_heads,
                                       .window = queries_,
                                       .heads = HeadReduce::kMean,
                                       .queries = QueryReduce::kSum,
                                       .scale = attend.scale,
                                       .softcap = attend.softcap});
}

void KeyBlocks::Observe(const LayerStep& step, const AttendArgs& attend) {
  if (!EndsPrompt(step, attend)) return;
  const int32_t chooser = ChooserOf(step.layer);
  const SeqMeta* seq = attend.seqs + step.seq;
  if (looks_back()) EnqueueWeights(attend, seq);
  if (rule().own_keys) {
    BlockKeysArgs keys = KeysOf(chooser, attend);
    keys.seqs = seq;
    keys.scores = weights_.as<float>();
    keys.out = Keys(chooser, step.seq);
    keys.every = rule().every;
    keys.n_seqs = 1;
    keys.keys = keys_of_prompt_;
    context().backend->Enqueue(MakeBlockKeys(keys));
  }
  if (preselects_) Preselect(chooser, step.seq, seq);
}

void KeyBlocks::Preselect(int32_t chooser, int32_t seq_number, const SeqMeta* seq) const {
  const auto blocks = static_cast<int32_t>(stride());
  context().backend->Enqueue(BlockWeights({.in = weights_.as<float>(),
                                           .out = block_weights_.as<float>(),
                                           .seqs = seq,
                                           .n_candidates = selected_.n_candidates(),
                                           .n_pick = selected_.n_pick(),
                                           .rule = rule().blocks,
                                           .n_in = WeightRows(),
                                           .in_stride = static_cast<int32_t>(weight_stride_),
                                           .lists = SelectedLists(),
                                           .stride = blocks,
                                           .widen = widen_}));
  selected_.EnqueueBest(block_weights_.as<float>(), blocks, seq, 1);
  context().backend->Enqueue(Exclude({.index = selected_.index(),
                                      .count = selected_.count(),
                                      .n_candidates = selected_.n_candidates(),
                                      .bias = Bias(chooser, seq_number),
                                      .chosen = SelectedLists(),
                                      .capacity = selected_.capacity(),
                                      .lists = lists(),
                                      .stride = blocks}));
}

void KeyBlocks::Score(int32_t chooser, const AttendArgs& attend) {
  if (!rule().own_keys) {
    BlockChoice::Score(chooser, attend);
  } else {
    const StateView keys{.base = reinterpret_cast<std::byte*>(Keys(chooser, 0)),
                         .block_table = own_table_.as<int32_t>(),
                         .row_bytes = 4 * KeyWords()};
    BlockScoreArgs score = ScoreOf(keys, attend);
    score.seqs = own_seqs_.as<SeqMeta>();
    score.n_kv_heads = rule().key_heads;
    if (kt_) {
      score.out = of_heads_.as<float>();
      score.lists = context().n_heads;
    }
    context().backend->Enqueue(score);
  }
  if (!preselects_ && !kt_) return;
  context().backend->Enqueue(ListScores({.in = kt_ ? of_heads_.as<float>() : scores(),
                                         .bias = preselects_ ? Bias(chooser, 0) : nullptr,
                                         .out = scores(),
                                         .seqs = attend.seqs,
                                         .n_seqs = attend.n_seqs,
                                         .n_in = kt_ ? context().n_heads : lists(),
                                         .lists = lists(),
                                         .stride = static_cast<int32_t>(stride()),
                                         .block = rule().blocks.block,
                                         .sinks = rule().blocks.sinks,
                                         .prompt_alone = rule().blocks.prompt_alone}));
}

}  // namespace omnikv
