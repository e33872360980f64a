"""Keeps threads that run a graph at the same time on different CPUs, without fixed pins.

Linux wakes a thread on the CPU of the thread that wakes it. Two threads that compute, or that spin
while they wait for each other, then share one CPU until the kernel moves one, which may take longer
than a short run (docs/decisions/0013-a-lone-request.md).
"""

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import onnxruntime as ort
from numpy.typing import NDArray

from cloze.model_store.layouts import Feeds


class Affinity:
    """The calls of Linux about threads and CPUs. Each raises OSError where a sandbox forbids it.

    Raises:
        AttributeError: the system is another one.
    """

    current_cpu: Callable[[], int]
    allow: Callable[[int, set[int]], None]
    allowed: Callable[[], set[int]]

    def __init__(self) -> None:
        if sys.platform != "linux":
            raise AttributeError("threads have no affinity")
        self.allow = os.sched_setaffinity
        # Unlike CDLL, PyDLL keeps the interpreter's lock during the call.
        self.current_cpu = ctypes.PyDLL(None).sched_getcpu
        # The CPUs of the first thread, which this module never changes. So they are what `taskset`
        # or a change of the cgroup left at the moment of the call.
        self.allowed = partial(os.sched_getaffinity, os.getpid())


class ThreadSpread:
    """Where the threads of a process run that run a graph, or wait for a run.

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

    @contextmanager
    def run(self, helpers: Collection[int]) -> Iterator[None]:
        """Keep other threads off the CPU of the calling thread while it runs a graph.

        Args:
            helpers: the runtime's threads of the session. If there are none, the threads that ran
                graphs before are kept off: one of them may be on its way to a run beside this one.
        """
        thread = threading.get_native_id()
        with self._lock, suppress(OSError):
            if self._affinity is not None and len(allowed := self._affinity.allowed()) > 1:
                cpu = self._affinity.current_cpu()
                self._waiting.discard(thread)
                self._running[thread] = cpu
                if thread in self._moved:
                    self._move([thread], allowed)
                if helpers:
                    self._move(helpers, allowed - {cpu})
                elif others := allowed.difference(self._running.values()):
                    self._move(self._waiting, others)
        try:
            yield
        finally:
            with self._lock, suppress(OSError):
                if self._running.pop(thread, None) is not None:
                    if thread != os.getpid():  # the first thread, whose CPUs `allowed` returns
                        self._waiting.add(thread)
                    if self._affinity is not None and not self._running:
                        self._move(self._waiting & self._moved.keys(), self._affinity.allowed())

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


class SpreadSession(ort.InferenceSession):  # type: ignore[misc]  # has no types
    """A session on the CPU, whose threads and callers are kept on different CPUs."""

    def __init__(self, file: Path, options: ort.SessionOptions) -> None:
        before = thread_ids()
        # The fallback would print, and open the graph on the same provider once more.
        providers = ["CPUExecutionProvider"]
        super().__init__(file, options, providers=providers, enable_fallback=0)
        self._helpers = started_since(before, options.intra_op_num_threads - 1)

    def run(self, wanted: Sequence[str], feeds: Feeds) -> list[NDArray[Any]]:
        """See `session.Session`."""
        with _SPREAD.run(self._helpers):
            outputs: list[NDArray[Any]] = super().run(wanted, feeds)
            return outputs


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


try:
    _SPREAD = ThreadSpread(Affinity())
except AttributeError:  # another system
    _SPREAD = ThreadSpread(None)
