"""vLLM's ``/pooling``: the numbers are those of native routes, in each format."""

import base64
import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from tests.support.route_service import CLASSIFIER, EMBEDDER, Service

TAGS = {"token_classification": {"labels": ["O", "B-X", "I-X", "B-Y"]}}
TAGGER = {"name": "tags", "tasks": ("token-classification",), "embedding": None, "heads": TAGS}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    described = ({}, EMBEDDER, CLASSIFIER, TAGGER)
    with Service(tmp_path_factory.mktemp("bundle"), described) as made:
        yield made


def ok(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    return response.json()


def pooled(service: Service, **fields: Any) -> Any:
    answer = ok(service.post("/pooling", {"input": ["the", "of the"]} | fields))
    assert [(row["index"], row["object"]) for row in answer["data"]] == [
        (0, "pooling"),
        (1, "pooling"),
    ]
    assert answer["usage"]["prompt_tokens"] == 7
    return [row["data"] for row in answer["data"]]


def test_each_task_is_a_native_route(service: Service) -> None:
    texts = {"inputs": ["the", "of the"]}
    assert pooled(service, task="embed") == ok(service.post("/embed", texts))
    raw = texts | {"normalize": False, "dimensions": 3}
    asked = {"task": "embed", "normalize": False, "dimensions": 3}
    assert pooled(service, **asked) == ok(service.post("/embed", raw))
    tokens = ok(service.post("/embed_all", texts))
    assert pooled(service) == pooled(service, task="token_embed", model="tiny") == tokens
    assert [len(rows) for rows in tokens] == [3, 4]
    labels = ok(service.post("/classify", texts | {"model": "classes"}))
    by_name = [sorted(row, key=lambda label: str(label["label"])) for row in labels]
    scores = [[label["score"] for label in row] for row in by_name]
    assert pooled(service, model="classes", task="classify") == scores
    by_label = 1 / (1 + 3 * np.exp(-9))
    for fields in ({"model": "tags"}, {"model": "tags", "task": "token_classify"}):
        rows = pooled(service, **fields)
        assert [np.shape(one) for one in rows] == [(3, 4), (4, 4)]
        assert rows[0][0][1] == pytest.approx(by_label)
    assert pooled(service, model="tags", use_activation=False)[0][2] == [0, 9, 0, 0]
    named = ok(service.post("/pooling", {"input": "the", "task": "embed", "more": 1}))
    assert named["model"] == "tiny@3"
    assert named["id"].startswith("pool-")


@pytest.mark.parametrize("path", ["/pooling", "/v1/embeddings"])
def test_the_formats_of_numbers(service: Service, path: str) -> None:
    asked = {"input": ["the", "of the"], "model": "tiny"}
    if path == "/pooling":
        asked["task"] = "embed"
    field = "data" if path == "/pooling" else "embedding"
    expected = [row[field] for row in ok(service.post(path, asked))["data"]]
    types = {"embed_dtype": "float16", "endianness": "big"}
    rows = ok(service.post(path, asked | types | {"encoding_format": "base64"}))["data"]
    decoded = [np.frombuffer(base64.b64decode(row[field]), ">f2") for row in rows]
    assert np.allclose(decoded, expected, atol=1e-3)
    response = service.post(path, asked | types | {"encoding_format": "bytes"})
    assert response.headers["content-type"] == "application/octet-stream"
    described = json.loads(response.headers["metadata"])
    assert described.keys() == {"id", "created", "model", "data", "usage"}
    first, second = described["data"]
    assert first == types | {"index": 0, "start": 0, "end": 8, "shape": [4]}
    data = response.content[second["start"] : second["end"]]
    assert np.allclose(np.frombuffer(data, ">f2"), expected[1], atol=1e-3)
    bare = service.post(path, asked | types | {"encoding_format": "bytes_only"})
    assert bare.content == response.content
    assert "metadata" not in bare.headers


def test_vectors_of_tokens_as_bytes(service: Service) -> None:
    asked = {"input": ["the", "of the"], "encoding_format": "bytes"}
    response = service.post("/pooling", asked)
    shapes = [item["shape"] for item in json.loads(response.headers["metadata"])["data"]]
    assert shapes == [[3, 4], [4, 4]]
    numbers = np.frombuffer(response.content, "<f4").reshape(-1, 4)
    assert numbers.tolist() == np.concatenate(pooled(service)).tolist()


def test_refusals_name_their_type_and_status(service: Service) -> None:
    """`error-wording.txt` has what is refused."""
    for fields, status, kind in (
        ({"model": "x"}, 404, "NotFoundError"),
        ({"task": "plugin"}, 424, "BadRequestError"),
        ({"task": "fly"}, 400, "BadRequestError"),
    ):
        error = service.post("/pooling", {"input": "the"} | fields).json()["error"]
        assert (error["code"], error["type"]) == (status, kind)


def test_rows_of_scores_have_the_limit_of_results(service: Service) -> None:
    text = " ".join(["the"] * 9)
    response = service.post("/pooling", {"input": [text] * 300, "model": "tags"})
    assert ok(response)["usage"]["prompt_tokens"] == 3300
    long = service.post("/pooling", {"input": [text + " the of"] * 300 + ["a"], "model": "tags"})
    assert long.status_code == 400


def test_invocations_with_an_input_are_those_of_the_model(service: Service) -> None:
    for model, path in (
        ("classes", "/classify"),
        ("tags", "/pooling"),
        ("small", "/v1/embeddings"),
    ):
        asked = {"input": "the", "model": model}
        answers = [ok(service.post(one, asked)) for one in ("/invocations", path)]
        assert answers[0]["data"] == answers[1]["data"]
