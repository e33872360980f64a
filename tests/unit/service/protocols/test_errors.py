"""Errors in the shapes of the protocols."""

import asyncio
import json
from dataclasses import asdict
from typing import Any

import pytest
from starlette.requests import Request

from cloze.service.errors import InvalidRequest
from cloze.service.http.errors import ErrorInfo
from cloze.service.protocols import error_response, openai
from cloze.service.protocols.tei import _Decode
from cloze.service.tasks.task import INPUTS
from tests.support.records import recorded, scope_of


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (429, "rate_limit_error"),
        (499, "invalid_request_error"),
        (500, "server_error"),
    ],
)
def test_an_error_of_openai_s_protocol(status: int, kind: str) -> None:
    info = ErrorInfo(status, "Validation", "invalid_value", "why")
    error = {"message": "why", "type": kind, "param": None, "code": None}
    assert asdict(openai.error_body(info)) == {"error": error, "detail": "why"}


def test_the_protocol_of_a_path_writes_its_errors() -> None:
    def shape(path: str) -> dict[str, Any]:
        request = Request(scope_of(recorded(path)))
        response = asyncio.run(error_response(request, InvalidRequest("why"), 30.0))
        assert response.headers["x-error-code"] == "invalid_value", path
        body: dict[str, Any] = json.loads(response.body)
        return body

    native = {"error": "why", "error_type": "Validation", "code": "invalid_value"}
    for path in ("/", "/embed", "/nowhere", "/v1", "*"):
        assert shape(path) == native, path
    for path in ("/v1/embeddings", "/v1/nowhere", "/embeddings"):
        assert shape(path)["error"]["type"] == "invalid_request_error", path
    for path in ("/v2", "/v2/models/x/infer", "/v2/nowhere"):
        assert shape(path) == {"error": "why"}, path
    assert shape("/v2/embed") == {"message": "why"}


def test_an_error_keeps_its_words_in_another_place() -> None:
    at = object.__new__(_Decode).in_body  # its names need no models
    assert str(at(INPUTS, None)) == "ids"
    error = InvalidRequest("the windows hold 410 tokens", INPUTS.below(3, "question"), "up to ")
    assert str(error) == "up to inputs[3].question the windows hold 410 tokens"
    assert error.at is not None
    moved = error.moved(at(error.at, None))
    assert str(moved) == "up to ids[3].question the windows hold 410 tokens"
    assert type(moved) is InvalidRequest
