"""Keeps threads that run a graph at the same time on different CPUs, without fixed pins.

Linux wakes a thread on the CPU of the thread that wakes it. Two threads that compute, or that spin
while they wait for each other, then share one CPU until the kernel moves one, which may take longer
than a short run (docs/decisions/0013-a-lone-request.md).
"""

import ctypes
import os
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Protocol


class Affinity(Protocol):
    """The calls of the operating system. Each raises OSError where a sandbox forbids the call."""

    def current_cpu(self) -> int:
        """Return the CPU that the calling thread runs on."""
        ...

    def allowed(self) -> set[int]:
        """Return the CPUs that this process may use now."""
        ...

    def allow(self, thread: int, cpus: set[int]) -> None:
        """Let a thread run on these CPUs only.

        Raises:
            ProcessLookupError: the thread has ended.
        """
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
        # The CPUs of the first thread, which this module never changes. So they are what `taskset`
        # or a change of the cgroup left at the moment of the call.
        self.allowed = partial(os.sched_getaffinity, os.getpid())


class CpuPlaces:
    """The CPUs of a process's runs, and where the threads that wait for a run may wake.

    Example: on CPUs 0 and 1, one request wakes workers A and B, both on CPU 0. A begins a run, and
    B may only run on CPU 1 from then on. When B begins, B may run everywhere again.

    Args:
        affinity: None: the system has no affinity, and no thread is moved.
    """

    def __init__(self, affinity: Affinity | None) -> None:
        self._affinity = affinity
        self._lock = threading.Lock()
        self._running: dict[int, int] = {}  # by thread: the CPU on which its run began
        self._waiting: set[int] = set()  # threads that have run a graph, and do not run one now
        self._moved: dict[int, set[int]] = {}  # by thread: where `_move` let it run

    def begin(self, helpers: Collection[int]) -> None:
        """Keep other threads off the CPU of the calling thread, which is about to run a graph.

        Args:
            helpers: the runtime's threads of the session. If there are none, the threads that ran
                graphs before are kept off: one of them may be on its way to a run beside this one.
        """
        with self._lock, suppress(OSError):
            if self._affinity is None or len(allowed := self._affinity.allowed()) < 2:
                return
            thread, cpu = threading.get_native_id(), self._affinity.current_cpu()
            self._waiting.discard(thread)
            self._running[thread] = cpu
            self._free([thread], allowed)
            if helpers:
                self._move(helpers, allowed - {cpu})
            elif others := allowed.difference(self._running.values()):
                self._move(self._waiting, others)

    def end(self) -> None:
        """Let the threads that wait run everywhere again, unless another run goes on."""
        with self._lock, suppress(OSError):
            if self._running.pop(thread := threading.get_native_id(), None) is None:
                return
            if thread != os.getpid():  # the first thread, whose CPUs `allowed` returns
                self._waiting.add(thread)
            if self._affinity is not None and not self._running:
                self._free(self._waiting, self._affinity.allowed())

    def _free(self, threads: Collection[int], allowed: set[int]) -> None:
        self._move([thread for thread in threads if thread in self._moved], allowed)

    def _move(self, threads: Collection[int], cpus: set[int]) -> None:
        """Let threads run on these CPUs only. After an error, no thread is moved any more."""
        assert self._affinity is not None
        for thread in list(threads):
            if self._moved.get(thread) == cpus:
                continue
            try:
                self._affinity.allow(thread, cpus)
                self._moved[thread] = cpus
            except ProcessLookupError:
                self._waiting.discard(thread)
                self._moved.pop(thread, None)
            except OSError:
                self._affinity = None
                raise


def thread_ids() -> set[int]:
    """Return the ids of this process's threads; none if the system has no such list."""
    with suppress(OSError):
        return {int(task.name) for task in Path("/proc/self/task").iterdir()}
    return set()


def started_since(before: set[int], count: int) -> set[int]:
    """Return the threads that the runtime started for a session that was just opened.

    They have no names. If another number of threads than `count` appeared, some belong to others,
    and the result is empty.

    Args:
        before: what `thread_ids` returned before.
    """
    started = thread_ids() - before - {thread.native_id for thread in threading.enumerate()}
    return started if len(started) == count else set()


def of_this_system() -> CpuPlaces:
    """Return the places of this process's runs."""
    try:
        return CpuPlaces(LinuxAffinity())
    except AttributeError:
        return CpuPlaces(None)
