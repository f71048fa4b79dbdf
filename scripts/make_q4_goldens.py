#!/usr/bin/env python3
"""Writes tests/backend/q4_golden.h: blocks of 32 values, and what ggml's rule for Q4_0 makes of them
(quantize_row_q4_0_ref of ggml-quants.c, written anew here in NumPy's float32).

    scripts/make_q4_goldens.py tests/backend/q4_golden.h

ggml leaves open what becomes of values that f16 cannot scale. K/V take these rules:
- a scale is at most 65504; values beyond are the largest one;
- where f16 rounds the scale to 0, every code is 8, which is a value of 0;
- a NaN makes the scale NaN, and every code 0.
"""
import pathlib
import sys

import numpy as np

F32, F16 = np.float32, np.float16
VALUES, HALF = 32, 16


def quantize(x):
    """(scale as f16, 16 bytes) of 32 float32."""
    if np.isnan(x).any():
        return F16(np.nan), np.zeros(HALF, np.uint8)
    extreme = x[np.argmax(np.abs(x))]  # the first one of the largest magnitude
    limit = F32(8 * 65504)
    d = F32(np.clip(extreme, -limit, limit) / F32(-8)) if extreme != 0 else F32(-0.0)
    scale = F16(d)
    if scale == 0:
        return scale, np.full(HALF, 0x88, np.uint8)
    with np.errstate(over="ignore"):
        shifted = (x * F32(F32(1) / d) + F32(8.5)).astype(F32)
    codes = np.clip(np.trunc(np.clip(shifted, F32(-1), F32(16))), 0, 15).astype(np.uint8)
    return scale, codes[:HALF] | codes[HALF:] << 4


def cases():
    rng = np.random.default_rng(4)

    def normal(width=1.0):
        return (rng.standard_normal(VALUES) * width).astype(F32)

    def with_values(x, **at):
        for i, v in at.items():
            x[int(i[1:])] = v
        return x

    yield "normal values, the largest one negative", with_values(normal(), i7=-4)
    yield "the largest one positive: the scale is negative", with_values(normal(), i23=4)
    yield "both signs of the largest magnitude, the negative one first", \
        with_values(normal(0.5), i3=-2, i20=2)
    yield "the positive one first", with_values(normal(0.5), i3=2, i20=-2)
    yield "every code once, and again in the other order", \
        np.concatenate([np.arange(-8, 8), np.arange(7, -9, -1)]).astype(F32) * F32(0.25)
    yield "halves: the higher code", with_values((np.arange(VALUES) % 16 - 7.5).astype(F32), i0=-8)
    yield "positive values", np.abs(normal())
    yield "one outlier", with_values(normal(1e-3), i31=100)
    yield "zeros", np.zeros(VALUES, F32)
    yield "negative zeros", np.full(VALUES, -0.0, F32)
    yield "a subnormal scale", normal(1e-5)
    yield "a scale that f16 rounds to 0", normal(1e-8)
    yield "values whose inverse is infinite", normal(1e-39)
    yield "values beyond f16", normal(1e6)
    yield "an infinity", with_values(normal(), i9=np.inf)
    yield "infinities", with_values(normal(), i2=-np.inf, i9=np.inf)
    yield "a NaN", with_values(normal(), i5=np.nan)
    for _ in range(7):
        yield "normal values", normal(rng.choice([0.03, 1.0, 20.0]))


def main():
    lines = ["// Blocks of kQ4_0, made by scripts/make_q4_goldens.py.", "#pragma once", "",
             "#include <cstdint>", "", "namespace omnikv {", "",
             "// Bits of f32 values, and of what they become.", "struct Q4Golden {",
             "  uint32_t values[32];", "  uint16_t scale;  // f16", "  uint8_t pairs[16];", "};", "",
             "// clang-format off", "inline constexpr Q4Golden kQ4Goldens[] = {"]
    for name, x in cases():
        scale, pairs = quantize(x)
        bits = [f"0x{v:08x}" for v in x.view(np.uint32)]
        lines.append(f"    // {name}")
        for i in range(0, VALUES, 8):
            lines.append(("    {{" if i == 0 else "      ") + ", ".join(bits[i:i + 8]) +
                         ("}," if i == 24 else ","))
        half = int(np.array(scale).view(np.uint16)) if not np.isnan(scale) else 0x7E00
        lines.append(f"     0x{half:04x},")
        lines.append("     {" + ", ".join(f"0x{b:02x}" for b in pairs) + "}},")
    lines += ["};", "// clang-format on", "", "}  // namespace omnikv", ""]
    pathlib.Path(sys.argv[1]).write_text("\n".join(lines))


if __name__ == "__main__":
    main()
