"""The time and the memory of one request, and the body that it reads, with a clock that leaps."""

import asyncio
import gzip
import sys
import threading
import time
from collections.abc import Coroutine, Iterator
from contextlib import ExitStack
from typing import Any, cast

import pytest
from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.types import Message

from cloze.service.core import (
    ClientGone,
    DeadlineExceeded,
    InvalidRequest,
    MalformedRequest,
    Overloaded,
    Rejection,
    RequestTooLarge,
    SlowRequest,
    Submission,
    UnsupportedEncoding,
)
from cloze.service.http.gunzip import MAX_MEMBERS, Gunzip
from cloze.service.http.json_bodies import (
    SHORT_BYTES,
    BodyLimits,
    parse,
    run_anywhere,
    validate,
)
from cloze.service.http.memory_limit import SMALL_BYTES, Hold, MemoryLimit, UnreadAnswers
from cloze.service.http.record import RECORD
from cloze.service.http.watch import RequestWatch, WatchedRequest
from cloze.service.observe.tracing import RequestTrace
from tests.leaping_loop import LeapingLoop
from tests.records import recorded, scope_of

LARGE = 100_000


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a function that runs a coroutine; the clock leaps to the next timer."""
    with asyncio.Runner(loop_factory=LeapingLoop) as runner:
        loop = runner.get_loop()
        monkeypatch.setattr(time, "monotonic", loop.time)
        yield runner.run


class Sender:
    """A client that sends the parts of a body, with pauses, and may leave."""

    def __init__(self, *parts: bytes | float | str) -> None:
        self.parts = list(parts)

    async def receive(self) -> Message:
        while self.parts:
            part = self.parts.pop(0)
            if isinstance(part, float):
                await asyncio.sleep(part)
            elif isinstance(part, str):
                return {"type": "http.disconnect"}
            else:
                more = any(isinstance(part, bytes) for part in self.parts)
                return {"type": "http.request", "body": part, "more_body": more}
        return await asyncio.Future()


def request(*parts: bytes | float | str, **headers: str) -> Request:
    return Request(scope_of(recorded(**headers)), Sender(*parts).receive)


def watch_of(
    timeout_s: float = 30.0, bodies: MemoryLimit | None = None, answers: UnreadAnswers | None = None
) -> RequestWatch:
    bodies = bodies or MemoryLimit("bodies", 10**9)
    return RequestWatch(timeout_s, bodies, answers or UnreadAnswers(10**9))


async def read(
    watch: RequestWatch, asked: Request, limit: int = 10**6, answer_s: float = 0.0
) -> bytes:
    with watch.request(asked) as watched:
        data = await watched.read_body(limit)
        await asyncio.sleep(answer_s)
        return data


# ---- time --------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit_s", [0.02, 0.09, 0.1, 0.5, 30.0])
def test_the_limits_of_both_phases(play: Any, limit_s: float) -> None:
    async def run() -> None:
        with pytest.raises(SlowRequest) as slow:
            await read(watch_of(limit_s), request(b"12", 5000.0, b"3"))
        assert str(slow.value) == (
            f"2 bytes of the body arrived within the limit of {limit_s * 1000:.0f} ms, not all"
            if limit_s < 10
            else "the body arrives too slowly: 2 bytes so far; at least 1000 bytes per second must "
            "arrive, and 65536 while other requests need the memory"
        )
        began = time.monotonic()
        with pytest.raises(DeadlineExceeded) as late:
            await read(watch_of(limit_s), request(b"12"), answer_s=5000.0)
        assert time.monotonic() - began == pytest.approx(limit_s)
        assert str(late.value) == f"no answer within the limit of {limit_s * 1000:.0f} ms"

    play(run())


def test_a_request_within_its_time_is_left_alone(play: Any) -> None:
    async def run() -> None:
        watch = watch_of(0.5)
        assert await read(watch, request(b"1")) == b"1"
        await asyncio.sleep(1)
        assert await read(watch, request(b"12", 0.4, b"3"), answer_s=0.49) == b"123"
        with pytest.raises(DeadlineExceeded):
            await read(watch, request(b"12", 0.4, b"3"), answer_s=0.51)
        await asyncio.sleep(100)
        assert len(asyncio.all_tasks()) == 1
        assert not watch._young
        assert not watch._ticking

    play(run())


def test_one_timer_serves_all_young_requests(play: Any) -> None:
    async def run() -> None:
        loop: Any = asyncio.get_running_loop()
        watch, timers = watch_of(), []
        with ExitStack() as stack:
            for _ in range(5):
                stack.enter_context(watch.request(request()))
                timers.append(len(loop._scheduled))
        assert timers == [1] * 5

    play(run())


def test_a_request_gets_a_timer_of_its_own_when_it_is_older_than_a_tick(play: Any) -> None:
    async def run() -> None:
        watch = watch_of()
        with watch.request(request()) as first:
            await asyncio.sleep(0.03)
            with watch.request(request()) as second:
                await asyncio.sleep(0.021)
                assert (first.timer is None, second.timer is None) == (False, True)
                await asyncio.sleep(0.05)
                assert second.timer is not None

    play(run())


def test_the_limit_that_a_request_states(play: Any) -> None:
    async def run() -> None:
        watch = watch_of(30.0)
        asked = request(b"1", x_request_timeout_ms="200")
        with pytest.raises(DeadlineExceeded, match="no answer within the limit of 200 ms"):
            await read(watch, asked, answer_s=5)
        asked = request(b"1", x_request_timeout_ms="50000")
        await read(watch, asked, answer_s=40)
        with pytest.raises(InvalidRequest, match="from 1 to 300000"):
            await read(watch, request(x_request_timeout_ms="300001"))

    play(run())


def test_young_requests_get_timers_in_the_order_of_their_start(play: Any) -> None:
    async def run() -> None:
        watch = watch_of(0.2)
        results: list[tuple[str, float]] = []

        async def one(name: str) -> None:
            began = time.monotonic()
            with pytest.raises(DeadlineExceeded):
                await read(watch, request(b"1"), answer_s=60)
            results.append((name, time.monotonic() - began))

        tasks = []
        for name in "abc":
            tasks.append(asyncio.create_task(one(name)))
            await asyncio.sleep(0.03)
        await asyncio.gather(*tasks)
        assert [name for name, _ in results] == ["a", "b", "c"]
        assert all(seconds == pytest.approx(0.2) for _, seconds in results)
        await asyncio.sleep(1)
        assert not watch._ticking

    play(run())


def test_a_client_that_leaves(play: Any) -> None:
    async def run() -> None:
        with pytest.raises(ClientGone, match=r"^the client closed its connection$"):
            await read(watch_of(), request(b"1", 2.0, "leaves"), answer_s=20)
        with pytest.raises(ClientGone, match="before its body was whole"):
            await read(watch_of(), request(b"1", 2.0, "leaves", b"2"))
        # Bytes that follow the body say nothing.
        asked = request(b"1", 2.0)
        with watch_of().request(asked) as watched:
            await watched.read_body(99)
            asked._receive.__self__.parts += [b"", b"", "leaves"]  # type: ignore[attr-defined]
            with pytest.raises(asyncio.CancelledError):
                await asyncio.sleep(20)
            watched.task.uncancel()
            assert isinstance(watched.error, ClientGone)

    play(run())


def test_the_first_reason_counts_and_a_cancel_from_outside_stays_one(play: Any) -> None:
    async def run() -> None:
        task = asyncio.create_task(read(watch_of(), request(b"1"), answer_s=20))
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        asked = request(b"1", 0.3, "leaves")
        with pytest.raises(ValueError, match="mine"), watch_of(1.0).request(asked) as watched:
            await watched.read_body(99)
            await asyncio.sleep(0.1)
            raise ValueError("mine")
        await asyncio.sleep(5)
        with pytest.raises(DeadlineExceeded), watch_of(1.0).request(request(b"")) as watched:
            await watched.read_body(9)
            watched._end(DeadlineExceeded("first"))
            watched._end(ClientGone("second"))
            watched.grow_old()
            await asyncio.sleep(5)
        current = asyncio.current_task()
        assert current is not None
        assert not current.cancelling()

    play(run())


def test_terms_of_a_request(play: Any) -> None:
    async def run() -> None:
        asked = request(x_request_timeout_ms="2000")
        record = asked.scope[RECORD]
        record.arrived = 3.0
        record.trace = RequestTrace(cast(Any, None), cast(Any, None), "00-a-b-01")
        await asyncio.sleep(5)
        with watch_of().request(asked) as watched:
            assert watched.terms == Submission(5.0, (), "a", 2.0, "00-a-b-01")
            assert watched.record is record
        with watch_of(40.0).request(request()) as watched:
            assert watched.terms == Submission(45.0, client="a")
            assert watched.timeout_s == 40.0

    play(run())


# ---- memory ------------------------------------------------------------------------------------


async def arrive(watched: WatchedRequest, count: int, announced: int) -> None:
    watched.received_bytes += count
    await watched.hold_arrived(announced)


def test_what_a_body_holds(play: Any) -> None:
    async def run() -> None:
        bodies = MemoryLimit("bodies", 4 * LARGE)
        watch = watch_of(bodies=bodies)
        with watch.request(request()) as watched:
            await arrive(watched, SMALL_BYTES, 0)
            assert watched.holder is None
            assert bodies._held == 0, "a small body holds nothing"
            await arrive(watched, 1, 0)
            assert bodies._held == SMALL_BYTES + 1
            assert watched.holder == "a"
            await arrive(watched, 100, LARGE)
            assert bodies._held == LARGE, "what is announced"
            await arrive(watched, LARGE, LARGE)
            assert bodies._held == LARGE + SMALL_BYTES + 101, "or what has arrived, if that is more"
            assert watched.moved_bytes() == LARGE + SMALL_BYTES + 101
            assert watched.moved_bytes() == 0
            watched.slowed()
            await arrive(watched, 9, 4 * LARGE)
            assert bodies._held == LARGE + SMALL_BYTES + 110, "a slow one holds what has arrived"
            assert watched.moved_bytes() == 9
            watched.release_body(SMALL_BYTES + 1)
            assert bodies._held == SMALL_BYTES + 1
            watched.release_body(SMALL_BYTES)
            assert bodies._held == 0
            assert watched.holder is None
            await watched.hold_body(SMALL_BYTES + 1)
        assert bodies._held == 0, "the end of the request releases all"
        with watch.request(request()) as watched:
            watched.release_body(5)
            await watched.hold_body(SMALL_BYTES)
            assert watched.holder is None

    play(run())


def test_a_body_that_is_announced_holds_it_from_its_beginning_on(play: Any) -> None:
    async def run() -> None:
        bodies = MemoryLimit("bodies", 4 * LARGE)
        watch = watch_of(bodies=bodies)
        asked = request(
            bytes(SMALL_BYTES + 1), 1.0, bytes(LARGE), content_length=str(LARGE + SMALL_BYTES + 1)
        )
        task = asyncio.create_task(read(watch, asked, answer_s=1))
        await asyncio.sleep(0.5)
        assert bodies._held == LARGE + SMALL_BYTES + 1
        assert len(await task) == LARGE + SMALL_BYTES + 1

    play(run())


def test_what_a_slow_body_held_in_advance_is_released(play: Any) -> None:
    async def run() -> None:
        bodies = MemoryLimit("bodies", 4 * LARGE)
        asked = request(bytes(SMALL_BYTES + 1), 3.0, bytes(LARGE), content_length=str(2 * LARGE))
        task = asyncio.create_task(read(watch_of(bodies=bodies), asked, answer_s=1))
        await asyncio.sleep(0.9)
        assert bodies._held == 2 * LARGE
        await asyncio.sleep(1.5)
        assert bodies._held == SMALL_BYTES + 1, "it stands still for a second"
        await asyncio.sleep(1)
        assert bodies._held == LARGE + SMALL_BYTES + 1
        await task
        assert bodies._held == 0

    play(run())


def test_a_body_that_waits_for_memory_is_not_slow(play: Any) -> None:
    async def run() -> None:
        bodies = MemoryLimit("bodies", 2 * LARGE)
        other = Hold("a")
        await bodies.grow(other, LARGE)
        asked = request(bytes(LARGE))
        task = asyncio.create_task(read(watch_of(100.0, bodies), asked))
        await asyncio.sleep(60)
        assert not task.done()
        bodies.shrink(other)
        assert len(await task) == LARGE
        await bodies.grow(other, LARGE)
        with pytest.raises(Overloaded) as refused:
            await read(watch_of(100.0, bodies), request(bytes(LARGE)))
        assert str(refused.value) == "other bodies held the memory for the limit of 100000 ms"
        assert refused.value.reason is Rejection.MEMORY
        assert refused.value.retry_after_s == 1
        assert bodies._held == LARGE

    play(run())


def test_a_body_that_stalls_ends_after_ten_seconds_and_a_whole_one_does_not(play: Any) -> None:
    async def run() -> None:
        watch = watch_of(1000.0)
        began = time.monotonic()
        with pytest.raises(SlowRequest, match="too slowly: 2 bytes so far"):
            await read(watch, request(b"12", 500.0, b"3"))
        assert 10 <= time.monotonic() - began < 11
        await read(watch, request(b"12"), answer_s=500)
        with pytest.raises(ClientGone):
            await read(watch, request(b"12", 1.0, "leaves", b""))
        await asyncio.sleep(1)
        assert not watch.arriving._transfers

    play(run())


def test_large_answers(play: Any) -> None:
    async def run() -> None:
        answers = UnreadAnswers(2 * LARGE)
        watch = watch_of(answers=answers)
        asked = request()
        with watch.request(asked) as watched:
            await watched.begin_answer()
            turns = [await answers.begin("b"), await answers.begin("b")]
            await watched.hold_answer(LARGE)
            hold = asked.scope[RECORD].hold
            assert (hold.client, hold.size) == ("a", LARGE)
            waiting = asyncio.ensure_future(answers.begin("c"))
            await asyncio.sleep(1)
            assert not waiting.done()
        await asyncio.sleep(1)
        assert waiting.done(), "the end of the request ends its turn"
        for turn in turns:
            answers.done(turn)
        small, unasked = request(), request()
        with watch.request(small) as watched:
            await watched.hold_answer(SMALL_BYTES)
            assert small.scope[RECORD].hold is None
        with watch.request(unasked) as watched:
            await watched.hold_answer(LARGE)
            assert unasked.scope[RECORD].hold.size == LARGE, "what has no turn does not wait"
        with watch.request(request(b"", x_request_timeout_ms="500")) as watched:
            await watched.read_body(9)
            await watched.begin_answer()
            with pytest.raises(asyncio.CancelledError):
                await watched.hold_answer(LARGE)
            watched.task.uncancel()

    play(run())


# ---- bodies ------------------------------------------------------------------------------------


def test_a_body_of_several_parts(play: Any) -> None:
    async def run() -> None:
        assert await read(watch_of(), request(b"12", b"3", b"")) == b"123"
        assert await read(watch_of(), request(b"")) == b""
        assert await read(watch_of(), request(b"123"), limit=3) == b"123"
        assert await read(watch_of(), request(b"1", content_encoding=" Identity ")) == b"1"

    play(run())


def test_bodies_that_are_too_large(play: Any) -> None:
    async def run() -> None:
        asked = request(b"1234", content_length="4")
        with pytest.raises(RequestTooLarge, match=r"^the body has 4 bytes; the limit is 3$"):
            await read(watch_of(), asked, limit=3)
        assert asked._receive.__self__.parts == [b"1234"], "it is refused before it arrives"  # type: ignore[attr-defined]
        parts = [b"12"] * 20
        asked = request(*parts)
        with pytest.raises(
            RequestTooLarge, match=r"^the body has at least 26 bytes; the limit is 3"
        ):
            await read(watch_of(), asked, limit=3)
        assert len(asked._receive.__self__.parts) == 7, "eight times the limit is discarded"  # type: ignore[attr-defined]
        with pytest.raises(RequestTooLarge, match="at least 4 bytes"):
            await read(watch_of(), request(b"12", b"34"), limit=3)
        assert await read(watch_of(), request(b"123", content_length="3"), limit=3) == b"123"

    play(run())


def test_a_body_that_is_too_large_holds_nothing(play: Any) -> None:
    async def run() -> None:
        bodies = MemoryLimit("bodies", 10 * LARGE)
        part = bytes(LARGE)
        references = sys.getrefcount(part)
        asked = request(part, bytes(LARGE), 3.0, b"1")
        task = asyncio.create_task(read(watch_of(bodies=bodies), asked, limit=LARGE))
        await asyncio.sleep(1)
        assert bodies._held == 0
        assert sys.getrefcount(part) == references, "its parts are let go"
        with pytest.raises(RequestTooLarge):
            await task

    play(run())


@pytest.mark.parametrize("encoding", ["br", "gzip, gzip", "x" * 99, "d\xe9flate"])
def test_other_encodings(play: Any, encoding: str) -> None:
    async def run() -> None:
        asked = request(b"1")
        asked.scope[RECORD].first = {b"content-encoding": encoding.encode("latin-1")}
        with pytest.raises(UnsupportedEncoding) as refused:
            await read(watch_of(), asked)
        shown = ascii(encoding)[:60]
        assert str(refused.value) == (f"the body's Content-Encoding is {shown}; send gzip, or none")

    play(run())


def on_threads(main: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that waits for threads, for which no clock can leap."""
    asyncio.run(main)


