"""`Client` and `AsyncClient`: send the requests of calls, with retries, and join their results."""

import asyncio
import inspect
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, get_args

import httpx

from cloze.client import calls, vector_calls
from cloze.client.arguments import option_checks
from cloze.client.call import Call
from cloze.client.errors import ServerUnreachable, error_of, retry_after_s

P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

_RETRIED = frozenset({429, 502, 503})
"""Statuses that a later request may not get. 504 is not one: the server has spent its time."""

_RETRIED_ERRORS = (
    httpx.NetworkError,
    httpx.RemoteProtocolError,
    httpx.ConnectTimeout,
    httpx.PoolTimeout,
)
"""Errors of a request that may not have arrived. One that waited for its answer has had its time,
and a wrong address stays wrong."""

_LONGEST_WAIT_S = 30.0
_FIRST_WAIT_S = 0.5


def _sync(
    call: Callable[P, Call[T]],
) -> Callable[Concatenate["Client", P], T]:
    """Return the method of `Client` for a call."""
    check = option_checks(call)

    @wraps(call)
    def method(self: "Client", /, *args: P.args, **kwargs: P.kwargs) -> T:
        check(kwargs)
        return self._run(call(*args, **kwargs))

    return _with_self(method)


def _async(
    call: Callable[P, Call[T]],
) -> Callable[Concatenate["AsyncClient", P], Awaitable[T]]:
    """Return the method of `AsyncClient` for a call."""
    check = option_checks(call)

    @wraps(call)
    async def method(self: "AsyncClient", /, *args: P.args, **kwargs: P.kwargs) -> T:
        check(kwargs)
        return await self._run(call(*args, **kwargs))

    return _with_self(method)


def _with_self(method: F) -> F:
    """Return the method; ``help`` shows the parameters of its call, and the result's type."""
    signature = inspect.signature(method)
    self = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    (result,) = get_args(signature.return_annotation)
    parameters = [self, *signature.parameters.values()]
    method.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=parameters, return_annotation=result
    )
    return method


class _Options:
    """The options that both clients share."""

    def __init__(self, *, batch_size: int, retries: int, progress: bool) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        if retries < 0:
            raise ValueError(f"retries must be at least 0, got {retries}")
        self.batch_size, self.retries, self.progress = batch_size, retries, progress

    def parts(self, call: Call[Any]) -> list[tuple[int, Sequence[Any]]]:
        """Return the inputs of each request, with the number of the first; at least one request."""
        size, inputs = self.batch_size, call.inputs
        return [(i, inputs[i : i + size]) for i in range(0, max(1, len(inputs)), size)]

    def shown(self, parts: Iterable[T], count: int) -> Iterable[T]:
        """Return the parts, with a progress bar if there are several."""
        if not self.progress or count == 1:
            return parts
        from tqdm import tqdm

        bar: Iterable[T] = tqdm(parts, total=count, unit="request", dynamic_ncols=True)
        return bar

    def waits_s(self) -> Iterator[float]:
        """Return the seconds to wait before each retry, unless the server names a time."""
        for retry in range(self.retries):
            longest = min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2**retry)
            yield longest * random.uniform(0.5, 1.0)


def _address(url: str) -> httpx.URL:
    """Return the address of a server.

    Raises:
        ValueError: it is none.
    """
    try:
        address = httpx.URL(url if "://" in url else f"http://{url}")
    except httpx.InvalidURL as error:
        raise ValueError(f"{url!r} is no address of a server: {error}") from None
    if address.scheme not in ("http", "https") or not address.host:
        raise ValueError(f"{url!r} is no address of a server, such as http://localhost:8000")
    return address


def _headers(headers: Mapping[str, str] | None, *, bulk: bool) -> dict[str, str]:
    """Return the headers of every request of a client."""
    return {**(headers or {}), **({"x-request-class": "bulk"} if bulk else {})}


def _wait_s(reply: httpx.Response | httpx.TransportError, default_s: float | None) -> float | None:
    """Return the seconds to wait before the request is sent again; None: not again."""
    if default_s is None:
        return None
    if isinstance(reply, httpx.Response):
        if reply.status_code not in _RETRIED:
            return None
        asked_s = retry_after_s(reply)
        if asked_s is not None:
            return asked_s if asked_s <= _LONGEST_WAIT_S else None
        return default_s
    return default_s if isinstance(reply, _RETRIED_ERRORS) else None


def _result(reply: httpx.Response | httpx.TransportError, url: httpx.URL) -> httpx.Response:
    """Return a successful response.

    Raises:
        ClientError: there is none.
    """
    if isinstance(reply, httpx.TransportError):
        reason = str(reply) or type(reply).__name__
        raise ServerUnreachable(f"no answer from {url}: {reason}") from reply
    if not reply.is_success:
        raise error_of(reply)
    return reply


def _prepared(call: Call[Any], part: Sequence[Any]) -> dict[str, Any]:
    """Return the keyword arguments of a request."""
    return {"json": call.body(part), "headers": {"accept": call.accept, **call.headers}}


