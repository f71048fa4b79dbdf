"""snapkv      budget=C, window=W, pool=mean|max, kernel (odd). Prompt rows read everything. After
            the prompt of N tokens each KV head keeps the last W of them and the C - W best of
            t < N - W; a prompt of at most C tokens is kept whole. Decode rows read what the head
            kept and all generated tokens. Positions stay those of the text.
  scores    Of token t < N - W: the softmax weights that the last W queries of the prompt, each over
            all tokens up to itself, give it, their mean over the queries and over the query heads
            of the KV head's group; then the mean (always of `kernel` values) or the maximum over
            |t' - t| <= kernel / 2, where tokens outside of 0 <= t' < N - W count as 0. Equal
            scores: the lower token stays.
"""

import numpy as np

from oracle.model import softmax
from oracle.policy import KeepsOnce, best


class SnapKv(KeepsOnce):
    def __init__(self, budget, window=32, pool="mean", kernel=5):
        super().__init__()
        self.budget, self.window, self.pool, self.kernel = budget, window, pool, kernel

    def tokens_of(self, context, layer, p, head):
        key = f"{layer}.{head}"
        if key not in self.chosen:
            self.choose(context, layer, head, key)
        return np.append(self.chosen[key][0], np.arange(context.n_prompt + 1, p + 1))

    def choose(self, context, layer, head, key):
        n = context.n_prompt
        if n <= self.budget:
            return self.note(key, np.arange(n + 1), 0.0)
        older = n - self.window
        kept, gap = best(self.pooled(self.weights(context, layer, head)[:older]),
                         self.budget - self.window)
        self.note(key, np.append(kept, np.arange(older, n + 1)), gap)

    def weights(self, context, layer, head):
        """[n_prompt], before pooling."""
        n = context.n_prompt
        total = np.zeros(n, context.model.dtype)
        for i in range(n - self.window, n):
            seen = np.arange(i + 1)
            a = softmax(context.logits_of(layer, i, seen, i, seen))
            total[:i + 1] += a[context.model.group(head)].mean(axis=0)
        return total / self.window

    def pooled(self, weights):
        padded = np.pad(weights, self.kernel // 2)
        around = np.lib.stride_tricks.sliding_window_view(padded, self.kernel)
        return around.mean(axis=1) if self.pool == "mean" else around.max(axis=1)
