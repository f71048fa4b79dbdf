#!/usr/bin/env python3
"""Carries out packaging/Dockerfile without a container engine, as root: each stage in a bare Debian
tree made by debootstrap, with chroot and namespaces; then starts what the last stage starts, without a
network, asks it one question, and stops it.

    packaging/check_dockerfile.py [--work DIR] [--ccache DIR] [--build-arg NAME=VALUE ...]

It needs debootstrap. DIR (default build/dockerfile) keeps the bare tree for the next run. --ccache takes
compiled files from a folder of ccache and puts new ones there. Of the Dockerfile it knows FROM, ARG, ENV,
RUN, COPY, WORKDIR, USER, VOLUME, EXPOSE, HEALTHCHECK, ENTRYPOINT and CMD, in the forms that are used
there; with others it ends. Certificates and pip's settings are this machine's.
"""

import argparse
import glob
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
IMAGES = {"debian:12-slim": "bookworm"}
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
QUESTION = {"temperature": 0, "max_tokens": 40, "messages": [
    {"role": "user", "content": "The pass key is 48213. What is the pass key?"}]}


def instructions(path):
    """Pairs of a word and its text; lines that end with a backslash go on, comments within are gone."""
    text = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.lstrip().startswith("#") or (not text and not line.strip()):
            continue
        text += line
        if text.endswith("\\"):
            text = text[:-1] + " "
            continue
        word, _, rest = text.strip().partition(" ")
        yield word.upper(), rest.strip()
        text = ""


def run(command, **options):
    done = subprocess.run(command, check=False, **options)
    if done.returncode != 0:
        sys.exit(f"{shlex.join(map(str, command))} ended with {done.returncode}")
    return done


def fresh(tree):
    if tree.exists():
        run(["rm", "-rf", "--one-file-system", tree])


class Stage:
    """A tree and what instructions have said of it so far."""

    def __init__(self, tree, arguments, ccache):
        self.tree, self.given, self.ccache = tree, arguments, ccache
        self.arguments, self.env = {}, {"PATH": PATH}
        self.user, self.folder = "root", "/"
        self.health = self.entry = self.command = None

    def within(self, path):
        return self.tree / (path if path.startswith("/") else f"{self.folder}/{path}").lstrip("/")

    def prefix(self, extra=()):
        """What the shell command $1 is to be run behind: in namespaces of its own, in the tree."""
        env = {**self.arguments, **self.env, "HOME": "/root" if self.user == "root" else "/"}
        mounts = [f"mount --rbind /dev {self.tree}/dev", f"mount -t proc proc {self.tree}/proc"]
        if self.user == "root":  # while it is built
            (self.tree / "etc/resolv.conf").write_bytes(Path("/etc/resolv.conf").read_bytes())
            if Path("/etc/pip.conf").exists():
                shutil.copy("/etc/pip.conf", self.tree / "etc/pip.conf")
            # This machine's, after the tree's own were installed.
            for folder in ("/etc/ssl/certs", "/usr/share/ca-certificates", "/usr/local/share/ca-certificates"):
                if Path(folder).exists() and (self.tree / folder[1:]).exists():
                    mounts.append(f"mount --bind {folder} {self.tree}{folder}")
            if self.ccache:
                (self.tree / "ccache").mkdir(exist_ok=True)
                mounts.append(f"mount --bind {self.ccache} {self.tree}/ccache")
                env |= {"CCACHE_DIR": "/ccache", "CCACHE_BASEDIR": self.folder, "LANG": "C.UTF-8",
                        "CMAKE_CXX_COMPILER_LAUNCHER": "ccache", "CMAKE_C_COMPILER_LAUNCHER": "ccache",
                        "CMAKE_CUDA_COMPILER_LAUNCHER": "ccache"}
            env |= {name: value for name, value in os.environ.items()
                    if re.fullmatch(r"(?i)(https?|no)_proxy", name)}
        env = [f"{name}={value}" for name, value in env.items()]
        inside = ["chroot", "--userspec", f"{self.user}:{self.user}", str(self.tree), "env", "-i",
                  f"--chdir={self.folder}", *env]
        script = " && ".join(mounts) + f' && exec {shlex.join(inside)} "$@"'
        return ["unshare", "--mount", "--pid", "--fork", "--kill-child", *extra, "bash", "-c", script, "-"]

    def sh(self, command, **options):
        run([*self.prefix(), "/bin/sh", "-c", command], **options)

    def copy(self, sources, target, base):
        folder = len(sources) > 1 or target.endswith("/") or target == "."
        goal = self.within(target)
        for source in sources:
            path = base / source.lstrip("/")
            if path.is_dir():
                goal.mkdir(parents=True, exist_ok=True)
                run(["cp", "-a", "--no-preserve=ownership", "-T", path, goal])
            else:
                (goal if folder else goal.parent).mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, goal)


def context(folder):
    """What .dockerignore leaves of the source tree: its first line leaves nothing, others name."""
    lines = [line for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").split("\n")
             if line and not line.startswith("#")]
    if lines[0] != "*" or not all(line.startswith("!") for line in lines[1:]):
        sys.exit(".dockerignore is expected to begin with * and to name what is not ignored with !")
    fresh(folder)
    for line in lines[1:]:
        for path in glob.glob(line[1:], root_dir=ROOT):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            run(["cp", "-a", ROOT / path, folder / path])
    return folder


