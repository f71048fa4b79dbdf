#!/usr/bin/env python3
"""Measures what the store saves: a prompt is computed by one server and read from the store by later
ones. Prints the time to the first token of both, the bytes, and the rate at which the disk gives the
same files with O_DIRECT in the same run.

    store_speed.py OMNIKV [--tokens 24000] [--runs 3] [--folder DIR] [-- FLAGS OF serve]

OMNIKV     the program
--tokens   of the prompt, whose numbers are made up
--runs     servers that read it from the store
--folder   where the store is made (default: the working folder); its disk is the one that is measured

Without flags the shipped model runs, as the program finds it. A large model on a card:

    store_speed.py build/release/tools/omnikv --tokens 131000 -- -m MODEL --device cuda --policy full

The times are those of a client that asks for one token, which has the server's reading of the request
in them. Each server has answered a short question before. The rate is that of 16 threads that read
pieces of 1 MiB, the best of three passes. Ends with 1 where the prompt did not come from the store.
"""

import argparse
import json
import mmap
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PIECE = 1 << 20
THREADS = 16


class Server:
    def __init__(self, args, store):
        self.process = subprocess.Popen(
            [args.omnikv, "serve", "--port", "0", "--ctx", str(args.tokens + 512), "--store", store,
             "--store-size", "1TiB", "--request-timeout", "0", *args.flags],
            stderr=subprocess.PIPE, text=True)
        said = []
        for line in self.process.stderr:
            said.append(line)
            if found := re.search(r"answers on (http://\S+)", line):
                self.base = found[1]
                threading.Thread(target=self.process.stderr.read, daemon=True).start()
                break
        else:
            sys.exit(f"store_speed.py: the server did not start:\n{''.join(said)}")
        self.ask(list(range(100, 164)))

    def ask(self, prompt):
        """Seconds until one token is there, and how many tokens of the prompt came from the store."""
        body = json.dumps({"prompt": prompt, "max_tokens": 1, "temperature": 0}).encode()
        request = urllib.request.Request(self.base + "/v1/completions", body)
        start = time.monotonic()
        with urllib.request.urlopen(request) as reply:
            got = json.loads(reply.read())
        return time.monotonic() - start, got["omnikv"]["stored_tokens"]

    def metric(self, name):
        with urllib.request.urlopen(self.base + "/metrics") as reply:
            return float(re.search(rf"^{name}{{.*}} (\S+)$", reply.read().decode(), re.M)[1])

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()


def forget(paths):
    """Drops the pages of files from the page cache."""
    for path in paths:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def disk_rate(paths):
    """Bytes a second with O_DIRECT; None where the file system refuses it."""
    fds = []
    memory = threading.local()

    def read(piece):
        if not hasattr(memory, "piece"):
            memory.piece = mmap.mmap(-1, PIECE)
        fd, at = piece
        return os.preadv(fd, [memory.piece], at)

    try:
        for path in paths:
            fds.append(os.open(path, os.O_RDONLY | os.O_DIRECT))
        pieces = [(fd, at) for fd in fds for at in range(0, os.fstat(fd).st_size, PIECE)]
        best = 0
        with ThreadPoolExecutor(THREADS) as pool:
            for _ in range(3):
                start = time.monotonic()
                got = sum(pool.map(read, pieces))
                best = max(best, got / (time.monotonic() - start))
        return best
    except OSError:
        return None
    finally:
        for fd in fds:
            os.close(fd)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("omnikv")
    parser.add_argument("--tokens", type=int, default=24_000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--folder", default=".")
    own, flags = sys.argv[1:], []
    if "--" in own:
        own, flags = own[:own.index("--")], own[own.index("--") + 1:]
    args = parser.parse_args(own)
    args.flags = flags
    draw = random.Random(1)
    prompt = [draw.randrange(100, 1000) for _ in range(args.tokens)]
    with tempfile.TemporaryDirectory(dir=args.folder) as store:
        server = Server(args, store)
        computed, _ = server.ask(prompt)
        server.stop()  # which writes what is to be stored
        # A folder of this run alone: the context, and the segments that it names.
        paths = [path for kind in ("*.ctx", "*.seg") for path in Path(store).glob(kind)]
        if not paths:
            sys.exit("store_speed.py: the server stored nothing")
        size = sum(os.path.getsize(path) for path in paths)
        times, rates, direct = [], [], 0
        for _ in range(args.runs):
            forget(paths)
            rates.append(disk_rate(paths))
            forget(paths)
            server = Server(args, store)
            seconds, stored = server.ask(prompt)
            times.append(seconds)
            direct += server.metric("omnikv:store_read_direct_total") > 0
            server.stop()
            if stored < args.tokens - 64:
                sys.exit(f"store_speed.py: {stored} of {args.tokens} tokens came from the store")
    first = statistics.median(times)
    print(f"tokens                        {args.tokens}")
    print(f"bytes of its {len(paths):3} files         {size} ({size / 2**20:.1f} MiB)")
    print(f"first token, computed         {computed:.3f} s")
    print(f"first token, from the store   {first:.3f} s"
          f" (median of {', '.join(f'{t:.3f}' for t in times)})")
    print(f"computed / from the store     {computed / first:.1f}")
    print(f"read by io_uring, O_DIRECT    {direct} of {args.runs} times")
    if None in rates:
        print("the disk, O_DIRECT            refused here")
        return
    rate = max(rates)
    bound = size / (0.8 * rate) + 0.3
    print(f"the disk, O_DIRECT            {rate / 1e6:.0f} MB/s"
          f" ({', '.join(f'{r / 1e6:.0f}' for r in rates)})")
    print(f"bytes / (0.8 x rate) + 0.3 s  {bound:.3f} s: {'met' if first <= bound else 'missed'}")


if __name__ == "__main__":
    main()