def test_compressed_bodies() -> None:
    async def run() -> None:
        data = gzip.compress(b"abc" * 100_000)
        content = await read(watch_of(), request(data, content_encoding="GZIP"))
        assert content == b"abc" * 100_000
        with pytest.raises(RequestTooLarge, match="has over 299999 bytes, the limit"):
            await read(watch_of(), request(data, content_encoding="gzip"), limit=299_999)
        assert await read(watch_of(), request(data, content_encoding="gzip"), limit=300_000)
        with pytest.raises(MalformedRequest, match="it ends too early"):
            await read(watch_of(), request(data[:-1], content_encoding="gzip"))
        assert await read(watch_of(), request(b"", content_encoding="gzip")) == b""

    on_threads(run())


def test_the_content_counts_for_the_memory() -> None:
    async def run() -> None:
        data = gzip.compress(bytes(3 * LARGE))
        asked = request(data, content_encoding="gzip")
        peaks = []

        class Watching(MemoryLimit):
            async def grow(self, hold: Hold, size: int) -> None:
                await super().grow(hold, size)
                peaks.append(self._held)

        bodies = Watching("bodies", 10 * LARGE)
        with watch_of(bodies=bodies).request(asked) as watched:
            await watched.read_body(10**6)
            assert max(peaks) == 3 * LARGE + len(data)
            assert bodies._held == 3 * LARGE, "at the end, of the content alone"
        assert bodies._held == 0

    on_threads(run())


