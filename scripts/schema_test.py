#!/usr/bin/env python3
"""Asks a running server for answers that fit random JSON schemas, and checks each with PyPI's
jsonschema, formats included (those of time and duration where rfc3339-validator and isoduration
are installed besides).

    schema_test.py BASE_URL [--n 1000] [--seed 1] [--at-once 8] [--key KEY] [--model NAME]

BASE_URL is that of the server (http://127.0.0.1:8080). The schemas are bounded in every length, so that
the longest answer is known: each request may take as many tokens as that has bytes, and an answer that
is cut by its length is a failure, as is every other reply than 200. Answers are sampled at temperature 1
with the seed --seed and the schema's number, so that a failure can be repeated (--from N --n 1).
Exits with 1 where an answer does not fit.
"""

import argparse
import json
import random
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import jsonschema

NAMES = ["title", "description", "default", "type", "a", "ab", 'b"c', "h\u00e9", "n/m", "x y", "\n", ""]
TEXTS = ["", "a", 'a "quoted" one', "back\\slash", "\u00fcber", "\U0001f600", "line\nend", "http://x/y"]
# Each with the characters of the longest text.
PATTERNS = {"^[a-z]{1,5}$": 5, "^[A-F0-9]{2}-[0-9]{3}$": 6, "^(yes|no|\\d{1,3})$": 3, "^[^x]{0,3}$": 3,
            "^.{2}$": 2, "^\\w{1,4}\\s?\\S$": 6, "^(ab|[cd]e?){2,4}$": 8}
FORMATS = {"date": 10, "time": 24, "date-time": 35, "duration": 42, "uuid": 36, "ipv4": 15, "ipv6": 39}
MOST_BYTES = 6000  # of an answer


class Draw(random.Random):
    """Schemas of which each has a value and none has an endless one."""

    def coin(self):
        return self.random() < 0.5

    def root(self):
        while True:
            definitions = {"leaf": self.schema(0, ()), "pair": self.object(1, ("leaf",))}
            schema = {**self.schema(3, ("leaf", "pair"), 10), "$defs": definitions}
            if most_bytes(schema, definitions) <= MOST_BYTES:
                return schema

    def schema(self, depth, names, least_kind=0):
        kind = self.randint(least_kind, 16 if depth else 9)
        if kind == 0:
            return {"type": "boolean"}
        if kind == 1:
            return {"type": "null"} if self.coin() else {"const": self.scalar()}
        if kind in (2, 3):
            least = self.randint(0, 4)
            schema = {"type": "string", "maxLength": least + self.randint(0, 8)}
            return {**schema, "minLength": least} if self.coin() else schema
        if kind == 4:
            return {"type": "string", "pattern": self.choice(list(PATTERNS))}
        if kind == 5:
            return {"type": "string", "format": self.choice(list(FORMATS))}
        if kind == 6:
            low = self.randint(-2000, 2000) // self.choice([1, 1, 10, 300])
            high = low + self.randint(0, 100_000) // self.choice([1, 10, 5000])
            schema = {"type": "integer"}
            schema |= {"minimum": low} if self.coin() else {"exclusiveMinimum": low - 1}
            schema |= {"maximum": high} if self.coin() else {"exclusiveMaximum": high + 1}
            if self.random() < 0.25:  # 0 is a multiple of all; bounds are at most 10,000 apart then
                schema = {"type": "integer", "minimum": -self.randint(0, 5000),
                          "maximum": self.randint(0, 5000), "multipleOf": self.randint(1, 1024)}
            return schema
        if kind == 7:
            unit = 10 ** self.randint(0, 3)
            low = self.randint(-5000, 5000)
            return {"type": "number", "minimum": low / unit,
                    self.choice(["maximum", "exclusiveMaximum"]): (low + self.randint(1, 5000)) / unit}
        if kind == 8:
            return {"enum": [self.scalar() for _ in range(self.randint(1, 5))]}
        if kind == 9:
            if names:
                return {"$ref": "#/$defs/" + self.choice(names)}
            return {"type": ["boolean", "null"]}
        if kind in (10, 11):
            return {"anyOf": [self.schema(depth - 1, names) for _ in range(self.randint(1, 3))]}
        if kind == 12:
            least = self.randint(0, 3)
            return {"type": "array", "items": self.schema(depth - 1, names), "minItems": least,
                    "maxItems": least + self.randint(0, 2)}
        if kind == 13:
            first = [self.schema(depth - 1, names) for _ in range(self.randint(1, 3))]
            return {"type": "array", "prefixItems": first, "items": self.schema(0, names),
                    "minItems": self.randint(0, len(first)), "maxItems": len(first) + self.randint(0, 2)}
        if kind == 14:
            return {"type": "object", "propertyNames": {"maxLength": 4},
                    "additionalProperties": self.schema(0, names), "maxProperties": self.randint(1, 2)}
        return self.object(depth, names)

    def object(self, depth, names):
        properties = {self.choice(NAMES): self.schema(depth - 1, names) for _ in range(self.randint(0, 5))}
        return {"type": "object", "properties": properties, "additionalProperties": False,
                "required": [name for name in properties if self.random() < 0.7]}

    def scalar(self):
        return self.choice([None, self.coin(), self.randint(-1000, 1000), (2 * self.randint(-500, 500) + 1) / 8,
                            {"title": self.randint(0, 9), "list": [1, "two"]}, self.choice(TEXTS)])


