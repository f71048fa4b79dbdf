"""Engines, sessions and batches."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import threading
from array import array
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Optional, TypedDict, TypeVar, Union

from . import _omnikv
from ._omnikv import Cancelled

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from typing_extensions import Self, Unpack

__all__ = ["Cancelled"]

T = TypeVar("T")
Progress = Callable[[int, int], Any]
Setting = Union[str, int, float, bool]


class Message(TypedDict):
    """A message of a conversation. role: "system", "user" or "assistant"."""

    role: str
    content: str


class EngineOptions(TypedDict, total=False):
    """Options of an engine besides its model; omnikv/options.h explains them.

    Sizes are numbers or text such as "24GiB" and "32k".
    """

    device: str  # "auto", "cpu", "cuda", "cuda:1"
    threads: int
    host_memory: Union[int, str]
    gpu_memory: Union[int, str]
    context: Union[int, str]  # tokens a session can hold
    place: str
    kv_folder: str
    disk_space: Union[int, str]
    host_reads: str
    working_set: Union[int, str]
    kv_dtype: str
    precision: str
    prefill_chunk: int
    shared_products: bool
    max_sessions: int  # open at once, and the most seats of a batch
    kv_tokens: Union[int, str]  # "fit": as many as fit
    kept_contexts: int


class AnswerOptions(TypedDict, total=False):
    """Options of an answer. Without a temperature it is greedy; without a seed, the seed is 0."""

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    stop: Union[str, Sequence[str]]
    ignore_eos: bool


def shipped_model() -> Path:
    """The model that comes with the package: small, for first steps and tests."""
    return Path(__file__).parent / "share/omnikv/models/omnikv-tiny-q8_0.gguf"


def log_level(level: str) -> None:
    """What the engine says on stderr: "quiet", "info" (the default) or "verbose"."""
    levels = {"quiet": 0, "info": 1, "verbose": 2}
    if level not in levels:
        raise ValueError(f"the log level is {level!r}, expected one of {', '.join(levels)}")
    _omnikv.set_log_level(levels[level])


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, (str, int, float)):
        return str(value)
    if isinstance(value, os.PathLike):
        return str(os.fspath(value))
    return str(value.item()) if hasattr(value, "item") else str(value)  # NumPy's numbers


def _pairs(options: Mapping[str, Any]) -> list[tuple[str, str]]:
    pairs = []
    for name, value in options.items():
        if value is None:  # the default
            continue
        if name == "logit_bias" and isinstance(value, Mapping):
            pairs += [(name, f"{_text(token)}={float(bias)}") for token, bias in value.items()]
        elif name == "stop" and not isinstance(value, str):
            pairs += [(name, stop) for stop in value]
        else:
            pairs.append((name, _text(value)))
    return pairs


def _policy(
    policy: Optional[str], force_indices: bool, settings: Mapping[str, Any]
) -> list[tuple[str, str]]:
    options: dict[str, Any] = {} if policy is None else {"policy": policy}
    if force_indices:
        options["force_indices"] = True
    options.update((f"policy.{name}", value) for name, value in settings.items())
    return _pairs(options)


def _tokens(tokens: Iterable[int]) -> array[int]:
    if isinstance(tokens, str):
        raise TypeError("tokens are numbers: tokenize() or chat_prompt() makes them of text")
    try:
        return array("i", tokens)
    except OverflowError:
        raise ValueError("a token is out of range, expected 0 to the vocabulary's last") from None


_executor_lock = threading.Lock()
_executor: Optional[ThreadPoolExecutor] = None


async def _in_thread(call: Callable[..., T], *args: Any) -> T:
    """The call on a thread of our own, as each may wait for as long as an answer takes."""
    global _executor
    with _executor_lock:
        if _executor is None:
            _executor = ThreadPoolExecutor(max_workers=128, thread_name_prefix="omnikv")
    return await asyncio.get_running_loop().run_in_executor(
        _executor, functools.partial(call, *args)
    )


class _Closes:
    """close() at the end of a with block."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        self.close()


