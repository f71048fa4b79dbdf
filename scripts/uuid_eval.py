#!/usr/bin/env python3
"""Whether omnikv answers what full attention answers where an answer is as long as a good part of the
budget: UUIDs hidden in documents of our own, asked for one by one.

    uuid_eval.py [--program build/tools/omnikv] [--docs 32] [--mem 0.3] [--tails 256,all]

Drives the program (`eval document`, `eval quickstart`) on documents of 2,500 to 8,000 tokens with four
facts each. Every question that `full` answers and omnikv does not is put to the oracle of
policy_oracle.py too, in float64 on the same weights under the same policy: it must lose it as well, or
the engine is wrong. Prints those questions with both answers, and the sums. Exit code 0: no question is
lost by the engine alone. Needs NumPy; it reads the shipped GGUF file (Q8_0, F32) itself.
"""

import argparse
import copy
import json
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from oracle.model import Context, Model, softmax
from oracle.omnikv import OmniKv
from oracle.policy import Full

ROOT = Path(__file__).resolve().parent.parent
LENGTHS = (2500, 2600, 2800, 3000, 3500, 4500, 6000, 8000)
FILTERS = [2, 13]  # of the shipped model
ANSWER = 64  # tokens at most


def read_gguf(path):
    """The tensors of a GGUF file in float64 by name, and its metadata but for lists of text."""
    raw = np.memmap(path, np.uint8, "r")
    at = 8
    number = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q",
              12: "d"}

    def take(form):
        nonlocal at
        size = struct.calcsize("<" + form)
        at += size
        return struct.unpack("<" + form, raw[at - size:at].tobytes())[0]

    def text():
        nonlocal at
        n = take("Q")
        at += n
        return raw[at - n:at].tobytes().decode("utf-8", "replace")

    def value(kind):
        if kind == 8:
            return text()
        if kind == 9:
            inner, n = take("I"), take("Q")
            return [value(inner) for _ in range(n)]
        return take(number[kind])

    n_tensors, n_keys = take("Q"), take("Q")
    meta = {}
    for _ in range(n_keys):
        key = text()
        meta[key] = value(take("I"))
    infos = []
    for _ in range(n_tensors):
        name, dims = text(), [take("Q") for _ in range(take("I"))]
        infos.append((name, dims[::-1], take("I"), take("Q")))
    align = meta.get("general.alignment", 32)
    start = (at + align - 1) // align * align
    tensors = {}
    for name, shape, kind, offset in infos:
        n = int(np.prod(shape))
        begin = start + offset
        if kind == 0:
            values = raw[begin:begin + 4 * n].view("<f4").astype(np.float64)
        else:
            assert kind == 8, f"{path}: {name} has type {kind}, expected F32 or Q8_0"
            blocks = raw[begin:begin + n // 32 * 34].reshape(-1, 34)
            scale = blocks[:, :2].copy().view("<f2").astype(np.float64)
            values = scale * blocks[:, 2:].copy().view(np.int8)
        tensors[name] = values.reshape(shape)
    return tensors, meta


def oracle_model(path):
    tensors, meta = read_gguf(path)
    arch = meta["general.architecture"]
    heads, kv_heads = (meta[f"{arch}.attention.head_count{kv}"] for kv in ("", "_kv"))
    head_dim = tensors["blk.0.attn_q.weight"].shape[0] // heads

    def unpermuted(w, n):  # the file pairs neighbours for rotation, the model the halves
        return w.reshape(n, head_dim // 2, 2, -1).swapaxes(1, 2).reshape(w.shape)

    names = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
             "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
             "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
             "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
    w = {"model.embed_tokens.weight": tensors["token_embd.weight"],
         "model.norm.weight": tensors["output_norm.weight"]}
    n_layers = meta[f"{arch}.block_count"]
    for layer in range(n_layers):
        for short, long in names.items():
            tensor = tensors[f"blk.{layer}.{short}.weight"]
            if short in ("attn_q", "attn_k"):
                tensor = unpermuted(tensor, heads if short == "attn_q" else kv_heads)
            w[f"model.layers.{layer}.{long}.weight"] = tensor
    return Model({"num_hidden_layers": n_layers, "num_attention_heads": heads,
                  "num_key_value_heads": kv_heads, "head_dim": head_dim,
                  "rms_norm_eps": meta[f"{arch}.attention.layer_norm_rms_epsilon"],
                  "rope_theta": meta[f"{arch}.rope.freq_base"]}, w)


def prefill(context, tokens):
    """Appends all rows of a prompt at once under full attention; the logits after the last."""
    m = context.model
    n = len(tokens)
    group = m.heads // m.kv_heads
    x = m.embedding[tokens]
    positions = np.arange(n)
    for layer in range(m.n_layers):
        h = m.norm(x, m.weight(layer, "input_layernorm"))
        q, k, v = ((h @ m.weight(layer, f"self_attn.{p}_proj").T)
                   .reshape(n, -1, m.head_dim).swapaxes(0, 1) for p in "qkv")
        context.q[layer][:, :n], context.k[layer][:, :n], context.v[layer][:, :n] = q, k, v
        q, k = m.rotate(q, positions), m.rotate(k, positions)
        o = np.zeros((n, m.heads, m.head_dim))
        for head in range(m.heads):
            for begin in range(0, n, 512):
                rows = slice(begin, min(begin + 512, n))
                logits = q[head, rows] @ k[head // group, :rows.stop].T / np.sqrt(m.head_dim)
                logits[positions[None, :rows.stop] > positions[rows, None]] = -np.inf
                o[rows, head] = softmax(logits) @ v[head // group, :rows.stop]
        x = x + o.reshape(n, -1) @ m.weight(layer, "self_attn.o_proj").T
        h = m.norm(x, m.weight(layer, "post_attention_layernorm"))
        gate = h @ m.weight(layer, "mlp.gate_proj").T
        up = h @ m.weight(layer, "mlp.up_proj").T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ m.weight(layer, "mlp.down_proj").T
    context.n = context.n_prompt = n
    return m.head @ m.norm(x[-1], m.w["model.norm.weight"])


class Oracle:
    def __init__(self, model_path, ends):
        self.model, self.ends = oracle_model(model_path), ends

    def answers(self, tokens, policies):
        """The greedy answer's tokens under each policy."""
        context = Context(self.model, len(tokens) + ANSWER)
        logits = prefill(context, tokens)
        out = []
        for policy in policies:
            own, answer, row = copy.copy(context), [], logits
            own.q, own.k, own.v = context.q.copy(), context.k.copy(), context.v.copy()
            while len(answer) < ANSWER and int(row.argmax()) not in self.ends:
                answer.append(int(row.argmax()))
                row = own.append(answer[-1], policy)
            out.append(answer)
        return out


def run(program, *arguments, **more):
    done = subprocess.run([program, *arguments], capture_output=True, text=True, **more)
    if done.returncode != 0:
        sys.exit(f"{program} {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--program", default=str(ROOT / "build/cpu/tools/omnikv"))
    parser.add_argument("--model", default=str(ROOT / "models/omnikv-tiny-q8_0.gguf"))
    parser.add_argument("--docs", type=int, default=32)
    parser.add_argument("--seed", type=int, default=100)
    parser.add_argument("--mem", default="0.3")
    parser.add_argument("--tails", default="256,all")
    args = parser.parse_args()
    tails = args.tails.split(",")
    oracle, asked, alone = None, 0, 0
    right = {name: 0 for name in ["full", *tails]}
    lost = []
    with tempfile.TemporaryDirectory() as folder:
        for d in range(args.docs):
            length = LENGTHS[d * len(LENGTHS) // args.docs]
            run(args.program, "eval", "document", "-m", args.model, "--kinds", "uuid", "--tokens",
                str(length), "--seed", str(args.seed + d), "--out", folder)
            about = json.loads(Path(folder, "facts.json").read_text())
            text = Path(folder, "document.txt").read_text()
            facts = about["facts"]
            asked += len(facts)
            answers = {}
            for name in right:
                policy = "full" if name == "full" else "omnikv"
                sets = [] if name == "full" else ["--set", f"omnikv.mem={args.mem}", "--set",
                                                  f"omnikv.tail={name}"]
                result = run(args.program, "eval", "quickstart", "-m", args.model, "--json",
                             "--document", folder, "--policies", policy, *sets)
                answers[name] = json.loads(result)["policies"][0]["answers"]
                right[name] += sum(a["right"] for a in answers[name])
            for i, fact in enumerate(facts):
                wrong = [t for t in tails if answers["full"][i]["right"]
                         and not answers[t][i]["right"]]
                if not wrong:
                    continue
                message = about["preface"] + text + "\n\n" + fact["question"]
                tokens = json.loads(run(args.program, "tokenize", "-m", args.model, "-f", "-",
                                        input=message))
                oracle = oracle or Oracle(args.model, {1, 5})
                policies = [Full(), *(OmniKv(FILTERS, mem=args.mem,
                                             tail=t if t == "all" else int(t)) for t in wrong)]
                told = [run(args.program, "tokenize", "-m", args.model, "--decode", "-f", "-",
                            input=json.dumps(answer)).strip()
                        for answer in oracle.answers(np.array(tokens), policies)]
                assert fact["value"] in told[0], f"the oracle's full attention says {told[0]}"
                for tail, says in zip(wrong, told[1:]):
                    also = fact["value"] not in says
                    alone += not also
                    lost.append(f"{length} tokens, seed {args.seed + d}, tail={tail}: expected "
                                f"{fact['value']}\n  engine: {answers[tail][i]['text']}\n  "
                                f"oracle: {says}{'' if also else '  <- right'}")
            print(f"{d + 1} of {args.docs} documents: asked {asked}, right " +
                  ", ".join(f"{name} {n}" for name, n in right.items()), file=sys.stderr, flush=True)
    print("\n".join(lost))
    print(f"asked {asked}; right: " + ", ".join(
        f"full {n}" if name == "full" else f"omnikv mem={args.mem} tail={name} {n}"
        for name, n in right.items()))
    print(f"lost by omnikv: {len(lost)}, of them by the engine alone: {alone}")
    return 1 if alone else 0


if __name__ == "__main__":
    sys.exit(main())
