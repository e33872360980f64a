"""What the service records, and what a scrape returns."""

import atexit
import functools
import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from prometheus_client import CollectorRegistry, Histogram, Metric, ProcessCollector, multiprocess
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from cloze.service.core import BatchReport, QueueState, Rejection, Timings
from cloze.service.metrics.families import MODEL, Families, ModelSeries, model_labels
from cloze.service.metrics.processes import used_by_all

_WRITE_EVERY_S = 0.1
"""Seconds between writes to a folder that processes share; another process may be scraped."""

_OK = 200

_MAX_UNWRITTEN = 4096
"""Observations that wait until their counters are written."""

_LABEL = "request_id"
_MAX_EXEMPLAR_CHARACTERS = 128
"""Most characters of the names and values of an exemplar's labels.

Source: OpenMetrics 1.0, section Exemplars. A scraper may reject an exposition with a longer one.
"""


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

    def keys_readable(self) -> bool | None:
        """Return whether the keys file can be read; None if there is none."""
        ...

    def certificate_end(self) -> float | None:
        """Return the end of the certificate that is served, as Unix time; None without TLS."""
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

    def observe_reload(self, *, ok: bool) -> None:
        """Record a reload of this process, or one that could not be served."""
        self._families.reloads[ok].inc()

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
        """Record the queue of a model in this process."""
        labels = model_labels(model)
        self._families.queue_tokens.labels(*labels).set(state.tokens)
        self._families.backlog.labels(*labels).set(state.backlog_s)

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
                "cloze_model_info", "1 per served model.", labels=(*MODEL, *names)
            )
            for reference, labels in infos:
                info.add_metric((*model_labels(reference), *labels.values()), 1)
            yield info
        if (readable := source.keys_readable()) is not None:
            text = "1 if the keys file can be read, 0 while the old keys stay."
            yield GaugeMetricFamily("cloze_keys_file_readable", text, float(readable))
        if (end := source.certificate_end()) is not None:
            text = "End of the certificate that is served, as Unix time."
            yield GaugeMetricFamily("cloze_certificate_end_timestamp_seconds", text, end)
        if self.shared:
            yield from used_by_all(os.getppid())

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """Return all metrics, and their content type.

        This takes milliseconds, so call it on a thread.

        Args:
            accept: the header ``Accept`` of the request, which chooses between Prometheus's text
                and OpenMetrics. Only the latter has exemplars, and only of a single process.
        """
        encode, content_type = choose_encoder(accept)
        with self._scraping:  # several at once would only wait for each other's interpreter
            self._write()
            first, second = (encode(registry) for registry in (self._registry, self._scraped))
        return first.removesuffix(_EOF) + second, content_type

    def _write_often(self) -> None:
        while True:
            time.sleep(_WRITE_EVERY_S)
            self._write()

    def _write(self) -> None:
        """Write what this process has observed; a queue of other processes is theirs to write."""
        self._observations.write()
        self._families.in_flight.set(self.in_flight)
        if self._source is not None and not self.shared:
            self._families.queue_tokens.clear()  # a model may be served no more
            self._families.backlog.clear()
            for model, state in self._source.queues().items():
                self.observe_queue(model, state)


_EOF = b"# EOF\n"
"""The last line of OpenMetrics."""


class Observations:
    """Observed values that are not yet in their histograms. Any thread may add values.

    `Histogram.observe` costs about 4 us, and a request has four values. To append a value costs
    0.2 us, and `write` adds many values at once.

    Args:
        exemplars: whether the histograms keep the id of a recent request per bucket. An id that
            OpenMetrics does not allow, because it is too long, is not kept.
    """

    def __init__(self, *, exemplars: bool = False) -> None:
        self._exemplars = exemplars
        # The methods of a deque are atomic.
        self._unwritten: deque[tuple[Histogram, float, bytes]] = deque()

    def add(self, series: Histogram, value: float, identity: bytes = b"") -> None:
        """Add an observed value, and the id of its request if it has one."""
        self._unwritten.append((series, value, identity))
        if len(self._unwritten) > _MAX_UNWRITTEN:
            self.write()

    def write(self) -> None:
        """Add all values to their histograms."""
        values_of = defaultdict(list)
        newest: dict[Histogram, tuple[float, bytes]] = {}
        try:
            while True:
                series, value, identity = self._unwritten.popleft()
                values_of[series].append(value)
                if identity and len(_LABEL) + len(identity) <= _MAX_EXEMPLAR_CHARACTERS:
                    newest[series] = value, identity
        except IndexError:
            pass  # empty
        for series, observed in values_of.items():
            observe_all(series, observed)
        if self._exemplars:
            for series, (value, identity) in newest.items():
                _set_exemplar(series, value, identity.decode("ascii"))


def observe_all(series: Histogram, observed: Sequence[float]) -> None:
    """Do what `Histogram.observe` does for each value; the class has no such method."""
    bounds = series._upper_bounds
    counts = np.bincount(np.searchsorted(bounds, observed), minlength=len(bounds))
    series._sum.inc(sum(observed))
    for bucket, count in zip(series._buckets, counts.tolist(), strict=True):
        if count:
            bucket.inc(count)


def _set_exemplar(series: Histogram, value: float, identity: str) -> None:
    """Do what `Histogram.observe` does with an exemplar."""
    bucket = int(np.searchsorted(series._upper_bounds, value))
    exemplar = Exemplar({_LABEL: identity}, value, time.time())
    series._buckets[bucket].set_exemplar(exemplar)
