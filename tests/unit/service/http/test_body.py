"""The time and the memory of one request, and the body that it reads, with a clock that leaps."""

import asyncio
import gzip
import threading
import time

import pytest
from starlette.requests import Request
from starlette.types import Message

from cloze.service import errors
from cloze.service.core import ServedRequest
from cloze.service.http.body import RequestLimits
from cloze.service.http.bytes_held import SMALL_BYTES, ByteBudget, Hold
from cloze.service.http.record import Callers
from cloze.service.http.routes import RECORD
from tests.support.records import Open, recorded, scope_of
from tests.support.refusals import refused
from tests.support.virtual_time import LOOP_CLOCK

pytestmark = pytest.mark.anyio

LARGE = 100_000


class Sender:
    """A client that sends the parts of a body, with pauses, and may leave."""

    def __init__(self, connection: Open, *parts: bytes | float | str) -> None:
        self.connection, self.parts = connection, list(parts)

    async def receive(self) -> Message:
        while self.parts:
            part = self.parts.pop(0)
            if isinstance(part, float):
                await asyncio.sleep(part)
            elif isinstance(part, str):
                self.connection.leave()
                return {"type": "http.disconnect"}
            else:
                more = any(isinstance(part, bytes) for part in self.parts)
                return {"type": "http.request", "body": part, "more_body": more}
        return await asyncio.Future()


def request(*parts: bytes | float | str, client: str = "a", **headers: str) -> Request:
    record = recorded(client=client, callers=Callers(clock=LOOP_CLOCK), **headers)
    record.connection = Open()
    return Request(scope_of(record), Sender(record.connection, *parts).receive)


def timed(limit_s: float, *parts: bytes | float | str) -> Request:
    """Return a request with a time limit."""
    return request(*parts, x_request_timeout_ms=f"{limit_s * 1000:.0f}")


def record_of(asked: Request) -> ServedRequest:
    record: ServedRequest = asked.scope[RECORD]
    return record


def limits_of(bodies: int = 10**9, answers: int = 10**9, longest_s: float = 0.0) -> RequestLimits:
    return RequestLimits(
        ByteBudget("bodies", bodies, longest_s), ByteBudget("unread answers", answers), LOOP_CLOCK
    )


async def read(
    limits: RequestLimits, asked: Request, limit: int = 10**6, answer_s: float = 0.0
) -> bytes:
    with limits.request(asked):
        data = await limits.read(asked, limit)
        await asyncio.sleep(answer_s)
        return data


async def has_room(budget: ByteBudget, size: int) -> bool:
    """Whether a client that has nothing may have so many bytes at once."""
    first, hold = Hold("first"), Hold("other")  # who came first may always have more
    try:
        await budget.grow(first, 1, 0)
        await budget.grow(hold, size - 1, 0)
    except errors.Overloaded:
        return False
    finally:
        budget.release(first)
        budget.release(hold)
    return True


@pytest.mark.parametrize("limit_s", [0.02, 0.1, 29.5])
async def test_the_limits_of_both_phases(limit_s: float) -> None:
    dribble = [part for _ in range(100) for part in (b"1", limit_s / 29.5)]
    for parts, code, answer_s in (
        ((b"12", 5000.0, b"3"), "body_timeout", 0.0),
        (dribble, "body_timeout", 0.0),
        ((b"12",), "timeout", 5000.0),
    ):
        began = LOOP_CLOCK.monotonic()
        with refused(code):
            await read(limits_of(), timed(limit_s, *parts), answer_s=answer_s)
        assert LOOP_CLOCK.monotonic() - began == pytest.approx(limit_s)


