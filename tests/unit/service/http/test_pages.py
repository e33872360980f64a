"""The OpenAPI document of routes by hand, and the pages that people open."""

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, computed_field
from starlette.requests import Request
from starlette.responses import Response

from cloze.service.http.pages import ASSET_PATHS, PAGE, PAGE_HEADERS, PARTS, document
from cloze.service.http.routes import JSON, NPY, RAW, TEXT, Route, RouteDoc


class Asked(BaseModel):
    text: str
    count: int = 3

    @computed_field  # type: ignore[prop-decorator]
    @property
    def length(self) -> int:
        return len(self.text)


class Told(BaseModel):
    answer: int

    @computed_field  # type: ignore[prop-decorator]
    @property
    def doubled(self) -> int:
        return 2 * self.answer


class Wrong(BaseModel):
    error: str


async def handler(_: Request) -> Response:
    raise NotImplementedError


def written(*routes: Route) -> dict[str, Any]:
    return document("T", "7", "words", routes)


def test_a_route_with_a_body() -> None:
    doc = RouteDoc(
        "One line", "group", Told, Wrong, Asked, {"An example": {"text": "a"}}, (RAW, NPY, TEXT),
        {"x-own": ("integer", "a number")}, (415, 429, 499, 422),
    )  # fmt: skip
    made = written(Route("POST", "/ask/{name}/of/{other}", handler, doc))
    assert made["info"] == {"title": "T", "version": "7", "description": "words"}
    operation = made["paths"]["/ask/{name}/of/{other}"]["post"]
    assert operation["operationId"] == "post_ask_name_of_other_"
    assert (operation["summary"], operation["tags"]) == ("One line", ["group"])
    assert operation["parameters"] == [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in ("name", "other")
    ]
    body = operation["requestBody"]
    assert body["required"] is True
    assert body["content"][JSON]["examples"] == {"An example": {"value": {"text": "a"}}}
    reference = {"$ref": "#/components/schemas/Asked"}
    assert body["content"][JSON]["schema"] == reference
    schemas = made["components"]["schemas"]
    assert schemas["Asked"]["properties"].keys() == {"text", "count"}, "what a client sends"
    assert schemas["Told"]["properties"].keys() == {"answer", "doubled"}, "what it gets"
    result = operation["responses"]["200"]
    assert result["description"] == "Success"
    assert result["content"] == {
        JSON: {"schema": {"$ref": "#/components/schemas/Told"}},
        RAW: {"schema": {"type": "string", "format": "binary"}},
        NPY: {"schema": {"type": "string", "format": "binary"}},
        TEXT: {"schema": {"type": "string"}},
    }
    assert list(result["headers"]) == ["x-request-id", "x-model", "x-own"]
    assert result["headers"]["x-own"] == {
        "description": "a number", "schema": {"type": "integer"},
    }  # fmt: skip
    errors = {status: error for status, error in operation["responses"].items() if status != "200"}
    assert errors["499"]["description"] == "Client closed its connection"
    for error in errors.values():
        assert error["content"] == {JSON: {"schema": {"$ref": "#/components/schemas/Wrong"}}}
    more = {
        status: set(error["headers"]) - {"x-request-id", "x-model", "x-error-code"}
        for status, error in errors.items()
    }
    assert more == {
        "415": {"accept-encoding"},
        "429": {"retry-after", "retry-after-ms"},
        "499": set(),
        "422": set(),
    }
    assert errors["429"]["headers"]["retry-after"]["schema"] == {"type": "integer"}


def test_routes_without_bodies() -> None:
    nothing = RouteDoc("a", "b", None, Wrong)
    something = RouteDoc("a", "b", Told, Wrong, Asked)
    made = written(Route("GET", "/x", handler, nothing), Route("POST", "/x", handler, something))
    assert set(made["paths"]["/x"]) == {"get", "post"}
    operation = made["paths"]["/x"]["get"]
    assert set(operation) == {"operationId", "summary", "tags", "responses"}
    assert list(operation["responses"]["200"]["headers"]) == ["x-request-id"]
    assert "examples" not in made["paths"]["/x"]["post"]["requestBody"]["content"][JSON]
    only_text = RouteDoc("a", "b", list[str], Wrong)
    assert written(Route("GET", "/y", handler, only_text))["components"]["schemas"].keys() == {
        "Wrong"
    }


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("page", "script"),
    [(PAGE, "script-src 'self'; style-src 'self'; connect-src 'self'; "),
     (PARTS["/docs"], "script-src 'self'; style-src 'unsafe-inline' ")],
)  # fmt: skip
async def test_a_page_runs_no_script_of_another_address(page: Any, script: str) -> None:
    response = await page(Request({"type": "http", "headers": []}))
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["referrer-policy"] == "no-referrer"
    assert response.headers["x-content-type-options"] == "nosniff"
    policy = f"default-src 'none'; {script}"
    assert response.headers["content-security-policy"].startswith(policy)
    assert set(response.headers) - {"content-type", "content-length"} == PAGE_HEADERS.keys()
    body = bytes(response.body).decode()
    named = {f"/{name}" for name in re.findall(r'(?:href|src)="([^"#:]+\.\w+)"', body)}
    assert named
    assert named <= {*PARTS, *ASSET_PATHS}


@pytest.mark.anyio
async def test_the_parts_of_pages_have_their_types() -> None:
    kinds = {".css": "text/css", ".js": "text/javascript", "": "text/html"}
    for path, handle in PARTS.items():
        response = await handle(Request({"type": "http", "headers": []}))
        assert response.body
        assert response.headers["content-type"] == f"{kinds[Path(path).suffix]}; charset=utf-8"
        assert "content-security-policy" in response.headers
