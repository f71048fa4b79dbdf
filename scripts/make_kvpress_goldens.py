#!/usr/bin/env python3
"""What kvpress keeps of a prompt, and what transformers answers from it.

    make_kvpress_goldens.py GOLDENS

A test-time tool: it needs torch, kvpress 0.5.5 and transformers 5.2. GOLDENS holds what
policy_oracle.py made: its model and texts are used, and policies_kvpress.json and .safetensors are
written beside them, in the same form. Each case is a prompt that kvpress cuts after every layer's
attention, in float32, with the rows that every KV head keeps, found by their K; then the logits of
the teacher-forced tokens, at the positions of the text.
"""

import argparse
import json
import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from kvpress import (ExpectedAttentionPress, KeyDiffPress, KnormPress, ObservedAttentionPress,
                     SnapKVPress)
from transformers import AutoModelForCausalLM, DynamicCache

from oracle.fixtures import CLEAR_GAP, bits, stored
from oracle.model import write_safetensors
from policy_oracle import write_cases

WINDOW, KERNEL = 8, 5  # of snapkv
# Policy -> press of a share to remove, what gaps are relative to (the score itself: None), prompts.
# knorm has prompts that its budgets do not cut between equal tokens of the first layer.
METHODS = {
    "snapkv": (lambda r: SnapKVPress(r, window_size=WINDOW, kernel_size=KERNEL), None, (40, 80, 120)),
    "knorm": (KnormPress, None, (40, 104, 112)),
    "keydiff": (KeyDiffPress, 1.0, (40, 80, 120)),
    "h2o": (ObservedAttentionPress, None, (40, 80, 120)),
    "expected_attention": (ExpectedAttentionPress, None, (40, 80, 120)),
}
BUDGETS = (16, 28, 32)


def run(model, prompt, decode, press=None):
    """Logits [n_decode, vocab], the cache's K by layer after the prompt, and the press's scores."""
    scores, cache = {}, DynamicCache()
    x = torch.tensor([prompt])
    with torch.no_grad():
        if press is None:
            model(x, past_key_values=cache)
        else:
            score = press.score

            def noted(module, *args, **kwargs):
                scores[module.layer_idx] = score(module, *args, **kwargs)
                return scores[module.layer_idx]

            press.score = noted
            with press(model):
                model(x, past_key_values=cache)
        keys = [layer.keys[0].clone() for layer in cache.layers]
        logits = [model(torch.tensor([[token]]), past_key_values=cache,
                        position_ids=torch.tensor([[len(prompt) + i]])).logits[0, -1].numpy()
                  for i, token in enumerate(decode)]
    return np.array(logits), keys, {l: s[0].numpy() for l, s in scores.items()}


def make_case(model, name, policy, budget, prompt, decode):
    make_press, size, _ = METHODS[policy]
    # kvpress keeps int(n * (1 - r)) rows.
    press = make_press(1 - (budget + 0.5) / len(prompt))
    full, all_keys, _ = run(model, prompt, decode)
    logits, keys, scores = run(model, prompt, decode, press)
    chosen, gaps, reads = {}, {}, []
    for layer, kept_keys in enumerate(keys):
        reads.append([f"{layer}.{head}" for head in range(len(kept_keys))])
        for head, key in enumerate(reads[-1]):
            same = (kept_keys[head][:, None] == all_keys[layer][head][None]).all(-1)
            kept = same.float().argmax(-1).sort().values.tolist()
            assert len(set(kept)) == budget and same.any(-1).all(), f"{name}: rows kept twice"
            chosen[key] = [bits([*kept, len(prompt)])]  # and the step's own
            order = np.sort(-scores[layer][head])
            gap = (order[budget] - order[budget - 1]) / (size or abs(order[budget - 1]))
            if gap < CLEAR_GAP:
                gaps[key] = {"0": float(f"{gap:.1e}")}
    settings = {"budget": budget}
    if policy == "snapkv":
        settings |= {"window": WINDOW, "kernel": KERNEL, "pool": "mean"}
    if policy == "h2o":
        settings |= {"mode": "observed"}
    moved = np.abs(logits - full).max() / np.abs(full).max()
    print(f"{name:24s} against full {moved:.3f}  near ties {gaps}")
    return logits, {"name": name, "policy": policy, "prompt_tokens": len(prompt),
                    "settings": {k: str(v) for k, v in settings.items()},
                    "moved_against_full": round(float(moved), 3), "reads": reads,
                    "chosen": chosen, "gaps": gaps}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("goldens", type=Path)
    out = parser.parse_args().goldens
    torch.set_num_threads(1)
    texts = json.loads((out / "policies.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(out / texts["model"], dtype=torch.float32).eval()
    gives_weights = AutoModelForCausalLM.from_pretrained(
        out / texts["model"], dtype=torch.float32, attn_implementation="eager").eval()
    cases, logits = [], {}
    for policy, (_, _, lengths) in METHODS.items():
        for budget in BUDGETS:
            for n in lengths:
                name = f"{policy}_{budget}_of_{n}"
                logits[name], case = make_case(gives_weights if policy == "h2o" else model, name,
                                               policy, budget, texts["prompt"][:n],
                                               texts["decode"])
                cases.append(case)
    write_cases(out / "policies_kvpress.json", {}, cases)
    write_safetensors(out / "policies_kvpress.safetensors",
                      {name: stored(rows) for name, rows in logits.items()})


if __name__ == "__main__":
    main()
