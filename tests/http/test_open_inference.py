"""The Open Inference Protocol: every task of every model, as tensors in JSON and in bytes."""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import pytest

from cloze.service.http.record import Paths
from cloze.service.protocols.tensors import TaskTensors, read_texts, write_tensor
from cloze.service.tasks import TASKS
from tests.support.serving import Server, running_server

TEXTS = ["the king", "the old king", "a moon over the sea"]


@pytest.fixture(scope="module")
def server(tiny_store: Path) -> Iterator[Server]:
    with running_server(tiny_store) as server:
        yield server


def tensor(name: str, *texts: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "shape": [len(texts)], "datatype": "BYTES", "data": list(texts)} | fields


def infer(server: Server, model: str, *tensors: dict[str, Any], **fields: Any) -> httpx.Response:
    body = {"inputs": list(tensors)} | fields
    return httpx.post(f"{server.url}/v2/models/{model}/infer", json=body)


def outputs(response: httpx.Response) -> dict[str, list[Any]]:
    assert response.status_code == 200, response.text
    return {output["name"]: output["data"] for output in response.json()["outputs"]}


def served(server: Server) -> list[str]:
    names: list[str] = httpx.get(f"{server.url}/v2/models").json()["models"]
    return names


def test_every_task_answers_as_its_own_route(every_task: Server) -> None:
    """The JSON of each input's result is what the native route returns for these inputs."""
    server = every_task
    samples = {
        "text": ["the king", "a moon over the sea"],
        "next": ["he was old.", "a sea."],
        "question": ["who is old?", "where?"],
        "context": ["the king is old.", "over the sea."],
        "source_sentence": ["the king"],
        "sentences": TEXTS,
    }
    names = served(server)
    assert {name.rpartition(".")[2] for name in names} == TASKS.keys()
    for name in names:
        bundle, _, task_name = name.rpartition(".")
        task, tensors = TASKS[task_name], TaskTensors(TASKS[task_name])
        given = {t.name: samples[t.name] for t in tensors.inputs if t.name in samples}
        if task_name == "fill-mask":
            given = {"text": ["the [MASK] king", "a [MASK] [MASK]"]}
        labels = {"candidate_labels": ["a sea", "a war"]}
        parameters = labels if "candidate_labels" in task.own_parameters else {}
        columns = (tensor(n, *texts) for n, texts in given.items())
        found = outputs(infer(server, name, *columns, parameters=parameters))
        if set(given) == {"text"}:
            inputs: Any = given["text"]
        elif "sentences" in given:
            inputs = {"source_sentence": "the king", "sentences": TEXTS}
        else:
            inputs = [
                dict(zip(given, row, strict=True)) for row in zip(*given.values(), strict=True)
            ]
        native = httpx.post(
            server.url + task.route,
            json={"inputs": inputs, "model": bundle, "parameters": parameters},
        ).json()
        if task.vectors:
            flat = np.concatenate([np.ravel(row) for row in native])
            np.testing.assert_allclose(found["embedding"], flat, atol=1e-5, err_msg=name)
        else:
            for result, expected in zip(found["result"], native, strict=True):
                assert same(orjson.loads(result), expected), (name, result, expected)
        described = httpx.get(f"{server.url}/v2/models/{name}").json()
        assert set(found) <= {output["name"] for output in described["outputs"]}


def same(found: Any, expected: Any) -> bool:
    """Whether two values are equal, but for the last digits of their numbers."""
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(
            same(found[key], expected[key]) for key in expected
        )
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(same, found, expected))
    if isinstance(expected, float):
        return bool(found == pytest.approx(expected, abs=1e-5))
    return bool(found == expected)


def test_columns_hold_the_entries_of_all_inputs(server: Server) -> None:
    response = infer(
        server,
        "bert.fill-mask",
        tensor("text", "a [MASK]", "a [MASK] [MASK]"),
        id="mine",
        parameters={"top_k": 3},
    )
    found = outputs(response)
    assert response.json()["id"] == "mine"
    assert response.json()["model_version"] == "1"
    assert response.headers["x-model"] == "bert@1"
    assert found["count"] == [3, 6]
    first = orjson.loads(found["result"][0])
    assert found["token_str"][:3] == [entry["token_str"] for entry in first]
    assert found["score"][:3] == pytest.approx([entry["score"] for entry in first])


