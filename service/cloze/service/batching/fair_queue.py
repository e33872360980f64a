"""What a request submits, and the queue of a scheduler: which encodings run next, and together.

`Submission` is what all queues take, and `Queue` what they have in common. `FairQueue` is the one
of a scheduler.

The requests of a client wait in lines, one line per class of size and of patience, in the order of
arrival. Clients are served by turns, and so are the lines of a client: short requests do not wait
behind long ones, and 200 connections of one client do not delay the single text of another.

A batch takes encodings of the same length from other lines as well, in the order of their turns,
and each line pays for its own, so that fairness costs no throughput. When no time is left for
anything else, the request with the earliest deadline goes before turns (`Demand`).

Bulk requests take what the others leave, and a share of the tokens in any case: see `FairQueue`.
"""

import math
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from cloze.model_store.batch import Encoding, HeadOutputs
from cloze.service.core import MAX_BATCH_VOCABULARY_ROWS, MAX_PADDING_FACTOR, BatchFill, BatchResult


class LineKey(NamedTuple):
    """Which line of its client a request waits in: requests alike wait for each other only.

    Example: a client sends two questions of 12 tokens, a document of 3,000 tokens, and a question
    of 12 tokens that states a time limit of 2.5 s. Their keys are ``(0, 0)`` twice, ``(2, 0)`` and
    ``(0, 3)``, so the client has three lines.

    Attributes:
        size: the class of size: 0 below 128 tokens, 1 below 1,024, else 2; -1: a later round of a
            request, which goes before the first ones.
        patience: the class of the stated time limit: 0 states none, 1 is below 1 s, 2 below 2 s, 3
            below 4 s, and so on.
        is_bulk: whether the line has the bulk requests of the client.
    """

    size: int
    patience: int
    is_bulk: bool = False

    @classmethod
    def of(cls, tokens: int, timeout_s: float | None, *, is_bulk: bool = False) -> "LineKey":
        """Return the line of a request with so many tokens that states a time limit, or none."""
        patience = 0 if timeout_s is None else 1 + int(timeout_s).bit_length()
        return cls((tokens >= 128) + (tokens >= 1024), patience, is_bulk)


class Terms(NamedTuple):
    """The terms on which a request submits encodings to a queue.

    Attributes:
        deadline: `Clock.monotonic` time after which nothing of the request starts.
        timeout_s: the time limit that the request states, if any.
        trace: the W3C ``traceparent`` of the request's span; "" if it is not traced.
        is_bulk: whether the request takes only what other requests leave.
        later_round: whether the request was admitted in an earlier round; then a full queue does
            not refuse it.
    """

    deadline: float
    client: str = ""
    timeout_s: float | None = None
    trace: str = ""
    is_bulk: bool = False
    later_round: bool = False


class Submission(Future[BatchResult]):
    """Encodings that a request submits to a queue, and the future of their results.

    Args:
        terms: may change until the encodings wait in a queue.
        encodings: at least one.

    Attributes:
        encodings: those that no queue has taken; a queue frees each one when it has run.
        tokens: number of tokens of all encodings.
        key: the line of a request like this one in its first round.
        outputs: one element per encoding; empty until the encoding has run.
        missing: number of encodings that have not run.
        queued_tokens: number of tokens that wait; 0 when the request has ended.
        submitted, due: times of admission, and by which the request is to end; see `Demand`.
        started: the time at which a worker took the first encoding; None: none was taken.
    """

    def __init__(self, terms: Terms, encodings: Sequence[Encoding]) -> None:
        super().__init__()
        self.terms = terms
        self.encodings = encodings
        self.tokens = sum([len(encoding.input_ids) for encoding in encodings])
        self.key = LineKey.of(self.tokens, terms.timeout_s, is_bulk=terms.is_bulk)
        self.missing = len(encodings)
        self.outputs: list[HeadOutputs] = [{}] * self.missing
        self.queued_tokens = 0
        self.submitted = self.due = 0.0
        self.started: float | None = None

    def end(self, outcome: BatchResult | BaseException) -> None:
        """End the request with its result or an error, unless it has ended."""
        with suppress(InvalidStateError):  # another thread has cancelled or failed it meanwhile
            if isinstance(outcome, BatchResult):
                self.set_result(outcome)
            else:
                self.set_exception(outcome)


