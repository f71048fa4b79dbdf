"""Faults of working sets, for mutants.py: the form is that of faults.py."""

KERNELS = "src/backend/cuda/kernels/"
REF_SETS, SETS = "src/backend/slots_on_host.cc", "src/bank/working_sets.cc"

FAULTS_OF_SETS = {
    "hits_may_be_evicted": (
        KERNELS + "working_set.cu",
        "if (slot >= 0) a.used[slot] = SlotFound(a.used[slot], step);",
        "if (slot >= 0) a.used[slot] = SlotCame(2 * step - 2);"),
    "slots_of_one_age_count_once_a_warp": (
        KERNELS + "working_set.cu", "atomicAdd(&s.ages[age[i]], __popc(alike));",
        "atomicAdd(&s.ages[age[i]], 1);"),
    "lower_blocks_give_no_slots": (
        KERNELS + "working_set.cu", "given += b < block ? of_block : 0;", ""),
    "blocks_do_not_hear_of_what_others_miss": (
        KERNELS + "working_set.cu",
        "if (thread < blocks) *InBlock(&s.missed_of[block], thread) = own_missing;",
        "if (thread == 0 && blocks > 0) s.missed_of[block] = own_missing;"),
    "later_tokens_of_a_thread_take_the_slot_of_the_first": (
        KERNELS + "working_set.cu", "slot_given[j] = free_slots[place + lower];",
        "slot_given[j] = free_slots[place];"),
    "lower_tiles_of_a_part_are_not_selected": (
        KERNELS + "working_set.cu", "const int32_t place = (tile - first) / parts;",
        "const int32_t place = tile / parts;"),
    "rows_ahead_take_slots_of_the_selection": (
        KERNELS + "working_set.cu", "simulated ? nullptr : free_slots + missing",
        "simulated ? nullptr : free_slots"),
    "rows_ahead_have_no_room_in_the_list_of_slots": (
        KERNELS + "working_set.cu", "int64_t{sequence} * (a.capacity + a.max_ahead)",
        "int64_t{sequence} * a.capacity"),
    "older_slots_of_lower_blocks_do_not_count": (
        KERNELS + "working_set.cu", "s.older_before = older_before;", "s.older_before = 0;"),
    "slots_of_the_last_age_in_lower_blocks_do_not_count": (
        KERNELS + "working_set.cu", "s.last_before = before;", "s.last_before = 0;"),
    "tokens_after_those_at_once_are_the_first_again": (
        KERNELS + "working_set.cu", "if (!part.OnceIsAll()) {", "if (false) {"),
    "sums_lack_the_warp_before": (
        KERNELS + "cluster.cuh", "lane < warp ? of_lane", "lane + 1 < warp ? of_lane"),
    "age_is_never_refreshed": (
        REF_SETS, "if (slot >= 0) a.used[slot] = SlotFound(a.used[slot], step);", ""),
    "first_tokens_go_first": (
        REF_SETS, "return SlotAge(a.used[s], step) > SlotAge(a.used[t], step);",
        "return a.owner[s] < a.owner[t];"),
    "slots_of_one_age_go_from_the_highest": (
        REF_SETS, "== SlotAge(a.used[t], step)) return s < t;",
        "== SlotAge(a.used[t], step)) return s > t;"),
    "forgotten_row_keeps_its_age": (REF_SETS, "    a.used[slot] = 0;\n", ""),
    "rows_ahead_are_not_fetched": (
        SETS, "Fetch(layer, bank_.View(layer), Lane::kIn, /*ahead=*/true);", ""),
    "averages_are_the_last_score": (
        "src/backend/score_ops.h", "constexpr int kEighth = 3;", "constexpr int kEighth = 0;"),
    "slots_that_scored_high_go_first": (
        "src/backend/score_ops.h", "const uint32_t below_one = (kBitsOfOne - average) >> 19;",
        "const uint32_t below_one = average >> 19;"),
    "sets_do_not_know_what_scored": (
        SETS, "FetchesAhead() ? selection.scores : StepScores{}", "StepScores{}"),
    "selected_rows_come_ahead": (
        REF_SETS, "const bool selected = listed < a.index + *a.count && *listed == t;",
        "const bool selected = false;"),
    "the_row_of_the_step_comes_ahead": (REF_SETS, " && t < a.seqs->kv_len - 1", ""),
    "rows_ahead_have_no_slot_of_their_own": (
        REF_SETS, "(simulated ? i : give(a.ahead[j]))", "i"),
    "primed_sets_lack_what_comes_ahead": (
        SETS, "if (FetchesAhead()) Fetch(layer, kv, Lane::kMain, /*ahead=*/true);", ""),
    "averages_of_the_oldest_query": (
        "src/backend/ops.h", "(seqs[s].kv_len - 1) % window) * stride", "seqs[s].kv_len % window) * stride"),
    "what_was_found_often_goes_like_the_rest": (
        "src/backend/score_ops.h", "since + 4 * (kMostFound - TimesFound(used))", "since"),
    "found_counts_begin_with_what_is_given": (
        REF_SETS, "a.used[slot] = SlotCame(2 * step);",
        "a.used[slot] = SlotFound(a.used[slot], step);"),
}
