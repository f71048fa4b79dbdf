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
from oracle.policy import HeldByLayer, best


class Tova(HeldByLayer):
    def __init__(self, budget):
        super().__init__()
        self.budget = budget

    def reads(self, context, layer, p):
        if p < context.n_prompt:
            return super().reads(context, layer, p)
        kept, gap = self.kept(context, layer, p)
        tokens = self.held[layer] = np.append(kept, p)
        self.note(str(layer), tokens, gap)
        return tokens, tokens, p

    def kept(self, context, layer, p):
        """Of what the query before this one read."""
        held = self.held.get(layer, np.arange(p))
        weights = softmax(context.logits_of(layer, p - 1, held, p - 1, held)).mean(axis=0)
        kept, gap = best(weights, self.budget)
        return held[kept], gap

    def key_of(self, layer, head):
        return str(layer)
