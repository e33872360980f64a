"""What Prometheus sees. The only module that speaks prometheus_client. Labels are bounded: known routes, served models."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Metric,
    ProcessCollector,
    generate_latest,
    multiprocess,
    values,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from service.core import BatchReport, Timings

CONTENT_TYPE = CONTENT_TYPE_LATEST

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_TOKENS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
_PARTS = ("tokenize", "queue", "inference")


_QUEUE, _QUEUE_TEXT = "cloze_queue_tokens", "Tokens that wait for a worker."


class Watched(Protocol):
    """What is read at each scrape."""

    @property
    def ready(self) -> bool:
        """Whether the server admits requests."""
        ...

    def queued_tokens(self) -> Mapping[str, int]:
        """Return the tokens that wait, by model."""
        ...


@dataclass(frozen=True, slots=True)
class _ModelSeries:
    """One model's series."""

    parts: tuple[Histogram, ...]
    truncated: Counter
    batch_sequences: Histogram
    batch_tokens: Histogram
    batch_seconds: Histogram
    tokens: Counter


class Metrics(Collector):
    """All series, there from the start so that rates have a zero to begin from.

    Of one process, or of all that share a folder (`share_folder`): then each writes its own numbers there, and whichever is
    scraped adds up those of all, also of the dead.

    Args:
        models: the served models' full names.
        shared: whether the numbers are those of all processes.
    """

    def __init__(self, models: Sequence[str], *, shared: bool = False) -> None:
        self.shared = shared
        self._own = CollectorRegistry()  # what is read at each scrape
        self._registry = CollectorRegistry()
        if shared:
            multiprocess.MultiProcessCollector(self._registry)  # type: ignore[no-untyped-call]
        else:
            ProcessCollector(registry=self._registry)
        self._series_registry = None if shared else self._registry
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
        self._batch_sequences = self._histogram(
            "cloze_batch_sequences", "Sequences in a batch.", ("model",), _SEQUENCES
        )
        self._batch_tokens = self._histogram(
            "cloze_batch_tokens", "Real tokens in a batch.", ("model",), _TOKENS
        )
        self._batch_seconds = self._histogram(
            "cloze_batch_duration_seconds", "Time of one run of the engine.", ("model",), _SECONDS
        )
        registry = self._series_registry
        self._tokens = Counter("cloze_tokens", "Real tokens run.", ("model",), registry=registry)
        self._truncated = Counter(
            "cloze_truncated_texts",
            "Texts cut to the model's limit.",
            ("model",),
            registry=registry,
        )
        self._queue: Gauge | None = None  # of one process: read at each scrape
        if shared:
            self._queue = Gauge(
                _QUEUE, _QUEUE_TEXT, ("model",), registry=registry, multiprocess_mode="livesum"
            )
        self._watched: Watched | None = None
        self._own.register(self)
        # A series is looked up by its labels once: that costs more than to observe.
        self._request = functools.cache(
            lambda route, model, status: self._requests.labels(route, model, str(status))
        )
        self._of = {model: self._series(model) for model in models}

    def create_request_series(
        self, route: str, models: Sequence[str], statuses: Sequence[int]
    ) -> None:
        """Create the series of a route before its first request.

        Args:
            route: the path.
            models: that answer on the route.
            statuses: that the route may answer.
        """
        for model in ("", *models):  # empty: the request failed before its model was known
            for status in statuses:
                self._request(route, model, status)

    def _series(self, model: str) -> _ModelSeries:
        return _ModelSeries(
            tuple(self._parts.labels(part, model) for part in _PARTS),
            self._truncated.labels(model),
            self._batch_sequences.labels(model),
            self._batch_tokens.labels(model),
            self._batch_seconds.labels(model),
            self._tokens.labels(model),
        )

    def observe_request(self, route: str, model: str, status: int, seconds: float) -> None:
        """A request was answered, with a result or an error."""
        self._request(route, model, status).observe(seconds)

    def observe_parts(self, model: str, timings: Timings, truncated: int) -> None:
        """A request got its result."""
        series = self._of[model]
        for part, seconds in zip(
            series.parts, (timings.tokenize_s, timings.queue_s, timings.inference_s), strict=True
        ):
            part.observe(seconds)
        if truncated:
            series.truncated.inc(truncated)

    def observe_batch(self, model: str, report: BatchReport) -> None:
        """The engine ran a batch. Called on a worker's thread."""
        series = self._of[model]
        series.batch_sequences.observe(report.sequences)
        series.batch_tokens.observe(report.tokens)
        series.batch_seconds.observe(report.seconds)
        series.tokens.inc(report.tokens)

    def watch(self, service: Watched) -> None:
        """Read these values at each scrape."""
        self._watched = service

    def collect(self) -> Iterable[Metric]:
        """Return what this process alone knows; `prometheus_client` calls it at each scrape."""
        watched = self._watched
        ready = watched is not None and watched.ready
        yield GaugeMetricFamily("cloze_ready", "1 while the server admits requests.", float(ready))
        if watched is not None and not self.shared:
            queues = GaugeMetricFamily(_QUEUE, _QUEUE_TEXT, labels=("model",))
            for model, tokens in watched.queued_tokens().items():
                queues.add_metric((model,), tokens)
            yield queues

    def observe_queue(self, model: str, tokens: int) -> None:
        """Record how many tokens wait, for the sum over all processes."""
        assert self._queue is not None
        self._queue.labels(model).set(tokens)

    def exposition(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self._registry) + generate_latest(self._own)

    def _histogram(
        self, name: str, text: str, labels: Sequence[str], buckets: Sequence[float]
    ) -> Histogram:
        return Histogram(name, text, labels, buckets=buckets, registry=self._series_registry)


def share_folder(folder: Path) -> dict[str, str]:
    """The environment of processes whose numbers are to lie in ``folder``; it must be theirs from their start."""
    return {"PROMETHEUS_MULTIPROC_DIR": str(folder)}


def write_as(name: str) -> None:
    """Before any `Metrics`: this process goes on with the numbers of those that had its name before, so that files stay few."""
    values.ValueClass = values.MultiProcessValue(lambda: name)  # type: ignore[no-untyped-call]


def forget_process(folder: Path, name: str) -> None:
    """A process ended: what it alone could say, like its queue, is over; what it counted stays."""
    multiprocess.mark_process_dead(name, str(folder))  # type: ignore[no-untyped-call]
