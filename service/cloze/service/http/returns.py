"""Tells refused requests when to come back, one after another.

A connection that does not wait gets its next refusal late, so that a storm of requests costs timers
instead of processor time.
"""

from dataclasses import dataclass
from typing import NamedTuple

from cloze.service.core import ServedRequest
from cloze.service.errors import Rejection
from cloze.service.http.routes import Connection

_EARLY_S = 0.005
"""How much earlier than told a client may come; timers and clocks are not exact."""

_LONGEST_S = 59.99
"""Longest time that a refused request is told. The openai client does not wait for above 60 s, and
the difference of two times may be a little more than what was added."""

_MOST_LINES = 4096
"""Most lines whose next time is kept."""


class RefusedLine(NamedTuple):
    """Which refused requests come back one after another: those of a client and of one reason."""

    reason: Rejection
    model: str  # full name of the model whose queue refused them
    client: str
    patience: int  # see `LineKey`
    is_bulk: bool


@dataclass(slots=True, eq=False)
class _Refused:
    """The last refusal of a connection."""

    line: RefusedLine
    at: float  # `Clock.monotonic` time at which the connection was told to come back
    after_s: float  # seconds that it was told to wait
    moved_s: float  # seconds by which the refusal moved the latest time of its line
    early: int = 0  # number of refusals that the connection did not wait for; halved when it waits
    over: float | None = None  # arrival of the request that the gate has admitted since, or None


class Returns:
    """When refused requests may come back: as fast as their line is worked off.

    Nothing is kept for a request that does not come back: a time passes, and a connection that
    closes or is admitted gives its time back. Each connection has one time, however often it asks.
    One that comes back as told and is refused again waits no longer than before, or until room.

    For example, a line works off 40 requests per second and has room in 0.1 s. The first connection
    that is refused is told 0.1 s, the next ones 0.125 s and 0.15 s.

    The class is not safe for threads: the event loop of the process makes every call.

    Attributes:
        refused: the last refusal of each connection.

    Args:
        processes: number of processes that refuse requests of the same lines.
    """

    def __init__(self, processes: int = 1) -> None:
        self._processes = processes
        self._last: dict[RefusedLine, float] = {}  # the latest time that was told
        self._due: dict[RefusedLine, dict[_Refused, None]] = {}  # all in `refused`
        self.refused: dict[Connection | None, _Refused] = {}

    def before(self, connection: Connection | None, line: RefusedLine, now: float) -> int:
        """Return how many refused requests go before one: none if it comes back as told."""
        due = self._due.get(line, {})
        while due and (first := next(iter(due))).at <= now:
            del due[first]
        refused = self.refused.get(connection)
        if refused is not None and refused.line == line and refused.over is None:
            return 0 if now >= refused.at - _EARLY_S else len(due)
        return len(due)

    def refuse(
        self, request: ServedRequest, line: RefusedLine, now: float, room_s: float, each_s: float
    ) -> tuple[float, float]:
        """Return in how many seconds a refused request may come back, and how long to hold it.

        Args:
            room_s: seconds until the line has room.
            each_s: seconds in which the line works off one such request.
        """
        connection = request.connection
        if connection is not None and connection.is_lost:
            return room_s, 0.0  # nobody comes back, and `closed` was called before
        before = self.refused.get(connection)
        if before is not None and before.over not in (None, request.arrived):
            before = None
        is_exact = line.reason is Rejection.KEY_LIMIT  # a time that may be long
        early, hold_s, most_s = 0, 0.0, _LONGEST_S
        if before is not None:
            early = before.early // 2
            if before.line == line and now >= before.at - _EARLY_S:
                most_s = max(room_s, before.after_s)  # the first time was wrong
            if before.line.client == line.client and now < before.at - _EARLY_S:
                hold_s = min(0.25 * 2**before.early, 1.0)
                early = min(before.early + 1, 16)
                if before.line == line and before.over is None:
                    before.early = early
                    after_s = max(before.at - now, room_s)
                    return after_s if is_exact else min(after_s, _LONGEST_S), hold_s
        self._give_back(connection, now)
        if len(self._last) >= _MOST_LINES:
            self._last.clear()
            self._due.clear()
        last, each_s = self._last.get(line, 0.0), each_s * self._processes
        at = now + max(room_s, 0.05)
        if not is_exact:
            if last > now:  # room may come sooner than when the others were told their times
                at = max(at, min(last + each_s, at + each_s * len(self._due.get(line, ()))))
            at = min(at, now + min(most_s, _LONGEST_S))
        moved_s = max(0.0, at - max(last, now))
        self._last[line] = max(last, at)
        if connection is not None:
            self.refused[connection] = refused = _Refused(line, at, at - now, moved_s, early)
            self._due.setdefault(line, {})[refused] = None
        return at - now, hold_s

    def admitted(self, request: ServedRequest) -> None:
        """Note that the gate admits a request; if it comes early, its time is given back."""
        refused = self.refused.get(request.connection)
        if refused is not None and refused.over is None:
            self._give_back(request.connection, request.arrived)
            refused.over = request.arrived

    def closed(self, connection: Connection, now: float) -> None:
        """Forget a connection, and give its time back."""
        self._give_back(connection, now)
        self.refused.pop(connection, None)

    def _give_back(self, connection: Connection | None, now: float) -> None:
        if (refused := self.refused.get(connection)) is not None:
            self._due.get(refused.line, {}).pop(refused, None)
            if refused.at > now and refused.line in self._last:
                self._last[refused.line] -= refused.moved_s
                refused.moved_s = 0.0
