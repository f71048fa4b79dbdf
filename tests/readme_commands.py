#!/usr/bin/env python3
"""Runs the commands of README.md and docs/policy_guide.md and the examples that end the help of the
program and of each of its subcommands, with the program just built: each must end well and print
something, or write the file that it names. A server must answer, and end when it is told to. Scripts must be there and executable (CI and the reader
run them). The code that the guide quotes must stand in its example. A `cmake -S` configures a folder of the test's; a `cmake --build` is the build that the
test belongs to, and is not repeated.
Usage: readme_commands.py SOURCE BUILD OMNIKV"""

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

PROGRAM = re.compile(r"build/\w+/tools/omnikv")
DOCUMENTS = ["README.md", "docs/policy_guide.md"]


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


def commands_of(path):
    """The lines that begin with four spaces and are in no fenced block."""
    commands, fenced = [], False
    with open(path, encoding="utf-8") as f:
        for line in f:
            fenced ^= line.startswith("```")
            if line.startswith("    ") and line.strip() and not fenced:
                commands.append(line.strip())
    return commands


def stale_quotes(source):
    """The C++ blocks of the guide that are not in its example, word for word."""
    example = Path(source, "examples/custom_policy/every_nth/every_nth.cc").read_text(encoding="utf-8")
    guide = Path(source, "docs/policy_guide.md").read_text(encoding="utf-8")
    quotes = re.findall(r"```cpp\n(.*?)```", guide, re.DOTALL)
    return [quote for quote in quotes if quote not in example]


def serves(line, source, environment):
    """Whether a server that `line` starts, on another port, answers, and ends well when it is told to."""
    line = re.sub(r" --port \d+", "", line) + " --port 0"
    process = subprocess.Popen(["bash", "-c", f"exec {line}"], cwd=source, env=environment,
                               stderr=subprocess.PIPE, text=True)
    for said in process.stderr:
        if address := re.search(r"answers on (http://\S+)", said):
            with urllib.request.urlopen(address[1] + "/health") as reply:
                healthy = reply.status == 200
            process.send_signal(signal.SIGINT)
            process.stderr.read()
            return process.wait(60) == 0 and healthy
    return False


def main():
    source, build, omnikv = sys.argv[1:]
    commands = [c for name in DOCUMENTS for c in commands_of(os.path.join(source, name))]
    failed, ran = stale_quotes(source), 0
    for quote in failed:
        print("FAILED to find in the example:", quote, sep="\n")
    with tempfile.TemporaryDirectory() as folder:
        os.symlink(omnikv, os.path.join(folder, "omnikv"))
        environment = {**os.environ, "PATH": folder + os.pathsep + os.environ["PATH"]}
        for command in [*commands, *examples(omnikv)]:
            if command.startswith("cmake --build "):
                continue
            if command.startswith("omnikv serve"):
                good = serves(command, source, environment)
                ran += 1
            elif command.startswith("./"):
                good = os.access(os.path.join(source, shlex.split(command)[0]), os.X_OK)
            else:
                # What they write goes to a folder of the test's.
                line = PROGRAM.sub("omnikv", command).replace("/tmp/", folder + "/")
                line = re.sub(r"(?<= -B )\S+", os.path.join(folder, "build"), line)
                line = re.sub(r"(?<= --test-dir )\S+", build + " --no-tests=error", line)
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
        sys.exit(f"{len(failed)} commands or quotes failed, {ran} of the program ran")


main()
