"""Faults of attention, for mutants.py: the form is that of faults.py."""

SCORES = "src/backend/cpu/attend_scores-inl.h"
KERNELS = "src/backend/cpu/attend_kernels.cc"
ON_CARD = "src/backend/cuda/kernels/"
DIVISOR = "src/base/divisor.h"

FAULTS_OF_ATTENTION = {
    "queries_packed_in_one_place": (KERNELS, "dk, g, heads, out)", "dk, 0, heads, out)"),
    "threads_end_one_after_another": (
        "src/backend/cpu/attend.cc", "share(pieces) > share(best) + 0.01",
        "share(pieces) > share(best) + 1"),
    # Of q8_0, where a target has 32 registers.
    "q8_k_of_two_blocks_by_the_scales_of_one": (
        SCORES, "2, 4, 6, 1, 3, 5, 7, 1, 3, 5, 7)", "2, 4, 6, 0, 2, 4, 6, 0, 2, 4, 6)"),
    "q8_k_keeps_the_bytes_below_its_value": (SCORES, "if (part != 0) high", "if (part > 1) high"),
    "q8_v_of_all_blocks_by_the_scales_of_the_first": (
        KERNELS, "from + b * sizeof(F16)", "from + 0 * b * sizeof(F16)"),
    "rows_are_as_they_were_before_the_wait": (
        ON_CARD + "attend_early.cuh", "if (facts == now) return;", "return;"),
    "queries_have_the_factor_of_their_neighbour": (
        ON_CARD + "attend.cu", "g % 2 == j ? factor", "g % 2 != j ? factor"),
    "factors_of_divisors_are_rounded_down": (
        DIVISOR, "static_cast<uint32_t>(d) - 1) /", "static_cast<uint32_t>(0)) /"),
}
CHECKS_OF_ATTENTION = {
    "threads_end_one_after_another": ("cpu_backend_test", "CpuAttendPieces.*"),
    DIVISOR: ("divisor_test", "*"),
}
