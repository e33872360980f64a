"""What the service records, and what a scrape returns."""

import atexit
import functools
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from prometheus_client import (
    CollectorRegistry,
    Metric,
    ProcessCollector,
    multiprocess,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from cloze.service.core import BatchReport, Rejection, Timings
from cloze.service.metrics import families
from cloze.service.metrics.families import Families, ModelSeries, SharedGauges, model_labels
from cloze.service.metrics.observations import Observations

_WRITE_EVERY_S = 0.1
"""Seconds between writes to a folder that processes share; another process may be scraped."""

_OK = 200


class QueueState(NamedTuple):
    """The queue of a model: the tokens that wait, and the seconds until they start."""

    tokens: int
    backlog_s: float


class ModelInfo(NamedTuple):
    """A served model: its full name, and its labels that never change."""

    reference: str
    labels: Mapping[str, str]


class ScrapeSource(Protocol):
    """The source of the values that are read at each scrape."""

    def unready(self) -> object | None:
        """Return why the server admits no request; None if it admits requests."""
        ...

    def queues(self) -> Mapping[str, QueueState]:
        """Return the state of the queue of each model, by its full name."""
        ...

    def model_infos(self) -> Sequence[ModelInfo]:
        """Return the labels of each served model; all have labels of the same names."""
        ...


class Metrics(Collector):
    """The metrics of one process, or of all processes that share a folder (`share_folder`).

    In a shared folder each process writes its own values. The process that is scraped returns the
    sum over all processes, including processes that have exited.

    The counters exist from the start, so that the rates of Prometheus start from zero. A histogram
    of a route has 21 lines, and so begins with its first request.

    Args:
        models: the full names of the served models; `add_models` adds further ones.
        shared: whether the values are those of all processes.

    Attributes:
        shared: whether the values are those of all processes.
        in_flight: requests of this process that have arrived and are not answered.
    """

    def __init__(self, models: Sequence[str] = (), *, shared: bool = False) -> None:
        self.shared = shared
        self.in_flight = 0
        self._registry = CollectorRegistry()
        if shared:
            multiprocess.MultiProcessCollector(self._registry)  # type: ignore[no-untyped-call]
        else:
            ProcessCollector(registry=self._registry)
        self._families = Families(None if shared else self._registry)
        self._models: dict[str, ModelSeries] = {}
        self.add_models(models)
        # To look up a series by its labels costs more than to observe a value.
        self._requests = functools.cache(
            lambda route, model, status: self._families.requests.labels(
                route, *model_labels(model), str(status)
            )
        )
        self._durations = functools.cache(
            lambda route, model: self._families.durations.labels(route, *model_labels(model))
        )
        self._gauges = SharedGauges() if shared else None
        self._observations = Observations(exemplars=not shared)
        self._source: ScrapeSource | None = None
        self._scraped = CollectorRegistry()  # the values that `collect` reads at each scrape
        self._scraped.register(self)
        self._scraping = threading.Lock()

    def begin(self) -> None:
        """Begin to write to the folder that processes share, if they share one."""
        if self.shared:
            threading.Thread(target=self._write_often, name="metrics", daemon=True).start()
            atexit.register(self._observations.write)

    def add_models(self, models: Iterable[str]) -> None:
        """Create the series of models.

        Args:
            models: their full names.
        """
        for model in models:
            if model not in self._models:
                self._models[model] = self._families.of_model(model)

    def forget_models(self, models: Iterable[str]) -> None:
        """Remove the series of models that are served no more.

        Call this after the last request and the last batch of the models.

        Args:
            models: their full names.
        """
        for model in models:
            if self._models.pop(model, None) is not None:
                self._families.forget_model(model)
        self._requests.cache_clear()
        self._durations.cache_clear()

    def create_request_series(
        self, route: str, models: Sequence[str], statuses: Sequence[int]
    ) -> None:
        """Create the counters of a route before its first request.

        Args:
            route: the path.
            models: the full names of the models that serve the route.
            statuses: the HTTP statuses that start from zero; another one's series begins with the
                first such answer.
        """
        for model in models:
            for status in statuses:
                self._requests(route, model, status)

    def observe_request(
        self, route: str, model: str, status: int, seconds: float, identity: bytes = b""
    ) -> None:
        """Record an answered request: a result or an error, with the id of the request."""
        self._requests(route, model, status).inc()
        if status == _OK:
            self._observations.add(self._durations(route, model), seconds, identity)

    def observe_rejection(self, reason: Rejection) -> None:
        """Record a request that is not answered because of the server's own state."""
        self._families.rejected[reason].inc()

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
        series, add = self._models.get(model), self._observations.add
        if series is None:
            return  # the batch hung until the end of its model
        add(series.batch_sequences, report.sequences)
        add(series.batch_tokens, report.tokens)
        add(series.batch_seconds, report.seconds)
        series.tokens.inc(report.tokens)
        series.batches[report.fill].inc()

    def observe_queue(self, model: str, state: QueueState) -> None:
        """Record the queue of this process, for the figure of all processes."""
        assert self._gauges is not None
        labels = model_labels(model)
        self._gauges.queue_tokens.labels(*labels).set(state.tokens)
        self._gauges.backlog.labels(*labels).set(state.backlog_s)

    def watch(self, source: ScrapeSource) -> None:
        """Read the values of `source` at each scrape."""
        self._source = source

    def collect(self) -> Iterable[Metric]:
        """Return the values of this process alone; `prometheus_client` calls it at each scrape."""
        source = self._source
        ready = source is not None and source.unready() is None
        yield GaugeMetricFamily("cloze_ready", "1 while the server admits requests.", float(ready))
        if source is None:
            return
        if infos := source.model_infos():
            names = tuple(infos[0].labels)
            info = GaugeMetricFamily(
                "cloze_model_info", "1 per served model.", labels=(*families.MODEL, *names)
            )
            for reference, labels in infos:
                info.add_metric((*model_labels(reference), *labels.values()), 1)
            yield info
        if not self.shared:
            yield GaugeMetricFamily(families.IN_FLIGHT, families.IN_FLIGHT_TEXT, self.in_flight)
            yield from _queue_families(source.queues())

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """Return all metrics, and their content type.

        This takes milliseconds, so call it on a thread.

        Args:
            accept: the header ``Accept`` of the request, which chooses between Prometheus's text
                and OpenMetrics. Only the latter has exemplars, and only of a single process.
        """
        encode, content_type = choose_encoder(accept)
        with self._scraping:  # several at once would only wait for each other's interpreter
            self._observations.write()
            first, second = (encode(registry) for registry in (self._registry, self._scraped))
        return first.removesuffix(_EOF) + second, content_type

    def _write_often(self) -> None:
        while True:
            time.sleep(_WRITE_EVERY_S)
            self._observations.write()
            assert self._gauges is not None
            self._gauges.in_flight.set(self.in_flight)


_EOF = b"# EOF\n"
"""The last line of OpenMetrics."""


def _queue_families(queues: Mapping[str, QueueState]) -> Iterable[Metric]:
    tokens = GaugeMetricFamily(
        families.QUEUE_TOKENS, families.QUEUE_TOKENS_TEXT, labels=families.MODEL
    )
    waits = GaugeMetricFamily(families.BACKLOG, families.BACKLOG_TEXT, labels=families.MODEL)
    for reference, state in queues.items():
        tokens.add_metric(model_labels(reference), state.tokens)
        waits.add_metric(model_labels(reference), state.backlog_s)
    yield tokens
    yield waits
