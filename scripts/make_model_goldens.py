#!/usr/bin/env python3
"""Tiny random models of every supported family, with the logits transformers computes for them.

    make_model_goldens.py OUT [family ...]

A test-time tool: it needs torch, transformers 5 and safetensors, the engine does not. Each family
becomes one Hugging Face folder:

    OUT/<family>/config.json          in the keys of transformers 5 (rope_parameters, dtype) or in
                                      those of most published checkpoints (rope_theta,
                                      rope_scaling, torch_dtype): golden.json's "keys" says which
                 other_config.json    the same model in the other keys (internlm2 has none)
                 model.safetensors    random weights (one family: shards and an index)
                 golden.json          prompt, greedy tokens, their margins, and by how much the
                                      logits move when a feature of the family is left out
                 golden.safetensors   logits        f32 [n_prompt, vocab]  every prompt position
                                      greedy_logits f32 [n_greedy, vocab]  row i gave greedy[i]

References are computed in float32 from the stored (rounded) weights with eager attention. What a
family promises is asserted here, not only recorded: both spellings of config.json load to the same
logits, decoding with the cache equals decoding without it, every greedy choice is clear-cut, and
every ablation shows.

Dynamic NTK past its threshold is the exception: transformers recomputes the base at every new
length but leaves cached keys as they were rotated, so its decoding with the cache, without it and
at one fixed length are three different models (the logits differ by half the largest).
llama_dynamic is decoded with the frequencies held at those of the prompt's length ("decoding":
"held"); what transformers' own generate chooses is kept beside it as "generate".
"""

import argparse
import copy
import json
import math
import os
import random
import re
import shutil
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB, HIDDEN, FFN, HEADS, KV_HEADS, LAYERS = 256, 32, 64, 4, 2, 3
N_PROMPT, N_GREEDY = 40, 16
SEEDS = 200  # tried for each family
MIN_MARGIN = 0.2  # between the two best logits of every greedy step
MIN_DISTINCT = 8  # greedy tokens: a generation that loops tests little
MIN_ABLATION = 0.05  # of the largest logit
PROMPT = [1, *random.Random(40).choices(range(3, VOCAB), k=N_PROMPT - 1)]


@dataclass
class Family:
    model_type: str
    config: dict
    # What to leave out -> changed config keys, or (regular expression of tensor names, value) to
    # fill those tensors with.
    ablations: dict = field(default_factory=dict)
    published: str = ""  # key that names the kind of rope in an older config.json, "" = new keys
    dtype: torch.dtype = torch.bfloat16
    shard: str = "1GB"  # largest weight file


def default_rope(theta=10000.0):
    return {"rope_type": "default", "rope_theta": theta}


def scaled_rope(kind, theta=10000.0, **parameters):
    return {"rope_type": kind, "rope_theta": theta, **parameters}


def long_rope(n_freqs, **parameters):
    return scaled_rope(
        "longrope",
        short_factor=[1.0 + 0.1 * i for i in range(n_freqs)],
        long_factor=[1.0 + 0.7 * i for i in range(n_freqs)],
        **parameters,
    )


def without_rope_scaling(theta=10000.0):
    return {"rope_parameters": default_rope(theta)}


BASE = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
NARROW = HIDDEN // HEADS  # the head size where config.json has no head_dim
WIDE = 2 * NARROW  # head_dim != hidden / heads, and enough frequencies for every band of yarn
QK_NORM = {"q_norm": ("q_norm", 1.0), "k_norm": ("k_norm", 1.0)}


