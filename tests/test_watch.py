"""A request ends at its time limit, and when its client leaves, also beside others."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest
from starlette.requests import Request
from starlette.types import Message, Receive

from cloze.service.core import ClientGone, DeadlineExceeded, ServiceError, SlowRequest
from cloze.service.http.caller import Callers
from cloze.service.http.watch import RequestWatch


async def never() -> Message:
    return await asyncio.Future()


def watch_of(limit_s: float) -> RequestWatch:
    return RequestWatch(limit_s, 300.0, Callers())


def leaves_after(seconds: float) -> Receive:
    async def receive() -> Message:
        await asyncio.sleep(seconds)
        return {"type": "http.disconnect"}

    return receive


async def ended(
    watch: RequestWatch, receive: Receive, *, body_s: float = 0.0, answer_s: float = 60.0
) -> tuple[type[ServiceError] | None, float]:
    """Return why a request ended, and after how many seconds."""
    started = time.monotonic()
    try:
        request = Request({"type": "http", "headers": []}, receive)
        with watch.request(request) as watched:
            await asyncio.sleep(body_s)
            watched.body_complete()
            await asyncio.sleep(answer_s)
    except ServiceError as error:
        return type(error), time.monotonic() - started
    return None, time.monotonic() - started


@pytest.mark.parametrize("limit_s", [0.02, 0.3])
@pytest.mark.parametrize(("body_s", "error"), [(60.0, SlowRequest), (0.0, DeadlineExceeded)])
def test_limits_shorter_and_longer_than_a_tick_hold(
    limit_s: float, body_s: float, error: type[ServiceError]
) -> None:
    reason, took_s = asyncio.run(ended(watch_of(limit_s), never, body_s=body_s))
    assert reason is error
    assert 0.99 * limit_s <= took_s < limit_s + 5.0


def test_a_slow_body_leaves_the_answer_its_whole_time() -> None:
    reason, took_s = asyncio.run(ended(watch_of(2.0), never, body_s=1.0))
    assert reason is DeadlineExceeded
    assert took_s >= 2.99


def test_a_request_within_its_time_goes_on() -> None:
    assert asyncio.run(ended(watch_of(30.0), never, answer_s=0.2))[0] is None


def test_a_client_that_leaves_ends_its_request_alone() -> None:
    async def run() -> list[tuple[type[ServiceError] | None, float]]:
        watch = watch_of(30.0)
        requests: list[Awaitable[tuple[type[ServiceError] | None, float]]] = [
            ended(watch, leaves_after(0.1)),
            ended(watch, never, answer_s=0.5),
            ended(watch, never, answer_s=0.01),
        ]
        return await asyncio.gather(*requests)

    results = asyncio.run(run())
    assert [reason for reason, _ in results] == [ClientGone, None, None]


def test_a_cancelled_request_stays_cancelled() -> None:
    async def run() -> None:
        task = asyncio.create_task(ended(watch_of(30.0), never))
        await asyncio.sleep(0.2)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(run())


def test_nothing_is_left_of_ended_requests() -> None:
    async def run() -> Callable[[], bool]:
        watch = watch_of(30.0)
        await asyncio.gather(*[ended(watch, never, answer_s=0.001 * n) for n in range(200)])
        await asyncio.sleep(0.2)
        assert len(asyncio.all_tasks()) == 1, "no watcher goes on"
        return lambda: not watch._young and not watch._ticking

    assert asyncio.run(run())()
