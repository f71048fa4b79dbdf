"""The Python package, installed, on the shipped model on the CPU."""

import asyncio
import gc
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest

import numpy as np

import omnikv

QUESTION = [{"role": "user", "content": "The pass key is 48213. What is the pass key?"}]
ANSWER = "The pass key is 48213."
OPTIONS = {"device": "cpu", "threads": 2, "context": "4k"}


class EngineTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.engine = omnikv.Engine(max_sessions=3, **OPTIONS)

    @classmethod
    def tearDownClass(cls):
        cls.engine.close()

    def asked(self, policy=None, **settings):
        session = self.engine.session(policy, **settings)
        session.prompt(self.engine.chat_prompt(QUESTION))
        return session

    def test_engine(self):
        self.assertEqual(self.engine.context, 4096)
        self.assertGreater(self.engine.vocab, 1000)
        self.assertTrue(self.engine.device)
        self.assertTrue(self.engine.info["has_chat_template"])
        text = "Zoë says: 你好 🙂"
        tokens = self.engine.tokenize(text)
        self.assertEqual(self.engine.detokenize(tokens), text)
        self.assertEqual(self.engine.detokenize(np.array(tokens)), text)
        self.assertEqual(omnikv.__version__, omnikv._engine._omnikv.version())
        loaded = []
        with omnikv.Engine(on_load=lambda done, total: loaded.append((done, total)), **OPTIONS):
            self.assertEqual(loaded[-1][0], loaded[-1][1])

    def test_chat_and_generate(self):
        answer = self.engine.chat(QUESTION)
        pieces = list(answer)
        self.assertEqual("".join(pieces), ANSWER)
        self.assertGreater(len(pieces), 3)
        self.assertEqual((answer.text, answer.finish_reason), (ANSWER, "stop"))
        self.assertEqual(self.engine.chat(QUESTION, max_tokens=2).read(), "The pass")
        progress = []
        with self.engine.session() as session:
            tokens = self.engine.chat_prompt(QUESTION)
            session.prompt(tokens, lambda done, total: progress.append((done, total)))
            self.assertEqual(progress[-1], (len(tokens), len(tokens)))
            self.assertEqual(session.generate(stop=["key is", "x y z"]).read(), "The pass ")
            stats = session.stats
            self.assertEqual(stats["prefill_tokens"], len(tokens))
            self.assertIsNone(stats["hit_rate"])

    def test_sampling_repeats_with_its_seed(self):
        options = {"temperature": 1.5, "max_tokens": 12, "ignore_eos": True, "logit_bias": {5: -1.5}}
        texts = [self.asked().generate(seed=seed, **options).read() for seed in (1, 1, 2)]
        self.assertEqual(texts[0], texts[1])
        self.assertNotEqual(texts[0], texts[2])

    def test_policies(self):
        session = self.asked("streaming", sinks=4, budget=64)
        self.assertEqual(session.stats["policy"], "streaming")
        self.assertIn("budget=64", session.stats["settings"])
        fork = session.fork("full")
        self.assertEqual(fork.stats["policy"], "full")
        self.assertEqual(fork.generate().read(), ANSWER)
        with omnikv.Engine(policy="streaming", settings={"budget": 64}, **OPTIONS) as engine:
            self.assertEqual(engine.session().stats["policy"], "streaming")

    def test_steps_and_logits(self):
        session = self.asked()
        before = session.logits
        self.assertEqual((before.dtype, before.shape), (np.float32, (self.engine.vocab,)))
        view = session.logits_view
        self.assertFalse(view.flags.writeable)
        self.assertFalse(view.flags.owndata)
        np.testing.assert_array_equal(view, before)
        fork = session.fork()
        n = len(session.tokens)
        for _ in range(4):
            session.step(int(session.logits.argmax()))
        self.assertTrue(ANSWER.startswith(self.engine.detokenize(session.tokens[n:])))
        self.assertFalse(np.array_equal(session.logits, before))
        np.testing.assert_array_equal(fork.logits, before)
        view = session.logits_view  # keeps its memory
        session.close()
        del session
        gc.collect()
        self.assertTrue(np.isfinite(view).all())
        del view
        self.assertEqual(fork.generate().read(), ANSWER)

    def test_files(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "context.okv"
            self.asked().save(path)
            self.assertEqual(self.engine.restore(path).generate().read(), ANSWER)
            path.write_bytes(path.read_bytes()[:-7])
            with self.assertRaisesRegex(ValueError, "context.okv"):
                self.engine.restore(path)

    def test_errors(self):
        with self.assertRaisesRegex(FileNotFoundError, "/nonexistent.gguf"):
            omnikv.Engine("/nonexistent.gguf")
        with self.assertRaisesRegex(ValueError, "'contxt' is no option"):
            omnikv.Engine(contxt=5)
        with self.assertRaisesRegex(ValueError, "`context` is 'many'"):
            omnikv.Engine(context="many")
        with self.assertRaisesRegex(MemoryError, "host_memory"):
            omnikv.Engine(**{**OPTIONS, "host_memory": "1MiB"})
        with self.assertRaisesRegex(ValueError, "nonesuch"):
            self.engine.session("nonesuch")
        with self.assertRaisesRegex(ValueError, "nonesuch"):
            self.engine.session("streaming", nonesuch=1)
        session = self.engine.session()
        with self.assertRaisesRegex(ValueError, "no prompt"):
            session.generate()
        with self.assertRaisesRegex(ValueError, "5000"):
            session.prompt([0] * 5000)
        with self.assertRaisesRegex(ValueError, "range"):
            session.prompt([2**40])
        with self.assertRaises(TypeError):
            session.prompt("text")
        with self.assertRaisesRegex(ValueError, "a role and a content"):
            self.engine.chat_prompt([{"role": "user"}])
        session.prompt(self.engine.tokenize("a"))
        with self.assertRaisesRegex(ValueError, "`temperature` is -1"):
            session.generate(temperature=-1)
        with self.assertRaisesRegex(ValueError, "'tempo' is no option"):
            session.generate(tempo=1)
        session.close()
        with self.assertRaisesRegex(ValueError, "closed"):
            session.generate()
        with self.assertRaisesRegex(ValueError, "log level"):
            omnikv.log_level("loud")

    def test_callbacks_that_raise_or_cancel(self):
        session = self.engine.session()
        tokens = self.engine.tokenize("word " * 3000)[:3000]

        def raises(done, total):
            raise KeyError("mine")

        with self.assertRaisesRegex(KeyError, "mine"):
            session.prompt(tokens, raises)
        with self.assertRaisesRegex(omnikv.Cancelled, "cancelled"):
            session.prompt(tokens[::-1], lambda done, total: False)
        self.assertTrue(issubclass(omnikv.Cancelled, RuntimeError))

    def test_other_threads_run_and_cancel(self):
        session = self.asked()
        answer = session.generate(max_tokens=100000, ignore_eos=True)
        next(answer)
        threading.Timer(0.05, answer.cancel).start()
        answer.read()
        self.assertEqual(answer.finish_reason, "cancelled")
        # A thread counts while the engine works.
        ticks, stop = [0], threading.Event()

        def count():
            while not stop.wait(0.0005):
                ticks[0] += 1

        thread = threading.Thread(target=count)
        thread.start()
        tokens = [int(t) for t in np.arange(3500) % 97 + 300]
        session.prompt(tokens)
        stop.set()
        thread.join()
        self.assertGreater(ticks[0], 5)

    def test_coroutines(self):
        async def ask():
            session = self.asked()
            streamed = "".join([text async for text in session.agenerate()])
            read = await self.engine.chat(QUESTION).aread()
            iterated = "".join([text async for text in self.engine.chat(QUESTION)])
            return streamed, read, iterated

        self.assertEqual(asyncio.run(ask()), (ANSWER,) * 3)


class BatchTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.engine = omnikv.Engine(max_sessions=4, **OPTIONS)

    def test_many(self):
        with self.engine.batch() as batch:
            requests = [batch.chat(QUESTION) for _ in range(6)]
            requests.append(batch.chat(QUESTION, policy="streaming", settings={"budget": 64}))
            self.assertEqual([request.read() for request in requests[:6]], [ANSWER] * 6)
            requests[-1].read()
            self.assertEqual(requests[-1].stats["policy"], "streaming")
            self.assertEqual(requests[0].finish_reason, "stop")
            self.assertGreater(requests[0].stats["answer_tokens"], 5)
            endless = batch.chat(QUESTION, max_tokens=10**6, ignore_eos=True)
            next(endless)
            self.assertIsNone(endless.finish_reason)
            endless.cancel()
            endless.read()
            self.assertEqual(endless.finish_reason, "cancelled")
            late = batch.chat(
                QUESTION, max_tokens=10**6, ignore_eos=True, timeout_seconds=0.01, priority=1
            )
            late.read()
            self.assertEqual(late.finish_reason, "cancelled")
            with self.assertRaisesRegex(ValueError, "nonesuch"):
                batch.chat(QUESTION, policy="nonesuch").read()
            with self.assertRaisesRegex(ValueError, "a batch has the engine"):
                self.engine.session()

            async def ask():
                async def one():
                    return "".join([text async for text in batch.chat(QUESTION)])

                return await asyncio.gather(*(one() for _ in range(20)))

            self.assertEqual(asyncio.run(ask()), [ANSWER] * 20)
            batch.stop()
            self.assertEqual(batch.stats["finished"], 27)
            with self.assertRaisesRegex(ValueError, "stopped"):
                batch.chat(QUESTION)
        self.assertEqual(self.engine.chat(QUESTION).read(), ANSWER)

    def test_what_is_left_behind_ends(self):
        batch = self.engine.batch(seats=2)
        request = batch.chat(QUESTION, max_tokens=10**6, ignore_eos=True)
        next(request)
        del batch
        gc.collect()
        request.read()
        self.assertEqual(request.finish_reason, "cancelled")


INTERRUPTED = """
import omnikv, sys
engine = omnikv.Engine(device="cpu", threads=2, context="4k", max_sessions=2)
tokens = engine.tokenize("The pass key is 48213.")
def batch():
    requests = engine.batch()
    print("ready", flush=True)
    while True:
        requests.submit(tokens, max_tokens=10**6, ignore_eos=True).read()
def answer():
    session = engine.session()
    print("ready", flush=True)
    while True:
        session.prompt(tokens)
        session.generate(max_tokens=10**6, ignore_eos=True).read()
def prompt():
    session = engine.session()
    print("ready", flush=True)
    while True:
        session.prompt([t % 97 + 300 for t in range(4000)])
        session.prompt([t % 91 + 300 for t in range(4000)])
try:
    {"batch": batch, "answer": answer, "prompt": prompt}[sys.argv[1]]()
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


class InterruptTest(unittest.TestCase):
    def test_ctrl_c(self):
        for what in ("batch", "answer", "prompt"):
            with self.subTest(what):
                process = subprocess.Popen(
                    [sys.executable, "-c", INTERRUPTED, what], stdout=subprocess.PIPE, text=True
                )
                self.assertEqual(process.stdout.readline(), "ready\n")
                time.sleep(0.3)
                process.send_signal(signal.SIGINT)
                out, _ = process.communicate(timeout=60)
                self.assertEqual((out, process.returncode), ("interrupted\n", 0))


class ServeTest(unittest.TestCase):
    def test_client(self):
        try:
            import openai
        except ImportError:
            self.skipTest("the package openai is not installed")
        client = omnikv.openai(device="cpu", threads=2, ctx="4k", seats=2, set={"budget": 256})
        self.assertIsInstance(client, openai.OpenAI)
        server = client.server
        answer = client.chat.completions.create(model="any", messages=QUESTION, temperature=0)
        self.assertEqual(answer.choices[0].message.content, ANSWER)
        stream = client.chat.completions.create(
            model="any", messages=QUESTION, temperature=0, stream=True
        )
        pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
        self.assertEqual("".join(pieces), ANSWER)
        self.assertTrue(server.running)
        client.close()
        self.assertFalse(server.running)

    def test_without_the_package(self):
        code = "import sys; sys.modules['openai'] = None; import omnikv; omnikv.openai()"
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        self.assertIn("ImportError: omnikv.openai() needs the package openai", run.stderr)

    def test_mistakes(self):
        with self.assertRaisesRegex(ValueError, "/nonexistent"):
            omnikv.serve("/nonexistent")
        with self.assertRaisesRegex(ValueError, "nonesuch"):
            omnikv.serve(policy="nonesuch")
        with self.assertRaisesRegex(ValueError, "takes no quiet"):
            omnikv.serve(quiet=True)

    def test_ends_with_its_process(self):
        code = (
            "import omnikv; s = omnikv.serve(device='cpu', threads=1, ctx='1k', seats=1);"
            "print(s._process.pid)"
        )
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        self.assertEqual(run.returncode, 0, run.stderr)
        with self.assertRaises(ProcessLookupError):
            os.kill(int(run.stdout), 0)


if __name__ == "__main__":
    unittest.main(verbosity=2)
