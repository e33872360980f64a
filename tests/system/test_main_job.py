"""The main job on real weights: the server's answers equal sentence-transformers', under
concurrency.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
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


def test_own_texts_equal_sentence_transformers(minilm_store: Path) -> None:
    """One text per request, 16 at once."""
    texts = OWN_TEXTS * 4
    with (
        running_server(minilm_store, **PATIENT) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
        ThreadPoolExecutor(16) as pool,
    ):
        responses = list(pool.map(lambda text: client.post("/embed", json={"inputs": text}), texts))
    assert {response.status_code for response in responses} == {200}
    actual = np.array([response.json()[0] for response in responses], np.float32)
    model = SentenceTransformer(str(minilm_checkpoint()), device="cpu")
    np.testing.assert_allclose(actual, model.encode(texts, batch_size=1), atol=1e-4)
