"""kascade     anchors=A,B,... (0 first), head_map=FILE or identity, share=P, least=L,
            lists=per_kv_head|one, prefill=dense|sparse, tile=T. A decode row with n tokens in context
            reads everything in layer 0, and k = min(max(L, floor(P n)), n) tokens in each other one.
  anchor    (layer 0 too) chooses, for each KV head, the k tokens of the highest sum, over the query
            heads of the group, of softmax over all n tokens; lists=one: over all query heads, for
            all. Equal sums: the lower token. Layer 0 does not read them.
  others    Head g of layer l reads what head map[l][g] of the nearest anchor below chose.
            The rule of microsoft/kascade, KascadeStrategy with decode_only.
  prompts   With prefill=dense their rows read everything. With prefill=sparse T rows after one another
            are a tile, of which the first stands at r. An anchor's sums are over all rows of the
            tile besides, the k tokens of n = r are chosen among those before r, and each row also
            reads the tile's own tokens up to itself. (Published: k of the whole prompt less T where
            that is fewer, and T = 32.)
"""

import numpy as np

from oracle.policy import PerHead, best


class Kascade(PerHead):
    def __init__(self, anchors, share, least, head_map="identity", lists="per_kv_head",
                 prefill="dense", tile=32):
        super().__init__()
        self.anchors, self.share, self.least = anchors, share, least
        self.head_map, self.together = head_map, lists == "one"
        self.dense_prompts = prefill == "dense"
        self.chunk_rows = 1 if self.dense_prompts else tile
        self.of_tile = {}  # key -> what the last tile chose

    def tokens_of(self, context, layer, p, head):
        if context.n == context.n_prompt and not self.dense_prompts:
            return self.tokens_of_prompt(context, layer, p, head)
        if layer in self.anchors and not (self.together and head > 0):
            n = p + 1
            self.note(self.key_of(layer, head, chooses=True),
                      *best(self.weights(context, layer, [p], n, head), self.size(n)))
        if layer == 0:
            return np.arange(p + 1)
        return self.chosen[self.key_of(layer, head)][-1]

    def tokens_of_prompt(self, context, layer, p, head):
        first = p - p % self.chunk_rows
        if p == first and layer in self.anchors and not (self.together and head > 0):
            weights = self.weights(context, layer, range(first, context.n), first, head)
            self.of_tile[self.key_of(layer, head, chooses=True)] = best(weights, self.size(first))[0]
        if layer == 0:
            return np.arange(p + 1)
        return np.concatenate([self.of_tile[self.key_of(layer, head)], np.arange(first, p + 1)])

    def size(self, n):
        return min(max(self.least, int(self.share * n + 1e-9)), n)

    def weights(self, context, layer, rows, n, head):
        """Of the tokens before n, summed over rows and query heads."""
        heads = range(context.model.kv_heads) if self.together else [head]
        sums = np.zeros(n)
        for p in rows:
            for g in heads:
                sums += self.probabilities(context, layer, p, np.arange(p + 1), g).sum(axis=0)[:n]
        return sums

    def key_of(self, layer, head, chooses=False):
        if layer == 0 and not chooses:
            return ""
        anchor = max(a for a in self.anchors if a <= layer)
        if self.together:
            return str(anchor)
        if layer != anchor and not isinstance(self.head_map, str):
            head = self.head_map[layer][head]
        return f"{anchor}.{head}"
