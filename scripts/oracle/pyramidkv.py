"""pyramidkv   budget=C, window=W, pool, kernel as snapkv's, beta=B. As snapkv, but layer l of L keeps
            the last W tokens of the prompt and the cap(l) best of t < N - W; a prompt of at most C
            tokens is kept whole.
  cap       The first layer chooses `most` tokens and the last about `least`:
                least = (C - W) // B, most = 2 (C - W) - least;
                where most >= N - W: most = N - W, least = 2 (C - W) - most;
                cap(l) = most - l ((most - least) // (L - 1)).
"""

import numpy as np

from oracle.policy import best
from oracle.snapkv import SnapKv


class PyramidKv(SnapKv):
    def __init__(self, budget, window=32, pool="mean", kernel=5, beta=20):
        super().__init__(budget, window, pool, kernel)
        self.beta = beta

    def capacity(self, layer, n_layers, n):
        """Of tokens before the window."""
        least = (self.budget - self.window) // self.beta
        most = 2 * (self.budget - self.window) - least
        if most >= n - self.window:
            most = n - self.window
            least = 2 * (self.budget - self.window) - most
        return most - layer * ((most - least) // (n_layers - 1))

    def choose(self, context, layer, head, key):
        n = context.n_prompt
        older = n - self.window
        if n <= self.budget:
            return self.note(key, np.arange(n + 1), 0.0)
        kept, gap = best(self.pooled(self.weights(context, layer, head)[:older]),
                         self.capacity(layer, context.model.n_layers, n))
        self.note(key, np.append(kept, np.arange(older, n + 1)), gap)
