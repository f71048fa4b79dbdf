"""Long contexts on little GPU memory: every token's K/V kept, few of them read.

    import omnikv

    engine = omnikv.Engine()                        # the shipped model
    for text in engine.chat([{"role": "user", "content": "Hello"}]):
        print(text, end="", flush=True)

An Engine holds a model, a Session one context, a Batch answers many requests at once, and
openai() starts a server with an OpenAI client.

Errors: ValueError for what the caller can mend, FileNotFoundError, MemoryError (memory on the card,
too), Cancelled for a prompt that cancel() stopped, else RuntimeError; each with the sentence of the
engine. Other threads run while the engine works. Calls of one engine's sessions wait for one
another; cancel() waits for nobody. Ctrl-C ends a prompt after the chunk it is at and an answer
before its next token, and the session can go on.
"""

from ._engine import (
    Answer,
    AnswerOptions,
    Batch,
    Cancelled,
    Engine,
    EngineOptions,
    Message,
    Request,
    Session,
    log_level,
    shipped_model,
)
from ._serve import Server, openai, serve
from ._version import __version__

__all__ = [
    "Answer",
    "AnswerOptions",
    "Batch",
    "Cancelled",
    "Engine",
    "EngineOptions",
    "Message",
    "Request",
    "Server",
    "Session",
    "__version__",
    "log_level",
    "openai",
    "serve",
    "shipped_model",
]
