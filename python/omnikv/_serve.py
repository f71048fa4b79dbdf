"""`omnikv serve` as a child process, and OpenAI's client for it."""

from __future__ import annotations

import atexit
import collections
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional, Union

if TYPE_CHECKING:
    from openai import OpenAI

_ANSWERS = re.compile(r" answers on (http://\S+)")


def _program() -> Path:
    return Path(__file__).parent / "bin/omnikv"


def _arguments(flags: dict[str, Any]) -> list[str]:
    arguments: list[str] = []
    for name, value in flags.items():
        flag = "--" + name.replace("_", "-")
        if value is None or value is False:
            continue
        if value is True:
            arguments.append(flag)
        elif isinstance(value, dict):  # set={"budget": 512}
            for key, one in value.items():
                arguments += [flag, f"{key}={one}"]
        elif isinstance(value, (list, tuple)):
            for one in value:
                arguments += [flag, str(one)]
        else:
            arguments += [flag, str(value)]
    return arguments


class Server:
    """A running `omnikv serve`. serve() starts it; it ends with this process at the latest."""

    #: Such as "http://127.0.0.1:40001".
    url: str

    def __init__(self, command: list[str], timeout: float, verbose: bool) -> None:
        self._said: collections.deque[str] = collections.deque(maxlen=50)
        self._ready = threading.Event()
        self._verbose = verbose
        self._url: Optional[str] = None
        # A session of its own: Ctrl-C ends what this process does, not the server.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        atexit.register(self.stop)
        self._listener = threading.Thread(target=self._listen, name="omnikv serve", daemon=True)
        self._listener.start()
        try:
            ready = self._ready.wait(timeout)
        except BaseException:  # Ctrl-C
            self.stop()
            raise
        if self._url is None:
            self.stop()
            said = "\n".join(self._said) or "it said nothing"
            if not ready:
                raise TimeoutError(f"omnikv serve did not answer within {timeout} s: {said}")
            error = ValueError if self._process.returncode == 2 else RuntimeError
            raise error(f"omnikv serve has ended with {self._process.returncode}: {said}")
        self.url = self._url

    def _listen(self) -> None:
        assert self._process.stderr is not None
        for raw in self._process.stderr:
            line = raw.decode("utf-8", "replace").rstrip("\n")
            self._said.append(line)
            if self._verbose:
                print(line, file=sys.stderr)
            if self._url is None and (match := _ANSWERS.search(line)):
                self._url = match.group(1)
                self._ready.set()
        self._ready.set()

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def stop(self, grace_seconds: float = 5) -> None:
        """Ends it; requests that run may take so long to end."""
        atexit.unregister(self.stop)
        if self.running:
            self._process.terminate()
            try:
                self._process.wait(grace_seconds)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait()
        if threading.current_thread() is not self._listener:
            self._listener.join(5)
            if self._process.stderr is not None:
                self._process.stderr.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def serve(
    model: Union[str, os.PathLike[str], None] = None,
    *,
    start_timeout: float = 600,
    verbose: bool = False,
    **flags: Any,
) -> Server:
    """Starts `omnikv serve` on a free port, and returns once the model is loaded.

    `flags` are the program's (`omnikv serve --help`): ctx="32k", seats=4, policy="omnikv",
    set={"budget": 512}. Requests may name any model. verbose: what it says goes to stderr.
    """
    given = {"host": "127.0.0.1", "port": 0, "alias": "*", "grace": 4}
    if model is not None:
        given["model"] = os.fspath(model)
    for name in ("quiet", "listen", "ssl_cert_file"):  # its address would not be found
        if name in flags:
            raise ValueError(f"serve() takes no {name}: run the program for that")
    command = [str(_program()), "serve", *_arguments({**given, **flags})]
    return Server(command, start_timeout, verbose)


def openai(model: Union[str, os.PathLike[str], None] = None, **flags: Any) -> OpenAI:
    """OpenAI's client, bound to a server that serve() starts with these arguments.

        client = omnikv.openai()
        client.chat.completions.create(model="any", messages=[...])

    The server ends with client.close() or this process; `client.server` is it. Needs the package
    openai: ImportError without.
    """
    try:
        from openai import OpenAI
    except ImportError as error:
        raise ImportError(
            "omnikv.openai() needs the package openai: pip install 'omnikv[openai]'"
        ) from error

    class Client(OpenAI):
        server: Optional[Server] = None

        def close(self) -> None:
            super().close()
            if self.server is not None:
                self.server.stop()

    server = serve(model, **flags)
    try:
        client = Client(base_url=server.url + str(flags.get("api_prefix", "")) + "/v1", api_key="-")
    except BaseException:
        server.stop()
        raise
    client.server = server
    return client