class ExpectedWait(NamedTuple):
    """The wait of a request that arrives now.

    Attributes:
        seconds: seconds until its first batch starts.
        per_request_s: seconds in which its line works off one such request. For example, 4 of 10
            waiting requests are in its line, so this is the time of 2.5 requests.
        requests: number of the client's requests in the process that have not ended.
        ahead: number of tokens that wait in its line.
        clients: number of clients that have at least a quarter as many requests in the process as
            the one that has the most. For example, with 64, 20 and 4 requests, two clients count.
        lasts_s: seconds from the start of the first batch to the end of the last one.
    """

    seconds: float
    per_request_s: float
    requests: int = 0
    ahead: int = 0
    clients: int = 1
    lasts_s: float = 0.0

    @property
    def end_s(self) -> float:
        """Seconds until the request has ended."""
        return self.seconds + self.lasts_s


class QueueState(NamedTuple):
    """The tokens that wait, bulk requests apart, and the seconds in which they start.

    Bulk requests wait for all others, so that theirs is no sign of a full server.
    """

    tokens: int
    backlog_s: float


NO_WAIT: Final = ExpectedWait(0.0, 0.0)


class Queue(Protocol):
    """The queue of one model's requests, before an engine in this or in another process."""

    @property
    def state(self) -> QueueState:
        """What waits."""

    @property
    def dead_reason(self) -> str | None:
        """Why no engine runs; None while one runs."""

    def submit(self, submission: Submission) -> None:
        """Admit all encodings of a request or none.

        An admitted submission always ends: with a result, or with a `ServiceError`. To cancel the
        submission drops the encodings that have not run.

        Raises:
            Overloaded: the request would wait for too long, or the queue is full.
            ShuttingDown: the queue is closed.
            EngineDead: no engine runs.
        """

    def expected_wait(
        self, client: str, line: LineKey, tokens: int, unsubmitted: int = 0
    ) -> ExpectedWait:
        """Return the expected wait of a request that arrives now.

        Args:
            client: the client of the request.
            line: its line, by its tokens or by an estimate of them.
            tokens: number of its tokens, or that estimate.
            unsubmitted: tokens of requests like it that have arrived and are not submitted yet.
        """

    def close(self, timeout_s: float = 5.0) -> None:
        """Fail pending requests with `ShuttingDown` and end the threads within ``timeout_s``."""


_STEP_S = 0.1
"""Due times are rounded down to such steps."""

BULK_SHARE = 0.1
"""Least share of the tokens that run which are of bulk requests, while these wait."""


class QueuedEncoding(NamedTuple):
    """One queued encoding.

    Attributes:
        serial: unique number, in the order of arrival.
        vocabulary_rows: number of rows that heads expand to the size of the vocabulary.
        position: index of the encoding in its request.
    """

    serial: int
    tokens: int
    vocabulary_rows: int
    encoding: Encoding
    request: Submission
    position: int


@dataclass(slots=True, eq=False)
class Client:
    """One client: its turn, and its lines. Its bulk requests are those of a client of their own.

    Attributes:
        turn: virtual time at which the client's turn among all clients comes.
        virtual_time: that of the client's lines; see `FairQueue`.
        lines: the lines that have requests.
    """

    name: str
    turn: float = -math.inf
    virtual_time: float = 0.0
    lines: "dict[LineKey, Line]" = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Line:
    """Requests of one client and one class, in the order of arrival.

    Attributes:
        turn: virtual time at which the line's turn among those of its client comes.
        groups: the encodings by length, or all with key 0 if batches mix lengths. Those of ended
            requests stay among them until `sweep` or until their turn.
        requests: number of requests that have not ended.
        tokens: number of tokens that wait.
        ended_tokens: number of tokens of ended requests in the groups.
    """

    client: Client
    key: LineKey
    turn: float = -math.inf
    groups: dict[int, deque[QueuedEncoding]] = field(default_factory=dict)
    requests: int = 0
    tokens: int = 0
    ended_tokens: int = 0

    def sweep(self) -> None:
        """Drop the encodings of ended requests, once they have more tokens than those that wait."""
        self.ended_tokens = 0
        for key, group in list(self.groups.items()):
            self.groups[key] = deque(each for each in group if each.request.queued_tokens)
            if not self.groups[key]:
                del self.groups[key]


_FREE_CELLS = 4096
"""Cells of a head that cost less than a further batch, so that their padding does not count."""


