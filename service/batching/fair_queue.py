"""The queue of a scheduler: which encodings run next, and together.

Each client has a queue of its own (`client_queue`). The client with the smallest turn is served
next. Its turn then moves on by the tokens that it received, and virtual time by the tokens that
each waiting client would have received if all were served at once. So 200 connections of one client
do not delay the single text of another. A batch takes encodings of the same length from other
clients too, in the order of their turns, so that fairness costs no throughput.
"""

import heapq
import time
from collections.abc import Sequence
from typing import Final, NamedTuple

from cloze.model_store.batch import Encoding
from cloze.service.batching.client_queue import ClientQueue, PendingRequest, QueuedEncoding
from cloze.service.core import MAX_BATCH_VOCABULARY_ROWS, MAX_PADDING_FACTOR, BatchFill


class Taken(NamedTuple):
    """What `FairQueue.take` removed from the queue.

    Attributes:
        batch: the encodings to run; empty if all encodings that were looked at belong to ended
            requests.
        expired: requests whose deadline has passed; the caller ends them.
        fill: what kept more out of the batch.
    """

    batch: list[QueuedEncoding]
    expired: list[PendingRequest]
    fill: BatchFill


NOTHING_TAKEN: Final = Taken([], [], BatchFill.WAITING)


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
        self._max_dropped_tokens = max_dropped_tokens
        self._clients: dict[str, ClientQueue] = {}  # those with requests or waiting encodings
        # Upper bound on the tokens of ended requests in the groups.
        self._dropped_tokens = 0
        self._virtual_time = 0.0
        self._serial = 0

    def __bool__(self) -> bool:
        """Return whether encodings wait, those of ended requests included."""
        return any(client.groups for client in self._clients.values())

    def __len__(self) -> int:
        """Return the number of encodings in memory, those of ended requests included."""
        clients = self._clients.values()
        return sum(len(group) for client in clients for group in client.groups.values())

    def add(
        self,
        encodings: Sequence[Encoding],
        lengths: Sequence[int],
        deadline: float,
        client_name: str,
    ) -> PendingRequest:
        """Queue the encodings of a request; `lengths` are their tokens."""
        client = self._clients.get(client_name)
        if client is None:
            client = ClientQueue(client_name, varlen=self._varlen, turn=self._virtual_time)
            self._clients[client_name] = client
        elif not client.groups:
            client.turn = max(client.turn, self._virtual_time)
        request = PendingRequest(len(encodings), sum(lengths), deadline, client)
        client.add(request, encodings, lengths, self._serial)
        self._serial += len(encodings)
        self.requests.add(request)
        self.tokens += request.queued_tokens
        return request

    def tokens_ahead(self, client_name: str, tokens: int) -> int:
        """Return the number of tokens that run before an encoding that arrives now.

        The figure is an upper bound: each other client is served as much as this one meanwhile.

        Args:
            client_name: the client of the encoding.
            tokens: length of the encoding.
        """
        client = self._clients.get(client_name)
        due = client.due_tokens if client is not None else 0
        others = len(self._clients) - (client is not None)
        return min(self.tokens, due + others * (due + tokens))

    def tokens_until_end(self, client_name: str, tokens: int) -> int:
        """Return the number of tokens that run until a request that arrives now has ended.

        Each other request, and each other client, is served as much as this one meanwhile.
        """
        client = self._clients.get(client_name)
        requests = client.requests if client is not None else 0
        clients = len(self._clients) + (client is None)
        return min(self.tokens + tokens, (requests + 1) * clients * tokens)

    def forget(self, request: PendingRequest) -> None:
        """Subtract an ended request.

        The request's encodings stay in memory until `take` or `_sweep` drops them.
        """
        if request not in self.requests:
            return
        self.requests.discard(request)
        self.tokens -= request.queued_tokens
        self._dropped_tokens += request.queued_tokens
        request.queued_tokens = 0
        request.client.requests -= 1
        request.client.due_tokens -= request.next_tokens
        request.next_tokens = 0
        if self._dropped_tokens > self._max_dropped_tokens:
            self._sweep()
        self._drop_if_idle(request.client)

    def clear(self) -> None:
        """Drop all encodings; the requests stay until they end."""
        for client in list(self._clients.values()):
            client.groups.clear()
            self._drop_if_idle(client)

    def has_up_to(self, length: int) -> bool:
        """Return whether an encoding of at most so many tokens waits."""
        return any(key <= length for client in self._clients.values() for key in client.groups)

    def take(self, max_tokens: int, *, takers: int = 1, longest: int | None = None) -> Taken:
        """Remove a batch: from the group with the smallest tag of the client whose turn it is.

        Args:
            max_tokens: most tokens of the batch; a longer single encoding runs alone.
            takers: number of workers that could take encodings now. Each takes an equal share of a
                group of one length. An engine that supports variable-length batches runs one batch
                at a time, and its other worker only packs the next batch, so a worker takes all.
            longest: most tokens of an encoding to consider; None: of any length.
        """
        clients = sorted(
            (client for client in self._clients.values() if client.groups),
            key=lambda client: client.turn,
        )
        keys = ((client, client.next_group(longest)) for client in clients)
        first, key = next((client, key) for client, key in keys if key is not None)
        sharing = [first, *(c for c in clients if c is not first and key in c.groups)]
        waiting = sum(len(client.groups[key]) for client in sharing)
        share = waiting if self._varlen else -(-waiting // takers)
        self._virtual_time = max(self._virtual_time, first.turn)
        first.reach(first.groups[key][0].tag)
        batch = _Batch(max_tokens, share)
        for client in sharing:
            self._move(client, key, batch)
            self._drop_if_idle(client)
            if batch.fill is not BatchFill.WAITING:
                break
        self._virtual_time += batch.tokens / len(clients)
        return Taken(batch.encodings, batch.expired, batch.fill)

    def _move(self, client: ClientQueue, key: int, batch: "_Batch") -> None:
        """Move encodings from a group of a client to a batch until the batch is full."""
        group = client.groups[key]
        start, tokens = len(batch.encodings), batch.tokens
        now = time.monotonic()
        while group and not batch.is_full_before(group[0]):
            queued = heapq.heappop(group)
            request = queued.request
            if request.done():  # cancelled or failed
                continue
            request.queued_tokens -= queued.tokens
            self.tokens -= queued.tokens
            if not request.queued_tokens:
                client.due_tokens -= request.next_tokens
                request.next_tokens = 0
            if request.deadline <= now:
                batch.expired.append(request)
                continue
            if request.started is None:
                request.started = now
            batch.add(queued)
        if not group:
            del client.groups[key]
        client.advance(batch.encodings[start:])
        client.turn += batch.tokens - tokens

    def _drop_if_idle(self, client: ClientQueue) -> None:
        """Forget a client that waits for nothing."""
        if client.is_idle and self._clients.get(client.name) is client:
            del self._clients[client.name]

    def _sweep(self) -> None:
        """Drop the encodings of ended requests.

        Without a sweep, cancelled requests would occupy unbounded memory.
        """
        self._dropped_tokens = 0
        for client in list(self._clients.values()):
            client.sweep()
            self._drop_if_idle(client)


class _Batch:
    """A batch that is being filled.

    Args:
        max_tokens: most tokens; a longer single encoding fills the batch.
        max_encodings: most encodings.

    Attributes:
        encodings: the encodings of the batch.
        expired: requests whose deadline has passed.
        tokens: number of tokens of the encodings.
        fill: what keeps further encodings out; `BatchFill.WAITING`: nothing yet.
    """

    def __init__(self, max_tokens: int, max_encodings: int) -> None:
        self._max_tokens, self._max_encodings = max_tokens, max_encodings
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

    def add(self, queued: QueuedEncoding) -> None:
        """Add an encoding."""
        self.encodings.append(queued)
        self.tokens += queued.tokens
        self._rows += queued.vocabulary_rows
        self._longest = max(self._longest, queued.tokens)
