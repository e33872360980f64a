"""The OpenAPI document of routes by hand, and the pages that people open."""

import asyncio
import re
from pathlib import Path
from typing import Any

from pydantic import BaseModel, computed_field
from starlette.requests import Request
from starlette.responses import Response

from cloze.service.http.pages import ASSET_PATHS, ASSETS, PAGE, PAGE_HEADERS, PARTS, document
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
    assert made["openapi"] == "3.1.0"
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
    assert {status: error["description"] for status, error in errors.items()} == {
        "415": "Unsupported Media Type", "429": "Too Many Requests",
        "499": "Client closed its connection", "422": errors["422"]["description"],
    }  # fmt: skip
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
    assert errors["415"]["headers"]["accept-encoding"]["schema"] == {"type": "string"}


def test_routes_without_bodies() -> None:
    nothing = RouteDoc("a", "b", None, Wrong)
    something = RouteDoc("a", "b", Told, Wrong, Asked)
    made = written(Route("GET", "/x", handler, nothing), Route("POST", "/x", handler, something))
    assert set(made["paths"]["/x"]) == {"get", "post"}
    operation = made["paths"]["/x"]["get"]
    assert operation["operationId"] == "get_x"
    assert set(operation) == {"operationId", "summary", "tags", "responses"}
    assert set(operation["responses"]) == {"200"}
    assert set(operation["responses"]["200"]) == {"description", "headers"}
    assert list(operation["responses"]["200"]["headers"]) == ["x-request-id"]
    assert "examples" not in made["paths"]["/x"]["post"]["requestBody"]["content"][JSON]
    only_text = RouteDoc("a", "b", list[str], Wrong)
    assert written(Route("GET", "/y", handler, only_text))["components"]["schemas"].keys() == {
        "Wrong"
    }


# ---- pages -------------------------------------------------------------------------------------


def opened(handle: Any) -> tuple[str, dict[str, str]]:
    response = asyncio.run(handle(Request({"type": "http"})))
    assert response.status_code == 200
    headers = {n.decode(): v.decode() for n, v in response.raw_headers}
    return bytes(response.body).decode(), headers


def test_the_page_and_its_parts() -> None:
    body, headers = opened(PAGE)
    assert body.startswith("<!doctype html>")
    assert headers["content-type"] == "text/html; charset=utf-8"
    assert headers["cache-control"] == "no-cache"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["x-content-type-options"] == "nosniff"
    policy = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    assert headers["content-security-policy"].startswith(policy)
    assert headers.keys() - {"content-type", "content-length"} == PAGE_HEADERS.keys()
    assert all(kind == "string" for kind, _ in PAGE_HEADERS.values())
    named = set(re.findall(r'(?:href|src)="(page/[^"]+)"', body))
    assert {f"/{name}" for name in named} <= PARTS.keys()
    assert PARTS.keys() == {
        "/docs", "/page/docs.js", "/page/style.css", "/page/page.js", "/page/panels.js",
        "/page/elements.js", "/page/live.js",
    }  # fmt: skip
    for path, handle in PARTS.items():
        text, headers = opened(handle)
        kinds = {".css": "text/css", ".js": "text/javascript", "": "text/html"}
        kind = kinds[Path(path).suffix]
        assert headers["content-type"] == f"{kind}; charset=utf-8"
        assert text
        assert "content-security-policy" in headers


def test_the_documentation_page_runs_no_script_of_another_address() -> None:
    body, headers = opened(PARTS["/docs"])
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'unsafe-inline' ")
    assert "img-src 'self' data:;" in policy
    assert headers["cache-control"] == "no-cache"
    assert "<title>Cloze</title>" in body
    assert ASSETS == "/docs/assets"
    assert ASSET_PATHS == (
        "/docs/assets/swagger-ui-bundle.js", "/docs/assets/swagger-ui.css",
        "/docs/assets/favicon.png",
    )  # fmt: skip
    script, style, icon = (path.removeprefix("/") for path in ASSET_PATHS)
    assert re.findall(r'<script defer src="(.*?)"></script>', body) == [script, "page/docs.js"]
    assert f'rel="stylesheet" href="{style}"' in body
    assert f'rel="icon" href="{icon}"' in body
    assert 'data-url="openapi.json"' in body
