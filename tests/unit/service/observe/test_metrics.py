"""What is recorded of requests and batches, and the series of models that come and go."""

import math
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import choose_encoder

from cloze.service.batching.fair_queue import QueueState
from cloze.service.core import BatchFill, BatchReport, ServedRequest
from cloze.service.errors import Rejection
from cloze.service.observe.exposition import encode
from cloze.service.observe.metrics import Metrics


def answered(status: int = 200, **fields: Any) -> ServedRequest:
    noted: dict[str, Any] = {
        "model": "m@1", "route": "/embed", "texts": 1, "tokens": 7,
        "tokenize_s": 0.25, "queue_s": 0.5, "inference_s": 0.75,
    }  # fmt: skip
    return ServedRequest(identity=b"id", status=status, seconds=2.0, **(noted | fields))


def values(metrics: Metrics) -> dict[str, float]:
    """Return the counts that are not zero, by series; without the buckets of histograms."""
    lines = metrics.exposition("")[0].decode().splitlines()
    others = ("cloze_build_info", "cloze_memory_")  # of the machine
    ours = [line for line in lines if line.startswith("cloze_") and not line.startswith(others)]
    pairs = [line.rsplit(" ", 1) for line in ours]
    return {
        name.removeprefix("cloze_").replace('model="m",', "").replace(',version="1"', ""): number
        for name, value in pairs
        if (number := float(value)) and "_bucket" not in name and "last_reload" not in name
    }


def test_a_result_is_recorded_with_the_parts_of_its_time() -> None:
    metrics = Metrics(["m@1"])
    metrics.observe_request(answered(truncated=3))
    assert values(metrics) == {
        'requests_total{route="/embed",status="200"}': 1,
        'request_classes_total{class="none"}': 1,
        'request_duration_seconds_count{route="/embed"}': 1,
        'request_duration_seconds_sum{route="/embed"}': 2.0,
        'request_part_duration_seconds_count{part="tokenize"}': 1,
        'request_part_duration_seconds_sum{part="tokenize"}': 0.25,
        'request_part_duration_seconds_count{part="queue"}': 1,
        'request_part_duration_seconds_sum{part="queue"}': 0.5,
        'request_part_duration_seconds_count{part="inference"}': 1,
        'request_part_duration_seconds_sum{part="inference"}': 0.75,
        'truncated_texts_total{version="1"}': 3,
    }


def test_what_waits_for_a_scrape_stays_bounded() -> None:
    metrics = Metrics(["m@1"])
    report = BatchReport(2, 30, 0.5, BatchFill.TOKENS)
    most = 0
    for number in range(10_000):
        metrics.observe_request(answered(503 if number > 1500 else 200))
        metrics.observe_batch("m@1", report)
        most = max(most, sum(map(len, metrics._observed.values())))
    assert 10_000 < most < 16_000
    counted = values(metrics)
    assert counted['request_duration_seconds_count{route="/embed"}'] == 1501
    assert counted['request_part_duration_seconds_sum{part="queue"}'] == 1501 * 0.5
    assert counted['batch_tokens_sum{version="1"}'] == 10_000 * 30


def test_only_results_of_the_engine_have_parts() -> None:
    metrics = Metrics(["m@1"])
    metrics.observe_request(answered(texts=0, tokens=0))
    metrics.observe_request(answered(503, rejection=Rejection.SHUTTING_DOWN))
    assert values(metrics) == {
        'requests_total{route="/embed",status="200"}': 1,
        'request_duration_seconds_count{route="/embed"}': 1,
        'request_duration_seconds_sum{route="/embed"}': 2,
        'requests_total{route="/embed",status="503"}': 1,
        'request_classes_total{class="none"}': 2,
        'rejected_requests_total{reason="shutting_down"}': 1,
    }


def test_a_model_that_is_served_no_more_leaves_no_series() -> None:
    metrics = Metrics(["m@1", "kept@1"])
    metrics.create_request_series("/embed", ["m@1", "kept@1"], [200, 429])
    metrics.queues = lambda: {"m@1": QueueState(5, 0.5), "kept@1": QueueState(6, 0.5)}
    report = BatchReport(2, 30, 0.5, BatchFill.TOKENS)
    for model in ("m@1", "kept@1"):
        metrics.observe_request(answered(model=model))
        metrics.observe_batch(model, report)
    before = metrics.exposition("")[0].decode()
    metrics.queues = lambda: {"kept@1": QueueState(6, 0.5)}
    metrics.forget_models(["m@1"])
    metrics.observe_batch("m@1", report)  # it hung until the end of its model
    after = metrics.exposition("")[0].decode()
    own = [line for line in before.splitlines() if 'model="m"' in line]
    assert len(own) > 20
    assert any("queue_tokens" in line for line in own)
    kept = [line for line in before.splitlines() if 'model="kept"' in line]
    assert len(kept) == len(own)
    assert [line for line in kept if line not in after.splitlines()] == []
    assert 'model="m"' not in after
    metrics.add_models(["m@1"])
    assert 'cloze_tokens_total{model="m",version="1"} 0.0' in metrics.exposition("")[0].decode()


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text; version=1.0.0"])
def test_the_exposition_is_that_of_prometheus_client(accept: str) -> None:
    registry = CollectorRegistry()
    requests = Counter("cloze_requests", "Requests.", ("route", "key"), registry=registry)
    requests.labels("/embed", 'a "quoted" \\ key\nof two lines').inc(12_345_678)
    requests.labels("/embed", "ключ").inc(0.5)
    gauge = Gauge("cloze_backlog_seconds", "Backlog.", registry=registry)
    seconds = Histogram("cloze_seconds", "Times.", ("route",), buckets=(0.5, 1), registry=registry)
    seconds.labels("/embed").observe(0.25, {"request_id": "a-1"})
    seconds.labels("/embed").observe(7, {"request_id": "a-2"})
    for value in (1e-9, -3, math.inf, -math.inf, math.nan):
        gauge.set(value)
        expected = choose_encoder(accept)[0](registry)
        assert encode(registry.collect(), openmetrics=bool(accept)) == expected


def test_a_scrape_stays_small() -> None:
    """With the default models, and a request to each route of each model."""
    models = ["bert@1", "bert-tasks@1", "distilbert@1"]
    metrics = Metrics(models)
    for number in range(11):
        metrics.create_request_series(f"/{number}", models, [200, 429, 500, 503, 504])
        for model in models:
            metrics.observe_request(answered(model=model, route=f"/{number}"))
    text = metrics.exposition("")[0]
    assert 1000 < text.count(b"\n") < 1400
    assert len(text) < 130_000
