"""Sends spans of requests and batches to an OpenTelemetry collector, by OTLP over HTTP.

The span of a request continues the trace that its ``traceparent`` header names. Its children are
the parts of its time: tokenize, queue and inference, each summed over the rounds of the request.
The span of a batch has a link to each request whose encodings it ran: a batch has many requests,
and a request may be in several batches, so neither is the parent of the other.

Sources: W3C Trace Context; OpenTelemetry's semantic conventions for HTTP servers.
"""

import logging
import os
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from cloze.model_store.installation import DISTRIBUTION, install_command
from cloze.service.clock import CLOCK
from cloze.service.core import BatchReport, ServedRequest
from cloze.service.errors import StartupError
from cloze.service.settings import Settings

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import Span, Tracer

log = logging.getLogger("cloze")

_WARN_EVERY_S: Final = 60.0

OnBatch = Callable[[str, BatchReport], None]
"""Called after each batch, with the model's full name and the report."""


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """The span of a request in progress."""

    tracer: "Tracer"  # makes the spans of its parts
    span: "Span"
    parent: str  # the ``traceparent`` of the span, for the spans of other processes and batches

    def end(self, request: ServedRequest) -> None:
        """End the span, and add those of its parts."""
        from opentelemetry.trace import StatusCode, set_span_in_context

        span = self.span
        span.update_name(f"{request.method} {request.route}")
        span.set_attributes(
            {
                "http.request.method": request.method,
                "http.route": request.route,
                "http.response.status_code": request.status,
                "cloze.request_id": request.identity.decode(),
                "cloze.model": request.model,
                "cloze.client": request.client,
            }
        )
        if request.error:
            span.set_attribute("error.type", request.error)
        if request.status >= 500:
            span.set_status(StatusCode.ERROR)
        if request.texts:
            span.set_attributes({"cloze.texts": request.texts, "cloze.tokens": request.tokens})
            parts = (request.tokenize_s, request.queue_s, request.inference_s)
            began, context = request.began, set_span_in_context(span)
            for name, seconds in zip(("tokenize", "queue", "inference"), parts, strict=True):
                part = self.tracer.start_span(name, context, start_time=_epoch_ns(began))
                began += seconds
                part.end(_epoch_ns(began))
        span.end()


class Tracing:
    """Makes the spans of one process.

    Args:
        endpoint: base address of the collector, ``http://HOST:4318``.
        share: share of the requests to trace, in [0, 1]. A request that continues a trace of its
            caller has a span if the caller's span is sampled.
        untraced: paths of requests without spans.
    """

    def __init__(self, endpoint: str, share: float, untraced: Collection[str] = ()) -> None:
        address = urlsplit(endpoint)
        if address.scheme not in ("http", "https") or not address.hostname:
            raise StartupError(
                f"traces_endpoint is {ascii(endpoint)[:80]}; it must be like http://HOST:4318"
            )
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased, TraceIdRatioBased
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ModuleNotFoundError:
            raise StartupError(
                f"traces need further packages; run: {install_command('traces')}"
            ) from None
        resource = Resource.create(
            {
                "service.name": os.environ.get("OTEL_SERVICE_NAME", "cloze"),
                "service.version": version(DISTRIBUTION),
            }
        )
        self._processor = BatchSpanProcessor(_exporter(endpoint))

        def tracer(sampler: Any) -> Any:
            provider = TracerProvider(sampler, resource, shutdown_on_exit=False)
            provider.add_span_processor(self._processor)
            return provider.get_tracer("cloze", version(DISTRIBUTION))

        self._requests = tracer(ParentBased(TraceIdRatioBased(share)))
        self._batches = tracer(ALWAYS_ON)  # a batch has a span if one of its requests has
        self._propagator = TraceContextTextMapPropagator()
        self._untraced = frozenset(untraced)

    def begin(self, request: ServedRequest) -> RequestTrace | None:
        """Begin the span of a request; None if the request is not traced."""
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind, set_span_in_context

        if request.path in self._untraced:
            return None
        continued = {
            name.decode(): value.decode("latin-1")
            for name, value in request.headers
            if name in (b"traceparent", b"tracestate")
        }
        context = self._propagator.extract(continued, Context())
        span = self._requests.start_span(
            request.method, context, SpanKind.SERVER, start_time=_epoch_ns(request.arrived)
        )
        if not span.is_recording():
            return None
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, set_span_in_context(span))
        return RequestTrace(self._requests, span, carrier["traceparent"])

    def batch(self, model: str, report: BatchReport) -> None:
        """Add the span of a batch that has just ended. Any thread may call this."""
        from opentelemetry.context import Context
        from opentelemetry.trace import Link, get_current_span

        if not report.traces:
            return
        contexts = [
            self._propagator.extract({"traceparent": trace}, Context()) for trace in report.traces
        ]
        now = CLOCK.monotonic()
        span = self._batches.start_span(
            "batch",
            Context(),
            links=[Link(get_current_span(context).get_span_context()) for context in contexts],
            attributes={
                "cloze.model": model,
                "cloze.sequences": report.sequences,
                "cloze.tokens": report.tokens,
                "cloze.fill": str(report.fill),
            },
            start_time=_epoch_ns(now - report.seconds),
        )
        span.end(_epoch_ns(now))

    def close(self) -> None:
        """Send the last spans, for 3 s at most."""
        closer = threading.Thread(target=self._processor.shutdown, daemon=True)
        closer.start()
        closer.join(3.0)


def make_tracing(settings: Settings, untraced: Collection[str] = ()) -> Tracing | None:
    """Return what makes the spans of a process; None if the settings name no collector.

    Raises:
        StartupError: the address is malformed, or packages are missing.
    """
    if not settings.traces_endpoint:
        return None
    return Tracing(settings.traces_endpoint, settings.traces_share, untraced)


def with_spans(observe: OnBatch, tracing: Tracing | None) -> OnBatch:
    """Return a callback that observes a batch and adds the span of the batch."""
    if tracing is None:
        return observe

    def on_batch(model: str, report: BatchReport) -> None:
        observe(model, report)
        tracing.batch(model, report)

    return on_batch


def _exporter(endpoint: str) -> Any:
    """Return the exporter to a collector, which logs a line per minute while spans are lost."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import SpanExportResult

    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # it logs each failure

    class Reporting(OTLPSpanExporter):
        warned = -_WARN_EVERY_S

        def export(self, spans: "Sequence[ReadableSpan]") -> SpanExportResult:
            result = super().export(spans)
            now = CLOCK.monotonic()
            if result is not SpanExportResult.SUCCESS and now - self.warned >= _WARN_EVERY_S:
                self.warned = now
                log.warning("spans are lost: the collector at %s does not take them", endpoint)
            return result

    return Reporting(endpoint=endpoint.rstrip("/") + "/v1/traces", timeout=5.0)


def _epoch_ns(monotonic_s: float) -> int:
    return round((CLOCK.wall() - CLOCK.monotonic() + monotonic_s) * 1e9)
