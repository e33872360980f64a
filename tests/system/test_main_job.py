"""The main job on real weights: answers to many clients equal those of sentence-transformers."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from tests.conftest import minilm_checkpoint
from tests.support.serving import running_server

OWN_TEXTS = [
    "What is deep learning?",
    "a",
    "The quick brown fox jumps over the lazy dog. " * 3,
    "Überraschung: naïve café — 北京 😀",
    "word " * 600,  # longer than the 256 tokens it was tuned for
    "tab\tand\nnewline",
    "unbelievable antidisestablishmentarianism",
    "[MASK] and [SEP] are special",
]

PATIENT = {"CLOZE_MAX_QUEUE_WAIT_MS": "0", "CLOZE_REQUEST_TIMEOUT_MS": "60000"}
"""A server that has few of the cores' time must not refuse these requests: they measure answers."""


def embed_by_16_clients(url: str, texts: list[str]) -> np.ndarray:
    with (
        httpx.Client(base_url=url, timeout=60, limits=httpx.Limits(max_connections=16)) as client,
        ThreadPoolExecutor(16) as pool,
    ):
        responses = list(pool.map(lambda text: client.post("/embed", json={"inputs": text}), texts))
    assert {response.status_code for response in responses} == {200}
    return np.array([response.json()[0] for response in responses], np.float32)


def test_own_texts_equal_sentence_transformers(minilm_store: Path) -> None:
    with running_server(minilm_store, **PATIENT) as server:
        actual = embed_by_16_clients(server.url, OWN_TEXTS * 4)
    expected = SentenceTransformer(str(minilm_checkpoint()), device="cpu").encode(
        OWN_TEXTS * 4, batch_size=1
    )
    np.testing.assert_allclose(actual, expected, atol=1e-4)


@pytest.mark.slow
def test_500_real_questions_equal_sentence_transformers(
    minilm_store: Path, external_data: Path
) -> None:
    """In any mix of lengths: single questions, and several joined to longer texts."""
    with (external_data / "traffic" / "queries.jsonl").open() as file:
        questions = [json.loads(line)["question"] for line in file]
    rng = np.random.default_rng(0)
    texts = [". ".join(rng.choice(questions, rng.choice([1, 1, 1, 2, 5, 20]))) for _ in range(500)]
    with running_server(minilm_store, **PATIENT) as server:
        actual = embed_by_16_clients(server.url, texts)
        bulk = httpx.post(f"{server.url}/embed", json={"inputs": texts}, timeout=120).json()
    expected = SentenceTransformer(str(minilm_checkpoint()), device="cpu").encode(
        texts, batch_size=16
    )
    np.testing.assert_allclose(actual, expected, atol=1e-4)
    np.testing.assert_allclose(bulk, actual, atol=1e-5)
