"""The values that the parts of the service exchange."""

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Literal, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from cloze.model_store.adapter import Adapter
from cloze.model_store.batch import Encoding, HeadOutputs
from cloze.model_store.manifest import Precision
from cloze.service.errors import Rejection

Float32 = NDArray[np.float32]

MAX_BATCH_VOCABULARY_ROWS = 128
"""Most rows per batch that a head multiplies into the vocabulary.

A row needs about 12 bytes of memory per word of the vocabulary: 128 rows need 47 MB for BERT. A
single encoding may exceed the limit.
"""

MAX_PADDING_FACTOR = 4
"""Upper bound on padded cells per real token in a variable-length batch."""


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


# Values that every request creates are tuples: a frozen dataclass takes three times as long.
class BatchResult(NamedTuple):
    """The results of a request's encodings, in their order."""

    outputs: list[HeadOutputs]
    queue_s: float  # seconds from admission until the first encoding ran
    inference_s: float  # seconds from the start of the first encoding to the end of the last


class BatchFill(StrEnum):
    """What kept further encodings out of a batch."""

    WAITING = "waiting"  # nothing else of a fitting length waited
    SHARE = "share"  # idle workers took the others
    TOKENS = "tokens"  # its tokens
    VOCABULARY = "vocabulary"  # its rows of the vocabulary
    PADDING = "padding"  # the padding of its longest sequence, or of its largest request to a head
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


class ReuseCounts(NamedTuple):
    """Numbers of sequences since the start; see `models.equal_work`."""

    hits: int = 0  # their results were kept
    misses: int = 0  # they were not
    shared: int = 0  # they had the results of equal ones, in their request or in flight
    evictions: int = 0  # their results made room for others
    bytes: int = 0  # memory of the results that are kept now


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


OTHER_ROUTE: Final = "other"
"""The route of requests to unknown paths, so that the number of metric labels is bounded."""

Headers = Sequence[tuple[bytes, bytes]]
"""The headers of a request, with names in lower case."""


@dataclass(slots=True, eq=False, kw_only=True)
class ServedRequest:
    """A request, from the end of its headers to the line of the access log.

    `Callers.record` fills the first part from the headers. The door and `RequestLimits` note the
    second part while the request is in progress, the pipeline the third, the `Recorder` the last.

    For example, a request for two texts of 9 tokens in all ends with ``texts=2, tokens=9``. If the
    engine fails, it ends with ``texts=0, tokens=0, error="EngineFailed"``.
    """

    method: str = "POST"
    path: str = ""  # as it was sent, never decoded; see `Paths`
    route: str = OTHER_ROUTE  # the path of its route, such as ``/v2/models/{model}/infer``
    headers: Headers = ()
    first: Mapping[bytes, bytes] = field(default_factory=dict)  # the first value of each header
    length: int | None = None  # the bytes of its body that the headers announce
    identity: bytes = b""
    key: Any = None  # its `http.keys.Key`; None: it has none
    client: str = ""  # ``key:NAME`` or an address, which has a share and limits; "": unknown
    stated_s: float | None = None  # the time limit that it states, in seconds
    is_bulk: bool = False  # whether it takes only what others leave
    terms_problem: str = ""  # what is wrong with the stated time limit or class; "" if nothing is
    arrived: float = 0.0  # `Clock.monotonic` time at which its headers had arrived
    limit_s: float = math.inf  # seconds, for each of its two phases; see `RequestLimits`
    deadline: float = math.inf  # `Clock.monotonic` time at which the current phase ends

    connection: Any = None  # the `http.routes.Connection` that it came by; None: unknown
    trace: Any = None  # the `RequestTrace` of its span; None if it is not traced
    scope: Any = None  # the `CancelScope` that ends its work early; None before and after its work
    received: int | None = 0  # bytes of its body that have arrived; None when the body is complete
    body: Any = None  # what its body holds of the memory of bodies; None: nothing
    answer: Any = None  # what its answer holds of the memory of answers; None: nothing
    turn: Any = None  # its turn to write a large answer; None: it has none
    body_bytes: int = 0  # the size of its body, decompressed
    vector_format: tuple[str, str] | None = None  # media type and dtype of its vectors; None: JSON
    expected_space: str | None = None  # the embedding space of its vectors; None: any

    model: str = ""  # full name of the model; "" if none was chosen
    texts: int = 0  # number of its texts, pairs or questions; 0: it has no result
    # Tokens of its sequences, special ones included, run or not. They are taken from the limit of
    # its key, and given back if it has no result.
    tokens: int = 0
    truncated: int = 0  # number of its texts that were cut
    warnings: Sequence[str] = ()  # messages for the client, in ASCII
    usage: Sequence[Any] | None = None  # the `TextUsage` of each input; None unless asked for
    embedding_space: str | None = None  # that of its vectors; None: none, or unknown
    is_large: bool = False  # whether writing its result may take milliseconds
    began: float = 0.0  # `Clock.monotonic` time at which the tokenization began
    tokenize_s: float = 0.0
    queue_s: float = 0.0  # seconds until a worker took the first encoding, summed over all rounds
    inference_s: float = 0.0  # seconds from then until the last output, summed over all rounds

    error: str = ""  # the kind of error; "" for a result
    rejection: Rejection | None = None  # why the server's own state let it fail
    status: int = 0  # the HTTP status of its answer
    ended: float = 0.0  # seconds since the epoch at its end
    seconds: float = 0.0  # seconds from its arrival to its end

    def release(self) -> None:
        """Let go of what only the way of the request needs; the access log keeps it for longer.

        If nobody reads the log, it keeps 20,000 requests. A client may send 64 KB of headers, and
        megabytes of words that are not in the vocabulary.
        """
        self.connection = self.trace = self.usage = self.expected_space = None
        self.path, self.headers, self.first, self.warnings = "", (), {}, ()
