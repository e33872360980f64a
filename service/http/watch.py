"""Reads the bodies of requests, and ends those that exceed their time limit or whose client leaves.

One timer serves all requests of the application. It looks at the requests in progress every
`_TICK_S`, so that a request that is answered sooner needs no timer and no task of its own.
"""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from starlette.requests import Request
from starlette.types import Receive

from cloze.service.core import (
    ClientGone,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    Rejection,
    RequestTooLarge,
    ServiceError,
    SlowRequest,
    Terms,
    UnsupportedEncoding,
)
from cloze.service.http.gunzip import Gunzip
from cloze.service.http.memory_limit import (
    HURRIED_RATE,
    RATE,
    SMALL_BYTES,
    Hold,
    MemoryLimit,
    Pace,
    UnreadAnswers,
)
from cloze.service.http.record import RECORD, RequestRecord

_TICK_S = 0.05
"""Age in seconds from which a request has a timer and a watcher of its own."""

_DISCARD_FACTOR = 8
"""Multiple of the size limit up to which an oversized body of unknown length is discarded.

Many clients read the error response only after they have sent the whole body.
"""


@dataclass(slots=True, eq=False)
class WatchedRequest:
    """A request in progress, with the time and the memory that it takes.

    Attributes:
        timeout_s: longest time of each phase, in seconds.
        deadline: `time.monotonic` time at which the current phase ends. The first phase reads the
            body. The second phase begins when the body is complete.
        received_bytes: number of bytes of the body that have arrived.
        error: why the request ends early; None if it does not.
        hold: what its body holds of the memory of bodies.
        turn: its turn to write a large answer.
        timer, watcher: end it at its deadline, and when its client leaves.
    """

    watch: "RequestWatch"
    receive: Receive
    record: RequestRecord
    task: asyncio.Task[object]
    timeout_s: float
    deadline: float
    received_bytes: int = 0
    error: ServiceError | None = None
    hold: Hold | None = None
    turn: Hold | None = None
    _moved: int = 0  # the bytes at the last look at the pace
    _is_slow: bool = False
    _waits: bool = False  # for the memory of the body
    _reading: bool = True
    timer: asyncio.TimerHandle | None = None
    watcher: asyncio.Task[None] | None = None

    @property
    def terms(self) -> Terms:
        """The terms on which the request submits its encodings."""
        record = self.record
        return Terms(
            self.deadline,
            client=record.client,
            timeout_s=record.stated_s,
            trace=record.trace.parent if record.trace is not None else "",
            is_bulk=record.is_bulk,
        )

    async def begin_answer(self) -> None:
        """Wait until a large answer may be decoded; see `UnreadAnswers.begin`."""
        self.turn = await self.watch.answers.begin(self.record.client)

    async def hold_answer(self, size: int) -> None:
        """Hold the memory of an answer until its client has read it; see `UnreadAnswers`."""
        waits = self.turn is not None
        self.record.hold = await self.watch.answers.hold(self.record.client, size, waits=waits)

    # ---- the body -------------------------------------------------------------------------------

    async def read_body(self, limit: int) -> bytes:
        """Return the body, decompressed.

        Raises:
            RequestTooLarge: the body, or what it is decompressed to, has more than ``limit`` bytes.
                If its announced length is larger, it is refused before it arrives.
            UnsupportedEncoding: the body is compressed, but not by gzip.
            MalformedRequest: the body cannot be decompressed.
            Overloaded: the bodies of other requests need the memory.
            ClientGone: the client closed its connection.
        """
        announced = self.record.length or 0
        if announced > limit:
            raise RequestTooLarge(f"the body has {announced} bytes; the limit is {limit}")
        encoding = self.record.first.get(b"content-encoding", b"identity").strip().lower()
        if encoding not in (b"identity", b"gzip"):
            shown = ascii(encoding.decode("latin-1"))[:60]
            raise UnsupportedEncoding(f"the body's Content-Encoding is {shown}; send gzip, or none")
        chunks: list[bytes] = []
        more = True
        while more and self.received_bytes <= limit * _DISCARD_FACTOR:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientGone("the client closed its connection before its body was whole")
            chunk, more = message.get("body", b""), message.get("more_body", False)
            self.received_bytes += len(chunk)
            if self.received_bytes > limit:
                chunks.clear()
                self.release_body(0)
                continue
            if self.received_bytes > SMALL_BYTES:
                await self.hold_arrived(announced)
            chunks.append(chunk)
        if self.received_bytes > limit:
            sent = self.received_bytes
            raise RequestTooLarge(f"the body has at least {sent} bytes; the limit is {limit}")
        self._reading = False
        if self.hold is not None:
            self.release_body(self.received_bytes)
        if self.timer is not None:  # the time limit starts anew, and the client may disconnect
            self.watch.arriving.remove(self)
            self.deadline = time.monotonic() + self.timeout_s
            self._start_timers()
        data = b"".join(chunks)
        return await self._decompress(data, limit) if encoding == b"gzip" else data

    async def _decompress(self, data: bytes, limit: int) -> bytes:
        """Return the content of gzip data, of ``limit`` bytes at most.

        A thread decompresses a piece at a time, so that the end of the request ends the work.
        Memory is held for the data and for the content, and from the end on for the content alone.
        """
        gunzip = Gunzip(data)
        pieces, size = [], 0
        while not gunzip.is_done:
            pieces.append(await asyncio.to_thread(gunzip.piece))
            size += len(pieces[-1])
            if size > limit:
                raise RequestTooLarge(f"the decompressed body has over {limit} bytes, the limit")
            await self.hold_body(len(data) + size)
        self.release_body(size)
        return b"".join(pieces)

    async def hold_arrived(self, announced: int) -> None:
        """Wait until there is memory for what has arrived of the body.

        A body that arrives quickly holds as much as is announced, so that large bodies do not wait
        for each other half-sent. A slow one holds what has arrived, as does one without a length.
        """
        if self.received_bytes > (self.hold.size if self.hold is not None else SMALL_BYTES):
            expected = 0 if self._is_slow else announced
            await self.hold_body(max(self.received_bytes, expected))

    async def hold_body(self, size: int) -> None:
        """Wait until the body may hold ``size`` bytes; a small body holds nothing."""
        if size <= SMALL_BYTES:
            return
        if self.hold is None:
            self.hold = Hold(self.record.client)
        self._waits = True
        try:
            await self.watch.bodies.grow(self.hold, size)
        finally:
            self._waits = False

    def release_body(self, size: int) -> None:
        """Release what the body holds above ``size`` bytes."""
        if self.hold is not None:
            self.watch.bodies.shrink(self.hold, size if size > SMALL_BYTES else 0)

    @property
    def holder(self) -> str | None:
        """The client, if the body holds memory; see `Transfer`."""
        return self.record.client if self.hold is not None and self.hold.size else None

    def moved_bytes(self) -> int | None:
        """Return the bytes of the body since the last call; see `Transfer`."""
        if self._waits:
            return None
        moved, self._moved = self.received_bytes - self._moved, self.received_bytes
        return moved

    def slowed(self) -> None:
        """Hold only what has arrived of the body; see `Transfer`."""
        self._is_slow = True
        self.release_body(self.received_bytes)

    def end_slow(self) -> None:
        """End the request, whose body arrives too slowly; see `Transfer`."""
        message = (
            f"the body arrives too slowly: {self.received_bytes} bytes so far; at least {RATE} "
            f"bytes per second must arrive, and {HURRIED_RATE} while other requests need the memory"
        )
        self._end(SlowRequest(message))

    def grow_old(self) -> None:
        """Start the timer and the watcher of a request that takes longer than a tick."""
        if self._reading:
            self.watch.arriving.add(self)
        self._start_timers()

    def _start_timers(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
        left_s = max(0.0, self.deadline - time.monotonic())
        self.timer = asyncio.get_running_loop().call_later(left_s, self._time_out)
        if not self._reading:
            self.watcher = asyncio.create_task(self._watch_client())

    def _time_out(self) -> None:
        limit = f"the limit of {self.timeout_s * 1000:.0f} ms"
        if self._waits:
            message = f"other bodies held the memory for {limit}"
            self._end(Overloaded(message, 1, Rejection.MEMORY))
        elif self._reading:
            size = self.received_bytes
            self._end(SlowRequest(f"{size} bytes of the body arrived within {limit}, not all"))
        else:
            self._end(DeadlineExceeded(f"no answer within {limit}"))

    async def _watch_client(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass
        self._end(ClientGone("the client closed its connection"))

    def _end(self, error: ServiceError) -> None:
        if self.error is None:
            self.error = error
            self.task.cancel()


class RequestWatch:
    """The requests in progress of one application, on one event loop.

    Args:
        timeout_s: longest time of each phase of a request that states none.
        bodies: bounds the memory of bodies.
        answers: bounds the memory of answers.
    """

    def __init__(self, timeout_s: float, bodies: MemoryLimit, answers: UnreadAnswers) -> None:
        self.timeout_s, self.bodies, self.answers = timeout_s, bodies, answers
        self.arriving = Pace(bodies)
        self._young: dict[WatchedRequest, None] = {}  # in the order of their start
        self._ticking = False

    @contextmanager
    def request(self, request: Request) -> Iterator[WatchedRequest]:
        """Watch a request of the current task, and raise the reason of an early end.

        Raises:
            SlowRequest: the body did not arrive in time, or arrives too slowly.
            InvalidRequest: the time limit or the class that the request states is malformed.
            DeadlineExceeded: the request has a body, but no answer in time.
            ClientGone: the client closed its connection after it had sent its body.
        """
        record: RequestRecord = request.scope[RECORD]
        if record.terms_problem:
            raise InvalidRequest(record.terms_problem)
        task = asyncio.current_task()
        assert task is not None
        limit_s = self.timeout_s if record.stated_s is None else record.stated_s
        deadline = record.arrived + limit_s
        watched = WatchedRequest(self, request.receive, record, task, limit_s, deadline)
        if limit_s < 2 * _TICK_S:  # the next tick would be too late
            watched.grow_old()
        else:
            self._young[watched] = None
            if not self._ticking:
                self._ticking = True
                asyncio.get_running_loop().call_later(_TICK_S, self._tick)
        try:
            yield watched
        except asyncio.CancelledError:
            if watched.error is None:
                raise
            task.uncancel()
            raise watched.error from None
        finally:
            self._young.pop(watched, None)
            if watched.hold is not None:
                self.bodies.shrink(watched.hold)
            if watched.turn is not None:
                self.answers.done(watched.turn)
            if watched.timer is not None:
                self.arriving.remove(watched)
                watched.timer.cancel()
            if watched.watcher is not None:
                watched.watcher.cancel()
                watched.watcher = None  # the task refers to the request, and a cycle would need gc

    def _tick(self) -> None:
        """Give the requests that are older than a tick timers of their own."""
        newest = time.monotonic() - _TICK_S
        for request in list(self._young):
            if request.record.arrived > newest:
                break
            del self._young[request]
            request.grow_old()
        if self._young:
            asyncio.get_running_loop().call_later(_TICK_S, self._tick)
        else:
            self._ticking = False
