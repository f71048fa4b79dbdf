"""omnikv_duo  omnikv among the retrieval heads of duo.
  gates     gates=FILE and threshold, or sparsity and by_layer, as in duo, tell streaming heads from
            retrieval heads. A streaming head's every row, prompt rows too, reads t < stream_sinks and
            t > p - stream_recent, in every layer.
  others    Retrieval heads read what omnikv says, with the same settings: prompt rows everything. The
            maximum over query heads in `scores` is over those of the layer's retrieval heads, and mem
            counts layers as if all heads retrieved.
"""

import numpy as np

from oracle.omnikv import OmniKv


class OmniKvDuo(OmniKv):
    def __init__(self, gates, stream_sinks, stream_recent, threshold=None, sparsity=None, by_layer=0,
                 **settings):
        super().__init__(**settings)
        self.dense_prompts = False
        self.stream_sinks, self.stream_recent = stream_sinks, stream_recent
        if sparsity is not None:
            threshold = np.quantile(gates, sparsity, axis=1 if by_layer else None, keepdims=True)
        self.retrieves = gates >= threshold  # [layers, KV heads]

    def tokens_of(self, context, layer, p, head):
        t = np.arange(p + 1)
        near = t[(t < self.stream_sinks) | (t > p - self.stream_recent)]
        decodes = p >= context.n_prompt
        if decodes and layer == head == 0:  # once a step, for all of them
            self.note("streaming", near, 0.0)
        if not self.retrieves[layer, head]:
            return near
        if decodes and self.selects(layer) and head == np.flatnonzero(self.retrieves[layer])[0]:
            self.choose(context, layer, p, head)
        key = self.key_of(layer, head)
        return self.chosen[key][-1] if decodes and key else t

    def key_of(self, layer, head):
        return super().key_of(layer, head) if self.retrieves[layer, head] else "streaming"

    def weights(self, context, layer, i, head):
        heads = np.flatnonzero(self.retrieves[layer])
        return np.max([self.of_head(context, layer, i, h) for h in heads], axis=0)

    def of_head(self, context, layer, i, head):
        """The maximum over the query heads of one KV head [i + 1]."""
        seen = np.arange(i + 1)
        if self.score == "softmax":
            return self.probabilities(context, layer, i, seen, head).max(axis=0)
        return context.logits_of(layer, i, seen, i, seen)[context.model.group(head)].max(axis=0)
