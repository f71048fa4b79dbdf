#!/usr/bin/env python3
"""Clients as people have them, unmodified, against the server with the shipped model; what the README
shows of the server; and requests as Codex and Claude Code send them.
Usage: clients_test.py SOURCE OMNIKV"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.request
from pathlib import Path
from typing import Literal

import anthropic
import openai
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

SOURCE, OMNIKV = sys.argv[1:3]
KEY = "sk-of-the-test"
MODEL = "omnikv-tiny-q8_0"
QUESTION = "The pass key is 48213. What is the pass key?"
ANSWER = "The pass key is 48213."
ASK = [{"role": "user", "content": QUESTION}]
GREEDY = {"temperature": 0}  # this client knows no temperature
PLACE = {"type": "object", "properties": {"city": {"enum": ["Rome", "Paris"]}},
         "required": ["city"], "additionalProperties": False}
TOOL = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


class Server:
    """The program, with keys; `base` is its address."""

    def __init__(self, *flags):
        self.process = subprocess.Popen([OMNIKV, "serve", "--port", "0", *flags], cwd=SOURCE,
                                        stderr=subprocess.PIPE, text=True)
        self.said = []
        for line in self.process.stderr:
            self.said.append(line)
            if found := re.search(r"answers on (http://\S+)", line):
                self.base = found[1]
                return
        sys.exit("the server said: " + "".join(self.said))

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(60)
        self.said += self.process.stderr.readlines()
        if code != 0:
            sys.exit(f"the server ended with {code}: {''.join(self.said)}")


def post(path, body, headers=()):
    """A request by hand: the events of the reply, or its body."""
    request = urllib.request.Request(server.base + path, json.dumps(body).encode(),
                                     {"Authorization": f"Bearer {KEY}", **dict(headers)})
    with urllib.request.urlopen(request) as reply:
        text = reply.read().decode()
    if not body.get("stream"):
        return json.loads(text)
    events = []
    for block in text.strip().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if lines and lines["data"] != "[DONE]":
            events.append(json.loads(lines["data"]))
            assert lines.get("event", events[-1].get("type")) == events[-1].get("type"), block
    return events


class OpenAi(unittest.TestCase):
    def setUp(self):
        self.client = openai.OpenAI(base_url=server.base + "/v1", api_key=KEY, max_retries=0)

    def test_chat(self):
        answer = self.client.chat.completions.create(model=MODEL, messages=ASK, temperature=0)
        self.assertEqual(answer.choices[0].message.content, ANSWER)
        self.assertEqual(answer.choices[0].finish_reason, "stop")
        self.assertEqual(answer.usage.prompt_tokens, 21)
        self.assertEqual(answer.usage.total_tokens, 33)

    def test_stream(self):
        text, usage, reasons = "", None, []
        for chunk in self.client.chat.completions.create(
                model=MODEL, messages=ASK, temperature=0, stream=True,
                stream_options={"include_usage": True}):
            for choice in chunk.choices:
                text += choice.delta.content or ""
                reasons.append(choice.finish_reason)
            usage = chunk.usage or usage
        self.assertEqual(text, ANSWER)
        self.assertEqual([r for r in reasons if r], ["stop"])
        self.assertEqual(usage.completion_tokens, 12)

    def test_sampling_fields(self):
        answer = self.client.chat.completions.create(
            model=MODEL, messages=ASK, n=3, seed=4, temperature=0.9, top_p=0.95, max_tokens=5,
            presence_penalty=0.5, frequency_penalty=0.5, logit_bias={"5": -100}, stop=["\n\n"],
            logprobs=True, top_logprobs=4)
        self.assertEqual([c.index for c in answer.choices], [0, 1, 2])
        for choice in answer.choices:
            for token in choice.logprobs.content:
                self.assertEqual(len(token.top_logprobs), 4)
                self.assertLessEqual(token.logprob, 0)
        again = self.client.chat.completions.create(
            model=MODEL, messages=ASK, n=3, seed=4, temperature=0.9, top_p=0.95, max_tokens=5,
            presence_penalty=0.5, frequency_penalty=0.5, logit_bias={"5": -100}, stop=["\n\n"])
        self.assertEqual([c.message.content for c in answer.choices],
                         [c.message.content for c in again.choices])

    def test_tools_may_be_offered(self):
        answer = self.client.chat.completions.create(
            model=MODEL, messages=ASK, temperature=0,
            tools=[{"type": "function", "function": {"name": "weather", "parameters": TOOL}}])
        self.assertEqual(answer.choices[0].message.content, ANSWER)

    def test_tools_that_must_be_called(self):
        answer = self.client.chat.completions.create(
            model=MODEL, messages=ASK, tool_choice="required", max_tokens=300, seed=1,
            tools=[{"type": "function", "function": {"name": "weather", "parameters": PLACE}}])
        self.assertEqual(answer.choices[0].finish_reason, "tool_calls")
        call = answer.choices[0].message.tool_calls[0].function
        self.assertEqual(call.name, "weather")
        self.assertIn(json.loads(call.arguments)["city"], ["Rome", "Paris"])

    def test_structured_output(self):
        class Place(BaseModel):
            city: Literal["Rome", "Paris"]
            millions: int = Field(ge=1, le=9)
            capital: bool

        for seed in range(3):
            answer = self.client.chat.completions.parse(model=MODEL, messages=ASK, seed=seed,
                                                        response_format=Place)
            self.assertIn(answer.choices[0].message.parsed.city, ["Rome", "Paris"])
        text = self.client.responses.parse(model=MODEL, input=QUESTION, text_format=Place)
        self.assertIsInstance(text.output_parsed, Place)

    def test_completions(self):
        answer = self.client.completions.create(model=MODEL, prompt="Once upon", max_tokens=4,
                                                temperature=0, logprobs=2)
        self.assertEqual(answer.usage.completion_tokens, 4)
        self.assertEqual(len(answer.choices[0].logprobs.tokens), 4)

    def test_responses(self):
        answer = self.client.responses.create(model=MODEL, input=QUESTION, temperature=0)
        self.assertEqual(answer.output_text, ANSWER)
        kinds, text = [], ""
        with self.client.responses.stream(model=MODEL, input=QUESTION, temperature=0) as stream:
            for event in stream:
                kinds.append(event.type)
                if event.type == "response.output_text.delta":
                    text += event.delta
            self.assertEqual(stream.get_final_response().output_text, ANSWER)
        self.assertEqual(text, ANSWER)
        self.assertEqual([k for i, k in enumerate(kinds) if i == 0 or kinds[i - 1] != k], [
            "response.created", "response.in_progress", "response.output_item.added",
            "response.content_part.added", "response.output_text.delta",
            "response.output_text.done", "response.content_part.done",
            "response.output_item.done", "response.completed"])

    def test_policies(self):
        answer = self.client.chat.completions.create(
            model=MODEL, messages=ASK, temperature=0,
            extra_body={"omnikv": {"policy": "streaming", "budget": 16}})
        self.assertEqual(answer.omnikv["policy"], "streaming")
        self.assertLess(answer.omnikv["read_fraction"], 1)

    def test_models(self):
        self.assertEqual([m.id for m in self.client.models.list()], [MODEL])
        self.assertEqual(self.client.models.retrieve(MODEL).owned_by, "omnikv")

    def test_refusals(self):
        ask = self.client.chat.completions.create
        with self.assertRaisesRegex(openai.NotFoundError, "there is no model 'gpt-4'"):
            ask(model="gpt-4", messages=ASK)
        with self.assertRaisesRegex(openai.BadRequestError, "temperature"):
            ask(model=MODEL, messages=ASK, temperature=300)
        with self.assertRaisesRegex(openai.BadRequestError, "context holds"):
            ask(model=MODEL, messages=[{"role": "user", "content": "word " * 50_000}])
        with self.assertRaisesRegex(openai.BadRequestError, "embeddings"):
            self.client.embeddings.create(model=MODEL, input="x")
        with self.assertRaises(openai.AuthenticationError):
            openai.OpenAI(base_url=server.base + "/v1", api_key="sk-other",
                          max_retries=0).models.list()

    def test_a_client_that_goes(self):
        stream = self.client.completions.create(model=MODEL, prompt="Once", max_tokens=4000,
                                                stream=True, extra_body={"ignore_eos": True})
        next(iter(stream))
        stream.close()
        for _ in range(500):
            with urllib.request.urlopen(urllib.request.Request(
                    server.base + "/metrics", headers={"Authorization": f"Bearer {KEY}"})) as page:
                if re.search(r"num_requests_running\S+ 0$", page.read().decode(), re.M):
                    return
            time.sleep(0.02)
        self.fail("its request still runs")


class Anthropic(unittest.TestCase):
    def setUp(self):
        self.client = anthropic.Anthropic(base_url=server.base, api_key=KEY, max_retries=0)

    def test_messages(self):
        answer = self.client.messages.create(model=MODEL, messages=ASK, max_tokens=40,
                                             extra_body=GREEDY, system="Be brief.")
        self.assertIn("48213", answer.content[0].text)
        self.assertEqual(answer.stop_reason, "end_turn")

    def test_stream(self):
        kinds = []
        with self.client.messages.stream(model=MODEL, messages=ASK, max_tokens=40,
                                         extra_body=GREEDY) as stream:
            for event in stream:
                kinds.append(event.type)
            self.assertEqual(stream.get_final_text(), ANSWER)
            self.assertEqual(stream.get_final_message().usage.output_tokens, 12)
        kinds = [k for k in kinds if k != "text"]  # the client's own
        self.assertEqual([k for i, k in enumerate(kinds) if i == 0 or kinds[i - 1] != k], [
            "message_start", "content_block_start", "content_block_delta", "content_block_stop",
            "message_delta", "message_stop"])

    def test_tools_and_counts(self):
        tools = [{"name": "weather", "input_schema": TOOL}]
        answer = self.client.messages.create(model=MODEL, messages=ASK, max_tokens=40,
                                             extra_body=GREEDY, tools=tools)
        self.assertEqual(answer.content[0].text, ANSWER)
        count = self.client.messages.count_tokens(model=MODEL, messages=ASK)
        self.assertEqual(count.input_tokens, 21)

    def test_refusals(self):
        with self.assertRaisesRegex(anthropic.BadRequestError, "temperature"):
            self.client.messages.create(model=MODEL, messages=ASK, max_tokens=4,
                                        extra_body={"temperature": -1})
        with self.assertRaises(anthropic.NotFoundError):
            self.client.messages.create(model="claude", messages=ASK, max_tokens=4)
        with self.assertRaises(anthropic.AuthenticationError):
            anthropic.Anthropic(base_url=server.base, api_key="other", max_retries=0).messages.create(
                model=MODEL, messages=ASK, max_tokens=4)


class LangChain(unittest.TestCase):
    def test_invoke_and_stream(self):
        chat = ChatOpenAI(base_url=server.base + "/v1", api_key=KEY, model=MODEL, temperature=0)
        self.assertEqual(chat.invoke(QUESTION).content, ANSWER)
        self.assertEqual("".join(chunk.content for chunk in chat.stream(QUESTION)), ANSWER)


class Agents(unittest.TestCase):
    def test_codex(self):
        """Its twelve fields and, for one answer, a temperature; with tools that are no functions."""
        events = post("/v1/responses", {
            "temperature": 0,
            "model": MODEL, "instructions": "You are a coding agent.", "stream": True,
            "store": False, "include": ["reasoning.encrypted_content"], "tool_choice": "auto",
            "parallel_tool_calls": False, "prompt_cache_key": "0198", "client_metadata": {"a": "b"},
            "reasoning": {"effort": "medium", "summary": "auto"},
            "tools": [{"type": "function", "name": "shell", "strict": False, "parameters": TOOL},
                      {"type": "web_search"}, {"type": "custom", "name": "apply_patch"}],
            "input": [{"type": "message", "role": "user",
                       "content": [{"type": "input_text", "text": QUESTION}]}]})
        self.assertEqual([e["sequence_number"] for e in events], list(range(len(events))))
        self.assertEqual(events[0]["type"], "response.created")
        self.assertEqual(events[-1]["type"], "response.completed")
        text = "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")
        self.assertIn("48213", text)
        with self.assertRaises(urllib.error.HTTPError) as refused:
            post("/v1/responses", {"input": "x", "previous_response_id": "resp_1"})
        self.assertEqual(refused.exception.code, 400)

    def test_claude_code(self):
        """A line of its system prompt changes with every call, and the prompt is there all the same."""
        def ask(number):
            return post("/v1/messages?beta=true", {
                "model": MODEL, "max_tokens": 32_000, "stream": True, "temperature": 0,
                "metadata": {"user_id": "u"},
                "system": [
                    {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2; cch={number};"},
                    {"type": "text", "text": "You are an agent. " * 40,
                     "cache_control": {"type": "ephemeral"}}],
                "tools": [{"name": "Bash", "description": "Runs a command.", "input_schema": TOOL}],
                "messages": [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]},
                {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219"})
        first, second = ask("1a2b3"), ask("9z8y7")
        self.assertEqual(first[0]["type"], "message_start")
        self.assertEqual(first[-1]["type"], "message_stop")
        usage = next(e for e in second if e["type"] == "message_delta")["usage"]
        self.assertGreater(usage["cache_read_input_tokens"], 100)


class Schemas(unittest.TestCase):
    def test_answers_fit_random_schemas(self):
        """A few of those that scripts/schema_test.py asks for."""
        done = subprocess.run(
            [sys.executable, str(Path(SOURCE, "scripts/schema_test.py")), server.base, "--n", "30", "--key", KEY],
            capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("30 schemas, 0 failures", done.stdout)


class Readme(unittest.TestCase):
    def test_examples_of_the_server(self):
        """The blocks of shell and Python in the part on serving, with the test's address."""
        text = Path(SOURCE, "README.md").read_text(encoding="utf-8")
        part = text.split("\n## Serving\n")[1].split("\n## ")[0]
        blocks = re.findall(r"```(sh|python)\n(.*?)```", part, re.DOTALL)
        self.assertGreaterEqual(len(blocks), 2)
        for language, block in blocks:
            block = block.replace("http://127.0.0.1:8080", server.base).replace("none", KEY)
            command = ["bash", "-euc"] if language == "sh" else [sys.executable, "-c"]
            done = subprocess.run([*command, block], capture_output=True, text=True, check=False)
            self.assertEqual(done.returncode, 0, block + done.stderr)
            self.assertIn("48213", done.stdout, block)


with tempfile.TemporaryDirectory() as folder:
    keys = os.path.join(folder, "keys")
    Path(keys).write_text(f"# of a test\n{KEY}\n", encoding="utf-8")
    server = Server("--api-key-file", keys, "--ctx", "16k")
    program = unittest.main(argv=sys.argv[:1], exit=False, verbosity=2)
    server.stop()
sys.exit(not program.result.wasSuccessful())
