#!/usr/bin/env python3
"""Goldens of every family with the heads of a published model: their size, their number and their
groups, which decide what kernels attend.

    make_head_goldens.py OUT [family ...]

A test-time tool, as make_model_goldens.py, whose tiny models have heads of 8 and 16. Models here
have two or three layers and a narrow residual stream; all the same their weights are megabytes. They
are not stored: each is a whole number, a hash of a seed, the tensor's name and its place, brought to
a mean and a spread and rounded to bf16. `weights` here and tests/engine/hashed_weights.h compute the
same bits. For each family OUT gets

    <family>.json         the model's config.json, the seed, its tensors (name, shape, mean, scale),
                          the prompt, the positions whose logits are kept, the greedy tokens
    <family>.safetensors  logits        f32 [n_positions, vocab]
                          greedy_logits f32 [n_greedy, vocab]  row i gave greedy[i]
                          f16_logits, f16_greedy_logits: the same with K and V (after rotation)
                          rounded to f16, fed the same tokens

References are transformers' in float32 with eager attention.
"""

import argparse
import copy
import json
import math
import random
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from make_model_goldens import (INTERNLM2_NAMES, default_rope, long_rope, scaled_rope, spread)

VOCAB, HIDDEN, FFN, LAYERS = 256, 256, 512, 2
N_PROMPT, N_GREEDY = 400, 8
POSITIONS = [0, 1, 17, 63, 64, 127, 128, 191, 255, 256, 320, 399]
SEEDS = 40  # tried for each family
MIN_MARGIN = 0.1  # between the two best logits of every greedy step
MIN_DISTINCT = 4  # greedy tokens
PROMPT = [1, *random.Random(400).choices(range(3, VOCAB), k=N_PROMPT - 1)]


def heads(n_heads, n_kv_heads, head_dim, rope=None, **more):
    return {
        "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": FFN,
        "num_hidden_layers": LAYERS, "num_attention_heads": n_heads,
        "num_key_value_heads": n_kv_heads, "head_dim": head_dim,
        "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "bos_token_id": 1,
        "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False,
        "rope_parameters": rope or default_rope(500000.0), **more}


