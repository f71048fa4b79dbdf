"""omnikv      Prompt rows read everything, but with prefill=sparse. Decode rows: dense layers are those below the first
            filter, the filters, and with dense_after_filter=1 the layer after each; any other
            reads what the nearest filter below it chose in the same step. With
            select_every_layer=1 each layer from the first filter on chooses from its own scores
            and reads only that.
  scores    A query at position i gives token t <= i the maximum over query heads of its softmax
            over all t' <= i (score=softmax) or of its scaled logits (score=raw); 0 for t > i.
            They are summed over the last `window` queries, prompt queries among them, with
            weight 1 (uniform) or 2^-age (exp); selector=last is a window of 1. With
            lists=per_kv_head each KV head has scores of its own, and reads its own choice: the sum
            over its group's query heads takes the place of the maximum.
  choice    The last g = min(tail, n_gen) tokens are read besides the budget; tail=all: g = n_gen.
            Of the budget the last queries' own tokens come first, unless selector=last: those of
            the last `window` tokens that are not among the g. The rest of it goes to the best of
            the other tokens, prompt or generated, the lower t where equal; but the first `sinks`
            tokens are taken before all others.
  top_p     Of the weight that the candidates (the tokens of `choice` that the budget is spent on)
            have together, the first `sinks` apart, the fewest of the best that have a share p stay,
            of those that the budget takes; the first `sinks` in any case.
  prefill   With prefill=sparse a prompt comes in chunks of `chunk` rows. In a filter layer a token t
            before the chunk has the sum over the chunk's rows of what `scores` says that each gives
            it. The r * rows highest, the first `sinks` tokens before all others, are read by the
            rows of the chunk in the layers that read a choice, with the chunk up to themselves.
  budget    A number of tokens, or what mem=M makes of it: M is the share of all K/V that is read
            if the dense layers read n tokens and the others budget of them, so budget =
            (M layers - dense) / (layers - dense) * n, rounded up.
"""

import math
from fractions import Fraction

import numpy as np

from oracle.model import softmax
from oracle.policy import PerHead, best