def test_members_of_gzip_data() -> None:
    def content(data: bytes) -> tuple[bytes, list[int]]:
        gunzip, pieces = Gunzip(data), []
        while not gunzip.is_done:
            pieces.append(gunzip.piece())
        return b"".join(pieces), [len(piece) for piece in pieces]

    assert content(b"") == (b"", [])
    two = gzip.compress(b"a") + gzip.compress(b"") + gzip.compress(b"bc")
    assert content(two) == (b"abc", [3])
    assert MAX_MEMBERS == 1000
    assert content(gzip.compress(b"a") * 1000)[0] == b"a" * 1000
    with pytest.raises(RequestTooLarge, match="the gzip body has over 1000 members, the limit"):
        content(gzip.compress(b"a") * 1001)
    large, pieces = content(gzip.compress(bytes(2**20)))
    assert large == bytes(2**20)
    assert max(pieces) < 2 * 262_144
    assert len(pieces) >= 3
    noise = bytes(n * n * 7 % 251 for n in range(600_000))
    stored = gzip.compress(noise, 0)
    assert content(stored)[0] == noise
    empty = gzip.compress(b"")
    named = empty[:3] + b"\x08" + empty[4:10] + b"n" * 600_000 + b"\0" + empty[10:]
    assert content(named)[1] == [0, 0, 0], "a piece reads a part of the data"
    for broken in (b"no gzip", gzip.compress(b"a") + b"more", gzip.compress(b"a") * 2 + b"\0"):
        with pytest.raises(MalformedRequest, match=r"^the body is not gzip: "):
            content(broken)
    with pytest.raises(MalformedRequest, match=r"^the body is not gzip: it ends too early$"):
        content(gzip.compress(b"abc" * 99) + gzip.compress(b"d")[:-1])


