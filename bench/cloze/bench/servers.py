"""A measured server: how to start it, and how to send texts to it."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import orjson

from cloze.bench.http_client import Request, post
from cloze.bench.processes import RunningServer, free_port, running


@dataclass(frozen=True, slots=True)
class MeasuredServer:
    """How to start a server, and how to send texts to the server.

    Attributes:
        command: starts the server; ``{port}`` stands for the port.
        ready_path: answers 200 when the server is ready.
        field: of the body, holds the texts.
        environment: further variables beside this process's variables without ``CLOZE_*``.
        engine: name of the engine alone on the same model; "" for a peer.
        parts: whether the server's ``/metrics`` has the duration of each part of a request.
    """

    name: str
    command: tuple[str, ...]
    path: str
    ready_path: str
    field: str = "inputs"
    extra: Mapping[str, str] = dataclasses.field(default_factory=dict)
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    parts: bool = False
    max_texts: int = 2048
    ready_timeout_s: float = 180.0
    engine: str = ""

    def start(self) -> AbstractContextManager[RunningServer]:
        """Run the server until the context ends.

        Raises:
            BenchError: the server does not become ready.
        """
        port = free_port()
        own = {name: value for name, value in os.environ.items() if not name.startswith("CLOZE_")}
        return running(
            [part.replace("{port}", str(port)) for part in self.command],
            f"http://127.0.0.1:{port}",
            self.ready_path,
            environment=own | dict(self.environment),
            timeout_s=self.ready_timeout_s,
        )

    def requests(self, texts: Sequence[str], *, each: int) -> list[Request]:
        """Return requests of `each` texts; the last one may have fewer."""
        starts = range(0, len(texts), each)
        return [self._request(texts[start : start + each]) for start in starts]

    def single_requests(self, texts: Sequence[str], groups: Sequence[str]) -> list[Request]:
        """Return a request per text, which is sent as a string; `groups` has the group of each."""
        pairs = zip(texts, groups, strict=True)
        return [self._request(text, group) for text, group in pairs]

    def _request(self, inputs: str | Sequence[str], group: str = "") -> Request:
        body = orjson.dumps({self.field: inputs} | dict(self.extra))
        texts = 1 if isinstance(inputs, str) else len(inputs)
        return Request(post(self.path, body), texts, group)