class OmniKv(PerHead):
    def __init__(self, filters, budget=0, mem=0.0, tail=256, dense_after_filter=0, selector="last",
                 window=1, score="softmax", select_every_layer=0, lists="one", sinks=0,
                 top_p=1.0, prefill="dense", r=2, chunk=2048):
        super().__init__()
        self.filters, self.budget, self.mem, self.tail = filters, budget, float(mem), tail
        self.dense_after_filter, self.selector = dense_after_filter, selector
        self.window, self.score = window, score
        self.select_every_layer = select_every_layer
        self.per_kv_head, self.sinks, self.top_p = lists == "per_kv_head", sinks, float(top_p)
        self.dense_prompts, self.r = prefill == "dense", r
        self.chunk_rows = 1 if self.dense_prompts else chunk
        self.turn = 0  # the first row of the prompt
        self.of_chunk = {}  # (list, first row of the chunk) -> tokens
        self.prompt_gap = np.inf

    def is_dense(self, layer):
        if layer < self.filters[0]:
            return True
        near = layer in self.filters or (self.dense_after_filter and layer - 1 in self.filters)
        return bool(near and not self.select_every_layer)

    def selects(self, layer):
        return layer in self.filters or (self.select_every_layer and layer >= self.filters[0])

    def later_rows(self, context):
        self.turn = context.n
        return super().later_rows(context)

    def tokens_of(self, context, layer, p, head):
        if p >= context.n_prompt and self.selects(layer) and (self.per_kv_head or head == 0):
            self.choose(context, layer, p, head)
        first = p - (p - self.turn) % self.chunk_rows
        if p < context.n_prompt and not self.dense_prompts and first and self.key_of(layer, head):
            return np.append(self.choice_of_chunk(context, layer, first, head),
                             np.arange(first, p + 1))
        if p < context.n_prompt or not self.key_of(layer, head):
            return np.arange(p + 1)
        return self.chosen[self.key_of(layer, head)][-1]

    def key_of(self, layer, head):  # the filter by whose choice it reads
        if self.is_dense(layer):
            return ""
        return self.list_of(layer if self.select_every_layer else
                            max(f for f in self.filters if f <= layer), head)

    def list_of(self, filter_layer, head):
        return f"{filter_layer}.{head}" if self.per_kv_head else str(filter_layer)

    def choice_of_chunk(self, context, layer, first, head):
        key = (self.key_of(layer, head), first)
        if key not in self.of_chunk:
            filter_layer = max(f for f in self.filters if f <= layer)
            scores = sum(self.weights(context, filter_layer, i, head)[:first]
                         for i in range(first, context.n))
            scores[:self.sinks] = np.inf
            self.of_chunk[key], gap = best(scores, self.r * (context.n - first))
            self.prompt_gap = min(self.prompt_gap, gap or np.inf)
        return self.of_chunk[key]

    def min_gap(self):
        return min(super().min_gap(), self.prompt_gap)

    def weights(self, context, layer, i, head):
        """What the query at i gives each token that it sees [i + 1]."""
        seen = np.arange(i + 1)
        logits = context.logits_of(layer, i, seen, i, seen)
        s = softmax(logits) if self.score == "softmax" else logits
        return s[context.model.group(head)].sum(axis=0) if self.per_kv_head else s.max(axis=0)

    def scores(self, context, layer, p, head):
        """[p + 1]"""
        total = np.zeros(p + 1, context.model.dtype)
        for i in range(max(0, p - self.window + 1), p + 1):
            weight = 2.0 ** (i - p) if self.selector == "exp" else 1.0
            total[:i + 1] += weight * self.weights(context, layer, i, head)
        total[:self.sinks] = np.inf
        return total

    def budget_at(self, context, n):
        if not self.mem:
            return self.budget
        layers = context.model.n_layers
        dense = sum(self.is_dense(layer) for layer in range(layers))
        tokens = (Fraction(str(self.mem)) * layers - dense) / (layers - dense) * n
        return max(1, math.ceil(tokens))

    def split(self, context, budget):
        """The last tokens that are read by themselves, and what the budget leaves of others."""
        n_gen = context.n - context.n_prompt
        recent = n_gen if self.tail == "all" else min(self.tail, n_gen)
        while self.selector != "last" and recent < min(self.window, context.n) and budget:
            recent, budget = recent + 1, budget - 1
        return recent, budget

    def enough(self, scores, among, most):
        """How many of the best among some tokens stay, at most so many; and by how much of all
        weights those may move before another number does (None: whatever they are)."""
        order = np.sort(scores[among])[::-1][:most]
        forced = int(np.isinf(order).sum())
        total = scores[np.isfinite(scores)].sum()
        if self.top_p == 1:
            return most, None
        sums = np.cumsum(np.where(np.isinf(order), 0.0, order))
        wanted = self.top_p * total
        reach = np.flatnonzero(sums >= wanted)
        stay = max(forced, int(reach[0]) + 1) if len(reach) else len(order)
        return stay, float(np.abs(sums[forced:] - wanted).min(initial=np.inf) / total)

    def choose(self, context, layer, p, head, among=None, gap_of_those=0.0):
        """Among these tokens, which another choice left; None: among all that are not read by
        themselves."""
        n = p + 1
        recent, left = self.split(context, self.budget_at(context, n))
        scores = self.scores(context, layer, p, head)[:n - recent]
        among = np.arange(n - recent) if among is None else among
        stay, slack = self.enough(scores, among, left)
        chosen, gap = best(scores[among], stay)
        chosen = among[chosen]
        if slack is not None:
            gap = min(gap, slack) if gap else slack
        gap = gap or gap_of_those
        self.note(self.list_of(layer, head), np.concatenate([chosen, np.arange(n - recent, n)]),
                  gap)
