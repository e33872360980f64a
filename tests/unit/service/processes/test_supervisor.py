"""The supervisor with small children: their start, their end, their restarts, and reloads."""

import asyncio
import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.mmap_dict import MmapedDict

from cloze.service.core import BUSY, Changes, Device, ReloadRefused, ShuttingDown, StartupError
from cloze.service.processes import children as children_module
from cloze.service.processes import supervisor as supervisor_module
from cloze.service.processes.supervisor import (
    ReloadReport,
    Supervisor,
    ask_supervisor,
    supervise,
)
from cloze.service.settings import Settings
from tests.unit.service.processes.forked import COMMAND, Fork, forked, publish
from tests.waiting import wait_until

BOTH = ["engine-0", "engine-1"]
FRONT_ENDS = ["frontend-0", "frontend-1", "frontend-2"]


class Server:
    """A supervisor in a fork, with two engine processes and three front ends.

    Attributes:
        folder: the folder that all processes share.
        fork: the process of the supervisor.
        address: of the HTTP socket.
    """

    fork: Fork
    address: tuple[str, int]

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "shared"
        self.folder.mkdir()
        self.store = folder / "store"
        self.reference = publish(self.store)
        self.interpreter = folder / "python"
        self.interpreter.symlink_to(sys.executable)
        self.command = (str(self.interpreter), *COMMAND[1:])

    @contextmanager
    def running(self) -> Iterator["Server"]:
        settings = Settings(model_store=self.store, frontends=3, gpus=2)
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            self.address = listener.getsockname()

            def run() -> int:
                return Supervisor(settings, listener, (), self.folder, self.command).run()

            with forked(run, self.folder.parent / "output") as self.fork:
                listener.close()
                yield self

    @contextmanager
    def serving(self) -> Iterator["Server"]:
        with self.running():
            self.until("front ends are ready")
            yield self

    def until(self, text: str, times: int = 1) -> None:
        wait_until(lambda: self.fork.log.count(text) >= times)

    def tell(self, what: str, name: str = "", value: str = "") -> Path:
        """Write a file that a child follows; return it."""
        file = self.folder / "-".join(filter(None, (what, name)))
        file.write_text(value)
        return file

    @property
    def events(self) -> list[tuple[str, str, int]]:
        file = self.folder / "events"
        lines = [line.split() for line in file.read_text().splitlines()] if file.exists() else []
        return [(event, name, int(pid)) for event, name, pid in lines]

    def pids(self, name: str, event: str = "start") -> list[int]:
        return [pid for kind, who, pid in self.events if (kind, who) == (event, name)]

    def names(self, event: str) -> list[str]:
        return [name for kind, name, _ in self.events if kind == event]

    @property
    def alive(self) -> set[str]:
        return {name for event, name, pid in self.events if event == "start" and is_alive(pid)}

    def restarts(self, kind: str) -> float:
        (file,) = self.folder.glob("counter_supervisor.db")
        values: Any = MmapedDict.read_all_values_from_file(str(file))
        return sum(value for key, value, *_ in values if json.loads(key)[2].get("kind") == kind)

    @property
    def report(self) -> ReloadReport:
        return ReloadReport.read(self.folder)

    def reload(self) -> None:
        self.fork.send(signal.SIGHUP)

    def stop(self) -> int:
        self.fork.send(signal.SIGTERM)
        return self.fork.code()


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    made = Server(tmp_path)
    # So that only events wake the supervisor.
    monkeypatch.setattr(supervisor_module, "_LOOK_EVERY_S", 30.0)
    monkeypatch.setattr(children_module, "FRONTEND_COMMAND", made.command)
    return made


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_engines_start_first_and_end_last(server: Server, number: signal.Signals) -> None:
    with server.serving():
        assert "3 front ends are ready" in server.fork.log
        order = [f"{event} {name[:-2]}" for event, name, _ in server.events]
        assert order.index("start frontend") > max(
            place for place, event in enumerate(order) if event == "ready engine"
        )
        assert server.alive == {*BOTH, *FRONT_ENDS}
        pids = [pid for event, _, pid in server.events if event == "start"]
        assert [os.getsid(pid) for pid in pids] == pids, "Ctrl-C reaches the supervisor alone"
        socket.create_connection(server.address).close()
        assert {"engine-0.sock", "engine-1.sock"} <= {file.name for file in server.folder.iterdir()}
        server.fork.send(number)
        assert server.fork.code() == 0
        ends = server.names("end")
        assert sorted(ends[:3]) == FRONT_ENDS
        assert sorted(ends[3:]) == BOTH
        assert server.alive == set()
        assert not list(server.folder.glob("*.sock"))
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(server.address)


