"""The values that the parts of the service exchange, and the errors that they raise.

`http.errors` maps each error to its HTTP status:

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
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from model_store.batch import Encoding, HeadOutputs
from model_store.manifest import Precision

Float32 = NDArray[np.float32]

MAX_BATCH_VOCABULARY_ROWS = 128
"""A row costs the graph about 12 bytes per word of the vocabulary: 128 rows are 47 MB for BERT.

A single encoding may exceed the limit.
"""

MAX_PADDING_FACTOR = 4
"""Upper bound on padded cells per real token in a variable-length batch."""


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


@dataclass(frozen=True, slots=True)
class BatchResult:
    """What the scheduler returns for one request.

    Attributes:
        outputs: one per encoding, in the request's order.
        queue_s: seconds from admission until the first encoding ran.
        inference_s: seconds from then until the last encoding was done.
    """

    outputs: list[HeadOutputs]
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
        tokens: in the batch.
        seconds: the run took.
    """

    sequences: int
    tokens: int
    seconds: float


class Device(StrEnum):
    """Where to run."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


RequestedPrecision = Precision | Literal["auto"]
"""Which of a bundle's graphs to run; ``auto`` takes the fastest that the device supports."""


class Engine(Protocol):
    """The interface between scheduler and runtime. Several threads call ``run`` at once.

    Attributes:
        device: where the engine runs.
        precision: of the graph that the engine runs.
        reason: why the engine chose that graph, for the log.
        supports_varlen: whether the encodings of a batch may differ in length.
    """

    device: Device
    precision: Precision
    reason: str
    supports_varlen: bool

    def run(self, batch: Sequence[Encoding]) -> list[HeadOutputs]:
        """Return the results of each encoding, in order.

        Args:
            batch: of one length, unless the engine supports variable lengths.

        Raises:
            Exception: whatever the runtime raises.
        """
        ...

    def probe(self) -> None:
        """Run a golden batch; raise if the run fails or its outputs are wrong."""
        ...


class Queue(Protocol):
    """Where a model's requests wait for an engine, in this process or in another one.

    Every future that a queue returns ends.
    """

    @property
    def queued_tokens(self) -> int:
        """Tokens that wait."""
        ...

    @property
    def dead(self) -> str | None:
        """Why no engine runs; None while one runs."""
        ...

    @property
    def draining(self) -> bool:
        """Whether the queue refuses new requests."""
        ...

    def submit(
        self, encodings: Sequence[Encoding], deadline: float, *, accepted: bool = False
    ) -> Future[BatchResult]:
        """Admit all encodings of a request or none.

        Args:
            encodings: at least one.
            deadline: `time.monotonic` time after which nothing of the request runs any more.
            accepted: whether the request arrived before the drain; such a request is finished.

        Returns:
            A future that always ends: with a result, or with a `ServiceError`. Cancelling the
            future drops what has not run yet.

        Raises:
            Overloaded: the queue is full.
            ShuttingDown: the queue drains.
            EngineDead: no engine runs.
        """
        ...

    def drain(self) -> None:
        """Stop admitting requests; what was admitted still runs."""
        ...

    def close(self, timeout_s: float = 5.0) -> None:
        """Fail pending requests with `ShuttingDown` and end the threads within ``timeout_s``."""
        ...


def first_line(error: Exception) -> str:
    """What an error says, in a line; its type, if it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
