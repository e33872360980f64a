"""The memory of a server: flat, however many tokens it has seen and however unlike their lengths
are.
"""

import asyncio
import random
import re

import httpx
import orjson
import pytest

from cloze.bench.http_client import Request, post
from cloze.bench.load import closed_loop
from cloze.bench.processes import RunningServer
from cloze.bench.texts import make_texts, words_of
from cloze.model_store import Store
from cloze.model_store.locations import DEFAULT_ROOT
from tests.serving import Server, running_server

TOKENS = 1_000_000


def tokens_run(server: Server) -> float:
    found = re.search(
        r"^cloze_tokens_total\{.*\} (\S+)$", httpx.get(f"{server.url}/metrics").text, re.MULTILINE
    )
    assert found
    return float(found[1])


@pytest.mark.slow
def test_it_is_flat_over_a_million_tokens_of_mixed_lengths() -> None:
    """Singles and bulk requests from 16 clients at once.

    What the first quarter of them needed is all that is ever needed.
    """
    texts = make_texts(words_of(Store(DEFAULT_ROOT).open("cloze-bert")), 3000).texts
    single = [Request(post("/embed", orjson.dumps({"inputs": text}))) for text in texts[:500]]
    bulk = [
        Request(post("/embed", orjson.dumps({"inputs": texts[at : at + 64]})), 64)
        for at in range(0, 3000, 64)
    ]
    requests = [*single, *bulk]
    random.Random(0).shuffle(requests)
    with running_server(DEFAULT_ROOT, "--model", "cloze-bert") as server:
        process = RunningServer(server.url, server.process.pid, 0.0)
        sizes: list[tuple[float, float]] = []
        while not sizes or sizes[-1][0] < TOKENS:
            load = asyncio.run(closed_loop(server.url, requests, clients=16, seconds=1.0))
            assert set(load.statuses) == {200}
            sizes.append((tokens_run(server), process.rss_mb()))
    assert len(sizes) >= 4
    early = max(size for tokens, size in sizes if tokens <= max(TOKENS / 4, sizes[0][0]))
    late = max(size for tokens, size in sizes)
    assert late < early * 1.1, sizes
