#!/usr/bin/env python3
"""The page of the server in a real browser, with the shipped model.

Usage: page_test.py BASE_URL OUT_DIR [--page FILE] [--only NAME]
  BASE_URL  a running server, as http://127.0.0.1:8080; its context holds 24K tokens at least
  OUT_DIR   gets the screenshots
  --page    serves this file at / and hands all other paths on to BASE_URL
  --only    runs the tests whose names contain NAME
It needs PyPI's playwright and a Chromium: /usr/bin/chromium, or what CHROMIUM names.
Exits with 0 where all passed, with 77 where the browser cannot be started here, else with 1."""

import argparse
import json
import os
import random
import re
import string
import sys
import threading
import time
import traceback
import urllib.parse
from pathlib import Path

from page_support import CONTRAST, LAYOUT, Proxy, Threads
from playwright.sync_api import Error, expect, sync_playwright

SECONDS = 600  # that a document may take to be read on a busy machine
EXPECTED = 30  # seconds that anything else may take there
WHO, KEY = "Anna", "48213"
RANDOM = random.Random(1)
GRASS = ("The grass is green. The sky is blue. The sun is yellow. Here we go. "
         "There and back again. ")


def document(tokens):
    """Filler of about so many tokens, with one fact in its middle. It begins like no other of a run, so
    that the server has not read it before; every run has the same ones."""
    parts = [f"The story of {''.join(RANDOM.choices(string.ascii_lowercase, k=8))}. "] + [GRASS] * (tokens // 24)
    parts.insert(len(parts) // 2, f"The pass key of {WHO} is {KEY}. ")
    return "".join(parts)


class Session:
    """A fresh browser profile with a page, which is watched."""

    def __init__(self, width=1280, height=800, scheme="light", path=""):
        self.context = BROWSER.new_context(viewport={"width": width, "height": height},
                                           color_scheme=scheme)
        self.context.grant_permissions(["clipboard-read", "clipboard-write"])
        self.context.set_default_timeout(4000 * EXPECTED)
        self.page = self.context.new_page()
        self.faults = []
        self.allowed = []  # patterns of console errors that a test asks for
        self.bodies = []   # of questions
        self.shots = f"{width}-{scheme}"
        self.page.on("console", self.on_console)
        self.page.on("pageerror", lambda e: self.faults.append(f"error of the page: {e}"))
        self.page.on("request", self.on_request)
        self.page.goto(BASE + path)

    def on_console(self, message):
        if message.type not in ("error", "warning"):
            return
        if not any(re.search(a, message.text) for a in self.allowed):
            self.faults.append(f"console: {message.text}")

    def on_request(self, request):
        url = request.url
        if not url.startswith((BASE, "data:", "blob:")):
            self.faults.append(f"a request to {url}")
        if url.endswith("/chat/completions"):
            self.bodies.append(json.loads(request.post_data))

    def __enter__(self):
        expect(self.page.locator("#server")).to_contain_text("context of")
        return self

    def __exit__(self, kind, *_):
        if kind:
            self.page.screenshot(path=OUT / f"failed-{self.shots}.png")
            print(f"what the page had done wrong by then: {self.faults}")
        self.context.close()
        if not kind:
            assert not self.faults, self.faults

    def look(self, name):
        """A screenshot, and the checks of layout and contrast."""
        self.page.screenshot(path=OUT / f"{name}-{self.shots}.png")
        wrong = self.page.evaluate(LAYOUT) + self.page.evaluate(CONTRAST)
        self.faults += [f"{name} at {self.shots}: {w}" for w in wrong]

    def drop(self, name, text, kind="text/plain"):
        transfer = self.page.evaluate_handle(
            """([name, text, kind]) => {
              const data = new DataTransfer();
              data.items.add(new File([text], name, {type: kind}));
              return data;
            }""", [name, text, kind])
        self.page.dispatch_event("body", "dragover", {"dataTransfer": transfer})
        expect(self.page.locator("#drop")).to_be_visible()
        self.page.dispatch_event("body", "drop", {"dataTransfer": transfer})
        expect(self.page.locator("#drop")).to_be_hidden()

    def ask(self, text, wait=True, seconds=SECONDS):
        self.page.fill("#question", text)
        self.page.press("#question", "Enter")
        if wait:
            self.done(seconds)

    def done(self, seconds=SECONDS):
        expect(self.page.locator("#send")).to_have_text("Send", timeout=1000 * seconds)

    def answer(self):
        return self.page.locator("article.answer").last

    def reply_with(self, *events, status=200, body=None):
        """The next question gets these events, as if the server had sent them."""
        text = body or "".join(f"data: {e if isinstance(e, str) else json.dumps(e)}\n\n" for e in events)
        kind = "application/json" if body else "text/event-stream"
        self.page.route("**/v1/chat/completions", lambda route: route.fulfill(
            status=status, body=text, headers={"content-type": kind}), times=1)


def delta(text):
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]}


END = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
META = {"choices": [], "usage": {"prompt_tokens": 18492, "completion_tokens": 12, "total_tokens": 18504,
                                 "prompt_tokens_details": {"cached_tokens": 9231}},
        "timings": {"cache_n": 9231, "prompt_n": 9261, "prompt_ms": 5700.0, "prompt_per_second": 1624.7,
                    "predicted_n": 12, "predicted_ms": 40.0, "predicted_per_second": 300.0},
        "omnikv": {"policy": "omnikv", "settings": "below=0 budget=1024 chunk=auto dense=exact filters=2,13 tail=256",
                   "read_fraction": 0.29195, "attended_tokens": 5398.6, "queue_ms": 0.4}}
MARKDOWN = """# A title

A paragraph with **bold**, *slanted*, `code` and a line
that goes on. <img src=x onerror=alert(1)> is text, and so is <b>this</b>. 2 * 3 * 4 stays, snake_case_name too.

- one
- two with a much longer text, so that it has to go on in a second line of the page where it is narrow
  - inner **one**
- three

3. third
4. fourth

> A quote.

```python
def f(x):
    return "<script>alert(1)</script>" + "a line that is much too long for a narrow window" + x
```

A table:
| name | tokens |
|---|---|
| a | 1 |
| b | `2` |

Averyveryverylongwordthatdoesnotendwhereitshouldandgoesonandonandonandonandonandonandonandon."""


# ---- Tests ----

def test_layout():
    """The states of the page, wide and narrow, light and dark."""
    for width, height in ((1280, 800), (360, 640), (768, 1024)):
        for scheme in ("light", "dark"):
            with Session(width, height, scheme) as s:
                page = s.page
                s.look("1-empty")
                s.drop("A rather long name of a document, notes of the year 2026.md", "# Notes\n" + GRASS * 40, "")
                expect(page.locator("#documents")).to_contain_text("tokens")
                s.drop("b.txt", GRASS)
                expect(page.locator("#documents li")).to_have_count(2)
                expect(page.locator("#documents")).not_to_contain_text("counts")
                page.select_option("#policy", "expected_attention")
                s.look("2-documents")
                page.click("#moretoggle")
                s.look("3-settings")
                page.click("#moretoggle")
                s.reply_with(delta(MARKDOWN), END, META, "[DONE]")
                s.ask("What does it say about the grass, and what is\n    the colour of the sky?")
                page.locator("#log").evaluate("(n) => { n.scrollTop = 0; }")
                s.look("4-answer-top")
                page.locator("article summary").last.click()
                page.locator("#log").evaluate("(n) => { n.scrollTop = n.scrollHeight; }")
                s.look("5-answer-details")
                s.reply_with(delta("It beg"), {"error": {"message": "the request ran out of time"}}, "[DONE]")
                s.ask("And now?")
                s.allowed.append("Failed to load resource")
                s.drop("paper.pdf", "%PDF-1.7")
                expect(page.locator("#notice")).to_contain_text("“paper.pdf”: ")
                s.look("6-error")
                if width < 760:
                    page.click("#menu")
                    s.look("7-menu")
                    page.keyboard.press("Escape")
                    expect(page.locator("nav")).to_be_hidden()


def test_markdown_is_text():
    with Session() as s:
        s.reply_with(delta(MARKDOWN), END, META, "[DONE]")
        s.ask("Say it.")
        said = s.answer().locator(".said")
        assert said.locator("img, script, b").count() == 0
        for tag, text in (("h3", "A title"), ("strong", "bold"), ("em", "slanted"), ("p code", "code"),
                          ("pre code", "<script>alert(1)</script>"), ("li li", "inner one"), ("blockquote", "A quote."),
                          ("td", "a"), ("ol li", "third"), ("p", "2 * 3 * 4 stays, snake_case_name too")):
            expect(said.locator(tag).first).to_contain_text(text)
        assert said.locator("ol").get_attribute("start") == "3"
        assert said.locator("ul > li").count() == 4 and said.locator("em").count() == 1
        s.answer().locator(".under button", has_text="Copy").click()
        assert s.page.evaluate("navigator.clipboard.readText()") == MARKDOWN
        line = s.answer().locator("summary").last.inner_text()
        assert line == "omnikv budget=1024 · read 29% of K/V · prompt 18,492, 9,231 cached · 300 tokens/s", line


