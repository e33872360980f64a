"""The metrics of the service, in Prometheus's format; the only importer of prometheus_client.

Label values are bounded: they are known routes, served models and HTTP statuses.
"""

import atexit
import functools
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
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

from cloze.service.core import BatchReport, Timings

CONTENT_TYPE = CONTENT_TYPE_LATEST

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_TOKENS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
_PARTS = ("tokenize", "queue", "inference")

_MAX_UNWRITTEN = 4096
"""Observations that wait until their counters are written."""

_WRITE_EVERY_S = 0.1
"""Seconds between writes to a folder that processes share; another process may be scraped."""

_QUEUE_NAME = "cloze_queue_tokens"
_QUEUE_TEXT = "Tokens that wait for a worker."


class ScrapeSource(Protocol):
    """The source of the values that are read at each scrape."""

    @property
    def ready(self) -> bool:
        """Whether the server admits requests."""
        ...

    def queued_tokens(self) -> Mapping[str, int]:
        """Return the number of queued tokens per model."""
        ...


@dataclass(frozen=True, slots=True)
class _ModelSeries:
    """The series of one model."""

    parts: tuple[Histogram, ...]
    truncated: Counter
    batch_sequences: Histogram
    batch_tokens: Histogram
    batch_seconds: Histogram
    tokens: Counter


