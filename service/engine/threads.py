"""The threads that a library starts in this process: find them, and choose their cores."""

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

_OWN_NAME = Path("/proc/thread-self/comm")
_TASKS = Path("/proc/self/task")

_calls = count()


def with_threads(start: Callable[[], T]) -> tuple[T, list[int]]:
    """Call `start`, and return its result with the ids of the threads that it started.

    A thread inherits the name of the thread that starts it, so that a name which no other thread
    has marks the started threads. They keep that name.

    Returns:
        The result, and the ids; no ids where the operating system does not list threads.
    """
    name = f"alone-{next(_calls)}"
    try:
        before = _OWN_NAME.read_text().rstrip("\n")
        _OWN_NAME.write_text(name)
    except OSError:  # not Linux, or a sandbox forbids it
        return start(), []
    try:
        result = start()
    finally:
        _OWN_NAME.write_text(before)
    return result, [int(task.name) for task in _TASKS.iterdir() if _name(task) == name]


def _name(task: Path) -> str:
    try:
        return (task / "comm").read_text().rstrip("\n")
    except OSError:  # the thread has ended
        return ""


def keep_from_core(threads: Iterable[int], core: int) -> None:
    """Let threads run on all cores of the calling thread, except for one.

    Nothing changes if no other core is left, or if a sandbox forbids the change.
    """
    with suppress(OSError):
        others = os.sched_getaffinity(0) - {core}
        for thread in threads:
            os.sched_setaffinity(thread, others)
