#!/usr/bin/env python3
"""Runs the commands of README.md: those of the program with the one just built, which must end well
and print something; scripts must be there and executable (CI and the reader run them).
Usage: readme_commands.py SOURCE OMNIKV"""

import os
import shlex
import subprocess
import sys

PROGRAM = "build/release/tools/omnikv"


def main():
    source, omnikv = sys.argv[1:]
    with open(os.path.join(source, "README.md"), encoding="utf-8") as f:
        commands = [line.strip() for line in f if line.startswith("    ") and line.strip()]
    ran, failed = 0, []
    for command in commands:
        words = shlex.split(command)
        if words[0] == PROGRAM:
            done = subprocess.run([omnikv, *words[1:]], cwd=source, stdout=subprocess.PIPE)
            good = done.returncode == 0 and done.stdout.strip() != b""
            ran += 1
        else:
            script = os.path.join(source, words[0])
            good = words[0].startswith("./") and os.access(script, os.X_OK)
        print("ok    " if good else "FAILED", command, flush=True)
        if not good:
            failed.append(command)
    if failed or ran == 0:
        sys.exit(f"{len(failed)} of {len(commands)} commands failed, {ran} of them of the program")


main()
