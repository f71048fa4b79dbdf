#!/usr/bin/env python3
"""Checks the layer rules of docs/architecture.md on every include of src/, tools/ and include/.

    python3 scripts/check_layers.py [ROOT]

1. A file includes its own layer and lower ones; io and text do not include each other.
2. backend/X never includes backend/Y; policy/A never includes policy/B.
3. Kernels (src/backend) see no model, policy or bank: rule 1 says so already.
4. CUDA headers appear only under backend/cuda and in *.cu.
5. No file is longer than 800 lines, no policy's than 300.
"""
import pathlib
import re
import sys

RANK = {"base": 0, "io": 1, "text": 1, "backend": 2, "bank": 3, "policy": 4, "model": 5, "engine": 6}
SUFFIXES = {".h", ".cc", ".cu", ".cuh"}
INCLUDE = re.compile(r'^\s*#\s*include\s+(["<])([^">]+)[">]')


def violations(root):
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
        for number, line in enumerate(lines, 1):
            match = INCLUDE.match(line)
            if not match:
                continue
            kind, name = match.groups()
            at = f"{where}:{number}: includes {name}"
            cuda = name.startswith("cuda") or name.startswith("cublas")
            if cuda and not (path.suffix in {".cu", ".cuh"} or parts[:2] == ("backend", "cuda")):
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
    for folder in ("tools", "tests", "bench", "fuzz", "include"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in SUFFIXES:
                count = len(path.read_text(encoding="utf-8").splitlines())
                if count > 800:
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
