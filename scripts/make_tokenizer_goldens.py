#!/usr/bin/env python3
"""Trains small tokenizers of every kind that tokenizer.json knows, and writes what the Hugging Face
tokenizers library makes of hard and of random strings: the data of tests/text/tokenizer.

    python scripts/make_tokenizer_goldens.py TEXT... [--out tests/text/tokenizer/data]

TEXT: plain text to train on (some of it; any English will do, but other text gives other goldens).
Needs the tokenizers package, and libpcre2-8 and libutf8proc to tell on which code points their
version of Unicode and that of tokenizers agree.

OUT/NAME.tokenizer.json  the tokenizers (kinds)
OUT/variants.json        more kinds, each as sections that replace those of a tokenizer above
OUT/strings.json         hard strings, the material of random strings, excluded code points
OUT/NAME.golden.json     per kind: hard: ids of each hard string; hard_hash: for each, the hashes of
                         its ids with special tokens, without them, and without parsing them, and of
                         the decoded text with and without them; stream: after each token, the bytes
                         of the final text that decode(ids so far) starts with; random: hashes of
                         the ids of random strings; first: ids of the first of them; decode: hashes
                         of the texts of random ids
OUT/variants.golden.json the same for the variants, hashes only
Hashes are 64-bit FNV-1a, 16 hex digits each, joined. Of ids: over their little-endian 32-bit form;
of text: over its UTF-8. The random generator is Lcg below; the C++ test has the same.
"""

import argparse
import ctypes
import json
import os
import struct

from tokenizers import Regex, Tokenizer, __version__, normalizers, pre_tokenizers

from tokenizer_kinds import KINDS, LIVE, corpus, variants

# fmt: off
HARD = [
    "", " ", "  ", "\n", "\n\n\n", "\t\t x", "Hello world", " Hello  world ",
    "hello\nworld\r\n\r\nend", "don't DON'T We'LL it's", "1234567890 12 3.14159 \u00bd \u00b2",
    "price: $1,234.56!!", "    indented\n        more", "caf\u00e9 cafe\u0301 na\u00efve",
    "Gr\u00f6\u00dfe STRASSE stra\u00dfe",
    "\u043f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440!",
    "\u4f60\u597d,\u4e16\u754c!\u4eca\u5929\u5929\u6c14\u597d",
    "\u6771\u4eac\u306f\u65e5\u672c\u306e\u9996\u90fd\u3067\u3059\u3002",
    "\uc548\ub155\ud558\uc138\uc694 \uc138\uacc4", "\u0645\u0631\u062d\u0628\u0627",
    "\u05e9\u05dc\u05d5\u05dd", "\u0928\u092e\u0938\u094d\u0924\u0947", "\u0e20\u0e32\u0e29\u0e32",
    "\U0001f600\U0001f680\U0001f469\u200d\U0001f469\u200d\U0001f467\U0001f1eb\U0001f1f7"
    "\U0001f44d\U0001f3fd",
    "a\u200bb\u00a0c\u3000d\ufeffe", "\x00\x01\x7f", "\ufb01 \ufb02 \u2163 \u338f", "x" * 70,
    "=" * 33 + "-" * 17, "<s> </s> <|user|>hi<|end|><|assistant|>", "<|us er|> <|user|",
    " <mask> x<mask>", "\u2581under \u2581\u2581", "tab\tnew\x0bvt\x0cff\x85nel",
    "\u2028line\u2029para",
    "\U0001d518\U0001d52b\U0001d526 \U00010348", "A\u0334\u0321\u031bB\u034e\u033e",
    "http://a.b/c?d=e&f=%20#g", "snake_case camelCase PascalCase kebab-case",
    "def f(x):\n\treturn {'a': [1, 2], \"b\": x**2}\n", "the pass key is 48213. Remember it.",
    "\ud7ff\ue000\U0010fffd\ufffd", "i\u0307\u0130I\u0131", "\u01c5 \u01c6 \u01c4",
    "\u0663\u0664\u0665 \u0967\u0968 \u2167 \u4e03", "word wordy swordword word",
    "  rstrip  x", "<tool_call>{}</tool_call>", "a" * 300, "ab" * 200 + " " + "cd" * 100,
    "\u4eca\u5929" * 60, "Cas\u00e9 CASE cAsE", "\uac00\u1100\u1161\u11a8\u11a7",
    "x\u0323\u0307 x\u0307\u0323 \u1e69 s\u0323\u0307",
    "don\u2019t \u201cquote\u201d \u2014 \u2026", "<0x41><0xE4> \u00e4", "le travail",
    "hello, 'tis 's ok? do not n't",
]

