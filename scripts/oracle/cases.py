"""The cases of the fixtures: which policy, with which settings, after how much of the prompt."""

import itertools

import numpy as np

from oracle.blocks import Blocks
from oracle.blocks_kt import BlocksKt
from oracle.duo import Duo
from oracle.expected_attention import ExpectedAttention
from oracle.h2o import H2o, Observed
from oracle.infllm import InfLlm
from oracle.kascade import Kascade
from oracle.kcache import KCache
from oracle.keys import KeyDiff, Knorm
from oracle.kvzip import KvZip
from oracle.omnikv import OmniKv
from oracle.omnikv_duo import OmniKvDuo
from oracle.omnikv_indexed import OmniKvIndexed
from oracle.policy import Full
from oracle.pyramidkv import PyramidKv
from oracle.quest import Quest
from oracle.snapkv import SnapKv
from oracle.streaming import Streaming
from oracle.strided import Strided
from oracle.tova import Tova

LAYERS, KV_HEADS, N_PROMPT = 8, 2, 120
LENGTHS = (40, 80, N_PROMPT)  # of prompts
GATES = "full_attention_heads.tsv"  # beside the model
HEAD_MAP = "head_map.tsv"

KINDS = {"full": Full, "streaming": Streaming, "omnikv": OmniKv, "tova": Tova, "snapkv": SnapKv,
         "quest": Quest, "duo": Duo, "kcache": KCache, "knorm": Knorm, "keydiff": KeyDiff,
         "expected_attention": ExpectedAttention, "h2o": H2o, "blocks": Blocks, "strided": Strided,
         "kascade": Kascade, "pyramidkv": PyramidKv, "kvzip": KvZip,
         "infllm": InfLlm, "omnikv_duo": OmniKvDuo}
INDEXED = "omnikv_indexed"  # cases of omnikv that have a file of their own


def gates():
    """Of duo, with layers whose heads all stream, none do, and some do."""
    return np.random.default_rng(5).uniform(size=(LAYERS, KV_HEADS)).round(3)


def head_map():
    """Of kascade, with layers whose heads read the same one, each its own, and each the other's."""
    return np.random.default_rng(3).integers(0, KV_HEADS, size=(LAYERS, KV_HEADS))


def make_policy(policy, settings):
    settings = dict(settings)
    if "filters" in settings:
        settings["filters"] = [int(f) for f in settings["filters"].split(",")]
    if "gates" in settings:
        settings["gates"] = gates()
    if settings.get("head_map", "identity") != "identity":
        settings["head_map"] = head_map()
    if "anchors" in settings:
        settings["anchors"] = [int(a) for a in settings["anchors"].split(",")]
    if policy == "blocks" and settings.pop("compat", "none") == "kt":
        return BlocksKt(**settings)
    if policy == "h2o" and settings.get("mode") == "observed":
        del settings["mode"]
        return Observed(**settings)
    kind = OmniKvIndexed if settings.get("dense") == "indexed" else KINDS[policy]
    return kind(**settings)


def first_cases():
    """Those of full, streaming and omnikv."""
    small = {"budget": 24, "tail": 8}
    out = {"full": ("full", {})}
    for positions in ("original", "cache"):
        out[f"streaming_{positions}"] = (
            "streaming", {"sinks": 4, "budget": 32, "positions": positions})
    selectors = ({"selector": "last"}, {"selector": "uniform", "window": 4},
                 {"selector": "exp", "window": 4})
    for selector, score, dense in itertools.product(selectors, ("softmax", "raw"), (0, 1)):
        out[f"omnikv_{selector['selector']}_{score}_dense{dense}"] = (
            "omnikv", {"filters": "1,4", **small, **selector, "score": score,
                       "dense_after_filter": dense})
    plain = {"filters": "1,4", "selector": "last", "score": "softmax", "dense_after_filter": 0}
    for name, settings in {
        "every_layer": {**plain, **small, "select_every_layer": 1},
        "long_tail": {**plain, "budget": 24, "tail": 64},  # the whole answer
        "tail_all": {**plain, "budget": 8, "tail": "all"},
        "tail_1": {**plain, "budget": 24, "tail": 1},  # most of the answer must be chosen
        "mem": {**plain, "mem": 0.45, "tail": 4},
        "wide_window": {**plain, "budget": 24, "tail": 2, "selector": "uniform", "window": 12},
        "crosses_budget": {**plain, "budget": 140, "tail": 8},  # everything until n = 148
        "covering": {**plain, "budget": 512, "tail": 8},
    }.items():
        out[f"omnikv_{name}"] = ("omnikv", settings)
    out["streaming_another_turn"] = ("streaming", out["streaming_original"][1], N_PROMPT, (60, 7))
    out["omnikv_another_turn"] = ("omnikv", {**plain, **small}, N_PROMPT, (60, 7))
    for budget, n_prompt in itertools.product((12, 32, 48), LENGTHS):
        out[f"omnikv_{budget}_of_{n_prompt}"] = (
            "omnikv", {**plain, "budget": budget, "tail": 8}, n_prompt)
    return out


