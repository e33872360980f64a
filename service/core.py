"""The values that the parts of the service exchange, and the errors that the parts raise.

Each `ServiceError` ends one request, and `http.errors` maps it to a status. A `RequestError` is
the client's: a retry of the same request fails again. `StartupError` ends the server.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Literal, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from cloze.model_store.adapter import Adapter
from cloze.model_store.batch import Encoding, HeadOutputs
from cloze.model_store.manifest import Precision

Float32 = NDArray[np.float32]

MAX_BATCH_VOCABULARY_ROWS = 128
"""Most rows per batch that a head multiplies into the vocabulary.

A row needs about 12 bytes of memory per word of the vocabulary: 128 rows need 47 MB for BERT. A
single encoding may exceed the limit.
"""

MAX_PADDING_FACTOR = 4
"""Upper bound on padded cells per real token in a variable-length batch."""


class ServiceError(Exception):
    """The reason why a request gets no result. The client receives the message."""


class Location(tuple[str | int, ...]):
    """A place in a request: names of fields, and numbers, like ``inputs[3].question``."""

    __slots__ = ()

    def __str__(self) -> str:
        shown = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in self)
        return "".join(shown).removeprefix(".")

    def below(self, *parts: str | int) -> "Location":
        """Return a place within this one."""
        return Location((*self, *parts))


def quoted(text: str) -> str:
    """Return the beginning of a client's text for a message: in quotes and ASCII."""
    return ascii(text[:80])[:80]


class RequestError(ServiceError):
    """The request is wrong; a retry of the same request fails again.

    Attributes:
        at: the place of the problem, with which the message begins; None: there is no single one.
        lead: words of the message before the place.
    """

    def __init__(self, problem: str, at: Location | None = None, lead: str = "") -> None:
        super().__init__(f"{lead}{at} {problem}" if at else problem)
        self.problem, self.at, self.lead = problem, at, lead

    def moved(self, at: Location | None) -> Self:
        """Return the error with another place."""
        return type(self)(self.problem, at, self.lead)


class MalformedRequest(RequestError):
    """The body is not JSON."""


class SlowRequest(RequestError):
    """The body did not arrive within the request timeout."""


class InvalidRequest(RequestError):
    """A value of the request is malformed or out of its limits."""


class EmptyRequest(RequestError):
    """The request has no text, or one of its texts is empty."""


class RequestTooLarge(RequestError):
    """The body has more bytes than the limit."""


class UnsupportedEncoding(RequestError):
    """The body has a content encoding that the server does not read."""


class Unauthorized(RequestError):
    """The request has no valid API key."""


class Forbidden(RequestError):
    """The API key lacks the scope, or the request is for another host."""


class UnknownModel(RequestError):
    """The request names a model that is not served."""


class WrongTask(RequestError):
    """The model has no head for the task."""


class OtherEmbeddingSpace(RequestError):
    """The vectors would not be in the space that the request expects."""


class ReloadRefused(RequestError):
    """The server cannot serve what the store, the keys or the certificate now hold."""


class Rejection(StrEnum):
    """Why the state of the server keeps a request from its result."""

    WAIT = "wait"  # it would wait for too long
    DEADLINE = "deadline"  # it would end after its time limit
    QUEUE_FULL = "queue_full"  # the queue would hold too many tokens
    MEMORY = "memory"  # large bodies hold the memory
    KEY_LIMIT = "key_limit"  # its key has sent too many
    TIMEOUT = "timeout"  # it was not answered in its time
    STATED_LIMIT = "stated_limit"  # nor in a time limit of its own, below the server's
    SHUTTING_DOWN = "shutting_down"
    ENGINE_DEAD = "engine_dead"