# What random strings are made of, beside ranges of code points.
SPACES = [
    " ", "  ", "   ", "\n", "\r\n", "\t", "\n\n", " \n", "\u00a0", "\u3000", "\u2003", "\x0b",
    "\x85", "\u2028", "        ",
]
PUNCT = [
    "!", "?", ".", ",", ";", ":", "-", "--", "(", ")", "[", "]", "{", "}", "\"", "'", "/", "\\",
    "@", "#", "$", "%", "^", "&", "*", "_", "+", "=", "<", ">", "|", "~", "`", "...", "\u3002",
    "\u00bf",
    "\u2014", "\u201c", "\u20ac",
]
SNIPPETS = [
    "'s", "'S", "'t", "'re", "'VE", "'ll", "'d", "'m", "n't", "\u017f", "<|user|>", "<|user", "|>",
    "<s>", "</s>", "<mask>", "<unk>", "<tool_call>", "  rstrip", "word", "\u2581", "\u2581\u2581",
    "<0x0A>", "Case", " the", "ing", "aaa", "xx", "le", "ABCdef", "HelloWorld", "e\u0301", "\ufb01",
    "\u0130",
]
EMOJI = [
    "\U0001f600", "\U0001f680", "\u200d", "\ufe0f", "\U0001f3fd", "\U0001f1eb", "\U0001f1f7",
    "\U0001f469", "\u2764",
]
# fmt: on


class Lcg:
    """64-bit linear congruential generator; below() takes the upper bits."""

    def __init__(self, seed):
        self.state = seed

    def below(self, n):
        self.state = (self.state * 6364136223846793005 + 1442695040888963407) & (2**64 - 1)
        return (self.state >> 33) % n


def random_string(rng, excluded):
    def code_point(c):
        return "?" if 0xD800 <= c < 0xE000 or excluded[c] else chr(c)

    out = []
    for _ in range(rng.below(24)):
        kind = rng.below(16)
        if kind < 4:
            for i in range(1 + rng.below(8)):
                c = rng.below(26)
                out.append(chr((65 if i == 0 and c % 4 == 0 else 97) + c))
        elif kind == 4:
            out.append(" ")
        elif kind == 5:
            out.append(SPACES[rng.below(len(SPACES))])
        elif kind == 6:
            out.extend(chr(48 + rng.below(10)) for _ in range(1 + rng.below(7)))
        elif kind == 7:
            out.append(PUNCT[rng.below(len(PUNCT))])
        elif kind == 8:
            out.append(SNIPPETS[rng.below(len(SNIPPETS))])
        elif kind == 9:
            out.append(code_point(0xC0 + rng.below(0x100)))
            out.append(code_point(0x300 + rng.below(0x70)))
        elif kind == 10:
            out.extend(code_point(0x4E00 + rng.below(0x5000)) for _ in range(1 + rng.below(4)))
        elif kind == 11:
            out.append(code_point(0xAC00 + rng.below(11172)))
            out.append(code_point(0x1100 + rng.below(256)))
            out.append(code_point(0x3040 + rng.below(0xC0)))
        elif kind == 12:
            out.append(EMOJI[rng.below(len(EMOJI))])
        elif kind == 13:
            out.append(code_point(0x370 + rng.below(0x900)))
        elif kind == 14:
            out.append(code_point(rng.below(0x3400)))
        else:
            out.append(code_point(rng.below(0x110000)))
    return "".join(out)


def fnv(data):
    h = 0xCBF29CE484222325
    for b in data:
        h = (h ^ b) * 0x100000001B3 & (2**64 - 1)
    return f"{h:016x}"


NO_ANSWER = "-" * 16  # where the library fails: nothing to compare with
failures = []


def attempt(call, *args, **kw):
    """call(...), or None where the library panics (some decoders and normalizers do)."""
    try:
        return call(*args, **kw)
    except BaseException as e:  # PanicException is no Exception
        if type(e).__name__ not in ("PanicException", "Exception"):
            raise
        failures.append(str(e))
        return None


def hash_ids(encoding):
    if encoding is None:
        return NO_ANSWER
    return fnv(struct.pack(f"<{len(encoding.ids)}i", *encoding.ids))


def hash_text(text):
    return NO_ANSWER if text is None else fnv(text.encode("utf-8"))


# ---- where two versions of Unicode agree ---------------------------------------------------------

ALL = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]


