"""A llama or qwen3 decoder in NumPy, and what it reads and writes of files.

Keys and queries are kept unrotated, so that every policy is a plain rule over logical tokens.
Positions are rotated by angles that are products in float32, as published implementations make
them; everything else is in the type of the model, float64 unless said otherwise.
"""

import json
from pathlib import Path

import numpy as np


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
        # The inverse of a power in float32, as transformers has it: far into a text a bit counts.
        power = rope["rope_theta"] ** (np.arange(0, self.head_dim, 2) / self.head_dim)
        self.inv_freq = np.float32(1) / power.astype(np.float32)
        self.embedding = self.w["model.embed_tokens.weight"]
        self.head = self.w.get("lm_head.weight", self.embedding)

    def weight(self, layer, name):
        return self.w.get(f"model.layers.{layer}.{name}.weight")

    def group(self, head):
        """The query heads of a KV head."""
        n = self.heads // self.kv_heads
        return slice(head * n, (head + 1) * n)

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
        self.capacity = capacity
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
        return self.append_rows([token], policy, is_prompt)

    def append_rows(self, tokens, policy, is_prompt=False):
        """Computes the next rows, all of a layer before the next; the last one's logits."""
        m, first = self.model, self.n
        self.n += len(tokens)
        self.n_prompt += len(tokens) * is_prompt
        xs = [m.embedding[token] for token in tokens]
        for layer in range(m.n_layers):
            for p, x in enumerate(xs, first):
                h = m.norm(x, m.weight(layer, "input_layernorm"))
                self.q[layer][:, p], self.k[layer][:, p], self.v[layer][:, p] = m.project(layer, h)
            for p, x in enumerate(xs, first):
                o = policy.attend(self, layer, p)
                x = x + m.weight(layer, "self_attn.o_proj") @ o
                xs[p - first] = x + m.ffn(layer, m.norm(
                    x, m.weight(layer, "post_attention_layernorm")))
        return m.head @ m.norm(xs[-1], m.w["model.norm.weight"])
