"""The queue of a scheduler: which encodings run next, and together.

Clients are served by turns, and the lines of a client too (`lines`). So 200 connections of one
client do not delay the single text of another, and 200 long requests of a client do not delay its
short one. A batch takes encodings of the same length from other lines as well, in the order of
their turns, and each line pays for its own, so that fairness costs no throughput.

Only one thing goes before turns: what was accepted ends in time. When no time is left for anything
else, the request with the earliest deadline is next (`Demand`).
"""

import math
import time
from collections import deque
from typing import Final, NamedTuple

from cloze.service.batching.lines import (
    Client,
    Line,
    LineKey,
    PendingRequest,
    QueuedEncoding,
    Turns,
)
from cloze.service.batching.measures import Demand
from cloze.service.core import (
    MAX_BATCH_VOCABULARY_ROWS,
    MAX_PADDING_FACTOR,
    BatchFill,
    Submission,
)

_LEAST_SLACK_S = 0.05
"""Slack below which the earliest deadline is next; a batch takes about 20 ms."""

_HOPELESS = 1.5
"""A request is dropped if its rest takes so many times the time that is left."""


class Taken(NamedTuple):
    """What `FairQueue.take` removed from the queue.

    Attributes:
        batch: the encodings to run; empty if all encodings that were looked at belong to ended
            requests.
        expired: requests that cannot end before their deadline; the caller ends them.
        fill: what kept more out of the batch.
    """

    batch: list[QueuedEncoding]
    expired: list[PendingRequest]
    fill: BatchFill


NOTHING_TAKEN: Final = Taken([], [], BatchFill.WAITING)


class Share(NamedTuple):
    """What a request that arrives now waits behind.

    Attributes:
        ahead: tokens that wait in its line.
        lines: number of lines of its client, its own included.
        clients: number of clients, its own included.
    """

    ahead: int
    lines: int
    clients: int


