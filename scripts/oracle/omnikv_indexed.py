"""omnikv, dense=indexed
  dense     Layers that are dense in omnikv choose for themselves at a decode row, and read only
            that. Sparse layers read what the filter below them chose, as before.
  index     Of every rotated key, per KV head, with low and high the lowest and the highest of its
            values, zero the highest bf16 that is not above low, and scale the lowest bf16 that is
            not below (high - zero) / 15: each value v becomes zero + scale c, c the whole number
            nearest to (v - zero) / scale.
  scores    Those of omnikv, but for decode rows from logits by the index. Candidates are the
            rescore * budget best of the tokens that are not read beside the choice, for each list
            its own. They and those tokens get new scores: from exact logits in place of their own,
            with a softmax over the logits of all tokens, exact or not.
  chosen    Among the candidates. A share of the weight is one of the scores of all tokens.
  budget    mem is the share of the context that the budget is: no layer reads everything.
"""

import math
from fractions import Fraction

import numpy as np

from oracle.model import softmax
from oracle.omnikv import OmniKv
from oracle.policy import best


def bf16_not_above(v):
    bits = np.float32(v).view(np.uint32)
    below = bits + np.where(bits >> 31, np.uint32(0xffff), np.uint32(0))
    return np.float64((below & np.uint32(0xffff0000)).view(np.float32))


class OmniKvIndexed(OmniKv):
    def __init__(self, dense="indexed", rescore=4, **settings):
        super().__init__(**settings)
        assert dense == "indexed"
        self.rescore = rescore
        self.given = {}  # (layer, head, position of a decode row) -> what it gives each token

    def selects(self, layer):
        return self.is_dense(layer) or super().selects(layer)

    def key_of(self, layer, head):
        return self.list_of(layer, head) if self.is_dense(layer) else super().key_of(layer, head)

    def budget_at(self, context, n, times=1):
        if not self.mem:
            return times * self.budget
        return max(1, math.ceil(min(1, times * Fraction(str(self.mem))) * n))

    def weights(self, context, layer, i, head):
        if i < context.n_prompt:
            return super().weights(context, layer, i, head)
        return self.given[layer, head, i]

    def reduced(self, logits):
        """[query heads, tokens] -> [tokens]"""
        s = softmax(logits) if self.score == "softmax" else logits
        return s.sum(axis=0) if self.per_kv_head else s.max(axis=0)

    def index_logits(self, context, layer, p):
        """[query heads, p + 1]"""
        m = context.model
        k = m.rotate(context.k[layer][:, :p + 1], np.arange(p + 1))
        low, high = k.min(axis=-1, keepdims=True), k.max(axis=-1, keepdims=True)
        zero = bf16_not_above(low)
        scale = -bf16_not_above((zero - high) / 15)
        k = zero + scale * np.rint((k - zero) / np.where(scale > 0, scale, 1))
        q = m.rotate(context.q[layer][:, p:p + 1], [p])
        return (np.repeat(k, m.heads // m.kv_heads, axis=0) * q).sum(axis=-1) / np.sqrt(m.head_dim)

    def choose(self, context, layer, p, head):
        m, n = context.model, p + 1
        recent, n_candidates = self.split(context, self.budget_at(context, n, self.rescore))
        of_list = m.group(head) if self.per_kv_head else slice(m.heads)
        seen = np.arange(n)
        logits = self.index_logits(context, layer, p)[of_list]
        exact = context.logits_of(layer, p, seen, p, seen)[of_list]
        self.given[layer, head, p] = self.reduced(logits)
        candidates, gap = best(self.scores(context, layer, p, head)[:n - recent], n_candidates)
        rescored = np.concatenate([candidates, np.arange(n - recent, n)])
        logits[:, rescored] = exact[:, rescored]
        self.given[layer, head, p][rescored] = self.reduced(logits)[rescored]
        super().choose(context, layer, p, head, candidates, gap)
