"""blocks      budget in tokens, block, sinks, recent, representative=mean|max|quest|fixed,
            representatives, lists=one|per_kv_head, dense_layers, layer_step. Block u is tokens
            [block u, block u + block), the last block what there is of it. Prompt rows and the
            first dense_layers layers read everything. In any other layer a decode row at p reads
            the first ceil(sinks / block) blocks, the last floor(recent / block) + 1, and the best
            of the others, budget / block in all; everything where there are no more.
  scores    Of a block, by one query head: the sum over the block's representatives r of q·r, with
              mean, max   one r, of the block's rotated keys so far, value by value
              fixed       its tokens 0, e, 2 e ..., with e = block / representatives
              quest       two, the minima and the maxima: sum over i of max(q_i min_i, q_i max_i)
            Summed over all query heads, or over those of a KV head, which then reads its own
            choice. Equal scores: the lower block is read.
            Of each layer_step layers in a row the first one chooses for all.
            The gap is relative to the largest score, since scores have both signs.
"""

import numpy as np

from oracle.policy import PerHead, best


class Blocks(PerHead):
    def __init__(self, budget, block=128, sinks=128, recent=4096, representative="mean",
                 representatives=1, lists="one", dense_layers=2, layer_step=1):
        super().__init__()
        self.block, self.blocks = block, budget // block
        self.first, self.last = -(-sinks // block), recent // block + 1
        self.of_block = getattr(self, "by_" + representative)
        self.every = block // representatives
        self.together = lists == "one"
        self.dense_layers, self.layer_step = dense_layers, layer_step

    def tokens_of(self, context, layer, p, head):
        if layer < self.dense_layers:
            return np.arange(p + 1)
        chooser = layer - (layer - self.dense_layers) % self.layer_step
        if chooser < layer or (self.together and head > 0):
            return self.chosen[self.key_of(layer, head)][-1]
        n = p // self.block + 1
        if n <= self.blocks:
            self.note(self.key_of(layer, head), np.arange(p + 1), 1)
            return np.arange(p + 1)
        heads = range(context.model.kv_heads) if self.together else [head]
        scores = self.scores(context, layer, p, heads)
        between = scores[self.first:n - self.last]
        picked, gap = best(between, self.blocks - self.first - self.last,
                           np.abs(scores).max(initial=1e-300))
        read = np.zeros(n, dtype=bool)
        read[:self.first] = read[n - self.last:] = True
        read[self.first + np.asarray(picked, dtype=int)] = True
        tokens = np.arange(p + 1)
        tokens = tokens[read[tokens // self.block]]
        self.note(self.key_of(layer, head), tokens, gap)
        return tokens

    def scores(self, context, layer, p, heads):
        """[blocks], by the query heads of these KV heads."""
        m = context.model
        total = np.zeros(p // self.block + 1)
        for head in heads:
            q = m.rotate(context.q[layer][m.group(head), p:p + 1], [p])[:, 0]
            keys = m.rotate(context.k[layer][head:head + 1, :p + 1], np.arange(p + 1))[0]
            for u in range(len(total)):
                total[u] += self.of_block(q, keys[u * self.block:(u + 1) * self.block]).sum()
        return total

    @staticmethod
    def by_mean(q, own):
        return q @ own.mean(axis=0)

    @staticmethod
    def by_max(q, own):
        return q @ own.max(axis=0)

    @staticmethod
    def by_quest(q, own):
        return np.maximum(q * own.min(axis=0), q * own.max(axis=0)).sum(axis=1)

    def by_fixed(self, q, own):
        return (q @ own[::self.every].T).sum(axis=1)

    def key_of(self, layer, head):
        if layer < self.dense_layers:
            return ""
        layer -= (layer - self.dense_layers) % self.layer_step
        return f"{layer}" if self.together else f"{layer}.{head}"