def test_spans_of_a_text_are_rows_of_one_input(every_task: Server) -> None:
    text = "the old king saw a moon over the sea."
    parameters = {"spans": [[0, 12], [13, 23]], "normalize": False}
    answer = infer(every_task, "cloze-bert.embed", tensor("text", text), parameters=parameters)
    found = outputs(answer)
    own = httpx.post(f"{every_task.url}/embed", json={"inputs": text, **parameters}).json()
    assert found["count"] == [2]
    assert np.reshape(found["embedding"], (2, -1)) == pytest.approx(np.array(own), abs=1e-6)
    huge = {"spans": [[0, 10**30]]}
    refused = infer(every_task, "cloze-bert.embed", tensor("text", text), parameters=huge)
    assert refused.status_code == 400
    several = infer(
        every_task, "cloze-bert.embed", tensor("text", text, text), parameters=parameters
    )
    assert (several.status_code, "spans are parts of one text" in several.text) == (400, True)


def test_only_the_outputs_that_are_asked_for(server: Server) -> None:
    found = outputs(infer(server, "bert.embed", tensor("text", "a"), outputs=[{"name": "count"}]))
    assert found == {"count": [1]}


def test_bytes_in_and_out(server: Server) -> None:
    texts = [text.encode() for text in (*TEXTS, "日本 \N{GRINNING FACE}")]
    packed = b"".join(struct.pack("<I", len(text)) + text for text in texts)
    head = orjson.dumps(
        {
            "inputs": [
                {
                    "name": "text",
                    "shape": [4],
                    "datatype": "BYTES",
                    "parameters": {"binary_data_size": len(packed)},
                }
            ],
            "parameters": {"binary_data_output": True},
        }
    )
    response = httpx.post(
        f"{server.url}/v2/models/bert.embed/versions/1/infer",
        content=head + packed,
        headers={"inference-header-content-length": str(len(head))},
    )
    assert response.status_code == 200, response.text
    length = int(response.headers["inference-header-content-length"])
    answer = orjson.loads(response.content[:length])
    size = answer["outputs"][0]["parameters"]["binary_data_size"]
    shape = answer["outputs"][0]["shape"]
    vectors = np.frombuffer(response.content[length : length + size], "<f4").reshape(shape)
    counts = np.frombuffer(response.content[length + size :], "<i8")
    json = {"inputs": [text.decode() for text in texts], "model": "bert"}
    native = httpx.post(f"{server.url}/embed", json=json).json()
    np.testing.assert_allclose(vectors, native, atol=1e-5)
    assert counts.tolist() == [1, 1, 1, 1]


TEXT = tensor("text", "a")


@pytest.mark.parametrize(
    ("model", "body", "status", "message"),
    [
        ("bert", {"inputs": [TEXT]}, 404, "a name is <bundle>.<task>"),
        ("none.embed", {"inputs": [TEXT]}, 404, "no model 'none' is served"),
        ("bert.none", {"inputs": [TEXT]}, 404, "no model 'bert.none' is served"),
        ("distilbert.nsp", {"inputs": [TEXT]}, 404, "cannot do nsp"),
        ("bert.embed", {}, 400, "inputs: Field required"),
        ("bert.embed", {"inputs": []}, 400, "inputs lacks the tensor text"),
        ("bert.embed", {"inputs": [tensor("txt", "a")]}, 400, "embed takes text"),
        ("bert.embed", {"inputs": [TEXT, TEXT]}, 400, "'text' twice"),
        ("bert.embed", {"inputs": [tensor("text")]}, 400, "text is empty"),
        ("bert.embed", {"inputs": [TEXT | {"shape": [2]}]}, 400, "has 1 texts; its shape says 2"),
        ("bert.embed", {"inputs": [TEXT | {"shape": [1, 2]}]}, 400, r"the shape \[1, 2\]"),
        (
            "bert.embed",
            {"inputs": [TEXT | {"datatype": "FP32"}]},
            400,
            "inputs.0.datatype: Input should be 'BYTES', got 'FP32'",
        ),
        (
            "bert.embed",
            {"inputs": [TEXT | {"data": [1]}]},
            400,
            r"inputs\.0\.data\.0: Input should",
        ),
        ("bert.embed", {"inputs": [TEXT | {"data": None}]}, 400, "neither data nor binary"),
        ("bert.embed", {"inputs": [TEXT], "outputs": [{"name": "x"}]}, 400, "outputs names 'x'"),
        (
            "bert.embed",
            {"inputs": [TEXT], "parameters": {"x": 1}},
            400,
            "parameters.x: there is no such field",
        ),
        ("bert.nsp", {"inputs": [TEXT]}, 400, "lacks the tensor next"),
        ("bert.nsp", {"inputs": [TEXT, tensor("next", "")]}, 400, "next[0] is empty"),
        ("bert.embed", {"inputs": [tensor("text", "a", "")]}, 400, "text[1] is empty"),
        ("bert.nsp", {"inputs": [TEXT, tensor("next", "a", "b")]}, 400, "text 1, next 2"),
        (
            "bert.similarity",
            {"inputs": [tensor("source_sentence", "a", "b"), tensor("sentences", "a")]},
            400,
            "source_sentence has 2 texts; it needs exactly 1",
        ),
        (
            "bert.embed",
            {"inputs": [TEXT | {"parameters": {"binary_data_size": 1}}]},
            400,
            "binary_data_size 1; 0 bytes are left",
        ),
    ],
)
def test_bad_input(
    server: Server, model: str, body: dict[str, Any], status: int, message: str
) -> None:
    response = httpx.post(f"{server.url}/v2/models/{model}/infer", json=body)
    assert response.status_code == status, response.text
    assert response.json().keys() == {"error"}
    assert message.replace("\\", "") in response.json()["error"]


