"""The waiting encodings of one client, in the order of their turns.

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
from cloze.service.core import BatchResult

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
        client: the queue of the request's client.

    Attributes:
        client: the queue of the request's client.
        deadline: `time.monotonic` time after which no encoding starts.
        submitted: `time.monotonic` time of the admission.
        outputs: one element per encoding; None until the encoding has run.
        missing: number of outputs that are None.
        queued_tokens: number of tokens of the encodings that no worker has taken.
        next_tokens: mean number of tokens per encoding; 0 when no encoding waits any more.
        started: `time.monotonic` time at which a worker took the first encoding, or None.
        trace: the W3C ``traceparent`` of the request's span; "" if it is not traced.
    """

    def __init__(self, encodings: int, tokens: int, deadline: float, client: "ClientQueue") -> None:
        super().__init__()
        self.client = client
        self.deadline = deadline
        self.submitted = time.monotonic()
        self.outputs: list[HeadOutputs | None] = [None] * encodings
        self.missing = encodings
        self.queued_tokens = tokens
        self.next_tokens = -(-tokens // encodings)
        self.started: float | None = None
        self.trace = ""


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


class ClientQueue:
    """The encodings of one client that wait, in groups of one length.

    Args:
        name: the client.
        varlen: whether a batch may mix lengths.
        turn: virtual time of the queue of all clients at which the client's turn comes.

    Attributes:
        name: the client.
        turn: virtual time at which the client's turn comes.
        groups: heaps of encodings by length, or one heap with key 0 if batches mix lengths.
        requests: number of the client's requests that have not ended.
        due_tokens: tokens of the next encoding of each request with waiting encodings. A request
            that arrives now runs after these.
    """

    __slots__ = (
        "_own_share",
        "_varlen",
        "_virtual_time",
        "due_tokens",
        "groups",
        "name",
        "requests",
        "turn",
    )

    def __init__(self, name: str, *, varlen: bool, turn: float) -> None:
        self.name = name
        self.turn = turn
        self.groups: dict[int, list[QueuedEncoding]] = {}
        self.requests = 0
        self.due_tokens = 0
        self._varlen = varlen
        self._own_share = 0.0 if varlen else _OWN_SHARE
        self._virtual_time = 0.0

    def add(
        self,
        request: PendingRequest,
        encodings: Sequence[Encoding],
        lengths: Sequence[int],
        serial: int,
    ) -> None:
        """Queue the encodings of a request.

        Args:
            request: the request.
            encodings: its encodings.
            lengths: their tokens.
            serial: number of the first encoding; the next ones follow.
        """
        self.requests += 1
        self.due_tokens += request.next_tokens
        tag = self._virtual_time
        for position, (encoding, length) in enumerate(zip(encodings, lengths, strict=True)):
            group = self.groups.setdefault(0 if self._varlen else length, [])
            own_tag = tag + self._own_share * length
            rows = encoding.vocabulary_rows
            queued = QueuedEncoding(
                own_tag, serial + position, length, rows, encoding, request, position
            )
            heapq.heappush(group, queued)
            tag += length

    def next_group(self, longest: int | None) -> int | None:
        """Return the key of the group with the smallest tag.

        Args:
            longest: most tokens of an encoding to consider; None: of any length.

        Returns:
            The key; None if there is no such group.
        """
        keys = [key for key in self.groups if longest is None or key <= longest]
        return min(keys, key=lambda key: self.groups[key][0], default=None)

    @property
    def is_idle(self) -> bool:
        """Whether the client waits for nothing."""
        return not self.requests and not self.groups

    def reach(self, tag: float) -> None:
        """Advance virtual time to the smallest tag, whose turn it is."""
        self._virtual_time = max(self._virtual_time, tag)

    def advance(self, taken: Sequence[QueuedEncoding]) -> None:
        """Advance virtual time after encodings of this client were taken.

        Encodings that run before their turn, because they have the length of the batch, delay no
        other request. Virtual time does not advance for these encodings.
        """
        in_turn = sum(queued.tokens for queued in taken if queued.tag <= self._virtual_time)
        self._virtual_time += in_turn / max(1, self.requests)

    def sweep(self) -> None:
        """Drop the encodings of ended requests."""
        for key, group in list(self.groups.items()):
            group[:] = [queued for queued in group if not queued.request.done()]
            heapq.heapify(group)
            if not group:
                del self.groups[key]
