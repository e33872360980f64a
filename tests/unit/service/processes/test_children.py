"""Children of the supervisor: how they start, restart and end."""

import asyncio
import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from cloze.service.processes.children import Child, ChildConfig, end_all
from cloze.service.settings import Settings
from tests.support.forked import forked
from tests.support.leaping_loop import LEAPING
from tests.support.virtual_time import LOOP_CLOCK, VirtualClock

PR_GET_PDEATHSIG = 2


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return LEAPING


def config(parent: int = os.getppid(), ready: int = 7) -> ChildConfig:
    sockets = (Path("/tmp/x/engine-0.sock"), Path("/tmp/x/engine-1.sock"))
    settings = Settings(port=1234, model=("bert@2",), frontends=3, model_store=Path("/tmp/store"))
    return ChildConfig("engine-1", sockets, ready, 8, 1, parent, settings)


def test_a_child_reads_its_configuration_and_ends_with_its_parent(tmp_path: Path) -> None:
    sent = config(os.getpid())

    def run() -> int:
        sys.argv = ["child", sent.to_argument()]
        received = ChildConfig.from_arguments()
        number = ctypes.c_int()
        ctypes.CDLL(None).prctl(PR_GET_PDEATHSIG, ctypes.byref(number))
        assert received == sent
        assert number.value == signal.SIGKILL
        return 7

    with forked(run, tmp_path / "output") as fork:
        assert fork.code() == 7, fork.log


def test_a_child_looks_at_its_parent_where_the_kernel_does_not_end_it(tmp_path: Path) -> None:
    def run() -> int:
        async def serve() -> None:
            config(parent=0, ready=os.pipe()[1]).report_ready()
            await asyncio.sleep(30)

        asyncio.run(serve())
        return 7

    with forked(run, tmp_path / "output") as fork:
        assert fork.code() == 1


def reported(reader: int) -> bytes:
    try:
        return os.read(reader, 10**6)
    except BlockingIOError:
        return b""


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Return a pipe that waits for nobody."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    yield reader, writer
    os.close(reader)
    os.close(writer)


