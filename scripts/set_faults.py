"""Faults of working sets, for mutants.py: the form is that of faults.py."""

KERNELS = "src/backend/cuda/kernels/"
REF_SETS, SETS = "src/backend/slots_on_host.cc", "src/bank/working_sets.cc"

FAULTS_OF_SETS = {
    "hits_may_be_evicted": (
        KERNELS + "working_set.cu",
        "if (slot >= 0 && !a.ahead) a.used[slot] = SlotFound(a.used[slot], step);",
        "if (slot >= 0 && !a.ahead) a.used[slot] = SlotCame(2 * step - 2);"),
    "slots_of_one_age_count_once_a_warp": (
        KERNELS + "working_set.cu", "atomicAdd(&s.ages[age[i]], __popc(alike));",
        "atomicAdd(&s.ages[age[i]], 1);"),
    "lower_blocks_give_no_slots": (
        KERNELS + "working_set.cu", "given += b < block ? of_block : 0;", ""),
    "older_slots_of_lower_blocks_do_not_count": (
        KERNELS + "working_set.cu", "s.older_before = older_before;", "s.older_before = 0;"),
    "slots_of_the_last_age_in_lower_blocks_do_not_count": (
        KERNELS + "working_set.cu", "s.last_before = before;", "s.last_before = 0;"),
    "tokens_after_those_at_once_are_the_first_again": (
        KERNELS + "working_set.cu", "if (!part.OnceIsAll()) {", "if (false) {"),
    "sums_lack_the_warp_before": (
        KERNELS + "cluster.cuh", "lane < warp ? of_lane", "lane + 1 < warp ? of_lane"),
    "age_is_never_refreshed": (
        REF_SETS, "if (slot >= 0 && !a.ahead) a.used[slot] = SlotFound(a.used[slot], step);", ""),
    "first_tokens_go_first": (
        REF_SETS, "return SlotAge(a.used[s], step) > SlotAge(a.used[t], step);",
        "return a.owner[s] < a.owner[t];"),
    "slots_of_one_age_go_from_the_highest": (
        REF_SETS, "== SlotAge(a.used[t], step)) return s < t;",
        "== SlotAge(a.used[t], step)) return s > t;"),
    "below_counts_as_selected_before": (
        REF_SETS, "if (slot >= 0) a.used[slot] = SlotBelow(a.used[slot], step);",
        "if (slot >= 0) a.used[slot] = SlotBelow(a.used[slot], step - 1);"),
    "below_hides_what_is_selected": (
        REF_SETS, "if (slot >= 0) a.used[slot] = SlotBelow(a.used[slot], step);",
        "if (slot >= 0) a.used[slot] = SlotCame(2 * step);"),
    "forgotten_row_keeps_its_age": (REF_SETS, "    a.used[slot] = 0;\n", ""),
    "working_sets_know_nothing_below": (
        SETS, "selection.wider, seqs, primes ?", "PlanSegment{}, seqs, primes ?"),
    "rows_ahead_are_not_fetched": (
        SETS, "Fetch(layer, bank_.View(layer), Lane::kIn, /*ahead=*/true);", ""),
    "rows_ahead_keep_what_is_there": (
        REF_SETS, "if (slot >= 0 && !a.ahead) a.used", "if (slot >= 0) a.used"),
    "what_was_found_often_goes_like_the_rest": (
        "src/backend/score_ops.h", "since + 4 * (kMostFound - TimesFound(used))", "since"),
    "found_counts_begin_with_what_is_given": (
        REF_SETS, "a.used[slot] = a.GivenAt(step);",
        "a.used[slot] = SlotFound(a.used[slot], step);"),
    "ranks_below_forget_what_was_found": (
        REF_SETS, "a.used[slot] = SlotBelow(a.used[slot], step);",
        "a.used[slot] = SlotCame(2 * step - 1);"),
}
