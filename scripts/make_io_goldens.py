#!/usr/bin/env python3
"""Writes tests/io/data/quants.gguf: one tensor of every type that src/io converts, and beside each
the f32 values that the reference package `gguf` (numpy) makes of it; metadata of every type.

    pip install gguf==0.19.0 numpy && scripts/make_io_goldens.py

The blocks are random bytes with finite random scales, so every bit of a block takes part.
"""
import pathlib
import sys

import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import GGUFValueType, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize

ROWS, COLUMNS = 3, 512

# Where the f16 scales (and minima) of a block lie.
HALVES = {
    Type.Q8_0: [0], Type.Q4_0: [0], Type.Q4_1: [0, 2], Type.Q5_0: [0], Type.Q5_1: [0, 2],
    Type.Q2_K: [80, 82], Type.Q3_K: [108], Type.Q4_K: [0, 2], Type.Q5_K: [0, 2], Type.Q6_K: [208],
}


def finite_halves(rng, n):
    """Random f16 bit patterns of every exponent but that of infinities, subnormals among them."""
    bits = rng.integers(0, 1 << 16, n, dtype=np.uint16)
    bits[(bits & 0x7C00) == 0x7C00] ^= 0x4000
    bits[rng.random(n) < 0.1] &= 0x83FF
    return bits


def blocks(rng, kind):
    values, size = GGML_QUANT_SIZES[kind]
    n = ROWS * COLUMNS // values
    raw = rng.integers(0, 256, (n, size), dtype=np.uint8)
    for offset in HALVES[kind]:
        raw[:, offset:offset + 2] = finite_halves(rng, n).view(np.uint8).reshape(n, 2)
    return raw.reshape(ROWS, -1)


def add_metadata(writer):
    writer.add_uint8("test.uint8", 255)
    writer.add_int8("test.int8", -128)
    writer.add_uint16("test.uint16", 65535)
    writer.add_int16("test.int16", -32768)
    writer.add_uint32("test.uint32", 4294967295)
    writer.add_int32("test.int32", -2147483648)
    writer.add_uint64("test.uint64", 18446744073709551615)
    writer.add_int64("test.int64", -9223372036854775808)
    writer.add_float32("test.float32", 0.1)
    writer.add_float64("test.float64", 0.1)
    writer.add_bool("test.bool", True)
    writer.add_string("test.string", "gr\u00fc\u00dfe \U0001f642")
    writer.add_array("test.ints", [1, -2, 3])
    writer.add_array("test.floats", [0.5, -0.25])
    writer.add_array("test.strings", ["", "a", "\u2581the"])
    writer.add_array("test.bools", [True, False])
    writer.add_key_value("test.bytes", b"\x00\x7f\xff", GGUFValueType.ARRAY, GGUFValueType.UINT8)


def main():
    root = pathlib.Path(__file__).resolve().parent.parent
    path = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else root / "tests/io/data/quants.gguf"
    rng = np.random.default_rng(20)
    writer = GGUFWriter(path, "test")
    writer.add_custom_alignment(64)
    add_metadata(writer)
    for kind in HALVES:
        raw = blocks(rng, kind)
        writer.add_tensor(kind.name, raw, raw_dtype=kind)
        writer.add_tensor(kind.name + ".f32", dequantize(raw, kind))
    for kind in (Type.F16, Type.BF16):
        raw = finite_halves(rng, COLUMNS)
        if kind == Type.BF16:
            raw = rng.integers(0, 0x7F80, COLUMNS, dtype=np.uint16)  # every finite magnitude
            raw |= rng.integers(0, 2, COLUMNS, dtype=np.uint16) << 15
        raw = raw.astype("<u2").view(np.uint8).reshape(1, -1)
        writer.add_tensor(kind.name, raw, raw_dtype=kind)
        writer.add_tensor(kind.name + ".f32", dequantize(raw, kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
