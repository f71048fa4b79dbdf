"""quest       budget in tokens, heads=max|sum|mean, dense_layers. Page u is tokens [16 u, 16 u +
            16), the last page what there is of it. Prompt rows and the first dense_layers layers
            read everything. In any other layer a decode row reads, per KV head, the last page and
            the budget / 16 - 1 best of the others; all of them where there are no more.
  scores    Of a page, by one query head: the sum over the head's dimensions of
            max(q min, q max) / sqrt(head_dim), where min and max are those of the page's rotated
            keys so far, value by value. Over the query heads of the KV head's group: their maximum,
            sum or mean. Equal scores: the lower page is read.
            The gap is relative to the largest score, since scores have both signs.
"""

import numpy as np

from oracle.policy import PerHead, best

PAGE = 16  # tokens


class Quest(PerHead):
    def __init__(self, budget, heads="max", dense_layers=2):
        super().__init__()
        self.pages, self.heads, self.dense_layers = budget // PAGE, heads, dense_layers

    def tokens_of(self, context, layer, p, head):
        if layer < self.dense_layers:
            return np.arange(p + 1)
        scores = self.scores(context, layer, p, head)[:-1]
        pages, gap = best(scores, self.pages - 1, np.abs(scores).max(initial=1e-300))
        pages = np.append(pages, p // PAGE)
        tokens = np.arange(p + 1)
        tokens = tokens[np.isin(tokens // PAGE, pages)]
        self.note(f"{layer}.{head}", tokens, gap)
        return tokens

    def scores(self, context, layer, p, head):
        """[pages]"""
        m = context.model
        q = m.rotate(context.q[layer][context.model.group(head), p:p + 1], [p])[:, 0]
        keys = m.rotate(context.k[layer][head:head + 1, :p + 1], np.arange(p + 1))[0]
        scores = []
        for page in range(p // PAGE + 1):
            own = keys[page * PAGE:(page + 1) * PAGE]
            bound = np.maximum(q * own.min(axis=0), q * own.max(axis=0)).sum(axis=1)
            scores.append(getattr(np, self.heads)(bound) / np.sqrt(m.head_dim))
        return np.array(scores)

    def key_of(self, layer, head):
        return "" if layer < self.dense_layers else f"{layer}.{head}"
