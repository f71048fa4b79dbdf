#!/usr/bin/env python3
"""What quickstart.sh shows: `full` and `omnikv` answer every question about the shipped document,
`streaming` none. Usage: quickstart_answers.py OMNIKV"""

import json
import subprocess
import sys


def main():
    command = [sys.argv[1], "eval", "quickstart", "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    got = {p["policy"]: (p["right"], p["asked"]) for p in json.loads(done.stdout)["policies"]}
    print(got)
    if got != {"full": (4, 4), "omnikv": (4, 4), "streaming": (0, 4)}:
        sys.exit("expected 4, 4 and 0 right answers of 4")


main()
