"""The OpenAPI document of routes by hand, and the pages that people open."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, computed_field
from starlette.requests import Request
from starlette.responses import Response

from cloze.service.http.pages import ASSET_PATHS, PAGE, PAGE_HEADERS, PARTS, document
from cloze.service.http.routes import NPY, RAW, TEXT, Route, RouteDoc


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


def test_the_document_of_routes() -> None:
    """`openapi.json` is the document of four routes: with all there is, and with less."""
    full = RouteDoc(
        "One line", "group", Told, Wrong, Asked, {"An example": {"text": "a"}}, (RAW, NPY, TEXT),
        {"x-own": ("integer", "a number")}, (415, 429, 499, 422),
    )  # fmt: skip
    made = document(
        "T", "7", "words",
        [
            Route("POST", "/ask/{name}/of/{other}", handler, full),
            Route("GET", "/x", handler, RouteDoc("a", "b", None, Wrong)),
            Route("POST", "/x", handler, RouteDoc("a", "b", Told, Wrong, Asked)),
            Route("GET", "/y", handler, RouteDoc("a", "b", list[str], Wrong)),
        ],
        {"/y"},
    )  # fmt: skip
    assert "securitySchemes" not in document("T", "7", "words", [])["components"]
    text = json.dumps(made, indent=1) + "\n"
    file = Path(__file__).with_name("openapi.json")
    if os.environ.get("REWRITE_WORDING"):
        file.write_text(text)
    assert text == file.read_text()


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
    kinds = {".css": "text/css", ".js": "text/javascript", "": "text/html"}
    for path, handle in PARTS.items():
        response = await handle(Request({"type": "http", "headers": []}))
        assert response.body
        assert response.headers["content-type"] == f"{kinds[Path(path).suffix]}; charset=utf-8"
        assert "content-security-policy" in response.headers
