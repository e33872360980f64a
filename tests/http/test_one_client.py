"""What one client without a key can make a server hold, or stop, by small requests."""

from collections.abc import Iterator
from typing import Any

import httpx
import orjson
import pytest

from cloze.model_store.locations import DEFAULT_ROOT
from tests.http.test_body_bounds import (
    RETURNING_MEMORY,
    Body,
    cost,
    polled,
)
from tests.support.serving import Server, running_server

WORDS = [
    "river",
    "walk",
    "stone",
    "bread",
    "house",
    "tree",
    "light",
    "cloud",
    "road",
    "king",
    "ship",
    "year",
]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    models = ("--model", "cloze-bert-tasks", "--model", "cloze-bert")
    patience = {"CLOZE_REQUEST_TIMEOUT_MS": "120000"}  # a busy machine needs longer than 30 s
    with running_server(DEFAULT_ROOT, *models, **RETURNING_MEMORY, **patience) as running:
        httpx.get(f"{running.url}/openapi.json").raise_for_status()
        yield running


@pytest.mark.parametrize(
    ("space", "words", "parameters"),
    [(15_000, 60, {}), (1, 1500, {"max_seq_len": 384, "doc_stride": 360})],
    ids=["spans over spaces", "windows that overlap"],
)
def test_answers_have_no_more_memory_than_a_bound(
    server: Server, space: int, words: int, parameters: dict[str, int]
) -> None:
    """Spans of a context overlap, and so do windows."""
    context = (" " * space).join((WORDS * 150)[:words])
    body: dict[str, Any] = {
        "inputs": {"question": "where?", "context": context},
        "parameters": {"top_k": 1000, "max_answer_len": 64, **parameters},
    }
    data = orjson.dumps(body)
    with httpx.Client(base_url=server.url, timeout=120) as client, polled(server) as health:
        few = body["parameters"] | {"top_k": 1}
        client.post("/qa", json=body | {"parameters": few}).raise_for_status()
        spent = cost(server, client, health, Body("", "/qa", data, lambda _: b"", b""), len(data))
        assert spent.status == 422
        assert spent.is_bounded, spent
