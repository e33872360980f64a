"""What is recorded of requests and batches, and the series of models that come and go."""

from typing import Any

from cloze.service.core import BatchFill, BatchReport, QueueState, Rejection, Timings
from cloze.service.observe.logs import AccessRecord, RequestCost
from cloze.service.observe.metrics import Metrics

TIMINGS = Timings(0.25, 0.5, 0.75, began=1234.0)


def answered(status: int = 200, **fields: Any) -> AccessRecord:
    values: dict[str, Any] = {"model": "m@1", "cost": RequestCost(1, 7, TIMINGS), "error": ""}
    return AccessRecord(
        0.0, "id", "POST", "/embed", status=status, seconds=2.0, **(values | fields)
    )


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
    metrics.observe_request(answered(cost=RequestCost(1, 7, TIMINGS, truncated=3)))
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


def test_requests_without_the_engine_are_not_in_its_histograms() -> None:
    metrics = Metrics(["m@1"])
    metrics.observe_request(answered(cost=RequestCost(1, 0, TIMINGS)))
    metrics.observe_request(answered(cost=None))
    assert not any("part" in name for name in values(metrics))
    assert values(metrics)['request_duration_seconds_count{route="/embed"}'] == 2


def test_an_error_has_neither_a_duration_nor_parts() -> None:
    metrics = Metrics(["m@1"])
    metrics.observe_request(answered(503, rejection=Rejection.SHUTTING_DOWN))
    assert values(metrics) == {
        'requests_total{route="/embed",status="503"}': 1,
        'request_classes_total{class="none"}': 1,
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
    process = ("process_", "python_")
    kept = [
        line
        for line in before.splitlines()
        if line not in own and not line.removeprefix("# HELP ").startswith(process)
    ]
    assert [line for line in kept if line not in after.splitlines()] == []
    assert 'model="m"' not in after
    metrics.add_models(["m@1"])
    assert 'cloze_tokens_total{model="m",version="1"} 0.0' in metrics.exposition("")[0].decode()
