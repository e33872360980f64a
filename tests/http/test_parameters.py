"""Refusals of every route: of each field of its body, one by one, and of a server that drains.

The OpenAPI document has the fields with their types and bounds. For each field, the test changes the
route's own example so that this field alone is wrong.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
from starlette.testclient import TestClient

from cloze.service.service import single_process
from cloze.service.settings import load_settings
from tests.support.refusals import check_shape
from tests.support.serving import Server

Schema = Mapping[str, Any]
NAMES = {"model": "cloze-bert.embed", "version": "1"}


def filled(path: str) -> str:
    """Return a path with the name of a served model; that of Open Inference names a task too."""
    names = {"model": "cloze-bert"} if path.endswith((":predict", "/reranking")) else NAMES
    return path.format(**names)


class Document:
    """The OpenAPI document of a server."""

    def __init__(self, server: Server) -> None:
        self._document = httpx.get(f"{server.url}/openapi.json").json()

    def resolved(self, schema: Schema) -> Schema:
        while "$ref" in schema:
            schema = self._document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
        return schema

    def bodies(self) -> Iterator[tuple[str, Schema, dict[str, Any]]]:
        """Yield the path, the schema and an example of each request body."""
        for path, operations in self._document["paths"].items():
            request = operations.get("post", {}).get("requestBody")
            if request and "{organization}" not in path:  # no served model has a slash in its name
                content = request["content"]["application/json"]
                for example in content["examples"].values():
                    yield path, self.resolved(content["schema"]), example["value"]

    def has_422(self, path: str) -> bool:
        return "422" in self._document["paths"][path]["post"]["responses"]

    def wrong(self, schema: Schema) -> Iterator[tuple[Any, set[str]]]:
        """Yield values that do not fit a schema, and the codes that they may have."""
        choices = [self.resolved(each) for each in schema.get("anyOf", [schema])]
        types = {choice.get("type", "any") for choice in choices}
        if "any" in types:
            return
        samples = {"boolean": True, "string": "x", "number": 0.5, "array": [{}], "object": {"x": 1}}
        fits = types | ({"number"} if "integer" in types and "number" in types else set())
        for kind in samples.keys() - fits - ({"array"} & fits):
            yield samples[kind], {"invalid_body"}
        for choice in choices:
            if "enum" in choice:
                yield "no such choice", {"invalid_body", "invalid_value"}
            if "minimum" in choice:
                yield choice["minimum"] - 1, {"invalid_value"}
            if "maximum" in choice:
                yield choice["maximum"] + 1, {"invalid_value"}
            if choice.get("minItems") and len(choices) == 1:
                yield [], {"empty_input"}
            if choice.get("minLength"):
                yield "", {"empty_input"}

    def changed(
        self, schema: Schema, value: dict[str, Any], place: str = ""
    ) -> Iterator[tuple[str, Any, set[str]]]:
        """Yield objects with one wrong field each, the field's place, and the codes of the error."""
        if schema.get("additionalProperties") is False:
            yield f"{place}no_such_field", value | {"no_such_field": 1}, {"invalid_body"}
        for name, part in schema.get("properties", {}).items():
            for wrong, codes in self.wrong(part):
                if wrong != "" or name in value:  # else it is one of several fields for texts
                    yield f"{place}{name}", value | {name: wrong}, codes
            inner, held = self.resolved(part), value.get(name, {})
            if inner.get("type") == "object" and isinstance(held, dict):
                for where, changed, codes in self.changed(inner, held, f"{place}{name}."):
                    yield where, value | {name: changed}, codes


def test_every_wrong_field_is_named(every_task: Server) -> None:
    document, problems, asked = Document(every_task), [], 0
    with httpx.Client(base_url=every_task.url, timeout=30) as client:
        for path, schema, example in document.bodies():
            if path == "/invocations" and "inputs" not in example:
                continue  # its schema is that of a body with `inputs`
            usual = 422 if document.has_422(path) else 400
            for place, body, codes in document.changed(schema, example):
                answer, asked = client.post(filled(path), json=body), asked + 1
                code = answer.headers.get("x-error-code")
                status = 400 if code == "empty_input" else usual
                is_named = place.rpartition(".")[2] in answer.text
                if code not in codes or answer.status_code != status or not is_named:
                    problems.append((path, place, str(body)[:200], answer.text[:200]))
    assert not problems
    assert asked > 300


def test_a_drain_refuses_every_route(every_task: Server, every_task_store: Path) -> None:
    service = single_process(load_settings({"model_store": every_task_store}))
    with TestClient(service, base_url="http://localhost") as client:
        service.drain()
        for path, _, example in Document(every_task).bodies():
            answer = client.post(filled(path), json=example)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1"), path
            check_shape(path, answer.json())
