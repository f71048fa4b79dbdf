"""The tokenizers of make_tokenizer_goldens.py: small ones of every kind that published checkpoints
use (KINDS), and variants of them that exercise one step each (variants).
"""

import json
import struct

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + TAIL
QWEN2 = CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + TAIL
UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTION}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTION}?|\p{{N}}{{1,3}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KIMI = (
    r"[\p{Han}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+" + CONTRACTION + "?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*" + CONTRACTION + r"?|\p{N}{1,3}" + TAIL
)

SPECIAL = ["<unk>", "<s>", "</s>"]
ADDED = [
    AddedToken("<|user|>", special=True, normalized=False),
    AddedToken("<|assistant|>", special=True, normalized=False),
    AddedToken("<|end|>", special=True, normalized=False),
    AddedToken("<tool_call>", special=False, normalized=False),
    AddedToken("  rstrip", special=False, normalized=False, rstrip=True),
    AddedToken("<mask>", special=True, normalized=False, lstrip=True),
]


def corpus(paths, hard):
    """Lines of the texts and a little of everything else."""
    lines = []
    for path in paths:
        with open(path, encoding="utf-8") as f:
            lines += [line.strip() for line in f.read()[:200_000].split("\n") if line.strip()]
    return (
        lines
        + hard * 20
        + [
            "def main():\n    return x + 1\n\nif x == 2:\n\tprint('x')\n",
            "\u4eca\u5929\u5929\u6c14\u5f88\u597d \u4f60\u597d\u4e16\u754c",
            "\u3053\u3093\u306b\u3061\u306f \u6771\u4eac",
            "\ud55c\uad6d\uc5b4 \uc548\ub155",
            "\u043f\u0440\u0438\u0432\u0435\u0442 \u043a\u0430\u043a \u0434\u0435\u043b\u0430",
            "na\u00efve caf\u00e9 \u00fcber stra\u00dfe",
        ]
        * 60
    )


def split_then_bytes(pattern):
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def byte_level(lines, pre, size=1000, normalizer=None, ignore_merges=False, added=True):
    t = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    if normalizer:
        t.normalizer = normalizer
    t.pre_tokenizer = pre
    t.decoder = decoders.ByteLevel()
    t.train_from_iterator(
        lines,
        trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=SPECIAL,
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    if added:
        t.add_tokens(ADDED)
    return t


def llama3(lines):
    t = byte_level(lines, split_then_bytes(LLAMA3), ignore_merges=True)
    t.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
            ),
        ]
    )
    return t


def digits_split(lines):
    return byte_level(
        lines,
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.Split(
                    Regex("[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"), "isolated"
                ),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        ),
    )


def falcon(lines):
    """ByteLevel in the middle: the steps after it see the byte-level alphabet."""
    return byte_level(
        lines,
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Punctuation("contiguous"),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
                pre_tokenizers.Digits(individual_digits=False),
                pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"),
            ]
        ),
    )


def sentencepiece_bpe(lines, normalizer, pre, decoder, size=1200):
    t = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    t.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme="first")
    t.train_from_iterator(
        lines,
        trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=SPECIAL + [f"<0x{i:02X}>" for i in range(256)],
            show_progress=False,
            limit_alphabet=150,
        ),
    )
    j = json.loads(t.to_str())  # published files have the bytes as plain tokens
    j["added_tokens"] = [a for a in j["added_tokens"] if not a["content"].startswith("<0x")]
    t = Tokenizer.from_str(json.dumps(j))
    t.normalizer, t.decoder = normalizer, decoder
    t.pre_tokenizer = pre
    t.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)]
    )
    t.add_tokens(ADDED)
    return t


SP_DECODER = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]


def llama2(lines):
    return sentencepiece_bpe(
        lines,
        normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]),
        None,
        decoders.Sequence(SP_DECODER + [decoders.Strip(content=" ", left=1)]),
    )


def metaspace_first(lines):
    return sentencepiece_bpe(
        lines,
        None,
        pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme="first", split=False),
        decoders.Sequence(SP_DECODER + [decoders.Strip(content=" ", left=1)]),
    )


def gemma(lines):
    return sentencepiece_bpe(
        lines,
        normalizers.Replace(" ", "\u2581"),
        pre_tokenizers.Split(" ", "merged_with_previous"),
        decoders.Sequence(SP_DECODER),
    )


