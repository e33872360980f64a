"""The metric families: names, labels and buckets.

The label values are bounded: known routes, served models, HTTP statuses, and the values of enums.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

from cloze.service.core import BatchFill, Rejection

# Two samples per series less; Prometheus does not need them.
disable_created_metrics()  # type: ignore[no-untyped-call]

SECONDS = (
    *(digit * 10**exponent for exponent in range(-4, 1) for digit in (1, 2, 5)),
    *(10, 20, 60),
)
"""Bounds of histograms of time, from 0.1 ms to 60 s, each about twice the one before."""

_SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
_PARTS = ("tokenize", "queue", "inference")
MODEL = ("model", "version")
"""Labels of a served model: its name, and its version in the store."""

RELOADS = ("cloze_reloads", "Reloads that were asked for, by result.", ("result",))
RELOAD_RESULTS = {True: "ok", False: "failed"}


_Family = TypeVar("_Family", Counter, Histogram)


def model_labels(reference: str) -> tuple[str, str]:
    """Return the labels of a model, ``NAME@VERSION``; of no model if the name is empty."""
    name, _, version = reference.partition("@")
    return name, version


@dataclass(frozen=True, slots=True)
class ModelSeries:
    """The series of one model.

    Attributes:
        parts: durations of tokenizing, of the queue and of inference.
        truncated: number of texts that were cut.
        batches: number of batches, by what limited them.
        batch_sequences: sequences per batch.
        batch_tokens: tokens per batch.
        batch_seconds: duration of a run.
        tokens: number of tokens that ran.
    """

    parts: tuple[Histogram, ...]
    truncated: Counter
    batches: dict[BatchFill, Counter]
    batch_sequences: Histogram
    batch_tokens: Histogram
    batch_seconds: Histogram
    tokens: Counter


class Families:
    """The metric families that the service observes.

    Args:
        registry: the registry of the families; None for families whose values lie in a folder that
            all processes of a server share.
    """

    def __init__(self, registry: CollectorRegistry | None) -> None:
        self._registry = registry
        self._of_models: list[Counter | Histogram] = []
        self.requests = self._counter(
            "cloze_requests", "Answered requests.", ("route", *MODEL, "status")
        )
        self.durations = self._histogram(
            "cloze_request_duration_seconds",
            "Time from a request's first byte to its answer's last, of answers with status 200.",
            ("route", *MODEL),
            SECONDS,
        )
        rejected = self._counter(
            "cloze_rejected_requests",
            "Requests that the server did not answer because of its own state.",
            ("reason",),
        )
        self.rejected = {reason: rejected.labels(reason.value) for reason in Rejection}
        reloads = self._counter(*RELOADS)
        self.reloads = {ok: reloads.labels(name) for ok, name in RELOAD_RESULTS.items()}
        self._parts = self._histogram(
            "cloze_request_part_duration_seconds",
            "Parts of a request's time: tokenize, queue, inference.",
            ("part", *MODEL),
            SECONDS,
        )
        self._batches = self._counter(
            "cloze_batches", "Batches, by what kept more out of them.", (*MODEL, "filled")
        )
        self._batch_sequences = self._histogram(
            "cloze_batch_sequences", "Sequences in a batch.", MODEL, _SEQUENCES
        )
        self._batch_tokens = self._histogram(
            "cloze_batch_tokens", "Real tokens in a batch.", MODEL, _TOKENS
        )
        self._batch_seconds = self._histogram(
            "cloze_batch_duration_seconds", "Time of one run of the engine.", MODEL, SECONDS
        )
        self._tokens = self._counter("cloze_tokens", "Real tokens run.", MODEL)
        self._truncated = self._counter(
            "cloze_truncated_texts", "Texts cut to the model's limit.", MODEL
        )
        # Of processes that share a folder, a scrape adds up the gauges of those that live.
        self.queue_tokens = self._gauge(
            "cloze_queue_tokens", "Tokens that wait for a worker.", MODEL
        )
        self.backlog = self._gauge(
            "cloze_queue_backlog_seconds",
            "Time in which all that waits for a worker will have started.",
            MODEL,
            "livemax",
        )
        self.in_flight = self._gauge(
            "cloze_requests_in_flight", "Requests that have arrived and are not answered."
        )

    def of_model(self, reference: str) -> ModelSeries:
        """Return the series of a model."""
        labels = model_labels(reference)
        return ModelSeries(
            tuple(self._parts.labels(part, *labels) for part in _PARTS),
            self._truncated.labels(*labels),
            {fill: self._batches.labels(*labels, fill.value) for fill in BatchFill},
            self._batch_sequences.labels(*labels),
            self._batch_tokens.labels(*labels),
            self._batch_seconds.labels(*labels),
            self._tokens.labels(*labels),
        )

    def forget_model(self, reference: str) -> None:
        """Remove the series of a model."""
        labels = dict(zip(MODEL, model_labels(reference), strict=True))
        for family in self._of_models:
            family.remove_by_labels(labels)

    def _histogram(
        self, name: str, text: str, labels: Sequence[str], buckets: Sequence[float]
    ) -> Histogram:
        family = Histogram(name, text, labels, buckets=buckets, registry=self._registry)
        return self._noted(family, labels)

    def _counter(self, name: str, text: str, labels: Sequence[str]) -> Counter:
        return self._noted(Counter(name, text, labels, registry=self._registry), labels)

    def _noted(self, family: _Family, labels: Sequence[str]) -> _Family:
        """Note whether a family has series of models, and return it."""
        if set(MODEL) <= set(labels):
            self._of_models.append(family)
        return family

    def _gauge(
        self,
        name: str,
        text: str,
        labels: Sequence[str] = (),
        mode: Literal["livesum", "livemax"] = "livesum",
    ) -> Gauge:
        return Gauge(name, text, labels, registry=self._registry, multiprocess_mode=mode)
