"""What Prometheus sees: valid, there before the first request, bounded, and right."""

import hashlib
import math
import os
import re
import signal
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from cloze.model_store.installation import build
from cloze.service.core import BatchFill
from cloze.service.observe.metrics import observe_all
from tests.support.serving import Server, children, running_server
from tests.support.waiting import wait_until

FAMILIES = {
    "counter": "requests rejected_requests batches request_classes tokens truncated_texts reloads "
    "shared_sequences cache_hits cache_misses cache_evictions",
    "gauge": "queue_backlog_seconds requests_in_flight model_info build_info queue_tokens ready "
    "last_reload_successful cache_bytes",
    "histogram": "request_part_duration_seconds batch_sequences batch_tokens batch_duration_seconds",
}
"""What is there before the first request, without ``cloze_``."""

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(server: Server) -> Samples:
    text = httpx.get(f"{server.url}/metrics").text
    return {
        (s.name, frozenset(s.labels.items())): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples.get((name, frozenset(labels.items())), 0.0)


@pytest.fixture(
    scope="module", params=[(), ("--frontends", "2")], ids=["one-process", "front-ends"]
)
def fresh(request: pytest.FixtureRequest, tiny_store: Path) -> Iterator[Server]:
    """A server that only this module asks."""
    with running_server(tiny_store, *request.param) as server:
        yield server


def test_every_family_is_there_before_the_first_request(fresh: Server) -> None:
    text = httpx.get(f"{fresh.url}/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for kind, names in FAMILIES.items():
        for family in (families[f"cloze_{name}"] for name in names.split()):
            assert (family.type, bool(family.documentation)) == (kind, True), family.name
            assert family.samples, f"{family.name} has no series yet"
    assert families.keys() >= {"process_resident_memory_bytes", "process_cpu_seconds"}
    samples = scrape(fresh)
    for route, model in {"/embed": "bert", "/fill-mask": "distilbert", "/qa": "bert-qa"}.items():
        for status in ("200", "429", "500", "503", "504"):
            labels = {"route": route, "model": model, "version": "1", "status": status}
            assert ("cloze_requests_total", frozenset(labels.items())) in samples


def test_numbers_are_what_happened(fresh: Server) -> None:
    before = scrape(fresh)
    for route, inputs, status in (
        ("/embed", "the king", 200),
        ("/embed", ["the moon", "a " * 400], 200),
        ("/embed", 1, 422),
        ("/qa", {"question": "who?", "context": "the king"}, 200),
    ):
        answer = httpx.post(fresh.url + route, json={"inputs": inputs})
        assert answer.status_code == status
    time.sleep(0.05)
    after = scrape(fresh)

    def grew(name: str, **labels: str) -> float:
        return value(after, name, **labels) - value(before, name, **labels)

    bert = {"model": "bert", "version": "1"}
    requests = "cloze_requests_total"
    assert grew(requests, route="/embed", status="200", **bert) == 2
    assert grew("cloze_request_duration_seconds_count", route="/embed", **bert) == 2
    assert grew(requests, route="/embed", model="", version="", status="422") == 1
    assert grew(requests, route="/qa", model="bert-qa", version="1", status="200") == 1
    # A golden batch, which has no tokens of requests, may have run meanwhile.
    filled = [fill.value for fill in BatchFill if fill is not BatchFill.CANARY]
    batches = sum(grew("cloze_batches_total", filled=each, **bert) for each in filled)
    assert batches == grew("cloze_batch_tokens_count", **bert)
    assert value(after, "cloze_queue_backlog_seconds", **bert) == 0
    assert value(after, "cloze_build_info", **build()._asdict()) == 1
    for part in ("tokenize", "queue", "inference"):
        assert grew("cloze_request_part_duration_seconds_count", part=part, **bert) == 2
    assert grew("cloze_tokens_total", **bert) == 4 + 4 + 160
    assert grew("cloze_batch_tokens_sum", **bert) == 168
    assert grew("cloze_batch_sequences_sum", **bert) == 3
    assert grew("cloze_truncated_texts_total", **bert) == 1
    assert value(after, "cloze_queue_tokens", **bert) == 0
    assert value(after, "cloze_ready") == 1
    total = grew("cloze_request_duration_seconds_sum", route="/embed", **bert)
    parts = sum(
        grew("cloze_request_part_duration_seconds_sum", part=part, **bert)
        for part in ("tokenize", "queue", "inference")
    )
    assert 0 < parts <= total < 10


def test_the_use_of_each_key_is_counted_and_logged(tiny_store: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    for name, scope in (("search", "inference"), ("ads", "inference"), ("ops", "metrics")):
        digest = hashlib.sha256(name.encode()).hexdigest()
        with keys.open("a") as file:
            file.write(
                f'[{name}]\nsha256 = "{digest}"\nscopes = ["{scope}"]\nrequests_per_minute = 2\n'
            )
    with running_server(tiny_store, "--frontends", "1", CLOZE_KEYS_FILE=str(keys)) as server:

        def ask(key: str) -> httpx.Response:
            headers = {"authorization": f"Bearer {key}", "x-request-id": f"of-{key}"}
            return httpx.post(f"{server.url}/embed", json={"inputs": "the king"}, headers=headers)

        answers = [ask("search") for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        assert ask("unknown").status_code == 401
        time.sleep(0.3)
        text = httpx.get(f"{server.url}/metrics", headers={"authorization": "Bearer ops"}).text
        wait_until(lambda: sum("id=of-" in line for line in server.log) == 4)
        clients = [re.findall(r"id=of-\w+ client=(\S+)", line) for line in server.log]
    found = dict(re.findall(r"^cloze_key_(\S+) (\S+)$", text, re.M))
    tokens = sum(int(answer.headers["x-compute-tokens"]) for answer in answers[:2])
    assert float(found.pop('tokens_total{key="search"}')) == tokens
    assert {name: float(number) for name, number in found.items()} == {
        'requests_total{key="search",status="200"}': 2,
        'requests_total{key="search",status="429"}': 1,
    }
    assert [client for [client] in filter(None, clients)] == ["key:search"] * 3 + ["127.0.0.1"]


def test_labels_stay_bounded_whatever_is_asked(fresh: Server) -> None:
    for number in range(30):
        httpx.post(f"{fresh.url}/random-{number}", json={})
        httpx.get(f"{fresh.url}/docs/assets/{number}")
        httpx.post(f"{fresh.url}/embed", json={"inputs": "a", "model": f"model-{number}"})
        httpx.request(f"VERB{number}", f"{fresh.url}/embed")
    time.sleep(0.05)
    samples, values = scrape(fresh), defaultdict(set)
    for _, labels in samples:
        for key, label in labels:
            values[key].add(label)
    assert values["model"] <= {"", "bert", "bert-qa", "distilbert"}
    assert values["version"] <= {"", "1", build().version}
    documented = httpx.get(f"{fresh.url}/openapi.json").json()["paths"].keys()
    assert values["route"] <= {*documented, "/docs", "/openapi.json", "other"}
    assert all(re.fullmatch(r"[1-5]\d\d", status) for status in values["status"])
    assert not any(math.isnan(number) for number in samples.values())


def test_many_observations_at_once_are_the_same_as_one_by_one() -> None:
    """`observe_all` relies on attributes of prometheus_client that are not public."""
    registry = CollectorRegistry()
    one, many = (
        Histogram(name, "text", buckets=(0.001, 0.01, 0.1), registry=registry) for name in "ab"
    )
    values = [0.0, 0.001, 0.0011, 0.05, 0.1, 0.11, 7.0]
    for value in values:
        one.observe(value)
    observe_all(many, values[:3])
    observe_all(many, values[3:])
    lines = generate_latest(registry).decode().splitlines()
    shown = {name: [x[1:] for x in lines if re.match(f"{name}_[bs]", x)] for name in "ab"}
    assert shown["a"] == shown["b"]
    assert len(shown["a"]) == 5


def test_a_bucket_names_a_recent_request(tiny_store: Path) -> None:
    """With OpenMetrics, which allows 128 characters for the name of a label and its value."""
    headers = {"accept": "application/openmetrics-text; version=1.0.0"}
    with running_server(tiny_store, "--model", "bert") as server:
        for identity in ("i" * 118, "j" * 119):
            answer = httpx.post(
                f"{server.url}/embed",
                json={"inputs": "the king"},
                headers={"x-request-id": identity},
            )
            assert answer.headers["x-request-id"] == identity
        scraped = httpx.get(f"{server.url}/metrics", headers=headers)
    assert scraped.headers["content-type"].startswith("application/openmetrics-text")
    families = {
        family.name: family for family in openmetrics.text_string_to_metric_families(scraped.text)
    }
    ids = {
        sample.exemplar.labels["request_id"]
        for sample in families["cloze_request_duration_seconds"].samples
        if sample.exemplar is not None and sample.labels["route"] == "/embed"
    }
    assert ids == {"i" * 118}
    assert "_created" not in scraped.text


def test_restarts_of_processes_are_counted(tiny_store: Path) -> None:
    name = "cloze_process_restarts_total"
    with running_server(tiny_store, "--frontends", "1", "--model", "bert") as server:
        wait_until(lambda: any("front ends are ready" in line for line in server.log))
        assert (name, frozenset({"kind": "engine"}.items())) in scrape(server)
        (engine,) = children(server.process.pid, "engine")
        os.kill(engine, signal.SIGKILL)
        wait_until(lambda: value(scrape(server), name, kind="engine") == 1)


BODIES = [
    ("/embed", {"inputs": ["the king", "the moon", "the king"]}),
    ("/fill-mask", {"inputs": ["the [MASK] is", "a [MASK]"], "parameters": {"top_k": 3}}),
    ("/qa", {"inputs": {"question": "who?", "context": "the king"}}),
]


def answers(server: Server) -> list[tuple[int, bytes, str]]:
    asked = [httpx.post(server.url + route, json=body) for route, body in BODIES]
    return [(each.status_code, each.content, each.headers["x-compute-tokens"]) for each in asked]


def counts(server: Server) -> list[float]:
    samples = scrape(server)
    names = ("hits_total", "misses_total", "evictions_total", "bytes")
    return [value(samples, f"cloze_cache_{name}") for name in names]


@pytest.mark.parametrize("arguments", [(), ("--frontends", "1")], ids=["one-process", "front-end"])
def test_kept_results_are_the_same_until_a_reload(
    server: Server, tiny_store: Path, arguments: tuple[str, ...]
) -> None:
    with running_server(tiny_store, *arguments, CLOZE_CACHE_MB="1") as caching:
        first = answers(caching)
        *before, size = counts(caching)
        assert (before, size > 2_000) == ([0, 6, 0], True)
        assert value(scrape(caching), "cloze_shared_sequences_total") == 1
        assert answers(caching) == first == answers(server)
        assert counts(caching) == [6, 6, 0, size]
        if not arguments:
            caching.reload()
            assert counts(caching) == [6, 6, 0, 0]
            assert answers(caching) == first
            assert counts(caching) == [6, 12, 0, size]
