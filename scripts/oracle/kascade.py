"""kascade     anchors=A,B,... (0 first), head_map=FILE or identity, share=P, least=L,
            lists=per_kv_head|one. Prompt rows read everything. A decode row with n tokens in context
            reads everything in layer 0, and k = min(max(L, floor(P n)), n) tokens in each other one.
  anchor    (layer 0 too) chooses, for each KV head, the k tokens of the highest sum, over the query
            heads of the group, of softmax over all n tokens; lists=one: over all query heads, for
            all. Equal sums: the lower token. Layer 0 does not read them.
  others    Head g of layer l reads what head map[l][g] of the nearest anchor below chose.
            The rule of microsoft/kascade, KascadeStrategy with decode_only.
"""

import numpy as np

from oracle.policy import PerHead, best


class Kascade(PerHead):
    def __init__(self, anchors, share, least, head_map="identity", lists="per_kv_head"):
        super().__init__()
        self.anchors, self.share, self.least = anchors, share, least
        self.head_map, self.together = head_map, lists == "one"

    def tokens_of(self, context, layer, p, head):
        if layer in self.anchors and not (self.together and head > 0):
            self.choose(context, layer, p, head)
        if layer == 0:
            return np.arange(p + 1)
        return self.chosen[self.key_of(layer, head)][-1]

    def choose(self, context, layer, p, head):
        n = p + 1
        k = min(max(self.least, int(self.share * n + 1e-9)), n)
        heads = range(context.model.kv_heads) if self.together else [head]
        weights = sum(self.probabilities(context, layer, p, np.arange(n), g).sum(axis=0)
                      for g in heads)
        self.note(self.key_of(layer, head, chooses=True), *best(weights, k))

    def key_of(self, layer, head, chooses=False):
        if layer == 0 and not chooses:
            return ""
        anchor = max(a for a in self.anchors if a <= layer)
        if self.together:
            return str(anchor)
        if layer != anchor and not isinstance(self.head_map, str):
            head = self.head_map[layer][head]
        return f"{anchor}.{head}"
