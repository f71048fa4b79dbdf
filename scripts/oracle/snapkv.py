"""snapkv      budget=C, window=W, pool=mean|max, kernel (odd), turn=append|recompress. Prompt rows
            read everything. After the prompt of N tokens each KV head keeps the last W of them and
            the C - W best of the others; a prompt of at most C tokens is kept whole. Decode rows
            read what the head kept and all that came later. Positions stay those of the text.
  scores    Of each token: the softmax weights that the last W queries of the prompt, each over all
            tokens up to itself, give it, their mean over the queries and over the query heads of
            the KV head's group; then the mean (always of `kernel` values) or the maximum over the
            kernel / 2 tokens on either side, where there are none 0, as the last W are. Equal
            scores: the lower token stays.
  recompress  The same after a later prompt. A head chooses of what it holds by then, whose
            neighbours are those in what it holds. The queries are those of the later prompt alone
            where it has fewer than W rows.
"""

import numpy as np

from oracle.model import softmax
from oracle.policy import KeepsOnce, best


class SnapKv(KeepsOnce):
    def __init__(self, budget, window=32, pool="mean", kernel=5, turn="append"):
        super().__init__(turn)
        self.budget, self.window, self.pool, self.kernel = budget, window, pool, kernel

    def rows(self, layer, n_layers, n):
        """That a head of the layer keeps of a prompt that ends at n tokens."""
        return self.budget

    def choose(self, context, layer, head, held):
        rows = self.rows(layer, context.model.n_layers, context.n_prompt)
        if len(held) <= rows:
            return np.arange(len(held)), 0.0
        older = len(held) - self.window
        weights = self.weights(context, layer, head, held)[:older]
        kept, gap = best(self.pooled(weights), rows - self.window)
        return np.append(kept, np.arange(older, len(held))), gap

    def weights(self, context, layer, head, held):
        """[len(held)], before pooling."""
        n = context.n_prompt
        total = np.zeros(len(held), context.model.dtype)
        queries = range(max(self.first, n - self.window), n)
        for i in queries:
            seen = held[held <= i]
            a = softmax(context.logits_of(layer, i, seen, i, seen))
            total[:len(seen)] += a[context.model.group(head)].mean(axis=0)
        return total / len(queries)

    def pooled(self, weights):
        padded = np.pad(weights, self.kernel // 2)
        around = np.lib.stride_tricks.sliding_window_view(padded, self.kernel)
        return around.mean(axis=1) if self.pool == "mean" else around.max(axis=1)
