#!/usr/bin/env python3
"""Joins the parts of gpu_check.sh and gpu_bench.sh, from as many runs as it took, into one table.

    gpu_join.py [--commit C] [--kinds check,bench] [--out SUMMARY.json] FOLDER_OR_FILE...

Parts count where they are of one commit: the one given, else that of the most parts. Says which parts
failed, which were skipped, which are missing and which are of another commit; where a part ran more
than once on the commit, the last file named counts. Exits 1 unless every part is there and none failed.
"""

import argparse
import collections
import json
import subprocess
import sys
from pathlib import Path


def read(path):
    """The lines of one part's file: its result and what belongs to it."""
    lines = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            lines.append(json.loads(line))
        except ValueError as error:
            print(f"{path}:{number}: no JSON: {error}", file=sys.stderr)
    if not lines or not {"part", "kind", "commit", "result"} <= lines[0].keys():
        print(f"{path}: no part's result, left out", file=sys.stderr)
        return None
    return {**lines[0], "lines": lines[1:], "file": str(path)}


def files_of(places):
    for place in places:
        yield from sorted(place.glob("**/*.jsonl")) if place.is_dir() else [place]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("places", nargs="+", type=Path, metavar="FOLDER_OR_FILE")
    parser.add_argument("--commit", help="any beginning of it")
    parser.add_argument("--kinds", default="check", help="check, bench or both (default: check)")
    parser.add_argument("--out", type=Path, help="where all results go as one JSON object")
    args = parser.parse_args()

    results = [result for path in files_of(args.places) if (result := read(path))]
    if not results:
        sys.exit("gpu_join.py: no results there, expected files PART.jsonl")
    commit = args.commit or collections.Counter(r["commit"] for r in results).most_common(1)[0][0]
    here = [r for r in results if r["commit"].startswith(commit)]
    commits = sorted({r["commit"] for r in here})
    if len(commits) > 1:
        sys.exit(f"gpu_join.py: {commit} is the beginning of several: {', '.join(commits)}")
    parts = {(r["kind"], r["part"]): r for r in here}
    others = [r for r in results if not r["commit"].startswith(commit)]

    print(f"commit {commits[0] if commits else commit}")
    complete = True
    scripts = Path(__file__).resolve().parent
    for kind in args.kinds.split(","):
        listed = subprocess.run([scripts / f"gpu_{kind}.sh", "--list"], capture_output=True,
                                text=True, check=True).stdout.split()
        print(f"\n{kind:12} {'result':8} {'time':>7}  detail")
        for part in listed:
            result = parts.get((kind, part))
            if result is None:
                if part == "build":  # a bundle has none
                    continue
                complete = False
                elsewhere = [r["commit"][:12] for r in others if (r["kind"], r["part"]) == (kind, part)]
                print(f"{part:12} {'MISSING':8} {'':7}  "
                      + (f"only on another commit: {', '.join(elsewhere)}" if elsewhere else ""))
                continue
            complete &= result["result"] != "FAILED"
            print(f"{part:12} {result['result']:8} {result['seconds']:5} s  {result['detail']}")
    cards = sorted({(r["device"], r["driver"]) for r in here})
    print("\ncards: " + "; ".join(f"{device}, driver {driver}" for device, driver in cards))
    if args.out:
        args.out.write_text(json.dumps({"commit": commits[0] if commits else commit,
                                        "complete": complete, "parts": list(parts.values())}) + "\n")
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