def llama_families():
    def llama(rope, ablations, published="", dtype=torch.bfloat16, shard="1GB", **more):
        config = {**BASE, "head_dim": WIDE, "rope_parameters": rope, **more}
        return Family("llama", config, ablations, published, dtype, shard)

    plain, theta = default_rope(500000.0), {"rope_theta": without_rope_scaling()}
    yarn = {"factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 1.0,
            "beta_slow": 0.125}
    return {
        "llama": llama(plain, theta, "rope_type"),
        "llama_f32": llama(plain, theta, dtype=torch.float32),
        "llama_linear": llama(
            scaled_rope("linear", factor=2.0),
            {"linear": without_rope_scaling()}, "type", shard="24KB"),
        "llama_dynamic": llama(
            scaled_rope("dynamic", factor=4.0),
            {"dynamic": without_rope_scaling()}, "type", max_position_embeddings=32),
        "llama_llama3": llama(
            scaled_rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                        original_max_position_embeddings=64),
            {"llama3": without_rope_scaling()}, "rope_type"),
        "llama_yarn": llama(
            scaled_rope("yarn", 1000.0, **yarn),
            {"yarn": without_rope_scaling(1000.0),
             "attention factor": {
                 "rope_parameters": scaled_rope("yarn", 1000.0, **yarn, attention_factor=1.0)}},
            max_position_embeddings=128),
        "llama_longrope": llama(
            long_rope(WIDE // 2, factor=32.0, original_max_position_embeddings=16),
            {"longrope": without_rope_scaling()}),
        "llama_tied_bias": llama(
            default_rope(),
            {"attention bias": (r"self_attn.*bias", 0.0), "mlp bias": (r"mlp.*bias", 0.0),
             "rms_norm_eps": {"rms_norm_eps": 1e-6}},
            attention_bias=True, mlp_bias=True, tie_word_embeddings=True, rms_norm_eps=0.1),
    }


