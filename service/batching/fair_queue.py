"""The queue of a scheduler: which encodings run next, and together.

The order is fair queueing over tokens (Demers et al. 1989). The tag of an encoding is the virtual
time of its request's arrival, plus the tokens before the encoding in the same request, plus a
share of the encoding's own tokens. The encoding with the smallest tag runs next, with others of the
same length. Virtual time advances by the number of tokens that each pending request would have
received if all pending requests were served at once. As a result, a single text does not wait
behind a bulk request, a bulk request does not wait forever behind single texts, and a short text
overtakes long texts that arrived a little earlier (docs/decisions/0014-long-and-short-texts.md).
"""

import heapq
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

from cloze.model_store.batch import Encoding, HeadOutputs
from cloze.service.core import MAX_BATCH_VOCABULARY_ROWS, MAX_PADDING_FACTOR, BatchResult

_OWN_SHARE = 0.25
"""Share of an encoding's tokens in its tag, where a batch has one length.

A larger share lets short texts overtake more, and makes fewer texts of one length run together:
with all tokens, the throughput of mixed texts is 3 % lower. Batches of mixed lengths end within the
latency objective, so that nobody needs to overtake.
"""


class PendingRequest(Future[BatchResult]):
    """The future of a request, with the outputs that have arrived.

    Args:
        encodings: number of encodings.
        tokens: number of tokens of all encodings.
        deadline: `time.monotonic` time after which no encoding starts.

    Attributes:
        deadline: `time.monotonic` time after which no encoding starts.
        submitted: `time.monotonic` time of the admission.
        outputs: one element per encoding; None until the encoding has run.
        missing: number of outputs that are None.
        queued_tokens: number of tokens of the encodings that no worker has taken.
        started: `time.monotonic` time at which a worker took the first encoding, or None.
    """

    def __init__(self, encodings: int, tokens: int, deadline: float) -> None:
        super().__init__()
        self.deadline = deadline
        self.submitted = time.monotonic()
        self.outputs: list[HeadOutputs | None] = [None] * encodings
        self.missing = encodings
        self.queued_tokens = tokens
        self.started: float | None = None


class QueuedEncoding(NamedTuple):
    """One queued encoding, ordered by tag.

    The class is a tuple because a heap compares tuples without a call of a Python function.

    Attributes:
        tag: virtual time at which the encoding's turn comes.
        serial: unique number, so that a comparison ends here.
        tokens: length of the encoding.
        vocabulary_rows: number of rows that a head multiplies into the vocabulary.
        encoding: the encoding to run.
        request: the request of the encoding.
        position: index of the encoding in its request.
    """

    tag: float
    serial: int
    tokens: int
    vocabulary_rows: int
    encoding: Encoding
    request: PendingRequest
    position: int


class Taken(NamedTuple):
    """What `FairQueue.take` removed from the queue.

    Attributes:
        batch: the encodings to run; empty if all encodings that were looked at belong to ended
            requests.
        expired: requests whose deadline has passed; the caller ends them.
    """

    batch: list[QueuedEncoding]
    expired: list[PendingRequest]


