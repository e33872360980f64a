"""The architecture grows by one module and one row: a toy task, written and served from this file.

Run as a module, the file is a server that has the task besides its own.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from cloze.model_store.batch import HeadOutputs
from cloze.model_store.heads import HeadRequest
from cloze.model_store.heads.embedding import HEAD
from cloze.service.server.process import serve_in_one_process
from cloze.service.server.startup import begin
from cloze.service.settings import load_settings
from cloze.service.tasks import TASKS
from cloze.service.tasks.task import PreparedRequest, Task, TaskContext
from cloze.service.tasks.texts import LongTextRule, encode_texts
from cloze.service.tasks.wire import NoParameters
from tests.support.refusals import error_of
from tests.support.serving import Server, running_server


@dataclass(frozen=True, slots=True)
class Length:
    """The Euclidean length of a text's embedding."""

    length: float


def prepare(inputs: Any, _: NoParameters, context: TaskContext) -> PreparedRequest[None]:
    texts = context.limits.checked(inputs)
    rule = LongTextRule("truncate")
    return encode_texts(texts, rule, context, {HEAD.name: HeadRequest()}).prepared(None)


def decode(_: None, outputs: Sequence[HeadOutputs], __: TaskContext) -> list[Length]:
    vectors = [output[HEAD.name].array for output in outputs]
    return [Length(float((vector @ vector) ** 0.5)) for vector in vectors]


TOY = Task(
    name="toy-length",
    route="/toy-length",
    summary="The length of a text's embedding",
    heads=(HEAD.name,),
    inputs=str | list[str],
    parameters=NoParameters,
    result=Length | list[Length],
    alone=(str,),
    prepare=prepare,
    decode=decode,
    examples={"One text": {"inputs": "the king"}},
)


def main() -> int:
    names = [name.removeprefix("--").replace("-", "_") for name in sys.argv[1::2]]
    settings = load_settings(dict(zip(names, sys.argv[2::2], strict=True)))
    begin(settings)
    return serve_in_one_process(settings, tasks={**TASKS, TOY.name: TOY})


@pytest.fixture(scope="module")
def toy_server(tiny_store: Path) -> Iterator[Server]:
    command = (sys.executable, "-m", "tests.system.test_growth")
    with running_server(tiny_store, command=command) as server:
        yield server


def test_the_task_answers(toy_server: Server) -> None:
    vector = httpx.post(
        f"{toy_server.url}/embed", json={"inputs": "the king", "normalize": False}
    ).json()[0]
    response = httpx.post(f"{toy_server.url}/toy-length", json={"inputs": "the king"})
    assert response.json() == {"length": pytest.approx(sum(x * x for x in vector) ** 0.5, rel=1e-5)}
    assert response.headers["x-compute-tokens"] == "4"
    many = httpx.post(f"{toy_server.url}/toy-length", json={"inputs": ["the king", "a"]}).json()
    assert [list(row) for row in many] == [["length"], ["length"]]


def test_bad_input_gets_the_errors_of_every_task(toy_server: Server) -> None:
    url = f"{toy_server.url}/toy-length"
    cases: list[tuple[object, int, str]] = [
        ({"inputs": ""}, 400, "empty_input"),
        ({"inputs": []}, 400, "empty_input"),
        ({"inputs": 5}, 422, "invalid_body"),
        ({"inputs": "a", "parameters": {}}, 422, "invalid_body"),
        ({"inputs": "a", "model": "bert-qa"}, 424, "task_not_supported"),
    ]
    for body, status, code in cases:
        assert error_of(httpx.post(url, json=body)) == (status, code), body
    assert httpx.get(url).status_code == 405


def test_everything_else_lists_it(toy_server: Server) -> None:
    info = httpx.get(f"{toy_server.url}/info").json()
    assert info["defaults"]["toy-length"] == "bert@1"
    able = {model["name"] for model in info["models"] if "toy-length" in model["tasks"]}
    assert able == {"bert", "distilbert"}
    document = httpx.get(f"{toy_server.url}/openapi.json").json()
    operation = document["paths"]["/toy-length"]["post"]
    assert operation["requestBody"]["content"]["application/json"]["examples"]["One text"]
    assert "Length" in document["components"]["schemas"]
    httpx.post(f"{toy_server.url}/toy-length", json={"inputs": "a"})
    metrics = httpx.get(f"{toy_server.url}/metrics").text
    series = 'model="distilbert",route="/toy-length",status="200",version="1"} 0.0'
    assert f"cloze_requests_total{{{series}" in metrics
    assert 'cloze_requests_total{model="bert",route="/toy-length"' in metrics


if __name__ == "__main__":
    sys.exit(main())
