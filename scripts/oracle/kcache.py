"""kcache      budget=N, renormalise=on|off, first_layers=L. Prompt rows read everything, and so do
            all rows in the first L layers. In any other layer each query head of a decode row
            chooses N tokens: those of the highest probability of its softmax over all tokens; equal
            ones: the lower token. The query heads that share a KV head read V of all tokens that
            any of them chose, the union. Each gets sum p v over it, where p is its probability among
            all tokens (renormalise=off), or that divided by the sum of p over the union (on).
"""

import numpy as np

from oracle.policy import PerHead, best


class KCache(PerHead):
    def __init__(self, budget, renormalise="off", first_layers=1):
        super().__init__()
        self.budget, self.first_layers = budget, first_layers
        self.renormalise = renormalise == "on"

    def tokens_of(self, context, layer, p, head):
        everything = np.arange(p + 1)
        if layer < self.first_layers:
            return everything
        a = super().probabilities(context, layer, p, everything, head)
        chosen = [best(of_head, self.budget) for of_head in a]
        tokens = np.unique(np.concatenate([own for own, _ in chosen]))
        self.note(f"{layer}.{head}", tokens, min(gap for _, gap in chosen))
        return tokens

    def probabilities(self, context, layer, p, tokens, head):
        a = super().probabilities(context, layer, p, np.arange(p + 1), head)[:, tokens]
        return a / a.sum(axis=1, keepdims=True) if self.renormalise else a

    def key_of(self, layer, head):
        return "" if layer < self.first_layers else f"{layer}.{head}"
