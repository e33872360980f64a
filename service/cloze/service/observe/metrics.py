"""The metric families, what the service records in them, and what a scrape returns.

The label values are bounded: known routes, served models, names of keys, HTTP statuses, and the
values of enums.
"""

import atexit
import functools
import itertools
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Metric,
    ProcessCollector,
    disable_created_metrics,
    multiprocess,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.samples import Exemplar

from cloze.model_store.installation import build
from cloze.service.batching.fair_queue import QueueState
from cloze.service.clock import CLOCK
from cloze.service.core import BatchFill, BatchReport, ReuseCounts, ServedRequest
from cloze.service.errors import Rejection
from cloze.service.machine import memory_state
from cloze.service.observe.exposition import encode
from cloze.service.observe.usage import used_by_all

# Two samples per series less; Prometheus does not need them.
disable_created_metrics()  # type: ignore[no-untyped-call]

SECONDS = (
    *(digit * 10**exponent for exponent in range(-4, 1) for digit in (1, 2, 5)),
    *(10, 20, 60),
)
"""Bounds of histograms of time, from 0.1 ms to 60 s, each about twice the one before."""

_SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)

MODEL = ("model", "version")
"""Labels of a served model: its name, and its version in the store."""

_WRITE_EVERY_S = 0.1
"""Seconds between writes to a folder that processes share; another process may be scraped."""

_PARTS = ("tokenize", "queue", "inference")

_LABEL = "request_id"


def model_labels(reference: str) -> tuple[str, str]:
    """Return the labels of a model, ``NAME@VERSION``; of no model if the name is empty."""
    name, _, version = reference.partition("@")
    return name, version


class Families:
    """The metric families that the service observes. The labels of a model are the last ones.

    Without a registry, the values lie in a folder that all processes of a server share.

    Attributes:
        of_models: the families that have series of models.
    """

    def __init__(self, registry: CollectorRegistry | None) -> None:
        counter = functools.partial(Counter, registry=registry)
        # Of processes that share a folder, a scrape adds up the gauges of those that live.
        gauge = functools.partial(Gauge, registry=registry, multiprocess_mode="livesum")
        histogram = functools.partial(Histogram, registry=registry)
        self.requests = counter("cloze_requests", "Answered requests.", ("route", "status", *MODEL))
        self.durations = histogram(
            "cloze_request_duration_seconds",
            "Time from a request's first byte to its answer's last, of answers with status 200 to "
            "requests that are not bulk.",
            ("route", *MODEL),
            buckets=SECONDS,
        )
        rejected = counter(
            "cloze_rejected_requests",
            "Requests that the server did not answer because of its own state.",
            ("reason",),
        )
        self.rejected = {reason: rejected.labels(reason.value) for reason in Rejection}
        classes = counter("cloze_request_classes", "Answered requests, by their class.", ("class",))
        self.classes = {True: classes.labels("bulk"), False: classes.labels("none")}
        self.key_requests = counter(
            "cloze_key_requests", "Answered requests, by the name of their key.", ("key", "status")
        )
        self.key_tokens = counter(
            "cloze_key_tokens", "Tokens of results, by the name of their key.", ("key",)
        )
        reloads = counter("cloze_reloads", "Reloads that were asked for, by result.", ("result",))
        self.reloads = {True: reloads.labels("ok"), False: reloads.labels("failed")}
        self.parts = histogram(
            "cloze_request_part_duration_seconds",
            "Parts of a request's time: tokenize, queue, inference.",
            ("part", *MODEL),
            buckets=SECONDS,
        )
        self.batches = counter(
            "cloze_batches", "Batches, by what kept more out of them.", ("filled", *MODEL)
        )
        self.batch_sequences = histogram(
            "cloze_batch_sequences", "Sequences in a batch.", MODEL, buckets=_SEQUENCES
        )
        self.batch_tokens = histogram(
            "cloze_batch_tokens", "Real tokens in a batch.", MODEL, buckets=_TOKENS
        )
        self.batch_seconds = histogram(
            "cloze_batch_duration_seconds", "Time of one run of the engine.", MODEL, buckets=SECONDS
        )
        self.tokens = counter("cloze_tokens", "Real tokens run.", MODEL)
        self.truncated = counter("cloze_truncated_texts", "Texts cut to the model's limit.", MODEL)
        self.queue_tokens = gauge(
            "cloze_queue_tokens", "Tokens that wait, not of bulk requests.", MODEL
        )
        self.backlog = gauge(
            "cloze_queue_backlog_seconds",
            "Time in which all that waits will have started, bulk requests apart.",
            MODEL,
            multiprocess_mode="livemax",
        )
        self.in_flight = gauge(
            "cloze_requests_in_flight",
            "Requests that have arrived and are not answered.",
        )
        self.reuse = (
            counter("cloze_cache_hits", "Sequences whose results were kept."),
            counter("cloze_cache_misses", "Sequences whose results were not kept."),
            counter("cloze_shared_sequences", "Sequences that shared the run of an equal one."),
            counter("cloze_cache_evictions", "Kept results that made room for others."),
        )
        self.cache_bytes = gauge("cloze_cache_bytes", "Memory of the results that are kept.")
        self.of_models: tuple[Counter | Gauge | Histogram, ...] = (
            *(self.requests, self.durations, self.parts, self.truncated, self.tokens),
            *(self.batches, self.batch_sequences, self.batch_tokens, self.batch_seconds),
            *(self.queue_tokens, self.backlog),
        )