def test_document():
    """A document of 20K tokens is dropped, read and asked about; then asked about again."""
    with Session() as s:
        page = s.page
        s.drop("notes.txt", document(20000))
        chip = page.locator("#documents li")
        expect(chip).to_contain_text(re.compile(r"notes\.txt · \d+ KiB · (19|2\d),\d{3} tokens"), timeout=1000 * SECONDS)
        s.ask(f"What is the pass key of {WHO}?", wait=False)
        bar = page.locator("[role=progressbar]")
        expect(bar).to_be_visible(timeout=1000 * SECONDS)
        seen, looked = set(), False
        end = time.time() + SECONDS
        while time.time() < end and bar.count() and bar.is_visible():
            now = bar.evaluate("(n) => [n.ariaValueNow, n.ariaValueMax, n.getBoundingClientRect().width, "
                               "[...n.children].reduce((w, c) => w + c.getBoundingClientRect().width, 0)]"
                               ) if bar.count() else None
            if now and now[0]:
                assert 0 < int(now[0]) <= int(now[1]), now
                if not looked and 0.3 < int(now[0]) / int(now[1]) < 0.8:
                    looked = True
                    s.look("8-reading")
                    page.set_viewport_size({"width": 360, "height": 640})
                    s.look("8-reading-narrow")
                    page.set_viewport_size({"width": 1280, "height": 800})
                seen.add(now[0])
            page.wait_for_timeout(150)
        assert len(seen) >= 3 and looked, f"the bar showed {seen}"
        s.done()
        expect(s.answer()).to_contain_text(KEY)
        body = s.bodies[-1]
        assert body["stream"] and body["return_progress"] and body["stream_options"] == {"include_usage": True}
        question = body["messages"][0]["content"]
        assert len(body["messages"]) == 1 and question.startswith("Document: notes.txt\n\nThe story"), question[:80]
        assert question.endswith(f"What is the pass key of {WHO}?")
        expect(page.locator("#documents")).to_be_hidden()
        line = s.answer().locator("summary").last
        expect(line).to_contain_text(re.compile(r"omnikv budget=\d+ · read \d+% of K/V · prompt (19|2\d),\d{3}"))
        s.look("9-read")
        # the second question finds the document cached
        s.ask(f"Tell me the pass key of {WHO}.")
        expect(s.answer().locator("summary").last).to_contain_text(re.compile(r"(19|2\d),\d{3} cached"))
        s.answer().locator("summary").last.click()
        expect(s.answer().locator("dl")).to_contain_text("Tokens read a layer and step")
        # and all of it is there after a reload, texts of documents too
        page.reload()
        expect(page.locator("article.user")).to_have_count(2)
        expect(page.locator("article.answer").first).to_contain_text(KEY)
        page.locator("article.answer").last.get_by_text("Regenerate").click()
        s.done()
        assert s.bodies[-1]["messages"][0] == s.bodies[0]["messages"][0]


def test_stop():
    with Session() as s:
        s.ask("Tell me a long story about the sea.", wait=False)
        expect(s.answer().locator(".said")).to_contain_text("sea", timeout=1000 * SECONDS)
        s.page.keyboard.press("Escape")
        s.done(EXPECTED)
        expect(s.answer()).to_contain_text("Stopped.")
        text = s.answer().locator(".said").inner_text()
        s.page.wait_for_timeout(500)
        assert s.answer().locator(".said").inner_text() == text
        s.answer().get_by_text("Regenerate").click()
        expect(s.answer().locator(".said")).to_contain_text("sea", timeout=1000 * SECONDS)
        s.page.click("#send")  # which says Stop
        expect(s.answer()).to_contain_text("Stopped.")
        expect(s.page.locator("article.answer")).to_have_count(1)