def test_children_are_told_what_they_need(server: Server) -> None:
    with server.serving():
        engine = json.loads((server.folder / "config-engine-1").read_text())
        front_end = json.loads((server.folder / "config-frontend-2").read_text())
    sockets = [str(server.folder / f"engine-{n}.sock") for n in (0, 1)]
    assert engine["engine_sockets"] == front_end["engine_sockets"] == sockets
    assert (engine["device_id"], engine["parent"]) == (1, server.fork.pid)
    assert engine["settings"]["model"] == front_end["settings"]["model"] == ["tiny@1"]
    assert engine["listeners"] != front_end["listeners"]
    assert len(engine["listeners"]) == len(front_end["listeners"]) == 1
    for child in (engine, front_end):
        assert child["environment"]["PROMETHEUS_MULTIPROC_DIR"] == str(server.folder)
        assert child["environment"]["PATH"] == os.environ["PATH"]


def test_a_signal_ends_a_start(server: Server) -> None:
    server.tell("wait", "engine-1")
    with server.running():
        wait_until(lambda: "engine-0" in server.names("ready") and bool(server.pids("engine-1")))
        assert server.stop() == 128 + 15
        assert server.names("start").count("frontend-0") == 0
        assert server.alive == set()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(server.address)


def test_a_signal_ends_a_start_of_front_ends(server: Server) -> None:
    server.tell("wait", "frontend-1")
    with server.running():
        wait_until(lambda: bool(server.pids("frontend-1")))
        socket.create_connection(server.address).close()
        assert server.stop() == 0
        assert server.alive == set()


@pytest.mark.parametrize(
    ("name", "code", "told"), [("engine-1", "3", 3), ("frontend-2", "4", 4), ("engine-0", "0", 1)]
)
def test_a_child_that_does_not_start_ends_the_server(
    server: Server, name: str, code: str, told: int
) -> None:
    server.tell("fail", name, code)
    with server.running():
        assert server.fork.code() == told
        assert server.pids(name)
        assert len(server.pids(name)) == 1, "it is not started again"
        assert server.alive == set()


def test_a_child_that_dies_is_started_again(server: Server) -> None:
    with server.serving():
        assert [server.restarts(kind) for kind in ("engine", "frontend")] == [0, 0]
        os.kill(server.pids("engine-1")[0], signal.SIGKILL)
        wait_until(lambda: len(server.pids("engine-1", "ready")) == 2)
        assert "engine-1 ended with -9; it starts again in 0.25 s" in server.fork.log
        os.kill(server.pids("frontend-0")[0], signal.SIGTERM)
        wait_until(lambda: len(server.pids("frontend-0", "ready")) == 2)
        os.kill(server.pids("frontend-0")[1], signal.SIGTERM)
        wait_until(lambda: len(server.pids("frontend-0", "ready")) == 3)
        assert [server.restarts(kind) for kind in ("engine", "frontend")] == [1, 2]
        assert server.names("start").count("engine-0") == 1
        assert server.stop() == 0
        assert server.alive == set()


def test_a_restart_that_the_system_refuses_is_tried_again(server: Server) -> None:
    with server.serving():
        server.interpreter.unlink()
        os.kill(server.pids("engine-0")[0], signal.SIGKILL)
        server.until(
            "engine-0 does not start (No such file or directory); it starts again in 0.5 s"
        )
        server.interpreter.symlink_to(sys.executable)
        wait_until(lambda: len(server.pids("engine-0", "ready")) == 2)
        assert server.stop() == 0


def test_a_child_that_does_not_report_is_replaced(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children_module, "_SILENT_S", 0.3)
    monkeypatch.setattr(supervisor_module, "_LOOK_EVERY_S", 0.2)
    server.tell("beats")
    with server.serving():
        silent = server.tell("silent", "engine-1")
        server.until("engine-1 has not reported for 0 s; it is replaced")
        silent.unlink()
        wait_until(lambda: len(server.pids("engine-1", "ready")) == 2)
        assert not is_alive(server.pids("engine-1")[0])
        assert server.names("start").count("engine-0") == 1


