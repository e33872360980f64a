"""What a server asks of the operating system, and what it does where the system does not answer."""

import errno
import os
import resource
import threading
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from cloze.service import machine


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({}, 64),
        ({"cpu.max": "max 100000\n"}, 64),
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "10000 100000\n"}, 1),
        ({"cpu.max": "9900000 100000\n"}, 64),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
        ({"cpu.max": "rubbish"}, 64),
    ],
)
def test_a_container_s_quota_bounds_the_cores_of_its_host(
    files: dict[str, str], cpus: int, tmp_path: Path
) -> None:
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert machine.available_cpus(tmp_path, cores=64) == cpus


@pytest.mark.parametrize(
    ("affinity", "all_cores", "cores"),
    [({0, 3, 5}, 8, 3), (None, 6, 6), (None, None, 1)],
    ids=["three", "macOS", "unknown"],
)
def test_the_cores_are_those_of_the_affinity_or_else_all(
    affinity: set[int] | None,
    all_cores: int | None,
    cores: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: affinity, raising=False)
    if affinity is None:
        monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: all_cores)
    assert machine.available_cpus(tmp_path) == cores


@pytest.mark.parametrize(
    ("limit_file", "none", "usage", "inactive"),
    [
        ("memory.max", "max", "memory.current", "inactive_file"),
        (
            "memory/memory.limit_in_bytes",
            "9223372036854771712",
            "memory/memory.usage_in_bytes",
            "total_inactive_file",
        ),
    ],
    ids=["version 2", "version 1"],
)
def test_limit_and_use_are_those_of_the_control_group(
    tmp_path: Path, limit_file: str, none: str, usage: str, inactive: str
) -> None:
    (tmp_path / limit_file).parent.mkdir(exist_ok=True)
    assert (machine.memory_limit(tmp_path), machine.memory_used(tmp_path)) == (None, None)
    for text, limit in ((none, None), ("268435456", 268435456)):
        (tmp_path / limit_file).write_text(f"{text}\n")
        assert machine.memory_limit(tmp_path) == limit
    (tmp_path / usage).write_text("1000\n")
    (tmp_path / usage).with_name("memory.stat").write_text(f"anon 500\n{inactive} 300\n")
    assert machine.memory_used(tmp_path) == 700, "without pages that can be dropped"


def test_the_memory_is_that_of_the_control_group_or_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_the_machine = SimpleNamespace(available=400, total=1000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: of_the_machine)
    assert machine.memory_state(tmp_path) == (600, 1000)
    (tmp_path / "memory.current").write_text("500\n")
    (tmp_path / "memory.stat").write_text("inactive_file 100\n")
    assert machine.memory_state(tmp_path) == (600, 1000)
    (tmp_path / "memory.max").write_text("900\n")
    assert machine.memory_state(tmp_path) == (400, 900)


class Limits:
    """Limits of open files; the system refuses more than `most`, or takes `most` instead."""

    def __init__(self, soft: int, hard: int, most: int = 2**40, refuses: bool = False) -> None:
        self.soft, self.hard, self.most, self.refuses = soft, hard, most, refuses

    def getrlimit(self, which: int) -> tuple[int, int]:
        assert which == resource.RLIMIT_NOFILE
        return self.soft, self.hard

    def setrlimit(self, which: int, limits: tuple[int, int]) -> None:
        assert (which, limits[1]) == (resource.RLIMIT_NOFILE, self.hard)
        if self.refuses:
            raise ValueError("current limit exceeds maximum limit")
        self.soft = min(limits[0], self.most)


@pytest.mark.parametrize(
    ("limits", "reached"),
    [
        (Limits(1024, 2**20), 65_536),
        (Limits(1024, 4096), 4096),
        (Limits(100_000, 2**20), 100_000),
        (Limits(256, resource.RLIM_INFINITY), 65_536),
        (Limits(256, resource.RLIM_INFINITY, most=20_000), 20_000),
        (Limits(256, resource.RLIM_INFINITY, refuses=True), 256),
    ],
    ids=["raised", "to the hard one", "not lowered", "no hard one", "less", "refused"],
)
def test_the_limit_of_files_rises_as_far_as_the_system_lets_it(
    limits: Limits, reached: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", limits.getrlimit)
    monkeypatch.setattr(resource, "setrlimit", limits.setrlimit)
    assert machine.raise_file_limit(65_536) == limits.soft == reached
    monkeypatch.setattr(machine.sys, "platform", "win32")
    assert machine.raise_file_limit(65_536) == 512, "the sockets of an event loop on Windows"


def test_a_thread_gets_a_lower_priority_and_its_process_does_not() -> None:
    seen: list[int] = []

    def work() -> None:
        machine.lower_thread_priority(3)
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    before = os.getpriority(os.PRIO_PROCESS, 0)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [3]
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_a_sandbox_may_forbid_priorities(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "setpriority", refuse)
    machine.lower_thread_priority(3)
    monkeypatch.setattr(machine.sys, "platform", "darwin")
    monkeypatch.setattr(os, "setpriority", pytest.fail)  # would change another process
    machine.lower_thread_priority(3)


def test_a_pipe_is_written_when_it_takes_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    try:
        takes_bytes = machine.write_gate(writer)
        assert takes_bytes(0.0)
        while takes_bytes(0.0):
            os.write(writer, b"x" * 4096)
        assert not takes_bytes(0.01)
        monkeypatch.setattr(machine.sys, "platform", "win32")
        assert machine.write_gate(writer)(0.0), "Windows cannot tell"
    finally:
        os.close(reader)
        os.close(writer)
