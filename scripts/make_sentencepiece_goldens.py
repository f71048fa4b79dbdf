#!/usr/bin/env python3
"""Trains two small sentencepiece models, BPE with byte fallback and unigram with a character map,
and writes them as GGUF files hold them, with the ids that sentencepiece gives hard and random
strings: the vocabularies of models `llama` and `t5` in tests/text/tokenizer/gguf_test.cc.

    python scripts/make_sentencepiece_goldens.py TEXT... [--out tests/text/tokenizer/data]

Reads OUT/strings.json of make_tokenizer_goldens.py; writes OUT/sentencepiece.json: per model its
tokens, scores, types (GgufTokenType) and charsmap (base64); hard: ids of each hard string; seed, first and
random: those of random strings, the first of them as ids, all as hashes. Needs the packages
sentencepiece, protobuf and tokenizers.
"""

import argparse
import base64
import io
import json
import os
import struct

import sentencepiece as spm
from sentencepiece import sentencepiece_model_pb2 as model_pb2

from make_tokenizer_goldens import Lcg, fnv, random_string
from tokenizer_kinds import corpus

# Ligatures, compatibility forms, spaces, a character dropped, and one that grows.
RULES = {
    "\ufb01": "fi",
    "\u2163": "IV",
    "\u00a0": " ",
    "\u3000": " ",
    "\t": " ",
    "\n": " ",
    "\u200b": "",
    "e\u0301": "\u00e9",
    "\uff76\uff9e": "\u30ac",
    "\uff76": "\u30ab",
    "!": "!!",
}


def train(lines, **kw):
    out = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=out,
        vocab_size=600,
        max_sentence_length=100_000,
        minloglevel=2,
        **kw,
    )
    return out.getvalue()


def golden(blob, strings, n_random):
    model = model_pb2.ModelProto.FromString(blob)
    processor = spm.SentencePieceProcessor(model_proto=blob)
    excluded = [False] * 0x110000
    for low, high in strings["excluded"]:
        excluded[low : high + 1] = [True] * (high + 1 - low)
    seed = 20
    rng = Lcg(seed)
    ids = [processor.encode(random_string(rng, excluded)) for _ in range(n_random)]
    return {
        "tokens": [p.piece for p in model.pieces],
        "scores": [round(p.score, 4) for p in model.pieces],
        "types": [p.type for p in model.pieces],
        "charsmap": base64.b64encode(model.normalizer_spec.precompiled_charsmap).decode(),
        "hard": [processor.encode(s) for s in strings["hard"]],
        "seed": seed,
        "first": ids[:50],
        "random": "".join(fnv(struct.pack(f"<{len(i)}i", *i)) for i in ids),
    }


def rounded(blob):
    """The model with the scores that are stored."""
    model = model_pb2.ModelProto.FromString(blob)
    for piece in model.pieces:
        piece.score = round(piece.score, 4)
    return model.SerializeToString()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("texts", nargs="+")
    parser.add_argument("--out", default="tests/text/tokenizer/data")
    args = parser.parse_args()
    with open(os.path.join(args.out, "strings.json"), encoding="utf-8") as f:
        strings = json.load(f)
    lines = corpus(args.texts, strings["hard"])
    lines = [part for line in lines for part in line.split("\n") if part and "\0" not in part]
    rules = os.path.join(args.out, "rules.tsv")
    with open(rules, "w", encoding="utf-8") as f:
        for key, value in sorted(RULES.items()):
            f.write("\t".join(" ".join(f"{ord(c):X}" for c in s) for s in (key, value)) + "\n")
    llama = train(
        lines,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        control_symbols=["<|user|>"],
        character_coverage=0.99,
    )
    t5 = train(
        lines,
        model_type="unigram",
        normalization_rule_tsv=rules,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        control_symbols=["<|user|>"],
        character_coverage=0.99,
    )
    os.remove(rules)
    data = {
        "llama": golden(rounded(llama), strings, 2000),
        "t5": golden(rounded(t5), strings, 2000),
    }
    with open(os.path.join(args.out, "sentencepiece.json"), "w", encoding="utf-8") as f:
        json.dump(data, f, separators=(",", ":"))
        f.write("\n")


main()