def test_policy_in_the_request():
    with Session() as s:
        page = s.page
        fact = f"The pass key of {WHO} is {KEY}. What is the pass key of {WHO}?"
        s.ask(fact)
        assert "omnikv" not in s.bodies[-1] and s.bodies[-1]["temperature"] == 0
        page.select_option("#policy", "streaming")
        page.fill("#budget", "512")
        page.click("#moretoggle")
        page.fill("#extra", "sinks=8")
        page.fill("#system", "Answer.")
        page.fill("#longest", "40")
        page.fill("#seed", "7")
        s.ask(fact)
        body = s.bodies[-1]
        assert body["omnikv"] == {"policy": "streaming", "budget": "512", "sinks": "8"}, body["omnikv"]
        assert body["max_tokens"] == 40 and body["seed"] == 7
        assert body["messages"][0] == {"role": "system", "content": "Answer."}
        expect(s.answer().locator("summary").last).to_contain_text("streaming budget=512")
        # where the policy has no budget, none is sent
        page.select_option("#policy", "full")
        expect(page.locator("#budgetfield")).to_be_hidden()
        page.fill("#extra", "")
        s.ask(fact)
        assert s.bodies[-1]["omnikv"] == {"policy": "full"}
        page.select_option("#policy", "kascade")
        expect(page.locator("#budgetname")).to_have_text("Share")
        page.fill("#budget", "0.5")
        s.ask(fact)
        assert s.bodies[-1]["omnikv"] == {"policy": "kascade", "share": "0.5"}
        expect(s.answer().locator("summary").last).to_contain_text("kascade share=0.5")
        # every policy of the page is one of the server, and has its setting
        s.allowed.append("Failed to load resource.*400")
        page.fill("#extra", "no=1")
        for name in page.evaluate("POLICIES.map((p) => p[0])"):
            page.select_option("#policy", name)
            setting = page.evaluate("policyOf(current.policy)[2]")
            page.fill("#extra", "no_such=1")
            s.ask("x")
            said = s.answer().locator(".wrong").inner_text()
            assert "has no setting 'no_such'" in said or "has no settings" in said, said
            assert not setting or re.search(rf"\b{setting}\b", said), (name, said)
        page.fill("#extra", "nonsense")
        page.fill("#question", "x")
        page.press("#question", "Enter")
        expect(page.locator("#notice")).to_contain_text("“nonsense” is not of the form key=value.")
        assert page.evaluate("document.activeElement.id") == "extra"


def test_errors_are_sentences():
    with Session() as s:
        page = s.page
        s.reply_with(delta("It beg"), {"error": {"message": "the model is gone"}}, "[DONE]")
        s.ask("One?")
        expect(s.answer().locator("[role=alert]")).to_have_text("The model is gone.")
        expect(s.answer()).to_contain_text("It beg")
        s.reply_with(delta("It beg"))
        s.ask("Two?")
        expect(s.answer().locator("[role=alert]")).to_have_text("The connection ended before the answer did.")
        s.allowed.append("Failed to load resource")
        s.reply_with(status=502, body="<html>Bad gateway</html>")
        s.ask("Three?")
        expect(s.answer().locator("[role=alert]")).to_have_text("The server answered with 502.")
        page.route("**/v1/chat/completions", lambda route: route.abort(), times=1)
        s.ask("Four?")
        expect(s.answer().locator("[role=alert]")).to_have_text("The server cannot be reached.")
        page.select_option("#policy", "streaming")
        page.fill("#budget", "0")
        s.ask("Five?")
        expect(s.answer().locator("[role=alert]")).to_contain_text("expected a whole number from 1")
        # questions without an answer become one message
        page.fill("#budget", "")
        s.ask("Six?")
        roles = [m["role"] for m in s.bodies[-1]["messages"]]
        assert roles == ["user", "assistant", "user", "assistant", "user"], roles
        assert s.bodies[-1]["messages"][-1]["content"] == "Three?\n\nFour?\n\nFive?\n\nSix?"
        for name, text, said in (("paper.pdf", "%PDF-1.7 ...", re.compile("“paper.pdf”: .*(PDF cannot be read|is not installed)")),
                                 ("picture.png", "\x89PNG\x00\x01", "“picture.png” is not a text."),
                                 ("nothing.txt", "", "“nothing.txt” is empty.")):
            s.drop(name, text, "")
            expect(page.locator("#notice")).to_contain_text(said)
            expect(page.locator("#documents")).to_be_hidden()


def test_key():
    """A server that wants a key: the page asks for it, keeps it in the session and goes on."""
    with Session() as s:
        page = s.page
        s.allowed.append("Failed to load resource.*401")
        refusal = json.dumps({"error": {"message": "The request has no valid key."}})
        heads = []

        def gate(route):
            heads.append(route.request.headers.get("authorization"))
            if heads[-1] == "Bearer sk-right":
                route.fallback()
            else:
                route.fulfill(status=401, body=refusal, headers={"content-type": "application/json"})
        page.route("**/v1/chat/completions", gate)
        expect(page.locator("#keyform")).to_be_hidden()
        s.ask(f"The pass key of {WHO} is {KEY}. What is the pass key of {WHO}?")
        expect(page.locator("#keyform")).to_be_visible()
        expect(s.answer()).to_contain_text("The request has no valid key.")
        assert page.evaluate("document.activeElement.id") == "key"
        s.look("10-key")
        page.keyboard.type("sk-wrong")
        page.keyboard.press("Enter")
        expect(page.locator("#keyhelp")).to_contain_text("does not know this key")
        page.fill("#key", "sk-right")
        page.keyboard.press("Enter")
        expect(s.answer()).to_contain_text(KEY, timeout=1000 * SECONDS)
        assert heads == [None, "Bearer sk-wrong", "Bearer sk-right"], heads
        stored = page.evaluate("[JSON.stringify(localStorage), JSON.stringify(sessionStorage)]")
        assert "sk-right" not in stored[0] and "sk-right" in stored[1]
        page.click("#moretoggle")
        page.click("#forget")
        assert "sk-right" not in page.evaluate("JSON.stringify(sessionStorage)")
        # a server that asks for it from the first
        page.route("**/props", gate)
        page.reload()
        expect(page.locator("#keyform")).to_be_visible()
        expect(page.locator("#server")).to_have_text("The request has no valid key.")
        page.fill("#key", "sk-right")
        page.keyboard.press("Enter")
        expect(page.locator("#server")).to_contain_text("context of")