@pytest.mark.parametrize(
    ("length", "packed", "message"),
    [
        ("0", b"", "from 1 to"),
        ("999999", b"", "from 1 to"),
        ("-1", b"", "got '-1'"),
        (None, b"\x05\0\0\0abc", "text ends within text 0"),
        (None, b"\x01\0", "text ends within text 0"),
        (None, b"\x01\0\0\0\xff", "that is not UTF-8"),
        (None, b"\x01\0\0\0a\x01\0\0\0b", "has 2 texts; its shape says 1"),
    ],
)
def test_bad_bytes(server: Server, length: str | None, packed: bytes, message: str) -> None:
    parameters = {"binary_data_size": len(packed)}
    text = {"name": "text", "shape": [1], "datatype": "BYTES", "parameters": parameters}
    head = orjson.dumps({"inputs": [text]})
    response = httpx.post(
        f"{server.url}/v2/models/bert.embed/infer",
        content=head + packed,
        headers={"inference-header-content-length": length or str(len(head))},
    )
    assert response.status_code == 400, response.text
    assert message in response.json()["error"]


def test_bytes_that_belong_to_no_tensor(server: Server) -> None:
    head = orjson.dumps({"inputs": [TEXT]})
    response = httpx.post(
        f"{server.url}/v2/models/bert.embed/infer",
        content=head + b"abc",
        headers={"inference-header-content-length": str(len(head))},
    )
    assert response.status_code == 400
    assert "3 bytes after the JSON belong to no tensor" in response.json()["error"]


def test_the_metrics_name_the_route_not_the_path(server: Server) -> None:
    outputs(infer(server, "bert.embed", TEXT))
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    routes = {line.split('route="')[1].split('"')[0] for line in lines if 'route="' in line}
    assert "/v2/models/{model}/infer" in routes
    assert not any("bert" in route for route in routes)


def test_paths() -> None:
    paths = Paths(["/embed", "/v2/models/{model}/infer", "/v1/models/{model}"])
    assert paths.route("/embed") == "/embed"
    assert paths.route("/v2/models/a.b/infer") == "/v2/models/{model}/infer"
    for unknown in ("/embed/", "/v2/models/a/b/infer", "/v2/models//infer", "/v2/models/a"):
        assert paths.route(unknown) is None


def test_the_length_of_a_binary_text_is_in_bytes() -> None:
    texts = ["é", "", "北京", "a"]
    data = write_tensor(texts)
    assert data == b"\x02\0\0\0\xc3\xa9" + b"\0\0\0\0" + (
        b"\x06\0\0\0\xe5\x8c\x97\xe4\xba\xac" + b"\x01\0\0\0a"
    )
    assert read_texts(memoryview(data), "text", 2048) == texts
