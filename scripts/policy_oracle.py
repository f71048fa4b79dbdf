#!/usr/bin/env python3
"""What the cache policies mean, written down slowly in NumPy, and the fixtures made from it.

    policy_oracle.py OUT [--models DIR] [--seeds N | --seed N]

oracle/ holds a llama or qwen3 decoder in float64 (model.py), and a file for every policy, which
begins with its rule, for the row at position p with n = p + 1 tokens in context, n_gen of them
after the prompt. It shares nothing with the engine. Before this writes anything, the decoder must
reproduce the transformers logits of llama_f32 and qwen3_f32 in DIR (made by make_model_goldens.py;
default OUT/models).

    OUT/policy_model/          an 8-layer random llama in float32 where every layer matters, a table
                               of gates for duo, and a head map for kascade
    OUT/policies.json          prompt, teacher-forced tokens, and the cases of full, streaming and
                               omnikv
    OUT/policies_NAME.json     the cases of another policy
    OUT/similarity.json        what oracle/similarity.py measures of the last tokens of that text
    OUT/far_text.safetensors   what streaming answers at the last positions of 200,000 tokens
    OUT/*.safetensors          beside each, per case f32 [n_decode, 33]: row i is what the model
                               answers to decode token i, which stands at position n_prompt + i: the
                               logits of the tokens 0, 4, 8, ... and the largest absolute value of
                               all. They tell the other logits too: all come from a state of 32
                               values.

A case says how many tokens come before the answer (`prompt_tokens`): so many of the prompt; or with
`first_turn` [n, a] n of the prompt, then a first answer, which is the first a tokens of the answer,
then more of the prompt, which is a second one. It has its settings, by how much the logits move in
float32 (`moved_in_float32`, which another CPU or NumPy may give otherwise: no test reads it) and
against `full`, and what is read by choice:
    reads     by layer, or by layer and KV head, the key of what is read; empty: everything
    chosen    by key the tokens read at each step: bit t of a hexadecimal number is token t. Where
              there are fewer than steps: the last, and the tokens that came after it
    gaps      by key and step by how much the scores may move, relative to the last one chosen or as
              the policy's file says, before another is chosen instead (0: nothing was left out).
              Of policies in files of their own only what is below 1e-3
"""

import argparse
import json
from pathlib import Path

import numpy as np

from oracle.cases import GATES, HEAD_MAP, cases, first_cases, gates, head_map
from oracle.fixtures import (Bench, check_against_goldens, check_cases, check_model, draw,
                             draw_text, find_seed, make_case, policy_config, relative, stored)
from oracle.model import Model, write_safetensors
from oracle.policy import Full
from oracle.similarity import cases as similarity_cases
from oracle.streaming import FarText, Streaming


def write_cases(path, head, cases):
    lines = [f' "{key}": {json.dumps(value)},\n' for key, value in head.items()]
    body = ",\n".join("  " + json.dumps(case, separators=(",", ":")) for case in cases)
    path.write_text("{\n" + "".join(lines) + ' "cases": [\n' + body + "\n ]\n}\n")


def write_far_text(out, model):
    """What streaming answers at the end of a text of 200,000 tokens."""
    text, logits = FarText(len(model.embedding)), {}
    for positions in ("original", "cache"):
        settings = {"sinks": 4, "budget": 32, "positions": positions}
        logits[positions] = text.logits(model, settings, model.n_layers + 1)
        more = text.logits(model, settings, model.n_layers + 3)
        assert relative(logits[positions], more) < 1e-9, "tokens that are left out count"
    assert relative(logits["original"], logits["cache"]) > 0.02
    write_safetensors(out / "far_text.safetensors",
                      {name: stored(of_rows) for name, of_rows in logits.items()})


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--models", type=Path)
    parser.add_argument("--seeds", type=int, default=40, help="how many models to choose from")
    parser.add_argument("--seed", type=int, help="the model that was found before")
    args = parser.parse_args()
    check_against_goldens(args.models or args.out / "models")

    prompt, decode = draw_text()
    seed = find_seed(args.seeds, prompt, decode) if args.seed is None else args.seed
    tensors, config = draw(seed), policy_config()
    bench = Bench(Model(config, tensors), prompt, decode)
    bench32 = Bench(Model(config, tensors, np.float32), prompt, decode)
    check_model(bench, bench.run(Full()))
    settings = first_cases()["streaming_cache"][1]
    assert relative(bench.run(Streaming(**{**settings, "positions": "places"})),
                    bench.run(Streaming(**settings))) < 1e-4

    folder = args.out / "policy_model"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    write_safetensors(folder / "model.safetensors", tensors)
    np.savetxt(folder / GATES, gates(), delimiter="\t")
    np.savetxt(folder / HEAD_MAP, head_map(), fmt="%d", delimiter="\t")
    head = {"model": folder.name, "seed": seed, "prompt": prompt, "decode": decode}
    (args.out / "similarity.json").write_text(
        json.dumps(similarity_cases(bench.model, prompt + decode), separators=(",", ":")) + "\n")
    write_far_text(args.out, bench.model)
    made, logits = [], {}
    for file, of_file in cases().items():
        own, own_logits = [], {}
        for name, (policy, settings, *of_text) in of_file.items():
            case, own_logits[name], rule = make_case(name, policy, settings, bench, bench32,
                                                     *of_text)
            own.append(case)
            print(f"{name:32s} against full {case['moved_against_full']:.3f}  float32 "
                  f"{case['moved_in_float32']:.0e}  smallest gap {rule.min_gap():.0e}")
        write_cases(args.out / f"{file}.json", head if file == "policies" else {}, own)
        write_safetensors(args.out / f"{file}.safetensors",
                          {name: stored(of_case) for name, of_case in own_logits.items()})
        for case in own:  # whose names may stand in two files
            name = case["name"] if case["name"] not in logits else f"{file}: {case['name']}"
            made.append({**case, "name": name})
            logits[name] = own_logits[case["name"]]
    check_cases(bench, made, logits)


if __name__ == "__main__":
    main()
