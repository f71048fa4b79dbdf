#!/usr/bin/env python3
"""What the cache policies mean, written down slowly in NumPy, and the fixtures made from it.

    policy_oracle.py OUT [--models DIR] [--seeds N]

A llama or qwen3 decoder in float64 that computes one row at a time from unrotated keys and
queries, so that every policy is a plain rule over logical tokens. It shares nothing with the
engine. Before it writes anything it must reproduce the transformers logits of llama_f32 and
qwen3_f32 in DIR (made by make_model_goldens.py; default OUT/models).

    OUT/policy_model/          an 8-layer random llama in float32 where every layer matters
    OUT/policies.json          prompt, teacher-forced tokens and, for each case, how much of the
                               prompt it has, its settings, by how much the logits move in float32
                               and against `full`; the filter by whose choice each layer reads
                               (none: everything); of each filter the tokens read by its choice at
                               each step (bit t of a hexadecimal number: token t) and the gap
                               between the last score chosen and the first rejected, relative to
                               the former (0: nothing was left out)
    OUT/policies.safetensors   per case f32 [n_decode, 33]: row i is what the model answers to
                               decode token i, which stands at position n_prompt + i: the logits of
                               the tokens 0, 4, 8, ... and the largest absolute value of all. They
                               tell the other logits too: all come from a state of 32 values.

Positions are rotated by angles that are products in float32, as published implementations make
them; everything else is float64.

Rules, for the row at position p with n = p + 1 tokens in context, n_gen of them after the prompt:

streaming   Every row, prompt rows too, reads t < sinks and t > p - (budget - sinks).
            positions=original rotates by t. positions=cache rotates by the place in what is kept:
            once n > budget, window token t stands at sinks + t - (n - (budget - sinks)) and the
            query at budget - 1. Only distances matter: so the query meets the sinks from there and
            the window from p. (Angles in float32 make that distinction; main() checks that it is
            no other.)
omnikv      Prompt rows read everything. Decode rows: dense layers are those below the first
            filter, the filters, and with dense_after_filter=1 the layer after each; any other
            reads what the nearest filter below it chose in the same step. With
            select_every_layer=1 each layer from the first filter on chooses from its own scores
            and reads only that.
  scores    A query at position i gives token t <= i the maximum over query heads of its softmax
            over all t' <= i (score=softmax) or of its scaled logits (score=raw); 0 for t > i.
            They are summed over the last `window` queries, prompt queries among them, with
            weight 1 (uniform) or 2^-age (exp); selector=last is a window of 1.
  choice    The last g = min(tail, n_gen) tokens are read besides the budget; tail=all: g = n_gen.
            Of the budget the last queries' own tokens come first, unless selector=last: those of
            the last `window` tokens that are not among the g. The rest of it goes to the best of
            the other tokens, prompt or generated, the lower t where equal.
  budget    A number of tokens, or what mem=M makes of it: M is the share of all K/V that is read
            if the dense layers read n tokens and the others budget of them, so budget =
            (M layers - dense) / (layers - dense) * n, rounded up.
"""

import argparse
import copy
import itertools
import json
import math
from fractions import Fraction
from pathlib import Path

import numpy as np

VOCAB, HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 128, 32, 48, 4, 2, 16, 8
N_PROMPT, N_DECODE = 120, 40
MIN_GAP = 1e-6  # relative; float32 must not decide what is chosen


# --- safetensors ---------------------------------------------------------------------------------


def read_safetensors(path):
    """name -> float32 array; this script needs no other type."""
    raw = Path(path).read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    tensors = {}
    for name, entry in json.loads(raw[8:start]).items():
        if name == "__metadata__":
            continue
        assert entry["dtype"] == "F32", f"{path}: {name} is {entry['dtype']}, expected F32"
        begin, end = entry["data_offsets"]
        tensors[name] = np.frombuffer(raw[start + begin:start + end], "<f4").reshape(entry["shape"])
    return tensors


def write_safetensors(path, tensors):
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, array in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(array.shape),
                        "data_offsets": [offset, offset + 4 * array.size]}
        offset += 4 * array.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text +
                     b"".join(a.astype("<f4").tobytes() for a in tensors.values()))


