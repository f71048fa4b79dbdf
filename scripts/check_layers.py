#!/usr/bin/env python3
"""Checks the layer rules of CONTRIBUTING.md on every include of src/, tools/ and include/.

    python3 scripts/check_layers.py [ROOT]

1. A file includes its own layer and lower ones; io and text do not include each other.
2. backend/X never includes backend/Y; policy/A never includes policy/B.
3. Kernels (src/backend) see no model, policy or bank: rule 1 says so already.
4. CUDA headers appear only under backend/cuda and in *.cu of src/, and not in tools/.
5. No file is longer than 800 lines, no policy's and no example than 300.
6. Messages of src/ name no flags: a field of the options stands in backticks (`context`), and
   tools/option_names.cc knows the flag of each.
7. tools/ includes itself, the public headers and the layers; tools/eval's document needs base only.
"""
import pathlib
import re
import sys

RANK = {"base": 0, "io": 1, "text": 1, "backend": 2, "bank": 3, "policy": 4, "model": 5, "engine": 6, "server": 7, "capi": 7}
SUFFIXES = {".h", ".cc", ".cu", ".cuh"}
LITERAL = re.compile(r'"((?:[^"\\]|\\.)*)"')
FLAG = re.compile(r"(?<![\w-])(?:--[a-z][a-z-]*|-[a-z](?= is ))")
OTHER_PROGRAMS = {"--merge"}  # llama-gguf-split's
INCLUDE = re.compile(r'^\s*#\s*include\s+(["<])([^">]+)[">]')


def names_of_options(root):
    """The fields that tools/option_names.cc knows."""
    text = (root / "tools/option_names.cc").read_text(encoding="utf-8")
    return set(re.findall(r'\{"(\w+)", "-', text))


def is_cuda(header):
    return header.startswith(("cuda", "cublas"))


def messages(where, lines, fields):
    for number, line in enumerate(lines, 1):
        code = line.split("//")[0]
        for literal in LITERAL.findall(code):
            for flag in FLAG.findall(literal):
                if flag not in OTHER_PROGRAMS:
                    yield f"{where}:{number}: a message names the flag {flag}"
            for field in re.findall(r"`(\w+)`", literal):
                if field not in fields:
                    yield f"{where}:{number}: tools/option_names.cc has no flag for `{field}`"


def violations(root):
    fields = names_of_options(root)
    for path in sorted((root / "src").rglob("*")):
        if path.suffix not in SUFFIXES:
            continue
        parts = path.relative_to(root / "src").parts
        layer = parts[0]
        where = path.relative_to(root)
        if layer not in RANK:
            yield f"{where}: {layer} is no layer"
            continue
        lines = path.read_text(encoding="utf-8").splitlines()
        if len(lines) > (300 if layer == "policy" else 800):
            yield f"{where}: {len(lines)} lines"
        yield from messages(where, lines, fields)
        for number, line in enumerate(lines, 1):
            match = INCLUDE.match(line)
            if not match:
                continue
            kind, name = match.groups()
            at = f"{where}:{number}: includes {name}"
            if is_cuda(name) and not (path.suffix in {".cu", ".cuh"} or parts[:2] == ("backend", "cuda")):
                yield f"{at}: CUDA headers belong to backend/cuda"
            if kind == "<":
                continue
            target = name.split("/")
            if target[0] == "omnikv":  # public headers: any layer may report in their terms
                continue
            if target[0] not in RANK:
                yield f"{at}: not in a layer"
                continue
            if RANK[target[0]] > RANK[layer]:
                yield f"{at}: {layer} is below {target[0]}"
            elif RANK[target[0]] == RANK[layer] and target[0] != layer:
                yield f"{at}: {layer} and {target[0]} do not know each other"
            if layer == target[0] and layer in ("backend", "policy") and len(parts) > 2:
                if len(target) > 2 and target[1] != parts[1]:
                    yield f"{at}: {layer}/{parts[1]} does not know {layer}/{target[1]}"
    for path in sorted((root / "tools").rglob("*")):
        if path.suffix not in SUFFIXES:
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            match = INCLUDE.match(line)
            if not match:
                continue
            kind, name = match.groups()
            at = f"{path.relative_to(root)}:{number}: includes {name}"
            if is_cuda(name):
                yield f"{at}: CUDA headers belong to backend/cuda"
            if kind == "<":
                continue
            first = name.split("/")[0]
            own = ".." not in name and (root / "tools" / name).exists()
            if not own and first != "omnikv" and first not in RANK:
                yield f"{at}: neither of tools nor in a layer"
            if path.name.startswith("document") and not own and first not in ("omnikv", "base"):
                yield f"{at}: documents need base alone"
    for folder in ("tools", "tests", "bench", "fuzz", "include", "examples"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in SUFFIXES:
                count = len(path.read_text(encoding="utf-8").splitlines())
                if count > (300 if folder == "examples" else 800):
                    yield f"{path.relative_to(root)}: {count} lines"
    for path in sorted((root / "include").rglob("*.h")):
        for line in path.read_text(encoding="utf-8").splitlines():
            match = INCLUDE.match(line)
            if match and match.group(1) == '"' and not match.group(2).startswith("omnikv/"):
                yield f"{path.relative_to(root)}: includes {match.group(2)}: not public"


def main():
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()
    found = list(violations(root))
    for line in found:
        print(line)
    print(f"check_layers: {len(found)} violations")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
