"""A request ends at its time limit, and when its client leaves, also beside others."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest
from cloze.service.http.memory_limit import Hold, MemoryLimit, UnreadAnswers
from cloze.service.http.watch import RequestWatch
from starlette.requests import Request
from starlette.types import Message, Receive

from cloze.service.core import ClientGone, DeadlineExceeded, ServiceError, SlowRequest
from cloze.service.http import memory_limit
from cloze.service.http.record import RECORD
from tests.leaping_loop import run_leaping
from tests.records import recorded, scope_of


async def never() -> Message:
    return await asyncio.Future()


def watch_of(limit_s: float) -> RequestWatch:
    return RequestWatch(limit_s, MemoryLimit("bodies", 10**9), UnreadAnswers(1))


def after_a_body(receive: Receive) -> Receive:
    """Return a function that receives an empty body, and then what another one receives."""
    messages: list[Message] = [{"type": "http.request", "body": b""}]

    async def receive_both() -> Message:
        return messages.pop() if messages else await receive()

    return receive_both


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
        request = Request(scope_of(recorded()), after_a_body(receive))
        with watch.request(request) as watched:
            await asyncio.sleep(body_s)
            await watched.read_body(0)
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


class Sender:
    """A client that sends a body of 300 kB at a rate, after a first part."""

    def __init__(self, bytes_per_s: float, first: int = 0) -> None:
        self._left, self._per_s, self._next = 300_000, bytes_per_s, first

    async def receive(self) -> Message:
        loop = asyncio.get_running_loop()
        if not self._next:
            await asyncio.sleep(0.5)
        size = min(self._left, self._next or round(self._per_s / 2))
        self._left, self._next = self._left - size, 0
        if not size:
            await loop.create_future()
        return {"type": "http.request", "body": bytes(size), "more_body": self._left > 0}

    async def send(self, watch: RequestWatch) -> float:
        """Return the seconds until the body has arrived."""
        started = asyncio.get_running_loop().time()
        scope = scope_of(recorded())
        scope[RECORD].arrived = time.monotonic() - 1
        request = Request(scope, self.receive)
        try:
            with watch.request(request) as watched:
                assert len(await watched.read_body(400_000)) == 300_000
        finally:
            self.took_s = asyncio.get_running_loop().time() - started
        return self.took_s


@pytest.mark.parametrize("first", [0, 10, 200_000])
@pytest.mark.parametrize("bytes_per_s", [0, memory_limit.RATE / 2])
def test_a_body_that_stalls_ends_after_its_grace(first: int, bytes_per_s: float) -> None:
    sender = Sender(bytes_per_s, first)
    with pytest.raises(SlowRequest, match=r"too slowly: .* at least 1000 bytes per second"):
        run_leaping(sender.send(watch_of(3000.0)))
    assert memory_limit.GRACE_S <= sender.took_s < 3 * memory_limit.GRACE_S


def test_a_slow_body_arrives_whole_while_nobody_needs_its_memory() -> None:
    assert run_leaping(Sender(2 * memory_limit.RATE, 100_000).send(watch_of(3000.0))) > 90


def test_a_slow_body_ends_soon_if_others_need_its_memory() -> None:
    async def play() -> None:
        bodies = MemoryLimit("bodies", 1_400_000)
        watch = RequestWatch(3000.0, bodies, UnreadAnswers(1))
        slow, quick = Sender(2 * memory_limit.RATE, 150_000), Sender(2 * memory_limit.HURRIED_RATE)
        slow_sends = asyncio.create_task(slow.send(watch))
        await asyncio.sleep(60)
        assert not slow_sends.done()
        quick_sends = asyncio.create_task(quick.send(watch))
        await asyncio.sleep(1.2)
        await bodies.grow(Hold("b"), 700_000)
        waiting = asyncio.create_task(bodies.grow(Hold("c"), 300_000))
        with pytest.raises(SlowRequest, match="and 65536 while other requests need the memory"):
            await slow_sends
        assert slow.took_s < 60 + 1.2 + 2 * memory_limit.HURRIED_GRACE_S
        await waiting
        assert await quick_sends < 5

    run_leaping(play())


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
