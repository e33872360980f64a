"""A generation of processes: what it is made of, how it retires, and how it ends."""

import importlib.util
import math
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cloze.model_store import Bundle
from cloze.service.core import StartupError
from cloze.service.processes import child as child_module
from cloze.service.processes import generation as generation_module
from cloze.service.processes.child import Child, end_all
from cloze.service.processes.generation import RETIRE, Generation, make_generation
from cloze.service.settings import Settings
from tests.unit.service.tasks.model import manifest

SETTINGS = Settings(
    frontends=2, gpus=2, idle_timeout_ms=7000, request_timeout_ms=30_000, shutdown_grace_ms=4000
)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as made:
        yield made


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    clock = [1000.0]
    monkeypatch.setattr(child_module.time, "monotonic", lambda: clock[0])
    return clock


def generation(folder: Path, listener: socket.socket, number: int = 1, **fields: Any) -> Generation:
    bundles = [Bundle(manifest(**fields), folder)]
    return make_generation(number, SETTINGS, bundles, (listener,), folder, ("engine",))


class Process:
    """A process that notes what is done to it; `wait` moves the clock if it does not end."""

    def __init__(self, name: str, notes: list[str], clock: list[float], ends: bool = True) -> None:
        self.name, self.notes, self.clock, self.ends = name, notes, clock, ends

    def note(self, what: str) -> None:
        self.notes.append(f"{what} {self.name}")

    def terminate(self) -> None:
        self.note("terminate")

    def kill(self) -> None:
        self.note("kill")

    def send_signal(self, number: signal.Signals) -> None:
        self.note(signal.Signals(number).name)

    def wait(self, timeout: float | None = None) -> None:
        self.note(f"wait {timeout}")
        if timeout is not None and not self.ends:
            self.clock[0] += timeout
            raise subprocess.TimeoutExpired(self.name, timeout)


def running(made: Generation, clock: list[float], *stubborn: str) -> list[str]:
    """Let all children of a generation run; return what will happen to them."""
    notes: list[str] = []
    for child in made.children:
        process: Any = Process(child.name, notes, clock, child.name not in stubborn)
        child.process = process
        child.reports = os.open("/dev/null", os.O_RDONLY)
    return notes


def test_what_a_generation_is_made_of(tmp_path: Path, listener: socket.socket) -> None:
    made = generation(tmp_path, listener)
    assert [child.name for child in made.children] == [
        "engine-0", "engine-1", "frontend-0", "frontend-1",
    ]  # fmt: skip
    assert [child.device_id for child in made.children] == [0, 1, 0, 0]
    assert [child.kind for child in made.children] == ["engine"] * 2 + ["frontend"] * 2
    assert made.sockets == (tmp_path / "engine-0.sock", tmp_path / "engine-1.sock")
    assert [child.command for child in made.engines] == [("engine",)] * 2
    assert all("frontend" in child.command[-1] for child in made.front_ends)
    assert [child.listeners for child in made.front_ends] == [(listener,)] * 2
    assert made.settings == SETTINGS.model_copy(update={"model": ("tiny@3",)})
    assert [each.reference for each in made.manifests] == ["tiny@3"]
    assert (made.number, made.ends) == (1, None)
    for engine, path in zip(made.engines, made.sockets, strict=True):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
        assert [each.getsockname() for each in engine.listeners] == [str(path)]
    made._close()


def test_front_ends_wait_for_an_engine_in_a_long_queue(
    tmp_path: Path, listener: socket.socket
) -> None:
    made = generation(tmp_path, listener)
    clients = [socket.socket(socket.AF_UNIX) for _ in range(300)]
    for client in clients:
        client.setblocking(False)
        client.connect(str(made.sockets[1]))
    for client in clients:
        client.close()
    made._close()


def test_a_later_generation_has_other_names(tmp_path: Path, listener: socket.socket) -> None:
    first, second = generation(tmp_path, listener), generation(tmp_path, listener, 2)
    assert [child.name for child in second.children] == [
        "engine-0.2", "engine-1.2", "frontend-0.2", "frontend-1.2",
    ]  # fmt: skip
    assert second.sockets == (tmp_path / "engine-0.2.sock", tmp_path / "engine-1.2.sock")
    first._close()
    assert sorted(tmp_path.glob("*.sock")) == list(second.sockets)
    second._close()
    assert list(tmp_path.glob("*.sock")) == []


