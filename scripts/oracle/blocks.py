"""blocks      budget in tokens, block, sinks, recent, representative=mean|max|quest|fixed|dynamic,
            representatives, lists=one|per_kv_head, dense_layers, layer_step, token_step, preselect,
            widen, queries. Block u is tokens [block u, block u + block), the last block what there
            is of it. Prompt rows and the first dense_layers layers read everything. In any other
            layer a decode row at p reads the first ceil(sinks / block) blocks, the last
            floor(recent / block) + 1, and the best of the others, budget / block in all; everything
            where there are no more.
  scores    Of a block, by one query head: the sum over the block's representatives r of q·r, with
              mean, max   one r, of the block's rotated keys so far, value by value
              fixed       its tokens 0, e, 2 e ..., with e = block / representatives
              quest       two, the minima and the maxima: sum over i of max(q_i min_i, q_i max_i)
              dynamic     of a whole block of the prompt, for each KV head, its `representatives`
                          tokens of the highest weight (below), the lower one where equal; of any
                          other block its mean, as often
            Summed over all query heads, or over those of a KV head, which then reads its own
            choice. Equal scores: the lower block is read.
            Of each layer_step layers in a row the first one chooses for all.
            The gap is relative to the largest score, since scores have both signs. It is no larger
            than those of the preselection and of the tokens that stand for blocks.
  weights   Of a token for a KV head: the softmax weights that the last `queries` rows of the
            prompt, each over all tokens up to itself, give it, their mean over the query heads of
            the group, summed over the rows. After a later prompt they are those of its last rows;
            where it has fewer, the answer's rows before it become rows of a prompt.
  token_step  Of so many decode rows, from the first one after the prompt on, the first one chooses,
            and the others read its choice and the last blocks of their own. Rows that read
            everything that is left choose, too, and so does the first row that does not.
  preselect  Of a prompt's blocks between its first and its last ones, those with the highest
            weights, `preselect` of them, are ever read: for all heads, or for each KV head. A block
            has the weights of its tokens, of the `widen` tokens on either side of it, as far as
            they are before the last blocks, and of all KV heads that share the choice.
"""

import numpy as np

from oracle.policy import PerHead, best


