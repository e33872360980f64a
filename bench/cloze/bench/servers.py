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
        """Return requests of `each` texts; the last one may have fewer.

        A text alone is sent as a string, not as a list.
        """
        requests = []
        for start in range(0, len(texts), each):
            part = texts[start : start + each]
            inputs = part[0] if each == 1 else part
            body = orjson.dumps({self.field: inputs} | dict(self.extra))
            requests.append(Request(post(self.path, body), len(part)))
        return requests
