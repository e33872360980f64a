"""The metric families: names, labels and buckets.

The label values are bounded: known routes, served models, HTTP statuses, and the values of enums.
"""

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

from cloze.service.core import Rejection

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


def model_labels(reference: str) -> tuple[str, str]:
    """Return the labels of a model, ``NAME@VERSION``; of no model if the name is empty."""
    name, _, version = reference.partition("@")
    return name, version


class Families:
    """The metric families that the service observes. The labels of a model are the last ones.

    Args:
        registry: the registry of the families; None for families whose values lie in a folder that
            all processes of a server share.

    Attributes:
        of_models: the families that have series of models.
    """

    def __init__(self, registry: CollectorRegistry | None) -> None:
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry)
        self.requests = counter("cloze_requests", "Answered requests.", ("route", "status", *MODEL))
        self.durations = histogram(
            "cloze_request_duration_seconds",
            "Time from a request's first byte to its answer's last, of answers with status 200.",
            ("route", *MODEL),
            buckets=SECONDS,
        )
        rejected = counter(
            "cloze_rejected_requests",
            "Requests that the server did not answer because of its own state.",
            ("reason",),
        )
        self.rejected = {reason: rejected.labels(reason.value) for reason in Rejection}
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
        # Of processes that share a folder, a scrape adds up the gauges of those that live.
        self.queue_tokens = gauge(
            "cloze_queue_tokens",
            "Tokens that wait for a worker.",
            MODEL,
            multiprocess_mode="livesum",
        )
        self.backlog = gauge(
            "cloze_queue_backlog_seconds",
            "Time in which all that waits for a worker will have started.",
            MODEL,
            multiprocess_mode="livemax",
        )
        self.in_flight = gauge(
            "cloze_requests_in_flight",
            "Requests that have arrived and are not answered.",
            multiprocess_mode="livesum",
        )
        self.of_models: tuple[Counter | Gauge | Histogram, ...] = (
            *(self.requests, self.durations, self.parts, self.truncated, self.tokens),
            *(self.batches, self.batch_sequences, self.batch_tokens, self.batch_seconds),
            *(self.queue_tokens, self.backlog),
        )
