"""A server that keeps results answers as before, and says how much it has not run again."""

from pathlib import Path

import httpx
import pytest

from tests.http.test_metrics import scrape, value
from tests.support.serving import Server, running_server

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
