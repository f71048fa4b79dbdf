"""Faults of K/V that lie by head, for mutants.py: the form is that of faults.py."""

FAULTS_OF_ROWS_BY_HEAD = {
    "blocks_by_head_have_a_row_per_token": (
        "src/backend/attn_plan.h", "return block * BlockRows() + t % block_tokens;",
        "return block * block_tokens + t % block_tokens;"),
    "one_score_of_heads_that_are_walked_alone": (
        "src/backend/cpu/attend.cc", "return a.kv.ByHead() && a.score != ScoreKind::kHeadMax;",
        "return a.kv.ByHead();"),
    "heads_that_lie_apart_move_as_one": (
        "src/backend/ops.h", "lists == 1 && (kv.ByHead() || Source().ByHead())", "lists == 0"),
    "parts_of_a_block_by_head_are_one_piece": (
        "src/bank/bank.cc", "if (by_head && (t % bt != 0 || t >= end_of_whole)) {", "if (false) {"),
    "parts_of_a_block_begin_with_its_first_row": (
        "src/bank/bank.cc", "((block * heads + head) * bt + first % bt) * row_bytes / heads",
        "(block * heads + head) * bt * row_bytes / heads"),
    "rows_are_sent_as_they_lie": (
        "src/bank/bank_image.cc", "streams_[stream].spec.by_head;\n", "false;\n"),
    "a_later_block_is_sent_as_the_first": (
        "src/bank/bank_image.cc", "if (by_head && at == 0)", "if (by_head && sent_.empty())"),
    "noise_fills_the_rows_of_the_first_head": (
        "src/bank/bank.cc", "rows = config_.BlocksFor(rows) * kind.block_rows;",
        "rows = config_.BlocksFor(rows) * config_.block_tokens;"),
    "a_pattern_of_noise_ends_with_its_last_row": (
        "src/bank/noise_rows.cc", "for (int64_t r = 0; r < kind.block_rows; ++r) {",
        "for (int64_t r = 0; r < 0 * kind.block_rows; ++r) {"),
    "no_kv_lie_by_head": (
        "src/engine/placement.cc", "plan.attends_away && !reads.by_token;", "false;"),
    "heads_lie_apart_that_leave_their_rows_unfilled": (
        "src/engine/plan_bank.cc", "plan.by_head && fits_by_head && layer.OnHost();",
        "plan.by_head && (fits_by_head || true) && layer.OnHost();"),
    "decode_on_a_card_takes_blocks_by_head_for_others": (
        "src/backend/cuda/kernels/attend_plan.cuh", "next_block_ * block_rows_)",
        "next_block_ * static_cast<uint32_t>(block_tokens_))"),
    "prompts_on_a_card_take_blocks_by_head_for_others": (
        "src/backend/cuda/kernels/prefill_hopper.cuh", "p.block_rows = kv.BlockRows();",
        "p.block_rows = kv.block_tokens;"),
    "our_prompts_on_a_card_take_blocks_by_head_for_others": (
        "src/backend/cuda/kernels/prefill_attend.cu", "(block * kv.BlockRows() +",
        "(block * block_tokens +"),
    "scores_on_a_card_take_blocks_by_head_for_others": (
        "src/backend/cuda/kernels/score_hopper.cu", "block] * a.kv.BlockRows() +",
        "block] * a.kv.block_tokens +"),
}
CHECKS_OF_ROWS_BY_HEAD = {
    "a_pattern_of_noise_ends_with_its_last_row": ("bank_test", "NoiseRowsTest.*"),
    "heads_that_lie_apart_move_as_one": ("parity_test", "*Compact"),
    "blocks_by_head_have_a_row_per_token": ("bank_test", "StreamsTest.*"),
    "one_score_of_heads_that_are_walked_alone": ("parity_test", "*AttendOtherPlanes"),
    "heads_lie_apart_that_leave_their_rows_unfilled": ("engine_test", "PlacementTest*"),
}
