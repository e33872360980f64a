"""Vectors as bytes: types of numbers, NumPy's format, a vector per token."""

import io
from typing import Any

import httpx
import numpy as np
import pytest
from sentence_transformers.util.quantization import quantize_embeddings

from cloze.client import Client
from tests.serving import Server

RAW, NPY = "application/octet-stream", "application/x-npy"
TEXTS = ["the king", "of Paris", "a moon over the sea"]


def ask(server: Server, accept: str, route: str = "/embed", inputs: Any = TEXTS) -> httpx.Response:
    return httpx.post(server.url + route, json={"inputs": inputs}, headers={"accept": accept})


@pytest.fixture(scope="module")
def vectors(server: Server) -> np.ndarray:
    return np.array(ask(server, "application/json").json(), np.float32)


def test_half_precision(server: Server, vectors: np.ndarray) -> None:
    answer = ask(server, f"{RAW}; dtype=float16")
    assert (answer.headers["x-dtype"], answer.headers["x-shape"]) == ("float16", "3,64")
    found = np.frombuffer(answer.content, "<f2").reshape(3, 64)
    np.testing.assert_array_equal(found, vectors.astype(np.float16))


def test_integers_have_a_scale(server: Server, vectors: np.ndarray) -> None:
    answer = ask(server, f"{RAW}; dtype=int8")
    assert (answer.headers["x-dtype"], answer.headers["x-shape"]) == ("int8", "3,64")
    found = np.frombuffer(answer.content, np.int8).reshape(3, 64)
    scale = float(answer.headers["x-scale"])
    assert np.abs(found).max() == 127
    np.testing.assert_allclose(found * scale, vectors, atol=scale * 0.501)


def test_signs_are_those_of_sentence_transformers(server: Server, vectors: np.ndarray) -> None:
    answer = ask(server, f"{RAW}; dtype=ubinary")
    assert (answer.headers["x-dtype"], answer.headers["x-shape"]) == ("ubinary", "3,8")
    found = np.frombuffer(answer.content, np.uint8).reshape(3, 8)
    np.testing.assert_array_equal(found, quantize_embeddings(vectors, precision="ubinary"))


@pytest.mark.parametrize(
    ("dtype", "numpy"),
    [("float32", "<f4"), ("float16", "<f2"), ("int8", "|i1"), ("ubinary", "|u1")],
)
def test_numpys_format_has_the_type(server: Server, dtype: str, numpy: str) -> None:
    raw, npy = (ask(server, f"{kind}; dtype={dtype}") for kind in (RAW, NPY))
    array = np.load(io.BytesIO(npy.content), allow_pickle=False)
    assert array.dtype.str == numpy
    assert array.tobytes() == raw.content
    assert "x-scale" in npy.headers or dtype != "int8"


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


def test_our_client_reads_vectors_of_tokens(server: Server) -> None:
    expected = ask(server, "application/json", "/embed_all").json()
    with Client(server.url, batch_size=2) as client:
        found = client.embed_all(TEXTS)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize(
    "accept", [f"{RAW}; dtype=int8", f'{RAW};dtype="int8"', f"{NPY};q=0.1, {RAW};DTYPE=INT8;q=0.9"]
)
def test_the_type_is_found_however_it_is_written(server: Server, accept: str) -> None:
    answer = ask(server, accept)
    assert (answer.headers["content-type"], answer.headers["x-dtype"]) == (RAW, "int8")


@pytest.mark.parametrize("route", ["/embed", "/embed_all", "/"])
@pytest.mark.parametrize("inputs", ["a", "a" * 2_000_000])
def test_an_unknown_type_is_refused_before_the_texts_are_read(
    server: Server, route: str, inputs: str
) -> None:
    """Even a text that is too long, which would be refused otherwise."""
    answer = ask(server, f"{RAW}; dtype=float64", route, inputs)
    assert answer.status_code == 422
    assert answer.json()["error"] == (
        "Accept asks for dtype 'float64'; there are float32, float16, int8, ubinary"
    )
