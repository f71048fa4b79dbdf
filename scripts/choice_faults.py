"""Faults of TopK and Score on a card, for mutants.py: the form is that of faults.py."""

KERNELS = "src/backend/cuda/kernels/"
BOUNDED = KERNELS + "topk_bounded.cu"
LISTED = KERNELS + "topk_listed.cu"
ROWS = KERNELS + "score_rows.cu"
WAIT = "  cuda::GridTrigger();\n  cuda::GridWait();"

FAULTS_OF_CHOICES = {
    "few_digits_end_early": (KERNELS + "topk.cu", "rank == found.n", "rank <= found.n"),
    "keys_of_a_range_stay_in_their_block": (
        KERNELS + "topk.cu", ", to) = above;", ", block) = above;"),
    "keys_of_a_range_begin_behind_their_block": (
        KERNELS + "topk.cu", "lane < block) of_block", "lane <= block) of_block"),
    "keys_of_a_block_lie_before_its_own": (
        KERNELS + "topk.cu", "i < first; i += kThreads) before", "i < n_range; i += kThreads) before"),
    "keys_above_a_range_are_of_the_next_block": (
        KERNELS + "topk.cu", "lane == 0 && to > block", "lane == 0 && to >= block"),
    "low_scores_have_a_range": (KERNELS + "topk.cu", "bin <= 1 || bin", "bin < 1 || bin"),
    "first_bins_end_at_the_last_range": (
        KERNELS + "topk.cu", "|| bin == kBins - 1) return", "|| bin == kBins) return"),
    "few_digits_one_bin_too_high": (KERNELS + "topk.cuh", "at = i + 1, n_at", "at = i, n_at"),
    "keys_are_listed_by_too_few_groups": (LISTED, "n_groups < k", "2 * n_groups < k"),
    "more_keys_are_listed_than_there_is_room_for": (
        LISTED, "n_listed <= kListed", "n_listed <= 2 * kListed"),
    "listed_ties_are_one_short": (LISTED, "n_equal >= ties", "n_equal + 1 >= ties"),
    "listed_digits_have_bits_of_the_last": (
        KERNELS + "topk.cuh", "bin >> n_bits == 0", "bin < kFewBins"),
    "keys_at_the_bound_are_not_listed": (BOUNDED, "&& key >= span.low", "&& key > span.low"),
    "bounded_ties_are_one_more": (BOUNDED, "if (n_equal < ties) a.Put", "if (n_equal <= ties) a.Put"),
    "equal_keys_are_listed_past_their_room": (
        BOUNDED, "has_room = listed.n <= kListed;", "has_room = listed.n <= 2 * kListed;"),
    "ties_among_few_codes_are_all_chosen": (
        BOUNDED, "if ((own & 1) != 0 && n_equal >= ties) return;", ""),
    "ties_count_as_many_before_a_code": (
        BOUNDED, "(before & 0xffff) + min(n_equal, ties)), static_cast<int>(own / 2)",
        "(before & 0xffff) + n_equal), static_cast<int>(own / 2)"),
    "keys_of_all_blocks_are_listed_in_one_place": (
        BOUNDED, "s.base = atomicAdd(", "s.base = 0 * atomicAdd("),
    **{name: ("src/policy/" + path, before + WAIT, before + "  cuda::GridTrigger();")
       for name, path, before in (
           ("lists_are_cut_before_they_are_made", "omnikv/top_p.cu", "  __shared__ Shared s;\n"),
           ("lists_are_mapped_before_they_are_made", "kascade/map_lists.cu",
            "MapListsKernel(const MapListsArgs a) {\n"),
           ("lists_are_united_before_they_are_made", "kcache/union.cu", ""),
           ("far_blocks_are_kept_before_they_are_chosen", "infllm/far_ops.cu",
            "  __shared__ int n_missing;\n"),
           ("choices_are_held_before_they_are_made", "blocks/block_ops.cu",
            "HoldKernel(const HoldChoiceArgs a) {\n"))},
    "fours_past_the_end_have_keys": (BOUNDED, "j < n_left ? key : kNoKey", "key"),
    "bounds_in_16_bits_lack_a_value": (
        KERNELS + "summary.cu", "ToF32(four.v[3])", "ToF32(four.v[2])"),
    "bounds_on_a_cpu_are_all_low": (
        "src/backend/cpu/score_kernels.cc", "? of + DTypeBytes(kFormat, width) : nullptr",
        "? of + 0 * width : nullptr"),
    "bounds_on_a_cpu_are_stored_over_each_other": (
        "src/backend/cpu/score_kernels.cc", "store(high[0], high[1], width + to)",
        "store(high[0], high[1], 0 * width + to)"),
    "later_turns_never_choose_again": (
        "src/policy/prompt_choice.cc", 'settings.Text("turn") != "recompress"', "true"),
    "moments_of_queries_are_of_all_turns": (
        "src/policy/expected_attention/expected_attention.cc", "step.chooses ? 0 : step.first_pos",
        "step.first_pos"),
    "observed_weights_choose_in_every_turn": (
        "src/policy/h2o/h2o.cc", ".first_prompt = observed_,", ".first_prompt = false,"),
    "blocks_of_a_short_turn_weigh_it_alone": (
        "src/policy/blocks/key_blocks.h", "LastRows() const override { return queries_; }",
        "LastRows() const override { return 1; }"),
    "decode_scores_by_the_higher_halves": (ROWS, "scaled - ToF32(high)", "0 * scaled"),
    "decode_scores_of_each_second_four_heads": (ROWS, "first += kHeads", "first += 2 * kHeads"),
    "decode_scores_of_the_next_token": (ROWS, ".end = seq.kv_len - age", ".end = seq.kv_len"),
    "decode_scores_forget_a_warp": (ROWS, "i < n_warps; ++i) v", "i + 1 < n_warps; ++i) v"),
}
CHECKS_OF_CHOICES = {
    "bounds_on_a_cpu_are_all_low": ("parity_test", "*BlockScore*"),
    "bounds_on_a_cpu_are_stored_over_each_other": ("parity_test", "*BlockSummary*"),
    "later_turns_never_choose_again": ("engine_test", "*PolicyOracle*_snapkv_cpu*"),
    "moments_of_queries_are_of_all_turns": ("engine_test", "*PolicyOracle*_expected_attention_cpu*"),
    "observed_weights_choose_in_every_turn": ("engine_test", "*PolicyOracle*_h2o_cpu*"),
    "blocks_of_a_short_turn_weigh_it_alone": ("engine_test", "*PolicyOracle*_blocks_cpu*"),
}
