"""Vectors as bytes: types of numbers, NumPy's format, a vector per token."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from sentence_transformers.sentence_transformer.modules import Dense, Pooling
from sentence_transformers.util.quantization import quantize_embeddings
from transformers import AutoModel, AutoTokenizer

from cloze.client import Client
from cloze.export.publish import ExportOptions, export
from cloze.model_store import Store
from tests.export.test_sentence import saved as sentence_transformer
from tests.support.serving import Server, running_server

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
    values = np.frombuffer(answer.content, "<f2").reshape(3, 64)
    np.testing.assert_allclose(values, vectors, rtol=1e-3, atol=1e-6)  # 11 bits


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
    # One text, so that both answers come from the same batch.
    raw, npy = (ask(server, f"{kind}; dtype={dtype}", inputs="the king") for kind in (RAW, NPY))
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


def test_a_long_accept_is_refused(server: Server) -> None:
    assert ask(server, "text/html," * 99).status_code == 200
    answer = ask(server, "text/html," * 101)
    assert answer.status_code == 422
    assert answer.json()["error"] == "Accept has 1010 bytes; the limit is 1000"


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


def test_token_ids_have_no_places(server: Server) -> None:
    answer = with_offsets(server, ["the king", [5, 6]])
    assert answer.status_code == 422
    assert answer.json()["error"] == "inputs[1] is a list of token ids, which have no offsets"


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


def test_a_text_is_most_like_itself(server: Server) -> None:
    (same,) = compare(server, "the king", ["the king"], details=True).json()
    assert [pair["source"] for pair in same["pairs"]] == [
        pair["sentence"] for pair in same["pairs"]
    ]
    assert same["pairs"][0]["cosine"] == pytest.approx(1, abs=1e-5)


def test_a_model_without_vectors_of_tokens_says_so(minilm_store: Path) -> None:
    with running_server(minilm_store) as server:
        answer = compare(server, "a", ["b"], details=True)
        assert answer.status_code == 424
        assert answer.json()["error"] == (
            "details need vectors of tokens; export minilm@1 with --task embed-all too"
        )


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


def test_spans_come_as_bytes_with_fewer_dimensions(server: Server) -> None:
    body = {"inputs": LONG, "spans": [[0, 27], [28, 49]], "dimensions": 8}
    answer = httpx.post(f"{server.url}/embed", json=body, headers={"accept": RAW})
    assert answer.headers["x-shape"] == "2,8"


@pytest.mark.parametrize(
    ("spans", "inputs", "message"),
    [
        ([[3, 3]], LONG, "spans[0] is (3, 3); the text has 68 characters"),
        ([[0, 3], [0, 69]], LONG, "spans[1] is (0, 69); the text has 68 characters"),
        ([[-1, 3]], LONG, "spans[0] is (-1, 3); the text has 68 characters"),
        ([[49, 51]], LONG, "spans[0] has no token among the 23 that the model reads"),
        ([[995, 999]], "year " * 200, "spans[0] has no token among the 160 that the model reads"),
        ([[0, 3]], [LONG, LONG], "spans are parts of one text; inputs has token ids, or several"),
        ([[0, 3]], [5, 6], "spans are parts of one text; inputs has token ids, or several"),
        ([[0, 1]] * 2049, LONG, "spans has 2049 spans; the limit is 2048"),
        ([[0, 1, 2]], LONG, "spans.0: Tuple should have at most 2 items"),
    ],
)  # fmt: skip
def test_wrong_spans_are_refused(server: Server, spans: Any, inputs: Any, message: str) -> None:
    answer = embed_spans(server, spans, inputs)
    assert answer.status_code == 422
    assert answer.json()["error"].startswith(message)


def test_no_spans_are_no_request(server: Server) -> None:
    answer = embed_spans(server, [])
    assert (answer.status_code, answer.json()["error_type"]) == (400, "Empty")


def test_spans_of_a_model_without_vectors_of_tokens_are_refused(minilm_store: Path) -> None:
    with running_server(minilm_store) as server:
        answer = embed_spans(server, [[0, 3]])
        assert answer.status_code == 424
        assert answer.json()["error"] == (
            "spans need vectors of tokens; export minilm@1 with --task embed-all too"
        )


@pytest.mark.parametrize(
    ("after", "message"),
    [
        (
            lambda: [Pooling(64, pooling_mode="cls")],
            "spans need mean pooling; the pooling of m@1 is cls",
        ),
        (
            lambda: [Pooling(64, pooling_mode="mean"), Dense(64, 24)],
            "spans need a model without layers after its pooling; m@1 has some",
        ),
    ],
    ids=["cls", "projected"],
)
def test_spans_of_a_model_that_pools_otherwise_are_refused(
    tmp_path: Path, after: Callable[[], list[Any]], message: str
) -> None:
    checkpoint = sentence_transformer(tmp_path, "bert-plain", *after())
    export(
        str(checkpoint), "m", Store(tmp_path / "store"), ExportOptions(tasks=("embed", "embed-all"))
    )
    with running_server(tmp_path / "store") as server:
        answer = embed_spans(server, [[0, 3]])
        assert answer.status_code == 424
        assert answer.json()["error"].startswith(message)
