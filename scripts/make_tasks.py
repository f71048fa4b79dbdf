#!/usr/bin/env python3
"""Writes tasks for `omnikv eval needles --tasks` from the generator that a model was trained on.

    make_tasks.py FOLDER/tasks.py --tokens 4096 --kinds kv,lookup --count 2 --seed 1 > tasks.jsonl

The generator is a Python file with a function for each kind: kind(rng, tokens) gives segments
(kind, text or tokens of filler) and pairs of question and answer. Filler becomes the sentences
GRASS of that file. Questions about one text follow each other, so a session reads it once.
"""

import argparse
import importlib.util
import json

import numpy as np

TOKENS_OF_GRASS = 26  # of the sentences GRASS, about


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("generator")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--kinds", default="kv,lookup,dict2,alias_w,passkey,magic")
    parser.add_argument("--count", type=int, default=1, help="texts of each kind")
    parser.add_argument("--questions", type=int, default=2, help="about each text, at most")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    spec = importlib.util.spec_from_file_location("generator", args.generator)
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    rng = np.random.default_rng(args.seed)
    for kind in args.kinds.split(","):
        for _ in range(args.count):
            segments, pairs = getattr(generator, kind)(rng, args.tokens)
            text = "".join(
                what if isinstance(what, str)
                else generator.GRASS * max(1, round(what / TOKENS_OF_GRASS))
                for _, what in segments)
            for question, answer in pairs[:args.questions]:
                print(json.dumps({"prompt": f"{text}\n\n{question}", "answer": answer,
                                  "kind": kind}))


if __name__ == "__main__":
    main()