class Blocks(PerHead):
    def __init__(self, budget, block=128, sinks=128, recent=4096, representative="mean",
                 representatives=1, lists="one", dense_layers=2, layer_step=1, token_step=1,
                 preselect="off", widen=0, queries=128):
        super().__init__()
        self.block, self.blocks = block, budget // block
        self.first, self.last = -(-sinks // block), recent // block + 1
        self.representative, self.count = representative, representatives
        self.every = block // representatives
        self.together = lists == "one"
        self.dense_layers, self.layer_step = dense_layers, layer_step
        self.token_step, self.widen, self.queries = token_step, widen, queries
        self.preselect = None if preselect == "off" else preselect
        if representative == "dynamic" or self.preselect is not None:
            self.warm_rows = queries
        self.held = {}  # key -> the blocks of the last choice, and its gap
        self.memory = {}  # what was computed of the prompt

    def end_turn(self, context):
        super().end_turn(context)
        self.memory = {}

    def tokens_of(self, context, layer, p, head):
        if layer < self.dense_layers:
            return np.arange(p + 1)
        chooser = layer - (layer - self.dense_layers) % self.layer_step
        if chooser < layer or (self.together and head > 0):
            return self.chosen[self.key_of(layer, head)][-1]
        key = self.key_of(layer, head)
        n = p // self.block + 1
        heads = range(context.model.kv_heads) if self.together else [head]
        never, gap = self.excluded(context, layer, heads)
        if self.reads_rest(p, never):
            self.held[key] = np.setdiff1d(np.arange(n), never), gap or 1
        elif (p - context.n_prompt) % self.token_step == 0 or self.reads_rest(p - 1, never):
            self.held[key] = self.choose(context, layer, p, heads, never, gap)
        chosen, gap = self.held[key]
        read = np.zeros(n, dtype=bool)
        read[chosen] = read[n - self.last:] = True
        tokens = np.arange(p + 1)
        tokens = tokens[read[tokens // self.block]]
        self.note(key, tokens, gap)
        return tokens

    def reads_rest(self, p, never):
        return p // self.block + 1 - len(never) <= self.blocks

    def choose(self, context, layer, p, heads, never, gap):
        """Blocks, those that are always read but for the last ones included; and the gap."""
        scores, exactness = self.scores(context, layer, p, heads)
        between = np.arange(self.first, len(scores) - self.last)
        between = np.setdiff1d(between, np.append(never, self.without_keys(context, len(scores))))
        picked, own = best(scores[between], self.blocks - self.first - self.last,
                           np.abs(scores).max(initial=1e-300))
        gaps = [g for g in (gap, own, exactness) if g > 0]
        return np.append(np.arange(self.first), between[picked]).astype(int), min(gaps, default=0.0)

    def without_keys(self, context, n):
        return []

    def scores(self, context, layer, p, heads):
        """[blocks], by the query heads of these KV heads; and the gap of the representatives."""
        m = context.model
        total = np.zeros(p // self.block + 1)
        exactness = 0.0
        for head in heads:
            q = m.rotate(context.q[layer][m.group(head), p:p + 1], [p])[:, 0]
            keys = self.keys(context, layer, head, p + 1)
            for u in range(len(total)):
                own = keys[u * self.block:(u + 1) * self.block]
                if self.representative == "dynamic":
                    value, gap = self.by_dynamic(context, layer, head, u, q, own)
                    if gap > 0:
                        exactness = min(exactness or gap, gap)
                else:
                    value = getattr(self, "by_" + self.representative)(q, own)
                total[u] += value.sum()
        return total, exactness

    def keys(self, context, layer, head, n):
        return context.model.rotate(context.k[layer][head:head + 1, :n], np.arange(n))[0]

    @staticmethod
    def by_mean(q, own):
        return q @ own.mean(axis=0)

    @staticmethod
    def by_max(q, own):
        return q @ own.max(axis=0)

    @staticmethod
    def by_quest(q, own):
        return np.maximum(q * own.min(axis=0), q * own.max(axis=0)).sum(axis=1)

    def by_fixed(self, q, own):
        return (q @ own[::self.every].T).sum(axis=1)

    def by_dynamic(self, context, layer, head, u, q, own):
        if (u + 1) * self.block > context.n_prompt:
            return self.count * (q @ own.mean(axis=0)), 0.0
        weights = self.weights(context, layer)[head]
        tokens, gap = best(weights[u * self.block:(u + 1) * self.block], self.count)
        return (q @ own[tokens].T).sum(axis=1), gap

    def weights(self, context, layer):
        """[kv_heads, n_prompt]."""
        if ("weights", layer) not in self.memory:
            m, n = context.model, context.n_prompt
            total = np.zeros((m.kv_heads, n), m.dtype)
            for i in range(max(0, n - self.queries), n):
                seen = np.arange(i + 1)
                for head in range(m.kv_heads):
                    a = self.probabilities(context, layer, i, seen, head)
                    total[head, :i + 1] += a.mean(axis=0)
            self.memory["weights", layer] = total
        return self.memory["weights", layer]

    def excluded(self, context, layer, heads):
        """The blocks of the prompt that a preselection leaves out; and its gap."""
        if self.preselect is None:
            return np.zeros(0, dtype=int), 0.0
        at = ("excluded", layer, tuple(heads))
        if at not in self.memory:
            end = (context.n_prompt - 1) // self.block + 1 - self.last
            between = np.arange(self.first, max(end, self.first))
            sums = np.array([self.block_weight(context, layer, heads, u, end) for u in between])
            kept, gap = best(sums, self.preselect)
            self.memory[at] = np.delete(between, kept), gap
        return self.memory[at]

    def block_weight(self, context, layer, heads, u, end):
        tokens = slice(max(0, u * self.block - self.widen),
                       min(end * self.block, (u + 1) * self.block + self.widen))
        return self.weights(context, layer)[list(heads), tokens].sum()

    def key_of(self, layer, head):
        if layer < self.dense_layers:
            return ""
        layer -= (layer - self.dense_layers) % self.layer_step
        return f"{layer}" if self.together else f"{layer}.{head}"
