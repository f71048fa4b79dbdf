"""kcache      budget=N, renormalise=on|off, first_layers=L. Prompt rows read everything, and so do
            all rows in the first L layers. In any other layer a decode row reads, per KV head, V of
            N tokens: those of the highest probability, which is the maximum over the query heads of
            the head's group of their softmax over all tokens; equal ones: the lower token. Every
            query head of the group gets sum p v over that list, where p is its probability among
            all tokens (renormalise=off), or that divided by the sum of p over the list (on).
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
        tokens, gap = best(a.max(axis=0), self.budget)
        self.note(f"{layer}.{head}", tokens, gap)
        return tokens

    def probabilities(self, context, layer, p, tokens, head):
        a = super().probabilities(context, layer, p, np.arange(p + 1), head)[:, tokens]
        return a / a.sum(axis=1, keepdims=True) if self.renormalise else a

    def key_of(self, layer, head):
        return "" if layer < self.first_layers else f"{layer}.{head}"
