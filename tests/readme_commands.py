#!/usr/bin/env python3
"""Runs the commands of README.md and the examples that end the help of the program and of each of
its subcommands, with the program just built: each must end well and print something, or write the
file that it names. Scripts must be there and executable (CI and the reader run them).
Usage: readme_commands.py SOURCE OMNIKV"""

import os
import re
import shlex
import subprocess
import sys
import tempfile

PROGRAM = "build/release/tools/omnikv"


def help_of(omnikv, path):
    """The help of a subcommand, and the names of those below it."""
    command = [omnikv, *path, "--help"]
    text = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    below = text.partition("\nSubcommands:\n")[2].partition("\n\n")[0]
    return text, re.findall(r"^  (\w+)", below, re.MULTILINE)


def examples(omnikv, path=()):
    """The examples of all subcommands; each has two or three."""
    text, below = help_of(omnikv, path)
    lines = [line.strip() for line in text.partition("\nExamples:\n")[2].splitlines()]
    lines = [line for line in lines if line]
    if not 2 <= len(lines) <= 3:
        sys.exit(f"the help of omnikv {' '.join(path)} has {len(lines)} examples, expected 2 or 3")
    for name in below:
        lines += examples(omnikv, (*path, name))
    return lines


def main():
    source, omnikv = sys.argv[1:]
    with open(os.path.join(source, "README.md"), encoding="utf-8") as f:
        commands = [line.strip() for line in f if line.startswith("    ") and line.strip()]
    failed, ran = [], 0
    with tempfile.TemporaryDirectory() as folder:
        os.symlink(omnikv, os.path.join(folder, "omnikv"))
        environment = {**os.environ, "PATH": folder + os.pathsep + os.environ["PATH"]}
        for command in [*commands, *examples(omnikv)]:
            if command.startswith("./"):
                good = os.access(os.path.join(source, shlex.split(command)[0]), os.X_OK)
            else:
                # What they write goes to a folder of the test's.
                line = command.replace(PROGRAM, "omnikv").replace("/tmp/", folder + "/")
                done = subprocess.run(["bash", "-o", "pipefail", "-c", line], cwd=source,
                                      env=environment, input=b"Hello.\n", stdout=subprocess.PIPE)
                written = [w for w in shlex.split(line) if w.startswith(folder + "/")]
                printed = done.stdout.strip() != b"" or written
                good = done.returncode == 0 and printed and all(map(os.path.exists, written))
                ran += 1
            print("ok    " if good else "FAILED", command, flush=True)
            if not good:
                failed.append(command)
    if failed or ran < 10:
        sys.exit(f"{len(failed)} commands failed, {ran} of the program ran")


main()
