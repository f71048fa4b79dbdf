"""quest       budget in tokens, heads=max|sum|mean, dense_layers, score=min_max|mean_std. Page u is
            tokens [16 u, 16 u + 16), the last page what there is of it. Prompt rows and the first
            dense_layers layers read everything. In any other layer a decode row reads, per KV head,
            the last page and the budget / 16 - 1 best of the others; all of them where there are no
            more. By mean_std all KV heads read the same.
  scores    Of a page, by one query head, divided by sqrt(head_dim): the sum over the head's
            dimensions of
              min_max   max(q min, q max)
              mean_std  q mean + |q| std
            where min, max, mean and std are those of the page's rotated keys so far, value by
            value; of n keys, std is the root of the sum of (key - mean)^2 / n. Over the query heads
            of the KV head's group, or by mean_std over all query heads: their maximum, sum or mean.
            Equal scores: the lower page is read.
            The gap is relative to the largest score, since scores have both signs.
"""

import numpy as np

from oracle.policy import PerHead, best

PAGE = 16  # tokens


class Quest(PerHead):
    def __init__(self, budget, heads="max", dense_layers=2, score="min_max"):
        super().__init__()
        self.pages, self.heads, self.dense_layers = budget // PAGE, heads, dense_layers
        self.of_page = {"min_max": self.min_max, "mean_std": self.mean_std}[score]
        self.together = score == "mean_std"

    def tokens_of(self, context, layer, p, head):
        if layer < self.dense_layers:
            return np.arange(p + 1)
        if self.together and head > 0:
            return self.chosen[self.key_of(layer, head)][-1]
        heads = range(context.model.kv_heads) if self.together else [head]
        scores = self.scores(context, layer, p, heads)[:-1]
        pages, gap = best(scores, self.pages - 1, np.abs(scores).max(initial=1e-300))
        pages = np.append(pages, p // PAGE)
        tokens = np.arange(p + 1)
        tokens = tokens[np.isin(tokens // PAGE, pages)]
        self.note(self.key_of(layer, head), tokens, gap)
        return tokens

    def scores(self, context, layer, p, heads):
        """[pages], by the query heads of these KV heads."""
        m = context.model
        of_heads = []
        for head in heads:
            q = m.rotate(context.q[layer][m.group(head), p:p + 1], [p])[:, 0]
            keys = m.rotate(context.k[layer][head:head + 1, :p + 1], np.arange(p + 1))[0]
            of_heads.append([self.of_page(q, keys[page * PAGE:(page + 1) * PAGE])
                             for page in range(p // PAGE + 1)])
        by_page = np.concatenate(of_heads, axis=1)  # [pages, query heads]
        return getattr(np, self.heads)(by_page, axis=1) / np.sqrt(m.head_dim)

    @staticmethod
    def min_max(q, own):
        return np.maximum(q * own.min(axis=0), q * own.max(axis=0)).sum(axis=1)

    @staticmethod
    def mean_std(q, own):
        mean = own.mean(axis=0)
        std = np.sqrt(((own - mean) ** 2).mean(axis=0))
        return (q * mean + np.abs(q) * std).sum(axis=1)

    def key_of(self, layer, head):
        if layer < self.dense_layers:
            return ""
        return f"{layer}" if self.together else f"{layer}.{head}"
