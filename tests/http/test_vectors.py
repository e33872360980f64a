"""Vectors as bytes: types of numbers, NumPy's format, a vector per token."""

import io
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


@pytest.mark.parametrize("kind", [RAW, NPY])
def test_vectors_of_tokens_follow_each_other(server: Server, kind: str) -> None:
    expected = ask(server, "application/json", "/embed_all").json()
    answer = ask(server, kind, "/embed_all")
    lengths = list(map(int, answer.headers["x-lengths"].split(",")))
    assert lengths == [len(rows) for rows in expected]
    if kind == NPY:
        found = np.load(io.BytesIO(answer.content), allow_pickle=False)
    else:
        found = np.frombuffer(answer.content, "<f4").reshape(sum(lengths), 64)
    assert answer.headers["x-shape"] == f"{sum(lengths)},64"
    np.testing.assert_allclose(found, np.concatenate(expected), atol=1e-6)


# ---- places of tokens ----------------------------------------------------------------------------


def with_offsets(server: Server, inputs: Any, **options: Any) -> httpx.Response:
    body = {"inputs": inputs, "return_offsets": True, **options}
    return httpx.post(f"{server.url}/embed_all", json=body)


@pytest.mark.parametrize("accept", [RAW, NPY])
def test_vectors_with_places_are_json_whatever_is_accepted(server: Server, accept: str) -> None:
    body = {"inputs": "the king", "return_offsets": True}
    answer = httpx.post(f"{server.url}/embed_all", json=body, headers={"accept": accept})
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == with_offsets(server, "the king").json()


def test_no_tensor_has_places(server: Server) -> None:
    text = {"name": "text", "shape": [1], "datatype": "BYTES", "data": ["the king"]}
    body = {"inputs": [text], "parameters": {"return_offsets": True}}
    url = f"{server.url}/v2/models/bert.embed-all/infer"
    assert httpx.post(url, json={"inputs": [text]}).status_code == 200
    answer = httpx.post(url, json=body)
    assert answer.status_code == 400
    what = "asks for offsets, which no tensor has; POST /embed_all returns them"
    assert answer.json() == {"error": f"parameters.return_offsets {what}"}


def test_tokens_have_places_in_their_text(server: Server) -> None:
    texts = ["the king of Paris", "Ünknöwn  houses!"]
    plain = ask(server, "application/json", "/embed_all", texts).json()
    for text, vectors, found in zip(texts, plain, with_offsets(server, texts).json(), strict=True):
        np.testing.assert_allclose(found["embeddings"], vectors, atol=1e-6)
        offsets = found["offsets"]
        assert len(offsets) == len(vectors)
        assert (offsets[0], offsets[-1]) == (None, None)
        words = [text[start:end] for start, end in offsets[1:-1]]
        assert "".join(words) == text.replace(" ", "")


@pytest.mark.parametrize(("direction", "first"), [("right", 0), ("left", 42 * 5)])
def test_a_cut_text_has_the_places_of_what_is_left(
    server: Server, direction: str, first: int
) -> None:
    text = "year " * 200
    answer = with_offsets(server, text, truncation_direction=direction)
    assert answer.headers["x-truncated"] == "1"
    offsets = answer.json()[0]["offsets"]
    assert len(offsets) == 160
    assert offsets[1] == [first, first + 4]
    assert text[slice(*offsets[-2])] == "year"


# ---- the tokens that carry a similarity ----------------------------------------------------------


def compare(server: Server, source: str, sentences: list[str], **options: Any) -> httpx.Response:
    inputs = {"source_sentence": source, "sentences": sentences}
    return httpx.post(f"{server.url}/similarity", json={"inputs": inputs, "parameters": options})


def test_pairs_of_tokens_are_those_of_the_vectors_of_tokens(server: Server) -> None:
    source, sentences = "the king was red", ["a red moon", "the old king of Paris"]
    plain = compare(server, source, sentences).json()
    detailed = compare(server, source, sentences, details=True).json()
    assert [found["score"] for found in detailed] == pytest.approx(plain, abs=1e-5)
    tokens = with_offsets(server, [source, *sentences]).json()
    vectors = [np.array(text["embeddings"])[1:-1] for text in tokens]
    unit = [rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in vectors]
    for found, theirs, text in zip(detailed, unit[1:], tokens[1:], strict=True):
        cosines = unit[0] @ theirs.T
        pairs = found["pairs"]
        assert [pair["cosine"] for pair in pairs] == pytest.approx(
            sorted(cosines.max(1), reverse=True), abs=1e-5
        )
        for pair in pairs:
            row = tokens[0]["offsets"].index(pair["source"]) - 1
            assert text["offsets"].index(pair["sentence"]) - 1 == cosines[row].argmax()


# ---- spans of one text (late chunking) -----------------------------------------------------------

LONG = "the king of Paris was red . a moon over the sea ,  and the old house"


def embed_spans(server: Server, spans: Any, inputs: Any = LONG, **options: Any) -> httpx.Response:
    body = {"inputs": inputs, "spans": spans, **options}
    return httpx.post(f"{server.url}/embed", json=body)


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
    answer = embed_spans(server, spans, normalize=normalize)
    assert answer.status_code == 200, answer.text
    states, places = hidden(checkpoints["bert"], LONG)
    assert answer.headers["x-compute-tokens"] == str(len(states) + 2)
    for (start, end), vector in zip(spans, answer.json(), strict=True):
        rows = [i for i, place in enumerate(places) if place[0] < end and place[1] > start]
        expected = states[rows].mean(0)
        if normalize:
            expected /= np.linalg.norm(expected)
        np.testing.assert_allclose(vector, expected, atol=2e-5)
