#!/usr/bin/env python3
"""Rotary frequencies of every scaling, as transformers computes them (a test-time tool only).

    python make_rope_goldens.py OUT.json

OUT.json is a list of cases: the rope parameters, max_position_embeddings, the length that the
frequencies are for, and what a rotary embedding then holds: inv_freq (float32, printed exactly)
and attention_scaling. The golden in the repository: tests/model/data/rope.json, made with
transformers 5.23.0 and torch 2.15.0.
"""
import json
import sys

import torch
import transformers
from transformers import LlamaConfig, Phi3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

HEAD_DIM, MAX_CONTEXT = 64, 4096
SHORT = [1 + 0.03125 * i for i in range(24)]
LONG = [1 + 0.6875 * i for i in range(24)]


def rope(kind, theta=10000.0, **parameters):
    return {"rope_type": kind, "rope_theta": theta, **parameters}


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
YARN_ORIGINAL = {"original_max_position_embeddings": 1024}
LONGROPE = {"partial_rotary_factor": 0.75, "short_factor": SHORT, "long_factor": LONG,
            "original_max_position_embeddings": 1024}

# name, rope parameters, length
CASES = [
    ("default", rope("default", 500000.0), 100),
    ("linear", rope("linear", factor=3.0), 100),
    ("dynamic", rope("dynamic", factor=2.5), 4096),
    ("dynamic_past", rope("dynamic", factor=2.5), 7001),
    ("dynamic_far", rope("dynamic", 1e6, factor=4.0), 100000),
    ("llama3", rope("llama3", 500000.0, factor=8.0, **LLAMA3), 100),
    ("llama3_32", rope("llama3", 10000.0, factor=32.0, **LLAMA3), 100),
    ("yarn", rope("yarn", 1e6, factor=4.0, **YARN_ORIGINAL), 100),
    ("yarn_mscale", rope("yarn", factor=40.0, mscale=0.707, mscale_all_dim=1.0, beta_fast=16.0,
                         beta_slow=2.0, truncate=False, **YARN_ORIGINAL), 100),
    ("yarn_factor", rope("yarn", 150000.0, factor=32.0, attention_factor=1.25, **YARN_ORIGINAL),
     100),
    ("yarn_step", rope("yarn", factor=2.0, beta_fast=4.0, beta_slow=4.0, truncate=False,
                       **YARN_ORIGINAL), 100),
    # The ramp's ends are clamped past each other.
    ("yarn_reversed", rope("yarn", factor=2.0, beta_fast=1e-2, beta_slow=1e-3,
                           original_max_position_embeddings=4096), 100),
    ("longrope_short", rope("longrope", **LONGROPE), 1024),
    ("longrope_long", rope("longrope", **LONGROPE), 1025),
]


def embedding(parameters):
    sizes = {"hidden_size": 4 * HEAD_DIM, "num_attention_heads": 4, "num_key_value_heads": 4,
             "max_position_embeddings": MAX_CONTEXT}
    parameters = dict(parameters)
    if parameters["rope_type"] == "longrope":
        original = parameters["original_max_position_embeddings"]
        return Phi3RotaryEmbedding(Phi3Config(**sizes, pad_token_id=0, rope_parameters=parameters,
                                              original_max_position_embeddings=original))
    return LlamaRotaryEmbedding(LlamaConfig(**sizes, rope_parameters=parameters))


def main():
    transformers.utils.logging.set_verbosity_error()
    lines = []
    for name, parameters, length in CASES:
        emb = embedding(parameters)
        emb(torch.zeros(1), torch.tensor([[length - 1]]))  # a forward picks what a length needs
        case = {"name": name, "rope": parameters, "head_dim": HEAD_DIM,
                "max_context": MAX_CONTEXT, "length": length,
                "magnitude": float(emb.attention_scaling), "inv_freq": emb.inv_freq.tolist()}
        lines.append(json.dumps(case))
    with open(sys.argv[1], "w") as f:
        f.write("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main()
