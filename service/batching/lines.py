"""The lines of one client: what waits, in the order of arrival.

The requests of a client wait in lines, one line per class of size and of patience. The lines of a
client share the client's turn equally. So a short request never waits behind long ones, a long one
gets its share beside any number of short ones, and a request that states a short time limit does
not wait behind requests that state none. The order within a line is the order of arrival, so that
no later request delays an earlier one of the same line.
"""

import math
import time
from collections import deque
from concurrent.futures import Future
from typing import NamedTuple, Protocol

from cloze.model_store.batch import Encoding, HeadOutputs
from cloze.service.core import BatchResult, Submission

_SIZES = (128, 1024)
"""Tokens of a request at which the next class of size begins."""

_LATER_ROUND = -1
"""Class of size of the later rounds of requests: what was admitted before does not wait again."""


class LineKey(NamedTuple):
    """Which of a client's lines a request waits in.

    Attributes:
        size: the class of size; see `_SIZES`.
        patience: the class of the stated time limit; 0: the request states none. A class ends at
            twice the time of the one before.
    """

    size: int
    patience: int

    @classmethod
    def of(cls, tokens: int, timeout_s: float | None, *, later_round: bool = False) -> "LineKey":
        """Return the line of a request.

        Args:
            tokens: tokens of all encodings of the request.
            timeout_s: the time limit that the request states, in seconds; None: it states none.
            later_round: whether the request was admitted in an earlier round.
        """
        size = _LATER_ROUND if later_round else sum(tokens >= least for least in _SIZES)
        return cls(size, 0 if timeout_s is None else 1 + int(timeout_s).bit_length())


class HasTurn(Protocol):
    """What is served by turns: a client, or a line of a client."""

    turn: float


class Turns:
    """The virtual time of members that share something equally (fair queueing).

    Virtual time advances by the tokens that each member would have received if all were served at
    once. The member with the smallest turn is next.
    """

    def __init__(self) -> None:
        self._time = 0.0

    def join(self, member: HasTurn) -> None:
        """Set the turn of a member that begins to wait: it has saved nothing up, and owes on."""
        member.turn = max(member.turn, self._time)

    def served(self, turn: float, tokens: int, members: int) -> None:
        """Advance virtual time.

        Args:
            turn: the turn of the member that was next.
            tokens: the tokens that ran.
            members: number of members that wait.
        """
        self._time = max(self._time, turn) + tokens / members


class PendingRequest(Future[BatchResult]):
    """The future of a request, with the outputs that have arrived.

    Args:
        submission: what the request submits; its encodings are not kept.
        line: the line that the request waits in.

    Attributes:
        line: the line that the request waits in.
        deadline: `time.monotonic` time after which no encoding starts.
        due: `time.monotonic` time by which the request is to end; see `Demand`.
        submitted: `time.monotonic` time of the admission.
        outputs: one element per encoding; None until the encoding has run.
        missing: number of outputs that are None.
        queued_tokens: number of tokens of the encodings that no worker has taken.
        started: `time.monotonic` time at which a worker took the first encoding, or None.
        trace: the W3C ``traceparent`` of the request's span; "" if it is not traced.
    """

    def __init__(self, submission: Submission, line: "Line") -> None:
        super().__init__()
        self.line = line
        self.deadline = submission.deadline
        self.submitted = time.monotonic()
        self.due = due_time(self.submitted, self.deadline)
        self.missing = len(submission.encodings)
        self.outputs: list[HeadOutputs | None] = [None] * self.missing
        self.queued_tokens = submission.tokens
        self.started: float | None = None
        self.trace = submission.trace


def due_time(now: float, deadline: float) -> float:
    """Return the time by which a request that arrives now is to end, a little before its deadline.

    The rest of the time is for what follows the engine, and for errors of the measured rate.
    """
    return now + 0.9 * (deadline - now)


class QueuedEncoding(NamedTuple):
    """One queued encoding.

    Attributes:
        serial: unique number, in the order of arrival.
        tokens: length of the encoding.
        vocabulary_rows: number of rows that a head multiplies into the vocabulary.
        encoding: the encoding to run.
        request: the request of the encoding.
        position: index of the encoding in its request.
    """

    serial: int
    tokens: int
    vocabulary_rows: int
    encoding: Encoding
    request: PendingRequest
    position: int


class Line:
    """Requests of one client and one class, in the order of arrival.

    Attributes:
        client: the client.
        key: the class.
        turn: virtual time at which the line's turn among those of its client comes.
        groups: the waiting encodings by length, or all with key 0 if batches mix lengths.
        requests: number of requests that have not ended.
        tokens: number of tokens that wait.
    """

    __slots__ = ("client", "groups", "key", "requests", "tokens", "turn")

    def __init__(self, client: "Client", key: LineKey) -> None:
        self.client, self.key = client, key
        self.turn = -math.inf
        self.groups: dict[int, deque[QueuedEncoding]] = {}
        self.requests = 0
        self.tokens = 0

    def next_group(self, longest: int | None = None) -> int | None:
        """Return the key of the group with the oldest encoding.

        Args:
            longest: most tokens of an encoding to consider; None: of any length.

        Returns:
            The key; None if there is no such group.
        """
        keys = [key for key in self.groups if longest is None or key <= longest]
        return min(keys, key=lambda key: self.groups[key][0].serial, default=None)

    def sweep(self) -> None:
        """Drop the encodings of ended requests."""
        for key, group in list(self.groups.items()):
            kept = deque(queued for queued in group if not queued.request.done())
            if kept:
                self.groups[key] = kept
            else:
                del self.groups[key]


class Client:
    """One client: its turn, and its lines.

    Attributes:
        name: the client.
        turn: virtual time at which the client's turn among all clients comes.
        lines: the lines that have requests or encodings.
        turns: the turns of these lines.
    """

    __slots__ = ("lines", "name", "turn", "turns")

    def __init__(self, name: str) -> None:
        self.name = name
        self.turn = -math.inf
        self.lines: dict[LineKey, Line] = {}
        self.turns = Turns()

    @property
    def waits(self) -> bool:
        """Whether encodings wait, those of ended requests included."""
        return any(line.groups for line in self.lines.values())
