"""duo         gates=FILE, a table of floats from 0 to 1 in the form of DuoAttention's patterns: a
            line a layer, a column a KV head, between tabs. A head whose gate is at least the
            threshold reads everything; any other one is a streaming head, whose every row, prompt
            rows too, reads t < sinks and t > p - recent. Positions stay those of the text.
  threshold Given itself, or as sparsity=S: the quantile S of all gates, linear between two of them,
            as NumPy's. Where S is 1, every head is a streaming head. by_layer=1: of the gates of each
            layer.
"""

import numpy as np

from oracle.policy import PerHead


class Duo(PerHead):
    dense_prompts = False

    def __init__(self, gates, sinks, recent, threshold=None, sparsity=None, by_layer=0):
        super().__init__()
        self.sinks, self.recent = sinks, recent
        if sparsity is not None:
            threshold = np.inf if sparsity >= 1 else np.quantile(
                gates, sparsity, axis=1 if by_layer else None, keepdims=True)
        self.streams = gates < threshold  # [layers, KV heads]

    def tokens_of(self, context, layer, p, head):
        t = np.arange(p + 1)
        kept = t[(t < self.sinks) | (t > p - self.recent)]
        if layer == head == 0 and p >= context.n_prompt:  # once a step, for all of them
            self.note("streaming", kept, 0.0)
        return kept if self.streams[layer, head] else t

    def key_of(self, layer, head):
        return "streaming" if self.streams[layer, head] else ""
