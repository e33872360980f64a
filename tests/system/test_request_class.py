"""Bulk requests beside others, and a device that is lost while nobody asks, of real servers."""

from pathlib import Path

import httpx

from cloze.client import Client
from tests.support.faulty import embed, metric, one_process
from tests.support.waiting import wait_until

CLASS = "x-request-class"


def test_a_class_is_stated_and_a_lost_device_is_noticed(tiny_store: Path) -> None:
    with one_process(tiny_store, CLOZE_CANARY_INTERVAL_MS="200") as server:
        for route in ("/embed", "/v1/embeddings", "/v2/models/bert.embed/infer"):
            wrong = httpx.post(f"{server.url}{route}", json={}, headers={CLASS: "bulky"})
            assert wrong.status_code in (400, 422)
            assert "x-request-class: bulk, or no such header, got 'bulky'" in wrong.text
        with Client(server.url, bulk=True) as client, Client(server.url) as plain:
            assert client.embed("walk").tolist() == plain.embed("walk").tolist()
        wait_until(lambda: metric(server, r'cloze_request_classes_total\{class="bulk"\}') == 1)
        durations = (
            r'cloze_request_duration_seconds_count\{model="bert",route="/embed",version="1"\}'
        )
        assert metric(server, durations) == 1, "the latency of bulk requests rings no alert"
        canaries = r'cloze_batches_total\{filled="canary",model="bert",version="1"\}'
        wait_until(lambda: metric(server, canaries) > 1)
        assert embed(server, "world").status_code == 200
        wait_until(lambda: not is_ready(server.url))
        reason = "it could not repeat its golden outputs while idle (RuntimeError)"
        wait_until(lambda: any(reason in line for line in server.log))


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz").status_code == 200
    except httpx.TransportError:  # a single process has ended
        return False