def test_loading():
    """A server that loads its model, and one that is away for a while."""
    with Session() as s:
        s.allowed.append("Failed to load resource")
        s.page.route("**/props", lambda route: route.fulfill(
            status=503, body='{"error": {"message": "the model loads"}}'), times=1)
        s.page.reload()
        expect(s.page.locator("#server")).to_have_text("The server loads its model…")
        expect(s.page.locator("#server")).to_contain_text("context of")


def test_conversations():
    with Session() as s:
        page = s.page
        for text in ("First of all?", "Second of all?"):
            s.reply_with(delta(f"To {text}"), END, META, "[DONE]")
            s.ask(text)
            page.click("#new")
        expect(page.locator("#list li")).to_have_count(3)
        page.get_by_role("button", name="First of all?", exact=True).click()
        expect(page.locator("article.answer")).to_have_text(re.compile("To First of all?"))
        page.select_option("#policy", "quest")
        page.fill("#budget", "256")
        page.get_by_role("button", name="Second of all?", exact=True).click()
        assert page.input_value("#policy") == ""
        page.reload()
        expect(page.locator("#list li")).to_have_count(2)
        page.get_by_role("button", name="First of all?", exact=True).click()
        assert (page.input_value("#policy"), page.input_value("#budget")) == ("quest", "256")
        page.once("dialog", lambda d: d.accept())
        page.get_by_role("button", name="Delete “First of all?”").click()
        expect(page.locator("#list li")).to_have_count(1)
        assert "First of all" not in page.evaluate("JSON.stringify(localStorage)")
        # one goes on while another is shown
        page.click("#new")
        s.ask("Tell me a long story about the sea.", wait=False)
        expect(s.answer().locator(".said")).to_contain_text("sea", timeout=1000 * SECONDS)
        page.get_by_role("button", name="Second of all?", exact=True).click()
        expect(page.locator("#send")).to_have_text("Send")
        page.get_by_role("button", name="Tell me a long story about the sea.", exact=True).click()
        expect(page.locator("#send")).to_have_text("Stop")
        page.click("#send")
        expect(s.answer()).to_contain_text("Stopped.")
        page.click("#theme")
        page.click("#theme")
        page.reload()
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
        assert page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches") is False
        s.look("11-dark-by-choice")


def test_prefix():
    """Under a prefix, with a slash at its end or without."""
    if not ARGS.page:
        return
    for path in ("llm/", "llm"):
        with Session(path=path) as s:
            s.ask("What?")
            assert s.answer().locator(".wrong").count() == 0
            assert s.page.evaluate("BASE").endswith("/llm/")


def test_picture():
    """The picture of what layers read, of events as the server may send them."""
    with Session() as s:
        read = [[1 if layer in (2, 13) or x > 120 else (x * layer % 7) / 7 for x in range(128)]
                for layer in range(24)]
        reads = {"layers": 24, "tokens": 18492, "bin_tokens": 145, "read": read, "attended": [1.0] * 24,
                 "bytes": 12345678, "hit_rate": 0.873}
        event = {"choices": [{"index": 0, "delta": {}, "finish_reason": None}], "omnikv_reads": reads}
        s.reply_with(event, delta("Read."), END, META, "[DONE]")
        s.ask("What?")
        caption = s.answer().locator("figcaption")
        expect(caption).to_contain_text("24 layers (down) of 18,492 tokens (across)")
        expect(caption).to_contain_text("12 MiB of K/V a step. 87% of the rows that were fetched were near already.")
        assert s.answer().locator("canvas").evaluate("(c) => [c.width, c.height]") == [128, 24]
        dark = s.answer().locator("canvas").evaluate(
            "(c) => { const all = c.getContext('2d').getImageData(0, 0, 128, 24).data;"
            "         return [all[4 * 2 * 128 + 3], all[4 * 128 + 3]]; }")
        assert dark == [255, 0], dark
        s.look("12-picture")
        # layers of which nothing is known, some and all
        s.reply_with({**event, "omnikv_reads": {**reads, "read": [None, *read[1:]], "hit_rate": None}},
                     delta("Read."), END, META, "[DONE]")
        s.ask("What?")
        expect(caption.last).to_contain_text("Of 1 layer it is not known. 12 MiB")
        expect(caption.last).not_to_contain_text("fetched")
        s.reply_with({**event, "omnikv_reads": {**reads, "read": [None] * 24}}, delta("Read."), END, META, "[DONE]")
        s.ask("What?")
        expect(caption.last).to_contain_text("What 24 layers read is not known")


