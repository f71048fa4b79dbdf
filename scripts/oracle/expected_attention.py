"""expected_attention  budget=C, sinks, future, covariance, vnorm, epsilon. Prompt rows read
            everything. After the prompt of N tokens each KV head keeps the C tokens of the highest
            scores, the first `sinks` among them; a prompt of at most C tokens is kept whole. Decode
            rows read what the head kept and all generated tokens. Positions stay those of the text.
  queries   Of a query head, before they are rotated, those of the tokens t >= sinks of the prompt:
            mean m, covariance C (sums over their number). Both are turned by R, the mean of the
            rotations at positions N .. N + future - 1: m' = R m, C' = R C R^T.
  scores    Of token t >= sinks: the softmax over those tokens of m'.k / sqrt(d), and with
            covariance + k.C'k / (2 d); the mean over the query heads of the KV head's group; with
            vnorm (that + epsilon) * |v|. k is rotated by its position. Equal scores: the lower
            token stays.
  recompress  The same after a later prompt, of what the head holds by then, with the queries of the
            later prompt alone.
"""

import numpy as np

from oracle.keys import KeyChoice
from oracle.model import softmax
from oracle.policy import best


class ExpectedAttention(KeyChoice):
    def __init__(self, budget, sinks=4, future=512, covariance=1, vnorm=1, epsilon=0,
                 turn="append"):
        super().__init__(budget, turn)
        self.sinks, self.future, self.epsilon = sinks, future, epsilon
        self.covariance, self.vnorm = covariance, vnorm

    def choose(self, context, layer, head, held):
        if len(held) <= self.budget:
            return np.arange(len(held)), 0.0
        scores = self.scores_of(context, layer, head, held[self.sinks:])
        kept, gap = best(scores, self.budget - self.sinks)
        return np.append(np.arange(self.sinks), kept + self.sinks), gap

    def mean_rotation(self, model, first):
        """[head_dim, head_dim]: of the positions from `first` on, each a matrix."""
        total = np.zeros((model.head_dim, model.head_dim), model.dtype)
        units = np.eye(model.head_dim, dtype=model.dtype)[:, None]
        for position in range(first, first + self.future):
            total += model.rotate(units, [position])[:, 0].T  # columns: what becomes of a unit
        return total / self.future

    def scores_of(self, context, layer, head, tokens):
        """[len(tokens)]."""
        m, n = context.model, context.n_prompt
        k = m.rotate(context.k[layer][head:head + 1, tokens], tokens)[0]
        turn = self.mean_rotation(m, n)
        expected = np.zeros(len(tokens), m.dtype)
        queries = context.q[layer][m.group(head)][:, max(self.first, self.sinks):n]
        for q in queries:
            mean = q.mean(axis=0)
            logits = k @ (turn @ mean) / m.dtype(np.sqrt(m.head_dim))
            if self.covariance:
                apart = q - mean
                spread = turn @ (apart.T @ apart / len(q)) @ turn.T
                logits = logits + ((k @ spread) * k).sum(axis=1) / (2 * m.head_dim)
            expected += softmax(logits) / len(queries)
        if not self.vnorm:
            return expected
        v = context.v[layer][head, tokens]
        return (expected + self.epsilon) * np.sqrt((v * v).sum(axis=1))