def bare(folder, suite):
    """A tree as the image has it: the smallest system, and the sources of the suite's updates."""
    tree = folder / f"base-{suite}"
    if (tree / "complete").exists():
        return tree
    fresh(tree)
    run(["debootstrap", "--variant=minbase", suite, tree], stdout=subprocess.DEVNULL)
    (tree / "etc/apt/sources.list").write_text(
        f"deb http://deb.debian.org/debian {suite} main\n"
        f"deb http://deb.debian.org/debian {suite}-updates main\n"
        f"deb http://deb.debian.org/debian-security {suite}-security main\n", encoding="utf-8")
    (tree / "complete").touch()
    return tree


def build(args):
    stages, stage, args.work = {}, None, args.work.resolve()
    args.work.mkdir(parents=True, exist_ok=True)
    sources = context(args.work / "context")
    for word, text in instructions(ROOT / "packaging/Dockerfile"):
        print(f"== {word} {text[:110]}", flush=True)
        start = time.monotonic()
        if word == "FROM":
            image, _, name = text.partition(" AS ")
            tree = args.work / f"stage{len(stages)}"
            fresh(tree)
            run(["cp", "-a", "--reflink=auto", bare(args.work, IMAGES[image]), tree])
            stage = stages[name or str(len(stages))] = Stage(tree, args.arguments, args.ccache)
            if args.ccache and name:
                stage.sh("apt-get update -qq && apt-get install -y -qq --no-install-recommends ccache",
                         stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        elif word == "ARG":
            name, _, value = text.partition("=")
            stage.arguments[name] = args.arguments.get(name, "".join(shlex.split(value)))
        elif word == "ENV":
            stage.env |= dict(part.split("=", 1) for part in shlex.split(text))
        elif word == "RUN":
            stage.sh(text)
        elif word == "COPY":
            words = shlex.split(text)
            base = stages[words.pop(0)[7:]].tree if words[0].startswith("--from=") else sources
            stage.copy(words[:-1], words[-1], base)
        elif word == "WORKDIR":
            stage.folder = text
            stage.within(text).mkdir(parents=True, exist_ok=True)
        elif word == "USER":
            stage.user = text
        elif word == "HEALTHCHECK":
            stage.health = text.partition("CMD ")[2]
        elif word == "ENTRYPOINT":
            stage.entry = json.loads(text)
        elif word == "CMD":
            stage.command = json.loads(text)
        elif word not in ("VOLUME", "EXPOSE"):
            sys.exit(f"the instruction {word} is not known here")
        print(f"   {time.monotonic() - start:.0f} s", flush=True)
    return stage


def ask(stage):
    """Runs its program as process 1, the healthcheck, a question, and its stop."""
    (stage.tree / "tmp/question").write_text(json.dumps(QUESTION), encoding="utf-8")
    server = [*stage.prefix(["--net"]), *stage.entry, *(stage.command or [])]
    print("== " + shlex.join(stage.entry), flush=True)
    process = subprocess.Popen(server, stderr=subprocess.PIPE, text=True)
    inner = None
    try:
        for _ in range(100):  # the process that unshare forks, which becomes the program
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            if children:
                inner = children[0]
                break
            time.sleep(0.1)
        beside = ["nsenter", "--target", inner, "--net", "--pid"]
        run([*beside, "ip", "link", "set", "lo", "up"])
        inside = [*beside, "chroot", "--userspec", f"{stage.user}:{stage.user}", str(stage.tree), "/bin/sh", "-c"]
        for _ in range(240):
            if subprocess.run([*inside, stage.health], stderr=subprocess.DEVNULL, check=False).returncode == 0:
                break
            if process.poll() is not None:
                sys.exit("the server ended: " + process.stderr.read())
            time.sleep(0.5)
        else:
            sys.exit("the server is not healthy after 120 s")
        answer = subprocess.run(
            [*inside, "curl -fsS -d @/tmp/question http://127.0.0.1:8080/v1/chat/completions"],
            stdout=subprocess.PIPE, check=True).stdout
        answer = json.loads(answer)["choices"][0]["message"]["content"]
        who = Path(f"/proc/{inner}/status").read_text().split("\nUid:\t")[1].split()[0]
        print(f"   it answers: {answer!r}, as user {who}")
        if "48213" not in answer or who == "0":
            sys.exit("the answer or the user is wrong")
        subprocess.run(["kill", "-TERM", inner], check=True)
        code = process.wait(60)
        if code != 0:
            sys.exit(f"the server was told to stop and ended with {code}: {process.stderr.read()}")
    finally:
        if process.poll() is None:
            process.kill()
    size = subprocess.run(["du", "-sxm", stage.tree], stdout=subprocess.PIPE, text=True, check=True).stdout.split()[0]
    print(f"   it stopped well; its tree has {size} MB")


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--work", type=Path, default=ROOT / "build/dockerfile")
parser.add_argument("--ccache")
parser.add_argument("--build-arg", action="append", default=[])
options = parser.parse_args()
options.arguments = dict(argument.split("=", 1) for argument in options.build_arg)
if os.geteuid() != 0 or not shutil.which("debootstrap"):
    sys.exit("this needs root and debootstrap")
ask(build(options))
