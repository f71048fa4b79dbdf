#!/usr/bin/env python3
"""Kills the server again and again while it writes its store: afterwards, whatever is there opens,
and every answer is the one that a server without a store gives.
Usage: store_test.py SOURCE OMNIKV [KILLS]"""

import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

SOURCE, OMNIKV = sys.argv[1:3]
KILLS = int(sys.argv[3]) if len(sys.argv) > 3 else 8
FILLER = "The grass is green and the sky is blue over the hills of this part of the country. "


def start(*flags):
    process = subprocess.Popen([OMNIKV, "serve", "--port", "0", "--ctx", "8k", *flags], cwd=SOURCE,
                               stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        if found := re.search(r"answers on (http://\S+)", line):
            threading.Thread(target=process.stderr.read, daemon=True).start()
            return process, found[1]
    sys.exit("the server did not start")


def ask(base, key, sentences):
    """The answer, and how many tokens of the prompt came from the store."""
    text = FILLER * sentences + f"The pass key of {key} is {10_000 + 37 * key}. " + FILLER * 3
    body = {"temperature": 0, "max_tokens": 16,
            "messages": [{"role": "user", "content": f"{text}What is the pass key of {key}?"}]}
    request = urllib.request.Request(base + "/v1/chat/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=120) as reply:
        got = json.loads(reply.read())
    return got["choices"][0]["message"]["content"], got["omnikv"]["stored_tokens"]


questions = [(key, 20 + 11 * key % 60) for key in range(6)]
process, base = start()
right = {q: ask(base, *q)[0] for q in questions}
process.send_signal(signal.SIGTERM)
if process.wait(60) != 0:
    sys.exit("the server did not end well")

draw = random.Random(1)
from_store = 0
with tempfile.TemporaryDirectory() as folder:
    for kill in range(KILLS + 1):
        process, base = start("--store", folder)
        for q in draw.sample(questions, 3):
            answer, stored = ask(base, *q)
            from_store += stored > 0
            if answer != right[q]:
                sys.exit(f"after {kill} kills {q} is answered by {answer!r}, not {right[q]!r}")
            if kill < KILLS and draw.random() < 0.4:
                break
        # An answer is out before its context is written: the kill comes in between, in the middle of a
        # segment, or between the segments and the file that names them.
        time.sleep(draw.random() * 0.04)
        process.kill() if kill < KILLS else process.send_signal(signal.SIGTERM)
        code = process.wait(60)
        if kill == KILLS and code != 0:
            sys.exit(f"the server ended with {code}")
    process, base = start("--store", folder)
    for q in questions:
        answer, stored = ask(base, *q)
        from_store += stored > 0
        if answer != right[q]:
            sys.exit(f"in the end {q} is answered by {answer!r}, not {right[q]!r}")
    process.send_signal(signal.SIGTERM)
    process.wait(60)
    contexts, segments = (len(list(Path(folder).glob(kind))) for kind in ("*.ctx", "*.seg"))
print(f"{KILLS} kills, {from_store} prompts from the store, "
      f"{contexts} contexts and {segments} segments in the end")
if from_store == 0 or contexts == 0 or segments == 0:
    sys.exit("nothing came from the store")
