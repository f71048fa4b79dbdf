"""pyramidkv   budget=C, window=W, pool, kernel, turn as snapkv's, beta=B. As snapkv, but layer l of L
            keeps the last W tokens of the prompt and the cap(l) best of the others; a prompt of at
            most C tokens is kept whole.
  cap       The first layer chooses `most` tokens and the last about `least`:
                least = (C - W) // B, most = 2 (C - W) - least;
                where most >= N - W: most = N - W, least = 2 (C - W) - most;
                cap(l) = most - l ((most - least) // (L - 1)).
            N counts all tokens of the sequence, after a later prompt too.
"""

from oracle.snapkv import SnapKv


class PyramidKv(SnapKv):
    def __init__(self, budget, window=32, pool="mean", kernel=5, beta=20, turn="append"):
        super().__init__(budget, window, pool, kernel, turn)
        self.beta = beta

    def rows(self, layer, n_layers, n):
        if n <= self.budget:
            return n
        least = (self.budget - self.window) // self.beta
        most = 2 * (self.budget - self.window) - least
        if most >= n - self.window:
            most = n - self.window
            least = 2 * (self.budget - self.window) - most
        return self.window + most - layer * ((most - least) // (n_layers - 1))