class Answer(_Closes):
    """An answer as it is generated: an iterator of its text, in whole characters.

    With `async for`, too. Nothing is computed but when the next piece is asked for.
    """

    #: Of the pieces so far, an end token included.
    tokens: list[int]

    def __init__(self, session: _omnikv.Session, owns: bool) -> None:
        self.tokens = []
        self._text: list[str] = []
        self._finish: Optional[str] = None
        self._session = session
        self._owns = owns
        self._ended = False

    @property
    def text(self) -> str:
        """Of the pieces so far."""
        return "".join(self._text)

    @property
    def finish_reason(self) -> Optional[str]:
        """ "stop", "length" or "cancelled"; None until it has ended."""
        return self._finish

    def _next_piece(self) -> Optional[str]:
        while not self._ended:
            piece = self._session.next()
            if piece is None:
                self._finish = self._session.finish()
                self._end()
                return None
            token, text = piece
            if token >= 0:
                self.tokens.append(token)
            if text:
                self._text.append(text)
                return text
        return None

    def _end(self) -> None:
        self._ended = True
        if self._owns:
            self._session.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        piece = self._next_piece()
        if piece is None:
            raise StopIteration
        return piece

    async def __aiter__(self) -> AsyncIterator[str]:
        while (piece := await _in_thread(self._next_piece)) is not None:
            yield piece

    def read(self) -> str:
        """All of it, once it has ended."""
        for _ in self:
            pass
        return self.text

    async def aread(self) -> str:
        """The same, for coroutines."""
        return await _in_thread(self.read)

    def cancel(self) -> None:
        """Ends it before its next token. From any thread."""
        if not self._ended:
            self._session.cancel()

    def close(self) -> None:
        """No more pieces are asked for."""
        if not self._ended:
            self._end()


class Session(_Closes):
    """One context. Engine.session() opens it."""

    def __init__(self, handle: _omnikv.Session) -> None:
        self._handle = handle

    def prompt(
        self, tokens: Union[str, Iterable[int]], on_progress: Optional[Progress] = None
    ) -> None:
        """Makes `tokens` the context: what is there already is kept, the rest is computed.

        on_progress(done, total) is called between chunks; False cancels. Raises Cancelled then,
        and what was computed stays.
        """
        self._handle.prompt(_tokens(tokens), on_progress)  # type: ignore[arg-type]

    def generate(self, **options: Unpack[AnswerOptions]) -> Answer:
        """The answer to the last prompt, or what follows the last answer: an iterator of text.

        An earlier answer that has not ended gives no more pieces.
        """
        self._handle.begin(_pairs(options))
        return Answer(self._handle, owns=False)

    async def agenerate(self, **options: Unpack[AnswerOptions]) -> AsyncIterator[str]:
        """generate() for `async for`: the engine works on another thread."""
        await _in_thread(self._handle.begin, _pairs(options))
        async for text in Answer(self._handle, owns=False):
            yield text

    def step(self, token: int) -> None:
        """Appends a token and computes the logits after it, for callers that sample themselves."""
        self._handle.step(token)

    @property
    def logits(self) -> npt.NDArray[np.float32]:
        """Of the last position, [vocab]: a copy, which stays as it is."""
        return self._handle.logits().copy()

    @property
    def logits_view(self) -> npt.NDArray[np.float32]:
        """The same without a copy, read-only: the session's memory, which its next call changes."""
        return self._handle.logits()

    @property
    def tokens(self) -> list[int]:
        """In context. The last token of an answer joins them with the next."""
        return self._handle.tokens()

    @property
    def stats(self) -> dict[str, Any]:
        """What it did and what it holds (omnikv/stats.h)."""
        stats: dict[str, Any] = json.loads(self._handle.stats())
        return stats

    def fork(
        self, policy: Optional[str] = None, *, force_indices: bool = False, **settings: Setting
    ) -> Session:
        """Another session with the same context, sharing memory; under another policy, if given."""
        if policy is None and (settings or force_indices):
            raise ValueError("a fork has settings but no policy")
        pairs = None if policy is None else _policy(policy, force_indices, settings)
        return Session(self._handle.fork(pairs))

    def save(self, path: Union[str, os.PathLike[str]]) -> None:
        """Writes the context to a file for Engine.restore(), whole or not at all."""
        self._handle.save(os.fspath(path))

    def cancel(self) -> None:
        """Stops a prompt after the chunk it is at, or an answer before its next token."""
        self._handle.cancel()

    def close(self) -> None:
        """Gives its memory back, once its calls have returned."""
        self._handle.close()


