"""A child process: when it starts again, when it is killed, and what came of a reload."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cloze.service.core import BUSY, Changes, ReloadRefused, ShuttingDown
from cloze.service.processes import child as child_module
from cloze.service.processes import reload_report
from cloze.service.processes.child import Child, end_all
from cloze.service.processes.reload_report import ReloadReport, ask_supervisor
from cloze.service.settings import Settings

SLEEPS = (sys.executable, "-S", "-c", "import time; time.sleep(60)")
REPORTS = (
    sys.executable,
    "-S",
    "-c",
    "import json, os, sys; c = json.loads(sys.argv[1]); os.write(c['ready'], b'1'); print(c['name'])",
)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the clock of the children, which a test sets."""
    clock = [1000.0]
    monkeypatch.setattr(child_module.time, "monotonic", lambda: clock[0])
    return clock


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as made:
        yield made


def made(listener: socket.socket, command: tuple[str, ...] = SLEEPS) -> Child:
    return Child("engine-0", command, (listener,))


def test_the_delay_doubles_up_to_half_a_minute_and_is_reset_after_a_minute(
    now: list[float], listener: socket.socket, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    child = made(listener)
    delays = []
    for _ in range(9):
        child.note_end(1, tmp_path)
        delays.append(child.started - now[0])
        now[0] = child.started
    assert delays == [0.25, 0.5, 1, 2, 4, 8, 16, 30, 30]
    assert "engine-0 ended with 1; it starts again in 0.25 s" in caplog.text
    now[0] = child.started + 60.0
    child.note_end(1, tmp_path)
    assert child.started - now[0] == 30, "a minute is not enough"
    now[0] = child.started + 60.1
    child.note_end(1, tmp_path)
    assert child.started - now[0] == 0.25


def test_a_child_that_is_not_kept_does_not_start_again(
    now: list[float], listener: socket.socket, tmp_path: Path
) -> None:
    child = made(listener)
    child.is_kept = False
    gauges = [tmp_path / f"gauge_livesum_engine-{number}.db" for number in (0, 1)]
    for file in gauges:
        file.touch()
    child.reports = os.open("/dev/null", os.O_RDONLY)
    child.note_end(0, tmp_path)
    assert child.reports is None
    assert [file.exists() for file in gauges] == [False, True], "its gauges end with it"
    assert (child.process, child.started, child.delay_s) == (None, 0.0, 0.25)
    assert child.kind == "engine"


class Killed:
    def __init__(self) -> None:
        self.times = 0

    def kill(self) -> None:
        self.times += 1


@pytest.mark.parametrize(("heard", "limit_s"), [(None, 600.0), (1000.0, 8.0)])
def test_a_silent_child_is_killed(
    now: list[float], listener: socket.socket, heard: float | None, limit_s: float,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    child, process = made(listener), Killed()
    child.kill_if_silent()  # not started
    running: Any = process
    child.process, child.started, child.heard = running, 1000.0, heard
    child.kill_if_silent()
    assert process.times == 0, "it is not listened to"
    child.reports = os.open("/dev/null", os.O_RDONLY)
    now[0] += limit_s - 0.1
    child.kill_if_silent()
    assert process.times == 0
    now[0] += 0.1
    child.kill_if_silent()
    assert process.times == 1
    assert child.reports is None
    assert f"engine-0 has not reported for {limit_s:.0f} s; it is replaced" in caplog.text
    child.kill_if_silent()
    assert process.times == 1


def test_a_child_reports_and_its_end_is_seen(listener: socket.socket, tmp_path: Path) -> None:
    child = made(listener, REPORTS)
    before = time.monotonic()
    child.start((tmp_path / "e.sock",), Settings(), tmp_path)
    assert child.process is not None
    assert child.started >= before
    assert child.process.wait(20) == 0
    assert child.listen()
    assert child.heard is not None
    assert not child.listen()
    assert (child.reports, child.heard) == (None, None)


def test_a_child_that_does_not_start_leaves_no_descriptor(
    listener: socket.socket, tmp_path: Path
) -> None:
    child = made(listener, ("/no/such/program",))
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(OSError, match="No such file"):
        child.start((), Settings(), tmp_path)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert child.process is None


def test_children_end_in_time_or_are_killed(listener: socket.socket) -> None:
    polite, stubborn = made(listener), made(listener)
    ignoring = "import signal, sys, time; signal.signal(15, signal.SIG_IGN); print(); sys.stdout.flush(); time.sleep(60)"
    polite.process = subprocess.Popen(SLEEPS)
    process = subprocess.Popen([sys.executable, "-S", "-c", ignoring], stdout=subprocess.PIPE)
    stubborn.process = process
    assert process.stdout is not None
    process.stdout.readline()
    idle = made(listener)
    end_all([polite, stubborn, idle], 0.2)
    assert polite.process.returncode == -signal.SIGTERM
    assert process.returncode == -signal.SIGKILL
    process.stdout.close()


# ---- what came of a reload ---------------------------------------------------------------------

CHANGES = Changes(added=("a@1",), removed=("b@1",), kept=())


def test_a_report_comes_back(tmp_path: Path) -> None:
    assert ReloadReport.read(tmp_path) == ReloadReport(0.0, None, "", busy=False)
    ReloadReport(12.5, error="no", busy=True).write(tmp_path)
    assert ReloadReport.read(tmp_path) == ReloadReport(12.5, None, "no", busy=True)
    ReloadReport(13.5, CHANGES).write(tmp_path)
    report = ReloadReport.read(tmp_path)
    assert report.changes is not None
    assert list(report.changes.added) == ["a@1"]
    assert list(report.changes.removed) == ["b@1"]
    assert [file.name for file in tmp_path.iterdir()] == ["reload.json"]


@contextmanager
def supervisor(folder: Path, *reports: ReloadReport) -> Iterator[list[int]]:
    """Let this process be the supervisor, which answers SIGHUP with reports."""
    signals: list[int] = []

    def reload(number: int, _: object) -> None:
        signals.append(number)
        for report in reports:
            report.began = time.monotonic()
            report.write(folder)

    before = signal.signal(signal.SIGHUP, reload)
    try:
        yield signals
    finally:
        signal.signal(signal.SIGHUP, before)


def asked(folder: Path, *, draining: bool = False) -> Changes:
    asking = ask_supervisor(os.getpid(), folder, lambda: draining)
    return asyncio.run(asyncio.wait_for(asking, 10))


def test_only_a_report_of_a_later_reload_counts(tmp_path: Path) -> None:
    ReloadReport(time.monotonic(), error="of an earlier reload").write(tmp_path)
    with supervisor(tmp_path, ReloadReport(busy=True), ReloadReport(changes=CHANGES)):
        assert list(asked(tmp_path).added) == ["a@1"]
    with (
        supervisor(tmp_path, ReloadReport(error="nothing was reloaded")),
        pytest.raises(ReloadRefused, match="nothing was reloaded"),
    ):
        asked(tmp_path)
    with supervisor(tmp_path), pytest.raises(ShuttingDown):
        asked(tmp_path, draining=True)


def test_a_reload_waits_for_no_other(tmp_path: Path) -> None:
    ReloadReport(time.monotonic(), busy=True).write(tmp_path)
    with supervisor(tmp_path) as signals, pytest.raises(ReloadRefused):
        asked(tmp_path)
    assert signals == []


def test_a_reload_may_begin_at_the_time_of_the_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reload_report, "time", SimpleNamespace(monotonic=lambda: 1000.0))

    def reload(*_: object) -> None:
        ReloadReport(1000.0, CHANGES).write(tmp_path)

    before = signal.signal(signal.SIGHUP, reload)
    try:
        assert list(asked(tmp_path).added) == ["a@1"]
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_reload_that_has_begun_is_waited_for(tmp_path: Path) -> None:
    """The report of its begin says that it is busy, and has no end yet."""
    began: list[float] = []

    async def ask() -> Changes:
        asking = asyncio.ensure_future(ask_supervisor(os.getpid(), tmp_path, lambda: False))
        while not began:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.1)
        assert not asking.done()
        ReloadReport(began[0], CHANGES, busy=True).write(tmp_path)
        return await asyncio.wait_for(asking, 10)

    def reload(*_: object) -> None:
        began.append(time.monotonic())
        ReloadReport(began[0], busy=True).write(tmp_path)

    before = signal.signal(signal.SIGHUP, reload)
    try:
        assert list(asyncio.run(ask()).added) == ["a@1"]
    finally:
        signal.signal(signal.SIGHUP, before)


def test_another_reload_that_began_just_before_is_busy(tmp_path: Path) -> None:
    def reload(*_: object) -> None:
        ReloadReport(time.monotonic() - 100, busy=True).write(tmp_path)

    before = signal.signal(signal.SIGHUP, reload)
    try:
        with pytest.raises(ReloadRefused, match=BUSY):
            asked(tmp_path)
    finally:
        signal.signal(signal.SIGHUP, before)
