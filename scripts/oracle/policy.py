"""What the rules of policies share: full attention, KV heads with lists of their own, a choice.

A rule says for the row at position p of a layer which tokens it reads, and notes what it chose:
    chosen  key -> for every decode step the tokens that are read; where there are fewer than steps,
            the last, and the tokens that came after it
    gaps    key -> for every decode step the gap of that choice, as `best` defines it
"""

import numpy as np

from oracle.model import softmax


def best(scores, n, size=None):
    """The n highest of the scores [m], ascending, the lower one where equal; and the gap: by how
    much the scores may move, relative to the last one chosen (or to `size`), before others are. 0:
    nothing was left out."""
    order = np.argsort(-scores, kind="stable")
    if not 0 < n < len(order):
        return np.sort(order[:n]), 0.0
    last, rejected = scores[order[n - 1]], scores[order[n]]
    gap = last - rejected
    if gap == 0:  # equal they stay, but another score may come among them
        others = np.abs(scores - last)
        gap = others[others > 0].min(initial=np.inf)
    return np.sort(order[:n]), float(gap / (size or abs(last)))


class Full:
    """Every row reads everything; the base of the others."""
    dense_prompts = True  # prompt rows do, so that policies may share them
    chunk_rows = 1  # of a prompt, which pass through the layers together
    warm_rows = 1  # at the end of a later prompt that it computes, anew where they were there

    def __init__(self):
        self.chosen, self.gaps = {}, {}

    def reads(self, context, layer, p):
        """The tokens read, the positions that their keys are rotated by, and that of the query, or
        one for each token."""
        everything = np.arange(p + 1)
        return everything, everything, p

    def attend(self, context, layer, p):
        """What the row gets from attention [heads * head_dim]."""
        tokens, key_positions, query_position = self.reads(context, layer, p)
        a = softmax(context.logits_of(layer, p, tokens, query_position, key_positions))
        m = context.model
        v = np.repeat(context.v[layer][:, tokens], m.heads // m.kv_heads, axis=0)
        return (a[:, None] @ v).reshape(-1)

    def key_of(self, layer, head):
        """The key of `chosen` by which a KV head of a layer reads; empty: everything."""
        return ""

    def keys_of(self, layer, model):
        """The keys by which a layer reads: one for each KV head, or one for each query head."""
        return [self.key_of(layer, head) for head in range(model.kv_heads)]

    def later_rows(self, context):
        """The rule for the rows of a later prompt. A policy of its own for them takes all rows up
        to their end for those of a prompt."""
        if self.dense_prompts:
            return Full()
        context.n_prompt = context.capacity
        return self

    def end_turn(self, context):
        """After the rows of a later prompt: those of its answer follow."""
        self.chosen, self.gaps = {}, {}
        context.n_prompt = context.n

    def note(self, key, tokens, gap):
        self.chosen.setdefault(key, []).append(tokens)
        self.gaps.setdefault(key, []).append(gap)

    def min_gap(self):
        return min((g for gaps in self.gaps.values() for g in gaps if g > 0), default=np.inf)


class HeldByLayer(Full):
    """Decode rows of a layer read what it holds. What that is, `kept(context, layer, p)` says: the
    tokens that stay before row p comes, of those in `held`, and the gap of that choice. Rows of a
    prompt are all held up to its end."""

    def __init__(self):
        super().__init__()
        self.held = {}  # layer -> tokens that it has when the next row comes; none yet: all

    def later_rows(self, context):
        self.rows = RowsOfATurn(self)
        return self.rows

    def end_turn(self, context):
        super().end_turn(context)
        for layer, held in self.rows.held.items():
            self.held[layer] = np.append(held, np.arange(self.rows.first, context.n))


class RowsOfATurn(Full):
    """Rows of a later prompt that read what their layer held before them, and one another."""

    def __init__(self, policy):
        super().__init__()
        self.policy, self.held = policy, {}

    def reads(self, context, layer, p):
        if layer not in self.held:
            self.held[layer], self.first = self.policy.kept(context, layer, p)[0], p
        tokens = np.append(self.held[layer], np.arange(self.first, p + 1))
        return tokens, tokens, p


class PerHead(Full):
    """Every KV head reads tokens of its own, which keep their positions."""

    def tokens_of(self, context, layer, p, head):
        """The tokens that a KV head reads."""
        raise NotImplementedError

    def probabilities(self, context, layer, p, tokens, head):
        """Softmax over tokens [group, len(tokens)] of the query heads of a KV head."""
        return softmax(context.logits_of(layer, p, tokens, p, tokens)[context.model.group(head)])

    def attend(self, context, layer, p):
        out = []
        for head in range(context.model.kv_heads):
            tokens = self.tokens_of(context, layer, p, head)
            a = self.probabilities(context, layer, p, tokens, head)
            out.append(a @ context.v[layer][head, tokens])
        return np.concatenate(out).reshape(-1)


class KeepsOnce(PerHead):
    """Chooses once, after the first prompt; with turn="recompress" after each prompt, of what is
    then held. All that comes later is read, in later prompts too."""

    def __init__(self, turn="append"):
        super().__init__()
        self.recompress = turn == "recompress"
        self.first = 0  # row of the prompt that ends in the choice
        self.held = {}  # key -> tokens among which it chooses; none yet: the whole prompt

    def choose(self, context, layer, head, held):
        """The places of what stays in `held`, ascending, and the gap."""
        raise NotImplementedError

    def tokens_of(self, context, layer, p, head):
        key, n = self.key_of(layer, head), context.n_prompt
        if key not in self.chosen:
            held = self.held.get(key, np.arange(n))
            kept, gap = self.choose(context, layer, head, held)
            self.note(key, np.append(held[kept], n), gap)
        return np.append(self.chosen[key][0], np.arange(n + 1, p + 1))

    def key_of(self, layer, head):
        return f"{layer}.{head}"

    def later_rows(self, context):
        for layer, head in np.ndindex(context.model.n_layers, context.model.kv_heads):
            self.tokens_of(context, layer, context.n_prompt, head)  # where no answer came between
        self.first = context.n
        return self

    def end_turn(self, context):
        since = context.n_prompt + 1
        if self.recompress:
            self.held = {key: np.append(steps[0], np.arange(since, context.n))
                         for key, steps in self.chosen.items()}
            self.chosen, self.gaps = {}, {}
        else:
            self.chosen = {key: [np.append(steps[0], np.arange(since, context.n + 1))]
                           for key, steps in self.chosen.items()}
        context.n_prompt = context.n
