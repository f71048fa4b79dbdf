"""streaming   Every row, prompt rows too, reads t < sinks and t > p - (budget - sinks).
            positions=original rotates by t. positions=cache rotates by the place in what is kept:
            once n > budget, window token t stands at sinks + t - (n - (budget - sinks)) and the
            query at budget - 1. Only distances matter: so the query meets the sinks from there and
            the window from p. (Angles in float32 make that distinction; the fixtures check that it
            is no other.)
"""

import numpy as np

from oracle.model import Context
from oracle.policy import Full


class Streaming(Full):
    """`skip`: how many tokens behind the sinks the context lacks, of a text of which no row that
    counts reads them."""
    dense_prompts = False

    def __init__(self, sinks, budget, positions="original", skip=0):
        super().__init__()
        self.sinks, self.budget, self.positions = sinks, budget, positions
        self.skip = skip

    def reads(self, context, layer, p):
        t = np.arange(p + 1)
        t[self.sinks:] += self.skip
        here = t[p]
        rows = np.flatnonzero((t < self.sinks) | (t > here - (self.budget - self.sinks)))
        kept = t[rows]
        if layer == 0 and p >= context.n_prompt:
            self.note("window", kept, 0.0)
        if self.positions == "original":
            return rows, kept, here
        place = min(here, self.budget - 1)
        if self.positions == "places":
            return rows, np.arange(len(kept)), place
        return rows, kept, np.where(kept < self.sinks, place, here)

    def key_of(self, layer, head):
        return "window"


class FarText:
    """The last tokens of a text that is too long to compute, of which streaming reads no more than
    the sinks and a window per layer."""
    TOKENS, ROWS = 200_000, 4  # rows at the end that count

    def __init__(self, vocab):
        state, self.tokens = 1, []
        for _ in range(self.TOKENS):  # a generator that any language has in a line
            state = (state * 1103515245 + 12345) % 2**31
            self.tokens.append(3 + (state >> 16) % (vocab - 3))

    def logits(self, model, settings, windows):
        """Of the last rows [ROWS, vocab]; exact where there are more windows than layers."""
        sinks = settings["sinks"]
        begin = self.TOKENS - self.ROWS - windows * (settings["budget"] - sinks)
        tokens = self.tokens[:sinks] + self.tokens[begin:]
        rule = Streaming(**settings, skip=begin - sinks)
        context = Context(model, len(tokens))
        rows = [context.append(token, rule, is_prompt=True) for token in tokens]
        return np.array(rows[-self.ROWS:])