class Client:
    """A client of a Cloze server. Several threads may use one.

    Every task method takes one input or a list, and returns one result per input. Its option
    ``model`` names a served model; without it, the default model of the task answers.

    Args:
        url: the server's address; ``http://`` is assumed if it has no scheme.
        timeout_s: longest wait for a connection, and for each part of an answer, in seconds.
        batch_size: most inputs per request; a longer list becomes several requests.
        retries: number of times that a request is sent again if the server is busy or unreachable.
            The wait is what the server's ``Retry-After`` says, if it is at most 30 s.
        progress: whether to show a progress bar for lists of several requests.
        headers: headers of every request, for example ``Authorization``.
        bulk: whether the requests take only what other requests leave of the server.
        transport: how requests are sent, for tests.

    Raises:
        ValueError: a number is out of its limits, or `url` is no address.
        TypeError: from every task method, if an argument is not what the method takes.
        ClientError: from every method, if there is no result.
    """

    def __init__(
        self,
        url: str = "http://localhost:8000",
        *,
        timeout_s: float = 60.0,
        batch_size: int = 256,
        retries: int = 3,
        progress: bool = False,
        headers: Mapping[str, str] | None = None,
        bulk: bool = False,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._options = _Options(batch_size=batch_size, retries=retries, progress=progress)
        self._http = httpx.Client(
            base_url=_address(url),
            timeout=timeout_s,
            headers=_headers(headers, bulk=bulk),
            transport=transport,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def info(self) -> dict[str, Any]:
        """Return the served models, the tasks' defaults and the limits."""
        info: dict[str, Any] = self._send("GET", "/info").json()
        return info

    fill_mask = _sync(calls.fill_mask)
    fill_mask_words = _sync(calls.fill_mask_words)
    fill_mask_jointly = _sync(calls.fill_mask_jointly)
    score = _sync(calls.score)
    embed = _sync(vector_calls.embed)
    embed_all = _sync(vector_calls.embed_all)
    embed_sparse = _sync(vector_calls.embed_sparse)
    similarity = _sync(vector_calls.similarity)
    nsp = _sync(calls.nsp)
    qa = _sync(calls.qa)
    classify = _sync(calls.classify)
    zero_shot_classification = _sync(calls.zero_shot_classification)
    token_classification = _sync(calls.token_classification)
    entities = _sync(calls.entities)
    redact = _sync(calls.redact)
    rerank = _sync(calls.rerank)

    def _run(self, call: Call[T]) -> T:
        parts = self._options.parts(call)
        results = [
            call.read(self._send("POST", call.route, **_prepared(call, part)), first)
            for first, part in self._options.shown(parts, len(parts))
        ]
        return call.join(results)

    def _send(self, method: str, path: str, **request: Any) -> httpx.Response:
        waits_s = self._options.waits_s()
        while True:
            reply: httpx.Response | httpx.TransportError
            try:
                reply = self._http.request(method, path, **request)
            except httpx.TransportError as error:
                reply = error
            wait_s = _wait_s(reply, next(waits_s, None))
            if wait_s is None:
                return _result(reply, self._http.base_url)
            time.sleep(wait_s)


class AsyncClient:
    """A client of a Cloze server whose methods are coroutines. One event loop may use it.

    The methods, arguments and errors are those of `Client`. The requests of a long list run at the
    same time, up to ``concurrency``.

    Args:
        concurrency: most requests of one call at the same time.

    Raises:
        ValueError: a number is out of its limits, or `url` is no address.
        TypeError: from every task method, if an argument is not what the method takes.
        ClientError: from every method, if there is no result.
    """

    def __init__(
        self,
        url: str = "http://localhost:8000",
        *,
        timeout_s: float = 60.0,
        batch_size: int = 256,
        retries: int = 3,
        concurrency: int = 4,
        progress: bool = False,
        headers: Mapping[str, str] | None = None,
        bulk: bool = False,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        if concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, got {concurrency}")
        self._options = _Options(batch_size=batch_size, retries=retries, progress=progress)
        self._concurrency = concurrency
        self._http = httpx.AsyncClient(
            base_url=_address(url),
            timeout=timeout_s,
            headers=_headers(headers, bulk=bulk),
            transport=transport,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def info(self) -> dict[str, Any]:
        """Return the served models, the tasks' defaults and the limits."""
        info: dict[str, Any] = (await self._send("GET", "/info")).json()
        return info

    fill_mask = _async(calls.fill_mask)
    fill_mask_words = _async(calls.fill_mask_words)
    fill_mask_jointly = _async(calls.fill_mask_jointly)
    score = _async(calls.score)
    embed = _async(vector_calls.embed)
    embed_all = _async(vector_calls.embed_all)
    embed_sparse = _async(vector_calls.embed_sparse)
    similarity = _async(vector_calls.similarity)
    nsp = _async(calls.nsp)
    qa = _async(calls.qa)
    classify = _async(calls.classify)
    zero_shot_classification = _async(calls.zero_shot_classification)
    token_classification = _async(calls.token_classification)
    entities = _async(calls.entities)
    redact = _async(calls.redact)
    rerank = _async(calls.rerank)

    async def _run(self, call: Call[T]) -> T:
        free = asyncio.Semaphore(self._concurrency)

        async def run_part(first: int, part: Sequence[Any]) -> Any:
            async with free:
                reply = await self._send("POST", call.route, **_prepared(call, part))
                return call.read(reply, first)

        tasks = [asyncio.create_task(run_part(*part)) for part in self._options.parts(call)]
        try:
            return call.join([await task for task in self._options.shown(tasks, len(tasks))])
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _send(self, method: str, path: str, **request: Any) -> httpx.Response:
        waits_s = self._options.waits_s()
        while True:
            reply: httpx.Response | httpx.TransportError
            try:
                reply = await self._http.request(method, path, **request)
            except httpx.TransportError as error:
                reply = error
            wait_s = _wait_s(reply, next(waits_s, None))
            if wait_s is None:
                return _result(reply, self._http.base_url)
            await asyncio.sleep(wait_s)