async def test_a_request_within_its_time_is_left_alone() -> None:
    limits, before = limits_of(), asyncio.all_tasks()
    assert await read(limits, timed(0.5, b"1")) == b"1"
    await asyncio.sleep(1)
    assert await read(limits, timed(0.5, b"12", 0.4, b"3"), answer_s=0.49) == b"123"
    with pytest.raises(errors.DeadlineExceeded):
        await read(limits, timed(0.5, b"12", 0.4, b"3"), answer_s=0.51)
    with pytest.raises(errors.DeadlineExceeded):
        await read(limits, timed(0.5, b"12", 0.04, b"3"), answer_s=0.47)
    await asyncio.sleep(100)
    assert asyncio.all_tasks() == before


async def test_the_terms_that_a_request_states() -> None:
    with refused("invalid_value", 1, 300000):
        await read(limits_of(), request(x_request_timeout_ms="300001"))
    with refused("invalid_value"):
        await read(limits_of(), request(x_request_class="slow"))


async def test_a_client_that_leaves_ends_its_request_alone() -> None:
    limits = limits_of()
    first, second = request(b"1"), request(b"1")
    tasks = [asyncio.create_task(read(limits, asked, answer_s=20)) for asked in (first, second)]
    await asyncio.sleep(5)
    began = LOOP_CLOCK.monotonic()
    record_of(first).connection.leave()
    with refused("client_closed"):
        await tasks[0]
    assert LOOP_CLOCK.monotonic() == began
    assert await tasks[1] == b"1"
    with pytest.raises(errors.ClientGone), limits.request(first):
        raise AssertionError("it has begun")


async def test_a_client_may_leave_when_its_request_has_ended() -> None:
    """The task goes on, and may have begun the next request of the connection."""
    asked = request(b"1")
    connection = record_of(asked).connection
    with limits_of().request(asked):
        on_lost = connection.on_lost
    assert connection.on_lost is None
    on_lost()
    await asyncio.sleep(100)


@pytest.mark.parametrize("ends", ["late", "leaves", "in time"])
async def test_a_task_that_is_cancelled_stays_cancelled(ends: str) -> None:
    """As at the end of the server, also if the request ends at the same time."""
    asked, after = timed(1.0, b"1"), []

    async def answer() -> None:
        try:
            await read(limits_of(), asked, answer_s=20)
        except errors.ServiceError:
            await asyncio.sleep(0)
            after.append("answered")

    task = asyncio.create_task(answer())
    await asyncio.sleep(0.5)
    if ends == "late":
        asyncio.get_running_loop().call_at(1.0, task.cancel)
    else:
        task.cancel()
    if ends == "leaves":
        record_of(asked).connection.leave()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not after
    assert record_of(asked).connection.on_lost is None


async def test_what_a_body_holds() -> None:
    limits = limits_of(bodies=4 * LARGE)

    async def held_by(*parts: bytes | float | str, least: int) -> None:
        asked = request(*parts, content_length=str(2 * LARGE))
        with limits.request(asked):
            await limits.read(asked, 10**6)
            assert await has_room(limits.bodies, 4 * LARGE - least)
            assert not await has_room(limits.bodies, 4 * LARGE - least + 1)
        assert await has_room(limits.bodies, 4 * LARGE)

    await held_by(bytes(SMALL_BYTES), least=0)
    await held_by(bytes(SMALL_BYTES), b"1", least=SMALL_BYTES + 1)
    await held_by(bytes(LARGE), 1.0, bytes(LARGE), least=2 * LARGE)


