#!/usr/bin/env python3
"""What packaging/ and docs/serve.md say of the server is true of the program: the flags in the unit of
systemd, in the Dockerfile and in the document exist, the time to stop leaves room for --grace, and
what the Dockerfile copies and names is there.
Usage: packaging_test.py SOURCE OMNIKV"""

import json
import re
import subprocess
import sys
import unittest
from pathlib import Path

SOURCE, OMNIKV = Path(sys.argv[1]), sys.argv[2]
HELP = subprocess.run([OMNIKV, "serve", "--help"], capture_output=True, text=True, check=True).stdout
FLAGS = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", HELP.partition("\nOptions:\n")[2]))
DEFAULTS = dict(re.findall(r"^\s+(?:-\w,)?(--[a-z-]+) \w[^\n=]*=(\S+)", HELP, re.MULTILINE))


def read(path):
    return (SOURCE / path).read_text(encoding="utf-8")


def flags_of(text):
    return re.findall(r"(?<!\S)--?[a-z][a-z-]*", text)


class Packaging(unittest.TestCase):
    def assert_flags(self, text, expected):
        flags = flags_of(text)
        self.assertGreaterEqual(len(flags), expected, text)
        self.assertEqual([flag for flag in flags if flag not in FLAGS], [], text)

    def test_unit(self):
        unit = dict(line.split("=", 1) for line in read("packaging/omnikv.service").splitlines()
                    if "=" in line and not line.startswith("#") and "SystemCallFilter" not in line)
        self.assertRegex(unit["ExecStart"], r"^omnikv serve ")
        self.assert_flags(unit["ExecStart"], 1)
        self.assertGreater(int(unit["TimeoutStopSec"]), float(DEFAULTS["--grace"]) + 30)
        # A mistake in the flags ends with this code, before anything listens.
        done = subprocess.run([OMNIKV, "serve", "--no-such-flag"], capture_output=True, check=False)
        self.assertEqual(done.returncode, int(unit["RestartPreventExitStatus"]))

    def test_dockerfile(self):
        text = re.sub(r"\\\n", " ", re.sub(r"(?m)^#.*\n", "", read("packaging/Dockerfile")))
        steps = re.findall(r"(?m)^([A-Z]+) (.*)$", text)
        entry = json.loads(next(rest for word, rest in steps if word == "ENTRYPOINT"))
        self.assertEqual(entry[:2], ["omnikv", "serve"])
        self.assert_flags(" ".join(entry), 1)
        port = next(rest for word, rest in steps if word == "EXPOSE")
        self.assertEqual(port, DEFAULTS["--port"])
        self.assertIn(f":{port}/health", next(rest for word, rest in steps if word == "HEALTHCHECK"))
        kept = [line[1:] for line in read(".dockerignore").splitlines() if line.startswith("!")]
        for path in kept:
            if "*" not in path:
                self.assertTrue((SOURCE / path).exists(), path)
        needed = [path for word, rest in steps if word == "COPY" and not rest.startswith("--")
                  for path in rest.split()[:-1] if path != "."]
        needed += re.findall(r"(?<!\S)(?:scripts|packaging)/\w+\.sh", text)
        self.assertGreater(len(needed), 3)
        for path in needed:
            self.assertTrue((SOURCE / path).is_file(), path)
            self.assertIn(path.split("/")[0], kept)
        # What cmake reads at the top is in the context.
        for folder in re.findall(r"add_subdirectory\((\w+)", read("CMakeLists.txt")):
            if folder not in ("tests", "fuzz"):
                self.assertIn(folder, kept)
        options = set(re.findall(r"(?:option|set)\((OMNIKV_\w+)", "".join(
            path.read_text(encoding="utf-8") for path in (SOURCE / "cmake").glob("*.cmake"))))
        for option in re.findall(r"-D(OMNIKV_\w+)", text):
            self.assertIn(option, options)

    def test_document(self):
        text = read("docs/serve.md")
        commands = re.findall(r"(?m)^(?:\s*OMNIKV_FLAGS=|\s*ExecStart=omnikv serve|\s+omnikv serve)(.*)$", text)
        commands += re.findall(r"(?m)^\s+docker run.*(?:\n.*)*? omnikv:cuda \\\n(.*)$", text)
        self.assertGreaterEqual(len(commands), 4)
        for command in commands:
            self.assert_flags(command, 1)
        others = {"--build-arg", "--component", "--health-cmd", "--memory", "--no-healthcheck", "--prefix",
                  "--stop-timeout"}  # Docker's and CMake's
        for flag in re.findall(r"`(--[a-z-]+)", text):
            self.assertIn(flag, FLAGS | others)


unittest.main(argv=sys.argv[:1], verbosity=2)
