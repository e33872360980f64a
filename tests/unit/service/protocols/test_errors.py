"""Errors in the shapes of the protocols."""

import asyncio
import json
from dataclasses import asdict
from typing import Any

import pytest
from starlette.requests import Request

from cloze.service.errors import InvalidRequest, UnknownModel
from cloze.service.http.errors import ErrorInfo
from cloze.service.protocols import error_response, openai, protocol
from cloze.service.protocols.protocol import ErrorBody
from tests.support.records import recorded, scope_of


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "invalid_request_error"),
        (422, "invalid_request_error"),
        (424, "invalid_request_error"),
        (429, "rate_limit_error"),
        (499, "invalid_request_error"),
        (500, "server_error"),
        (503, "server_error"),
        (504, "server_error"),
    ],
)
def test_an_error_of_openai_s_protocol(status: int, kind: str) -> None:
    info = ErrorInfo(status, "Validation", "why", InvalidRequest("why"))
    error = {"message": "why", "type": kind, "param": None, "code": None}
    assert asdict(openai.error_body(info)) == {"error": error, "detail": "why"}


def test_an_unknown_model_has_a_code() -> None:
    info = ErrorInfo(404, "Validation", "why", UnknownModel("why"))
    assert openai.error_body(info).error.code == "model_not_found"


def test_an_error_of_the_native_protocol() -> None:
    info = ErrorInfo(504, "Overloaded", "why", InvalidRequest("why"))
    assert protocol.error_body(info) == ErrorBody("why", "Overloaded")


def test_the_protocol_of_a_path_writes_its_errors() -> None:
    def shape(path: str) -> dict[str, Any]:
        request = Request(scope_of(recorded(path)))
        response = asyncio.run(error_response(request, InvalidRequest("why"), 30.0))
        body: dict[str, Any] = json.loads(response.body)
        return body

    native = {"error": "why", "error_type": "Validation"}
    for path in ("/", "/embed", "/predict", "/nowhere", "/v1", "*"):
        assert shape(path) == native, path
    for path in ("/v1/embeddings", "/v1/nowhere", "/embeddings"):
        assert shape(path)["error"]["type"] == "invalid_request_error", path
    for path in ("/v2", "/v2/models/x/infer", "/v2/nowhere"):
        assert shape(path) == {"error": "why"}, path
    assert shape("/v2/embed") == {"message": "why"}