def other_families():
    qwen3 = {**BASE, "head_dim": WIDE, "rope_parameters": default_rope(1e6),
             "tie_word_embeddings": True}
    gemma3_rope = {"sliding_attention": default_rope(),
                   "full_attention": scaled_rope("linear", 1e6, factor=8.0)}
    return {
        "mistral": Family(
            "mistral",
            {**BASE, "head_dim": WIDE, "sliding_window": 8, "rope_parameters": default_rope(1e6)},
            {"window": {"sliding_window": None}, "rope_theta": without_rope_scaling()},
            "rope_type"),
        "qwen2": Family(
            "qwen2",
            {**BASE, "rope_parameters": default_rope(1e6), "tie_word_embeddings": True,
             "use_sliding_window": False},
            {"bias": (r"bias", 0.0), "rope_theta": without_rope_scaling()}),
        # The published long Qwen2s keep max_position_embeddings at the length before scaling.
        "qwen2_yarn": Family(
            "qwen2",
            {**BASE, "use_sliding_window": False, "max_position_embeddings": 16,
             "rope_parameters": scaled_rope("yarn", 1e6, factor=4.0,
                                            original_max_position_embeddings=16)},
            {"yarn": without_rope_scaling(1e6)}, "type"),
        "qwen3": Family("qwen3", qwen3, QK_NORM, "rope_type"),
        "qwen3_f32": Family("qwen3", qwen3, QK_NORM, dtype=torch.float32),
        "phi3": Family(
            "phi3",
            {**BASE, "original_max_position_embeddings": 16, "sliding_window": None,
             "rope_parameters": long_rope(NARROW // 2, partial_rotary_factor=1.0)},
            {"long factors": {"original_max_position_embeddings": 512}}, "type"),
        "phi3_short": Family(
            "phi3",
            {**BASE, "original_max_position_embeddings": 128, "sliding_window": None,
             "rope_parameters": long_rope(3 * NARROW // 8, partial_rotary_factor=0.75)},
            {"short factors": {"original_max_position_embeddings": 16},
             "partial rotation": {
                 "rope_parameters": long_rope(NARROW // 2, partial_rotary_factor=1.0)}}),
        "granite": Family(
            "granite",
            {**BASE, "rope_parameters": default_rope(), "tie_word_embeddings": True,
             "embedding_multiplier": 2.0, "logits_scaling": 2.0, "residual_multiplier": 0.7,
             "attention_multiplier": 0.2},
            {"embedding multiplier": {"embedding_multiplier": 1.0},
             "residual multiplier": {"residual_multiplier": 1.0},
             "attention multiplier": {"attention_multiplier": NARROW**-0.5},
             "logits scaling": {"logits_scaling": 1.0}}, "rope_type"),
        "smollm3": Family(
            "smollm3",
            {**BASE, "num_hidden_layers": 4, "no_rope_layers": [1, 1, 0, 1],
             "rope_parameters": default_rope(5e6), "use_sliding_window": False},
            {"layer without rope": {"no_rope_layers": [1, 1, 1, 1]}}),
        "olmo2": Family(
            "olmo2", {**BASE, "rope_parameters": default_rope(500000.0)},
            {**QK_NORM, "rope_theta": without_rope_scaling()}, "rope_type"),
        "gemma3": Family(
            "gemma3_text",
            {**BASE, "num_hidden_layers": 4, "head_dim": WIDE, "sliding_window": 8,
             "query_pre_attn_scalar": NARROW, "tie_word_embeddings": True,
             "layer_types": [*["sliding_attention"] * 2, "full_attention", "sliding_attention"],
             "rope_parameters": gemma3_rope},
            {"window": {"sliding_window": 512},
             "query scale": {"query_pre_attn_scalar": WIDE},
             "global rope": {"rope_parameters": {**gemma3_rope,
                                                 "full_attention": default_rope()}}},
            "rope_type"),
    }


# --- weights -------------------------------------------------------------------------------------


def spread(name, shape, config):
    """Mean and deviation of one tensor's weights: wide, so that every rope, norm, window, bias and
    multiplier moves the logits, yet attention stays between uniform and one-hot."""
    tied = config.tie_word_embeddings
    one = 0.0 if config.model_type.startswith("gemma") else 1.0  # gemma stores w - 1
    if name.endswith(".bias"):
        return 0.0, 0.5
    if name == "model.norm.weight" and tied:
        return one - 1.0, 1.0  # of both signs, else a tied model repeats its last token
    if "q_norm" in name or "k_norm" in name:
        return one + 0.4, 0.3
    if "norm" in name:
        return one, 0.2
    if "embed_tokens" in name and not tied:
        return 0.0, 1.0
    if "embed_tokens" in name:
        return 0.0, 2.5 * getattr(config, "logits_scaling", 1.0) / math.sqrt(shape[-1])
    return 0.0, (2.5 if "lm_head" in name else 1.5) / math.sqrt(shape[-1])


def draw(config, seed, dtype):
    """A model in float32 whose weights are exactly representable in `dtype`."""
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager",
                                             dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.named_parameters():  # a tied lm_head is listed once
            mean, deviation = spread(name, tensor.shape, config)
            values = mean + deviation * torch.randn(tensor.shape, generator=generator)
            tensor.copy_(values.to(dtype).float())
    return model


# --- config.json ---------------------------------------------------------------------------------


def published_keys(config, kind_key):
    """The same config.json in the keys that most published checkpoints carry."""
    out = copy.deepcopy(config)
    out["torch_dtype"] = out.pop("dtype")
    out["transformers_version"] = "4.46.0"
    rope = out.pop("rope_parameters")
    if "full_attention" in rope:  # gemma3: one set for each type of layer
        out["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
        kinds = out.pop("layer_types")
        del out["_sliding_window_pattern"]
        out["sliding_window_pattern"] = kinds.index("full_attention") + 1
    out["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        out["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    kind = rope.pop("rope_type")
    if out["model_type"] == "phi3":  # has it at the top level
        rope.pop("original_max_position_embeddings", None)
    out["rope_scaling"] = None if kind == "default" else {kind_key: kind, **rope}
    return out


def write_config(folder, config, name="config.json"):
    (folder / name).write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")


# --- references ----------------------------------------------------------------------------------


def load(folder, config=None, dtype=torch.float32):
    more = {"config": config} if config else {}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager",
                                                **more).eval()


@torch.no_grad()
def prompt_logits(model, ids=PROMPT):
    """f32 [len(ids), vocab]"""
    return model(torch.tensor([ids]), use_cache=False).logits[0].float()


@torch.no_grad()
def greedy(model, hold_rope=False):
    """N_GREEDY tokens with the cache, and the logits [N_GREEDY, vocab] each was chosen from."""
    tokens, rows, cache, ids = [], [], None, torch.tensor([PROMPT])
    for _ in range(N_GREEDY):
        out = model(ids, past_key_values=cache, use_cache=True)
        if hold_rope:
            model.model.rotary_emb.max_seq_len_cached = sys.maxsize  # dynamic: no more growth
        cache = out.past_key_values
        rows.append(out.logits[0, -1].float())
        tokens.append(int(rows[-1].argmax()))
        ids = torch.tensor([tokens[-1:]])
    return tokens, torch.stack(rows)


def margins(rows):
    top = rows.topk(2).values
    return (top[:, 0] - top[:, 1]).tolist()


def grows(config):
    """Whether transformers would change the frequencies in the middle of the generation."""
    return (config.rope_parameters.get("rope_type") == "dynamic" and
            config.max_position_embeddings < N_PROMPT + N_GREEDY)


def find_seed(config, dtype):
    """The seed with the clearest greedy choices."""
    best, best_margin = 0, 0.0
    for seed in range(SEEDS):
        tokens, rows = greedy(draw(config, seed, dtype), grows(config))
        margin = min(margins(rows))
        if margin > best_margin and len(set(tokens)) >= MIN_DISTINCT:
            best, best_margin = seed, margin
    assert best_margin > MIN_MARGIN, f"no seed below {SEEDS} has a margin over {MIN_MARGIN}"
    return best


def ablate(folder, family, change):
    """Logits of the prompt without one feature."""
    if isinstance(change, tuple):
        model, (pattern, value) = load(folder), change
        with torch.no_grad():
            for name, tensor in model.named_parameters():
                if re.search(pattern, name):
                    tensor.fill_(value)
        return prompt_logits(model)
    config = AutoConfig.for_model(family.model_type, **copy.deepcopy({**family.config, **change}))
    return prompt_logits(load(folder, config))


def check_decoding(folder, config, tokens, rows):
    """Decoding without the cache, and transformers' own generate, must choose the same."""
    ids = PROMPT + tokens[:-1]
    hold = grows(config)
    model = load(folder)
    if hold:
        prompt_logits(model)
        model.model.rotary_emb.max_seq_len_cached = sys.maxsize
    again = prompt_logits(model, ids)[-N_GREEDY:]
    assert (again - rows).abs().max() < 1e-4 * rows.abs().max(), "cached and uncached logits differ"
    generated = load(folder).generate(torch.tensor([PROMPT]), max_new_tokens=N_GREEDY,
                                      do_sample=False, eos_token_id=VOCAB)[0, N_PROMPT:].tolist()
    assert hold or generated == tokens, "generate chooses other tokens"
    return {"generate": generated} if hold else {}


def make(name, family, out):
    config = AutoConfig.for_model(family.model_type, **copy.deepcopy(family.config))
    config._attn_implementation = "eager"
    seed = find_seed(config, family.dtype)
    folder = out / name
    shutil.rmtree(folder, ignore_errors=True)
    draw(config, seed, family.dtype).to(family.dtype).save_pretrained(
        folder, max_shard_size=family.shard)
    (folder / "generation_config.json").unlink(missing_ok=True)

    modern = json.loads((folder / "config.json").read_text())
    published = published_keys(modern, family.published or "rope_type")
    stored, other = (published, modern) if family.published else (modern, published)
    write_config(folder, other, "other_config.json")
    write_config(folder, other)
    other_logits = prompt_logits(load(folder))
    write_config(folder, stored)
    logits = prompt_logits(load(folder))
    assert torch.equal(logits, other_logits), "the two spellings of config.json differ"
    tokens, rows = greedy(load(folder), grows(config))
    more = check_decoding(folder, config, tokens, rows)
    largest = float(logits.abs().max())
    ablation = {}
    for what, change in family.ablations.items():
        moved = float((ablate(folder, family, change) - logits).abs().max())
        assert moved > MIN_ABLATION * largest, f"leaving out {what} moves the logits by {moved}"
        ablation[what] = round(moved, 3)
    bf16 = float((prompt_logits(load(folder, dtype=torch.bfloat16)) - logits).abs().max())
    write_golden(folder, logits, rows, {
        "model_type": modern["model_type"],
        "dtype": str(family.dtype).removeprefix("torch."),
        "keys": "published" if family.published else "transformers 5",
        "seed": seed,
        "transformers": transformers.__version__,
        "torch": torch.__version__.split("+")[0],
        "prompt": PROMPT,
        "greedy": tokens,
        "margins": [round(m, 4) for m in margins(rows)],
        "decoding": "held" if grows(config) else "cached",
        **more,
        "largest_logit": round(largest, 3),
        "bf16_moves_logits_by": round(bf16, 3),
        "ablation": ablation,
    })


def write_golden(folder, logits, rows, golden):
    save_file({"logits": logits.contiguous(), "greedy_logits": rows.contiguous()},
              folder / "golden.safetensors")
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in golden.items()]
    (folder / "golden.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


# --- internlm2 -----------------------------------------------------------------------------------

INTERNLM2_NAMES = {
    "model.embed_tokens.": "model.tok_embeddings.",
    "lm_head.": "output.",
    "input_layernorm.": "attention_norm.",
    "post_attention_layernorm.": "ffn_norm.",
    "self_attn.o_proj.": "attention.wo.",
    "mlp.gate_proj.": "feed_forward.w1.",
    "mlp.down_proj.": "feed_forward.w2.",
    "mlp.up_proj.": "feed_forward.w3.",
}


def internlm2_weights(llama):
    weights = {}
    for name, tensor in llama.items():
        if re.search(r"[qkv]_proj", name):
            continue
        for old, new in INTERNLM2_NAMES.items():
            name = name.replace(old, new)
        weights[name] = tensor
    for layer in range(LAYERS):
        # [kv_heads, queries of the group | key | value, head_dim, hidden]
        groups = [llama[f"model.layers.{layer}.self_attn.{p}_proj.weight"]
                  .view(KV_HEADS, -1, NARROW, HIDDEN) for p in "qkv"]
        weights[f"model.layers.{layer}.attention.wqkv.weight"] = (
            torch.cat(groups, dim=1).reshape(-1, HIDDEN).contiguous())
    return weights


def make_internlm2(out):
    """transformers has no InternLM2, but it is a llama under other names whose q, k and v are one
    tensor: the llama's golden is its golden. Its dynamic NTK stays below its threshold here."""
    folder = out / "internlm2"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        rope = scaled_rope("dynamic", 1e6, factor=2.0)
        make("llama", Family("llama", {**BASE, "rope_parameters": rope}, published="type"),
             Path(scratch))
        llama = Path(scratch, "llama")
        config = json.loads((llama / "config.json").read_text())
        for key in ("attention_bias", "attention_dropout", "head_dim", "mlp_bias",
                    "pretraining_tp"):  # not among InternLM2's
            del config[key]
        write_config(folder, {**config, "architectures": ["InternLM2ForCausalLM"],
                              "model_type": "internlm2", "bias": False})
        save_file(internlm2_weights(load_file(llama / "model.safetensors")),
                  folder / "model.safetensors", metadata={"format": "pt"})
        shutil.copy(llama / "golden.safetensors", folder)
        golden = (llama / "golden.json").read_text()
        (folder / "golden.json").write_text(
            golden.replace('"model_type": "llama"', '"model_type": "internlm2"'))


def report(folder):
    golden = json.loads((folder / "golden.json").read_text())
    for path in folder.iterdir():
        path.chmod(0o644)
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{folder.name:16s} {size / 1024:5.0f} KiB  {golden['dtype']:8s} {golden['keys']:14s} "
          f"seed {golden['seed']:3d}  margin {min(golden['margins']):.3f}  "
          f"max {golden['largest_logit']:5.1f}  bf16 {golden['bf16_moves_logits_by']:.3f}  "
          f"{golden['ablation']}", flush=True)
    return size


def main():
    known = {**llama_families(), **other_families()}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("family", nargs="*", metavar="family")
    args = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    total = 0
    for name in args.family or [*known, "internlm2"]:
        if name == "internlm2":
            make_internlm2(args.out)
        else:
            make(name, known[name], args.out)
        total += report(args.out / name)
    print(f"{total / 1024:.0f} KiB in all")


if __name__ == "__main__":
    main()