class Metrics:
    """The metrics of one process, or of all processes that share a folder (`processes.FOLDER`).

    In a shared folder each process writes its own values. The process that is scraped returns the
    sum over all processes, including processes that have exited.

    The counters exist from the start, so that the rates of Prometheus start from zero. A histogram
    of a route has 21 lines, and so begins with its first request.

    Args:
        models: the full names of the served models; `add_models` adds further ones.

    Attributes:
        in_flight: requests of this process that have arrived and are not answered.
        unready_reason: returns why the server admits no request; None if it admits requests.
        model_infos: returns the labels of each served model that never change, by its full name;
            all have labels of the same names.
        names: the model in the metrics of each served model, where it has another name.
        queues: returns the state of each queue of this process, by the model's full name.
        reuse: returns what this process has not run again.
        keys_readable: returns whether the keys file can be read; None if there is none.
        certificate_end: returns the end of the served certificate, as Unix time; None without TLS.
    """

    def __init__(self, models: Sequence[str] = (), *, shared: bool = False) -> None:
        self._shared = shared
        self._build = build()  # which may run git
        self.in_flight = 0
        self._last_reload_ok = True
        self.unready_reason: Callable[[], object | None] = lambda: "the service has not begun"
        self.model_infos: Callable[[], Mapping[str, Mapping[str, str]]] = dict
        self.queues: Callable[[], Mapping[str, QueueState]] = dict
        self.reuse: Callable[[], ReuseCounts] = ReuseCounts
        self.keys_readable: Callable[[], bool | None] = lambda: None
        self.certificate_end: Callable[[], float | None] = lambda: None
        self._registry = CollectorRegistry()
        if shared:
            multiprocess.MultiProcessCollector(self._registry)  # type: ignore[no-untyped-call]
        else:
            ProcessCollector(registry=self._registry)
        self._families = Families(None if shared else self._registry)
        # To look up a series by its labels costs more than to observe a value.
        self._series = functools.cache(_series)
        self.names: Mapping[str, str] = {}
        self._models: set[str] = set()
        self.add_models(models)
        # The values that their series do not have yet: `Histogram.observe` takes 4 us, `inc` 1 us,
        # and a request has six values. To append takes 0.1 us, and is atomic.
        self._observed: defaultdict[Counter | Histogram, list[float]] = defaultdict(list)
        self._newest: dict[Histogram, tuple[float, str]] = {}  # (value, request id)
        self._scraping = threading.Lock()
        self._reused = ReuseCounts()  # what is written

    def begin(self) -> None:
        """Begin to write to the folder that processes share, if they share one."""
        if self._shared:
            self._write()  # so that the gauges exist from now on
            threading.Thread(target=self._write_often, name="metrics", daemon=True).start()
            atexit.register(self._write_observed)

    def add_models(self, models: Iterable[str]) -> None:
        """Create the series of models, by their full names."""
        families, series = self._families, self._series
        for model in models:
            self._models.add(model)
            for part in _PARTS:
                series(families.parts, model, part)
            for fill in BatchFill:
                series(families.batches, model, fill)
            sizes = (families.batch_sequences, families.batch_tokens, families.batch_seconds)
            for family in (*sizes, families.tokens, families.truncated):
                series(family, model)

    def forget_models(self, models: Iterable[str]) -> None:
        """Remove the series of models that are served no more, by their full names.

        Call this after the last request and the last batch of the models.
        """
        for model in models:
            self._models.discard(model)
            labels = dict(zip(MODEL, model_labels(model), strict=True))
            for family in self._families.of_models:
                family.remove_by_labels(labels)
            for series in list(self._observed):
                if series._labelvalues[-len(MODEL) :] == tuple(labels.values()):
                    del self._observed[series]
        self._series.cache_clear()

    def create_request_series(
        self, route: str, models: Sequence[str], statuses: Sequence[int]
    ) -> None:
        """Create the counters of a route before its first request.

        The series of another status begins with the first such answer.
        """
        for model in models:
            for status in statuses:
                self._series(self._families.requests, model, route, status)

    def observe_request(self, request: ServedRequest) -> None:
        """Record an answered request: a result or an error."""
        families, series, observed = self._families, self._series, self._observed
        model = self.names.get(request.model, request.model)
        requests = observed[series(families.requests, model, request.route, request.status)]
        if len(requests) >= 1024:  # which bounds the memory of what is not written yet
            self._write_observed()
        requests.append(1)
        observed[families.classes[request.is_bulk]].append(1)
        if request.key is not None:
            families.key_requests.labels(request.key.name, request.status).inc()
            if request.texts:
                families.key_tokens.labels(request.key.name).inc(request.tokens)
        if request.rejection is not None:
            families.rejected[request.rejection].inc()
        if request.status != 200:
            return
        if not request.is_bulk:  # which may take long
            duration = series(families.durations, model, request.route)
            observed[duration].append(request.seconds)
            # OpenMetrics 1.0, section Exemplars: a scraper may reject a longer one.
            if len(_LABEL) + len(request.identity) <= 128:
                self._newest[duration] = request.seconds, request.identity.decode()
        if request.tokens:  # the histograms of batches have the same requests
            parts = (request.tokenize_s, request.queue_s, request.inference_s)
            for part, seconds in zip(_PARTS, parts, strict=True):
                observed[series(families.parts, model, part)].append(seconds)
            if request.truncated:
                series(families.truncated, model).inc(request.truncated)

    def observe_reload(self, *, ok: bool) -> None:
        """Record a reload of this process, or one that could not be served."""
        self._families.reloads[ok].inc()
        self._last_reload_ok = ok

    def observe_batch(self, model: str, report: BatchReport) -> None:
        """Record a batch of the engine. Called on a worker thread."""
        if model not in self._models:
            return  # the batch hung until the end of its model
        families, series, observed = self._families, self._series, self._observed
        observed[series(families.batches, model, report.fill)].append(1)
        if not report.sequences:  # a canary
            return
        observed[series(families.batch_sequences, model)].append(report.sequences)
        observed[series(families.batch_tokens, model)].append(report.tokens)
        observed[series(families.batch_seconds, model)].append(report.seconds)
        observed[series(families.tokens, model)].append(report.tokens)

    def _states(self) -> Iterator[Metric]:
        """Yield the values that are read at each scrape, of this process alone."""
        used, limit = memory_state()
        for name, text, value in (
            ("cloze_ready", "1 while the server admits requests.", self.unready_reason() is None),
            (
                "cloze_keys_file_readable",
                "1 if the keys file can be read, 0 while the old keys stay.",
                self.keys_readable(),
            ),
            (
                "cloze_certificate_end_timestamp_seconds",
                "End of the certificate that is served, as Unix time.",
                self.certificate_end(),
            ),
            (
                "cloze_memory_used_bytes",
                "Memory of the container, or else of the machine, less what the kernel can drop.",
                used,
            ),
            (
                "cloze_memory_limit_bytes",
                "Most memory of the container or machine; with more, the kernel ends processes.",
                limit,
            ),
            (
                "cloze_last_reload_successful",
                "1 if the last reload was served, or there was none; 0 if it could not be served.",
                self._last_reload_ok,
            ),
        ):
            if value is not None:
                yield GaugeMetricFamily(name, text, float(value))
        text = "1, with the version of the server and its git revision."
        built = GaugeMetricFamily("cloze_build_info", text, labels=self._build._fields)
        built.add_metric(self._build, 1)
        yield built
        if infos := self.model_infos():
            labels = (*MODEL, *next(iter(infos.values())))
            info = GaugeMetricFamily("cloze_model_info", "1 per served model.", labels=labels)
            for reference, values in infos.items():
                info.add_metric((*model_labels(reference), *values.values()), 1)
            yield info
        if self._shared:
            yield from used_by_all(os.getppid())

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """Return all metrics, and their content type. This takes milliseconds: use a thread.

        `accept`, a header, chooses between Prometheus's text and OpenMetrics. Only the latter has
        exemplars, and only of a single process.
        """
        content_type = choose_encoder(accept)[1]
        with self._scraping:  # several at once would only wait for each other's interpreter
            self._write()
            metrics = itertools.chain(self._registry.collect(), self._states())
            return encode(metrics, openmetrics="openmetrics" in content_type), content_type

    def _write_often(self) -> None:
        while True:
            CLOCK.sleep(_WRITE_EVERY_S)
            with self._scraping:
                self._write()

    def _write(self) -> None:
        """Write what the families of this process do not have yet."""
        families, series = self._families, self._series
        self._write_observed()
        families.in_flight.set(self.in_flight)
        written, self._reused = self._reused, self.reuse()
        for family, count, before in zip(families.reuse, self._reused, written, strict=False):
            family.inc(count - before)
        families.cache_bytes.set(self._reused.bytes)
        for model, state in self.queues().items():
            series(families.queue_tokens, model).set(state.tokens)
            series(families.backlog, model).set(state.backlog_s)

    def _write_observed(self) -> None:
        """Add all observed values to their series, with the id of a recent request per bucket.

        Histograms of several processes keep no ids.
        """
        for series, values in list(self._observed.items()):
            observed: list[float] = []
            with suppress(IndexError):  # empty; another thread may add or take values meanwhile
                while True:
                    observed.append(values.pop())
            if isinstance(series, Counter):
                series.inc(sum(observed))
            elif observed:
                observe_all(series, observed)
        for series in () if self._shared else list(self._newest):
            value, identity = self._newest.pop(series, (0.0, ""))
            if identity:
                # As `Histogram.observe` does with an exemplar.
                bucket = int(np.searchsorted(series._upper_bounds, value))
                exemplar = Exemplar({_LABEL: identity}, value, CLOCK.wall())
                series._buckets[bucket].set_exemplar(exemplar)


def _series(family: Any, model: str, *labels: object) -> Any:
    return family.labels(*labels, *model_labels(model))


def observe_all(series: Histogram, observed: Sequence[float]) -> None:
    """Do what `Histogram.observe` does for each value; the class has no such method."""
    bounds = series._upper_bounds
    counts = np.bincount(np.searchsorted(bounds, observed), minlength=len(bounds))
    series._sum.inc(sum(observed))
    for bucket, count in zip(series._buckets, counts.tolist(), strict=True):
        if count:
            bucket.inc(count)
