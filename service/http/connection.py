"""ASGI middleware around every request."""

import time
from collections.abc import Awaitable, Callable, Iterable, Mapping

from fastapi import Request, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cloze.service.core import ServiceError
from cloze.service.http.answers import CONNECTION, Answers
from cloze.service.http.caller import request_id
from cloze.service.http.gate import ARRIVED, note_start
from cloze.service.http.paths import Paths
from cloze.service.http.watch import ANSWER_BYTES
from cloze.service.logs import AccessLog, AccessRecord
from cloze.service.metrics import Metrics
from cloze.service.tracing import Tracing

OTHER_ROUTE = "other"
"""Metric label of requests to unknown routes, so that the number of labels is bounded."""


class Connection:
    """ASGI middleware that assigns request ids, and records route, model, status and time.

    Args:
        app: the wrapped application.
        known_routes: routes, as in `Paths`, which become metric labels.
        respond: returns the response to an error that nothing else has handled.
        metrics: the metrics that record every answered request.
        access_log: the log of answered requests.
        answers: the unread answers of this process.
        tracing: makes the spans of requests; None: there are none.
    """

    def __init__(
        self,
        app: ASGIApp,
        known_routes: Iterable[str],
        respond: Callable[[Request, Exception], Awaitable[Response]],
        metrics: Metrics,
        access_log: AccessLog,
        answers: Answers,
        tracing: Tracing | None = None,
    ) -> None:
        self._app = app
        self._paths = Paths(known_routes)
        self._respond = respond
        self._metrics = metrics
        self._access_log = access_log
        self._answers = answers
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        note_start(scope)
        started = scope.get(ARRIVED) or time.monotonic()
        identity = request_id(scope)
        status = 0
        trace = self._tracing.begin(scope, started) if self._tracing is not None else None

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", identity)]
                if model := scope.get("cloze.model"):
                    message["headers"].append((b"x-model", model.encode("ascii")))
            await send(message)

        self._metrics.in_flight += 1
        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            # Starlette's own handler is outside of this one, so its answer would have no id.
            response = await self._respond(Request(scope), error)
            if not status:
                await response(scope, receive, send_with_id)
            raise  # so that uvicorn logs the traceback
        finally:
            status = status or 500
            self._metrics.in_flight -= 1
            if (hold := scope.pop(ANSWER_BYTES, None)) is not None:
                self._answers.sent(scope.get(CONNECTION), hold)
            route = self._paths.route(scope["path"]) or OTHER_ROUTE
            seconds = time.monotonic() - started
            model = scope.get("cloze.model", "")
            self._metrics.observe_request(route, model, status, seconds, identity)
            if trace is not None:
                trace.end(scope, route, status, identity)
            if (reason := scope.get("cloze.rejection")) is not None:
                self._metrics.observe_rejection(reason)
            self._access_log.add(
                AccessRecord(
                    time.time(),
                    identity.decode("ascii"),
                    scope["method"],
                    route,
                    model,
                    status,
                    seconds,
                    scope.get("cloze.cost"),
                    scope.get("cloze.error", ""),
                )
            )


class DirectRoutes:
    """ASGI middleware that calls the handlers of POST routes directly, without the router.

    Every other request goes to the router. `docs/decisions/0007` has the measured difference.

    Args:
        app: the wrapped application.
        handlers: the handlers of POST routes by path.
        respond: returns the response to a `ServiceError` of a handler.
    """

    def __init__(
        self,
        app: ASGIApp,
        handlers: Mapping[str, Callable[[Request], Awaitable[Response]]],
        respond: Callable[[Request, Exception], Awaitable[Response]],
    ) -> None:
        self._app, self._handlers, self._respond = app, handlers, respond

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        handler = (
            self._handlers.get(scope["path"])
            if scope["type"] == "http" and scope["method"] == "POST"
            else None
        )
        if handler is None:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        try:
            response = await handler(request)
        except ServiceError as error:
            response = await self._respond(request, error)
        await response(scope, receive, send)
