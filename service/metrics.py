"""What Prometheus sees. The only module that speaks prometheus_client. Labels are bounded: known routes, served models."""

from collections.abc import Callable, Sequence

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

from service.core import BatchReport, Timings

CONTENT_TYPE = CONTENT_TYPE_LATEST

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_TOKENS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
_PARTS = ("tokenize", "queue", "inference")


class Metrics:
    """All series of one process, there from the start so that rates have a zero to begin from.

    Args:
        routes: (path, the models that answer it) of the task routes; the models may be none.
        models: the served models' full names.
        statuses: the HTTP statuses a route may answer.
    """

    def __init__(self, routes: Sequence[tuple[str, Sequence[str]]], models: Sequence[str], statuses: Sequence[int]) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._requests = self._histogram(
            "cloze_request_duration_seconds",
            "Time from a request's first byte to its answer's last, by route, model and status.",
            ("route", "model", "status"),
            _SECONDS,
        )
        self._parts = self._histogram(
            "cloze_request_part_duration_seconds",
            "Parts of a request's time: tokenize, queue, inference.",
            ("part", "model"),
            _SECONDS,
        )
        self._batch_sequences = self._histogram("cloze_batch_sequences", "Sequences in a batch.", ("model",), _SEQUENCES)
        self._batch_tokens = self._histogram("cloze_batch_tokens", "Real tokens in a batch.", ("model",), _TOKENS)
        self._batch_seconds = self._histogram(
            "cloze_batch_duration_seconds", "Time of one run of the engine.", ("model",), _SECONDS
        )
        self._tokens = Counter("cloze_tokens", "Real tokens run.", ("model",), registry=self._registry)
        self._padding = Counter("cloze_padding_tokens", "Tokens computed for nothing.", ("model",), registry=self._registry)
        self._truncated = Counter("cloze_truncated_texts", "Texts cut to the model's limit.", ("model",), registry=self._registry)
        self._queue = Gauge("cloze_queue_tokens", "Tokens that wait for a worker.", ("model",), registry=self._registry)
        self._ready = Gauge("cloze_ready", "1 while the server admits requests.", registry=self._registry)
        for model in models:
            for part in _PARTS:
                self._parts.labels(part, model)
            for series in (
                self._batch_sequences,
                self._batch_tokens,
                self._batch_seconds,
                self._tokens,
                self._padding,
                self._truncated,
            ):
                series.labels(model)
        for route, answering in routes:
            for model in ("", *answering):  # none, where the request failed before it was known
                for status in statuses:
                    self._requests.labels(route, model, str(status))

    def observe_request(self, route: str, model: str, status: int, seconds: float) -> None:
        """A request was answered, with a result or an error."""
        self._requests.labels(route, model, str(status)).observe(seconds)

    def observe_parts(self, model: str, timings: Timings, truncated: int) -> None:
        """A request got its result."""
        for part, seconds in zip(_PARTS, (timings.tokenize_s, timings.queue_s, timings.inference_s), strict=True):
            self._parts.labels(part, model).observe(seconds)
        self._truncated.labels(model).inc(truncated)

    def observe_batch(self, model: str, report: BatchReport) -> None:
        """The engine ran a batch. Called on a worker's thread."""
        self._batch_sequences.labels(model).observe(report.sequences)
        self._batch_tokens.labels(model).observe(report.tokens)
        self._batch_seconds.labels(model).observe(report.seconds)
        self._tokens.labels(model).inc(report.tokens)
        self._padding.labels(model).inc(report.padding)

    def watch(self, *, queues: dict[str, Callable[[], float]], ready: Callable[[], bool]) -> None:
        """Say where the values lie that are read at each scrape.

        Args:
            queues: model -> its queue's tokens.
            ready: whether the server admits requests.
        """
        for model, tokens in queues.items():
            self._queue.labels(model).set_function(tokens)
        self._ready.set_function(ready)

    def exposition(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self._registry)

    def _histogram(self, name: str, text: str, labels: Sequence[str], buckets: Sequence[float]) -> Histogram:
        return Histogram(name, text, labels, buckets=buckets, registry=self._registry)