class Request(_Closes):
    """A request in a batch: an iterator of its answer's text, with `async for`, too.

    It runs whether its pieces are asked for or not.
    """

    #: Of the pieces so far, an end token included.
    tokens: list[int]

    def __init__(self, handle: _omnikv.Stream) -> None:
        self.tokens = []
        self._text: list[str] = []
        self._handle = handle

    @property
    def text(self) -> str:
        """Of the pieces so far."""
        return "".join(self._text)

    @property
    def finish_reason(self) -> Optional[str]:
        """ "stop", "length" or "cancelled"; None until it has ended."""
        return self._handle.finish()

    @property
    def stats(self) -> dict[str, Any]:
        """What it took; empty until it has ended."""
        stats: dict[str, Any] = json.loads(self._handle.stats())
        return stats

    def _next_piece(self) -> Optional[str]:
        while (piece := self._handle.next()) is not None:
            token, text = piece
            if token >= 0:
                self.tokens.append(token)
            if text:
                self._text.append(text)
                return text
        return None

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        piece = self._next_piece()
        if piece is None:
            raise StopIteration
        return piece

    async def __aiter__(self) -> AsyncIterator[str]:
        try:
            while (piece := await _in_thread(self._next_piece)) is not None:
                yield piece
        except (asyncio.CancelledError, GeneratorExit):
            self.cancel()
            raise

    def read(self) -> str:
        """All of it, once it has ended."""
        for _ in self:
            pass
        return self.text

    async def aread(self) -> str:
        """The same, for coroutines."""
        async for _ in self:
            pass
        return self.text

    def cancel(self) -> None:
        """Ends it, unless it has ended."""
        self._handle.cancel()

    def close(self) -> None:
        """Cancels it, unless it has ended."""
        self._handle.close()


class Batch(_Closes):
    """Many requests on one engine, which has no sessions meanwhile. Engine.batch() makes it."""

    def __init__(self, handle: _omnikv.Batch, engine: Engine) -> None:
        self._handle = handle
        self._engine = engine

    def submit(
        self,
        tokens: Iterable[int],
        *,
        policy: Optional[str] = None,
        settings: Optional[Mapping[str, Setting]] = None,
        priority: int = 0,
        timeout_seconds: float = 0,
        **options: Unpack[AnswerOptions],
    ) -> Request:
        """Hands a request over. What is wrong with tokens or policy, its pieces say.

        Higher priorities go first; a request that is older than its timeout (0: none) is cancelled.
        """
        pairs = _policy(policy, False, settings or {}) + _pairs(options)
        pairs += [("priority", str(priority)), ("timeout_seconds", str(timeout_seconds))]
        return Request(self._handle.stream(_tokens(tokens), pairs))

    def chat(self, messages: Iterable[Message], **options: Any) -> Request:
        """submit() of a conversation."""
        return self.submit(self._engine.chat_prompt(messages), **options)

    @property
    def stats(self) -> dict[str, Any]:
        """Counts since the start: running, waiting, finished, refused, cancelled, ..."""
        stats: dict[str, Any] = json.loads(self._handle.stats())
        return stats

    def stop(self, drain: bool = True) -> None:
        """Takes no more requests, and returns when those that are there have ended."""
        self._handle.stop(drain)

    def close(self) -> None:
        """Cancels what is there."""
        if not self._handle.closed:
            self._handle.stop(False)
            self._handle.close()


