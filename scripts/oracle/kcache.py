"""kcache      budget=N, lists=union|per_head, renormalise=on|off, first_layers=L. Prompt rows read
            everything, and so do all rows in the first L layers. In any other layer each query head
            of a decode row chooses N tokens: those of the highest probability of its softmax over
            all tokens; equal ones: the lower token. It reads V of all tokens that any of the query
            heads of its KV head chose (union), or of its own (per_head). It gets sum p v over these,
            where p is its probability among all tokens (renormalise=off), or that divided by the
            sum of p over what it reads (on).
"""

import numpy as np

from oracle.policy import PerHead, best


class KCache(PerHead):
    def __init__(self, budget, lists="union", renormalise="off", first_layers=1):
        super().__init__()
        self.budget, self.first_layers = budget, first_layers
        self.per_head = lists == "per_head"
        self.renormalise = renormalise == "on"

    def tokens_of(self, context, layer, p, head):
        everything = np.arange(p + 1)
        if layer < self.first_layers:
            return everything
        a = super().probabilities(context, layer, p, everything, head)
        chosen = [best(of_head, self.budget) for of_head in a]
        tokens = np.unique(np.concatenate([own for own, _ in chosen]))
        self.own = np.array([np.isin(tokens, own) for own, _ in chosen])  # by query head
        if self.per_head:
            heads = range(context.model.heads)[context.model.group(head)]
            for (own, gap), query_head in zip(chosen, heads):
                self.note(f"{layer}.{query_head}", own, gap)
        else:
            self.note(f"{layer}.{head}", tokens, min(gap for _, gap in chosen))
        return tokens

    def probabilities(self, context, layer, p, tokens, head):
        a = super().probabilities(context, layer, p, np.arange(p + 1), head)[:, tokens]
        if self.per_head and layer >= self.first_layers:
            a = np.where(self.own, a, 0)
        return a / a.sum(axis=1, keepdims=True) if self.renormalise else a

    def keys_of(self, layer, model):
        if layer < self.first_layers:
            return [""] * model.kv_heads
        return [f"{layer}.{head}" for head in range(model.heads if self.per_head else model.kv_heads)]
