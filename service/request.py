"""A request, and what is noted of it while it is answered.

The module knows nothing of HTTP: bulk runs make requests too.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from cloze.service.core import Rejection

OTHER_ROUTE: Final = "other"
"""The route of requests to unknown paths, so that the number of metric labels is bounded."""

Headers = Sequence[tuple[bytes, bytes]]
"""The headers of a request, with names in lower case."""


@dataclass(slots=True, eq=False, kw_only=True)
class ServedRequest:
    """A request, from the end of its headers to the line of the access log.

    `Callers.record` fills the first part from the headers. The front end notes the second part
    while the request is in progress, the pipeline the third part, and the `Recorder` the last one.

    For example, a request for two texts of 9 tokens in all ends with ``texts=2, tokens=9``. If the
    engine fails, it ends with ``texts=0, tokens=0, error="EngineFailed"``.

    Attributes:
        path: as it was sent; a path is never decoded, see `Paths`.
        route: the path of its route, such as ``/v2/models/{model}/infer``.
        first: the first value of each header.
        length: the bytes of its body that the headers announce.
        key: its `http.keys.Key`; None: it has none.
        client: the client, which has a fair share and limits: ``key:NAME`` or an address; "" if
            it is unknown.
        stated_s: the time limit that it states, in seconds.
        is_bulk: whether it takes only what others leave.
        terms_problem: what is wrong with the stated time limit or class; "" if nothing is.
        arrived: `time.monotonic` time at which its headers had arrived and its turn had come.

        limit_s: the time limit of each of its two phases, in seconds; see `RequestLimits`.
        deadline: `time.monotonic` time at which the current phase ends.

        connection: the `http.routes.Connection` that it came by; None: unknown.
        trace: the `RequestTrace` of its span; None if it is not traced.
        scope: the `CancelScope` that ends its work early; None before and after its work.
        received: bytes of its body that have arrived; None when the body is complete.
        body: what its body holds of the memory of bodies; None: nothing.
        answer: what its answer holds of the memory of answers; None: nothing.
        turn: its turn to write a large answer; None: it has none.
        body_bytes: the size of its body, decompressed.
        vector_format: the media type and the dtype of vectors in its answer; None: JSON.
        expected_space: name of the embedding space that its vectors must have; None: any.

        model: full name of the model; "" if none was chosen.
        texts: number of its texts, pairs or questions; 0: it has no result.
        tokens: number of tokens that the engine runs, special tokens included. They are taken from
            the limit of its key, and given back if it has no result.
        truncated: number of its texts that were cut.
        warnings: messages for the client, in ASCII.
        usage: the `TextUsage` of each input; None unless the client asks.
        embedding_space: name of the space of the result's vectors; None: the result has none, or
            the bundle does not say enough.
        is_large: whether writing its result may take milliseconds.
        began: `time.monotonic` time at which the tokenization began.
        queue_s: seconds until a worker took the first encoding, summed over all rounds.
        inference_s: seconds from then until the last output, summed over all rounds.

        error: the kind of error; "" for a result.
        rejection: why the server's own state let it fail.
        status: the HTTP status of its answer.
        ended: seconds since the epoch at its end.
        seconds: seconds from its arrival to its end.
    """

    method: str = "POST"
    path: str = ""
    route: str = OTHER_ROUTE
    headers: Headers = ()
    first: Mapping[bytes, bytes] = field(default_factory=dict)
    length: int | None = None
    identity: bytes = b""
    key: Any = None
    client: str = ""
    stated_s: float | None = None
    is_bulk: bool = False
    terms_problem: str = ""
    arrived: float = 0.0
    limit_s: float = math.inf
    deadline: float = math.inf

    connection: Any = None
    trace: Any = None
    scope: Any = None
    received: int | None = 0
    body: Any = None
    answer: Any = None
    turn: Any = None
    body_bytes: int = 0
    vector_format: tuple[str, str] | None = None
    expected_space: str | None = None

    model: str = ""
    texts: int = 0
    tokens: int = 0
    truncated: int = 0
    warnings: Sequence[str] = ()
    usage: Sequence[Any] | None = None
    embedding_space: str | None = None
    is_large: bool = False
    began: float = 0.0
    tokenize_s: float = 0.0
    queue_s: float = 0.0
    inference_s: float = 0.0

    error: str = ""
    rejection: Rejection | None = None
    status: int = 0
    ended: float = 0.0
    seconds: float = 0.0
