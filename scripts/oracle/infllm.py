"""infllm      budget=b, block=B, sinks=S (whole blocks), recent=L, representatives=r, chunk=T. A prompt
            comes in chunks of T rows; a decode row is a chunk of its own.
  reads     A row at p reads t > p - L where tokens stand, and of the others, the far ones, those
            with t < S, those of chosen blocks, and those that no block has yet: all by the query
            turned to position L, and keys at position 0. One softmax covers both parts.
  blocks    Block i is the tokens [S + i B, S + (i + 1) B). It is whole for a chunk with n tokens
            before it when its last token is no longer in the window of the row before the chunk:
            S + (i + 1) B + L <= n.
  key       Of a block and a query head: the mean of the unrotated K of the r tokens that the head
            gave the most weight, summed over all rows p < t + L, each weight over all that the row
            reads. Equal sums: the lower token.
  choice    Once a chunk, for all heads: the b / B blocks with the highest sum over query heads of
            q·key, where q is the mean over the chunk's rows of the query turned to L.
"""

import numpy as np

from oracle.model import softmax
from oracle.policy import Full, best


class InfLlm(Full):
    dense_prompts = False

    def __init__(self, budget=2048, block=128, sinks=128, recent=4096, representatives=4, chunk=512,
                 cache=32):
        super().__init__()  # cache: copies, which change nothing
        self.most, self.block, self.sinks, self.recent = budget // block, block, sinks, recent
        self.representatives, self.chunk_rows = representatives, chunk
        self.sums, self.keys, self.picked = {}, {}, {}  # by layer
        self.key_gap = np.inf
        self.start = 0  # of a prompt, which falls into chunks from there on

    def key_of(self, layer, head):
        return str(layer)

    def later_rows(self, context):
        self.start = context.n
        return super().later_rows(context)

    def min_gap(self):
        return min(super().min_gap(), self.key_gap)

    def begin(self, context, layer, first):
        """Of a chunk that begins at `first`: whole blocks get keys, and are chosen."""
        m = context.model
        if first == 0:
            self.sums[layer] = np.zeros((m.heads, context.k.shape[2]), m.dtype)
            self.keys[layer] = []
        keys = self.keys[layer]
        k = np.repeat(context.k[layer], m.heads // m.kv_heads, axis=0)
        while self.sinks + (len(keys) + 1) * self.block + self.recent <= first:
            begin = self.sinks + len(keys) * self.block
            key = np.empty((m.heads, m.head_dim), m.dtype)
            for head in range(m.heads):
                sums = self.sums[layer][head, begin:begin + self.block]
                tokens, gap = best(sums, self.representatives)
                self.key_gap = min(self.key_gap, gap or np.inf)
                key[head] = k[head, begin + tokens].mean(axis=0)
            keys.append(key)
        q = m.rotate(context.q[layer][:, first:context.n],
                     np.full(context.n - first, self.recent)).mean(axis=1)
        scores = np.array([(q * key).sum() for key in keys], m.dtype)
        size = np.abs(scores).max(initial=0)
        self.picked[layer], self.gap = best(scores, self.most, size)

    def attend(self, context, layer, p):
        m = context.model
        in_chunk = (p - self.start) % self.chunk_rows if p < context.n_prompt else 0
        first = p - in_chunk
        if p == first:
            self.begin(context, layer, first)
        near = np.arange(max(0, p + 1 - self.recent), p + 1)
        far = np.arange(max(0, p + 1 - self.recent))
        block = (far - self.sinks) // self.block
        far = far[(far < self.sinks) | np.isin(block, self.picked[layer]) |
                  (block >= len(self.keys[layer]))]
        logits = np.concatenate([
            context.logits_of(layer, p, far, self.recent, np.zeros(len(far), int)),
            context.logits_of(layer, p, near, p, near)], axis=1)
        a = softmax(logits)
        self.sums[layer][:, near] += a[:, len(far):]
        tokens = np.concatenate([far, near])
        if p >= context.n_prompt:
            self.note(str(layer), tokens, self.gap)
        v = np.repeat(context.v[layer][:, tokens], m.heads // m.kv_heads, axis=0)
        return (a[:, None] @ v).reshape(-1)