def test_a_path_that_is_too_long_leaves_no_socket(tmp_path: Path, listener: socket.socket) -> None:
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(StartupError, match=r"engine-0\.sock: .*; set TMPDIR to a short path"):
        generation(folder, listener)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_changes_between_generations(tmp_path: Path, listener: socket.socket) -> None:
    first = generation(tmp_path, listener)
    second = generation(tmp_path, listener, 2, version=4)
    assert (first.changes(second).added, first.changes(second).removed) == (["tiny@4"], ["tiny@3"])
    assert first.changes(first).kept == ["tiny@3"]
    first._close()
    second._close()


def test_front_ends_end_first(tmp_path: Path, listener: socket.socket, now: list[float]) -> None:
    made = generation(tmp_path, listener)
    notes = running(made, now)
    made.engines[1].process = None
    made.end()
    assert notes == [
        "terminate frontend-0", "terminate frontend-1",
        "wait 14.0 frontend-0", "wait 14.0 frontend-1",
        "terminate engine-0", "wait 10.0 engine-0",
    ]  # fmt: skip
    assert all(child.reports is None for child in made.children)
    assert [each.fileno() for engine in made.engines for each in engine.listeners] == [-1, -1]
    assert listener.fileno() != -1, "other generations listen there too"
    assert not list(tmp_path.glob("*.sock"))


def test_all_children_share_one_time(
    tmp_path: Path, listener: socket.socket, now: list[float]
) -> None:
    made = generation(tmp_path, listener)
    notes = running(made, now, "frontend-0", "frontend-1")
    end_all(made.front_ends, 4.0)
    assert notes == [
        "terminate frontend-0", "terminate frontend-1",
        "wait 4.0 frontend-0", "kill frontend-0", "wait None frontend-0",
        "wait 0.0 frontend-1", "kill frontend-1", "wait None frontend-1",
    ]  # fmt: skip
    now[0] = 1000.0
    notes.clear()
    end_all(made.engines, 0.0)
    assert notes[2:] == ["wait 0.0 engine-0", "wait 0.0 engine-1"]
    made._close()


def test_retired_front_ends_finish_and_then_the_engines_end(
    tmp_path: Path, listener: socket.socket, now: list[float]
) -> None:
    made = generation(tmp_path, listener)
    notes = running(made, now)
    made.front_ends[1].process = None  # it is only starting
    made.retire()
    assert notes == [f"{RETIRE.name} frontend-0"]
    assert [child.is_kept for child in made.children] == [True, True, False, False]
    assert made.ends == 1000 + 7 + SETTINGS.max_timeout_s
    notes.clear()
    now[0] = made.ends
    assert not made.end_if_over()
    assert notes == []
    now[0] += 0.1
    assert not made.end_if_over()
    assert notes == ["terminate frontend-0"]
    assert made.ends == math.inf
    notes.clear()
    now[0] += 1e6
    assert not made.end_if_over(), "a drain has its own limit"
    assert notes == []
    made.front_ends[0].process = None
    assert made.end_if_over()
    assert notes == [
        "terminate engine-0", "terminate engine-1", "wait 10.0 engine-0", "wait 10.0 engine-1",
    ]  # fmt: skip
    assert not list(tmp_path.glob("*.sock"))
    assert all(child.reports is None for child in made.children)


def test_the_commands_of_children_are_those_of_this_interpreter() -> None:
    for command in (generation_module.ENGINE_COMMAND, generation_module.FRONTEND_COMMAND):
        assert command[:2] == (sys.executable, "-m")
        assert importlib.util.find_spec(command[2]) is not None


def test_a_child_is_alone_with_its_name() -> None:
    """Children are compared by identity: two with equal fields are two."""
    one, two = (Child("engine-0", ("x",), ()) for _ in range(2))
    assert one != two