def pcre2_members(prop, lib, text, starts):
    """Code points that PCRE2 has in `prop`; `text` is all code points, `starts` index by byte."""
    error, offset = ctypes.c_int(), ctypes.c_size_t()
    pattern = f"{prop}+".encode()
    lib.pcre2_compile_8.restype = ctypes.c_void_p
    code = lib.pcre2_compile_8(
        pattern,
        ctypes.c_size_t(len(pattern)),
        0x00080000 | 0x00020000,
        ctypes.byref(error),
        ctypes.byref(offset),
        None,
    )
    assert code, prop
    lib.pcre2_match_data_create_8.restype = ctypes.c_void_p
    data = ctypes.c_void_p(lib.pcre2_match_data_create_8(1, None))
    lib.pcre2_get_ovector_pointer_8.restype = ctypes.POINTER(ctypes.c_size_t)
    lib.pcre2_jit_compile_8(ctypes.c_void_p(code), 1)
    members, at = set(), 0
    while (
        at < len(text)
        and lib.pcre2_match_8(
            ctypes.c_void_p(code),
            text,
            ctypes.c_size_t(len(text)),
            ctypes.c_size_t(at),
            0x40000000,
            data,
            None,
        )
        > 0
    ):
        ov = lib.pcre2_get_ovector_pointer_8(data)
        begin, at = ov[0], ov[1]
        members.update(range(starts[begin], starts.get(at, len(ALL))))
    return members


def hf_members(pattern, text):
    members = set()
    split = pre_tokenizers.Split(Regex(f"(?:{pattern})+"), "removed", invert=True)
    for _, (begin, end) in split.pre_tokenize_str(text):
        members.update(range(begin, end))
    return members


def excluded_code_points():
    pcre = ctypes.CDLL("libpcre2-8.so.0")
    utf8proc = ctypes.CDLL("libutf8proc.so.2")
    utf8proc.utf8proc_category.restype = ctypes.c_int
    text = "".join(map(chr, ALL))
    raw = text.encode()
    starts, at = {}, 0
    for i, c in enumerate(ALL):
        starts[at] = i
        at += 1 if c < 0x80 else 2 if c < 0x800 else 3 if c < 0x10000 else 4
    out = [False] * 0x110000
    wrong = set()
    word = (
        r"\p{L}\p{M}\p{Nl}\p{Nd}\p{Pc}\x{24B6}-\x{24E9}"
        r"\x{1F130}-\x{1F149}\x{1F150}-\x{1F169}\x{1F170}-\x{1F189}"
    )
    for ours, theirs in [
        (rf"\p{{{p}}}", rf"\p{{{p}}}") for p in "L N M P S Lu Ll Lt Lm Lo Nd".split()
    ] + [(r"[\t-\r\x{85}\p{Z}]", r"\s"), (f"[{word}]", r"\w"), (r"\p{sc:Han}", r"\p{Han}")]:
        diff = pcre2_members(ours, pcre, raw, starts) ^ hf_members(theirs, text)
        print(f"{theirs}: {len(diff)} code points differ")
        wrong |= {ALL[i] for i in diff}

    # utf8proc against the normalizers and the character classes.
    def utf8proc_map(name):
        f = getattr(utf8proc, name)
        f.restype = ctypes.c_void_p
        free = ctypes.CDLL(None).free

        def call(s):
            p = f(s.encode())
            r = ctypes.string_at(p).decode()
            free(ctypes.c_void_p(p))
            return r

        return call

    category = {c: utf8proc.utf8proc_category(c) for c in ALL}  # as utf8proc_category_t
    forms = [
        (utf8proc_map("utf8proc_" + n), getattr(normalizers, n)())
        for n in ("NFC", "NFD", "NFKC", "NFKD")
    ]
    lower, accents = normalizers.Lowercase(), normalizers.StripAccents()
    bert = normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=False, strip_accents=False, lowercase=False
    )
    bert_accents = normalizers.BertNormalizer(False, False, True, False)
    digits, punct = pre_tokenizers.Digits(True), pre_tokenizers.Punctuation("removed")
    differs = dict.fromkeys(
        ("normal forms", "lower", "marks", "other", "numbers", "punctuation"), 0
    )

    def note(c, what):
        differs[what] += 1
        wrong.add(c)

    for c in ALL[1:]:
        s = chr(c)
        probes = (
            [s]
            if category[c] not in (6, 7, 8)
            else [s, "a\u0315" + s, "a" + s + "\u0316", "a" + s + "\u0301"]
        )
        if c >= 0x80 and any(u(p) != h.normalize_str(p) for u, h in forms for p in probes):
            note(c, "normal forms")
        if c != 0x130 and lower.normalize_str(s) != chr(utf8proc.utf8proc_tolower(c)):
            note(c, "lower")
        if (accents.normalize_str(s) == "") != (category[c] in (6, 7, 8)):
            note(c, "marks")
        if category[c] in (6, 7, 8) and (bert_accents.normalize_str(s) == "") != (category[c] == 6):
            note(c, "marks")
        if (
            bert.normalize_str(s)
            != (
                ""
                if category[c] in (0, 26, 27, 28, 29) and s not in "\t\n\r" and category[c] != 0
                else s
            )
            and not s.isspace()
            and c != 0xFFFD
        ):
            note(c, "other")
        if c > 0x7F and (len(punct.pre_tokenize_str(s)) == 0) != (12 <= category[c] <= 18):
            note(c, "punctuation")
    numbers = set()
    for part, (begin, _) in digits.pre_tokenize_str(text):
        if len(part) == 1:
            numbers.add(ALL[begin])
    for c in numbers ^ {c for c in ALL if category[c] in (9, 10, 11)}:
        if not (c in numbers and (chr(c - 1) if c else "") and category[c] not in (9, 10, 11)):
            note(c, "numbers")
    for what, n in differs.items():
        print(f"{what}: {n} code points differ")
    for c in wrong:
        out[c] = True
    ranges = []
    for c in range(0x110000):
        if out[c] and ranges and ranges[-1][1] == c - 1:
            ranges[-1][1] = c
        elif out[c]:
            ranges.append([c, c])
    return out, ranges