class Overloaded(ServiceError):
    """The request would wait for too long, or the queue is full.

    Attributes:
        retry_after_s: seconds until the server is likely to admit the request.
        each_s: seconds in which the queue works off one such request.
    """

    def __init__(
        self,
        message: str,
        retry_after_s: float,
        reason: Rejection = Rejection.WAIT,
        each_s: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.reason = reason
        self.each_s = each_s


class DeadlineExceeded(ServiceError):
    """The request timed out."""


class ClientGone(ServiceError):
    """The client closed its connection before the answer was ready."""


class ShuttingDown(ServiceError):
    """The server is draining and admits no new requests."""


class EngineFailed(ServiceError):
    """The engine raised an exception on an encoding that ran alone."""


class AdapterUnavailable(ServiceError):
    """The files of an adapter are gone, or have changed since the last reload."""


class EngineDead(ServiceError):
    """No engine runs: it hangs, fails its golden outputs, or its process has exited."""


@dataclass(frozen=True, slots=True)
class Changes:
    """What a reload changed: full names of models.

    A bundle that was replaced under the same version was added and removed.

    Attributes:
        reasons: why a model was kept although the store has a newer version.
        refused: why an adapter was left out, or is served as before, by its folder.
    """

    added: list[str]
    removed: list[str]
    kept: list[str]
    reasons: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    @classmethod
    def between(
        cls,
        before: Mapping[str, object],
        after: Mapping[str, object],
        reasons: Mapping[str, str],
        refused: Mapping[str, str] | None = None,
    ) -> Self:
        """Return how what is served differs, by full name; what is equal stays as it was."""
        kept = {name: model for name, model in after.items() if before.get(name) == model}
        return cls(
            added=[name for name in after if name not in kept],
            removed=[name for name in before if name not in kept],
            kept=[*kept],
            reasons={name: reason for name, reason in reasons.items() if name in kept},
            refused=dict(refused or {}),
        )

    def __str__(self) -> str:
        kept = [
            f"{name} ({self.reasons[name]})" if name in self.reasons else name for name in self.kept
        ]
        lists = {"added": self.added, "removed": self.removed, "kept": kept}
        lists["refused"] = list(self.refused)
        return "; ".join(f"{name} {', '.join(models)}" for name, models in lists.items() if models)


BUSY: Final = "another reload is under way, or its old models still answer requests; ask again"
"""Why a reload that is asked for by a request is refused at once; a signal waits."""

NEEDS_ROLL: Final = (
    "nothing was reloaded: with front ends, a reload of models needs a roll of the replicas, or a "
    "restart; keys and certificates are read again when their files change"
)


class StartupError(Exception):
    """The server cannot start because of a setting, a bundle, a device or a port; one line."""


# Values that every request creates are tuples: a frozen dataclass takes three times as long.
class BatchResult(NamedTuple):
    """The results of a request's encodings, in their order.

    Attributes:
        queue_s: seconds from admission until the first encoding ran.
        inference_s: seconds from the start of the first encoding to the end of the last.
    """

    outputs: list[HeadOutputs]
    queue_s: float
    inference_s: float


class BatchFill(StrEnum):
    """What kept further encodings out of a batch."""

    WAITING = "waiting"  # nothing else of a fitting length waited
    SHARE = "share"  # idle workers took the others
    TOKENS = "tokens"  # its tokens
    VOCABULARY = "vocabulary"  # its rows of the vocabulary
    PADDING = "padding"  # the padding that its longest sequence would cause
    CANARY = "canary"  # it is a golden batch, which ran because nothing else did
    ERROR = "error"  # it is a half of a batch on which the engine raised


@dataclass(frozen=True, slots=True)
class BatchReport:
    """The size and the duration of one batch, and the ``traceparent`` of each traced request."""

    sequences: int
    tokens: int
    seconds: float
    fill: BatchFill
    traces: Sequence[str] = ()


LogFormat = Literal["text", "json"]


class Device(StrEnum):
    """The device that an engine is asked to run on."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


RequestedPrecision = Precision | Literal["auto"]
"""The precision of the graph to run; ``auto`` selects the fastest that the device supports."""


class AdapterRegistry(Protocol):
    """The adapters that an engine can load."""

    def add(self, key: str, read: Callable[[], Adapter]) -> None:
        """Make an adapter known, without reading it."""

    def forget(self, key: str) -> None:
        """Free an adapter that no request asks for any more."""

    def hold(self, key: str) -> Future[None]:
        """Load an adapter, and keep it until `release`; the result ends when it is loaded.

        The exception of the result is `AdapterUnavailable` if the adapter cannot be read.
        """

    def release(self, key: str) -> None:
        """End a `hold`."""


class Engine(Protocol):
    """The interface between scheduler and runtime. Several threads call ``run`` at once.

    Attributes:
        reason: why the engine chose that graph, for the log.
        supports_varlen: whether the encodings of a batch may differ in length.
    """

    device: Device
    precision: Precision
    reason: str
    supports_varlen: bool

    @property
    def adapters(self) -> AdapterRegistry | None:
        """The adapters of the engine; None: it takes none."""

    def run(self, batch: Sequence[Encoding], *, alone: bool = False) -> list[HeadOutputs]:
        """Return the results of each encoding, in order.

        Args:
            batch: encodings of one length, unless the engine supports variable lengths.
            alone: whether no other batch of this process runs or waits, so that this one may use
                all cores.

        Raises:
            Exception: any error of the runtime.
        """

    def probe(self) -> None:
        """Run a golden batch.

        Raises:
            Exception: the run fails, or an output is outside the tolerance.
        """
