"""A wrong choice, in any field or header of any route, is named in the error, with the choices."""

from collections.abc import Iterator
from typing import Any

import pytest

from cloze.service.http.pages import document
from cloze.service.tasks import TASKS
from tests.unit.service.protocols.service import Service

WRONG = "Neither<1>"

Place = tuple[str | int, ...]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Service(tmp_path_factory.mktemp("bundle")) as made:
        yield made


def choices(schema: Any, schemas: Any, at: Place = ()) -> Iterator[tuple[Place, list[Any]]]:
    """Yield the place of each choice in a JSON schema, and what may be chosen."""
    if "$ref" in schema:
        schema = schemas[schema["$ref"].rpartition("/")[2]]
    if "enum" in schema or "const" in schema:
        yield at, schema.get("enum") or [schema["const"]]
    for kind in ("anyOf", "oneOf", "allOf"):
        for part in schema.get(kind, ()):
            yield from choices(part, schemas, at)
    for name, part in schema.get("properties", {}).items():
        yield from choices(part, schemas, (*at, name))
    if "items" in schema:
        yield from choices(schema["items"], schemas, (*at, 0))


def put(body: Any, at: Place, value: Any) -> Any:
    """Return a body with a value at a place; what lies on the way is made if it is missing."""
    if not at:
        return value
    name, *rest = at
    if isinstance(name, int):
        held = body if isinstance(body, list) and body else [None]
        return [put(held[0], tuple(rest), value), *held[1:]]
    held = body if isinstance(body, dict) else {}
    return held | {name: put(held.get(name), tuple(rest), value)}


def refusals(service: Service) -> Iterator[tuple[str, list[Any], Any]]:
    """Yield (route and place, what may be chosen, the answer) for a wrong value at each choice.

    The parameters of the Open Inference Protocol are those of the tasks, without a schema.
    """
    described = document("Cloze", "1", "a server", service.routes)
    schemas = described["components"]["schemas"]
    for path, operations in described["paths"].items():
        request = operations.get("post", {}).get("requestBody", {"content": {}})
        content = request["content"].get("application/json")
        if content is None:
            continue
        example = next(iter(content["examples"].values()))["value"]
        if "model" in example:
            example = example | {"model": "tiny"}
        url = path.format(model="tiny.embed", version=3)
        for place, allowed in choices(content["schema"], schemas):
            yield f"{url} {place}", allowed, service.post(url, put(example, place, WRONG))

    for task in TASKS.values():
        if (model := service.get(f"/v2/models/tiny.{task.name}")).status_code != 200:
            continue
        inputs = [
            {"name": tensor["name"], "shape": [1], "datatype": "BYTES", "data": ["[MASK]"]}
            for tensor in model.json()["inputs"]
            if tensor["name"] not in ("text_pair", "title")
        ]
        schema = task.parameters.model_json_schema()
        for place, allowed in choices(schema, schema.get("$defs", {})):
            body = put({"inputs": inputs}, ("parameters", *place), WRONG)
            url = f"/v2/models/tiny.{task.name}/infer"
            yield f"{url} {place}", allowed, service.post(url, body)


def test_every_route_names_a_wrong_choice(service: Service) -> None:
    places = []
    for place, allowed, answer in refusals(service):
        places.append(place)
        assert answer.status_code in (400, 422), place
        assert f"'{WRONG}'" in answer.text, f"{place}: {answer.text}"
        assert all(str(choice) in answer.text for choice in allowed if choice), place
    assert len(places) > 60
    assert len({place.partition(" ")[0] for place in places}) > 20


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (7, "got 7"),
        (True, "got true"),
        (["x"], "got an array"),
        ({"x": "y"}, "got an object"),
        ("\u00fcP\n", "got '\\xfcP\\n'"),
    ],
)
def test_a_choice_of_another_type_is_named(service: Service, value: Any, shown: str) -> None:
    answer = service.post("/classify", {"inputs": "a", "parameters": {"long_text": value}})
    assert answer.status_code == 422
    assert answer.json()["error"].endswith(f"'truncate' or 'window', {shown}")


def test_a_long_choice_is_cut(service: Service) -> None:
    body = {"inputs": "a", "truncation_direction": "Neither" * 10_000}
    answer = service.post("/embed", body)
    assert "'NeitherNeither" in answer.text
    assert len(answer.text) < 800


@pytest.mark.parametrize(
    ("header", "value", "choices"),
    [
        ("x-request-class", "neither", ["bulk"]),
        ("accept", "application/octet-stream;dtype=neither", ["float32", "int8"]),
        ("content-encoding", "neither", ["gzip"]),
        ("x-request-timeout-ms", "neither", ["1 to 60000"]),
        ("x-expect-embedding-space", "neither", ["tiny@3"]),
    ],
)
def test_headers_name_a_wrong_choice(
    service: Service, header: str, value: str, choices: list[str]
) -> None:
    answer = service.post("/embed", {"inputs": "a"}, **{header: value})
    assert answer.status_code in (412, 415, 422)
    assert "'neither'" in answer.text
    assert all(choice in answer.text for choice in choices)