def test_reads():
    """What the layers of the server's model read of a document, while the answer comes and after it."""
    for width, scheme in ((1280, "light"), (360, "dark")):
        with Session(width, 800, scheme) as s:
            page = s.page
            text = document(1200)
            s.drop("notes.txt", text)
            expect(page.locator("#documents")).to_contain_text(re.compile(r"\d tokens"))
            page.select_option("#policy", "omnikv")
            page.fill("#budget", "64")
            page.click("#moretoggle")
            page.fill("#extra", "dense_below=0")
            page.click("#moretoggle")
            s.ask(f"What is the pass key of {WHO}?")
            assert s.bodies[-1]["return_reads"] == 256
            caption = s.answer().locator("figcaption")
            expect(caption).to_contain_text(re.compile(r"\d+ layers \(down\) of 1,\d{3} tokens \(across\)"))
            expect(caption).to_contain_text("of K/V a step")
            shape = s.answer().locator("canvas").evaluate("(c) => [c.width, c.height]")
            assert 128 < shape[0] <= 256 and shape[1] > 1, shape
            s.answer().get_by_text("What was read of the documents").click()
            shown = s.answer().locator(".text")
            expect(shown).to_be_visible()
            assert shown.inner_text().strip() == text.strip()
            shares = shown.locator("span").evaluate_all("(all) => all.map((n) => [n.textContent, Number(n.style.getPropertyValue('--share'))])")
            assert len(shares) > 100 and max(v for _, v in shares) == 100, shares[:9]
            # the answer stands in the document: its passage is read more than most
            at = next(i for i, (part, _) in enumerate(shares) if KEY[:3] in part or KEY in part + shares[i + 1][0])
            near = max(v for _, v in shares[max(0, at - 1):at + 2])
            less = sum(v < near for _, v in shares)
            assert less > len(shares) / 2, (near, less, len(shares))
            note = s.answer().locator("details p.note")
            expect(note).to_contain_text("layers that do not read everything")
            shown.scroll_into_view_if_needed()
            s.look("13-reads")
            assert shown.evaluate("(n) => n.tabIndex") == 0
            # under full nothing stands out, and who asks for no picture gets none
            page.select_option("#policy", "full")
            page.click("#moretoggle")
            page.fill("#extra", "")
            page.click("#moretoggle")
            s.ask("And now?")
            s.answer().get_by_text("What was read of the documents").click()
            expect(s.answer().locator("details p.note")).to_contain_text("Every layer reads every token")
            page.click("#moretoggle")
            page.uncheck("#reads")
            s.ask("And then?")
            assert "return_reads" not in s.bodies[-1]
            expect(s.answer().locator("figure")).to_be_hidden()


def tiny_pdf(text):
    """A PDF of one page that says `text`."""
    stream = f"BT /F1 12 Tf 20 100 Td ({text}) Tj ET"
    objects = ["<< /Type /Catalog /Pages 2 0 R >>", "<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
               "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 600 200] /Contents 4 0 R "
               "/Resources << /Font << /F1 5 0 R >> >> >>",
               f"<< /Length {len(stream)} >>\nstream\n{stream}\nendstream",
               "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"]
    pdf, table = "%PDF-1.4\n", "0000000000 65535 f \n"
    for i, thing in enumerate(objects):
        table += f"{len(pdf):010d} 00000 n \n"
        pdf += f"{i + 1} 0 obj\n{thing}\nendobj\n"
    return f"{pdf}xref\n0 6\n{table}trailer\n<< /Size 6 /Root 1 0 R >>\nstartxref\n{len(pdf)}\n%%EOF\n"