@pytest.mark.parametrize("end", ["is late", "leaves", "is cancelled", "is refused"])
async def test_however_a_request_ends_it_holds_nothing(end: str) -> None:
    limits = limits_of(bodies=2 * LARGE, longest_s=10.0)
    parts = [bytes(LARGE), 1.0, bytes(LARGE if end == "is refused" else 9)]
    asked = timed(20.0, *parts)
    other = request(bytes(LARGE))
    tasks = [asyncio.create_task(read(limits, each, answer_s=60)) for each in (other, asked)]
    await asyncio.sleep(2)
    if end == "leaves":
        record_of(asked).connection.leave()
    if end == "is cancelled":
        tasks[1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert tasks[1].cancelled() == (end == "is cancelled")
    for _ in range(2):
        assert await read(limits, request(bytes(2 * LARGE), client="b")) == bytes(2 * LARGE)
    assert await has_room(limits.bodies, 2 * LARGE)


async def test_a_body_that_waits_for_memory() -> None:
    limits = limits_of(bodies=2 * LARGE, longest_s=15.0)
    other = Hold("a")
    await limits.bodies.grow(other, LARGE, 1.0)
    task = asyncio.create_task(read(limits, request(bytes(LARGE))))
    await asyncio.sleep(10)
    assert not task.done()
    limits.bodies.release(other)
    assert len(await task) == LARGE
    await limits.bodies.grow(other, LARGE, 1.0)
    with pytest.raises(errors.Overloaded) as caught:
        await read(limits, request(bytes(LARGE)))
    assert caught.value.reason is errors.Rejection.MEMORY
    with pytest.raises((errors.SlowRequest, errors.Overloaded)):
        await read(limits, timed(2.0, bytes(LARGE)))


class Answers:
    """Large answers that take a while, and the clients whose answers have begun."""

    def __init__(self) -> None:
        self.limits, self.begun = limits_of(), list[str]()

    def begin(self, *asked: Request, seconds: float = 1) -> list[asyncio.Task[None]]:
        async def answer(one: Request) -> None:
            with self.limits.request(one) as served:
                await self.limits.begin_answer(served)
                self.begun.append(served.client)
                await asyncio.sleep(seconds)

        return [asyncio.create_task(answer(one)) for one in asked]


def of(*names: str) -> list[Request]:
    return [request(client=name) for name in names]


async def test_three_large_answers_are_written_at_once() -> None:
    answers, others = Answers(), of("gone", "cancelled", "last")
    begun, first = answers.begun, answers.begin(*of(*"abc"), seconds=10)
    waiting = answers.begin(timed(5.0), *others, seconds=0)
    await asyncio.sleep(1)
    assert begun == ["a", "b", "c"]
    record_of(others[0]).connection.leave()
    waiting[2].cancel()
    await asyncio.sleep(7)
    assert [task.done() for task in waiting] == [True, True, True, False]
    assert isinstance(waiting[0].exception(), (errors.ServiceError))
    assert isinstance(waiting[1].exception(), errors.ClientGone)
    assert waiting[2].cancelled()
    first[0].cancel()
    await waiting[3]
    await asyncio.wait(first)
    for names, expected in (("abcd", "abc"), ("aaab", "aab")):  # one client has two turns at most
        begun.clear()
        again = answers.begin(*of(*names))
        await asyncio.sleep(0.5)
        assert begun == [*expected], "three turns are left, no more and no fewer"
        await asyncio.wait(again)


async def test_a_turn_that_comes_as_the_request_ends_is_given_on() -> None:
    answers = Answers()
    for ends in ("leaves", "cancelled"):
        *tasks, last = answers.begin(*of(*"abc"), asked := request(client="last"))
        await asyncio.sleep(0.5)
        tasks[0].cancel()
        await asyncio.sleep(0)  # so the last one has its turn, but has not run
        if ends == "leaves":
            record_of(asked).connection.leave()
        else:
            last.cancel()
        await asyncio.gather(last, *tasks, return_exceptions=True)
    await asyncio.wait_for(asyncio.gather(*answers.begin(*of(*"abc"))), 1.5)


async def test_large_answers_wait_for_room_and_hold_it_until_they_are_sent() -> None:
    limits = limits_of(answers=2 * LARGE)
    first, second = (record_of(request()) for _ in range(2))
    await limits.hold_answer(first, LARGE)
    waiting = asyncio.create_task(limits.hold_answer(second, LARGE))
    await asyncio.sleep(1)
    assert not waiting.done()
    limits.sent(first)
    await waiting
    limits.sent(second)
    await limits.hold_answer(second, 9 * LARGE)
    limits.sent(second)
    assert await has_room(limits.answers, 2 * LARGE)


async def test_a_body_of_several_parts() -> None:
    assert await read(limits_of(), request(b"12", b"3", b"")) == b"123"
    assert await read(limits_of(), request(b"")) == b""
    assert await read(limits_of(), request(b"123"), limit=3) == b"123"
    asked = request(b"1", content_encoding=" Identity ")
    assert await read(limits_of(), asked) == b"1"
    assert record_of(asked).body_bytes == 1


async def test_bodies_that_are_too_large() -> None:
    asked = request(b"1234", content_length="4")
    with refused("body_too_large", 4, 3):
        await read(limits_of(), asked, limit=3)
    assert asked._receive.__self__.parts == [b"1234"], "it is refused before it arrives"
    asked = request(*[b"12"] * 20)
    with refused("body_too_large", 26, 3):
        await read(limits_of(), asked, limit=3)
    assert len(asked._receive.__self__.parts) == 7, "eight times the limit is discarded"
    with refused("body_too_large", 4):
        await read(limits_of(), request(b"12", b"34"), limit=3)
    assert await read(limits_of(), request(b"123", content_length="3"), limit=3) == b"123"


@pytest.mark.parametrize("encoding", ["br", "gzip, gzip", "d\xe9flate"])
async def test_other_encodings(encoding: str) -> None:
    asked = request(b"1")
    record_of(asked).first = {b"content-encoding": encoding.encode("latin-1")}
    with pytest.raises(errors.UnsupportedEncoding):
        await read(limits_of(), asked)


on_threads = pytest.mark.parametrize("anyio_backend", ["asyncio"])
"""For tests that wait for threads, for which no clock can leap."""


@on_threads
async def test_compressed_bodies() -> None:
    data = gzip.compress(b"abc" * 100_000)
    asked = request(data, content_encoding="GZIP")
    assert await read(limits_of(), asked) == b"abc" * 100_000
    assert record_of(asked).body_bytes == 300_000
    with refused("body_too_large", 299999):
        await read(limits_of(), request(data, content_encoding="gzip"), limit=299_999)
    assert await read(limits_of(), request(data, content_encoding="gzip"), limit=300_000)
    with refused("malformed_body"):
        await read(limits_of(), request(data[:-1], content_encoding="gzip"))
    assert await read(limits_of(), request(b"", content_encoding="gzip")) == b""


@on_threads
async def test_the_content_holds_memory_and_what_it_may_become_before() -> None:
    limits = limits_of(bodies=10 * LARGE)
    for size in (3 * LARGE, SMALL_BYTES):
        asked = request(gzip.compress(bytes(size)), content_encoding="gzip")
        with limits.request(asked):
            await limits.read(asked, 4 * LARGE)
            held = size if size > SMALL_BYTES else 0
            assert await has_room(limits.bodies, 10 * LARGE - held)
            assert not await has_room(limits.bodies, 10 * LARGE - held + 1)
        assert await has_room(limits.bodies, 10 * LARGE)
    await limits.bodies.grow(Hold("a"), LARGE, 0)
    asked = request(gzip.compress(b""), content_encoding="gzip", x_request_timeout_ms="50")
    with pytest.raises((errors.Overloaded, errors.SlowRequest, errors.DeadlineExceeded)):
        await read(limits, asked, limit=9 * LARGE)


@on_threads
async def test_decompression_ends_with_its_request() -> None:
    """A gigabyte of zeros takes seconds, and the request may take 0.1 s."""
    data = gzip.compress(bytes(2**20)) * 1000
    asked = request(data, content_encoding="gzip", x_request_timeout_ms="100")
    threads = threading.active_count()
    with pytest.raises(errors.DeadlineExceeded):
        await read(limits_of(2**40), asked, limit=2**31)
    began = time.thread_time(), time.process_time()
    await asyncio.sleep(0.5)
    others_s = time.process_time() - began[1] - (time.thread_time() - began[0])
    assert others_s < 0.3, "its thread does nothing any more"
    assert threading.active_count() <= threads + 1