def test_small_bodies_run_on_the_loop_and_large_ones_on_threads() -> None:
    async def run() -> None:
        own = threading.get_ident()
        assert SHORT_BYTES == 65_536
        assert await run_anywhere(SHORT_BYTES, threading.get_ident) == own
        assert await run_anywhere(SHORT_BYTES + 1, threading.get_ident) != own
        assert await run_anywhere(1, max, 3, 4) == 4
        assert await run_anywhere(SHORT_BYTES + 1, max, 3, 4) == 4

    on_threads(run())


# ---- shapes ------------------------------------------------------------------------------------


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    name: str
    others: list[int] | str | None = None


class Whole(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    part: Part
    parts: list[Part] | Part | None = None
    number: int = 0


LIMITS = BodyLimits(1000, 100, 100)


def test_a_body_is_received_parsed_and_validated(play: Any) -> None:
    async def run() -> None:
        data = await read(watch_of(), request(b'{"part": {"name": "a"}, "number": 3}'))
        body = await run_anywhere(len(data), parse, Whole, data, LIMITS)
        assert (body.part.name, body.number) == ("a", 3)

    play(run())
    with pytest.raises(MalformedRequest):
        parse(Whole, b"{", LIMITS)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "part: Field required"),
        ([], "the body: Input should be an object"),
        (3, "the body: Input should be an object"),
        ({"part": 3}, "part: Input should be an object"),
        ({"part": {"name": 3}}, "part.name: Input should be a valid string"),
        ({"part": {"name": "a", "x": 1}}, "part.x: there is no such field"),
        ({"number": "a"}, "part: Field required"),
        ({"part": {"name": "a"}, "number": "secret"}, "number: Input should be a valid integer"),
        (
            {"part": {"name": "a", "others": 3}, "number": "a"},
            "part.others: Input should be a valid array; part.others: Input should be a valid string",
        ),
        (
            {"part": {"name": "a"}, "parts": 3},
            "parts: Input should be a valid array; parts: Input should be an object",
        ),
        ({"part": {"name": "a"}, "y" * 100: 3}, f"{'y' * 80}: there is no such field"),
    ],
)
def test_errors_of_shapes(value: Any, message: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        validate(Whole, value)
    assert str(refused.value).startswith(message)
    assert "secret" not in str(refused.value)


class Containers(BaseModel):
    model_config = ConfigDict(strict=True)

    numbers: dict[str, int] = {}
    pair: tuple[int, int] = (1, 2)
    rows: list[int] = []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("numbers", "numbers: Input should be an object"),
        ("pair", "pair: Input should be a valid array"),
        ("rows", "rows: Input should be a valid array"),
    ],
)
def test_errors_are_in_the_terms_of_json(name: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        validate(Containers, {name: 3})
    assert str(refused.value) == message


class Many(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    a: int
    b: int
    inner: "Inner"


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    a: int
    b: int
    c: int
    d: int
    e: int


def test_four_errors_of_the_first_field_are_named() -> None:
    with pytest.raises(InvalidRequest) as refused:
        validate(Many, {"a": 1, "b": 2, "inner": {}})
    shown = "; ".join(f"inner.{name}: Field required" for name in "abcd")
    assert str(refused.value) == shown
    with pytest.raises(InvalidRequest, match=r"^a: Field required$"):
        validate(Many, {})
