"""knorm       budget=C, turn=append|recompress. Prompt rows read everything. After the prompt of N tokens each KV head keeps
keydiff     the C tokens of the highest scores; a prompt of at most C tokens is kept whole. Decode
            rows read what the head kept and all generated tokens. Positions stay those of the text.
  scores    Of the keys k of a KV head, rotated by their positions: of knorm -|k|, of keydiff
            -cos(k, a), where a is the mean of k / |k| over the prompt. Equal scores: the lower
            token stays. Gaps of keydiff are absolute.
  recompress  The same after a later prompt, of what the head holds by then in place of the prompt.
"""

import numpy as np

from oracle.policy import KeepsOnce, best


class KeyChoice(KeepsOnce):
    size = None  # that gaps are relative to

    def __init__(self, budget, turn="append"):
        super().__init__(turn)
        self.budget = budget

    def choose(self, context, layer, head, held):
        k = context.model.rotate(context.k[layer][head:head + 1, held], held)[0]
        return best(self.scores(k), min(self.budget, len(held)), self.size)


class Knorm(KeyChoice):
    def scores(self, k):
        return -np.sqrt((k * k).sum(axis=1))


class KeyDiff(KeyChoice):
    size = 1

    def scores(self, k):
        directions = k / np.sqrt((k * k).sum(axis=1, keepdims=True))
        anchor = directions.mean(axis=0)
        return -(directions @ anchor) / np.sqrt((anchor * anchor).sum())
