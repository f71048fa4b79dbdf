"""kvzip       ratio=R, sinks=S, chunk=C, turn=append|recompress. Prompt rows read everything. The
            prompt of N tokens falls into chunks of C, the last one shorter. For each chunk, the
            model reads the chunk's tokens once more, as rows at the positions N, N + 1 and so on
            that read everything before them, and forgets them again. (With a tokenizer, the request
            to repeat the chunk comes first.)
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


class Pass(PerHead):
    """Rows that read what their KV head kept and everything since."""

    def __init__(self, kept, since):
        super().__init__()
        self.kept, self.since = kept, since

    def tokens_of(self, context, layer, p, head):
        return np.append(self.kept[layer, head], np.arange(self.since, p + 1))


class KvZip(PerHead):
    def __init__(self, ratio, sinks=4, chunk=2048, turn="append"):
        super().__init__()
        self.ratio, self.sinks, self.chunk, self.turn = ratio, sinks, chunk, turn
        self.kept, self.since = {}, 0  # of the tokens before `since`

    def later_rows(self, context):
        return Pass(self.kept, self.since)

    def tokens_of(self, context, layer, p, head):
        if self.key_of(layer, head) not in self.chosen:
            gap = 0.0
            if self.since == 0 or self.turn == "recompress":
                gap = self.choose(context, p)
            for at in self.kept:
                self.note(self.key_of(*at), np.append(self.kept[at], np.arange(self.since, p + 1)),
                          gap)
        return np.append(self.kept[layer, head], np.arange(self.since, p + 1))

    def key_of(self, layer, head):
        return f"{layer}.{head}"

    def choose(self, context, n):
        """Chooses of the tokens from `since` to n; the gap of the choice."""
        m, since = context.model, self.since
        if not self.kept:
            self.kept = {(layer, head): np.zeros(0, int)
                         for layer in range(m.n_layers) for head in range(m.kv_heads)}
        scores = np.zeros((m.n_layers, m.kv_heads, n - since))
        for begin in range(since, n, self.chunk):
            end = min(begin + self.chunk, n)
            scores[:, :, begin - since:end - since] = self.repeat(context, n, begin, end)
        first = min(self.sinks, n) if since == 0 else 0
        others = n - since - first
        best_ones, gap = best(scores[:, :, first:].reshape(-1),
                              int(self.ratio * (others * m.n_layers * m.kv_heads)))
        stays = np.zeros(m.n_layers * m.kv_heads * others, bool)
        stays[best_ones] = True
        stays = stays.reshape(m.n_layers, m.kv_heads, others)
        for at in self.kept:
            self.kept[at] = np.concatenate([self.kept[at], np.arange(first),
                                            since + first + np.flatnonzero(stays[at])])
        self.since = n
        return gap

    def repeat(self, context, n, begin, end):
        """Scores [layers, kv_heads, end - begin] of the tokens of a chunk."""
        m = context.model
        again = Context(m, n + end - begin)
        for name in ("q", "k", "v"):
            getattr(again, name)[:, :, :n] = getattr(context, name)[:, :, :n]
        again.n = n
        again.append_rows(self.prompt[begin:end], Pass(self.kept, self.since))
        sinks = np.arange(min(self.sinks, self.since or begin))
        scores = np.zeros((m.n_layers, m.kv_heads, end - begin))
        for layer in range(m.n_layers):
            for row in range(n, n + end - begin):
                seen = np.concatenate([sinks, np.arange(begin, end), np.arange(n, row + 1)])
                a = softmax(again.logits_of(layer, row, seen, row, seen))
                a = a[:, len(sinks):][:, :end - begin]
                for head in range(m.kv_heads):
                    of_group = a[m.group(head)].max(axis=0)
                    scores[layer, head] = np.maximum(scores[layer, head], of_group)
        return scores
