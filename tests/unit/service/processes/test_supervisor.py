"""The supervisor with small children: their start, their end, their restarts, and signals."""

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cloze.service.core import Device
from cloze.service.errors import StartupError
from cloze.service.processes import children as children_module
from cloze.service.processes import supervisor as supervisor_module
from cloze.service.processes.supervisor import Supervisor, supervise
from cloze.service.settings import Settings
from tests.support.forked import COMMAND, Fork, forked, publish
from tests.support.waiting import wait_until

BOTH = ["engine-0", "engine-1"]
FRONT_ENDS = ["frontend-0", "frontend-1", "frontend-2"]


class Server:
    """A supervisor in a fork, with two engine processes and three front ends in one folder."""

    fork: Fork
    address: tuple[str, int]

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "shared"
        self.folder.mkdir()
        self.store = folder / "store"
        publish(self.store)
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
                return asyncio.run(Supervisor(settings, listener, self.folder, self.command).run())

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

    def tell(self, what: str, name: str, value: str = "") -> None:
        """Write a file that a child follows."""
        (self.folder / f"{what}-{name}").write_text(value)

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
    monkeypatch.setattr(children_module, "_LOOK_EVERY_S", 30.0)
    monkeypatch.setattr(supervisor_module, "FRONTEND_COMMAND", made.command)
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
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(server.address)


@pytest.mark.parametrize(("waits", "code"), [("engine-1", 128 + 15), ("frontend-1", 0)])
def test_a_signal_ends_a_start(server: Server, waits: str, code: int) -> None:
    server.tell("wait", waits)
    with server.running():
        wait_until(lambda: bool(server.pids("engine-0", "ready") and server.pids(waits)))
        if waits == "frontend-1":  # front ends start at once, and report in any order
            wait_until(lambda: bool(server.pids("frontend-0")))
        assert server.names("start").count("frontend-0") == (waits == "frontend-1")
        assert server.stop() == code
        assert server.alive == set()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(server.address)


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


def test_a_hangup_is_answered_in_the_log_and_changes_nothing(server: Server) -> None:
    with server.serving():
        publish(server.store)
        started = server.names("start")
        for times in (1, 2):
            server.fork.send(signal.SIGHUP)
            server.until("a reload of models needs a roll of the replicas", times)
        os.kill(server.pids("frontend-0")[0], signal.SIGTERM)
        wait_until(lambda: len(server.pids("frontend-0", "ready")) == 2)
        assert sorted(server.names("start")) == sorted([*started, "frontend-0"])
        config = json.loads((server.folder / "config-frontend-0").read_text())
        assert config["settings"]["model"] == ["tiny@1"], "a restart serves what was served"
        assert server.stop() == 0


@pytest.mark.parametrize(
    ("device", "frontends", "message"),
    [(Device.CUDA, 0, "needs front ends"), (Device.AUTO, 1, "but the device is auto")],
)
def test_several_engines_need_front_ends_and_cuda(
    device: Device, frontends: int, message: str
) -> None:
    with pytest.raises(StartupError, match=f"gpus is 2, .*{message}"):
        supervise(Settings(gpus=2, frontends=frontends, device=device), ("/no/such/program",))