class Engine(_Closes):
    """A model in memory.

    `model` is a Hugging Face folder or a .gguf file; None: the shipped model. `policy` and
    `settings` are those that sessions will have: where a card is too small, they decide what lies
    beside it. on_load(done, total) is told the bytes that are loaded.
    """

    def __init__(
        self,
        model: Union[str, os.PathLike[str], None] = None,
        *,
        policy: Optional[str] = None,
        settings: Optional[Mapping[str, Setting]] = None,
        on_load: Optional[Progress] = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        path = shipped_model() if model is None else model
        pairs = [("model", os.fspath(path))]
        pairs += _policy(policy, False, settings or {}) + _pairs(options)
        self._default = (policy, dict(settings or {}))
        self._handle = _omnikv.load(pairs, on_load)

    def session(
        self, policy: Optional[str] = None, *, force_indices: bool = False, **settings: Setting
    ) -> Session:
        """A session with a policy and its settings; without one, the engine's."""
        if policy is None:
            policy, defaults = self._default
            settings = {**defaults, **settings}
        return Session(self._handle.session(_policy(policy, force_indices, settings)))

    def restore(self, path: Union[str, os.PathLike[str]]) -> Session:
        """The session that Session.save() wrote."""
        return Session(self._handle.restore(os.fspath(path)))

    def batch(
        self,
        seats: Optional[int] = None,
        *,
        max_waiting: Optional[int] = None,
        token_ms: Optional[float] = None,
        store: Union[str, os.PathLike[str], None] = None,
        store_size: Union[int, str, None] = None,
    ) -> Batch:
        """Many requests at a time: `seats`, at most the engine's max_sessions."""
        options = {
            "seats": seats,
            "max_waiting": max_waiting,
            "token_ms": token_ms,
            "store": store,
            "store_size": store_size,
        }
        return Batch(self._handle.batch(_pairs(options)), self)

    def chat(
        self,
        messages: Iterable[Message],
        *,
        policy: Optional[str] = None,
        settings: Optional[Mapping[str, Setting]] = None,
        on_progress: Optional[Progress] = None,
        **options: Unpack[AnswerOptions],
    ) -> Answer:
        """The answer to a conversation, in a session of its own that ends with it."""
        given: dict[str, Any] = dict(settings or {})
        session = self.session(policy, **given)
        try:
            session.prompt(self.chat_prompt(messages), on_progress)
            session._handle.begin(_pairs(options))
        except BaseException:
            session.close()
            raise
        return Answer(session._handle, owns=True)

    def tokenize(
        self, text: str, *, add_special: bool = False, parse_special: bool = False
    ) -> list[int]:
        """Ids of a text. add_special: with the begin token that the tokenizer adds by itself."""
        return self._handle.tokenize(text, add_special, parse_special)

    def detokenize(self, tokens: Iterable[int]) -> str:
        """The text of ids, special tokens included."""
        return self._handle.detokenize(_tokens(tokens)).decode("utf-8", "replace")

    def chat_prompt(self, messages: Iterable[Message]) -> list[int]:
        """Ids of a conversation in the model's chat format, ready for the answer."""
        pairs = []
        for message in messages:
            if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
                raise ValueError(f"a message is {message!r}, expected a role and a content")
            pairs.append((message["role"], message["content"]))
        return self._handle.chat_prompt(pairs)

    @property
    def context(self) -> int:
        """Tokens that a session can hold."""
        return self._handle.context()

    @property
    def vocab(self) -> int:
        return self._handle.vocab()

    @property
    def device(self) -> str:
        """For people."""
        return str(self.info["device"])

    @property
    def info(self) -> dict[str, Any]:
        """context, vocab, device, weight_bytes, load_seconds, has_chat_template."""
        info: dict[str, Any] = json.loads(self._handle.info())
        return info

    def close(self) -> None:
        """Gives its memory back, once its sessions and batches are closed."""
        self._handle.close()
