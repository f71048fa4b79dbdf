"""streaming   Every row, prompt rows too, reads t < sinks and t > p - (budget - sinks).
            positions=original rotates by t. positions=cache rotates by the place in what is kept:
            once n > budget, window token t stands at sinks + t - (n - (budget - sinks)) and the
            query at budget - 1. Only distances matter: so the query meets the sinks from there and
            the window from p. (Angles in float32 make that distinction; the fixtures check that it
            is no other.)
"""

import numpy as np

from oracle.policy import Full


class Streaming(Full):
    dense_prompts = False

    def __init__(self, sinks, budget, positions):
        super().__init__()
        self.sinks, self.budget, self.positions = sinks, budget, positions

    def reads(self, context, layer, p):
        t = np.arange(p + 1)
        kept = t[(t < self.sinks) | (t > p - (self.budget - self.sinks))]
        if self.positions == "original":
            return kept, kept, p
        place = min(p, self.budget - 1)
        if self.positions == "places":
            return kept, np.arange(len(kept)), place
        return kept, kept, np.where(kept < self.sinks, place, p)