class FairQueue:
    """The encodings that wait, and the requests that have not ended.

    The class is not safe for threads: the lock of the scheduler guards every call.

    Args:
        varlen: whether a batch may mix lengths.
        max_dropped_tokens: most tokens of ended requests that stay in memory.

    Attributes:
        tokens: number of tokens that wait.
        demand: these tokens by their due time.
        requests: the requests that have not ended.
    """

    def __init__(self, *, varlen: bool, max_dropped_tokens: int) -> None:
        self.tokens = 0
        self.demand = Demand()
        self.requests: set[PendingRequest] = set()
        self._varlen = varlen
        self._max_dropped_tokens = max_dropped_tokens
        self._clients: dict[str, Client] = {}  # those with requests or waiting encodings
        self._turns = Turns()
        # Upper bound on the tokens of ended requests in the groups.
        self._dropped_tokens = 0
        self._serial = 0

    def __bool__(self) -> bool:
        """Return whether encodings wait, those of ended requests included."""
        return any(client.waits for client in self._clients.values())

    def __len__(self) -> int:
        """Return the number of encodings in memory, those of ended requests included."""
        return sum(len(group) for line in self._waiting_lines() for group in line.groups.values())

    def _waiting_lines(self) -> list[Line]:
        """Return the lines with encodings, those of ended requests included."""
        clients = self._clients.values()
        return [line for client in clients for line in client.lines.values() if line.groups]

    def add(self, submission: Submission, key: LineKey) -> PendingRequest:
        """Queue the encodings of a request in a line of its client."""
        client = self._clients.get(submission.client) or Client(submission.client)
        self._clients[client.name] = client
        if not client.waits:
            self._turns.join(client)
        line = client.lines.get(key) or Line(client, key)
        client.lines[key] = line
        if not line.groups:
            client.turns.join(line)
        request = PendingRequest(submission, line)
        for position, encoding in enumerate(submission.encodings):
            length, rows = len(encoding), encoding.vocabulary_rows
            group = line.groups.setdefault(0 if self._varlen else length, deque())
            group.append(QueuedEncoding(self._serial, length, rows, encoding, request, position))
            self._serial += 1
        line.requests += 1
        self.requests.add(request)
        self._count(request, request.queued_tokens)
        return request

    def _count(self, request: PendingRequest, tokens: int) -> None:
        """Add waiting tokens of a request to all sums; negative: subtract them."""
        line = request.line
        self.tokens += tokens
        line.tokens += tokens
        self.demand.add(request.due, tokens)

    def share(self, client_name: str, key: LineKey) -> Share:
        """Return what a request that arrives now waits behind."""
        client = self._clients.get(client_name)
        if client is None:
            return Share(0, 1, len(self._clients) + 1)
        line = client.lines.get(key)
        lines = len(client.lines) + (line is None)
        ahead = line.tokens if line is not None else 0
        return Share(ahead, lines, len(self._clients))

    def forget(self, request: PendingRequest) -> None:
        """Subtract an ended request.

        The request's encodings stay in memory until `take` or `_sweep` drops them.
        """
        if request not in self.requests:
            return
        self.requests.discard(request)
        self._dropped_tokens += request.queued_tokens
        self._count(request, -request.queued_tokens)
        request.queued_tokens = 0
        request.line.requests -= 1
        if self._dropped_tokens > self._max_dropped_tokens:
            self._sweep()
        self._drop_if_idle(request.line)

    def clear(self) -> None:
        """Drop all encodings; the requests stay until they end."""
        for line in self._waiting_lines():
            line.groups.clear()
            self._drop_if_idle(line)

    def has_up_to(self, length: int) -> bool:
        """Return whether an encoding of at most so many tokens waits."""
        return any(key <= length for line in self._waiting_lines() for key in line.groups)

    def take(
        self, max_tokens: int, *, takers: int = 1, longest: int | None = None, rate: float = 0.0
    ) -> Taken:
        """Remove a batch: what is next in the line whose turn it is, and others of its length.

        Args:
            max_tokens: most tokens of the batch; a longer single encoding runs alone.
            takers: number of workers that could take encodings now. Each takes an equal share of a
                group of one length. An engine that supports variable-length batches runs one batch
                at a time, and its other worker only packs the next batch, so a worker takes all.
            longest: most tokens of an encoding to consider; None: of any length.
            rate: tokens per second of all workers; 0.0: not measured.
        """
        now = time.monotonic()
        lines = [line for line in self._waiting_lines() if line.next_group(longest) is not None]
        clients = len({id(line.client) for line in lines})
        if rate and self.demand.slack_s(now, rate) < _LEAST_SLACK_S:
            lines = [min(lines, key=lambda line: _first_deadline(line, longest))]
        else:
            lines.sort(key=lambda line: (line.client.turn, line.turn, line.key))
        first = lines[0]
        key = first.next_group(longest)
        assert key is not None
        sharing = [line for line in lines if key in line.groups]
        waiting = sum(len(line.groups[key]) for line in sharing)
        batch = _Batch(max_tokens, waiting if self._varlen else -(-waiting // takers), now, rate)
        turn, line_turn, client = first.client.turn, first.turn, first.client
        client_lines = sum(bool(line.groups) for line in client.lines.values())
        for line in sharing:
            self._move(line, key, batch)
            self._drop_if_idle(line)
            if batch.fill is not BatchFill.WAITING:
                break
        client.turns.served(line_turn, batch.tokens, client_lines)
        self._turns.served(turn, batch.tokens, clients)
        return Taken(batch.encodings, batch.expired, batch.fill)

    def _move(self, line: Line, key: int, batch: "_Batch") -> None:
        """Move encodings from a group of a line to a batch until the batch is full."""
        group, tokens = line.groups[key], batch.tokens
        while group and not batch.is_full_before(group[0]):
            queued = group.popleft()
            request = queued.request
            if request.done():  # cancelled or failed
                continue
            is_last = self.tokens == request.queued_tokens
            hopeless = batch.is_hopeless(request, is_last=is_last)
            request.queued_tokens -= queued.tokens
            self._count(request, -queued.tokens)
            if hopeless:
                batch.expired.append(request)
                continue
            if request.started is None:
                request.started = batch.now
            batch.add(queued)
        if not group:
            del line.groups[key]
        line.turn += batch.tokens - tokens
        line.client.turn += batch.tokens - tokens

    def _drop_if_idle(self, line: Line) -> None:
        """Forget a line without requests and encodings, and a client without lines."""
        client = line.client
        if line.requests or line.groups or client.lines.get(line.key) is not line:
            return
        del client.lines[line.key]
        if not client.lines and self._clients.get(client.name) is client:
            del self._clients[client.name]

    def _sweep(self) -> None:
        """Drop the encodings of ended requests.

        Without a sweep, cancelled requests would occupy unbounded memory.
        """
        self._dropped_tokens = 0
        for line in self._waiting_lines():
            line.sweep()
            self._drop_if_idle(line)


def _first_deadline(line: Line, longest: int | None) -> float:
    """Return the deadline of the request that is next in a line."""
    key = line.next_group(longest)
    return math.inf if key is None else line.groups[key][0].request.deadline


class _Batch:
    """A batch that is being filled.

    Args:
        max_tokens: most tokens; a longer single encoding fills the batch.
        max_encodings: most encodings.
        now: `time.monotonic` time.
        rate: tokens per second of all workers; 0.0: not measured.

    Attributes:
        now: `time.monotonic` time.
        encodings: the encodings of the batch.
        expired: requests that cannot end before their deadline.
        tokens: number of tokens of the encodings.
        fill: what keeps further encodings out; `BatchFill.WAITING`: nothing yet.
    """

    def __init__(self, max_tokens: int, max_encodings: int, now: float, rate: float) -> None:
        self._max_tokens, self._max_encodings = max_tokens, max_encodings
        self.now, self._rate = now, rate
        self.encodings: list[QueuedEncoding] = []
        self.expired: list[PendingRequest] = []
        self.tokens = 0
        self._rows = 0
        self._longest = 0
        self.fill = BatchFill.WAITING

    def is_full_before(self, queued: QueuedEncoding) -> bool:
        """Return whether an encoding no longer fits."""
        count = len(self.encodings)
        if count >= self._max_encodings:
            self.fill = BatchFill.SHARE
        elif not count:
            return False
        elif self.tokens + queued.tokens > self._max_tokens:
            self.fill = BatchFill.TOKENS
        elif self._rows + queued.vocabulary_rows > MAX_BATCH_VOCABULARY_ROWS:
            self.fill = BatchFill.VOCABULARY
        elif (count + 1) * max(
            self._longest, queued.tokens
        ) > MAX_PADDING_FACTOR * self._max_tokens:
            self.fill = BatchFill.PADDING
        return self.fill is not BatchFill.WAITING

    def is_hopeless(self, request: PendingRequest, *, is_last: bool) -> bool:
        """Return whether a request will not end before its deadline, whatever runs next.

        The workers may have become slower since the request was accepted. The last request runs
        nevertheless: else a rate that is wrong would stay so.
        """
        left_s = request.deadline - self.now
        if left_s <= 0 or is_last or not self._rate:
            return left_s <= 0
        return request.queued_tokens / self._rate > _HOPELESS * left_s

    def add(self, queued: QueuedEncoding) -> None:
        """Add an encoding."""
        self.encodings.append(queued)
        self.tokens += queued.tokens
        self._rows += queued.vocabulary_rows
        self._longest = max(self._longest, queued.tokens)