def test_pdf():
    with Session() as s:
        s.allowed.append("Failed to load resource.*501")
        s.drop("paper.pdf", tiny_pdf(f"The pass key of {WHO} is {KEY}."), "application/pdf")
        said = s.page.locator("#notice:not([hidden]), #documents li")
        expect(said.first).to_be_visible()
        if s.page.locator("#notice").is_visible():
            expect(s.page.locator("#notice")).to_contain_text("is not installed where the server runs")
            return
        expect(s.page.locator("#documents")).to_contain_text(re.compile(r"paper\.pdf · .* · \d+ tokens"))
        s.ask(f"What is the pass key of {WHO}?")
        assert f"The pass key of {WHO} is {KEY}." in s.bodies[-1]["messages"][0]["content"]
        assert s.answer().locator(".wrong").count() == 0


def test_contexts():
    """Contexts that the server keeps: what it says of them today, and all that it may say."""
    with Session() as s:
        page = s.page
        page.click("#moretoggle")
        page.fill("#longest", "4")
        page.click("#moretoggle")
        s.ask("Say something about the sea, in a few words. " + GRASS * 12)
        section = page.locator("#contexts")
        section.locator("summary").click()
        expect(section.locator("li").first).to_contain_text("tokens")
        s.look("14-contexts")
        section.locator("summary").click()
        every = [{"object": "context", "id": "a/1", "where": "kept", "text": "You are a <b>helper</b>. The story of a very long name",
                  "tokens": 18492, "pinned": False},
                 {"object": "context", "id": "b2", "where": "store", "file": "b2.ctx", "tokens": 1, "bytes": 4096, "pinned": True},
                 {"object": "context", "where": "running"}]
        asked = []

        def reply(route):
            request = route.request
            if request.method == "GET":
                return route.fulfill(json={"object": "list", "data": every})
            asked.append((request.method, request.url.removeprefix(BASE)))
            if request.method == "DELETE":
                every.pop(0)
            elif request.url.endswith("/pin"):
                every[0]["pinned"] = True
            route.fulfill(json={})
        page.route("**/v1/contexts**", reply)
        page.route("**/v1/contexts/**", reply)
        section.locator("summary").click()
        rows = section.locator("li")
        expect(rows).to_have_count(3)
        expect(rows.nth(0)).to_contain_text("You are a <b>helper</b>.")
        expect(rows.nth(1)).to_contain_text("1 token · store · 4 KiB · pinned")
        assert rows.nth(2).locator("button").count() == 0
        s.look("14-contexts-all")
        rows.nth(0).get_by_role("button", name="Pin").click()
        expect(rows.nth(0)).to_contain_text("pinned")
        assert page.evaluate("document.activeElement.tagName") == "SUMMARY"
        rows.nth(0).get_by_role("button", name="Delete").focus()
        page.keyboard.press("Enter")
        expect(rows).to_have_count(2)
        assert asked == [("POST", "v1/contexts/a%2F1/pin"), ("DELETE", "v1/contexts/a%2F1")], asked
        page.unroute("**/v1/contexts**")
        page.unroute("**/v1/contexts/**")
        page.route("**/v1/contexts", lambda route: route.fulfill(status=503, json={"error": {"message": "not now"}}))
        s.allowed.append("Failed to load resource.*503")
        section.locator("summary").click()
        section.locator("summary").click()
        expect(page.locator("#contextsnote")).to_have_text("Not now.")


