#!/usr/bin/env python3
"""Trains the gates of policy duo as DuoAttention does, on a model of the Llama architecture.

    train_duo.py MODEL.gguf -o MODEL.duo.tsv [--device cuda] [--steps N] [...]

Run by hand, usually on a card; it needs PyTorch and no network. Each KV head of each layer has a
gate a, from 1 on. In training its attention is a * full + (1 - a) * streaming, where streaming
attention reads the first `--sinks` tokens and the last `--recent` ones. The model's weights stay as
they are. The loss is the mean squared difference between the last hidden state and that of full
attention, on the answers to questions about facts that are hidden in a long text, plus
`--penalty` times the mean gate. What is written are the gates, a line for each layer, a number for
each KV head: what policy duo reads, and `omnikv analyze heads` measures without training.

MODEL is a GGUF file (F32, F16, BF16 or Q8_0). The texts are made up, or come from `--text`: plain
text, in which the facts are then hidden. `--minutes` ends the training early and writes what there
is.
"""

import argparse
import math
import random
import re
import struct
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


# --- The model file.

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
Q8_BLOCK = np.dtype([("scale", "<f2"), ("values", "i1", 32)])


class Gguf:
    """`fields`: name -> value. `tensor(name)`: f32, rows first."""

    def __init__(self, path):
        self.data = np.memmap(path, np.uint8, "r")
        self.at = 0
        if bytes(self.data[:4]) != b"GGUF":
            sys.exit(f"{path} is no GGUF file")
        self.at = 4
        self.scalar("I")
        n_tensors, n_fields = self.scalar("Q"), self.scalar("Q")
        self.fields = {}
        for _ in range(n_fields):
            name = self.text()
            self.fields[name] = self.value(self.scalar("I"))
        self.places = {}
        for _ in range(n_tensors):
            name = self.text()
            shape = [self.scalar("Q") for _ in range(self.scalar("I"))]
            self.places[name] = (shape[::-1], self.scalar("I"), self.scalar("Q"))
        align = self.fields.get("general.alignment", 32)
        self.begin = (self.at + align - 1) // align * align

    def scalar(self, kind):
        n = struct.calcsize(kind)
        self.at += n
        return struct.unpack("<" + kind, self.data[self.at - n:self.at].tobytes())[0]

    def text(self):
        n = self.scalar("Q")
        self.at += n
        return self.data[self.at - n:self.at].tobytes().decode("utf-8", "replace")

    def value(self, kind):
        if kind == 8:
            return self.text()
        if kind != 9:
            return self.scalar(SCALARS[kind])
        of, n = self.scalar("I"), self.scalar("Q")
        return [self.value(of) for _ in range(n)]

    def tensor(self, name):
        shape, kind, offset = self.places[name]
        n = math.prod(shape)
        raw = self.data[self.begin + offset:]
        if kind == 0:
            values = raw[:4 * n].view("<f4")
        elif kind == 1:
            values = raw[:2 * n].view("<f2")
        elif kind == 30:  # bf16
            values = (raw[:2 * n].view("<u2").astype(np.uint32) << 16).view(np.float32)
        elif kind == 8:
            blocks = raw[:n // 32 * 34].view(Q8_BLOCK)
            values = blocks["values"].astype(np.float32) * blocks["scale"].astype(np.float32)[:, None]
        else:
            sys.exit(f"{name} has GGUF type {kind}, expected F32, F16, BF16 or Q8_0")
        return torch.from_numpy(np.array(values, np.float32).reshape(shape))


# --- Text to tokens: byte-level BPE, as the file says it.

PIECES = re.compile(r"'(?:[sdmt]|ll|ve|re)|[^\r\n\w]?[^\W\d_]+|\d| ?(?:[^\s\w]|_)+[\r\n]*|\s*[\r\n]+"
                    r"|\s+(?!\S)|\s+", re.IGNORECASE)


class Tokenizer:
    def __init__(self, fields):
        if fields.get("tokenizer.ggml.model") != "gpt2":
            sys.exit(f"the tokenizer is {fields.get('tokenizer.ggml.model')}, expected gpt2 "
                     "(byte-level BPE)")
        self.ids = {token: i for i, token in enumerate(fields["tokenizer.ggml.tokens"])}
        merges = fields["tokenizer.ggml.merges"]
        self.ranks = {tuple(merge.split(" ")): i for i, merge in enumerate(merges)}
        visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
        self.letters = {b: chr(b) for b in visible}
        for b in range(256):
            if b not in self.letters:
                self.letters[b] = chr(256 + len(self.letters) - len(visible))
        self.known = {}

    def encode(self, text):
        out = []
        for piece in PIECES.findall(text):
            if piece not in self.known:
                self.known[piece] = self.merge([self.letters[b] for b in piece.encode()])
            out += self.known[piece]
        return out

    def merge(self, parts):
        while len(parts) > 1:
            rank, i = min((self.ranks.get(pair, math.inf), i)
                          for i, pair in enumerate(zip(parts, parts[1:])))
            if rank == math.inf:
                break
            parts[i:i + 2] = [parts[i] + parts[i + 1]]
        return [self.ids[part] for part in parts]

    def special(self, *names):
        """Their ids, or nothing where one is missing."""
        return [self.ids[n] for n in names] if all(n in self.ids for n in names) else None


# --- What is read: a long text with facts, then questions with answers.

CITIES = ("London Paris Rome Berlin Madrid Vienna Prague Lisbon Athens Dublin Oslo Moscow Cairo Delhi "
          "Tokyo Seoul Sydney Toronto Chicago Boston Denver Miami Dallas Seattle Lima Havana Geneva "
          "Milan Venice Naples Munich Zurich Oxford Glasgow Quebec Tunis").split()
WHO = ("the old captain|a young doctor|the miller|her sister|the gardener|my uncle|the teacher|a "
       "stranger|the widow|the two brothers|the boy|an old friend|the clerk|the innkeeper").split("|")
DID = ("walked slowly along|looked out over|came back from|had never liked|spoke quietly of|thought "
       "again about|went down to|remembered|stood for a while before|turned away from|dreamed "
       "of|wrote a long letter about|waited all day at").split("|")
WHAT = ("the river|the empty house|the road to the hills|the garden wall|the harbor|the church|the "
        "long winter|the market|the small bridge|the garden|the forest|the sea|the railway station|the "
        "broken mill|the fields behind the village").split("|")
WHEN = ("that evening|before the rain|in the morning|after supper|without a word|as he always did|when "
        "the bells rang|though it was late|for the last time|in the cold wind|while the others "
        "slept").split("|")
PREFACE = ("Some special magic numbers are hidden within the following text. Make sure to memorize "
           "them.\n\n")


def sentences(rng, text):
    """Endless: of the text, from anywhere in it on, or made up."""
    if text:
        at = rng.randrange(len(text))
        while True:
            yield text[at % len(text)] + " "
            at += 1
    while True:
        words = (rng.choice(WHO), rng.choice(DID), rng.choice(WHAT), rng.choice(WHEN))
        sentence = " ".join(words)
        yield sentence[0].upper() + sentence[1:] + "." + ("\n\n" if rng.random() < 0.15 else " ")


def number(rng):
    if rng.random() < 0.5:
        return str(rng.randrange(100000, 1000000))
    digits = f"{rng.getrandbits(128):032x}"
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


class Texts:
    """(tokens, the places in them whose next token belongs to an answer), one after another."""

    def __init__(self, tokenizer, fields, seed, text):
        self.tokenizer, self.rng, self.text = tokenizer, random.Random(seed), text
        t = tokenizer
        first = fields.get("tokenizer.ggml.bos_token_id")
        self.begin = [] if first is None else [first]
        own, llama3 = t.special("<|user|>", "<|assistant|>", "<|end|>"), None
        if own:
            self.user, self.assistant, self.end = [own[0]], [own[1]], [own[2]]
            return
        llama3 = t.special("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
        if llama3:
            head, tail, end = llama3
            self.user, self.assistant = ([head, *t.encode(who), tail, *t.encode("\n\n")]
                                         for who in ("user", "assistant"))
            self.end = [end]
        else:
            self.user, self.assistant = t.encode("\n\n"), t.encode("\n\n")
            self.end = []

    def next(self, n_tokens, n_facts):
        rng, encode = self.rng, self.tokenizer.encode
        facts = [(city, number(rng)) for city in rng.sample(CITIES, n_facts)]
        questions, answers = [], []  # [tokens], [(first, last) of the answer's own, from its start]
        for city, value in facts:
            questions.append(encode(f"What is the special magic number for {city} mentioned in the "
                                    "text?"))
            answers.append(encode(f"The special magic number for {city} is {value}."))
        around = len(self.user) + len(self.assistant) + 2 * len(self.end)
        asked = list(zip(questions, answers))
        rng.shuffle(asked)
        hidden = [encode(f" One of the special magic numbers for {c} is: {v}. ") for c, v in facts]
        room = n_tokens - sum(len(q) + len(a) + around for q, a in asked)
        room -= sum(len(h) for h in hidden) + len(self.begin) + len(encode(PREFACE))
        if room < 64:
            sys.exit(f"a text of {n_tokens} tokens has no room for {n_facts} facts with questions")
        prose, total = [], 0
        for sentence in sentences(rng, self.text):
            prose.append(encode(sentence))
            total += len(prose[-1])
            if total >= room:
                break
        for fact in hidden:
            prose.insert(rng.randrange(len(prose)), fact)
        tokens = self.begin + self.user + encode(PREFACE) + [t for s in prose for t in s]
        tokens, places = tokens[:n_tokens - sum(len(q) + len(a) + around for q, a in asked)], []
        for i, (question, answer) in enumerate(asked):
            tokens += (self.user if i > 0 else []) + question + self.end + self.assistant
            places += range(len(tokens) - 1, len(tokens) - 1 + len(answer))
            tokens += answer + self.end
        return tokens, places


# --- The model.

class Llama:
    def __init__(self, gguf, device, dtype):
        f = gguf.fields
        if f["general.architecture"] != "llama":
            sys.exit(f"the architecture is {f['general.architecture']}, expected llama")
        for name in ("rope_freqs.weight", "blk.0.ffn_gate_exps.weight", "blk.0.attn_q.bias"):
            if name in gguf.places:
                sys.exit(f"the model has {name}, which this script does not know")
        if f.get("llama.rope.scaling.type", "none") != "none":
            sys.exit("the model scales its rotations, which this script does not do")
        self.layers, self.heads = f["llama.block_count"], f["llama.attention.head_count"]
        self.kv_heads = f["llama.attention.head_count_kv"]
        self.head_dim = f.get("llama.attention.key_length",
                              f["llama.embedding_length"] // self.heads)
        self.eps = f["llama.attention.layer_norm_rms_epsilon"]
        rotated = f.get("llama.rope.dimension_count", self.head_dim)
        assert rotated == self.head_dim, "some values of a head are not rotated"
        base = f.get("llama.rope.freq_base", 10000.0)
        steps = torch.arange(0, self.head_dim, 2, dtype=torch.float64) / self.head_dim
        self.inv_freq = (base ** -steps).float().to(device)
        self.dtype = dtype

        def take(name):
            return gguf.tensor(name).to(device, dtype)

        self.embedding, self.norm = take("token_embd.weight"), take("output_norm.weight")
        self.output = take("output.weight") if "output.weight" in gguf.places else self.embedding
        self.blocks = [{name: take(f"blk.{i}.{name}.weight") for name in (
            "attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate",
            "ffn_up", "ffn_down")} for i in range(self.layers)]

    def rms(self, x, weight):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return y.to(self.dtype) * weight

    def turn(self, x, cos, sin):
        """x [heads, n, head_dim]; GGUF pairs neighbours in this architecture."""
        even, odd = x[..., 0::2].float(), x[..., 1::2].float()
        out = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1)
        return out.flatten(-2).to(self.dtype)

    def hidden(self, tokens, gates=None, near=None):
        """The last hidden state [n, d], normed. `gates` [layers, kv_heads], `near` a Near."""
        n = len(tokens)
        angle = torch.outer(torch.arange(n, device=self.inv_freq.device).float(), self.inv_freq)
        cos, sin = angle.cos(), angle.sin()
        x = self.embedding[tokens]
        for i, block in enumerate(self.blocks):
            if gates is None:
                x = self.layer(x, block, cos, sin, None, near)
            else:  # nothing is kept of a layer but what enters it
                x = checkpoint(self.layer, x, block, cos, sin, gates[i], near, use_reentrant=False)
        return self.rms(x, self.norm).float()

    def layer(self, x, w, cos, sin, gates, near):
        n = len(x)
        h = self.rms(x, w["attn_norm"])
        q, k, v = ((h @ w[f"attn_{p}"].T).view(n, -1, self.head_dim).transpose(0, 1) for p in "qkv")
        q, k = self.turn(q, cos, sin), self.turn(k, cos, sin)
        group = self.heads // self.kv_heads
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        o = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
        if gates is not None:
            a = gates.repeat_interleave(group)[:, None, None]  # f32: steps of gates are small
            o = (a * o.float() + (1 - a) * near.attend(q, k, v).float()).to(self.dtype)
        x = x + o.transpose(0, 1).reshape(n, -1) @ w["attn_output"].T
        h = self.rms(x, w["ffn_norm"])
        return x + (F.silu(h @ w["ffn_gate"].T) * (h @ w["ffn_up"].T)) @ w["ffn_down"].T


class Near:
    """Attention of a row at p to the tokens t < sinks and p - recent < t <= p, in blocks of `recent`
    rows: a block reads its own tokens, those of the block before, and the sinks."""

    def __init__(self, sinks, recent):
        self.sinks, self.recent = sinks, recent

    def attend(self, q, k, v):
        heads, n, d = q.shape
        size, sinks = self.recent, min(self.sinks, n)
        blocks = -(-n // size)
        pad = blocks * size - n
        q, kp, vp = (F.pad(x, (0, 0, 0, pad)) for x in (q, k, v))

        def local(x):  # [heads, blocks, 2 * size, d]
            x = F.pad(x, (0, 0, size, 0)).view(heads, blocks + 1, size, d)
            return torch.cat((x[:, :-1], x[:, 1:]), 2)

        def with_sinks(x, of_all):
            return torch.cat((of_all[:, None, :sinks].expand(-1, blocks, -1, -1), local(x)), 2)

        rows = torch.arange(blocks * size, device=q.device).view(blocks, size, 1)
        first = torch.arange(blocks, device=q.device)[:, None] * size - size
        near = (first + torch.arange(2 * size, device=q.device))[:, None]
        far = torch.arange(sinks, device=q.device)[None, None]
        mask = torch.cat(((far <= rows).expand(blocks, size, sinks),
                          (near >= sinks) & (near <= rows) & (near > rows - size)), 2)
        mask |= rows >= n  # padding reads anything
        o = F.scaled_dot_product_attention(q.view(heads, blocks, size, d).transpose(0, 1),
                                           with_sinks(kp, k).transpose(0, 1),
                                           with_sinks(vp, v).transpose(0, 1),
                                           attn_mask=mask[:, None])
        return o.transpose(0, 1).reshape(heads, blocks * size, d)[:, :n]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"),
                        help="of the model; bfloat16 on a card, else float32")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--minutes", type=float, help="no step begins after them")
    parser.add_argument("--min-tokens", type=int, default=1024, help="of a text")
    parser.add_argument("--max-tokens", type=int, default=8192)
    parser.add_argument("--facts", type=int, default=10, help="in a text; as many as have room")
    parser.add_argument("--sinks", type=int, default=128)
    parser.add_argument("--recent", type=int, default=256)
    parser.add_argument("--rate", type=float, default=0.02)
    parser.add_argument("--penalty", type=float, default=0.05, help="of the mean gate")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--text", type=Path, action="append", default=[])
    args = parser.parse_args()
    for name, least in (("steps", 1), ("facts", 1), ("recent", 1), ("sinks", 0)):
        if getattr(args, name) < least:
            parser.error(f"--{name} is {getattr(args, name)}, expected at least {least}")
    if not 512 <= args.min_tokens <= args.max_tokens:
        parser.error(f"--min-tokens is {args.min_tokens}, expected from 512 to --max-tokens, "
                     f"{args.max_tokens}")

    dtype = getattr(torch, args.dtype or ("float32" if args.device == "cpu" else "bfloat16"))
    gguf = Gguf(args.model)
    model = Llama(gguf, args.device, dtype)
    text = [s for path in args.text
            for s in re.split(r"(?<=[.!?])\s+", path.read_text(encoding="utf-8")) if s]
    texts = Texts(Tokenizer(gguf.fields), gguf.fields, args.seed, text)
    lengths = random.Random(args.seed + 1)
    near = Near(args.sinks, args.recent)
    gates = torch.ones(model.layers, model.kv_heads, device=args.device, requires_grad=True)
    optimizer = torch.optim.AdamW([gates], lr=args.rate, weight_decay=0)
    part = max(1, args.steps // 5)  # the rate rises over the first fifth, and falls over the last
    begin = time.monotonic()
    for step in range(args.steps):
        if args.minutes and time.monotonic() - begin > 60 * args.minutes:
            print(f"stopped before step {step} of {args.steps}: {args.minutes} minutes are over")
            break
        n = lengths.randint(args.min_tokens, args.max_tokens)
        tokens, places = texts.next(n, min(args.facts, max(1, n // 200)))
        tokens = torch.tensor(tokens, device=args.device)
        for group in optimizer.param_groups:
            group["lr"] = args.rate * min(1, max((step + 1) / part, 0.1),
                                          max((args.steps - step) / part, 0.1))
        with torch.no_grad():
            wanted = model.hidden(tokens)[places]
        got = model.hidden(tokens, gates, near)[places]
        distance = (got - wanted).pow(2).mean()
        loss = distance + args.penalty * gates.abs().mean()
        if not torch.isfinite(loss):
            sys.exit(f"the loss of step {step} is not finite")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            gates.clamp_(0, 1)
            if step % max(1, args.steps // 50) == 0 or step + 1 == args.steps:
                known = (wanted.to(dtype) @ model.output.T).argmax(-1)
                right = (known == tokens[[p + 1 for p in places]]).float().mean()
                print(f"step {step:5d}  {n:6d} tokens  distance {distance:.3e}  mean gate "
                      f"{gates.mean():.3f}  gates below 0.5: {(gates < 0.5).float().mean():.2f}  "
                      f"the model's own answers right: {right:.2f}  "
                      f"{time.monotonic() - begin:.0f} s", flush=True)
    np.savetxt(args.out, gates.detach().cpu().numpy(), fmt="%.6f", delimiter="\t")
    print(f"{args.out}: gates of {model.layers} layers of {model.kv_heads} KV heads")


if __name__ == "__main__":
    main()
