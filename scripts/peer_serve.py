#!/usr/bin/env python3
"""Compares omnikv's server with llama.cpp's under the same load and the same model file, one server
at a time, on CPUs: tokens per second of one request alone and of eight at once.

    peer_serve.py OMNIKV LLAMA_SERVER [--model FILE.gguf] [--threads 2] [--rounds 3] [--at-once 8]

scripts/build_llama_server.sh builds LLAMA_SERVER. Each request has a prompt of about 200 tokens that no
other shares and asks for 250 tokens, whatever they say, greedily; contexts have 512 tokens. A round of a
server is one request alone, then --at-once together. Rounds of the servers alternate, so that both
see the same machine; figures are medians over rounds. Tokens count from the first to the last of a
round's streams (decode), and from the moment of asking (whole, prompts included). Where other programs
run the figures are noise, so the machine's load before each round is printed.
"""

import argparse
import json
import os
import random
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parent.parent
WORDS = ("the grass is green and sky blue over hills of this part country where people walk to town "
         "with their dogs or cats when rain has gone by noon in spring").split()
PROMPT, ANSWER, CONTEXT = 200, 250, 512


class Server:
    def __init__(self, name, command, base):
        self.name, self.base = name, base
        self.log = open(f"/tmp/peer_serve_{os.getpid()}_{name}.log", "w+", encoding="utf-8")
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log)
        for _ in range(600):
            try:
                with urllib.request.urlopen(base + "/health", timeout=5) as reply:
                    if reply.status == 200:
                        return
            except OSError:
                pass
            if self.process.poll() is not None:
                break
            time.sleep(0.2)
        self.log.seek(0)
        sys.exit(f"{name} did not start: {self.log.read()[-2000:]}")

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.log.close()
        os.unlink(self.log.name)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start(args, name):
    port, threads = free_port(), str(args.threads)
    if name == "omnikv":
        command = [args.omnikv, "serve", "--device", "cpu", "-m", args.model, "--port", str(port),
                   "--threads", threads, "--seats", str(args.at_once), "--ctx", str(CONTEXT),
                   "--kv-tokens", str(CONTEXT * args.at_once), "--kept-contexts", "0", "--policy", "full"]
    else:
        command = [args.llama_server, "-m", args.model, "--port", str(port), "-t", threads, "-tb", threads,
                   "-np", str(args.at_once), "-c", str(CONTEXT * args.at_once), "-fa", args.flash,
                   "--no-warmup", "--cache-ram", "0"]
    return Server(name, command, f"http://127.0.0.1:{port}")


def tokens_of(base, text):
    request = urllib.request.Request(base + "/tokenize", json.dumps({"content": text}).encode(),
                                     {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        return len(json.loads(reply.read())["tokens"])


def prompt(base, draw):
    """Words up to the length, by the server's own tokenizer."""
    words = [draw.choice(WORDS) for _ in range(PROMPT)]
    while tokens_of(base, " ".join(words)) > PROMPT:
        words.pop()
    return " ".join(words)


class Answer:
    """A stream: when it was asked, and when each piece of it came. It is parsed once it has ended, because
    the clients share the cores with the server."""

    def __init__(self, base, text):
        address = urlsplit(base)
        body = json.dumps({"prompt": text, "max_tokens": ANSWER, "temperature": 0, "stream": True,
                           "ignore_eos": True, "cache_prompt": False,
                           "stream_options": {"include_usage": True}}).encode()
        self.socket = socket.create_connection((address.hostname, address.port), timeout=600)
        self.asked, self.pieces = time.monotonic(), []
        self.socket.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\n"
                            "Content-Type: application/json\r\nConnection: close\r\n"
                            f"Content-Length: {len(body)}\r\n\r\n".encode() + body)

    def more(self):
        """Takes what came; false at the end."""
        piece = self.socket.recv(1 << 16)
        self.pieces.append((time.monotonic(), piece))
        return bool(piece)

    def parse(self):
        self.socket.close()
        whole = b"".join(piece for _, piece in self.pieces)
        if not whole.startswith(b"HTTP/1.1 200"):
            raise OSError(f"expected status 200, got {whole[:500]!r}")
        self.times, self.tokens = [], 0
        for when, piece in self.pieces:
            self.times += [when] * piece.count(b'"text":')
        for line in whole.splitlines():
            usage = line.startswith(b"data: {") and json.loads(line[6:]).get("usage")
            if usage:
                self.tokens = usage["completion_tokens"]
        if self.tokens != ANSWER:
            raise OSError(f"{self.tokens} tokens came, not {ANSWER}")


def together(base, texts):
    """Tokens per second of the streams between the first and the last token, and from the start."""
    answers = [Answer(base, text) for text in texts]
    with selectors.DefaultSelector() as selector:
        for answer in answers:
            selector.register(answer.socket, selectors.EVENT_READ, answer)
        while selector.get_map():
            for key, _ in selector.select():
                if not key.data.more():
                    selector.unregister(key.fileobj)
    try:
        for answer in answers:
            answer.parse()
    except (OSError, KeyError, TypeError, ValueError) as failure:
        sys.exit(f"{base}: {failure}")
    tokens = sum(answer.tokens for answer in answers)
    end = max(answer.times[-1] for answer in answers)
    # While all decode: from the last stream's first token on.
    begin = max(answer.times[0] for answer in answers)
    late = sum(answer.tokens * sum(t > begin for t in answer.times) / len(answer.times) for answer in answers)
    return late / (end - begin), tokens / (end - min(answer.asked for answer in answers))


def main(args):
    servers = ["omnikv", "llama.cpp"]
    figures = {name: {"one": [], "many": []} for name in servers}
    draw = random.Random(1)
    for number in range(args.rounds):
        for name in servers:
            load = os.getloadavg()[0]
            server = start(args, name)
            try:
                texts = [prompt(server.base, draw) for _ in range(args.at_once + 2)]
                together(server.base, texts[:1])  # warms up
                one = together(server.base, texts[1:2])
                many = together(server.base, texts[2:])
            finally:
                server.stop()
            figures[name]["one"].append(one)
            figures[name]["many"].append(many)
            print(f"round {number + 1}, {name}: one {one[0]:.0f} tok/s ({one[1]:.0f} whole), {args.at_once} "
                  f"{many[0]:.0f} ({many[1]:.0f} whole); load before {load:.1f}", flush=True)
    medians = {}
    for name in servers:
        (one, whole_one), (many, whole_many) = (
            [statistics.median(column) for column in zip(*figures[name][kind])] for kind in ("one", "many"))
        medians[name] = one, many
        print(f"{name}: one {one:.0f} tok/s ({whole_one:.0f} whole), {args.at_once} at once {many:.0f} "
              f"({whole_many:.0f} whole), {many / one:.2f} times one ({whole_many / whole_one:.2f} whole)")
    print(f"omnikv / llama.cpp: one {medians['omnikv'][0] / medians['llama.cpp'][0]:.2f}, "
          f"{args.at_once} at once {medians['omnikv'][1] / medians['llama.cpp'][1]:.2f}")


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("omnikv")
parser.add_argument("llama_server")
parser.add_argument("--model", default=str(ROOT / "models/omnikv-tiny-q8_0.gguf"))
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--rounds", type=int, default=3)
parser.add_argument("--at-once", type=int, default=8)
parser.add_argument("--flash", default="off", help="llama.cpp's flash attention: its decode is best without")
main(parser.parse_args())
