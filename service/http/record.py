"""What is noted of one request, from the end of its headers to the end of its answer."""

from dataclasses import dataclass
from typing import Final

from cloze.service.batching.fair_queue import LineKey
from cloze.service.core import Rejection
from cloze.service.http.keys import Key
from cloze.service.http.memory_limit import Hold, Reader
from cloze.service.logs import RequestCost
from cloze.service.tracing import RequestTrace

RECORD: Final = "cloze.record"
"""Key of an ASGI scope: the `RequestRecord` of the request."""

Headers = list[tuple[bytes, bytes]]
"""The headers of a request, with names in lower case."""


@dataclass(slots=True, eq=False, kw_only=True)
class RequestRecord:
    """One request.

    The headers say the first part, and `Callers.record` fills it. The second part is noted later.

    Attributes:
        method, path: as they were sent; a path is never decoded, see `Paths`.
        route: the route of the path; None if there is none.
        headers: its headers.
        length: the bytes of its body that the headers announce; None if they announce none.
        identity: its id.
        key: its API key; None if it has none.
        client: the client, which has a fair share and limits: a key or an address; "" if unknown.
        stated_s: the time limit that it states, in seconds; None if it states none.
        limit_problem: what is wrong with the stated time limit; "" if nothing is.
        arrived: `time.monotonic` time at which its headers had arrived and its turn had come.

        connection: the connection that it came by; None if that is closed.
        unstarted: its line and its estimated tokens, from `Starts.admit` to the begin of its
            handler; None otherwise.
        is_returning: whether it comes back when a refusal said so.
        trace: its span; None if it is not traced.
        model: full name of the model; "" if none was chosen.
        cost: the cost of its result; None if it has none.
        error: the kind of error; "" for a result.
        rejection: why the server's own state let it fail; None if that did not.
        hold: the memory that its answer holds; None if it holds none.
    """

    method: str
    path: str
    route: str | None
    headers: Headers
    length: int | None
    identity: bytes
    key: Key | None
    client: str
    stated_s: float | None
    limit_problem: str
    arrived: float

    connection: Reader | None = None
    unstarted: tuple[LineKey, int] | None = None
    is_returning: bool = False
    trace: RequestTrace | None = None
    model: str = ""
    cost: RequestCost | None = None
    error: str = ""
    rejection: Rejection | None = None
    hold: Hold | None = None
