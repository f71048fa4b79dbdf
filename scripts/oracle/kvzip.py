"""kvzip       ratio=R, sinks=S, chunk=C. Prompt rows read everything. The prompt of N tokens falls into
            chunks of C, the last one shorter. For each chunk, the model reads the chunk's tokens
            once more, as rows at the positions N, N + 1 and so on that read everything before them,
            and forgets them again. (With a tokenizer, the request to repeat the chunk comes first.)
            Then the int(R * (N - S) * layers * KV heads) best tokens of all layers and KV heads
            together stay, and the first S tokens of each. Decode rows read what their KV head kept
            and all generated tokens. Positions stay those of the text.
  scores    Of token t of a chunk, in a layer and KV head: the highest weight that a query head of
            the group gives it in a row of the chunk's pass, with a softmax over the tokens t' < S,
            those of the chunk, and the pass's own rows up to the row itself. Equal scores: the lower
            layer, then the lower head, then the lower token stays.
"""

import numpy as np

from oracle.model import Context, softmax
from oracle.policy import Full, PerHead, best


class KvZip(PerHead):
    def __init__(self, ratio, sinks=4, chunk=2048):
        super().__init__()
        self.ratio, self.sinks, self.chunk = ratio, sinks, chunk

    def tokens_of(self, context, layer, p, head):
        key = f"{layer}.{head}"
        if key not in self.chosen:
            self.choose(context)
        return np.append(self.chosen[key][0], np.arange(context.n_prompt + 1, p + 1))

    def key_of(self, layer, head):
        return f"{layer}.{head}"

    def choose(self, context):
        m, n = context.model, context.n_prompt
        scores = np.zeros((m.n_layers, m.kv_heads, n))
        for begin in range(0, n, self.chunk):
            end = min(begin + self.chunk, n)
            scores[:, :, begin:end] = self.repeat(context, begin, end)
        first = min(self.sinks, n)
        others = n - first
        kept, gap = best(scores[:, :, first:].reshape(-1),
                         int(self.ratio * (others * m.n_layers * m.kv_heads)))
        stays = np.zeros(m.n_layers * m.kv_heads * others, bool)
        stays[kept] = True
        for layer in range(m.n_layers):
            for head in range(m.kv_heads):
                own = stays.reshape(m.n_layers, m.kv_heads, others)[layer, head]
                tokens = np.append(np.arange(first), first + np.flatnonzero(own))
                self.note(f"{layer}.{head}", np.append(tokens, n), gap)

    def repeat(self, context, begin, end):
        """Scores [layers, kv_heads, end - begin] of the tokens of a chunk."""
        m, n = context.model, context.n_prompt
        again = Context(m, n + end - begin)
        for name in ("q", "k", "v"):
            getattr(again, name)[:, :, :n] = getattr(context, name)[:, :, :n]
        again.n = again.n_prompt = n
        again.append_rows(self.prompt[begin:end], Full())
        scores = np.zeros((m.n_layers, m.kv_heads, end - begin))
        for layer in range(m.n_layers):
            for row in range(n, n + end - begin):
                seen = np.concatenate([np.arange(min(self.sinks, begin)), np.arange(begin, end),
                                       np.arange(n, row + 1)])
                a = softmax(again.logits_of(layer, row, seen, row, seen))
                a = a[:, min(self.sinks, begin):][:, :end - begin]
                for head in range(m.kv_heads):
                    of_group = a[m.group(head)].max(axis=0)
                    scores[layer, head] = np.maximum(scores[layer, head], of_group)
        return scores
