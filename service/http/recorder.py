"""Records every request: its id and model in its headers, its metrics, its span, its log line."""

import time
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cloze.service.http.memory_limit import UnreadAnswers
from cloze.service.http.record import RECORD, RequestRecord
from cloze.service.logs import AccessLog, AccessRecord
from cloze.service.metrics import Metrics
from cloze.service.tracing import Tracing

OTHER_ROUTE = "other"
"""Metric label of requests to unknown routes, so that the number of labels is bounded."""

Respond = Callable[[Request, Exception], Awaitable[Response]]
"""(request, error) -> the response to the error."""


class Recorder:
    """Records the requests of one process.

    Args:
        metrics: the metrics of every answered request.
        access_log: the log of answered requests.
        tracing: makes the spans of requests; None: there are none.
        answers: the unread answers of this process.
        respond: returns the response to an error that nothing else has handled.
    """

    def __init__(
        self,
        metrics: Metrics,
        access_log: AccessLog,
        tracing: Tracing | None,
        answers: UnreadAnswers,
        respond: Respond,
    ) -> None:
        self._metrics, self._access_log, self._tracing = metrics, access_log, tracing
        self._answers, self._respond = answers, respond

    async def answer(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Let an application answer a request, and record the answer.

        Args:
            app: the application.
            scope: the request, with its record.
            receive: see ASGI.
            send: see ASGI.
        """
        record: RequestRecord = scope[RECORD]
        status = 0
        if self._tracing is not None:
            record.trace = self._tracing.begin(
                record.method, record.path, record.headers, record.arrived
            )

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", record.identity)]
                if record.model:
                    message["headers"].append((b"x-model", record.model.encode("ascii")))
            await send(message)

        self._metrics.in_flight += 1
        try:
            await app(scope, receive, send_with_id)
        except Exception as error:
            # Starlette's own handler is outside of this one, so its answer would have no id.
            response = await self._respond(Request(scope), error)
            if not status:
                await response(scope, receive, send_with_id)
            raise  # so that uvicorn logs the traceback
        finally:
            self._metrics.in_flight -= 1
            if record.hold is not None:
                self._answers.sent(record.connection, record.hold)
                record.hold = None
            self.add(record, status or 500)

    def add(self, record: RequestRecord, status: int) -> None:
        """Record a request that is answered.

        Args:
            record: the request.
            status: HTTP status of the answer.
        """
        answered = AccessRecord(
            time.time(),
            record.identity.decode("ascii"),
            record.method,
            record.route or OTHER_ROUTE,
            record.model,
            status,
            time.monotonic() - record.arrived,
            record.cost,
            record.error,
            record.rejection,
        )
        self._metrics.observe_request(answered)
        if record.trace is not None:
            record.trace.end(answered)
        self._access_log.add(answered)