# --- the model -----------------------------------------------------------------------------------


def softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


class Model:
    def __init__(self, config, tensors, dtype=np.float64):
        self.dtype = dtype
        self.w = {name: array.astype(dtype) for name, array in tensors.items()}
        self.n_layers = config["num_hidden_layers"]
        self.heads = config["num_attention_heads"]
        self.kv_heads = config["num_key_value_heads"]
        self.head_dim = config["head_dim"]
        self.eps = dtype(config["rms_norm_eps"])
        rope = config.get("rope_parameters") or config
        assert rope.get("rope_type", "default") == "default" and not config.get("rope_scaling")
        self.inv_freq = (rope["rope_theta"] **
                         -(np.arange(0, self.head_dim, 2) / self.head_dim)).astype(np.float32)
        self.embedding = self.w["model.embed_tokens.weight"]
        self.head = self.w.get("lm_head.weight", self.embedding)

    def weight(self, layer, name):
        return self.w.get(f"model.layers.{layer}.{name}.weight")

    def norm(self, x, weight):
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + self.eps) * weight

    def rotate(self, x, positions):
        """x [heads, n, head_dim] by positions [n]; dimension i is paired with i + head_dim / 2."""
        angle = np.outer(np.asarray(positions, np.float32), self.inv_freq).astype(np.float64)
        cos, sin = np.cos(angle).astype(self.dtype), np.sin(angle).astype(self.dtype)
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def project(self, layer, x):
        """One row's unrotated q [heads, head_dim], k and v [kv_heads, head_dim]."""
        q, k, v = ((self.weight(layer, f"self_attn.{p}_proj") @ x).reshape(-1, self.head_dim)
                   for p in "qkv")
        if self.weight(layer, "self_attn.q_norm") is not None:  # qwen3
            q = self.norm(q, self.weight(layer, "self_attn.q_norm"))
            k = self.norm(k, self.weight(layer, "self_attn.k_norm"))
        return q, k, v

    def ffn(self, layer, x):
        gate = self.weight(layer, "mlp.gate_proj") @ x
        up = self.weight(layer, "mlp.up_proj") @ x
        return self.weight(layer, "mlp.down_proj") @ (gate / (1 + np.exp(-gate)) * up)


