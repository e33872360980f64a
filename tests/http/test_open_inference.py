"""The Open Inference Protocol: every task of every model, as tensors in JSON and in bytes."""

from typing import Any

import httpx
import numpy as np
import orjson

from cloze.service.protocols.tensors import TaskTensors
from cloze.service.tasks import TASKS
from tests.support.faulty import assert_close
from tests.support.serving import Server
from tests.support.tensor_requests import tensor

TEXTS = ["the king", "the old king", "a moon over the sea"]


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
        if bundle == "span":  # it finds the labels of a request
            parameters = {"labels": ["person", "sea"]}
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
                assert_close(orjson.loads(result), expected)
        described = httpx.get(f"{server.url}/v2/models/{name}").json()
        assert set(found) <= {output["name"] for output in described["outputs"]}
