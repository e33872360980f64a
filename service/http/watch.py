"""Ends requests that exceed their time limit, and requests whose client disconnects or stalls.

One timer serves all requests of the application. It looks at the requests in progress every
`_TICK_S`, so that a request that is answered sooner needs no timer and no task of its own.
"""

import asyncio
import sys
import time
from types import TracebackType
from typing import Self

from starlette.requests import Request

from cloze.service.core import (
    ClientGone,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    Rejection,
    ServiceError,
    SlowRequest,
    Submission,
)
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


class WatchedRequest:
    """A request in progress, as a context manager that raises the reason of an early end.

    Args:
        watch: the watch of the application.
        request: the request.

    Attributes:
        record: what is noted of the request.
        timeout_s: longest time of each phase, in seconds.
        deadline: `time.monotonic` time at which the current phase ends. The first phase reads the
            body. The second phase begins with `body_complete`.
        received_bytes: number of bytes of the body that have arrived.

    Raises:
        SlowRequest: the body did not arrive in time, or arrives too slowly.
        InvalidRequest: the time limit that the request states is malformed or too long.
        DeadlineExceeded: the request has a body, but no answer in time.
        ClientGone: the client closed its connection after it had sent its body.
    """

    def __init__(self, watch: "RequestWatch", request: Request) -> None:
        self._watch = watch
        self._receive = request.receive
        self.record: RequestRecord = request.scope[RECORD]
        if self.record.limit_problem:
            raise InvalidRequest(self.record.limit_problem)
        stated_s = self.record.stated_s
        self.timeout_s = watch.timeout_s if stated_s is None else stated_s
        self.deadline = self.record.arrived + self.timeout_s
        self.received_bytes = 0
        self._hold: Hold | None = None  # of the memory of bodies
        self._turn: Hold | None = None  # to write a large answer
        self._moved = 0  # the bytes at the last look at the pace
        self._is_slow = False
        self._waits = False  # for the memory of the body
        self._reading = True
        self._is_old = False
        self._error: ServiceError | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._watcher: asyncio.Task[None] | None = None

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._watch.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        self._watch.remove(self)
        if self._hold is not None:
            self._watch.bodies.shrink(self._hold)
        if self._turn is not None:
            self._watch.answers.done(self._turn)
        if self._is_old:
            self._watch.arriving.remove(self)
            if self._timer is not None:
                self._timer.cancel()
            if self._watcher is not None:
                self._watcher.cancel()
                self._watcher = None  # the task refers to this object, and a cycle would need gc
            if self._error is not None and kind is asyncio.CancelledError:
                self._task.uncancel()
                raise self._error from None

    @property
    def terms(self) -> Submission:
        """What the request submits, without its encodings."""
        record = self.record
        return Submission(
            self.deadline,
            client=record.client,
            timeout_s=record.stated_s,
            trace=record.trace.parent if record.trace is not None else "",
            returning=record.is_returning,
        )

    async def begin_answer(self) -> None:
        """Wait until a large answer may be decoded; see `UnreadAnswers.begin`."""
        self._turn = await self._watch.answers.begin(self.record.client)

    async def hold_answer(self, size: int) -> None:
        """Hold the memory of an answer until its client has read it; see `UnreadAnswers`."""
        waits = self._turn is not None
        self.record.hold = await self._watch.answers.hold(self.record.client, size, waits=waits)

    # ---- the body -------------------------------------------------------------------------------

    async def received(self, count: int, expected: int) -> None:
        """Note that a part of the body has arrived, and wait until there is memory for the body.

        Args:
            count: bytes of the part.
            expected: bytes of the whole body; 0: not known. A body that arrives quickly holds them,
                so that large bodies do not wait for each other half-sent. A slow one holds what
                has arrived.

        Raises:
            Overloaded: other bodies need the memory.
        """
        self.received_bytes += count
        held = self._hold.size if self._hold is not None else SMALL_BYTES
        if self.received_bytes > held:
            size = self.received_bytes
            await self.hold_body(size if self._is_slow else max(size, expected))

    async def hold_body(self, size: int) -> None:
        """Wait until the body may hold ``size`` bytes; a small body holds nothing.

        Raises:
            Overloaded: other bodies need the memory.
        """
        if size <= SMALL_BYTES:
            return
        if self._hold is None:
            self._hold = Hold(self.record.client)
        self._waits = True
        try:
            await self._watch.bodies.grow(self._hold, size)
        finally:
            self._waits = False

    def release_body(self, size: int) -> None:
        """Release what the body holds above ``size`` bytes."""
        if self._hold is not None:
            self._watch.bodies.shrink(self._hold, size if size > SMALL_BYTES else 0)

    @property
    def holder(self) -> str | None:
        """The client, if the body holds memory; see `Transfer`."""
        return self.record.client if self._hold is not None and self._hold.size else None

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
        size = self.received_bytes
        self._end(
            SlowRequest(
                f"the body arrives too slowly: {size} bytes so far; at least {RATE} bytes per "
                f"second must arrive, and {HURRIED_RATE} while other requests need the memory"
            )
        )

    def body_complete(self) -> None:
        """Begin the second phase: the time limit starts anew, and the client may disconnect."""
        self._reading = False
        self.release_body(self.received_bytes)
        if self._is_old:
            self._watch.arriving.remove(self)
            self.deadline = time.monotonic() + self.timeout_s
            self._start_timers()

    def grow_old(self) -> None:
        """Start the timer and the watcher of a request that takes longer than a tick."""
        self._is_old = True
        if self._reading:
            self._watch.arriving.add(self)
        self._start_timers()

    def _start_timers(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        left_s = max(0.0, self.deadline - time.monotonic())
        self._timer = asyncio.get_running_loop().call_later(left_s, self._time_out)
        if not self._reading:
            self._watcher = asyncio.create_task(self._watch_client())

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
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._end(ClientGone("the client closed its connection"))

    def _end(self, error: ServiceError) -> None:
        if self._error is None:
            self._error = error
            self._task.cancel()


class RequestWatch:
    """The requests in progress of one application, on one event loop.

    Args:
        timeout_s: longest time of each phase of a request that states none, in seconds.
        bodies: bounds the memory of bodies; None: nothing does.
        answers: bounds the memory of answers; None: nothing does.
    """

    def __init__(
        self,
        timeout_s: float,
        bodies: MemoryLimit | None = None,
        answers: UnreadAnswers | None = None,
    ) -> None:
        self.timeout_s = timeout_s
        self.bodies = bodies or MemoryLimit("bodies", sys.maxsize)
        self.answers = answers or UnreadAnswers(sys.maxsize)
        self.arriving = Pace(self.bodies)
        self._young: dict[WatchedRequest, None] = {}  # in the order of their start
        self._ticking = False

    def request(self, request: Request) -> WatchedRequest:
        """Return the context manager of a request of the current task.

        Raises:
            InvalidRequest: the time limit that the request states is malformed or too long.
        """
        return WatchedRequest(self, request)

    def add(self, request: WatchedRequest) -> None:
        """Begin to watch a request."""
        if request.timeout_s < 2 * _TICK_S:  # the next tick would be too late
            request.grow_old()
            return
        self._young[request] = None
        if not self._ticking:
            self._ticking = True
            asyncio.get_running_loop().call_later(_TICK_S, self._tick)

    def remove(self, request: WatchedRequest) -> None:
        """End the watch of a request."""
        self._young.pop(request, None)

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
