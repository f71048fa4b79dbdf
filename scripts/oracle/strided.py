"""strided     budget=C, sinks=S (at most C - 1). Prompt rows read everything. After the prompt's last
            row every layer keeps the same C tokens. A decode row reads them and itself; when more
            than C are then held, one goes.
  rank      Of token t of n: the first S come first, then by (n - t - 1/2) / s, where s is the largest
            power of two that divides t (2^30 of t = 0), the smallest first; no two are equal. The
            first C of a prompt stay; then the last of what is held goes.
            A prompt of at most C tokens is kept whole. Positions stay those of the text.
"""

import numpy as np

from oracle.policy import HeldByLayer


class Strided(HeldByLayer):
    def __init__(self, budget, sinks=4):
        super().__init__()
        self.budget, self.sinks = budget, min(sinks, budget - 1)

    def reads(self, context, layer, p):
        if p < context.n_prompt:
            return super().reads(context, layer, p)
        kept, gap = self.kept(context, layer, p)
        tokens = self.held[layer] = np.append(kept, p)
        if layer == 0:
            self.note("0", tokens, gap)
        return tokens, tokens, p

    def kept(self, context, layer, p):
        held = self.held.get(layer, np.arange(p))
        rank = [(-1 if t < self.sinks else (p - t - 0.5) / (t & -t or 2**30), t)
                for t in held.tolist()]
        return np.sort([t for _, t in sorted(rank)[:self.budget]]), 1.0  # nothing is near another

    def key_of(self, layer, head):
        return "0"  # all read the same
