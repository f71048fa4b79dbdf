"""Faults of V that the host sums, for mutants.py: the form is that of faults.py."""

FAULTS_OF_VALUES = {
    "picked_logits_of_the_first_list": (
        "src/backend/value_ops.h", "int64_t{seq} * lists + int64_t{head} * lists / n_heads",
        "int64_t{seq} * lists + int64_t{head} * 0 / n_heads"),
    "picked_logits_of_the_first_row": (
        "src/backend/cpu/values.cc", "const float* logits = a.logits + at * a.stride;",
        "const float* logits = a.logits + at % a.n_heads * a.stride;"),
    "tokens_behind_a_list_have_weight": (
        "src/backend/cpu/values.cc",
        "left >= kLanes ? weight : hn::IfThenElseZero(hn::FirstN(d, left), weight)", "weight"),
    "heads_beyond_the_eighth_are_not_summed": (
        "src/backend/cpu/values.cc", "for (int32_t g = 0; g < a_.Group(); g += kSumHeads) {",
        "for (int32_t g = 0; g < std::min(kSumHeads, a_.Group()); g += kSumHeads) {"),
    "sums_of_a_row_before": (
        "src/backend/cpu/values.cc", "next = Find(at + 1, end, (at - begin + 1) % 2);",
        "next = Find(at + 1, end, 0);"),
    "sums_are_of_what_is_listed_alone": (
        "src/bank/summed_values.cc", ".lse_in = attend.lse_in,", ""),
    "the_host_sums_before_it_may": (
        "src/bank/summed_values.cc", "  backend_.Join(Lane::kHost, Lane::kMain);\n", ""),
    "sums_are_taken_before_they_are_made": (
        "src/bank/residency.cc", "  r_.backend_.Join(Lane::kMain, Lane::kHost);\n", ""),
    "the_host_sums_whatever_is_asked": (
        "src/engine/placement.cc", 'options.host_reads != "fetch";',
        "!options.host_reads.empty();"),
    "choices_by_the_rows_of_others": (
        "src/backend/score_ops.h", "list += (seqs[SeqOf(list)].q_begin - SeqOf(list))",
        "list += 0 * (seqs[SeqOf(list)].q_begin - SeqOf(list))"),
    "kcache_says_nothing_of_its_logits": (
        "src/policy/kcache/kcache.cc", "    attend.logits = weigh.scores;\n", ""),
    "query_heads_have_no_lists_of_their_own": (
        "src/policy/kcache/kcache.cc", 'settings.Text("lists") == "per_head"', "false"),
    "lists_of_query_heads_count_once_a_group": (
        "src/policy/kcache/kcache.cc", "(Budgeted(layer) ? ListsOfKvHead() : 1)", "1"),
    "query_heads_sum_values_of_other_heads": (
        "src/bank/summed_values.cc", ".EachQueryHead(attend.kv.HeadRepeats())", ""),
    "query_heads_have_values_of_other_heads": (
        "src/backend/kv_slices.h", "kv.Place(static_cast<int32_t>(first))", "first"),
    "heads_that_share_a_place_are_one_too_many": (
        "src/backend/attn_plan.h", "(kOnePlace + static_cast<uint32_t>(n) - 1)", "kOnePlace"),
    "pictures_count_a_group_as_a_head": (
        "src/engine/read_picture.cc", "heads *= reads.ListsOf(global);", ""),
    "picked_logits_on_a_card_are_of_the_first_list": (
        "src/backend/cuda/kernels/values.cu", "const int64_t list = a.ListOf(a.rows[r].seq, h);",
        "const int64_t list = a.ListOf(a.rows[r].seq, h * 0);"),
    "a_card_merges_by_the_sums_of_the_first_block": (
        "src/backend/cuda/kernels/merge_states.cu", "__ldcv(a.parts[part].lse + first + i)",
        "__ldcv(a.parts[part].lse + i)"),
}
CHECKS_OF_VALUES = {
    "picked_logits_of_the_first_list": ("parity_test", "*SumValues"),
    "picked_logits_of_the_first_row": ("parity_test", "*SumValues"),
    "tokens_behind_a_list_have_weight": ("parity_test", "*SumValues"),
    "heads_beyond_the_eighth_are_not_summed": ("parity_test", "*SumValues"),
    "sums_of_a_row_before": ("parity_test", "*SumValues"),
    "sums_are_of_what_is_listed_alone": ("host_layers_test", "*ValuesAway*"),
    "the_host_sums_before_it_may": ("host_layers_test", "*ValuesAway*"),
    "sums_are_taken_before_they_are_made": ("host_layers_test", "*ValuesAway*"),
    "the_host_sums_whatever_is_asked": ("host_layers_test", "*ValuesAway*"),
    "choices_by_the_rows_of_others": ("parity_test", "*TopK*"),
    "kcache_says_nothing_of_its_logits": ("policy_test", "*kcache*"),
    "query_heads_have_no_lists_of_their_own": ("engine_test", "*PolicyOracle*kcache_cpu*"),
    "lists_of_query_heads_count_once_a_group": ("policy_test", "*kcache*"),
    "query_heads_sum_values_of_other_heads": ("engine_test", "*PolicyOracle*kcache_cpu_sums*"),
    "query_heads_have_values_of_other_heads": ("engine_test", "*PolicyOracle*kcache_cpu_away*"),
    "heads_that_share_a_place_are_one_too_many": ("fusion_test", "KvView.*"),
    "pictures_count_a_group_as_a_head": ("read_picture_test", "*/cpu"),
}