def test_keyboard():
    """The whole page without a mouse: every control is reached, shows that it has the focus, and works."""
    with Session() as s:
        page = s.page
        press = page.keyboard.press
        now = "(document.activeElement.id || document.activeElement.ariaLabel || document.activeElement.textContent)"
        press("Tab")
        assert "skip" in page.evaluate("document.activeElement.className")
        s.look("13-skip")
        press("Enter")
        assert page.evaluate(now) == "question"
        page.keyboard.type("The pass key of Anna is 48213.")
        press("Shift+Enter")
        page.keyboard.type("What is the pass key of Anna?")
        press("Enter")
        s.done()
        assert s.bodies[-1]["messages"][-1]["content"] == "The pass key of Anna is 48213.\nWhat is the pass key of Anna?"
        expect(s.answer()).to_contain_text(KEY)
        expect(page.locator("#say")).to_contain_text(KEY)
        assert page.evaluate(now) == "question"
        # opens the settings, so that they are walked through too
        while page.evaluate(now) != "moretoggle":
            press("Shift+Tab")
        press("Enter")
        expect(page.locator("#more")).to_be_visible()
        page.evaluate("document.activeElement.blur(); document.querySelector('.skip').focus()")
        order = []
        for _ in range(60):
            order.append(page.evaluate(now))
            outlined = page.evaluate("""() => {
              const style = getComputedStyle(document.activeElement);
              return style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 1;
            }""")
            assert outlined or page.evaluate("document.activeElement === document.body"), f"{order[-1]} shows no focus"
            press("Tab")
            if page.evaluate("document.activeElement === document.body || document.activeElement.className.includes('skip')"):
                break
        every = page.evaluate("""() => [...document.querySelectorAll("a, button, input, select, textarea, summary")]
            .filter((n) => n.checkVisibility()).map((n) => n.id || n.ariaLabel || n.textContent)""")
        missing = [n for n in every if n not in order]
        assert not missing, f"{missing} cannot be reached; order: {order}"
        # changes the policy and the budget, regenerates, opens the details
        page.focus("#policy")
        page.keyboard.type("stre")
        press("Tab")
        assert page.evaluate(now) == "budget"
        page.keyboard.type("300")
        while page.evaluate(now) != "Regenerate":
            press("Tab")
        press("Enter")
        s.done()
        assert s.bodies[-1]["omnikv"] == {"policy": "streaming", "budget": "300"}, s.bodies[-1]
        assert len(s.bodies[-1]["messages"]) == 1
        while not page.evaluate("document.activeElement.tagName") == "SUMMARY":
            press("Shift+Tab")
        press("Enter")
        expect(s.answer().locator("dl")).to_be_visible()
        # a new conversation, back to the old one, and away with it
        while page.evaluate(now) != "new":
            press("Shift+Tab")
        press("Enter")
        assert page.evaluate(now) == "question"
        expect(page.locator("article")).to_have_count(0)
        while not page.evaluate("document.activeElement.textContent").startswith("The pass key"):
            press("Shift+Tab")
        press("Enter")
        expect(page.locator("article")).to_have_count(2)
        # with the menu of a narrow window
    with Session(360, 640) as s:
        page, press = s.page, s.page.keyboard.press
        for _ in range(2):
            press("Tab")
        assert page.evaluate("document.activeElement.id") == "menu"
        press("Enter")
        assert page.evaluate("document.activeElement.id") == "new"
        press("Escape")
        assert page.evaluate("document.activeElement.id") == "menu"
        expect(page.locator("nav")).to_be_hidden()


def main():
    tests = [f for n, f in globals().items() if n.startswith("test_") and (ARGS.only or "") in n]
    failed = []
    for test in tests:
        began = time.time()
        try:
            test()
            said = "passed"
        except BaseException as error:  # noqa: BLE001: said, counted, and the next one runs
            if isinstance(error, KeyboardInterrupt):
                raise
            said = "FAILED: " + "".join(traceback.format_exception(error))
            failed.append((test.__name__, said))
        print(f"{test.__name__} ({time.time() - began:.1f} s): {said}", flush=True)
    if failed:  # once more, where the end of a long log is all that one sees
        print(f"\nthe first that failed was {failed[0][0]}: {failed[0][1]}")
        print(f"failed: {', '.join(name for name, _ in failed)}")
    print(f"{len(tests) - len(failed)} of {len(tests)} passed; screenshots are in {OUT}", flush=True)
    return 1 if failed or not tests else 0


def start_browser(playwright):
    """A Chromium that needs no sandbox, no card and little shared memory. What it writes stays in OUT."""
    home = OUT / "home"
    home.mkdir(exist_ok=True)
    environment = {**os.environ, "HOME": str(home), "XDG_CONFIG_HOME": str(home), "XDG_CACHE_HOME": str(home),
                   "TMPDIR": str(home)}
    try:
        return playwright.chromium.launch(
            executable_path=os.environ.get("CHROMIUM", "/usr/bin/chromium"), env=environment,
            args=["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"], timeout=4000 * EXPECTED)
    except Error as error:
        print(f"skipped: the browser cannot be started here: {error}", flush=True)
        sys.exit(77)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base")
    parser.add_argument("out", type=Path)
    parser.add_argument("--page")
    parser.add_argument("--only")
    ARGS = parser.parse_args()
    OUT = ARGS.out
    OUT.mkdir(parents=True, exist_ok=True)
    BASE = ARGS.base.rstrip("/") + "/"
    if ARGS.page:
        Proxy.page, Proxy.base = ARGS.page, urllib.parse.urlparse(ARGS.base)
        server = Threads(("127.0.0.1", 0), Proxy)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        BASE = f"http://127.0.0.1:{server.server_address[1]}/"
    with sync_playwright() as playwright:
        expect.set_options(timeout=1000 * EXPECTED)
        BROWSER = start_browser(playwright)
        code = main()
        BROWSER.close()
    sys.exit(code)
