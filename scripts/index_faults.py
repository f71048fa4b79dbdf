"""Faults of dense=indexed and of its index of K, for mutants.py: the form is that of faults.py."""

KERNELS = "src/backend/cuda/kernels/"
INDEX, INDEX_SCORE = KERNELS + "index.cu", KERNELS + "index_score.cu"
KEY_INDEX = "src/policy/omnikv/key_index.cc"

FAULTS_OF_INDEX = {
    "indexed_scores_stay_those_of_the_index": (
        KEY_INDEX, "  scores.Reduce(choice, attend, rescored, units_first_);\n", ""),
    "indexed_last_tokens_not_rescored": (KEY_INDEX, "rescored.bounds = candidates_.Recent();", ""),
    "near_last_tokens_have_no_logits": (
        KEY_INDEX, "if (units_first_) logits.only.bounds = candidates_.Recent();", ""),
    "units_leave_out_the_tokens_behind_them": (
        KEY_INDEX, "(rescored_.budget + 1) * kIndexUnit", "rescored_.budget * kIndexUnit"),
    "index_codes_of_the_upper_half_not_shifted": (
        INDEX_SCORE, "v[1][e] >> 4 & kLower", "v[1][e] & kLower"),
    "index_codes_cut_off": (INDEX, "rintf((HeadValue", "floorf((HeadValue"),
    "index_zero_of_a_key_left_out": (INDEX_SCORE, "ranges[half].zero() * sum", "0 * sum"),
    "ranges_begin_above_the_lowest_value": (
        "src/base/dtype.h", "(u >> 31) * 0xffffu", "(u >> 31) * 0"),
    "scores_by_place_lie_one_behind": (
        "src/backend/score_ops.h", "by_place ? i : token", "by_place ? i + 1 : token"),
    "tokens_past_the_end_have_keys": (
        KERNELS + "topk.cu",
        "mine + 128 * i + j < in.n ? ToKey(in, c.key[i][j]) : kNoKey", "ToKey(in, c.key[i][j])"),
    "index_digits_of_another_base": (INDEX_SCORE, "c[0][at] * 256", "c[0][at] * 255"),
    "index_digits_of_the_other_tile": (
        INDEX_SCORE, "own ? sums[0][0][at] : sums[1][0][at]", "own ? sums[1][0][at] : sums[0][0][at]"),
    "index_stages_of_the_block_before": (INDEX_SCORE, ", block = next_block;", ";"),
    "index_stages_are_all_of_the_first_side": (INDEX_SCORE, "span = side * kSpan,", "span = 0,"),
    "index_tops_do_not_rise": (INDEX_SCORE, "part.sum *= Exp2((part.top - most) * kLog2E);", ""),
    "units_of_the_index_have_four_tokens": (
        INDEX_SCORE, "fmaxf(highest, __shfl_xor_sync(kAllLanes, highest, 4))", "highest"),
    "units_are_all_of_the_last_tiles": (INDEX_SCORE, "before ? held_ : highest", "highest"),
    "listed_logits_by_head": (INDEX_SCORE, "token_stride_(a.by_token ? a.n_heads : 1)",
                              "token_stride_(1)"),
    "chosen_tokens_are_of_the_first_block": (
        KERNELS + "topk.cu", "in.first + s.own_at[i]", "s.own_at[i]"),
    "units_on_a_cpu_have_one_token": (
        "src/backend/cpu/score_kernels.cc", "HighestOfUnit(w[i] + t, n - t)", "w[i][t]"),
    "rescore_gives_heads_those_of_their_neighbours": (
        INDEX, "parts[i] = own + __shfl_xor_sync(kAllLanes, other, kStep);",
        "parts[i] = own + __shfl_xor_sync(kAllLanes, other, kStep ^ 1);"),
    "rescored_tokens_count_twice": (INDEX, "1 - all.before) + all.after", "1.0f) + all.after"),
}

CHECKS_OF_INDEX = {
    "near_last_tokens_have_no_logits": ("policy_test", "OmnikvIndexed.*"),
    "ranges_begin_above_the_lowest_value": ("parity_test", "*IndexKeys*"),
    "scores_by_place_lie_one_behind": ("policy_test", "OmnikvIndexed.*"),
    "units_leave_out_the_tokens_behind_them": ("policy_test", "OmnikvIndexed.*"),
    "units_on_a_cpu_have_one_token": ("parity_test", "*IndexScore*"),
}
