"""The OpenAPI document is true: every example runs, and every answer has its documented shape."""

from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from tests.support.command import call
from tests.support.released_clients import CLIENTS, environment
from tests.support.serving import Server


@pytest.fixture(scope="module")
def document(every_task: Server) -> dict[str, Any]:
    answer: dict[str, Any] = httpx.get(f"{every_task.url}/openapi.json").json()
    return answer


def check(document: dict[str, Any], path: str, method: str, response: httpx.Response) -> None:
    """Check status, content type, headers and body of an answer against the document."""
    operation = document["paths"][path][method]
    documented = operation["responses"][str(response.status_code)]
    kind = response.headers.get("content-type", "").partition(";")[0]
    if response.content:
        assert kind in documented["content"]
    for name in response.headers.keys() - {"content-type", "content-length", "date"}:
        assert name in documented["headers"], f"{path} answers with {name}, undocumented"
    if kind == "application/json":
        schema = documented["content"][kind]["schema"] | {"components": document["components"]}
        jsonschema.validate(response.json(), schema)


WITHOUT_BODY = {"/admin/reload"}


def test_examples_of_every_route_run(every_task: Server, document: dict[str, Any]) -> None:
    bodies = {
        (path, title): example["value"]
        for path, operations in document["paths"].items()
        if "post" in operations and path not in WITHOUT_BODY
        for title, example in operations["post"]["requestBody"]["content"]["application/json"][
            "examples"
        ].items()
    }
    assert {path for path, _ in bodies} | WITHOUT_BODY == {
        path for path, operations in document["paths"].items() if "post" in operations
    }
    for (path, _), body in bodies.items():
        model = "cloze-bert.embed" if path.startswith("/v2/") else "cloze-bert"
        if "{organization}" in path:
            continue  # the name of no served model has a slash; see test_reranking
        response = httpx.post(every_task.url + path.format(model=model, version="1"), json=body)
        check(document, path, "post", response)
        assert response.status_code == 200, response.text


def test_routes_of_operators_are_documented(every_task: Server, document: dict[str, Any]) -> None:
    for path in ("/healthz", "/readyz", "/health", "/info", "/metrics", "/v1/models"):
        check(document, path, "get", httpx.get(every_task.url + path))


def test_a_method_that_no_route_has_gets_the_methods_of_its_path(
    every_task: Server, document: dict[str, Any]
) -> None:
    for path, operations in document["paths"].items():
        named = path.format(model="cloze-bert", version="1", organization="nvidia")
        response = httpx.options(every_task.url + named)
        assert response.status_code == 405
        allowed = {method.lower() for method in response.headers["allow"].split(", ")}
        assert allowed - {"head"} == operations.keys(), path


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_schema_driven_tester_finds_nothing(every_task: Server, tmp_path: Path) -> None:
    """schemathesis, in an environment of its own, with all its checks.

    Its phases of examples and of coverage find most of what is wrong, and do not depend on the
    seed. A longer search has ``--max-time 300``.
    """
    program = environment("schemathesis.txt", tmp_path / "environment") / "schemathesis"
    command = [program, "--config-file", CLIENTS / "schemathesis.toml", "run"]
    options = ("--checks", "all", "--continue-on-failure", "--max-examples", "40")
    document = f"{every_task.url}/openapi.json"
    done = call(*command, document, *options, cwd=tmp_path)
    operations = len([o for path in httpx.get(document).json()["paths"].values() for o in path])
    assert f"Tested: {operations}" in done.stdout, done.stdout[-2000:]