# ---- goldens -------------------------------------------------------------------------------------


def golden(t, excluded, seed, n_random, full):
    """What tokenizers gives for tokenizer t. `full`: with ids and streams of the hard strings."""
    out = {"seed": seed, "vocab_size": max(t.get_vocab(True).values()) + 1}

    def encode(s, special=False):
        return attempt(t.encode, s, add_special_tokens=special)

    def decode(ids, skip):
        return attempt(t.decode, ids, skip_special_tokens=skip)

    hard, hashes, stream = [], "", []
    for s in HARD:
        encoded = encode(s)
        ids = encoded.ids if encoded else []
        hard.append(ids)
        text = decode(ids, False)
        t.encode_special_tokens = True
        plain = encode(s)
        t.encode_special_tokens = False
        hashes += hash_ids(encode(s, True)) + hash_ids(encoded) + hash_ids(plain)
        hashes += hash_text(text) + hash_text(decode(ids, True)) if encoded else NO_ANSWER * 2
        prefixes = []
        for i in range(1, min(len(ids), 40) + 1 if full else 0):
            prefixes.append(len(os.path.commonprefix([decode(ids[:i], False), text]).encode()))
        stream.append(prefixes)
    out["hard_hash"] = hashes
    if full:
        out["hard"], out["stream"] = hard, stream
    rng = Lcg(seed)
    first, hashes = [], ""
    for i in range(n_random):
        encoded = encode(random_string(rng, excluded))
        hashes += hash_ids(encoded)
        if full and i < 100:
            first.append(encoded.ids)
    out["random"] = hashes
    if full:
        out["first"] = first
    hashes = ""
    for _ in range(200):
        ids = [rng.below(out["vocab_size"]) for _ in range(rng.below(12))]
        hashes += hash_text(decode(ids, rng.below(2) == 1))
    out["decode"] = hashes
    return out


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text", nargs="+")
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    parser.add_argument("--out", default=os.path.join(root, "tests", "text", "tokenizer", "data"))
    args = parser.parse_args()
    os.makedirs(args.out, exist_ok=True)

    def save(name, value):
        with open(os.path.join(args.out, name), "w", encoding="ascii") as f:
            json.dump(value, f, ensure_ascii=True, separators=(",", ":"))
            f.write("\n")

    excluded, ranges = excluded_code_points()
    total = sum(b - a + 1 for a, b in ranges)
    print(f"excluded: {total} code points in {len(ranges)} ranges")
    save(
        "strings.json",
        {
            "tokenizers": __version__,
            "hard": HARD,
            "spaces": SPACES,
            "punct": PUNCT,
            "snippets": SNIPPETS,
            "emoji": EMOJI,
            "excluded": ranges,
        },
    )
    lines = corpus(args.text, HARD)
    trained = {}
    for i, (name, make) in enumerate(KINDS.items()):
        t = Tokenizer.from_str(make(lines).to_str())
        trained[name] = json.loads(t.to_str())
        save(name + ".tokenizer.json", trained[name])
        small = name in ("characters", "affixes", "small_bytes")
        g = golden(t, excluded, 1000 + i, 500 if small else 2000, True)
        g["live"] = name in LIVE
        save(name + ".golden.json", g)
        print(f"{name}: {t.get_vocab_size()} tokens")
    listed, goldens = [], {}
    for i, (name, base, sections) in enumerate(variants()):
        j = json.loads(json.dumps(trained[base]))
        for path, value in sections.items():
            node, keys = j, path.split(".")
            for k in keys[:-1]:
                node = node[k]
            node[keys[-1]] = value
        t = Tokenizer.from_str(json.dumps(j))
        before = len(failures)
        goldens[name] = golden(t, excluded, 5000 + i, 150, False)
        if len(failures) > before:
            print(f"{name}: {len(failures) - before} calls failed: {failures[-1]}")
        listed.append({"name": name, "base": base, "set": sections})
    save("variants.json", listed)
    save("variants.golden.json", goldens)
    size = sum(os.path.getsize(os.path.join(args.out, f)) for f in os.listdir(args.out))
    print(f"{len(KINDS)} kinds, {len(listed)} variants, {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
