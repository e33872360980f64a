"""Puts the threads that run graphs at the same time on different CPUs, without fixed pins.

Linux wakes a thread on the CPU of the thread that wakes it. Two threads that compute, or that spin
while they wait for each other, then share one CPU until the kernel moves one, which may take longer
than a short run (docs/decisions/0013-a-lone-request.md).
"""

import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol, TypeVar

_Opened = TypeVar("_Opened")


class Affinity(Protocol):
    """The calls of the operating system. Each raises OSError where a sandbox forbids the call."""

    def current_cpu(self) -> int:
        """Return the CPU that the calling thread runs on."""
        ...

    def allowed(self) -> set[int]:
        """Return the CPUs that this process may use now."""
        ...

    def allow(self, thread: int, cpus: set[int]) -> None:
        """Let a thread run on these CPUs only; 0: the calling thread, which moves at once."""
        ...


class LinuxAffinity:
    """The calls of Linux.

    Raises:
        AttributeError: the system is another one.
    """

    def __init__(self) -> None:
        # Unlike CDLL, PyDLL keeps the interpreter's lock during the call.
        self.current_cpu: Callable[[], int] = ctypes.PyDLL(None).sched_getcpu
        self.allow = os.sched_setaffinity

    def allowed(self) -> set[int]:
        """Return the CPUs of the first thread, which this module never changes.

        So they are what `taskset` or a change of the cgroup left at this moment.
        """
        return os.sched_getaffinity(os.getpid())


class CpuPlaces:
    """The CPUs of the runs of a process.

    Args:
        affinity: None: the system has no affinity, and nothing is moved.
    """

    def __init__(self, affinity: Affinity | None) -> None:
        self._affinity = affinity
        self._lock = threading.Lock()
        self._cpus: dict[int, int] = {}  # the CPU on which each run began, by thread
        self._own = threading.local()  # the last CPUs that this module set for the thread

    def begin(self, runtime: "RuntimeThreads") -> None:
        """Call before a run, on its thread.

        If another run began on the CPU of this thread, the thread moves to another CPU, and may
        then run everywhere again. The runtime's threads may run everywhere but beside this thread.
        """
        if self._affinity is None:
            return
        try:
            with self._lock:
                self._place(self._affinity, runtime)
        except OSError:
            self._affinity = None

    def end(self) -> None:
        """Call after a run, on its thread."""
        self._cpus.pop(threading.get_ident(), None)

    def _place(self, affinity: Affinity, runtime: "RuntimeThreads") -> None:
        allowed = affinity.allowed()
        if len(allowed) < 2:
            return
        cpu, taken = affinity.current_cpu(), set(self._cpus.values())
        free = allowed - taken
        if cpu in taken and free:
            affinity.allow(0, free)
            cpu = affinity.current_cpu()
            affinity.allow(0, allowed)
            self._own.cpus = allowed
        elif getattr(self._own, "cpus", allowed) != allowed:
            affinity.allow(0, allowed)
            self._own.cpus = allowed
        self._cpus[threading.get_ident()] = cpu
        if runtime.ids and (others := allowed - {cpu}) != runtime.cpus:
            for thread in runtime.ids:
                affinity.allow(thread, others)
            runtime.cpus = others


class RuntimeThreads:
    """The threads that the runtime started for a session.

    Attributes:
        ids: of the threads; empty if they are not known.
        cpus: on which they may run; None until they were moved.
    """

    def __init__(self, ids: Sequence[int] = ()) -> None:
        self.ids = ids
        self.cpus: set[int] | None = None


def with_runtime_threads(
    open_session: Callable[[], _Opened], count: int
) -> tuple[_Opened, RuntimeThreads]:
    """Open a session, and find the threads that it starts.

    They have no names. If another number of threads than `count` appears, some are of others, and
    none is returned.
    """
    before = _threads()
    session = open_session()
    started = _threads() - before - {thread.native_id for thread in threading.enumerate()}
    return session, RuntimeThreads(tuple(started) if len(started) == count else ())


def _threads() -> set[int]:
    with suppress(OSError):  # not Linux
        return {int(task.name) for task in Path("/proc/self/task").iterdir()}
    return set()


def of_this_system() -> CpuPlaces:
    """Return the places of this process's runs."""
    try:
        return CpuPlaces(LinuxAffinity())
    except AttributeError:
        return CpuPlaces(None)