class Context:
    """A sequence: of every layer the unrotated q [heads, n, head_dim] and k, v [kv_heads, n,
    head_dim] of all its tokens. Policies leave things out; nothing here ever does."""

    def __init__(self, model, capacity):
        m = self.model = model
        self.n = self.n_prompt = 0
        self.q = np.zeros((m.n_layers, m.heads, capacity, m.head_dim), m.dtype)
        self.k = np.zeros((m.n_layers, m.kv_heads, capacity, m.head_dim), m.dtype)
        self.v = np.zeros_like(self.k)

    def logits_of(self, layer, query, tokens, query_position, key_positions):
        """Scaled attention logits [heads, len(tokens)] of the query computed at `query`, which
        stands at one position or at one for each token."""
        m = self.model
        positions = np.broadcast_to(query_position, len(tokens))
        q = m.rotate(np.repeat(self.q[layer][:, query:query + 1], len(tokens), axis=1), positions)
        k = m.rotate(self.k[layer][:, tokens], key_positions)
        k = np.repeat(k, m.heads // m.kv_heads, axis=0)
        return (k * q).sum(axis=-1) / m.dtype(np.sqrt(m.head_dim))

    def append(self, token, policy, is_prompt=False):
        """Computes the next row under a policy; the logits [vocab] it predicts."""
        m, p = self.model, self.n
        self.n += 1
        self.n_prompt += is_prompt
        x = m.embedding[token]
        for layer in range(m.n_layers):
            h = m.norm(x, m.weight(layer, "input_layernorm"))
            self.q[layer][:, p], self.k[layer][:, p], self.v[layer][:, p] = m.project(layer, h)
            tokens, key_positions, query_position = policy.reads(self, layer, p)
            a = softmax(self.logits_of(layer, p, tokens, query_position, key_positions))
            v = np.repeat(self.v[layer][:, tokens], m.heads // m.kv_heads, axis=0)
            o = (a[:, None] @ v).reshape(-1)
            x = x + m.weight(layer, "self_attn.o_proj") @ o
            x = x + m.ffn(layer, m.norm(x, m.weight(layer, "post_attention_layernorm")))
        return m.head @ m.norm(x, m.w["model.norm.weight"])


# --- the policies --------------------------------------------------------------------------------
# reads(context, layer, p) -> tokens read, positions their keys are rotated by, the query's position
# (or one for each token)


class Full:
    def reads(self, context, layer, p):
        everything = np.arange(p + 1)
        return everything, everything, p


class Streaming:
    def __init__(self, sinks, budget, positions):
        self.sinks, self.budget, self.positions = sinks, budget, positions

    def reads(self, context, layer, p):
        t = np.arange(p + 1)
        kept = t[(t < self.sinks) | (t > p - (self.budget - self.sinks))]
        if self.positions == "original":
            return kept, kept, p
        place = min(p, self.budget - 1)
        if self.positions == "places":
            return kept, np.arange(len(kept)), place
        return kept, kept, np.where(kept < self.sinks, place, p)


class OmniKv:
    def __init__(self, filters, budget=0, mem=0.0, tail=256, dense_after_filter=0, selector="last",
                 window=1, score="softmax", select_every_layer=0):
        self.filters, self.budget, self.mem, self.tail = filters, budget, float(mem), tail
        self.dense_after_filter, self.selector = dense_after_filter, selector
        self.window, self.score = window, score
        self.select_every_layer = select_every_layer
        self.chosen = {}  # filter layer -> for every decode step the tokens that are read
        self.gaps = {}  # filter layer -> for every decode step the gap of its choice

    def is_dense(self, layer):
        if layer < self.filters[0]:
            return True
        near = layer in self.filters or (self.dense_after_filter and layer - 1 in self.filters)
        return bool(near and not self.select_every_layer)

    def selects(self, layer):
        return layer in self.filters or (self.select_every_layer and layer >= self.filters[0])

    def reads(self, context, layer, p):
        everything = np.arange(p + 1)
        if p < context.n_prompt:
            return everything, everything, p
        if self.selects(layer):
            self.choose(context, layer, p)
        if not self.filter_of(layer):
            return everything, everything, p
        chosen = self.chosen[int(self.filter_of(layer))][-1]
        return chosen, chosen, p

    def filter_of(self, layer):
        """The filter by whose choice a layer reads, as text; empty: it reads everything."""
        if self.is_dense(layer):
            return ""
        return str(layer if self.select_every_layer else
                   max(f for f in self.filters if f <= layer))

    def scores(self, context, layer, p):
        """[p + 1]"""
        total = np.zeros(p + 1, context.model.dtype)
        for i in range(max(0, p - self.window + 1), p + 1):
            seen = np.arange(i + 1)
            logits = context.logits_of(layer, i, seen, i, seen)
            s = softmax(logits) if self.score == "softmax" else logits
            weight = 2.0 ** (i - p) if self.selector == "exp" else 1.0
            total[:i + 1] += weight * s.max(axis=0)
        return total

    def budget_at(self, context, n):
        if not self.mem:
            return self.budget
        layers = context.model.n_layers
        dense = sum(self.is_dense(layer) for layer in range(layers))
        tokens = (Fraction(str(self.mem)) * layers - dense) / (layers - dense) * n
        return max(1, math.ceil(tokens))

    def choose(self, context, layer, p):
        n = p + 1
        n_gen = n - context.n_prompt
        besides = n_gen if self.tail == "all" else min(self.tail, n_gen)
        left = self.budget_at(context, n)
        recent = besides
        while self.selector != "last" and recent < min(self.window, n) and left:
            recent, left = recent + 1, left - 1
        scores = self.scores(context, layer, p)[:n - recent]
        order = np.argsort(-scores, kind="stable")  # equal scores: lower tokens first
        gap = 0.0
        if 0 < left < len(order):
            last, rejected = scores[order[left - 1]], scores[order[left]]
            gap = float((last - rejected) / abs(last))
        self.gaps.setdefault(layer, []).append(gap)
        self.chosen.setdefault(layer, []).append(
            np.sort(np.concatenate([order[:left], np.arange(n - recent, n)])))

    def min_gap(self):
        return min((g for gaps in self.gaps.values() for g in gaps if g > 0), default=np.inf)


class OneLayerNear(Full):
    """Full attention but for one layer, which reads the newest tokens only: does it matter?"""

    def __init__(self, layer, budget):
        self.layer, self.budget = layer, budget

    def reads(self, context, layer, p):
        tokens = np.arange(max(0, p + 1 - self.budget) if layer == self.layer else 0, p + 1)
        return tokens, tokens, p


class Spread(Full):
    """Full attention that notes over how many tokens, in effect, each layer spreads it."""

    def __init__(self, model):
        self.tokens = [[] for _ in range(model.n_layers)]

    def reads(self, context, layer, p):
        everything = np.arange(p + 1)
        a = softmax(context.logits_of(layer, p, everything, p, everything))
        entropy = -(a * np.log(a + 1e-300)).sum(axis=1)
        self.tokens[layer].append(np.exp(entropy).mean())
        return everything, everything, p


# --- cases ---------------------------------------------------------------------------------------


def cases():
    """name -> (policy, settings as the engine's --set takes them[, tokens of the prompt])"""
    small = {"budget": 24, "tail": 8}
    out = {"full": ("full", {})}
    for positions in ("original", "cache"):
        out[f"streaming_{positions}"] = (
            "streaming", {"sinks": 4, "budget": 32, "positions": positions})
    selectors = ({"selector": "last"}, {"selector": "uniform", "window": 4},
                 {"selector": "exp", "window": 4})
    for selector, score, dense in itertools.product(selectors, ("softmax", "raw"), (0, 1)):
        out[f"omnikv_{selector['selector']}_{score}_dense{dense}"] = (
            "omnikv", {"filters": "1,4", **small, **selector, "score": score,
                       "dense_after_filter": dense})
    plain = {"filters": "1,4", "selector": "last", "score": "softmax", "dense_after_filter": 0}
    for name, settings in {
        "every_layer": {**plain, **small, "select_every_layer": 1},
        "long_tail": {**plain, "budget": 24, "tail": 64},  # the whole answer
        "tail_all": {**plain, "budget": 8, "tail": "all"},
        "tail_1": {**plain, "budget": 24, "tail": 1},  # most of the answer must be chosen
        "mem": {**plain, "mem": 0.45, "tail": 4},
        "wide_window": {**plain, "budget": 24, "tail": 2, "selector": "uniform", "window": 12},
        "crosses_budget": {**plain, "budget": 140, "tail": 8},  # everything until n = 148
        "covering": {**plain, "budget": 512, "tail": 8},
    }.items():
        out[f"omnikv_{name}"] = ("omnikv", settings)
    for budget, n_prompt in itertools.product((12, 48), (40, 80)):
        out[f"omnikv_{budget}_of_{n_prompt}"] = (
            "omnikv", {**plain, "budget": budget, "tail": 8}, n_prompt)
    return out


def make_policy(policy, settings):
    kinds = {"full": Full, "streaming": Streaming, "omnikv": OmniKv}
    settings = dict(settings)
    if "filters" in settings:
        settings["filters"] = [int(f) for f in settings["filters"].split(",")]
    return kinds[policy](**settings)


class Bench:
    """One model and one text; full prefill is shared by the policies that have it."""

    def __init__(self, model, prompt, decode):
        self.model, self.prompt, self.decode = model, prompt, decode
        self.full_prefill = {}

    def prefill(self, policy, n_prompt):
        context = Context(self.model, n_prompt + len(self.decode))
        for token in self.prompt[:n_prompt]:
            context.append(token, policy, is_prompt=True)
        return context

    def run(self, policy, n_prompt=N_PROMPT):
        """Logits [n_decode, vocab] of the teacher-forced tokens."""
        if isinstance(policy, Streaming):
            context = self.prefill(policy, n_prompt)
        else:
            if n_prompt not in self.full_prefill:
                self.full_prefill[n_prompt] = self.prefill(Full(), n_prompt)
            context = copy.deepcopy(self.full_prefill[n_prompt])
        return np.array([context.append(token, policy) for token in self.decode])


# --- fixtures ------------------------------------------------------------------------------------


def policy_config():
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB,
        "hidden_size": HIDDEN, "intermediate_size": FFN, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
        "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "rope_scaling": None, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
        "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
        "torch_dtype": "float32",
    }


def draw(seed):
    """Weights wide enough that no layer can be left out, narrow enough that attention spreads over
    more tokens than it may keep."""
    rng = np.random.default_rng(seed)

    def normal(*shape, gain=1.0, mean=0.0):
        deviation = gain / np.sqrt(shape[-1]) if len(shape) == 2 else gain
        return (mean + deviation * rng.standard_normal(shape)).astype(np.float32)

    tensors = {"model.embed_tokens.weight": normal(VOCAB, HIDDEN, gain=np.sqrt(HIDDEN))}
    for layer in range(LAYERS):
        for name, shape, gain in (
            ("self_attn.q_proj", (HEADS * HEAD_DIM, HIDDEN), 1.5),
            ("self_attn.k_proj", (KV_HEADS * HEAD_DIM, HIDDEN), 1.5),
            ("self_attn.v_proj", (KV_HEADS * HEAD_DIM, HIDDEN), 1.5),
            ("self_attn.o_proj", (HIDDEN, HEADS * HEAD_DIM), 2.0),
            ("mlp.gate_proj", (FFN, HIDDEN), 1.2),
            ("mlp.up_proj", (FFN, HIDDEN), 1.2),
            ("mlp.down_proj", (HIDDEN, FFN), 1.2),
        ):
            tensors[f"model.layers.{layer}.{name}.weight"] = normal(*shape, gain=gain)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = normal(HIDDEN, gain=0.2, mean=1.0)
    tensors["model.norm.weight"] = normal(HIDDEN, gain=0.2, mean=1.0)
    tensors["lm_head.weight"] = normal(VOCAB, HIDDEN, gain=2.5)
    return tensors


def draw_text():
    rng = np.random.default_rng(1)
    return [1, *rng.integers(3, VOCAB, N_PROMPT - 1).tolist()], rng.integers(
        3, VOCAB, N_DECODE).tolist()


def relative(a, b):
    """The largest difference of a row over the row's largest value."""
    return float((np.abs(a - b).max(axis=1) / np.abs(b).max(axis=1)).max())


def find_seed(seeds, prompt, decode):
    """The seed whose logits float32 moves least, of those whose choices are clear in all cases."""
    best, best_error = None, np.inf
    for seed in range(seeds):
        tensors = draw(seed)
        bench = Bench(Model(policy_config(), tensors), prompt, decode)
        bench32 = Bench(Model(policy_config(), tensors, np.float32), prompt, decode)
        error, gap = 0.0, np.inf
        for policy, settings, *n_prompt in cases().values():
            if error < best_error and gap > MIN_GAP:
                rule = make_policy(policy, settings)
                logits = bench.run(rule, *n_prompt)
                error = max(error, relative(
                    bench32.run(make_policy(policy, settings), *n_prompt), logits))
                gap = min(gap, rule.min_gap() if policy == "omnikv" else gap)
        if error < best_error and gap > MIN_GAP:
            best, best_error = seed, error
            print(f"seed {seed}: float32 moves logits by {error:.1e}, smallest gap {gap:.1e}",
                  flush=True)
    assert best is not None, f"no seed below {seeds} has a smallest gap over {MIN_GAP}"
    return best


def check_against_goldens(models):
    for name in ("llama_f32", "qwen3_f32"):
        folder = models / name
        golden = json.loads((folder / "golden.json").read_text())
        wanted = read_safetensors(folder / "golden.safetensors")["logits"]
        model = Model(json.loads((folder / "config.json").read_text()),
                      read_safetensors(folder / "model.safetensors"))
        context = Context(model, len(golden["prompt"]))
        got = np.array([context.append(token, Full(), True) for token in golden["prompt"]])
        error = (np.abs(got - wanted).max(axis=1) / np.abs(wanted).max(axis=1)).max()
        print(f"{name}: differs from transformers by {error:.1e} of the largest logit")
        assert error < 1e-5


def check_model(bench, full):
    """Every layer matters, and attention is neither uniform nor one-hot."""
    largest = np.abs(full).max()
    spread = Spread(bench.model)
    bench.run(spread)
    for layer in range(bench.model.n_layers):
        moved = np.abs(bench.run(OneLayerNear(layer, 24)) - full).max() / largest
        tokens = np.mean(spread.tokens[layer])
        print(f"layer {layer}: attention over {tokens:.0f} tokens in effect, "
              f"without the far ones the logits move by {moved:.2f} of the largest")
        assert moved > 0.05 and 4 < tokens < N_PROMPT / 2


def bits(tokens):
    """A hexadecimal number whose bit t is set where t is among `tokens`."""
    return f"{sum(1 << int(t) for t in tokens):x}"


def make_case(name, policy, settings, n_prompt, bench, bench32):
    rule, rule32 = make_policy(policy, settings), make_policy(policy, settings)
    logits, logits32 = bench.run(rule, n_prompt), bench32.run(rule32, n_prompt)
    full = bench.run(Full(), n_prompt)
    largest = np.abs(full).max()
    case = {"name": name, "policy": policy, "prompt_tokens": n_prompt,
            "settings": {k: str(v) for k, v in settings.items()},
            "moved_against_full": round(float(np.abs(logits - full).max() / largest), 3),
            "moved_in_float32": float(f"{np.abs(logits32 - logits).max() / largest:.1e}")}
    if policy == "omnikv":
        case["reads"] = [rule.filter_of(layer) for layer in range(bench.model.n_layers)]
        case["chosen"] = {layer: [bits(tokens) for tokens in steps]
                          for layer, steps in rule.chosen.items()}
        case["gaps"] = {layer: [float(f"{gap:.1e}") for gap in gaps]
                        for layer, gaps in rule.gaps.items()}
        for layer, steps in rule.chosen.items():
            for a, b in zip(steps, rule32.chosen[layer]):
                assert np.array_equal(a, b), f"{name}: float32 chooses other tokens"
    return case, logits, rule


def stored(logits):
    """[n_decode, 33] of [n_decode, vocab]: as many logits as the state has values, the largest."""
    return np.column_stack([logits[:, ::VOCAB // HIDDEN], np.abs(logits).max(axis=1)])


def check_cases(cases, logits):
    """Cases that a wrong implementation could mix up must differ."""
    full, largest = logits["full"], np.abs(logits["full"]).max()
    assert np.array_equal(logits.pop("omnikv_covering"), full)
    until = 148 - N_PROMPT  # steps while budget and tail cover the context
    assert np.array_equal(logits["omnikv_crosses_budget"][:until], full[:until])
    same = {name: row for name, row in logits.items() if "_of_" not in name}  # of one prompt
    for (a, x), (b, y) in itertools.combinations(same.items(), 2):
        assert np.abs(x - y).max() > 0.02 * largest, f"{a} and {b} hardly differ"


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
    settings = cases()["streaming_cache"][1]
    assert relative(bench.run(Streaming(**{**settings, "positions": "places"})),
                    bench.run(Streaming(**settings))) < 1e-4
    made, logits = [], {}
    for name, (policy, settings, *n_prompt) in cases().items():
        case, logits[name], rule = make_case(name, policy, settings, *(n_prompt or [N_PROMPT]),
                                             bench, bench32)
        made.append(case)
        gap = f"{rule.min_gap():.0e}" if policy == "omnikv" else "-"
        print(f"{name:32s} against full {case['moved_against_full']:.3f}  "
              f"float32 {case['moved_in_float32']:.0e}  smallest gap {gap}")

    folder = args.out / "policy_model"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    write_safetensors(folder / "model.safetensors", tensors)
    write_safetensors(args.out / "policies.safetensors",
                      {name: stored(rows) for name, rows in logits.items()})
    head = {"model": folder.name, "seed": seed, "prompt": prompt, "decode": decode}
    lines = [f' "{key}": {json.dumps(value)}' for key, value in head.items()]
    body = ",\n".join("  " + json.dumps(case, separators=(",", ":")) for case in made)
    (args.out / "policies.json").write_text(
        "{\n" + ",\n".join(lines) + ',\n "cases": [\n' + body + "\n ]\n}\n")
    check_cases(made, logits)


if __name__ == "__main__":
    main()
