"""What `omnikv analyze anchors` measures of a text (Kascade, arXiv 2512.16391, 3.3 and 3.4), run dense.

  P_j^u(tile, t)   sum, over the rows of the tile and the query heads of KV head u in layer j, of
                   softmax over all tokens up to the row. Tiles are the last `window` rows of the text,
                   `tile` rows each.
  n                tokens that a tile chooses among: with tile = 1 all up to the row, else those before
                   the tile, whose own tokens it reads besides: own_j^u = sum of P_j^u over them (0 with
                   tile = 1)
  I_j^u(tile)      the min(max(least, floor(share n)), n) tokens of the highest P_j^u; equal: the lower
  S[i -> j][u][v]  min over tiles of (P_j^u summed over I_i^v, + own_j^u) / (... over I_j^u, + own_j^u)
  importance[j]    1 - mean over the window's rows of cos(x_j, x_j + o_j): x_j the residual that enters
                   layer j, o_j what its attention adds

Texts count alike: the mean of both over texts.
"""

import numpy as np

from oracle.model import Context
from oracle.policy import Full, best


class Watched(Full):
    """Full attention that notes each row's residual x and what attention adds to it. A row of a layer
    comes through `attend` before the next layer's, so that its residual is that of the layer before
    plus attention and FFN, computed once more."""

    def __init__(self, tokens):
        super().__init__()
        self.tokens = tokens
        self.x, self.o = {}, {}

    def attend(self, context, layer, p):
        m = context.model
        if layer == 0:
            x = m.embedding[self.tokens[p]]
        else:
            x = self.x[layer - 1, p] + self.o[layer - 1, p]
            x = x + m.ffn(layer - 1, m.norm(x, m.weight(layer - 1, "post_attention_layernorm")))
        out = super().attend(context, layer, p)
        self.x[layer, p], self.o[layer, p] = x, m.weight(layer, "self_attn.o_proj") @ out
        return out


def cosine(a, b):
    return a @ b / np.sqrt((a @ a) * (b @ b))


def of_text(model, tokens, window, tile, share, least):
    """(S [layers, layers, KV heads, KV heads], importance [layers]) of one text; S of i > j is 0."""
    context, watched = Context(model, len(tokens)), Watched(tokens)
    for token in tokens:
        context.append(token, watched, is_prompt=True)
    rule, n = [], len(tokens)
    tiles = [range(n - (i + 1) * tile, n - i * tile) for i in range(window // tile)]
    layers, heads = model.n_layers, model.kv_heads
    everything = np.ones((layers, layers, heads, heads))
    for rows in tiles:
        weights = np.zeros((layers, heads, n))
        for layer in range(layers):
            for p in rows:
                logits = context.logits_of(layer, p, np.arange(p + 1), p, np.arange(p + 1))
                e = np.exp(logits - logits.max(axis=1, keepdims=True))
                a = e / e.sum(axis=1, keepdims=True)
                for u in range(heads):
                    weights[layer, u, :p + 1] += a[model.group(u)].sum(axis=0)
        among = rows[-1] + 1 if tile == 1 else rows[0]
        k = min(max(least, int(share * among + 1e-9)), among)
        own = weights[:, :, among:].sum(axis=2)
        chosen = {}
        for layer in range(layers):
            for u in range(heads):
                chosen[layer, u], gap = best(weights[layer, u, :among], k)
                rule.append(gap)
        for j in range(layers):
            for u in range(heads):
                most = weights[j, u, chosen[j, u]].sum() + own[j, u]
                for i in range(j + 1):
                    for v in range(heads):
                        part = weights[j, u, chosen[i, v]].sum() + own[j, u]
                        everything[i, j, u, v] = min(everything[i, j, u, v], part / most)
    for i in range(layers):
        everything[i, :i] = 0
    importance = [1 - np.mean([cosine(watched.x[j, p], watched.x[j, p] + watched.o[j, p])
                               for p in range(n - window, n)]) for j in range(layers)]
    return everything, np.array(importance), min(gap for gap in rule if gap > 0)


CASES = {  # name -> options; the texts are the first tokens of the fixtures' prompt and decode tokens
    "decode": {"window": 6, "tile": 1, "share": 0.2, "least": 8},
    "least": {"window": 4, "tile": 1, "share": 0.05, "least": 16},
    "tiles": {"window": 24, "tile": 8, "share": 0.2, "least": 8},
    "rest": {"window": 20, "tile": 8, "share": 0.25, "least": 4},  # rows before the tiles are none
}


def cases(model, tokens, lengths=(150, 97)):
    """The fixture: a list of cases, with the numbers of the texts of those lengths."""
    made = []
    for name, options in CASES.items():
        texts = [of_text(model, tokens[-n:], **options) for n in lengths]
        similarity, importance, gaps = zip(*texts)
        print(f"similarity {name:10s} smallest gap {min(gaps):.0e}")
        assert min(gaps) > 1e-6
        made.append({"name": name, **options,
                     "similarity": np.mean(similarity, axis=0).round(9).tolist(),
                     "importance": np.mean(importance, axis=0).round(9).tolist()})
    return {"lengths": list(lengths), "cases": made}
