"""Runs functions on threads, and ends them early when nobody waits for their results.

A thread cannot be cancelled. A long function therefore calls `check_awaited` between its parts: its
request may have timed out, or the client may have closed the connection.
"""

import asyncio
from collections.abc import Callable
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")


class Abandoned(Exception):
    """Nobody waits for the result of this work; nobody sees this error."""


class _Work:
    __slots__ = ("is_abandoned",)

    def __init__(self) -> None:
        self.is_abandoned = False


_current: ContextVar[_Work | None] = ContextVar("work", default=None)


async def run_on_thread(function: Callable[..., T], *arguments: object) -> T:
    """Return the result of a function that runs on a thread.

    If this coroutine is cancelled, `check_awaited` raises in the function from then on. A function
    that still waits for a thread is not called.
    """
    work = _Work()

    def run() -> T:
        _current.set(work)  # in the thread's copy of the context
        return function(*arguments)

    try:
        return await asyncio.to_thread(run)
    except asyncio.CancelledError:
        work.is_abandoned = True
        raise


def check_awaited() -> None:
    """Raise `Abandoned` if nobody waits for the current work of this thread."""
    work = _current.get()
    if work is not None and work.is_abandoned:
        raise Abandoned
