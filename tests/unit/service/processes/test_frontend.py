"""A front end in a fork, with an engine that this process plays."""

import asyncio
import hashlib
import http.client
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from cloze.service.errors import EngineFailed
from cloze.service.processes import frames, frontend
from cloze.service.processes.children import ChildConfig
from cloze.service.processes.frames import Channel
from cloze.service.settings import Settings
from tests.support.forked import Fork, forked, publish


@dataclass
class FrontEnd:
    """A front end in a fork, the descriptor of its reports, and the address of its HTTP socket."""

    fork: Fork
    reports: int
    address: tuple[str, int]

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
def front_end(folder: Path) -> Iterator[FrontEnd]:
    reader, writer = os.pipe()
    digest = hashlib.sha256(b"secret").hexdigest()
    keys = folder / "keys.toml"
    keys.write_text(f'[ops]\nsha256 = "{digest}"\nscopes = ["admin", "inference"]\n')
    settings = Settings(model_store=folder / "store", model=("tiny@1",), keys_file=keys)
    sockets = (folder / "engine-0.sock", folder / "engine-1.sock")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        sent = (writer, listener.fileno(), 0, os.getpid(), settings)
        child = ChildConfig("frontend-1", sockets, *sent)

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
        assert select.select([server.reports], [], [], 0.3)[0] == [], "it waits for an engine"

        def test() -> None:
            server.until_ready()
            assert server.ask("GET", "/readyz")[0] == 200
            status, text = server.ask("POST", "/embed", '{"inputs": "the house"}', "secret")
            assert (status, "played" in text) == (500, True)
            status, text = server.ask("POST", "/admin/reload", key="secret")
            assert (status, "needs a roll of the replicas" in text) == (409, True)
            assert server.ask("POST", "/admin/reload")[0] == 401
            server.fork.send(signal.SIGTERM)
            assert server.fork.code() == 0

        with_engine(engine, test)
    assert list(tmp_path.glob("*_frontend-1.db"))


def test_a_front_end_whose_bundle_does_not_open_says_why(
    tmp_path: Path, engine: socket.socket
) -> None:
    with front_end(tmp_path) as server:
        assert server.fork.code() == 2
        assert "cloze: no bundle named 'tiny'" in server.fork.log
        assert os.read(server.reports, 1) == b""
    assert engine.fileno() != -1