def unigram(lines, byte_fallback=False):
    t = Tokenizer(models.Unigram())
    t.normalizer = normalizers.Sequence(
        [normalizers.Nmt(), normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    t.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme="always")
    t.decoder = decoders.Metaspace(replacement="\u2581", prepend_scheme="always")
    t.train_from_iterator(
        lines,
        trainers.UnigramTrainer(
            vocab_size=700, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
        ),
    )
    if byte_fallback:
        j = json.loads(t.to_str())
        j["model"]["byte_fallback"] = True
        j["model"]["vocab"] += [[f"<0x{i:02X}>", -20.0 - i / 256] for i in range(256)]
        t = Tokenizer.from_str(json.dumps(j))
    t.add_tokens(ADDED)
    return t


def characters(lines):
    """A small BPE on characters, with unknown ones: the base of many variants."""
    t = Tokenizer(models.BPE(unk_token="<unk>"))
    t.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+"), "isolated")
    t.train_from_iterator(
        lines,
        trainers.BpeTrainer(
            vocab_size=400, special_tokens=SPECIAL, show_progress=False, limit_alphabet=150
        ),
    )
    t.add_tokens(ADDED)
    return t


def affixes(lines):
    t = Tokenizer(
        models.BPE(unk_token="<unk>", end_of_word_suffix="</w>", continuing_subword_prefix="##")
    )
    t.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    t.decoder = decoders.BPEDecoder(suffix="</w>")
    t.train_from_iterator(
        lines,
        trainers.BpeTrainer(
            vocab_size=500,
            special_tokens=SPECIAL,
            show_progress=False,
            limit_alphabet=80,
            end_of_word_suffix="</w>",
            continuing_subword_prefix="##",
        ),
    )
    return t


def small_bytes(lines):
    return byte_level(lines, split_then_bytes(LLAMA3), size=400)


KINDS = {
    "gpt2": lambda x: byte_level(x, pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "llama3": llama3,
    "qwen2": lambda x: byte_level(x, split_then_bytes(QWEN2), normalizer=normalizers.NFC()),
    "o200k": lambda x: byte_level(x, split_then_bytes(O200K)),
    "kimi": lambda x: byte_level(x, split_then_bytes(KIMI)),
    "digits_split": digits_split,
    "falcon": falcon,
    "llama2": llama2,
    "metaspace_first": metaspace_first,
    "gemma": gemma,
    "unigram": unigram,
    "unigram_bytes": lambda x: unigram(x, True),
    "characters": characters,
    "affixes": affixes,
    "small_bytes": small_bytes,
}
# Kinds whose streams let every token out at once, but for incomplete characters.
LIVE = {"gpt2", "llama3", "qwen2", "o200k", "kimi", "digits_split", "falcon", "small_bytes"}


def charsmap(entries):
    """sentencepiece's precompiled map: a Darts double array and the replacements it points to."""
    blob, offsets = b"", {}
    for value in sorted(set(entries.values())):
        offsets[value] = len(blob)
        blob += value.encode() + b"\0"
    trie = {}
    for key, value in entries.items():
        node = trie
        for b in key.encode():
            node = node.setdefault(b, {})
        node[0] = offsets[value]
    array, used = {}, {0}

    def place(node):
        base = 1
        while any(base ^ label in used for label in node):
            base += 1
        used.update(base ^ label for label in node)
        return base

    def fill(node, base):
        for label, child in node.items():
            if label == 0:
                array[base] = child | 1 << 31
                continue
            child_base = place(child)
            array[base ^ label] = (
                label | (1 << 8 if 0 in child else 0) | (base ^ label ^ child_base) << 10
            )
            fill(child, child_base)

    root = place(trie)
    array[0] = root << 10
    fill(trie, root)
    size = (max(array) | 255) + 1
    units = struct.pack(f"<{size}I", *(array.get(i, 0) for i in range(size)))
    return struct.pack("<I", len(units)) + units + blob


CHARSMAP = charsmap(
    {
        "\ufb01": "fi",
        "\u2163": "IV",
        "\u2460": "1",
        "\u00a0": " ",
        "\u3000": " ",
        "\t": " ",
        "\n": " ",
        "\u200b": "",
        "e\u0301": "\u00e9",
        "A\u0308": "\u00c4",
        "\u338f": "kg",
        "\uff71": "\u30a2",
        "\uff76": "\u30ab",
        "\uff76\uff9e": "\u30ac",
        "\u1e69": "s\u0323\u0307",
        "\u0130": "I",
        "H": "h",
        "!": "!!",
    }
)


def section(step):
    return json.loads(step.__getstate__())


def variants():
    """[(name, base, {path: value})]: sections of the base that are replaced."""
    n, p, d, r = normalizers, pre_tokenizers, decoders, processors
    out = []

    def add(name, base, **sections):
        out.append(
            (
                name,
                base,
                {
                    k: (
                        section(v)
                        if hasattr(v, "__getstate__")
                        and not isinstance(v, (dict, list, str, int, bool, type(None)))
                        else v
                    )
                    for k, v in sections.items()
                },
            )
        )

    for name, step in {
        "nfc": n.NFC(),
        "nfd": n.NFD(),
        "nfkc": n.NFKC(),
        "nfkd": n.NFKD(),
        "lowercase": n.Lowercase(),
        "strip": n.Strip(),
        "strip_left": n.Strip(left=True, right=False),
        "strip_right": n.Strip(left=False, right=True),
        "accents": n.Sequence([n.NFD(), n.StripAccents()]),
        "accents_only": n.StripAccents(),
        "nmt": n.Nmt(),
        "replace_string": n.Replace("le", "[LE]"),
        "replace_regex": n.Replace(Regex(r"(l)(e)|\d+"), "$1 $2"),
        "prepend": n.Prepend("\u2581 "),
        "bert": n.BertNormalizer(),
        "bert_cased": n.BertNormalizer(lowercase=False),
        "bert_accents": n.BertNormalizer(lowercase=False, strip_accents=True),
        "bert_plain": n.BertNormalizer(False, False, False, False),
        "bert_chinese": n.BertNormalizer(False, True, False, True),
        "sequence": n.Sequence([n.Sequence([n.NFKD(), n.Strip()]), n.Sequence([]), n.Lowercase()]),
        "precompiled": n.Precompiled(CHARSMAP),
    }.items():
        add("norm_" + name, "small_bytes", normalizer=step)
    add("norm_byte_level", "small_bytes", normalizer=n.ByteLevel(), pre_tokenizer=None)

    # Each behaviour, on words; what is removed shows in the ids, how it is cut in the merges.
    for behavior in (
        "removed",
        "isolated",
        "merged_with_previous",
        "merged_with_next",
        "contiguous",
    ):
        for invert in (False, True):
            suffix = behavior + ("_invert" if invert else "")
            add(
                "split_" + suffix,
                "characters",
                pre_tokenizer=p.Split(Regex(r"[aeiou]|\d\d"), behavior, invert=invert),
            )
        add("split_string_" + behavior, "characters", pre_tokenizer=p.Split("th", behavior))
        add("punctuation_" + behavior, "characters", pre_tokenizer=p.Punctuation(behavior))
    for name, step in {
        "whitespace": p.Whitespace(),
        "whitespace_split": p.WhitespaceSplit(),
        "bert": p.BertPreTokenizer(),
        "digits": p.Digits(False),
        "digits_individual": p.Digits(True),
        "delimiter": p.CharDelimiterSplit("e"),
        "empty": p.Split(Regex("x*"), "isolated"),
        "interval": p.Split(Regex(r"\p{N}{2,3}+|\p{L}{2}?\s"), "isolated"),
        "flags": p.Split(Regex(r"a(?i)b|c"), "isolated"),
        "word": p.Split(Regex(r"\b\w{1,3}\b|\W\h"), "removed"),
        "classes": p.Split(
            Regex(r"[a-z&&[^aeiou]]+|[^\w\s[.,]]|[[:upper:]\d]|[\W&&\S]"), "isolated"
        ),
        "lines": p.Split(Regex(r"^\s*\w|.$|(?m:\r.)"), "isolated"),
        "possessive": p.Split(
            Regex(
                r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
                r"|\s*[\r\n]|\s+(?!\S)|\s+"
            ),
            "isolated",
        ),
        "properties": p.Split(
            Regex(
                r"\p{Uppercase_Letter}\p{^Alpha}?|\P{Letter}\p{Cyrillic}|\p{Greek}+"
                r"|[\p{Hiragana}\p{Katakana}]+"
            ),
            "isolated",
        ),
        "look_behind": p.Split(Regex(r"(?<=[a-z])(?=[A-Z])|(?<!\d)\d(?>\d*)(?=\s)"), "isolated"),
    }.items():
        add("pre_" + name, "characters", pre_tokenizer=step)
    for scheme in ("always", "first", "never"):
        for split in (True, False):
            add(
                f"metaspace_{scheme}_{'split' if split else 'whole'}",
                "unigram",
                pre_tokenizer=p.Metaspace(prepend_scheme=scheme, split=split),
                decoder=d.Metaspace(prepend_scheme=scheme),
            )
    add(
        "metaspace_old",
        "unigram",
        pre_tokenizer={
            "type": "Metaspace",
            "replacement": "\u2581",
            "add_prefix_space": True,
            "str_rep": "\u2581",
        },
    )
    add(
        "metaspace_strip",
        "unigram",
        normalizer=n.Strip(),
        pre_tokenizer=p.Metaspace(prepend_scheme="first"),
    )
    add(
        "metaspace_replace",
        "unigram",
        normalizer=n.Replace(Regex(" +"), " "),
        pre_tokenizer=p.Metaspace(prepend_scheme="first"),
    )
    add("byte_level_prefix", "small_bytes", pre_tokenizer=p.ByteLevel(add_prefix_space=True))
    add(
        "byte_level_prefix_split",
        "small_bytes",
        pre_tokenizer=p.Sequence([p.Digits(True), p.ByteLevel(add_prefix_space=True)]),
    )
    add(
        "byte_level_whole",
        "small_bytes",
        pre_tokenizer=p.ByteLevel(add_prefix_space=False, use_regex=False),
    )

    for name, step in {
        "template": r.TemplateProcessing(
            single="<s> $A </s> <s>", pair="$A $B", special_tokens=[("<s>", 1), ("</s>", 2)]
        ),
        "bert": r.BertProcessing(("</s>", 2), ("<s>", 1)),
        "roberta": r.RobertaProcessing(("</s>", 2), ("<s>", 1)),
        "sequence": r.Sequence(
            [r.ByteLevel(), r.Sequence([]), r.RobertaProcessing(("</s>", 2), ("<s>", 1))]
        ),
    }.items():
        add("post_" + name, "small_bytes", post_processor=step)

    for name, step in {
        "none": None,
        "strip": d.Strip("e", 1, 2),
        "strip_fused": d.Sequence([d.Fuse(), d.Strip(" ", 2, 2)]),
        "replace": d.Replace("th", "TH"),
        "replace_regex": d.Replace(Regex("[aeiou]"), "*"),
        "replace_fused": d.Sequence([d.Fuse(), d.Replace("th", "T")]),
        "replace_regex_fused": d.Sequence([d.Fuse(), d.Replace(Regex("[aeiou]+$"), "*")]),
        "word_piece": d.WordPiece("t", True),
        "word_piece_plain": d.WordPiece("e", False),
        "bytes": d.ByteFallback(),
        "bytes_fused": d.Sequence([d.ByteFallback(), d.Fuse()]),
        "metaspace": d.Metaspace(replacement="e"),
        "bpe": d.BPEDecoder("e"),
        "byte_level": d.ByteLevel(),
        "byte_level_strip": d.Sequence([d.ByteLevel(), d.Strip("a", 1, 1)]),
    }.items():
        add("dec_" + name, "characters", decoder=step)
        add("dec_sp_" + name, "llama2", decoder=step)

    for name, model in {
        "no_unk": {"unk_token": None},
        "fuse": {"fuse_unk": True},
        "fallback_missing": {"byte_fallback": True},
        "fallback_fuse": {"byte_fallback": True, "fuse_unk": True},
        "ignore": {"ignore_merges": True},
    }.items():
        for whole in (False, True):
            out.append(
                (
                    f"bpe_{name}{'_whole' if whole else ''}",
                    "characters",
                    dict(
                        {"model." + k: v for k, v in model.items()},
                        **({"pre_tokenizer": None} if whole else {}),
                    ),
                )
            )
    out.append(("bpe_whole", "characters", {"pre_tokenizer": None}))
    for k in ("fuse_unk", "byte_fallback"):
        out.append((f"sp_no_{k}", "llama2", {"model." + k: False}))
    out.append(("sp_no_unk", "llama2", {"model.unk_token": None}))
    out.append(("sp_ignore", "metaspace_first", {"model.ignore_merges": True}))
    out.append(
        (
            "bytes_ignore",
            "small_bytes",
            {
                "model.ignore_merges": True,
                "pre_tokenizer": section(p.ByteLevel(add_prefix_space=False)),
            },
        )
    )

    def token(content, **kw):
        return dict(
            {
                "id": 0,
                "content": content,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": False,
            },
            **kw,
        )

    first = 400  # behind the tokens of small_bytes' model: the library numbers them itself
    for name, normalizer in (("plain", None), ("lower", section(n.Lowercase()))):
        extra = [
            token("word", single_word=True),
            token("CASE", normalized=True),
            token("<mask>", lstrip=True, rstrip=True, special=True),
            token("le tr", normalized=True, lstrip=True),
            token("ell", special=True, normalized=True),
            token("\u4eca\u5929", single_word=True),
            token("aaa"),
            token("aaaaa"),
            token("don't", normalized=True, rstrip=True),
            token(" ", rstrip=True),
            token("<|us"),
            token("<|user|>", special=True),
        ]
        added = [
            token("<unk>", id=0, special=True),
            token("<s>", id=1, special=True),
            token("</s>", id=2, special=True),
        ]
        added += [dict(e, id=first + i) for i, e in enumerate(extra)]
        out.append(
            (f"added_{name}", "small_bytes", {"added_tokens": added, "normalizer": normalizer})
        )
    return out
