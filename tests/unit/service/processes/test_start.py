"""How a child starts: its configuration, its end with its parent, and its reports."""

import asyncio
import ctypes
import os
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from cloze.service.processes.start import ChildConfig
from cloze.service.settings import Settings
from tests.leaping_loop import run_leaping
from tests.unit.service.processes.forked import forked

PR_GET_PDEATHSIG = 2


def config(parent: int = 0, ready: int = 7) -> ChildConfig:
    sockets = (Path("/tmp/x/engine-0.sock"), Path("/tmp/x/engine-1.sock"))
    settings = Settings(port=1234, model=("bert@2",), frontends=3, model_store=Path("/tmp/store"))
    return ChildConfig("engine-1", sockets, ready, (8, 9), 1, parent, settings)


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


def test_a_child_whose_parent_has_ended_ends(tmp_path: Path) -> None:
    def run() -> int:
        sys.argv = ["child", config(os.getpid()).to_argument()]
        ChildConfig.from_arguments()
        return 7

    with forked(run, tmp_path / "output") as fork:
        assert fork.code() == 1


def reported(reader: int) -> bytes:
    try:
        return os.read(reader, 10**6)
    except BlockingIOError:
        return b""


def test_a_child_reports_every_second() -> None:
    reader, writer = os.pipe()
    os.set_blocking(reader, False)

    async def run() -> list[bytes]:
        reports = []
        config(ready=writer).report_ready()
        for wait_s in (0.5, 1.0, 2.0):
            await asyncio.sleep(wait_s)
            reports.append(reported(reader))
        return reports

    assert [len(report) for report in run_leaping(run())] == [1, 1, 2]
    assert not os.get_blocking(writer)
    os.close(reader)
    os.close(writer)


def test_a_supervisor_that_does_not_read_stops_no_child() -> None:
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    errors: list[object] = []

    async def run() -> tuple[bytes, bytes]:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        with pytest.raises(BlockingIOError):
            while True:
                os.write(writer, bytes(4096))
        config(ready=writer).report_ready()
        await asyncio.sleep(1.5)
        full = reported(reader)
        await asyncio.sleep(1)
        later = reported(reader)
        os.close(reader)
        await asyncio.sleep(3)
        return full, later

    full, later = run_leaping(run())
    assert set(full) == {0}
    assert len(later) == 1
    assert errors == []
    os.close(writer)


def test_a_report_reaches_a_reader_that_waits() -> None:
    reader, writer = os.pipe()
    got: list[bytes] = []
    thread = threading.Thread(target=lambda: got.append(os.read(reader, 1)))
    thread.start()

    async def run() -> None:
        replace(config(), ready=writer).report_ready()

    asyncio.run(run())
    thread.join(20)
    assert len(got) == 1
    assert got[0] != b""
    os.close(reader)
    os.close(writer)
