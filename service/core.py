"""The values that the service's rooms hand to each other, and the errors they raise. Imports nothing of ours.

Errors, each naming what the caller can do; the HTTP status of each lies in one table in `api`:

    ServiceError
    +-- RequestError            the request is wrong; sending it again does not help
    |   +-- MalformedRequest    the body cannot be read at all
    |   +-- SlowRequest         the body does not arrive in time
    |   +-- InvalidRequest      a value is out of its limits
    |   +-- EmptyRequest        no text at all
    |   +-- RequestTooLarge     more bytes than a request may have
    |   +-- UnknownModel        no model of that name
    |   +-- WrongTask           the model has no head for it
    +-- Overloaded              the queue is full; try again after `retry_after_s`
    +-- DeadlineExceeded        no answer within the request's time
    +-- ClientGone              nobody is left to answer
    +-- ShuttingDown            the server is draining; another replica will answer
    +-- EngineFailed            the engine raised on this very input
    +-- EngineDead              the engine is gone; the process will exit
    StartupError                the server cannot start; not a ServiceError, no client sees it
"""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]

MAX_BATCH_MASKS = 128
"""A mask costs the graph about 12 bytes a word of the vocabulary: 128 of them 47 MB for BERT. A query alone may have more."""

CELLS_A_TOKEN = 4
"""Where a batch mixes lengths, sequences times the longest may be so many times its most tokens: it takes memory for them all."""


class ServiceError(Exception):
    """A request that gets no result, and why. The message is for the client."""


class RequestError(ServiceError):
    """The request itself is wrong."""


class MalformedRequest(RequestError):
    """The body is not JSON."""


class SlowRequest(RequestError):
    """The body did not arrive within the request's time."""


class InvalidRequest(RequestError):
    """A value of the request is malformed or out of its limits."""


class EmptyRequest(RequestError):
    """The request holds no text."""


class RequestTooLarge(RequestError):
    """The body has more bytes than the server reads."""


class UnknownModel(RequestError):
    """The request names a model that is not served."""


class WrongTask(RequestError):
    """The model has no head for what is asked of it."""


class Overloaded(ServiceError):
    """The queue is full.

    Attributes:
        retry_after_s: when the tokens queued now will be gone, at the measured speed.
    """

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(ServiceError):
    """The request's time is over."""


class ClientGone(ServiceError):
    """The client closed its connection before its answer was ready."""


class ShuttingDown(ServiceError):
    """The server admits nothing more."""


class EngineFailed(ServiceError):
    """The engine raised on this sequence when it ran alone."""


class EngineDead(ServiceError):
    """The engine cannot run anything any more."""


class StartupError(Exception):
    """The server cannot start: a setting, a bundle, a device or a port. The message is one line."""


@dataclass(slots=True)  # not frozen, nor `Output`: that takes 0.7 us each, of the 7 that an engine process takes for a text
class Query:
    """One sequence, and what is asked of each head about it. The unit that is queued, batched and answered.

    Attributes:
        input_ids: [S] int32, with ``[CLS]`` and ``[SEP]``.
        token_type_ids: [S] int32.
        masks: positions in the sequence to predict.
        top_k: predictions a mask.
        targets: vocabulary ids whose logits are wanted, for every mask.
        pair: whether the next-sentence logits are wanted.
        embed: whether the embedding is wanted.
    """

    input_ids: Int32
    token_type_ids: Int32
    masks: Sequence[int] = ()
    top_k: int = 0
    targets: Sequence[int] = ()
    pair: bool = False
    embed: bool = False

    def __len__(self) -> int:
        return len(self.input_ids)


@dataclass(slots=True)
class Output:
    """What the engine computed for one sequence; a head that was not asked for is None.

    Attributes:
        top_logits: [m, k] float32, best first.
        top_ids: [m, k] int64.
        logsumexp: [m] float32, over the vocabulary.
        target_logits: [m, n] float32.
        pair_logits: [2] float32: is next, is not.
        embedding: [D] float32, not normalised.
        span_logits: [S, 2] float32: start, end. From a model with that head, always.
    """

    top_logits: Float32 | None = None
    top_ids: NDArray[np.int64] | None = None
    logsumexp: Float32 | None = None
    target_logits: Float32 | None = None
    pair_logits: Float32 | None = None
    embedding: Float32 | None = None
    span_logits: Float32 | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What the scheduler gives back for one request.

    Attributes:
        outputs: one a query, in the request's order.
        queue_s: from its admission until its first query ran.
        inference_s: from then until its last query was done.
    """

    outputs: list[Output]
    queue_s: float
    inference_s: float


@dataclass(frozen=True, slots=True)
class Timings:
    """Where a request's time went, in seconds."""

    tokenize_s: float
    queue_s: float
    inference_s: float


@dataclass(frozen=True, slots=True)
class BatchReport:
    """What one run of the engine was, for the metrics.

    Attributes:
        sequences: in the batch.
        tokens: real ones.
        padding: tokens computed for nothing.
        seconds: the run took.
    """

    sequences: int
    tokens: int
    padding: int
    seconds: float


class Device(StrEnum):
    """Where to run."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class AskedPrecision(StrEnum):
    """Which of a bundle's graphs to run."""

    AUTO = "auto"
    FP32 = "fp32"
    INT8 = "int8"
    FP16 = "fp16"


class Engine(Protocol):
    """The seam between scheduler and runtime. ``run`` is called by several threads at once.

    Attributes:
        device: where it runs, once that is settled.
        precision: of the graph that it runs: ``fp32``, ``int8`` or ``fp16``.
        reason: why that one, for the log.
        mixes_lengths: whether the queries of a batch may have unlike lengths.
    """

    device: Device
    precision: str
    reason: str
    mixes_lengths: bool

    def run(self, batch: Sequence[Query]) -> list[Output]:
        """Answer queries, of one length unless it mixes lengths, in order. Raises whatever the runtime raises."""
        ...

    def probe(self) -> None:
        """Run something known to be good; raises if even that fails or comes back wrong."""
        ...


class Queue(Protocol):
    """Where a model's requests wait for its engine, in this process or in another. Every future that it gives ends."""

    @property
    def queued_tokens(self) -> int:
        """Tokens that wait."""
        ...

    @property
    def dead(self) -> str | None:
        """Why there is no engine; None while there is one."""
        ...

    @property
    def draining(self) -> bool:
        """Whether new requests are refused."""
        ...

    def submit(self, queries: Sequence[Query], deadline: float, *, accepted: bool = False) -> Future[Answer]:
        """Admit all of a request's queries or none.

        Args:
            queries: at least one.
            deadline: `time.monotonic` time after which nothing of it is run any more.
            accepted: whether the request came before the drain, and is to be finished all the same.

        Returns:
            A future that ends in every case: with the answer, or with a `ServiceError`. Cancelling it drops what has
            not run yet.

        Raises:
            Overloaded: the queue is full.
            ShuttingDown: it drains.
            EngineDead: there is no engine.
        """
        ...

    def drain(self) -> None:
        """Admit nothing more; what was admitted runs on."""
        ...

    def close(self, timeout_s: float = 5.0) -> None:
        """Fail what is still pending with `ShuttingDown` and end its threads, in ``timeout_s`` or not at all."""
        ...


def first_line(error: Exception) -> str:
    """What an error says, in a line; its type, if it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
