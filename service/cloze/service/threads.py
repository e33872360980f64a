"""Runs functions on threads, and ends them early when nobody waits for their results.

A thread cannot be cancelled. A long function therefore calls `check_awaited` between its parts: its
request may have timed out, or the client may have closed the connection.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple, TypeVar

from anyio import CancelScope, from_thread, to_thread

T = TypeVar("T")


async def run_on_thread(function: Callable[..., T], *arguments: object) -> T:
    """Return the result of a function that runs on a thread.

    If this coroutine is cancelled, by a cancel scope or by its task, the coroutine does not wait
    for the function, and `check_awaited` raises in the function.
    """
    with CancelScope() as scope:  # `check_awaited` sees scopes alone
        try:
            outcome = await to_thread.run_sync(
                _outcome, function, arguments, abandon_on_cancel=True
            )
        except asyncio.CancelledError:
            scope.cancel()
            raise
    if isinstance(outcome, _Raised):
        try:
            raise outcome.error
        finally:
            del outcome  # else the error refers to itself by this frame
    return outcome


async def run_anywhere(is_short: bool, function: Callable[..., T], *arguments: object) -> T:
    """Return the result of a function; it runs on a thread unless it takes a short time."""
    return function(*arguments) if is_short else await run_on_thread(function, *arguments)


class _Raised(NamedTuple):
    error: Exception


def _outcome(function: Callable[..., T], arguments: Sequence[object]) -> T | _Raised:
    """Return the result of a function, or its error.

    An error that anyio raises refers to itself, by a frame of anyio. It would keep a body of
    megabytes in memory until the next garbage collection.
    """
    try:
        return function(*arguments)
    except Exception as error:
        return _Raised(error)


def bound_threads(most: int) -> None:
    """Let at most so many functions run at once on threads of this event loop.

    They need the interpreter, so more of them would need more memory and no less time.
    """
    to_thread.current_default_thread_limiter().total_tokens = most


def check_awaited() -> None:
    """Raise if nobody waits for the current work of this thread; nobody sees that error."""
    with suppress(RuntimeError):  # this is the event loop, or a thread of another kind
        from_thread.check_cancelled()
