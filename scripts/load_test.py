#!/usr/bin/env python3
"""Loads a running server with many streams at once, and says how long they waited: percentiles of the
time to the first token, between tokens, and in all; errors; and the server's resident memory.

    load_test.py URL [--streams 1000] [--seconds 60] [--tokens 16] [--pid PID]

Each of the streams asks, reads its answer to the end, and asks again, until the time is over. Prompts
are of mixed lengths, some with a beginning in common, and of mixed policies. Exits with 1 where a
reply failed, or where the memory in the last third of the time is more than 2 % above that of the
second third.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from urllib.parse import urlsplit

FILLER = "The grass is green and the sky is blue over the hills. "
POLICIES = [None, {"policy": "full"}, {"policy": "omnikv", "budget": 128},
            {"policy": "streaming", "budget": 128}, {"policy": "snapkv", "budget": 128},
            {"policy": "tova", "budget": 128}]


def question(draw, tokens):
    key = draw.randrange(10)
    beginning = FILLER * draw.choice([0, 1, 4, 20]) if key < 5 else FILLER * draw.randrange(1, 12)
    body = {"stream": True, "max_tokens": tokens, "temperature": 0,
            "messages": [{"role": "user", "content":
                          f"{beginning}The pass key is {48_213 + key}. What is the pass key?"}]}
    if (policy := draw.choice(POLICIES)) is not None:
        body["omnikv"] = policy
    return body


class Times:
    def __init__(self):
        self.first, self.between, self.whole = [], [], []
        self.failed, self.tokens, self.open, self.most_open = [], 0, 0, 0


async def ask(host, port, body, times):
    text = json.dumps(body).encode()
    start = time.monotonic()
    reader, writer = await asyncio.open_connection(host, port)
    times.open += 1
    times.most_open = max(times.most_open, times.open)
    try:
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: load\r\nConnection: close\r\n"
                     b"Content-Length: %d\r\n\r\n" % len(text) + text)
        status = await reader.readline()
        while (await reader.readline()).strip():
            pass
        last, ended = None, False
        async for line in reader:
            if b'"content":"' in line and b'"content":""' not in line:
                now = time.monotonic()
                (times.first if last is None else times.between).append(now - (last or start))
                last = now
                times.tokens += 1
            ended = ended or b"[DONE]" in line
        if b" 200 " not in status or not ended:
            times.failed.append(status)
        times.whole.append(time.monotonic() - start)
    finally:
        times.open -= 1
        writer.close()


async def client(host, port, seed, until, tokens, times):
    draw = random.Random(seed)
    while time.monotonic() < until:
        try:
            await ask(host, port, question(draw, tokens), times)
        except OSError as failure:
            times.failed.append(failure)
            await asyncio.sleep(0.1)


def resident(pid):
    with open(f"/proc/{pid}/statm", encoding="ascii") as f:
        return int(f.read().split()[1]) * 4096


async def watch(pid, until, sizes):
    while time.monotonic() < until:
        sizes.append(resident(pid))
        await asyncio.sleep(0.5)


def percentiles(name, values):
    values = sorted(values)
    at = [values[min(len(values) - 1, int(len(values) * p))] for p in (0.5, 0.95, 0.99)] if values else []
    print(f"{name}: " + ", ".join(f"{p} {1e3 * v:.0f} ms" for p, v in zip(("p50", "p95", "p99"), at)))


async def main(args):
    address = urlsplit(args.url)
    until = time.monotonic() + args.seconds
    times, sizes = Times(), []
    tasks = [client(address.hostname, address.port, seed, until, args.tokens, times)
             for seed in range(args.streams)]
    if args.pid:
        tasks.append(watch(args.pid, until, sizes))
    await asyncio.gather(*tasks)
    print(f"{len(times.whole)} replies, {len(times.failed)} failed, {times.tokens} tokens, "
          f"{times.tokens / args.seconds:.0f} tok/s, {times.most_open} streams open at once")
    percentiles("first token", times.first)
    percentiles("between tokens", times.between)
    percentiles("whole reply", times.whole)
    grows = False
    if sizes:
        third = len(sizes) // 3
        second, last = max(sizes[third:2 * third]), max(sizes[2 * third:])
        grows = last > 1.02 * second
        print(f"resident: {second / 2**20:.0f} MiB in the second third, {last / 2**20:.0f} in the last")
    for failure in times.failed[:5]:
        print("failed:", failure)
    return 1 if times.failed or grows or not times.whole else 0


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("url")
parser.add_argument("--streams", type=int, default=1000)
parser.add_argument("--seconds", type=float, default=60)
parser.add_argument("--tokens", type=int, default=16)
parser.add_argument("--pid", type=int)
sys.exit(asyncio.run(main(parser.parse_args())))