def most_bytes(schema, definitions):
    """At least the bytes of the longest answer, with white space wherever it may stand."""
    def inner(schema):
        return most_bytes(schema, definitions)

    if "$ref" in schema:
        return inner(definitions[schema["$ref"].removeprefix("#/$defs/")])
    if "anyOf" in schema:
        return max(map(inner, schema["anyOf"]))
    for values in (schema.get("enum"), [schema["const"]] if "const" in schema else None):
        if values is not None:
            return max(2 * len(json.dumps(value)) for value in values)
    kind = schema["type"]
    if kind == "string":
        length = schema.get("maxLength") or PATTERNS.get(schema.get("pattern")) or FORMATS.get(schema.get("format"))
        return 2 + 4 * (length or 0)
    if kind == "array":
        first = schema.get("prefixItems", [])
        sizes = [inner(one) for one in first] + (schema["maxItems"] - len(first)) * [inner(schema["items"])]
        return 4 + sum(size + 3 for size in sizes)
    if kind == "object":
        if "maxProperties" in schema:
            return 4 + schema["maxProperties"] * (6 * 4 + 8 + inner(schema["additionalProperties"]))
        return 4 + sum(6 * len(name) + 8 + inner(one) for name, one in schema["properties"].items())
    return 24  # numbers, booleans, null


def ask(args, number):
    """Why the answer to schema `number` is wrong, or nothing; and its tokens."""
    draw = Draw(f"{args.seed}/{number}")
    schema = draw.root()
    body = {"messages": [{"role": "user", "content": draw.choice(
                ["Give me an example.", "The pass key is 48213. What is the pass key?", "Tell me a story."])}],
            "temperature": 1, "seed": args.seed * 1_000_000 + number, "max_tokens": MOST_BYTES + 1,
            "response_format": {"type": "json_schema",
                                "json_schema": {"name": "answer", "strict": True, "schema": schema}}}
    if args.model:
        body["model"] = args.model
    request = urllib.request.Request(args.url.rstrip("/") + "/v1/chat/completions", json.dumps(body).encode(),
                                     {"Authorization": f"Bearer {args.key}"})
    text, tokens = "", 0
    try:
        with urllib.request.urlopen(request, timeout=args.timeout) as reply:
            got = json.loads(reply.read())
        choice, tokens = got["choices"][0], got["usage"]["completion_tokens"]
        text = choice["message"]["content"]
        if choice["finish_reason"] != "stop":
            raise ValueError(f"it ended by {choice['finish_reason']}")
        if len(text.encode()) > most_bytes(schema, schema["$defs"]):
            raise ValueError("it is longer than the schema's longest value")
        jsonschema.Draft202012Validator.check_schema(schema)
        jsonschema.Draft202012Validator(
            schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER).validate(json.loads(text))
        return None, tokens
    except urllib.error.HTTPError as error:
        why = f"status {error.code}: {error.read().decode()}"
    except (OSError, ValueError, jsonschema.exceptions.ValidationError) as error:
        why = str(error).split("\n", 1)[0]
    return f"schema {number}: {why}\n  {json.dumps(schema)}\n  {text[:2000]!r}", tokens


def main(args):
    if not args.model:
        request = urllib.request.Request(args.url.rstrip("/") + "/v1/models",
                                         headers={"Authorization": f"Bearer {args.key}"})
        with urllib.request.urlopen(request, timeout=30) as reply:
            args.model = json.loads(reply.read())["data"][0]["id"]
    start, failures, tokens = time.monotonic(), 0, 0
    with ThreadPoolExecutor(args.at_once) as pool:
        for failure, count in pool.map(lambda number: ask(args, number), range(args.first, args.first + args.n)):
            tokens += count
            if failure:
                failures += 1
                print(failure, flush=True)
    seconds = time.monotonic() - start
    print(f"{args.n} schemas, {failures} failures, {tokens} tokens, {seconds:.0f} s")
    return failures > 0


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("url")
parser.add_argument("--n", type=int, default=1000)
parser.add_argument("--from", dest="first", type=int, default=0)
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--at-once", type=int, default=8)
parser.add_argument("--timeout", type=float, default=600)
parser.add_argument("--key", default="none")
parser.add_argument("--model", default="")
sys.exit(main(parser.parse_args()))