# Name -> (model type, config, the published model whose heads these are). Windows are shorter than
# published ones, so that the prompt passes them.
FAMILIES = {
    "llama": ("llama", heads(32, 8, 128), "Llama-3-8B"),
    "llama_64": ("llama", heads(32, 8, 64, tie_word_embeddings=True), "Llama-3.2-1B"),
    "mistral": ("mistral", heads(32, 8, 128, default_rope(), sliding_window=128),
                "Mistral-7B-v0.1"),
    "qwen2": ("qwen2", heads(28, 4, 128, default_rope(1e6), use_sliding_window=False),
              "Qwen2.5-7B"),
    "qwen3": ("qwen3", heads(16, 8, 128, default_rope(1e6), tie_word_embeddings=True),
              "Qwen3-0.6B"),
    # transformers takes its head size from the residual stream: 8 of its 32 heads.
    "phi3": ("phi3", heads(8, 8, 96, long_rope(48, partial_rotary_factor=1.0), hidden_size=8 * 96,
                           original_max_position_embeddings=128, sliding_window=None),
             "Phi-3-mini-128k"),
    "granite": ("granite", heads(32, 8, 64, default_rope(10000.0), tie_word_embeddings=True,
                                 embedding_multiplier=2.0, logits_scaling=2.0,
                                 residual_multiplier=0.7, attention_multiplier=0.125),
                "granite-3.0-2b"),
    "smollm3": ("smollm3", heads(16, 4, 128, default_rope(5e6), num_hidden_layers=3,
                                 no_rope_layers=[1, 1, 0], use_sliding_window=False),
                "SmolLM3-3B"),
    "olmo2": ("olmo2", heads(32, 32, 128), "OLMo-2-1124-7B"),
    "gemma3": ("gemma3_text",
               heads(8, 4, 256, {"sliding_attention": default_rope(),
                                 "full_attention": scaled_rope("linear", 1e6, factor=8.0)},
                     num_hidden_layers=3, sliding_window=64, query_pre_attn_scalar=256,
                     tie_word_embeddings=True,
                     layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
               "gemma-3-4b"),
    "internlm2": ("llama", heads(32, 8, 128, scaled_rope("dynamic", 1e6, factor=2.0)),
                  "internlm2-7b"),
}

# --- weights -------------------------------------------------------------------------------------

GOLDEN_RATIO = 0x9E3779B97F4A7C15


def hashed(seed, name, shape, mean, scale):
    """float32 [shape], exactly representable in bf16: mean + scale * u, u in (-1, 1)."""
    start = 0xCBF29CE484222325  # FNV-1a of the name
    for byte in name.encode():
        start = (start ^ byte) * 0x100000001B3 % 2**64
    start = (start + seed * GOLDEN_RATIO) % 2**64
    with np.errstate(over="ignore"):
        z = np.uint64(start) + np.arange(1, math.prod(shape) + 1, dtype=np.uint64) * np.uint64(
            GOLDEN_RATIO)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    u = (2 * (z >> np.uint64(40)).astype(np.float64) + 1) / 2**24 - 1
    values = torch.from_numpy((mean + scale * u).astype(np.float32))
    return values.to(torch.bfloat16).float().reshape(shape)


def file_tensors(name, model):
    """(name, shape, mean, scale) of each tensor as the family's files have them."""
    config = model.config
    out = []
    for tensor, parameter in model.named_parameters():  # a tied lm_head is listed once
        mean, deviation = spread(tensor, parameter.shape, config)
        out.append([tensor, list(parameter.shape), float(mean), deviation * math.sqrt(3)])
    if name != "internlm2":
        return out
    renamed = []
    for tensor, shape, mean, scale in out:
        for old, new in INTERNLM2_NAMES.items():
            tensor = tensor.replace(old, new)
        if tensor.endswith("q_proj.weight"):
            rows = (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
            tensor, shape = tensor.replace("self_attn.q_proj", "attention.wqkv"), [rows, shape[1]]
        elif "_proj" in tensor:
            continue
        renamed.append([tensor, shape, mean, scale])
    return renamed


def fill(name, model, tensors, seed):
    """Gives the model the weights that its files would hold."""
    files = {tensor: hashed(seed, tensor, shape, mean, scale)
             for tensor, shape, mean, scale in tensors}
    if name == "internlm2":
        llama = {}
        for tensor, values in files.items():
            if "wqkv" in tensor:
                c = model.config
                # [kv_heads, queries of the group | key | value, head_dim, hidden]
                groups = values.view(c.num_key_value_heads, -1, c.head_dim, c.hidden_size)
                parts = dict(q=groups[:, :-2], k=groups[:, -2], v=groups[:, -1])
                for part, rows in parts.items():
                    llama[tensor.replace("attention.wqkv", f"self_attn.{part}_proj")] = (
                        rows.reshape(-1, c.hidden_size))
                continue
            for old, new in INTERNLM2_NAMES.items():
                tensor = tensor.replace(new, old)
            llama[tensor] = values
        files = llama
    with torch.no_grad():
        for tensor, parameter in model.named_parameters():
            parameter.copy_(files[tensor])
    return model


def check_names(name, tensors, goldens):
    """The tensors of layer 0 and of none are those of the tiny model, which save_pretrained wrote."""
    tiny = goldens / name.removesuffix("_64") / "model.safetensors"
    with safe_open(tiny, "pt") as file:
        expected = {key for key in file.keys() if "layers." not in key or "layers.0." in key}
    got = {t[0] for t in tensors if "layers." not in t[0] or "layers.0." in t[0]}
    tied = {"lm_head.weight"}
    assert got - tied == expected - tied, (name, got ^ expected)


# --- references ----------------------------------------------------------------------------------


class HalfCache(DynamicCache):
    """Rounds what it keeps, and what is attended to, to f16."""

    def update(self, key_states, value_states, *args, **kwargs):
        return super().update(key_states.half().float(), value_states.half().float(), *args,
                              **kwargs)


@torch.no_grad()
def run(model, cache, tokens=None):
    """Logits [len(POSITIONS), vocab] of the prompt, the tokens and the logits [N_GREEDY, vocab] that
    they follow: `tokens`, or the greedy ones."""
    logits = model(torch.tensor([PROMPT]), past_key_values=cache, use_cache=True).logits[0].float()
    chosen, rows = [], [logits[-1]]
    for i in range(N_GREEDY):
        chosen.append(int(rows[-1].argmax()) if tokens is None else tokens[i])
        if i + 1 < N_GREEDY:
            out = model(torch.tensor([chosen[-1:]]), past_key_values=cache, use_cache=True)
            rows.append(out.logits[0, -1].float())
    return logits[POSITIONS].clone(), chosen, torch.stack(rows)


@torch.no_grad()
def fast_logits(model):
    """Logits [len(POSITIONS), vocab] of the prompt where products of its rows are made of bf16, and
    K and V are f16."""
    hooks = [module.register_forward_pre_hook(
        lambda _, inputs: (inputs[0].to(torch.bfloat16).float(), *inputs[1:]))
        for module in model.modules() if isinstance(module, torch.nn.Linear)]
    logits = model(torch.tensor([PROMPT]), past_key_values=HalfCache(config=model.config),
                   use_cache=True).logits[0].float()
    for hook in hooks:
        hook.remove()
    return logits[POSITIONS]


def margins(rows):
    top = rows.topk(2).values
    return (top[:, 0] - top[:, 1]).tolist()


def make(name, out, goldens):
    model_type, keys, published = FAMILIES[name]
    config = AutoConfig.for_model(model_type, **copy.deepcopy(keys))
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager",
                                             dtype=torch.float32).eval()
    tensors = file_tensors(name, model)
    check_names(name, tensors, goldens)
    for seed in range(SEEDS):
        fill(name, model, tensors, seed)
        logits, greedy, rows = run(model, DynamicCache(config=config))
        if min(margins(rows)) > MIN_MARGIN and len(set(greedy)) >= MIN_DISTINCT:
            break
    else:
        raise AssertionError(f"{name}: no seed below {SEEDS} has a margin over {MIN_MARGIN}")
    f16_logits, _, f16_rows = run(model, HalfCache(config=config), greedy)
    with torch.no_grad():
        uncached = model(torch.tensor([PROMPT + greedy[:-1]]), use_cache=False).logits[0]
    largest = float(logits.abs().max())
    assert (uncached[POSITIONS] - logits).abs().max() < 1e-4 * largest
    assert (uncached[-N_GREEDY:] - rows).abs().max() < 1e-4 * largest
    with tempfile.TemporaryDirectory() as folder:  # config.json as save_pretrained writes it
        config.save_pretrained(folder)
        stored = json.loads(Path(folder, "config.json").read_text())
    stored["dtype"] = "bfloat16"
    stored["architectures"] = [type(model).__name__]
    if name == "internlm2":
        for key in ("attention_bias", "attention_dropout", "mlp_bias", "pretraining_tp"):
            stored.pop(key, None)  # not among InternLM2's
        stored.update(architectures=["InternLM2ForCausalLM"], model_type="internlm2", bias=False)
    fast = float((fast_logits(model) - f16_logits).abs().max())
    save_file({"logits": logits, "greedy_logits": rows.contiguous(), "f16_logits": f16_logits,
               "f16_greedy_logits": f16_rows.contiguous()}, out / f"{name}.safetensors")
    golden = {
        "heads_of": published,
        "config": stored,
        "seed": seed,
        "weights": tensors,
        "transformers": transformers.__version__,
        "torch": torch.__version__.split("+")[0],
        "prompt": PROMPT,
        "positions": POSITIONS,
        "greedy": greedy,
        "margins": [round(m, 4) for m in margins(rows)],
        "largest_logit": round(largest, 3),
        "f16_moves_logits_by": round(float((f16_logits - logits).abs().max()), 5),
        "fast_moves_logits_by": round(fast, 4),
    }
    lines = [f" {json.dumps(key)}: {json.dumps(value, sort_keys=key == 'config')}"
             for key, value in golden.items()]
    (out / f"{name}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{name:10s} seed {seed:3d}  margin {min(golden['margins']):.3f}  max {largest:6.2f}  "
          f"f16 {golden['f16_moves_logits_by']:.5f}  fast {fast:.4f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("family", nargs="*", metavar="family", default=[])
    args = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(2)
    args.out.mkdir(parents=True, exist_ok=True)
    goldens = Path(__file__).resolve().parent.parent / "tests/golden/models"
    for name in args.family or FAMILIES:
        make(name, args.out, goldens)


if __name__ == "__main__":
    main()
