"""Messages between front ends and engine processes over Unix sockets."""

import asyncio
import struct
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from socket import AF_UNIX, socket, socketpair

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloze.model_store import Store
from cloze.model_store.batch import Encoding
from cloze.model_store.heads import HeadRequest
from cloze.model_store.heads.embedding import HEAD
from cloze.service.batching.admission import SchedulerLimits
from cloze.service.batching.fair_queue import Terms
from cloze.service.batching.scheduler import Scheduler
from cloze.service.core import BatchResult
from cloze.service.errors import StartupError
from cloze.service.models.served_models import ServedModel
from cloze.service.processes import frames
from cloze.service.processes.engine_process import EngineServer
from cloze.service.processes.frames import MAX_MESSAGE_BYTES, Channel
from cloze.service.processes.frontend import EngineLink, RemoteQueue
from cloze.service.processes.supervisor import supervise
from cloze.service.settings import load_settings
from tests.support.encodings import submit
from tests.support.fake_engine import FakeEngine

pytestmark = pytest.mark.anyio

REFERENCE = "bert@1"
SOON_S = 30.0
"""A bound that no test should reach."""


@pytest.fixture(scope="session")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """Return the loop that a server has."""
    return "asyncio", {"use_uvloop": True}


def encode(*lengths: int) -> list[Encoding]:
    """Encodings of so many ones each."""
    requests = {HEAD.name: HeadRequest()}
    return [Encoding(np.ones(n, np.int32), np.zeros(n, np.int32), requests) for n in lengths]


def in_a_minute() -> float:
    return time.monotonic() + 60


def on_wire(message: bytes) -> bytes:
    return struct.pack("=I", len(message)) + message


GREETING = on_wire(frames.encode(frames.Greeting({REFERENCE: "fp32"})))


def run_of(number: int, model: int, *lengths: int) -> frames.Run:
    return frames.Run(number, model, Terms(in_a_minute()), encode(*lengths))


async def outcome(future: Future[BatchResult]) -> BatchResult:
    return await asyncio.wait_for(asyncio.wrap_future(future), SOON_S)


def sums(result: BatchResult) -> list[float]:
    return [float(output[HEAD.name].array[0]) for output in result.outputs]


class Engine:
    """An engine process's parts in this process: a scheduler with a fake engine."""

    def __init__(self, store: Path, path: Path) -> None:
        self.engine = FakeEngine()
        limits = SchedulerLimits(
            workers=1, max_batch_tokens=1000, max_queue_tokens=2**31, stall_timeout_s=60
        )
        self.scheduler = Scheduler(self.engine, limits)
        self.scheduler.start()
        self.path = path
        self.listener = listen(path)
        self._bundle = Store(store).open("bert")

    def server(self) -> EngineServer:
        model = ServedModel(self._bundle, self.scheduler, lambda: "fp32")
        return EngineServer([model])


class Link(EngineLink):
    """A link whose event is at hand."""

    def __init__(self, path: Path, reference: str) -> None:
        self.up = asyncio.Event()
        super().__init__(path, [reference], self.up)


def listen(path: Path) -> socket:
    listener = socket(AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    listener.setblocking(False)
    return listener


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    return tmp_path / "engine-0.sock"


@pytest.fixture
def engine(tiny_store: Path, path: Path) -> Iterator[Engine]:
    engine = Engine(tiny_store, path)
    yield engine
    engine.engine.gate.set()
    engine.scheduler.close()
    engine.listener.close()


@asynccontextmanager
async def serving(engine: Engine) -> AsyncIterator[None]:
    server = engine.server()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(server.serve(engine.listener))
        yield
        server.stopping.set()


@asynccontextmanager
async def linked(path: Path, reference: str = REFERENCE) -> AsyncIterator[Link]:
    link = Link(path, reference)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(link.run())
        yield link
        task.cancel()


async def connect(path: Path) -> socket:
    """Connect to an engine as a front end does."""
    connection = socket(AF_UNIX)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, str(path))
    return connection


async def read_all(connection: socket) -> bytes:
    """Read until the peer closes the connection."""
    loop = asyncio.get_running_loop()
    data = b""
    with suppress(ConnectionResetError):
        while part := await asyncio.wait_for(loop.sock_recv(connection, 2**16), SOON_S):
            data += part
    return data


# ---- requests and results ------------------------------------------------------------------------


async def test_results_come_back_in_the_order_of_the_encodings(engine: Engine) -> None:
    async with serving(engine), linked(engine.path) as link:
        await link.up.wait()
        queue = RemoteQueue([link], 0)
        assert queue.precision() == "fp32"
        futures = [submit(queue, encode(n, 2 * n, 3), in_a_minute()) for n in range(1, 20)]
        for n, future in enumerate(futures, start=1):
            assert sums(await outcome(future)) == [n, 2 * n, 3]
        assert queue.state.tokens == 0


async def test_a_message_of_many_reads_arrives_whole(engine: Engine) -> None:
    async with serving(engine), linked(engine.path) as link:
        await link.up.wait()
        future = submit(RemoteQueue([link], 0), encode(500_000), in_a_minute())
        assert sums(await outcome(future)) == [500_000]


# ---- peers that misbehave ------------------------------------------------------------------------


MALFORMED = {
    "oversized": struct.pack("=I", MAX_MESSAGE_BYTES + 1),
    "not-msgpack": on_wire(b"\xc1"),
    "unknown-model": on_wire(frames.encode_run(run_of(1, 7, 3))),
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED.keys())
async def test_a_malformed_message_closes_the_connection(
    engine: Engine, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    loop = asyncio.get_running_loop()
    async with serving(engine), linked(engine.path) as link:
        await link.up.wait()
        with await connect(engine.path) as connection:
            await loop.sock_sendall(connection, data)
            assert await read_all(connection) in (b"", GREETING)
        future = submit(RemoteQueue([link], 0), encode(7), in_a_minute())
        assert sums(await outcome(future)) == [7]
    assert "the connection to a front end is closed: a malformed message" in caplog.text


# ---- the bytes -----------------------------------------------------------------------------------


class Recorder(Channel):
    """Keeps what it receives."""

    def __init__(self) -> None:
        super().__init__("a peer")
        self.messages: list[bytes] = []
        self.ended = asyncio.Event()

    def received(self, message: memoryview) -> None:
        self.messages.append(bytes(message))

    def lost(self) -> None:
        self.ended.set()


@given(
    messages=st.lists(st.binary(max_size=50), max_size=8),
    cuts=st.lists(st.integers(1, 60), min_size=1),
)
async def test_messages_do_not_depend_on_how_bytes_arrive(
    messages: list[bytes], cuts: list[int]
) -> None:
    loop = asyncio.get_running_loop()
    here, peer = socketpair()
    _, channel = await loop.create_unix_connection(Recorder, sock=here)
    data = b"".join(map(on_wire, messages))
    start = 0
    while start < len(data):
        for cut in cuts:
            channel.data_received(data[start : start + cut])
            start += cut
    channel.close()
    await channel.ended.wait()
    peer.close()
    assert channel.messages == messages


def test_a_folder_whose_sockets_cannot_be_named_stops_the_start(
    tiny_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("a" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    settings = load_settings({"model_store": tiny_store, "frontends": 1, "port": 0})
    with pytest.raises(StartupError, match="set TMPDIR to a short path"):
        supervise(settings)
    assert list(deep.iterdir()) == []