# Of every other policy: lengths of prompts, what each of three budgets means, and what else there
# is, with the last of the lengths. kcache has lengths at which rounding moves its logits least: its
# weights have no sum of their own to be divided by, which would take a common error out.
OTHERS = {
    "streaming": (
        LENGTHS,
        {budget: {"budget": budget, "sinks": 4, "positions": "original"} for budget in (12, 24, 36)},
        {"no_sinks": {"budget": 24, "sinks": 0}, "one": {"budget": 1, "sinks": 0},
         "many_sinks": {"budget": 24, "sinks": 16},
         "many_sinks_cache": {"budget": 24, "sinks": 16, "positions": "cache"},
         "another_turn": {"budget": 24, "sinks": 4, "first_turn": (60, 7)},
         "another_turn_cache": {"budget": 24, "sinks": 4, "positions": "cache",
                                "first_turn": (60, 7)}}),
    "strided": (LENGTHS, {budget: {"budget": budget} for budget in (24, 32, 56)},
                {"no_sinks": {"budget": 24, "sinks": 0}, "sinks": {"budget": 12, "sinks": 12},
                 "one": {"budget": 1}, "another_turn": {"budget": 24, "first_turn": (60, 7)}}),
    "tova": (LENGTHS, {budget: {"budget": budget} for budget in (16, 32, 56)},
             {"another_turn": {"budget": 32, "first_turn": (60, 7)},
              "short_turns": {"budget": 56, "first_turn": (30, 40)}}),
    "snapkv": (
        LENGTHS,
        {budget: {"budget": budget, "window": window, "pool": "mean", "kernel": 5}
         for budget, window in ((16, 8), (32, 8), (56, 32))},
        {f"{pool}{kernel}": {"budget": 32, "window": window, "pool": pool, "kernel": kernel}
         for pool, kernel, window in (("mean", 1, 8), ("max", 5, 8), ("max", 7, 8),
                                      ("mean", 15, 12), ("max", 15, 12))} |
        {"defaults": {"budget": 48, "pool": "mean"},
         "another_turn": {"budget": 32, "window": 8, "pool": "mean", "first_turn": (70, 7)},
         "recompress": {"budget": 32, "window": 8, "turn": "recompress", "first_turn": (60, 7)},
         "recompress_short": {"budget": 24, "window": 12, "turn": "recompress",
                              "first_turn": (90, 25)},
         "recompress_max": {"budget": 24, "window": 4, "pool": "max", "kernel": 7,
                            "turn": "recompress", "first_turn": (20, 3)}}),
    # pyramidkv has budgets at which the numbers are those of the formula's first branch and of its
    # second, and at which rounding moves its logits least.
    "pyramidkv": (
        LENGTHS,
        {budget: {"budget": budget, "window": window, "pool": "mean", "kernel": 5}
         for budget, window in ((16, 8), (32, 8), (48, 12))},
        {name: {"budget": 32, "window": 8, "pool": "mean", "kernel": 5, **which}
         for name, which in {
             "beta_2": {"beta": 2}, "beta_5": {"beta": 5},
             "max7": {"budget": 48, "pool": "max", "kernel": 7}, "last_chooses_none": {"budget": 15},
             "steep": {"budget": 62, "window": 4}}.items()} |
        {"defaults": {"budget": 48, "pool": "mean"},
         "another_turn": {"budget": 32, "window": 8, "pool": "mean", "first_turn": (70, 7)},
         "recompress": {"budget": 32, "window": 8, "turn": "recompress", "first_turn": (60, 7)},
         "recompress_short": {"budget": 24, "window": 12, "turn": "recompress",
                              "first_turn": (90, 25)},
         "recompress_beta_2": {"budget": 40, "window": 4, "beta": 2, "turn": "recompress",
                               "first_turn": (50, 9)}}),
    # kvzip has ratios at which rounding moves its logits least.
    "kvzip": (
        LENGTHS, {ratio: {"ratio": ratio, "chunk": 64} for ratio in (0.15, 0.3, 0.5)},
        {"no_sinks": {"ratio": 0.4, "chunk": 64, "sinks": 0},
         "sinks": {"ratio": 0.2, "chunk": 64, "sinks": 16},
         "one_chunk": {"ratio": 0.3, "chunk": 128},
         "another_turn": {"ratio": 0.25, "chunk": 64, "first_turn": (60, 7)},
         "recompress": {"ratio": 0.3, "chunk": 64, "turn": "recompress", "first_turn": (55, 9)},
         "recompress_chunks": {"ratio": 0.4, "chunk": 64, "turn": "recompress",
                               "first_turn": (40, 6)},
         "recompress_no_sinks": {"ratio": 0.3, "chunk": 64, "sinks": 0, "turn": "recompress",
                                 "first_turn": (70, 3)},
         "defaults": {"ratio": 0.2}}),
    # knorm has lengths and budgets that do not cut through equal tokens of the first layer, whose keys
    # differ by their rotation alone.
    "knorm": ((40, 104, 112),
              {budget: {"budget": budget} for budget in (16, 18, 28, 32, 56)},
              {"another_turn": {"budget": 16, "first_turn": (40, 7)},
               "recompress": {"budget": 18, "turn": "recompress", "first_turn": (40, 7)},
               "recompress_32": {"budget": 32, "turn": "recompress", "first_turn": (50, 12)}}),
    "keydiff": (LENGTHS, {budget: {"budget": budget} for budget in (8, 16, 24, 32, 56)},
                {"another_turn": {"budget": 24, "first_turn": (70, 7)},
                 "recompress": {"budget": 24, "turn": "recompress", "first_turn": (55, 9)},
                 "recompress_short": {"budget": 40, "turn": "recompress", "first_turn": (90, 25)}}),
    "expected_attention": (
        LENGTHS, {budget: {"budget": budget} for budget in (16, 24, 32, 56)},
        {"mean": {"budget": 24, "covariance": 0}, "no_vnorm": {"budget": 24, "vnorm": 0},
         "no_sinks": {"budget": 24, "sinks": 0}, "sinks": {"budget": 24, "sinks": 12},
         "next": {"budget": 24, "future": 1}, "near": {"budget": 24, "future": 16},
         "epsilon": {"budget": 24, "epsilon": 0.05},
         "another_turn": {"budget": 24, "first_turn": (70, 7)},
         "recompress": {"budget": 24, "turn": "recompress", "first_turn": (60, 7)},
         "recompress_at_once": {"budget": 24, "turn": "recompress", "first_turn": (60, 0)},
         "recompress_mean": {"budget": 32, "turn": "recompress", "covariance": 0, "vnorm": 0,
                             "sinks": 0, "first_turn": (40, 12)}}),
    "h2o": (
        LENGTHS,
        {budget: {"budget": budget} for budget in (16, 32, 56)},
        {"recent_4": {"budget": 32, "recent": 4}, "recent_0": {"budget": 24, "recent": 0},
         "recent_23": {"budget": 24, "recent": 23}, "one": {"budget": 1, "recent": 0},
         "another_turn": {"budget": 32, "first_turn": (60, 7)},
         "another_turn_recent_0": {"budget": 24, "recent": 0, "first_turn": (40, 20)}} |
        {f"observed_{budget}": {"budget": budget, "mode": "observed"} for budget in (16, 32, 56)} |
        {"observed_another_turn": {"budget": 24, "mode": "observed", "first_turn": (60, 7)}} |
        {f"chunked_{chunk}": {"budget": 32, "mode": "chunked", "chunk": chunk}
         for chunk in (16, 40, 100)} |
        {"chunked_recent_4": {"budget": 40, "recent": 4, "mode": "chunked", "chunk": 24},
         "chunked_another_turn": {"budget": 32, "mode": "chunked", "chunk": 16,
                                  "first_turn": (50, 6)},
         "chunked_long_chunk": {"budget": 32, "mode": "chunked", "chunk": 100,
                                "first_turn": (60, 9)}}),
    "quest": (
        LENGTHS,
        {budget: {"budget": budget, "heads": "max"} for budget in (32, 48, 64)} |
        {f"mean_std_{budget}": {"budget": budget, "heads": "max", "score": "mean_std"}
         for budget in (32, 48, 64)},
        {"sum": {"budget": 48, "heads": "sum"}, "mean": {"budget": 64, "heads": "mean"},
         "dense_0": {"budget": 48, "heads": "max", "dense_layers": 0},
         "dense_5": {"budget": 32, "heads": "sum", "dense_layers": 5},
         "mean_std_sum": {"budget": 48, "heads": "sum", "score": "mean_std"},
         "mean_std_dense_0": {"budget": 48, "heads": "max", "dense_layers": 0,
                              "score": "mean_std"},
         "another_turn": {"budget": 48, "heads": "max", "first_turn": (60, 7)},
         "mean_std_another_turn": {"budget": 48, "heads": "max", "score": "mean_std",
                                   "first_turn": (50, 11)}}),
    # What came after the cases of first_cases.
    "omnikv": (
        LENGTHS,
        {budget: {"filters": "1,4", "dense_after_filter": 0, "budget": budget, "tail": 4,
                  "lists": "per_kv_head"} for budget in (12, 24, 48)},
        {name: {"filters": "1,4", "dense_after_filter": 1, "budget": 24, "tail": 4, **which}
         for name, which in {
             "uniform_by_head": {"lists": "per_kv_head", "selector": "uniform", "window": 4},
             "exp_by_head": {"lists": "per_kv_head", "selector": "exp", "window": 4, "sinks": 3},
             "raw_by_head": {"lists": "per_kv_head", "score": "raw"},
             "every_layer_by_head": {"lists": "per_kv_head", "select_every_layer": 1},
             "another_turn_by_head": {"lists": "per_kv_head", "first_turn": (60, 7)},
             "sinks": {"sinks": 4},
             "sinks_raw": {"sinks": 4, "score": "raw"},
             "sinks_uniform": {"sinks": 4, "selector": "uniform", "window": 4}}.items()} |
        {f"top_p_{name}": {"filters": "1,4", "dense_after_filter": 0, "budget": 48, "tail": 4,
                           **which}
         for name, which in {
             "40": {"top_p": 0.4}, "70": {"top_p": 0.7},
             "90_of_24": {"top_p": 0.9, "budget": 24},  # mostly the budget
             "by_head": {"top_p": 0.5, "lists": "per_kv_head"},
             "sinks": {"top_p": 0.3, "sinks": 4, "dense_after_filter": 1},
             "uniform": {"top_p": 0.5, "selector": "uniform", "window": 4},
             "exp_by_head": {"top_p": 0.6, "selector": "exp", "window": 4, "sinks": 3,
                             "lists": "per_kv_head"},
             "every_layer": {"top_p": 0.5, "select_every_layer": 1}}.items()} |
        {f"sparse_prompt_{name}": {"filters": "1,4", "dense_after_filter": 0, "budget": 24,
                                   "tail": 4, "prefill": "sparse", **which}
         for name, which in {
             "1_of_16": {"r": 1, "chunk": 16}, "2_of_16": {"r": 2, "chunk": 16},
             "1_of_40": {"r": 1, "chunk": 40}, "short_last": {"r": 1, "chunk": 35},
             "raw": {"r": 2, "chunk": 16, "score": "raw"},
             "sinks": {"r": 1, "chunk": 20, "sinks": 4},
             "by_head": {"r": 1, "chunk": 24, "lists": "per_kv_head", "sinks": 2},
             "window": {"r": 1, "chunk": 16, "selector": "uniform", "window": 4,
                        "dense_after_filter": 1},
             "another_turn": {"r": 1, "chunk": 16, "first_turn": (53, 6)}}.items()}),
    "blocks": (
        LENGTHS,
        {budget: {"budget": budget, "block": 8, "sinks": 8, "recent": 8} for budget in (40, 56, 72)},
        {name: {"budget": 56, "block": 8, "sinks": 8, "recent": 8, **which}
         for name, which in {
             "max": {"representative": "max"},
             "quest": {"representative": "quest"},
             "another_turn": {"first_turn": (60, 7)},
             "another_turn_steps": {"token_step": 7, "lists": "per_kv_head",
                                    "representative": "quest", "first_turn": (55, 9)},
             "another_turn_dynamic": {"representative": "dynamic", "queries": 12,
                                      "first_turn": (60, 9)},
             "another_turn_preselect": {"preselect": 6, "queries": 16, "first_turn": (50, 11)},
             "short_turn_dynamic": {"representative": "dynamic", "queries": 32, "preselect": 5,
                                    "first_turn": (92, 9)},
             "fixed_1": {"representative": "fixed"},
             "fixed_4": {"representative": "fixed", "representatives": 4},
             "per_kv_head": {"lists": "per_kv_head"},
             "quest_per_kv_head": {"representative": "quest", "lists": "per_kv_head"},
             "layers_2": {"layer_step": 2, "dense_layers": 1},
             "layers_3": {"layer_step": 3, "dense_layers": 0, "lists": "per_kv_head"},
             "no_sinks": {"sinks": 0, "recent": 0},
             "sinks_in_part": {"sinks": 3, "recent": 21},
             "small": {"block": 2, "budget": 24, "sinks": 4, "recent": 6},
             "large": {"block": 32, "budget": 96, "sinks": 32, "recent": 0},
             "steps_2": {"token_step": 2},
             "steps_7": {"token_step": 7, "lists": "per_kv_head"},
             "steps_and_layers": {"token_step": 5, "layer_step": 2, "representative": "quest"},
             "steps_100": {"token_step": 100},
             # Everything until n = 136, in the midst of a phase.
             "steps_cross": {"token_step": 9, "budget": 136},
             "dynamic": {"representative": "dynamic", "queries": 16},
             "dynamic_3": {"representative": "dynamic", "representatives": 3, "queries": 32,
                           "lists": "per_kv_head"},
             "dynamic_steps": {"representative": "dynamic", "representatives": 2, "queries": 8,
                               "token_step": 3, "layer_step": 3},
             "dynamic_small": {"representative": "dynamic", "queries": 4, "block": 4,
                               "budget": 32, "sinks": 4, "recent": 4, "dense_layers": 0},
             "preselect": {"preselect": 6, "queries": 16},
             "preselect_all_read": {"preselect": 3, "queries": 8, "budget": 96},
             "preselect_by_head": {"preselect": 6, "queries": 16, "lists": "per_kv_head",
                                   "representative": "quest", "widen": 3},
             "preselect_tokens": {"preselect": 20, "queries": 12, "lists": "per_kv_head",
                                  "block": 1, "sinks": 2, "recent": 6, "budget": 40,
                                  "dense_layers": 0},
             "preselect_dynamic": {"preselect": 7, "queries": 16, "representative": "dynamic",
                                   "token_step": 4, "widen": 2},
             "preselect_0": {"preselect": 0, "queries": 16, "token_step": 6}}.items()} |
        {f"kt_{name}": {"budget": 56, "block": 8, "sinks": 8, "recent": 8, "compat": "kt",
                        **which}
         for name, which in {
             "mean": {},
             "max": {"representative": "max", "lists": "per_kv_head"},
             "fixed_4": {"representative": "fixed", "representatives": 4},
             "quest": {"representative": "quest"},
             "quest_per_kv_head": {"representative": "quest", "lists": "per_kv_head"},
             "dynamic": {"representative": "dynamic", "queries": 16},
             "dynamic_3": {"representative": "dynamic", "representatives": 3, "queries": 16,
                           "lists": "per_kv_head"},
             "shipped": {"representative": "dynamic", "queries": 32, "preselect": 8,
                         "token_step": 10},
             "another_turn": {"first_turn": (60, 7)},
             "another_turn_dynamic": {"representative": "dynamic", "queries": 12, "preselect": 6,
                                      "first_turn": (60, 7)},
             "preselect_by_head": {"representative": "max", "preselect": 6, "queries": 16,
                                   "lists": "per_kv_head", "widen": 1}}.items()}),
    "infllm": (
        LENGTHS,
        {budget: {"budget": budget, "block": 8, "sinks": 8, "recent": 16, "representatives": 2,
                  "chunk": 12, "cache": 4} for budget in (8, 16, 24)},
        {name: {"budget": 16, "block": 8, "sinks": 8, "recent": 16, "representatives": 2,
                "chunk": 12, "cache": 4, **which}
         for name, which in {
             "no_sinks": {"sinks": 0}, "sinks_16": {"sinks": 16}, "recent_40": {"recent": 40},
             "one_representative": {"representatives": 1},
             "all_representatives": {"representatives": 8},
             "small": {"block": 2, "budget": 12, "sinks": 4, "cache": 9},
             "large": {"block": 24, "budget": 24, "sinks": 24, "representatives": 4},
             "another_turn": {"first_turn": (60, 7)},
             "another_turn_late": {"budget": 24, "first_turn": (90, 11)},
             "chunk_1": {"chunk": 1, "recent": 17}, "chunk_is_window": {"chunk": 24, "recent": 24},
             "odd": {"block": 5, "budget": 15, "sinks": 10, "recent": 13, "chunk": 7,
                     "cache": 3}}.items()}),
    INDEXED: (
        LENGTHS,
        {budget: {"filters": "1,4", "dense_after_filter": 0, "budget": budget, "tail": 4,
                  "dense": "indexed"} for budget in (8, 16, 28)},
        {name: {"filters": "1,4", "dense_after_filter": 0, "budget": 16, "tail": 4,
                "dense": "indexed", **which}
         for name, which in {
             "rescore_1": {"rescore": 1, "budget": 12},
             "rescore_2": {"rescore": 2, "dense_after_filter": 1},
             "rescore_all": {"rescore": 100, "budget": 20},
             "another_turn": {"rescore": 2, "first_turn": (60, 7)},
             "raw": {"score": "raw", "rescore": 2},
             "by_head": {"lists": "per_kv_head"},
             "raw_by_head": {"lists": "per_kv_head", "score": "raw", "rescore": 1},
             "uniform": {"selector": "uniform", "window": 4, "rescore": 2},
             "exp_by_head": {"lists": "per_kv_head", "selector": "exp", "window": 4, "sinks": 3},
             "every_layer": {"select_every_layer": 1, "rescore": 2}}.items()} |
        {"mem": {"filters": "1,4", "dense_after_filter": 0, "mem": 0.25, "tail": 4,
                 "dense": "indexed", "rescore": 2}}),
    "kascade": (
        LENGTHS,
        {share: {"anchors": "0,2,5", "head_map": HEAD_MAP, "share": share, "least": 8}
         for share in (0.1, 0.25, 0.5)},
        {name: {"anchors": "0,2,5", "head_map": HEAD_MAP, "share": 0.2, "least": 8, **which}
         for name, which in {"identity": {"head_map": "identity"}, "one": {"lists": "one"},
                             "least": {"least": 40}, "first": {"anchors": "0"},
                             "all": {"anchors": "0,1,2,3,4,5,6,7"},
                             "another_turn": {"first_turn": (60, 7)}}.items()} |
        {f"sparse_prompt_{name}": {"anchors": "0,2,5", "head_map": HEAD_MAP, "share": 0.2,
                                   "least": 8, "prefill": "sparse", "tile": 8, **which}
         for name, which in {"8": {}, "32": {"tile": 32}, "1": {"tile": 1, "share": 0.3},
                             "short_last": {"tile": 7}, "most": {"share": 0.6}, "least": {"least": 40},
                             "identity": {"head_map": "identity"}, "one": {"lists": "one"},
                             "first": {"anchors": "0"}}.items()}),
    "duo": (
        LENGTHS,
        {sinks + recent: {"gates": GATES, "sinks": sinks, "recent": recent, "sparsity": 0.5}
         for sinks, recent in ((2, 10), (4, 16), (4, 40))},
        {name: {"gates": GATES, "sinks": 4, "recent": 16, **which}
         for name, which in {"quarter": {"sparsity": 0.25}, "most": {"sparsity": 0.75},
                             "all": {"sparsity": 1}, "by_layer": {"sparsity": 0.4, "by_layer": 1},
                             "threshold": {"threshold": 0.4}}.items()} |
        {"no_sinks": {"gates": GATES, "sinks": 0, "recent": 24, "sparsity": 0.5},
         "another_turn": {"gates": GATES, "sinks": 4, "recent": 16, "sparsity": 0.5,
                          "first_turn": (60, 7)}}),
    "omnikv_duo": (
        LENGTHS,
        {budget: {"gates": GATES, "sparsity": 0.5, "stream_sinks": sinks, "stream_recent": recent,
                  "filters": "1,4", "dense_after_filter": 0, "budget": budget, "tail": 4}
         for budget, sinks, recent in ((12, 2, 10), (24, 4, 16), (48, 4, 24))},
        {name: {"gates": GATES, "sparsity": 0.5, "stream_sinks": 4, "stream_recent": 16,
                "filters": "1,4", "dense_after_filter": 1, "budget": 24, "tail": 4, **which}
         for name, which in {
             "quarter": {"sparsity": 0.25}, "most": {"sparsity": 0.75, "filters": "4"},
             "by_layer": {"by_layer": 1}, "no_sinks": {"stream_sinks": 0, "stream_recent": 24},
             "raw": {"score": "raw", "sparsity": 0.25}, "sinks": {"sinks": 3, "tail": "all"},
             "uniform": {"selector": "uniform", "window": 4, "dense_after_filter": 0},
             "exp_raw": {"selector": "exp", "window": 4, "score": "raw"},
             "top_p": {"top_p": 0.5, "budget": 48}, "another_turn": {"first_turn": (60, 7)},
             "every_layer": {"select_every_layer": 1, "by_layer": 1}}.items()} |
        {"mem": {"gates": GATES, "sparsity": 0.4, "stream_sinks": 4, "stream_recent": 16,
                 "filters": "1,4", "dense_after_filter": 0, "mem": 0.5, "tail": 4}}),
    "kcache": (
        (56, 72, 48),
        {budget: {"budget": budget, "renormalise": "off", "first_layers": 1}
         for budget in (8, 16, 24)},
        {"renormalised": {"budget": 16, "renormalise": "on", "first_layers": 1},
         "all": {"budget": 56, "renormalise": "off", "first_layers": 0},
         "renormalised_4": {"budget": 4, "renormalise": "on", "first_layers": 2},
         "first_0": {"budget": 8, "renormalise": "off", "first_layers": 0},
         "per_head": {"budget": 8, "lists": "per_head", "renormalise": "off", "first_layers": 1},
         "per_head_renormalised": {"budget": 16, "lists": "per_head", "renormalise": "on",
                                   "first_layers": 1, "first_turn": (30, 5)},
         "another_turn": {"budget": 16, "renormalise": "on", "first_layers": 1,
                          "first_turn": (30, 5)},
         "first_4": {"budget": 8, "renormalise": "off", "first_layers": 4}}),
}


def cases():
    """Name of a fixture -> name of a case -> (policy, settings as the engine's --set takes them[,
    tokens of the prompt])."""
    out = {"policies": first_cases()}
    for policy, (lengths, budgets, others) in OTHERS.items():
        own = out[f"policies_{policy}"] = {}
        for (budget, settings), n_prompt in itertools.product(budgets.items(), lengths):
            own[f"{policy}_{budget}_of_{n_prompt}"] = (policy, settings, n_prompt)
        for name, settings in others.items():
            settings = dict(settings)
            first_turn = settings.pop("first_turn", None)
            own[f"{policy}_{name}"] = (policy, settings, lengths[-1], first_turn)
    own = out[f"policies_{INDEXED}"]
    own.update({name: ("omnikv", *case) for name, (_, *case) in own.items()})
    return out