class FairQueue:
    """The encodings that wait, and the requests that have not ended.

    The class is not safe for threads: the lock of the scheduler guards every call.

    Args:
        varlen: whether a batch may mix lengths.
        max_dropped_tokens: most tokens of ended requests that stay in memory.

    Attributes:
        tokens: number of tokens that wait.
        requests: the requests that have not ended.
    """

    def __init__(self, *, varlen: bool, max_dropped_tokens: int) -> None:
        self.tokens = 0
        self.requests: set[PendingRequest] = set()
        self._varlen = varlen
        self._own_share = 0.0 if varlen else _OWN_SHARE
        self._max_dropped_tokens = max_dropped_tokens
        # One heap per length, or a single heap with key 0 if batches mix lengths.
        self._groups: dict[int, list[QueuedEncoding]] = {}
        # Upper bound on the tokens of ended requests in the groups.
        self._dropped_tokens = 0
        self._virtual_time = 0.0
        self._serial = 0

    def __bool__(self) -> bool:
        """Return whether encodings wait, those of ended requests included."""
        return bool(self._groups)

    def __len__(self) -> int:
        """Return the number of encodings in memory, those of ended requests included."""
        return sum(map(len, self._groups.values()))

    def add(
        self, request: PendingRequest, encodings: Sequence[Encoding], lengths: Sequence[int]
    ) -> None:
        """Queue the encodings of a request; `lengths` are their tokens."""
        self.requests.add(request)
        self.tokens += request.queued_tokens
        tag = self._virtual_time
        for position, (encoding, length) in enumerate(zip(encodings, lengths, strict=True)):
            group = self._groups.setdefault(0 if self._varlen else length, [])
            own_tag = tag + self._own_share * length
            rows = encoding.vocabulary_rows
            queued = QueuedEncoding(
                own_tag, self._serial, length, rows, encoding, request, position
            )
            heapq.heappush(group, queued)
            self._serial += 1
            tag += length

    def forget(self, request: PendingRequest) -> None:
        """Subtract an ended request.

        The request's encodings stay in memory until `take` or `_sweep` drops them.
        """
        self.requests.discard(request)
        self.tokens -= request.queued_tokens
        self._dropped_tokens += request.queued_tokens
        request.queued_tokens = 0
        if self._dropped_tokens > self._max_dropped_tokens:
            self._sweep()

    def clear(self) -> None:
        """Drop all encodings; the requests stay until they end."""
        self._groups.clear()

    def has_up_to(self, length: int) -> bool:
        """Return whether an encoding of at most so many tokens waits."""
        return any(key <= length for key in self._groups)

    def take(self, max_tokens: int, *, takers: int = 1, longest: int | None = None) -> Taken:
        """Remove a batch, from the group with the smallest tag.

        Args:
            max_tokens: most tokens of the batch; a longer single encoding runs alone.
            takers: number of workers that could take encodings now. Each takes an equal share of a
                group of one length. An engine that supports variable-length batches runs one batch
                at a time, and its other worker only packs the next batch, so a worker takes all.
            longest: most tokens of an encoding to consider; None: of any length.
        """
        keys = [key for key in self._groups if longest is None or key <= longest]
        key = min(keys, key=lambda key: self._groups[key][0])
        group = self._groups[key]
        share = len(group) if self._varlen else -(-len(group) // takers)
        self._virtual_time = max(self._virtual_time, group[0].tag)
        taken = self._fill(group, share, max_tokens)
        if not group:
            self._groups.pop(key, None)
        # Encodings that run before their turn, because they have the length of the batch, delay no
        # other request. Virtual time does not advance for these encodings.
        in_turn = sum(queued.tokens for queued in taken.batch if queued.tag <= self._virtual_time)
        self._virtual_time += in_turn / max(1, len(self.requests))
        return taken

    def _fill(self, group: list[QueuedEncoding], share: int, max_tokens: int) -> Taken:
        """Move encodings from a group to a batch until the batch is full."""
        taken = Taken([], [])
        batch = taken.batch
        tokens = rows = longest = 0
        now = time.monotonic()
        while group and len(batch) < share:
            queued = group[0]
            rows += queued.vocabulary_rows
            longest = max(longest, queued.tokens)
            cells = (len(batch) + 1) * longest
            if batch and _is_full(tokens + queued.tokens, rows, cells, max_tokens):
                break
            heapq.heappop(group)
            request = queued.request
            if request.done():  # cancelled or failed
                continue
            request.queued_tokens -= queued.tokens
            self.tokens -= queued.tokens
            if request.deadline <= now:
                taken.expired.append(request)
                continue
            if request.started is None:
                request.started = now
            batch.append(queued)
            tokens += queued.tokens
        return taken

    def _sweep(self) -> None:
        """Drop the encodings of ended requests.

        Without a sweep, cancelled requests would occupy unbounded memory.
        """
        self._dropped_tokens = 0
        for key, group in list(self._groups.items()):
            group[:] = [queued for queued in group if not queued.request.done()]
            heapq.heapify(group)
            if not group:
                del self._groups[key]


def _is_full(tokens: int, vocabulary_rows: int, cells: int, max_tokens: int) -> bool:
    """Return whether a batch of this size exceeds a limit; ``cells`` include padding."""
    return (
        tokens > max_tokens
        or vocabulary_rows > MAX_BATCH_VOCABULARY_ROWS
        or cells > MAX_PADDING_FACTOR * max_tokens
    )