class _Families:
    """The metric families that the service observes.

    Args:
        registry: the registry of the families; None for families whose values lie in a folder that
            all processes of a server share.
    """

    def __init__(self, registry: CollectorRegistry | None) -> None:
        self._registry = registry
        self.requests = self._histogram(
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
        self._tokens = self._counter("cloze_tokens", "Real tokens run.")
        self._truncated = self._counter("cloze_truncated_texts", "Texts cut to the model's limit.")

    def of_model(self, model: str) -> _ModelSeries:
        """Return the series of a model."""
        return _ModelSeries(
            tuple(self._parts.labels(part, model) for part in _PARTS),
            self._truncated.labels(model),
            self._batch_sequences.labels(model),
            self._batch_tokens.labels(model),
            self._batch_seconds.labels(model),
            self._tokens.labels(model),
        )

    def _histogram(
        self, name: str, text: str, labels: Sequence[str], buckets: Sequence[float]
    ) -> Histogram:
        return Histogram(name, text, labels, buckets=buckets, registry=self._registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, ("model",), registry=self._registry)


class Observations:
    """Observed values that are not yet in their histograms. Any thread may add values.

    `Histogram.observe` costs about 4 us, and a request has four values. To append a value costs
    0.2 us, and `write` adds many values at once.
    """

    def __init__(self) -> None:
        self._unwritten: deque[tuple[Histogram, float]] = deque()  # its methods are atomic

    def add(self, series: Histogram, value: float) -> None:
        """Add an observed value."""
        self._unwritten.append((series, value))
        if len(self._unwritten) > _MAX_UNWRITTEN:
            self.write()

    def write(self) -> None:
        """Add all values to their histograms."""
        values_of = defaultdict(list)
        try:
            while True:
                series, value = self._unwritten.popleft()
                values_of[series].append(value)
        except IndexError:
            pass  # empty
        for series, observed in values_of.items():
            _observe_all(series, observed)


def _observe_all(series: Histogram, observed: Sequence[float]) -> None:
    """Do what `Histogram.observe` does for each value; the class has no such method."""
    bounds = series._upper_bounds
    counts = np.bincount(np.searchsorted(bounds, observed), minlength=len(bounds))
    series._sum.inc(sum(observed))
    for bucket, count in zip(series._buckets, counts.tolist(), strict=True):
        if count:
            bucket.inc(count)


class Metrics(Collector):
    """The metrics of one process, or of all processes that share a folder (`share_folder`).

    In a shared folder each process writes its own values. The process that is scraped returns the
    sum over all processes, including processes that have exited.

    Every series exists from the start, so that the rates of Prometheus start from zero.

    Args:
        models: the full names of the served models.
        shared: whether the values are those of all processes.
    """

    def __init__(self, models: Sequence[str], *, shared: bool = False) -> None:
        self.shared = shared
        self._registry = CollectorRegistry()
        if shared:
            multiprocess.MultiProcessCollector(self._registry)  # type: ignore[no-untyped-call]
        else:
            ProcessCollector(registry=self._registry)
        families = _Families(None if shared else self._registry)
        self._new_series = families.of_model
        self._models: dict[str, _ModelSeries] = {}
        self.add_models(models)
        # To look up a series by its labels costs more than to observe a value.
        self._request_series = functools.cache(
            lambda route, model, status: families.requests.labels(route, model, str(status))
        )
        self._queue_gauge = _queue_gauge() if shared else None
        self._observations = Observations()
        if shared:
            threading.Thread(target=self._write_often, name="metrics", daemon=True).start()
            atexit.register(self._observations.write)
        self._source: ScrapeSource | None = None
        self._scraped = CollectorRegistry()  # the values that `collect` reads at each scrape
        self._scraped.register(self)

    def add_models(self, models: Sequence[str]) -> None:
        """Create the series of models; those of models that are served no more stay.

        Args:
            models: their full names.
        """
        for model in models:
            if model not in self._models:
                self._models[model] = self._new_series(model)

    def create_request_series(
        self, route: str, models: Sequence[str], statuses: Sequence[int]
    ) -> None:
        """Create the series of a route before its first request.

        Args:
            route: the path.
            models: the full names of the models that serve the route.
            statuses: the HTTP statuses that start from zero; another one's series begins with the
                first such answer.
        """
        for model in models:
            for status in statuses:
                self._request_series(route, model, status)

    def observe_request(self, route: str, model: str, status: int, seconds: float) -> None:
        """Record an answered request: a result or an error."""
        self._observations.add(self._request_series(route, model, status), seconds)

    def observe_parts(self, model: str, timings: Timings, truncated: int) -> None:
        """Record the parts of a request that got its result, and its number of cut texts."""
        series, add = self._models[model], self._observations.add
        tokenize, queue, inference = series.parts
        add(tokenize, timings.tokenize_s)
        add(queue, timings.queue_s)
        add(inference, timings.inference_s)
        if truncated:
            series.truncated.inc(truncated)

    def observe_batch(self, model: str, report: BatchReport) -> None:
        """Record a batch of the engine. Called on a worker thread."""
        series, add = self._models[model], self._observations.add
        add(series.batch_sequences, report.sequences)
        add(series.batch_tokens, report.tokens)
        add(series.batch_seconds, report.seconds)
        series.tokens.inc(report.tokens)

    def observe_queue(self, model: str, tokens: int) -> None:
        """Record the number of queued tokens of this process, for the sum over all processes."""
        assert self._queue_gauge is not None
        self._queue_gauge.labels(model).set(tokens)

    def watch(self, source: ScrapeSource) -> None:
        """Read the values of `source` at each scrape."""
        self._source = source

    def collect(self) -> Iterable[Metric]:
        """Return the values of this process alone; `prometheus_client` calls it at each scrape."""
        source = self._source
        ready = source is not None and source.ready
        yield GaugeMetricFamily("cloze_ready", "1 while the server admits requests.", float(ready))
        if source is not None and not self.shared:
            queues = GaugeMetricFamily(_QUEUE_NAME, _QUEUE_TEXT, labels=("model",))
            for model, tokens in source.queued_tokens().items():
                queues.add_metric((model,), tokens)
            yield queues

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        self._observations.write()
        return generate_latest(self._registry) + generate_latest(self._scraped)

    def _write_often(self) -> None:
        while True:
            time.sleep(_WRITE_EVERY_S)
            self._observations.write()


def _queue_gauge() -> Gauge:
    """Return the gauge of queued tokens; a scrape returns the sum over the live processes."""
    return Gauge(_QUEUE_NAME, _QUEUE_TEXT, ("model",), registry=None, multiprocess_mode="livesum")


def share_folder(folder: Path) -> dict[str, str]:
    """Return the environment variables of processes that write their metrics to ``folder``.

    prometheus_client reads the variables when it is imported.
    """
    return {"PROMETHEUS_MULTIPROC_DIR": str(folder)}


def write_as(name: str) -> None:
    """Write the metrics of this process to the files of ``name``.

    A restarted process that has the name of its predecessor continues the predecessor's values, so
    that the number of files stays bounded. Call this function before `Metrics` is created.
    """
    values.ValueClass = values.MultiProcessValue(lambda: name)  # type: ignore[no-untyped-call]


def forget_process(folder: Path, name: str) -> None:
    """Remove the gauges of a process that has exited; its counters stay."""
    multiprocess.mark_process_dead(name, str(folder))  # type: ignore[no-untyped-call]