class PaddedHead(NamedTuple):
    """What a head pads in a batch; see `HeadRequest.padded_sizes`.

    For example, a text of 10 words with 50 labels has 500 cells, and one of 300 words with 2 labels
    has 600. Together they have 2 x 300 x 50 = 30,000 padded cells, so they run apart.

    Attributes:
        sizes: the largest ones.
        cells: sum of the requests' cells without padding.
    """

    requests: int = 0
    sizes: tuple[int, ...] = ()
    cells: int = 0

    def plus(self, sizes: tuple[int, ...]) -> "PaddedHead":
        """Return the padding with one more request of these sizes."""
        largest = tuple(map(max, self.sizes or sizes, sizes))
        return PaddedHead(self.requests + 1, largest, self.cells + math.prod(sizes))

    @property
    def is_excessive(self) -> bool:
        """Whether the padded cells are too many."""
        padded = self.requests * math.prod(self.sizes)
        return padded > MAX_PADDING_FACTOR * max(self.cells, _FREE_CELLS)


@dataclass(slots=True)
class Batch:
    """Encodings that run together.

    Attributes:
        max_tokens: most tokens; a longer single encoding fills the batch.
        encodings: none if all that were looked at belong to requests that have ended.
        is_bulk: whether the encodings are of bulk requests.
        expired: requests that cannot end before their deadline; who takes the batch ends them.
        rows: number of the encodings' rows of the vocabulary.
        padded: what heads pad, by their names.
        fill: what keeps further encodings out; `BatchFill.WAITING`: nothing yet.
    """

    max_tokens: int
    max_encodings: int
    is_bulk: bool = False
    encodings: list[QueuedEncoding] = field(default_factory=list)
    expired: list[Submission] = field(default_factory=list)
    tokens: int = 0
    rows: int = 0
    longest: int = 0
    padded: dict[str, PaddedHead] = field(default_factory=dict)
    fill: BatchFill = BatchFill.WAITING

    def add(self, queued: QueuedEncoding) -> bool:
        """Add an encoding, or set `fill` and return False if it does not fit."""
        count = 1 + len(self.encodings)
        tokens, rows = self.tokens + queued.tokens, self.rows + queued.vocabulary_rows
        longest = max(self.longest, queued.tokens)
        padded = {
            name: self.padded.get(name, PaddedHead()).plus(sizes)
            for name, sizes in queued.encoding.padded_sizes.items()
        }
        if count > self.max_encodings:
            self.fill = BatchFill.SHARE
        elif count > 1 and tokens > self.max_tokens:
            self.fill = BatchFill.TOKENS
        elif count > 1 and rows > MAX_BATCH_VOCABULARY_ROWS:
            self.fill = BatchFill.VOCABULARY
        elif count > 1 and (
            count * longest > MAX_PADDING_FACTOR * self.max_tokens
            or any(head.is_excessive for head in padded.values())
        ):
            self.fill = BatchFill.PADDING
        else:
            self.encodings.append(queued)
            self.padded |= padded
            self.tokens, self.rows, self.longest = tokens, rows, longest
            return True
        return False


class Demand:
    """The waiting tokens, by the time at which they are due.

    All of them can end in time if, for each time, the tokens that are due until then run until
    then: the earliest deadline first is an order that does it (Liu and Layland 1973).
    """

    def __init__(self) -> None:
        self._tokens: Counter[int] = Counter()  # by the step of the due time

    def add(self, due: float, tokens: int) -> None:
        """Add tokens that are due at a time; negative: subtract them."""
        if due == math.inf:
            return
        step = math.floor(due / _STEP_S)
        self._tokens[step] += tokens
        if not self._tokens[step]:
            del self._tokens[step]

    def slack_s(self, now: float, rate: float, due: float = math.inf, tokens: int = 0) -> float:
        """Return how long the queue may do other work, and all that waits still ends in time.

        Args:
            now: the time.
            rate: tokens per second.
            due: when further tokens would be due; dues before it are not looked at.
            tokens: number of these tokens.

        Returns:
            Seconds, or a lower bound above zero; below zero: something ends too late.
        """
        added = {math.floor(due / _STEP_S): tokens} if tokens and due < math.inf else {}
        total = self._tokens.total() + sum(added.values())
        first = min([*self._tokens, *added], default=math.inf)
        bound = first * _STEP_S - now - total / rate
        if bound > 0:
            return bound
        waiting, slack = 0, math.inf
        for step in sorted(self._tokens.keys() | added):
            waiting += self._tokens[step] + added.get(step, 0)
            if step >= min(added, default=step):
                slack = min(slack, step * _STEP_S - now - waiting / rate)
        return slack