@pytest.mark.anyio
async def test_a_child_reports_every_second(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    os.set_blocking(writer, True)
    config(ready=writer).report_ready()
    assert not os.get_blocking(writer)
    for wait_s, count in ((0.5, 1), (1.0, 1), (2.0, 2)):
        await asyncio.sleep(wait_s)
        assert len(reported(reader)) == count


@pytest.mark.anyio
async def test_a_supervisor_that_does_not_read_stops_no_child(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    with pytest.raises(BlockingIOError):
        while True:
            os.write(writer, bytes(4096))
    config(ready=writer).report_ready()
    await asyncio.sleep(1.5)
    assert set(reported(reader)) == {0}
    await asyncio.sleep(1)
    assert len(reported(reader)) == 1
    assert errors == []


PYTHON = (sys.executable, "-S", "-c")
SLEEPS = (*PYTHON, "import time; time.sleep(60)")
REPORTS = (
    *PYTHON,
    "import json, os, sys; c = json.loads(sys.argv[1]); os.write(c['ready'], b'1'); print(c['name'])",
)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as made:
        yield made


def made(listener: socket.socket, command: tuple[str, ...] = SLEEPS) -> Child:
    return Child("engine-0", command, listener)


def kept(child: Child, folder: Path, restarted: Callable[[], None] = lambda: None) -> Any:
    """Return what keeps a child running."""
    return child.keep((folder / "engine-0.sock",), Settings(), folder, restarted)


class Lives(Child):
    """A child whose processes end at once, after given times of virtual time.

    Attributes:
        lives_s: seconds that each process runs; None: the system refuses to start the process.
        starts: the times of the starts.
    """

    __slots__ = ("lives_s", "starts")
    lives_s: list[float | None]
    starts: list[float]

    async def _start(self, *_: Any) -> asyncio.StreamReader:
        self.starts.append(self.clock.monotonic())
        if self.lives_s[0] is None:
            self.lives_s.pop(0)
            raise OSError(11, "Resource temporarily unavailable")
        return asyncio.StreamReader()

    async def _watch(self, _: asyncio.StreamReader) -> int:
        if not self.lives_s[1:]:
            await asyncio.Future()
        seconds = self.lives_s.pop(0)
        await asyncio.sleep(seconds)
        self.ready.set()
        return 1


async def waits_of(listener: socket.socket, folder: Path, *lives_s: float | None) -> list[float]:
    """Return the seconds between the end of each process and the next start."""
    ended: list[None] = []
    child = Lives("engine-0", (), listener, clock=LOOP_CLOCK)
    child.lives_s, child.starts = [*lives_s, 0.0], []
    with suppress(TimeoutError):
        await asyncio.wait_for(kept(child, folder, lambda: ended.append(None)), 10_000)
    assert len(ended) == len(lives_s) - lives_s.count(None)
    ends = [start + (life or 0) for start, life in zip(child.starts, lives_s, strict=False)]
    return [next_start - end for next_start, end in zip(child.starts[1:], ends, strict=True)]


@pytest.mark.anyio
async def test_the_delay_doubles_up_to_half_a_minute_and_is_reset_after_a_minute(
    listener: socket.socket, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = [0.25, 0.5, 1, 2, 4, 8, 16, 30, 30]
    gauges = [tmp_path / f"gauge_livesum_engine-{number}.db" for number in (0, 1)]
    for file in gauges:
        file.touch()
    assert await waits_of(listener, tmp_path, *[0.0] * 9) == pytest.approx(expected)
    assert [file.exists() for file in gauges] == [False, True], "its gauges end with it"
    assert "engine-0 ended with 1; it starts again in 0.25 s" in caplog.text
    again = await waits_of(listener, tmp_path, 0.0, 0.0, 59.9, 60.1)
    assert again == pytest.approx([0.25, 0.5, 1, 0.25])
    refused = await waits_of(listener, tmp_path, 0.0, None, None)
    assert refused == pytest.approx([0.25, 0.5, 1]), "a start that the system refuses"
    assert "engine-0 does not start (Resource temporarily unavailable)" in caplog.text
    with pytest.raises(OSError, match="temporarily"):
        await waits_of(listener, tmp_path, None)


class Silent:
    """A process that ends when it is killed, and notes the times at which it was killed."""

    def __init__(self) -> None:
        self.killed: list[float] = []

    def kill(self) -> None:
        self.killed.append(asyncio.get_running_loop().time())

    def wait(self) -> int:
        return -9


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("reports_at", "limit_s", "stopped_s"),
    [((), 600.0, 0), ((5.0, 12.5), 8.0, 0), ((5.0, 12.5), 8.0, 1000)],
)
async def test_a_silent_child_is_killed(
    listener: socket.socket, reports_at: Sequence[float], limit_s: float, stopped_s: float
) -> None:
    """Seconds in which all processes were stopped do not count."""
    child, process, reports = made(listener), Silent(), asyncio.StreamReader()
    running: Any = process
    child.process = running
    loop: Any = asyncio.get_running_loop()
    for at in reports_at:
        loop.call_at(at, reports.feed_data, b"1")
    loop.call_at(15.0, lambda: setattr(loop, "_now", loop.time() + stopped_s))
    assert await child._watch(reports) == -9
    assert child.process is None
    (killed,) = process.killed
    expected_s = max(reports_at, default=0.0) + limit_s + stopped_s
    assert killed == pytest.approx(expected_s, abs=1.5)
    assert child.ready.is_set() == bool(reports_at)


def test_a_child_reports_and_its_end_is_seen(listener: socket.socket, tmp_path: Path) -> None:
    child = made(listener, REPORTS)
    before = len(list(Path("/proc/self/fd").iterdir()))

    async def run() -> int:
        reports = await child._start((tmp_path / "e.sock",), Settings(), tmp_path)
        return await child._watch(reports)

    assert asyncio.run(run()) == 0
    assert child.ready.is_set()
    assert child.process is None
    assert len(list(Path("/proc/self/fd").iterdir())) == before


class Process:
    """A process that notes what is done to it; `wait` moves the clock if it does not end."""

    def __init__(self, name: str, notes: list[str], clock: VirtualClock, ends: bool) -> None:
        self.name, self.notes, self.clock, self.ends = name, notes, clock, ends
        self.terminate = lambda: notes.append(f"terminate {name}")
        self.kill = lambda: notes.append(f"kill {name}")

    def wait(self, timeout: float | None = None) -> None:
        self.notes.append(f"wait {timeout} {self.name}")
        if timeout is not None and not self.ends:
            self.clock.now += timeout
            raise subprocess.TimeoutExpired(self.name, timeout)


def test_all_children_share_one_time(listener: socket.socket) -> None:
    clock = VirtualClock(1000.0)

    def ending(ends: bool, grace_s: float) -> list[str]:
        """Return what happens to two running children and to one that does not run."""
        notes: list[str] = []
        children = [made(listener) for _ in range(3)]
        for child, name in zip(children, ("a", "b"), strict=False):
            process: Any = Process(name, notes, clock, ends)
            child.process = process
        end_all(children, grace_s, clock)
        return notes

    assert ending(False, 4.0) == [
        "terminate a", "terminate b",
        "wait 4.0 a", "kill a", "wait None a",
        "wait 0.0 b", "kill b", "wait None b",
    ]  # fmt: skip
    assert ending(True, 4.0) == ["terminate a", "terminate b", "wait 4.0 a", "wait 4.0 b"]
    assert ending(True, 0.0)[2:] == ["wait 0.0 a", "wait 0.0 b"]
