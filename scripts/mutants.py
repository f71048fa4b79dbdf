#!/usr/bin/env python3
"""Plants faults in kernels and policies, one at a time, and asks which test on a card sees each.

    mutants.py build --build DIR [--only NAME ...] [--programs NAME ...] OUT.tar.xz
                                                                  where there is nvcc, no card needed
    mutants.py run BUNDLE [--only NAME ...] [--jobs N] [--out FILE.jsonl]    on the card
    mutants.py host --build DIR [--only NAME ...]                 faults of policies, on the CPU
    mutants.py list                                               fails where a fault has no place

`build` changes one place of one file of the working tree at a time, builds the tests in DIR (the
folder of scripts/bundle.sh, so that only the changed objects are compiled), keeps the stripped
programs, and puts the file back. The tree must have no changes of its own in those files. The archive
is meant to be unpacked in the folder of a bundle of the same commit, whose libraries, goldens and
scripts it takes: the programs of ten faults differ little, and pack into some 10 MB. `--programs`
builds those alone: most faults of kernels are seen by parity_cuda_test, which builds soonest.

`host` builds the faults of the policies' own code, of the bank's, of the engine's, of the reference's
working sets and of the kernels of the CPU in DIR, any build folder, one at a time, and runs the policies
against their oracles on the CPU, layers on the host, working sets, what policies cost and how they
combine, or parity.

`run` runs each fault's programs (of `--jobs` faults at a time), the quickest check first, stops at the
first red test of each, and prints one line a fault: which tests went red, or that none did. Exits 1 if
a fault was not found. It also runs the bundle's own programs, which must be green: else a red test
says nothing.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from faults import AWAY, CHECKS, CPU, FAULTS, FETCHED, HOST_CHECKS, LAST_ROWS, PROGRAMS, RESIDENCY

# Faults of code that not every CPU runs: what /proc/cpuinfo lists of one that does.
NEEDS = dict.fromkeys(
    ("q4_query_of_the_other_half", "tiles_of_rows_are_cut_anywhere",
     "q8_k_of_two_blocks_by_the_scales_of_one", "q8_k_keeps_the_bytes_below_its_value",
     "q8_v_of_all_blocks_by_the_scales_of_the_first"), "avx512f")

# The tests of parity that see a fault of a kernel, by the beginning of its file's name, of which the
# last that fits counts; others need them all, which take minutes.
PARITY = {
    "attend": "*Attend*", "prefill": "*Attend*", "matvec": "*Linear*", "topk": "*TopK*",
    "working_set": "*WorkingSet*:*FetchRows*", "rows": "*Rope*", "sample": "*NextToken*",
    "key_score": "*KeyScore*", "expected": "*Expected*:*QueryMoments*",
    "score": "*.Score*", "score_rows": "*ScoreOfFewRows*",
    "kept_rows": "*StoreRows*:*LocateRows*:*Compact*:*Evict*", "summary": "*Block*:*Deviation*",
    "select": "*ScoreReduce*:*PlanRange*:*AgedScores*", "index": "*Index*:*Rescore*",
    "values": "*PickHeads*:*SumValues*", "merge_states": "*MergeStates*", "common": "*Q4*",
    "cluster": "*TopK*:*WorkingSet*",
}


def place(root, name):
    """The file of a fault, its text, and the text with the fault."""
    path, old, new = FAULTS[name]
    text = (root / path).read_text()
    if text.count(old) != 1:
        sys.exit(f"mutants.py: {name}: {path} has {text.count(old)} of '{old}', expected one")
    return root / path, text, text.replace(old, new)


def build(args, root):
    out = args.out.resolve()
    stage = Path(tempfile.mkdtemp())
    lib = stage / "mutants/lib"
    lib.parent.mkdir()
    lib.symlink_to("../lib")  # the programs look for ../lib
    for stop in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(stop, lambda *_: sys.exit(1))
    try:
        # Not those that have a check of their own by a program that the bundle lacks.
        on_card = [n for n, (path, _, _) in FAULTS.items()
                   if HOST_CHECKS.get(n, next(iter(PROGRAMS.items())))[0] in PROGRAMS
                   and path not in (AWAY, LAST_ROWS, RESIDENCY, FETCHED, *HOST_CHECKS)
                   and not path.startswith(CPU)]
        lost = 0
        for name in args.only or on_card:
            file, text, with_fault = place(root, name)
            if subprocess.run(["git", "-C", root, "diff", "--quiet", "HEAD", "--", file]).returncode:
                sys.exit(f"mutants.py: {file} has changes that are not committed")
            start = time.monotonic()
            try:
                file.write_text(with_fault)
                built = subprocess.run(["cmake", "--build", args.build, "--target",
                                        *args.programs], stdout=subprocess.DEVNULL)
            finally:
                file.write_text(text)
            if built.returncode:
                lost += 1
                print(f"{name}: does not build", flush=True)
                continue
            (stage / "mutants" / name).mkdir()
            for program in args.programs:
                subprocess.run(["strip", "-o", stage / "mutants" / name / program,
                                args.build / PROGRAMS[program] / program], check=True)
            print(f"{name}: built in {time.monotonic() - start:.0f} s", flush=True)
        # The variants of a program one after the other: each differs little from the one before.
        paths = sorted(stage.glob("mutants/*/*_test"), key=lambda p: (p.name, p.parent.name))
        tar = subprocess.run(["tar", "-C", stage, "--owner=0", "--group=0", "-cf", "-", "mutants/lib",
                              *(p.relative_to(stage) for p in paths)], check=True,
                             capture_output=True).stdout
        with out.open("wb") as packed:
            subprocess.run(["xz", "-9", "-T1"], input=tar, stdout=packed, check=True)
        print(f"{out}: {out.stat().st_size} bytes, {len(paths)} programs")
        return 1 if lost else 0
    finally:
        shutil.rmtree(stage)
        # What is built is that of the tree again.
        subprocess.run(["cmake", "--build", args.build, "--target", *args.programs],
                       stdout=subprocess.DEVNULL)


def host_check(name):
    """The program and the tests that see a fault without a card: those of its name, else of its place."""
    path = FAULTS[name][0]
    of_place = [check for place, check in HOST_CHECKS.items()
                if path.startswith(place) and path.endswith((".cc", ".h"))]
    return HOST_CHECKS.get(name, of_place[-1] if of_place else None)


def host(args, root):
    lost = 0
    checks = {name: check for name in FAULTS if (check := host_check(name))}
    for name in args.only or checks:
        file, text, with_fault = place(root, name)
        if name not in checks:
            sys.exit(f"mutants.py: {name}: {FAULTS[name][0]} has no check without a card")
        program, tests = checks[name]
        if (need := NEEDS.get(name)) and need not in Path("/proc/cpuinfo").read_text().split():
            print(f"{name}: left out, since this CPU has no {need}", flush=True)
            continue
        try:
            file.write_text(with_fault)
            built = subprocess.run(["cmake", "--build", args.build, "--target", program],
                                   stdout=subprocess.DEVNULL).returncode == 0
        finally:
            file.write_text(text)
        if not built:
            lost += 1
            print(f"{name}: does not build", flush=True)
            continue
        red, green = run_check(next(args.build.glob(f"tests/*/{program}")), tests, 300, root)
        lost += not red
        print(f"{name}: {red or 'no test went red'} ({green} green)", flush=True)
    subprocess.run(["cmake", "--build", args.build, "--target",
                    *{program for program, _ in checks.values()}], stdout=subprocess.DEVNULL)
    return 1 if lost else 0


def run_check(program, tests, seconds, data):
    """The first red test, "" where all are green, and how many ran."""
    environment = {**os.environ, "OMNIKV_TEST_DATA": str(data), "OMNIKV_SWEEP_STRIDE": "8"}
    try:
        done = subprocess.run([program, f"--gtest_filter={tests}", "--gtest_fail_fast"],
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              errors="replace", timeout=seconds,
                              env=environment)
        said, ended = done.stdout, "==========]" in done.stdout.rpartition("ran.")[0]
    except subprocess.TimeoutExpired as late:
        said, ended = (late.stdout or b"").decode(errors="replace"), False
    red = re.findall(r"^\[  FAILED  \] ([^ ,]+\.[^ ,]+)", said, re.M)
    begun = re.findall(r"^\[ RUN      \] (\S+)", said, re.M)
    green = re.findall(r"^\[       OK \] (\S+)", said, re.M)
    if red:
        return red[0], len(green)
    if not begun:
        sys.exit(f"mutants.py: {program} runs no test: {said[-300:]}")
    return (f"{begun[-1]} (ended or stuck)" if not ended else ""), len(green)


def run(args):
    bundle = args.bundle.resolve()
    names = args.only or sorted(p.name for p in (bundle / "mutants").iterdir() if p.name != "lib")
    programs = {path.name for path in bundle.glob("mutants/*/*_test")}

    def checks_of(name):
        file = Path(FAULTS[name][0])
        of_file = [tests for begin, tests in PARITY.items()
                   if file.parts[-2] == "kernels" and file.name.startswith(begin)]
        for check, (program, tests, seconds) in CHECKS.items():
            if program in programs:
                yield check, program, of_file[-1] if check == "parity" and of_file else tests, seconds

    def ran(work):
        name, checks = work
        folder = bundle / ("bin" if name == "(none)" else f"mutants/{name}")
        start = time.monotonic()
        red, green = {}, {}
        for check, program, tests, seconds in checks:
            if not (folder / program).exists():
                continue
            test, green[check] = run_check(folder / program, tests, seconds, bundle / "test_data")
            if test:
                red[check] = test
        all_green = not red and min(green.values(), default=0) > 0
        good = all_green if name == "(none)" else bool(red)
        return {"part": "mutants", "fault": name, "ok": good, "red": red, "green": green,
                "seconds": round(time.monotonic() - start)}

    of_faults = {name: list(checks_of(name)) for name in names}
    bases = dict.fromkeys(check for checks in of_faults.values() for check in checks)
    work = [*(("(none)", [check]) for check in bases), *of_faults.items()]
    lost = 0
    with (args.out or Path(os.devnull)).open("w") as out, ThreadPoolExecutor(args.jobs) as pool:
        for done in as_completed([pool.submit(ran, w) for w in work]):
            result = done.result()
            lost += not result["ok"]
            told = "; ".join(f"{check}: {test}" for check, test in result["red"].items())
            print(f"{result['fault']}: {told or 'no test went red'} ({result['green']} green)",
                  flush=True)
            print(json.dumps(result), file=out, flush=True)
    return 1 if lost else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("build")
    one.add_argument("--build", type=Path, required=True)
    one.add_argument("--only", nargs="+", choices=FAULTS, action="extend")
    one.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    one.add_argument("out", type=Path)
    two = commands.add_parser("run")
    two.add_argument("bundle", type=Path)
    two.add_argument("--only", nargs="+", choices=FAULTS, action="extend")
    two.add_argument("--jobs", type=int, default=1)
    two.add_argument("--out", type=Path)
    three = commands.add_parser("host")
    three.add_argument("--build", type=Path, required=True)
    three.add_argument("--only", nargs="+", choices=FAULTS, action="extend")
    commands.add_parser("list")
    args = parser.parse_args()
    root = Path(__file__).resolve().parent.parent
    if args.command == "list":
        for name, (path, old, new) in FAULTS.items():
            place(root, name)
            print(f"{name}: {path}: {old}  ->  {new}")
        return 0
    if args.command == "run":
        return run(args)
    return (host if args.command == "host" else build)(args, root)


if __name__ == "__main__":
    sys.exit(main())
