"""A front end in a fork, with an engine that this process plays."""

import asyncio
import hashlib
import http.client
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cloze.service.errors import EngineFailed
from cloze.service.processes import frames, frontend
from cloze.service.processes.children import ChildConfig
from cloze.service.processes.frames import Channel
from cloze.service.settings import Settings
from tests.unit.service.processes.forked import Fork, forked, publish


def config(folder: Path, *, ready: int = 0, listener: int = 0, **settings: Any) -> Any:
    sockets = (folder / "engine-0.sock", folder / "engine-1.sock")
    made = Settings(model_store=folder / "store", model=("tiny@1",), **settings)
    return ChildConfig("frontend-1", sockets, ready, listener, 0, os.getpid(), made)


class FrontEnd:
    """A front end in a fork.

    Attributes:
        fork: its process.
        reports: the descriptor of its reports.
        address: of its HTTP socket.
    """

    def __init__(self, fork: Fork, reports: int, address: tuple[str, int]) -> None:
        self.fork, self.reports, self.address = fork, reports, address

    def until_ready(self) -> None:
        assert os.read(self.reports, 1) == b"1", self.fork.log

    def ask(
        self, method: str, path: str, body: str | None = None, key: str = ""
    ) -> tuple[int, str]:
        connection = http.client.HTTPConnection(*self.address, timeout=20)
        headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, text


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """Return the socket of the first engine; nobody accepts."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    with socket.socket(socket.AF_UNIX) as first, socket.socket(socket.AF_UNIX) as second:
        for number, listener in enumerate((first, second)):
            listener.bind(str(tmp_path / f"engine-{number}.sock"))
            listener.listen()
        yield first


@contextmanager
def front_end(folder: Path, **settings: Any) -> Iterator[FrontEnd]:
    reader, writer = os.pipe()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        child = config(folder, ready=writer, listener=listener.fileno(), **settings)

        def run() -> int:
            os.close(reader)
            sys.argv = ["frontend", child.to_argument()]
            return frontend.main()

        with forked(run, folder / "output") as fork:
            os.close(writer)
            yield FrontEnd(fork, reader, listener.getsockname())
    os.close(reader)


class Played(Channel):
    """An engine process: greets, and answers requests with an error that names them."""

    def __init__(self) -> None:
        super().__init__("a front end")
        self.gone = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.send(frames.encode(frames.Greeting({"tiny@1": "int8"})))

    def received(self, message: memoryview) -> None:
        run = frames.decode_request(message)
        assert isinstance(run, frames.Run)
        self.send(frames.encode_answer(frames.Answer(run.number, EngineFailed("played"))))

    def lost(self) -> None:
        self.gone.set()


def with_engine(listener: socket.socket, test: Callable[[], None]) -> None:
    """Run a test in a thread while an engine answers."""

    async def main() -> None:
        played: list[Played] = []

        def make() -> Played:
            played.append(Played())
            return played[-1]

        server = await asyncio.get_running_loop().create_unix_server(make, sock=listener)
        async with asyncio.timeout(30):
            await asyncio.to_thread(test)
            server.close()
            for channel in played:
                channel.close()
                await channel.gone.wait()

    asyncio.run(main())


def test_a_front_end_answers_and_ends(tmp_path: Path, engine: socket.socket) -> None:
    publish(tmp_path / "store")
    with front_end(tmp_path) as server:

        def test() -> None:
            server.until_ready()
            assert server.ask("GET", "/readyz")[0] == 200
            status, text = server.ask("POST", "/embed", '{"inputs": "the house"}')
            assert (status, "played" in text) == (500, True)
            server.fork.send(signal.SIGTERM)
            assert server.fork.code() == 0

        with_engine(engine, test)
    assert list(tmp_path.glob("*_frontend-1.db"))


def test_a_front_end_waits_for_an_engine(tmp_path: Path, engine: socket.socket) -> None:
    publish(tmp_path / "store")
    with front_end(tmp_path) as server:
        assert select.select([server.reports], [], [], 0.5)[0] == []
        with_engine(engine, server.until_ready)


def test_a_front_end_without_an_engine_answers_probes(
    tmp_path: Path, engine: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frontend, "_ENGINE_WAIT_S", 0.1)
    publish(tmp_path / "store")
    with front_end(tmp_path) as server:
        server.until_ready()
        assert server.ask("GET", "/healthz")[0] == 200
        assert server.ask("GET", "/readyz")[0] == 503
        server.fork.send(signal.SIGTERM)
        assert server.fork.code() == 0
    assert engine.fileno() != -1


@pytest.mark.parametrize("has_keys", [True, False])
def test_a_front_end_says_that_a_reload_needs_a_roll(
    tmp_path: Path, engine: socket.socket, has_keys: bool
) -> None:
    publish(tmp_path / "store")
    keys = tmp_path / "keys.toml"
    digest = hashlib.sha256(b"the-key-of-an-operator").hexdigest()
    keys.write_text(f'[ops]\nsha256 = "{digest}"\nscopes = ["admin"]\n')
    with front_end(tmp_path, keys_file=keys if has_keys else None) as server:

        def test() -> None:
            server.until_ready()
            status, text = server.ask("POST", "/admin/reload", key="the-key-of-an-operator")
            body = json.loads(text)
            assert (status, body["error_type"]) == (409, "Backend")
            assert "a reload of models needs a roll of the replicas" in body["error"]
            assert server.ask("POST", "/admin/reload")[0] == (401 if has_keys else 409)
            assert server.ask("GET", "/readyz")[0] == 200

        with_engine(engine, test)


def test_a_front_end_whose_bundle_does_not_open_says_why(
    tmp_path: Path, engine: socket.socket
) -> None:
    with front_end(tmp_path) as server:
        assert server.fork.code() == 2
        assert "cloze: no bundle named 'tiny'" in server.fork.log
        assert os.read(server.reports, 1) == b""
    assert engine.fileno() != -1
