"""tova        budget=C. Prompt rows read everything. After the prompt's last row every layer keeps
            the C tokens of the highest weight, for all its heads. A decode row reads them and
            itself; when more than C are then held, the one of the lowest weight goes, which may be
            the row's own.
  weight    The mean over all query heads of the last query's softmax over what it read; equal
            weights: the lower token stays.
            A prompt of at most C tokens is kept whole. Positions stay those of the text.
"""

import numpy as np

from oracle.model import softmax
from oracle.policy import Full, best


class Tova(Full):
    def __init__(self, budget):
        super().__init__()
        self.budget = budget
        self.held = {}  # layer -> tokens that it has when the next row comes

    def reads(self, context, layer, p):
        if p < context.n_prompt:
            return super().reads(context, layer, p)
        # What the query before this one read, and what that leaves.
        held = np.arange(p) if p == context.n_prompt else self.held[layer]
        weights = softmax(context.logits_of(layer, p - 1, held, p - 1, held)).mean(axis=0)
        kept, gap = best(weights, self.budget)
        tokens = self.held[layer] = np.append(held[kept], p)
        self.note(str(layer), tokens, gap)
        return tokens, tokens, p

    def key_of(self, layer, head):
        return str(layer)
