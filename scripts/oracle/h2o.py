"""h2o         budget=C, recent=R (default C / 2), mode=full|observed|chunked, chunk=T. Prompt rows read
            everything. A prompt of at most C tokens is kept whole. Positions stay those of the text.
  sums      Of a KV head and token t: the softmax weights that queries gave it so far, each over what
            it read, their mean over the query heads of the group, summed over the queries.
  full      After the prompt of N tokens a KV head keeps the last R and the C - R of the highest sums
            of the others. A decode row reads what is kept and itself, and its weights join the sums;
            its own weight begins that of its token. When more than C are then held, the one of the
            lowest sum goes, but for the last R tokens of the context. Equal sums: the lower token
            stays.
  chunked   As full, but a prompt comes in chunks that end at multiples of T. A row of a chunk reads
            what is kept of those before it, and the chunk up to itself. After each chunk, whose
            weights join the sums, a head keeps C tokens as full does after the prompt.
  observed  (R = 0) Once after the first prompt: the C tokens with the highest sums / (N - t), the
            mean over the queries that saw token t. Later tokens stay.
"""

import numpy as np

from oracle.model import softmax
from oracle.policy import KeepsOnce, PerHead, best


def sums_of_prompt(rule, context, layer, head):
    n = context.n_prompt
    sums = np.zeros(n, context.model.dtype)
    for i in range(n):
        sums[:i + 1] += rule.probabilities(context, layer, i, np.arange(i + 1), head).mean(axis=0)
    return sums


class Observed(KeepsOnce):
    def __init__(self, budget):
        super().__init__()
        self.budget = budget

    def choose(self, context, layer, head, held):
        saw = len(held) - held  # queries that saw each token
        return best(sums_of_prompt(self, context, layer, head) / saw, min(self.budget, len(held)))


class H2o(PerHead):
    def __init__(self, budget, recent=None, mode="full", chunk=2048):
        super().__init__()
        self.budget = budget
        self.chunk = chunk if mode == "chunked" else 0
        self.dense_prompts = self.chunk == 0
        self.recent = budget // 2 if recent is None else recent
        self.held, self.sums = {}, {}  # key -> tokens, ascending, and their sums
        self.rows = None  # of a later prompt

    def tokens_of(self, context, layer, p, head):
        key = self.key_of(layer, head)
        n = context.n_prompt
        if self.chunk and p <= n and self.rows is None:
            first = (p - 1) // self.chunk * self.chunk  # of the chunk before this row, if it is over
            if p == 0:
                self.held[key], self.sums[key] = np.arange(0), np.zeros(0, context.model.dtype)
            elif p == n or p % self.chunk == 0:
                self.take_chunk(context, layer, head, np.arange(first, p))
                self.keep_best(key, p)
            if p < n:
                return np.append(self.held[key], np.arange(p // self.chunk * self.chunk, p + 1))
        elif p == n and self.rows is None:
            self.held[key] = np.arange(n)
            self.sums[key] = sums_of_prompt(self, context, layer, head)
            self.keep_best(key, n)
        elif p == n:
            self.take_chunk(context, layer, head, np.arange(self.rows.begin[key], n))
            self.keep_best(key, n)
        else:
            self.take_row(context, layer, head, p - 1)
        tokens = np.append(self.held[key], p)
        self.note(key, tokens, self.gap)
        return tokens

    def take_row(self, context, layer, head, p):
        """Adds what the query at p gave the tokens that it read, of which the best stay."""
        key = self.key_of(layer, head)
        self.held[key] = read = np.append(self.held[key], p)
        weights = self.probabilities(context, layer, p, read, head).mean(axis=0)
        self.sums[key] = np.append(self.sums[key], 0) + weights
        self.keep_best(key, p + 1)

    def later_rows(self, context):
        self.rows = RowsOfATurn(self)
        return self.rows

    def take_chunk(self, context, layer, head, rows):
        key = self.key_of(layer, head)
        before = self.held[key]
        self.held[key] = np.append(before, rows)
        self.sums[key] = np.append(self.sums[key], np.zeros(len(rows), context.model.dtype))
        for i, p in enumerate(rows):
            seen = np.append(before, rows[:i + 1])
            weights = self.probabilities(context, layer, p, seen, head).mean(axis=0)
            self.sums[key][:len(seen)] += weights

    def keep_best(self, key, n):
        """Of what is held of n tokens in context."""
        held, sums = self.held[key], self.sums[key]
        self.gap = 0.0
        if len(held) <= self.budget:
            return
        old = np.flatnonzero(held < n - self.recent)
        kept, self.gap = best(sums[old], self.budget - (len(held) - len(old)))
        rows = np.append(old[kept], np.flatnonzero(held >= n - self.recent))
        self.held[key], self.sums[key] = held[rows], sums[rows]

    def key_of(self, layer, head):
        return f"{layer}.{head}"


class RowsOfATurn(PerHead):
    """Rows of a later prompt: they read what their KV head held before them, and one another."""

    def __init__(self, policy):
        super().__init__()
        self.policy, self.begin = policy, {}  # key -> the first row of the chunk

    def tokens_of(self, context, layer, p, head):
        policy, key = self.policy, self.policy.key_of(layer, head)
        if key not in self.begin:
            policy.take_row(context, layer, head, p - 1)
            self.begin[key] = p
        elif policy.chunk and p % policy.chunk == 0:
            policy.take_chunk(context, layer, head, np.arange(self.begin[key], p))
            policy.keep_best(key, p)
            self.begin[key] = p
        return np.append(policy.held[key], np.arange(self.begin[key], p + 1))
