"""The memory of a server: flat, however many tokens it has seen and however unlike their lengths
are.
"""

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import orjson
import pytest

from cloze.bench.http_client import Request, post
from cloze.bench.load import closed_loop
from cloze.bench.processes import RunningServer
from cloze.bench.texts import make_texts, words_of
from cloze.export.publish import export
from cloze.model_store import Store
from cloze.model_store.locations import DEFAULT_ROOT
from cloze.model_store.processor import int8_advantage
from cloze.service.text.tokenizer import Tokenizer
from tests.support.family_checkpoints import save
from tests.support.faulty import metric
from tests.support.serving import Server, peaks_mb, running_server

TOKENS = 500_000


def tokens_run(server: Server) -> float:
    return metric(server, r"cloze_tokens_total\{.*\}")


@pytest.mark.slow
def test_it_is_flat_over_half_a_million_tokens_of_mixed_lengths() -> None:
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


WORDS = "the river walks to the moon and back again while owls sing "
LONG = (WORDS * 20_000)[:1_000_000]
LARGEST = {
    "texts of 1,000,000 characters": ("/embed", {"inputs": LONG}, 8, 130),
    "contexts of 1,000,000 characters": (
        "/qa",
        {"inputs": {"question": "who walks to the moon?", "context": LONG}},
        4,
        300,
    ),
    "2,048 texts of 512 tokens": ("/embed", {"inputs": [(WORDS * 40)[:2100]] * 2048}, 4, 280),
    "480 masks with 68 predictions": (
        "/fill-mask",
        {"inputs": ["the [MASK] " * 60] * 8, "parameters": {"top_k": 68}},
        4,
        300,
    ),
}
"""Route, body, requests at once, and the most MB that they may add; see docs/operate.md."""

IDLE_MB = 250
"""Most memory of an idle server with the default models; docs/operate.md."""

PATIENCE_S = 3000
"""A context of 1,000,000 characters is 316,013 tokens: 2 minutes of work for two fast cores."""


@pytest.mark.timeout(PATIENCE_S)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mode"),
    [*[(name, ()) for name in LARGEST], ("480 masks with 68 predictions", ("--frontends", "1"))],
)
def test_the_largest_requests_at_once_stay_under_the_documented_memory(
    name: str, mode: tuple[str, ...]
) -> None:
    route, body, count, most_mb = LARGEST[name]
    patience = {"CLOZE_REQUEST_TIMEOUT_MS": f"{PATIENCE_S * 1000}"}
    with (
        running_server(DEFAULT_ROOT, *mode, **patience) as server,
        ThreadPoolExecutor(count) as pool,
    ):
        before = peaks_mb(server.process.pid)
        if not mode and int8_advantage() is not None:
            resident = RunningServer(server.url, server.process.pid, 0.0).rss_mb()
            assert resident < IDLE_MB, "an idle server with the default models"
        data = orjson.dumps(body)
        answers = [
            pool.submit(httpx.post, server.url + route, content=data, timeout=PATIENCE_S)
            for _ in range(count)
        ]
        statuses = {answer.result().status_code for answer in answers}
        assert 200 in statuses
        assert statuses <= {200, 429}
        after = peaks_mb(server.process.pid)
    growth = {pid: after[pid] - before[pid] for pid in after}
    assert max(growth.values()) < most_mb, growth


LONG_TEXTS = {
    "modernbert-2048": ("modernbert", 2048, 140),
    "deberta-v2-512": ("deberta-v2", 512, 250),
    "modernbert-8192": ("modernbert", 8192, 400),
}
"""Family, the most tokens of a text, and the most MB that two requests of one text each may add.

The models have 12 heads. Without windows, the scores of one layer would be 192 MB for 2,048 tokens,
and 3 GB for 8,192. Each request may run in a session of its own, which keeps its memory.
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG_TEXTS)
def test_the_longest_text_of_a_family_needs_little_memory(name: str, tmp_path: Path) -> None:
    """ModernBERT's grows with the length, not with its square."""
    family, tokens, most_mb = LONG_TEXTS[name]
    sizes = {"hidden_size": 48, "num_attention_heads": 12, "max_position_embeddings": tokens}
    own = {"local_attention": 128} if family == "modernbert" else {"position_buckets": 256}
    save(family, "masked_lm", tmp_path / "checkpoint", **sizes, **own)
    bundle = export(str(tmp_path / "checkpoint"), family, Store(tmp_path / "store"))
    tokenizer = Tokenizer(bundle)
    mask = f"{bundle.manifest.tokenizer.mask_token} "
    unit, masks = len(tokenizer.ids([WORDS])[0]), len(tokenizer.ids([mask])[0])
    text = mask + WORDS * ((tokens - 2 - masks) // unit)
    bodies = {
        "/embed": {"long_text": "error", "return_usage": True},
        "/fill-mask": {"parameters": {"long_text": "error", "return_usage": True}},
    }
    patience = {
        "CLOZE_REQUEST_TIMEOUT_MS": "120000",
        "CLOZE_MAX_QUEUE_WAIT_MS": "60000",
        "CLOZE_STALL_TIMEOUT_MS": "60000",  # the rate is measured with one short text
    }
    with running_server(tmp_path / "store", **patience) as server:

        def ask(text: str) -> list[int]:
            answers = [
                httpx.post(server.url + route, json={"inputs": text} | body, timeout=150)
                for route, body in bodies.items()
            ]
            assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
            return [answer.json()["usage"][0]["used"] for answer in answers]

        ask(mask + WORDS)
        before = peaks_mb(server.process.pid)[server.process.pid]
        assert min(ask(text)) > 0.9 * tokens
        growth = peaks_mb(server.process.pid)[server.process.pid] - before
    assert growth < most_mb