class FairQueue:
    """The encodings that wait, of one length per batch unless `varlen`, and all pending requests.

    Clients share the workers equally, and so do the lines of a client (start-time fair queueing,
    Goyal et al. 1997). A client has a turn: the virtual time at which it is next. The client with
    the smallest turn is served, and the tokens that run are added to its turn. Virtual time
    advances by the tokens that each client would have received if all were served at once. A client
    that begins to wait gets the virtual time as its turn, unless its turn is later: so it gains
    nothing by pauses, and still pays for its last batch. The lines of a client have turns among
    each other in the same way.

    Example: A has texts of 12 and 30 tokens, and B has two of 20; both turns are 0. The text of 12
    runs: A's turn is 12, and the virtual time 12 / 2 = 6. C comes, and gets the turn 6. The next
    texts are B's (turn 0, then 20), C's (6), A's (12), and B's second one (20).

    Bulk requests wait apart, with turns of their own. They run when nothing else waits, and age: of
    each token of others that runs while they wait, they are owed a share. A batch of them is next
    when it is owed. So the wait of a bulk request is bounded, however many others come.

    The class is not safe for threads: the lock of the scheduler guards every call.

    Attributes:
        tokens: number of tokens that wait.
        bulk_tokens: number of these tokens that are of bulk requests.
        demand: the tokens of other requests by their due time.
        lines: the line of each request that has not ended.
    """

    def __init__(self, *, varlen: bool) -> None:
        self.tokens = self.bulk_tokens = 0
        self.demand = Demand()
        self.lines: dict[Submission, Line] = {}
        self._varlen = varlen
        self._clients: dict[tuple[str, bool], Client] = {}  # by name, and whether bulk requests
        self._virtual_times = [0.0, 0.0]  # of all others, and of bulk requests
        self._owed_to_bulk = 0.0  # tokens
        self._serial = 0

    def add(self, request: Submission) -> None:
        """Queue the encodings of a request in a line of its client."""
        terms, key = request.terms, request.key
        if terms.later_round:
            key = key._replace(size=-1)
        client = self._clients.get((terms.client, key.is_bulk)) or Client(terms.client)
        self._clients[client.name, key.is_bulk] = client
        if not any(line.tokens for line in client.lines.values()):
            client.turn = max(client.turn, self._virtual_times[key.is_bulk])
        line = client.lines.get(key) or Line(client, key)
        client.lines[key] = line
        if not line.tokens:
            line.turn = max(line.turn, client.virtual_time)
        for position, encoding in enumerate(request.encodings):
            length = len(encoding.input_ids)
            rows = encoding.vocabulary_rows
            group = line.groups.setdefault(0 if self._varlen else length, deque())
            group.append(QueuedEncoding(self._serial, length, rows, encoding, request, position))
            self._serial += 1
        request.encodings = ()
        line.requests += 1
        self.lines[request] = line
        self._count(line, request, request.tokens)

    def _count(self, line: Line, request: Submission, tokens: int) -> None:
        """Add waiting tokens of a request to all sums; negative: subtract them."""
        request.queued_tokens += tokens
        line.tokens += tokens
        self.tokens += tokens
        if line.key.is_bulk:
            self.bulk_tokens += tokens
        self.demand.add(request.due, tokens)

    def share(self, client_name: str, key: LineKey) -> tuple[int, int, int]:
        """Return the tokens in a request's line, and the numbers of its lines and of clients."""
        # A copy: the event loop asks without the lock, while workers change the dictionary.
        clients = sum(is_bulk == key.is_bulk for _, is_bulk in tuple(self._clients))
        client = self._clients.get((client_name, key.is_bulk))
        if client is None:
            return 0, 1, clients + 1
        if (line := client.lines.get(key)) is None:
            return 0, len(client.lines) + 1, clients
        return line.tokens, len(client.lines), clients

    def forget(self, request: Submission) -> None:
        """Subtract an ended request; its encodings are dropped now, or when their turn comes."""
        line = self.lines.pop(request)
        client = line.client
        line.ended_tokens += request.queued_tokens
        self._count(line, request, -request.queued_tokens)
        if line.ended_tokens > line.tokens:
            line.sweep()
        line.requests -= 1
        if not line.requests:
            del client.lines[line.key]
        if not client.lines:
            del self._clients[client.name, line.key.is_bulk]

    def has_up_to(self, length: int) -> bool:
        """Return whether an encoding of at most so many tokens waits, of no bulk request."""
        return any(
            key <= length
            for (_, is_bulk), client in self._clients.items()
            for line in client.lines.values()
            if line.tokens and not is_bulk
            for key in line.groups
        )

    def take(
        self,
        max_tokens: int,
        now: float,
        *,
        takers: int = 1,
        longest: int | None = None,
        rate: float = 0.0,
        with_bulk: bool = True,
    ) -> Batch:
        """Remove a batch: what is next in the line whose turn it is, and others of its length.

        Args:
            max_tokens: most tokens of the batch; a longer single encoding runs alone.
            now: the time.
            takers: number of workers that could take encodings now. Each takes an equal share of a
                group of one length. An engine that supports variable-length batches runs one batch
                at a time, and its other worker only packs the next batch, so a worker takes all.
            longest: most tokens of an encoding to consider; None: of any length.
            rate: tokens per second of all workers; 0.0: not measured.
            with_bulk: whether bulk requests may run; there must be others if not.
        """
        others: dict[Line, QueuedEncoding] = {}  # the oldest encoding of each line, by serial
        bulk: dict[Line, QueuedEncoding] = {}
        for (_, of_bulk), client in self._clients.items():
            for line in client.lines.values():
                fitting = [g[0] for n, g in line.groups.items() if longest is None or n <= longest]
                if line.tokens and fitting:
                    (bulk if of_bulk else others)[line] = min(fitting)
        is_bulk = not others or (with_bulk and bool(bulk) and self._owed_to_bulk >= max_tokens)
        oldest = bulk if is_bulk else others
        slack_s = math.inf  # with a single line, nothing else could go first
        if len(others) > 1 and rate and not is_bulk:
            slack_s = self.demand.slack_s(now, rate)
        if slack_s < 0.05:  # a batch takes about 20 ms
            lines = [min(oldest, key=lambda line: oldest[line].request.terms.deadline)]
        else:
            lines = sorted(oldest, key=lambda line: (line.client.turn, line.turn, line.key))
        first = lines[0]
        key = 0 if self._varlen else oldest[first].tokens
        sharing = [line for line in lines if key in line.groups]
        waiting = sum([len(line.groups[key]) for line in sharing])
        batch = Batch(max_tokens, waiting if self._varlen else -(-waiting // takers), is_bulk)
        client, turn, line_turn = first.client, first.client.turn, first.turn
        # All that wait count: else short texts beside long ones move the virtual time past others.
        own = [each for (_, of_bulk), each in self._clients.items() if of_bulk == is_bulk]
        clients = sum([any(line.tokens for line in each.lines.values()) for each in own])
        client_lines = sum([line.tokens > 0 for line in client.lines.values()])
        for line in sharing:
            self._move(line, key, batch, now, rate)
            if batch.fill is not BatchFill.WAITING:
                break
        client.virtual_time = max(client.virtual_time, line_turn) + batch.tokens / client_lines
        passed = max(self._virtual_times[is_bulk], turn) + batch.tokens / clients
        self._virtual_times[is_bulk] = passed
        if is_bulk:
            # A batch may have one short text: then further batches follow until all is paid.
            self._owed_to_bulk = max(0.0, self._owed_to_bulk - batch.tokens)
        elif bulk:
            self._owed_to_bulk += batch.tokens * BULK_SHARE / (1 - BULK_SHARE)
        return batch

    def _move(self, line: Line, key: int, batch: Batch, now: float, rate: float) -> None:
        """Move encodings from a group of a line to a batch until the batch is full.

        A request that will not end before its deadline, whatever runs next, is not moved: the
        workers may have become slower since it was admitted. The last request runs nevertheless:
        else a rate that is wrong would stay so.
        """
        group, tokens = line.groups[key], batch.tokens
        while group:
            queued, request = group[0], group[0].request
            if not request.done():
                left_s, rest = request.terms.deadline - now, request.queued_tokens
                slow = rate > 0 and rest != self.tokens and rest / rate > 1.5 * left_s
                if left_s <= 0 or slow:
                    batch.expired.append(request)
                elif not batch.add(queued):
                    break
                elif request.started is None:
                    request.started = now
            group.popleft()
            if request.queued_tokens:
                self._count(line, request, -queued.tokens)
            else:  # the request has ended, and its tokens are subtracted
                line.ended_tokens -= queued.tokens
        if not group:
            del line.groups[key]
        if line.ended_tokens > line.tokens:
            line.sweep()
        line.turn += batch.tokens - tokens
        line.client.turn += batch.tokens - tokens
