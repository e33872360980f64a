"""A server that keeps results answers as before, and says how much it has not run again."""

from pathlib import Path

import httpx
import pytest

from tests.http.test_metrics import scrape, value
from tests.support.serving import Server, running_server

COUNTS = ("hits_total", "misses_total", "evictions_total", "bytes")
BODIES = [
    ("/embed", {"inputs": ["the king", "the moon", "the king"]}),
    ("/fill-mask", {"inputs": ["the [MASK] is", "a [MASK]"], "parameters": {"top_k": 3}}),
    ("/qa", {"inputs": {"question": "who?", "context": "the king"}}),
]


def cache(server: Server) -> dict[str, float]:
    samples = scrape(server)
    return {name: value(samples, f"cloze_cache_{name}") for name in COUNTS}


@pytest.mark.parametrize("arguments", [(), ("--frontends", "1")], ids=["one-process", "front-end"])
def test_kept_results_are_the_same_until_a_reload(
    server: Server, tiny_store: Path, arguments: tuple[str, ...]
) -> None:
    with running_server(tiny_store, *arguments, CLOZE_CACHE_MB="1") as caching:

        def ask() -> list[tuple[bytes, str | None]]:
            """Return each answer, which equals that of a server without a cache."""
            answers = [httpx.post(caching.url + route, json=body) for route, body in BODIES]
            for (route, body), answer in zip(BODIES, answers, strict=True):
                expected = httpx.post(server.url + route, json=body)
                assert (answer.status_code, answer.json()) == (200, expected.json())
                for name in ("x-tokens", "x-truncated"):
                    assert answer.headers.get(name) == expected.headers.get(name)
            return [(answer.content, answer.headers.get("x-tokens")) for answer in answers]

        first = ask()
        sequences = {"misses_total": 6.0, "hits_total": 0.0, "evictions_total": 0.0}
        before = cache(caching)
        assert before | sequences == before
        assert value(scrape(caching), "cloze_shared_sequences_total") == 1
        assert ask() == first
        after = cache(caching)
        assert after == before | {"hits_total": 6.0}
        assert after["bytes"] > 2_000
        if not arguments:
            caching.reload()
            assert cache(caching)["bytes"] == 0
            assert ask() == first
            assert cache(caching) == after | {"misses_total": 12.0}