def stop_for(seconds: float, *pids: int) -> None:
    """Stop processes for so long."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    end = time.monotonic() + seconds
    wait_until(lambda: time.monotonic() > end)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


def test_nobody_is_replaced_when_all_processes_were_stopped(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children_module, "_SILENT_S", 0.5)
    monkeypatch.setattr(supervisor_module, "_LOOK_EVERY_S", 0.1)
    server.tell("beats")
    with server.serving():
        pids = [pid for event, _, pid in server.events if event == "start"]
        stop_for(1.5, server.fork.pid, *pids)
        os.kill(server.pids("frontend-1")[0], signal.SIGKILL)  # so that the supervisor has looked
        wait_until(lambda: len(server.pids("frontend-1", "ready")) == 2)
        assert "it is replaced" not in server.fork.log
        assert len(server.names("start")) == 6


# ---- reloads ------------------------------------------------------------------------------------


def until_reloaded(server: Server, number: int) -> None:
    suffix = f".{number}" if number > 1 else ""
    names = {f"{name}{suffix}" for name in (*BOTH, *FRONT_ENDS)}
    wait_until(lambda: server.report.changes is not None and server.alive == names)
    wait_until(lambda: not server.report.busy)


def test_a_reload_replaces_all_processes(server: Server) -> None:
    with server.serving():
        publish(server.store)
        publish(server.store, "other")
        server.reload()
        until_reloaded(server, 2)
        report = server.report
        assert report.changes is not None
        assert report.began > 0
        assert sorted(report.changes.added) == ["other@1", "tiny@2"]
        assert report.changes.removed == ["tiny@1"]
        server.until("reloaded: added")
        assert sorted(server.names("retire")) == FRONT_ENDS
        assert sorted(server.names("end")) == BOTH
        assert {file.name for file in server.folder.glob("*.sock")} == {
            "engine-0.2.sock", "engine-1.2.sock",
        }  # fmt: skip
        os.kill(server.pids("engine-0.2")[0], signal.SIGKILL)
        wait_until(lambda: len(server.pids("engine-0.2", "ready")) == 2)
        server.reload()
        until_reloaded(server, 1)
        assert server.stop() == 0
        assert server.alive == set()
        assert server.names("start").count("engine-0") == 2


def test_each_process_of_two_generations_gets_one_signal_to_end(server: Server) -> None:
    """A second signal interrupts what the process does on the first one."""
    with server.serving():
        server.tell("stay", "frontend-1")
        server.reload()
        later = {f"{name}.2" for name in (*BOTH, *FRONT_ENDS)}
        wait_until(lambda: server.report.changes is not None and server.alive >= later)
        wait_until(lambda: server.alive == {*BOTH, "frontend-1", *later})
        server.tell("linger", "frontend-0.2")
        server.tell("linger", "engine-1.2")
        assert server.stop() == 0
        ends = server.names("end")
        assert sorted(ends[:4]) == ["frontend-0.2", "frontend-1", "frontend-1.2", "frontend-2.2"]
        assert sorted(ends[4:]) == sorted([*BOTH, *(f"{name}.2" for name in BOTH)])
        assert not list(server.folder.glob("*.sock"))


def test_a_reload_waits_until_the_last_one_has_ended(server: Server) -> None:
    with server.serving():
        stays = server.tell("stay", "frontend-1")
        server.reload()
        wait_until(lambda: server.pids("frontend-1", "retire") != [])
        wait_until(lambda: server.alive >= {f"{name}.2" for name in (*BOTH, *FRONT_ENDS)})
        assert server.report.changes is not None
        assert server.report.busy
        server.reload()
        server.until("a reload waits until the last one has ended")
        os.kill(server.pids("engine-0")[0], signal.SIGKILL)
        wait_until(lambda: len(server.pids("engine-0", "ready")) == 2)  # its requests go on
        assert "frontend-0.3" not in server.names("start")
        assert server.names("start").count("frontend-0") == 1, "a retired child is not kept"
        stays.unlink()
        os.kill(server.pids("frontend-1")[0], signal.SIGTERM)
        until_reloaded(server, 1)
        assert server.restarts("frontend") == 0
        assert server.stop() == 0


def test_processes_that_only_start_are_not_ready_after_a_stop(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "_LOOK_EVERY_S", 0.1)
    waits = server.tell("wait", "engine-1.2")
    with server.serving():
        server.reload()
        wait_until(lambda: server.pids("engine-1.2") != [])
        stop_for(0.5, server.fork.pid)
        os.kill(server.pids("frontend-1")[0], signal.SIGKILL)  # so that the supervisor has looked
        wait_until(lambda: len(server.pids("frontend-1", "ready")) == 2)
        assert server.report.changes is None
        assert "frontend-0.2" not in server.names("start")
        waits.unlink()
        until_reloaded(server, 2)


def series(file: Path) -> set[str]:
    values: Any = MmapedDict.read_all_values_from_file(str(file))
    return {json.loads(key)[2]["version"] for key, *_ in values}


def test_the_metrics_of_replaced_processes_leave(server: Server) -> None:
    with server.serving():
        counters = server.folder / "counter_frontend-1.db"
        written: Any = MmapedDict(str(counters))
        for version in ("1", "2", "3"):
            labels = {"model": "tiny", "version": version}
            written.write_value(json.dumps(["cloze_x", "cloze_x_total", labels, "help"]), 1.0, 0.0)
        written.close()
        gauges = server.folder / "gauge_livesum_engine-0.db"
        gauges.touch()
        publish(server.store)
        server.reload()
        until_reloaded(server, 2)
        wait_until(lambda: series(counters) == {"2"})
        assert not gauges.exists()


def refused(server: Server, reason: str) -> None:
    """Ask for a reload that is refused; nothing of it may remain."""
    before = {name: server.pids(name) for name in (*BOTH, *FRONT_ENDS)}
    descriptors = len(list(Path(f"/proc/{server.fork.pid}/fd").iterdir()))
    server.reload()
    wait_until(lambda: server.report.error != "" and not server.report.busy)
    assert server.report.error == f"nothing was reloaded: {reason}"
    assert server.report.changes is None
    server.until(server.report.error)
    wait_until(lambda: server.alive == {*BOTH, *FRONT_ENDS})
    assert {name: server.pids(name) for name in (*BOTH, *FRONT_ENDS)} == before
    assert not list(server.folder.glob("*.2.sock"))
    wait_until(
        lambda: len(list(Path(f"/proc/{server.fork.pid}/fd").iterdir())) == descriptors
    )  # fmt: skip


@pytest.mark.parametrize("name", ["engine-1.2", "frontend-2.2"])
def test_a_reload_that_does_not_start_leaves_nothing(server: Server, name: str) -> None:
    with server.serving():
        failing = server.tell("fail", name, "3")
        refused(server, "a new process ended with 3; the log says why")
        assert name in server.names("start")
        failing.unlink()
        server.reload()
        until_reloaded(server, 2)
        assert server.report.error == ""
        assert server.stop() == 0


def test_a_reload_of_a_store_that_does_not_open_is_refused(server: Server) -> None:
    with server.serving():
        file = server.store / "tiny" / "1" / "g.onnx"
        file.write_text("oops")
        refused(server, "bundle tiny@1: g.onnx was changed after it was published (wrong sha256)")
        assert all(".2" not in name for name in server.names("start"))


def test_a_reload_that_the_system_refuses_is_reported(server: Server) -> None:
    with server.serving():
        server.interpreter.unlink()
        refused(server, "No such file or directory")
        assert server.stop() == 0


def test_a_signal_ends_a_reload(server: Server) -> None:
    with server.serving():
        server.tell("wait", "engine-0.2")
        server.reload()
        wait_until(lambda: "engine-0.2" in server.names("start"))
        assert server.stop() == 0
        assert server.report.error == "nothing was reloaded: the server is shutting down"
        assert server.alive == set()
        assert not list(server.folder.glob("*.sock"))


# ---- what came of a reload ---------------------------------------------------------------------

CHANGES = Changes(added=["a@1"], removed=["b@1"], kept=[])


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
    monkeypatch.setattr(supervisor_module, "time", SimpleNamespace(monotonic=lambda: 1000.0))

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


# ---- the whole server ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (Settings(gpus=2, device=Device.CUDA), "gpus is 2, which needs front ends"),
        (Settings(gpus=2, frontends=1, device=Device.CPU), "gpus is 2, but the device is cpu"),
        (Settings(gpus=2, frontends=1, device=Device.AUTO), "gpus is 2, but the device is auto"),
    ],
)
def test_several_engines_need_front_ends_and_cuda(settings: Settings, message: str) -> None:
    with pytest.raises(StartupError, match=message):
        supervise(settings, ("/no/such/program",))


def test_a_server_leaves_no_folder(
    server: Server,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folders = tmp_path_factory.mktemp("f")  # the path of a socket has at most 107 bytes
    monkeypatch.setattr(tempfile, "tempdir", str(folders))
    monkeypatch.setenv("CLOZE_GUPS", "1")
    admin = tmp_path / "admin.sock"
    settings = Settings(
        model_store=server.store, frontends=1, port=0, admin_socket=admin, log_format="json"
    )
    run: Callable[[], int] = lambda: supervise(settings, server.command)  # noqa: E731
    with forked(run, tmp_path / "output") as fork:
        wait_until(lambda: "1 front ends are ready" in fork.log)
        (folder,) = folders.iterdir()
        assert folder.name.startswith("cloze-")
        lines = [json.loads(line) for line in fork.log.splitlines()]
        assert any("1 front ends are ready" in json.dumps(line) for line in lines)
        server.folder = folder
        assert "the variable CLOZE_GUPS is not a setting" in fork.log
        front_end = json.loads((folder / "config-frontend-0").read_text())
        assert len(front_end["listeners"]) == 2
        assert admin.is_socket()
        fork.send(signal.SIGTERM)
        assert fork.code() == 0
        assert not list(folders.iterdir())
        assert not admin.exists()


def test_a_path_that_is_too_long_stops_the_start(server: Server, tmp_path: Path) -> None:
    server.folder = tmp_path / ("x" * 100)
    server.folder.mkdir()
    with server.running():
        assert server.fork.code() == 2
        assert "set TMPDIR to a short path" in server.fork.log
