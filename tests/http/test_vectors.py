"""Vectors as bytes: types of numbers, NumPy's format, a vector per token."""

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from sentence_transformers.util.quantization import quantize_embeddings
from transformers import AutoModel, AutoTokenizer

from tests.support.serving import Server

RAW, NPY = "application/octet-stream", "application/x-npy"
TEXTS = ["the king", "of Paris", "a moon over the sea"]


def ask(server: Server, accept: str, route: str = "/embed", inputs: Any = TEXTS) -> httpx.Response:
    return httpx.post(server.url + route, json={"inputs": inputs}, headers={"accept": accept})


@pytest.fixture(scope="module")
def vectors(server: Server) -> np.ndarray:
    return np.array(ask(server, "application/json").json(), np.float32)


def test_signs_are_those_of_sentence_transformers(server: Server, vectors: np.ndarray) -> None:
    answer = ask(server, f"{RAW}; dtype=ubinary")
    assert (answer.headers["x-dtype"], answer.headers["x-shape"]) == ("ubinary", "3,8")
    found = np.frombuffer(answer.content, np.uint8).reshape(3, 8)
    np.testing.assert_array_equal(found, quantize_embeddings(vectors, precision="ubinary"))


LONG = "the king of Paris was red . a moon over the sea ,  and the old house"


@torch.no_grad()
def hidden(folder: Path, text: str) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """The last hidden state of each token of a text, without special tokens, and its characters."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    encoded = tokenizer(text, return_offsets_mapping=True, return_tensors="pt")
    places = encoded.pop("offset_mapping")[0].tolist()
    states = AutoModel.from_pretrained(folder).eval()(**encoded).last_hidden_state[0]
    return states.numpy()[1:-1], [tuple(place) for place in places[1:-1]]


@pytest.mark.parametrize("normalize", [False, True])
def test_spans_are_pooled_from_one_pass(
    server: Server, checkpoints: dict[str, Path], normalize: bool
) -> None:
    spans = [(0, 27), (28, 49), (52, len(LONG)), (5, 6), (0, len(LONG))]
    body = {"inputs": LONG, "spans": spans, "normalize": normalize}
    answer = httpx.post(f"{server.url}/embed", json=body)
    assert answer.status_code == 200, answer.text
    states, places = hidden(checkpoints["bert"], LONG)
    assert answer.headers["x-compute-tokens"] == str(len(states) + 2)
    for (start, end), vector in zip(spans, answer.json(), strict=True):
        rows = [i for i, place in enumerate(places) if place[0] < end and place[1] > start]
        expected = states[rows].mean(0)
        if normalize:
            expected /= np.linalg.norm(expected)
        np.testing.assert_allclose(vector, expected, atol=2e-5)
