"""blocks compat=kt: the rule of the published code of KTransformers (v0.1.3), where it differs from
            its document, which is in blocks.py.
  anchors   Of each whole block of the prompt, for each query head, made once after the prompt:
              mean     one, of the keys
              max      one, value by value the maximum of the keys and 0
              fixed    `representatives` keys at equal distances
              quest    the minima, and the maxima or 0, of KV head h for query head h. Query heads
                       from the number of KV heads on have zeros
              dynamic  the sum of the `representatives` keys of the highest weight, and zeros in the
                       places of the others
            Blocks of generated tokens have none: they are read as long as they are among the last.
  scores    Of a block, by one query head: the sum over i of the maximum over its anchors a of
            q_i a_i.
  weights   Of a token for a query head: the softmax weights that the last `queries` rows of the
            prompt, each over the whole prompt, give it, summed over the rows.
  preselect  For all heads together: the blocks with the highest mean over heads and tokens, of the
            tokens of the block and of a quarter of a block on either side of it.
"""

import numpy as np

from oracle.blocks import Blocks
from oracle.model import softmax
from oracle.policy import best


class BlocksKt(Blocks):
    def __init__(self, budget, block=128, widen=None, **settings):
        super().__init__(budget, block, widen=block // 4 if widen is None else widen, **settings)

    def without_keys(self, context, n):
        return np.arange(context.n_prompt // self.block, n)

    def scores(self, context, layer, p, heads):
        m = context.model
        total = np.zeros(p // self.block + 1)
        group = m.heads // m.kv_heads
        exactness = 0.0
        for h in (h for head in heads for h in range(head * group, (head + 1) * group)):
            q = m.rotate(context.q[layer][h:h + 1, p:p + 1], [p])[0, 0]
            for u in range(context.n_prompt // self.block):
                anchors, gap = self.anchors(context, layer, h, u)
                total[u] += (q * anchors).max(axis=0).sum()
                if gap > 0:
                    exactness = min(exactness or gap, gap)
        return total, exactness

    def anchors(self, context, layer, h, u):
        """[anchors, head_dim] of a query head, and the gap of their choice."""
        at = ("anchors", layer, h, u)
        if at not in self.memory:
            self.memory[at] = self.make_anchors(context, layer, h, u)
        return self.memory[at]

    def make_anchors(self, context, layer, h, u):
        m = context.model
        span = slice(u * self.block, (u + 1) * self.block)
        kv_head = h // (m.heads // m.kv_heads)
        if self.representative == "quest":
            if h >= m.kv_heads:
                return np.zeros((2, m.head_dim)), 0.0
            kv_head = h
        own = self.keys(context, layer, kv_head, context.n_prompt)[span]
        if self.representative == "mean":
            return own.mean(axis=0)[None], 0.0
        if self.representative == "max":
            return np.maximum(own.max(axis=0), 0)[None], 0.0
        if self.representative == "quest":
            return np.array([np.maximum(own.max(axis=0), 0), own.min(axis=0)]), 0.0
        if self.representative == "fixed":
            return own[::self.every], 0.0
        tokens, gap = best(self.weights(context, layer)[h, span], self.count)
        anchors = np.zeros((self.count, m.head_dim), m.dtype)
        anchors[0] = own[tokens].sum(axis=0)
        return anchors, gap

    def weights(self, context, layer):
        """[heads, n_prompt], without a causal mask."""
        if ("weights", layer) not in self.memory:
            n = context.n_prompt
            everything = np.arange(n)
            self.memory["weights", layer] = sum(
                softmax(context.logits_of(layer, i, everything, i, everything))
                for i in range(max(0, n - self.queries), n))
        return self.memory["weights", layer]

    def excluded(self, context, layer, heads):
        return super().excluded(context, layer, range(context.model.heads))
