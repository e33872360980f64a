"""Status, type and shape of every error, in every protocol, from a table of this test."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

from cloze.service import errors
from cloze.service.protocols import error_response
from cloze.service.protocols.tei import _Decode
from cloze.service.tasks.task import INPUTS
from tests.support.records import recorded, scope_of

CLIENT = "invalid_request_error"
TABLE: dict[type[Exception], tuple[int, str, str, str]] = {
    errors.MalformedRequest: (400, "malformed_body", "Validation", CLIENT),
    errors.EmptyRequest: (400, "empty_input", "Empty", CLIENT),
    errors.Unauthorized: (401, "unauthorized", "Validation", CLIENT),
    errors.KeyExpired: (401, "key_expired", "Validation", CLIENT),
    errors.Forbidden: (403, "forbidden", "Validation", CLIENT),
    errors.OtherHost: (403, "host_not_allowed", "Validation", CLIENT),
    errors.MissingField: (404, "missing_field", "Validation", CLIENT),
    errors.UnknownModel: (404, "model_not_found", "Validation", CLIENT),
    errors.SlowRequest: (408, "body_timeout", "Validation", CLIENT),
    errors.ReloadRefused: (409, "reload_refused", "Backend", CLIENT),
    errors.OtherEmbeddingSpace: (412, "other_embedding_space", "Validation", CLIENT),
    errors.RequestTooLarge: (413, "body_too_large", "Validation", CLIENT),
    errors.UnsupportedEncoding: (415, "unsupported_encoding", "Validation", CLIENT),
    errors.InvalidRequest: (422, "invalid_value", "Validation", CLIENT),
    errors.InvalidBody: (422, "invalid_body", "Validation", CLIENT),
    errors.TextTooLong: (422, "text_too_long", "Validation", CLIENT),
    errors.TooMany: (422, "limit_exceeded", "Validation", CLIENT),
    errors.WrongTask: (424, "task_not_supported", "Backend", CLIENT),
    errors.Overloaded: (429, "overloaded", "Overloaded", "rate_limit_error"),
    errors.RateLimited: (429, "rate_limited", "Overloaded", "rate_limit_error"),
    errors.ClientGone: (499, "client_closed", "Validation", CLIENT),
    errors.EngineFailed: (500, "engine_failed", "Backend", "server_error"),
    errors.AdapterUnavailable: (503, "adapter_unavailable", "Unhealthy", "server_error"),
    errors.ShuttingDown: (503, "shutting_down", "Unhealthy", "server_error"),
    errors.EngineDead: (503, "engine_dead", "Unhealthy", "server_error"),
    errors.DeadlineExceeded: (504, "timeout", "Overloaded", "server_error"),
    RuntimeError: (500, "internal_error", "Backend", "server_error"),
}
"""Status, code, error_type of text-embeddings-inference, and type of OpenAI."""


def error_of(kind: type[Exception]) -> Exception:
    return kind("why", 3) if issubclass(kind, errors.Overloaded) else kind("why")


PATHS = """/ /predict /vertex /ping /v1/models/bert:predict /v1/ /models /v1/ranking /v1/score /v2
/api/ /api/tags /gliner /v1/rerank /v2/embed /pooling /vectors /rerank"""


@pytest.mark.parametrize("path", PATHS.split())
@pytest.mark.parametrize("kind", TABLE, ids=lambda kind: kind.__name__)
def test_an_error_has_its_status_and_its_type(kind: type[Exception], path: str) -> None:
    status, code, error_type, openai_type = TABLE[kind]
    asked = Request(scope_of(recorded(path)))
    response = asyncio.run(error_response(asked, error_of(kind), 30.0))
    message = "an internal error; it was logged" if kind is RuntimeError else "why"
    only_400 = 400 if status == 422 else status
    error_code = "model_not_found" if kind is errors.UnknownModel else None
    error = {"message": message, "type": openai_type, "param": None, "code": error_code}
    openai, ollama = {"error": error, "detail": message}, {"error": message}
    kinds = {404: "NotFoundError"}
    vllm_type = kinds.get(status, "InternalServerError" if status >= 500 else "BadRequestError")
    vllm = {"message": message, "type": vllm_type, "param": None, "code": only_400}
    usual = {"error": message, "error_type": error_type, "code": code}
    expected: dict[str, Any] = {
        **dict.fromkeys(("/v1/", "/models", "/v1/ranking", "/v1/score"), (only_400, openai)),
        **dict.fromkeys(("/v2", "/api/", "/api/tags", "/gliner"), (only_400, ollama)),
        "/v1/rerank": (only_400, openai | {"message": message}),
        "/v2/embed": (only_400, {"message": message}),
        "/pooling": (only_400, {"error": vllm}),
        "/vectors": (status, {"error": message}),
        # A path of several protocols: each reads its own fields.
        "/rerank": (status, usual | {"message": message, "detail": message}),
    }
    assert response.headers["x-error-code"] == code
    answer = response.status_code, json.loads(response.body)
    assert answer == expected.get(path, (status, usual))


def test_every_code_is_documented_with_its_status_and_type() -> None:
    """Those of connections and of the router have the type "Validation", and a bug "Backend"."""
    kinds = {k for k in vars(errors).values() if isinstance(k, type)} - TABLE.keys()
    assert {k for k in kinds if issubclass(k, errors.ServiceError)} == {
        *(errors.ServiceError, errors.RequestError)
    }
    others = {
        code: (status, "Backend" if status == 500 else "Validation")
        for status, code in errors.CODES_OF_STATUSES.items()
    }
    codes = others | {code: (status, kind) for status, code, kind, _ in TABLE.values()}
    page = (Path(__file__).parents[4] / "docs" / "api.md").read_text()
    rows = re.findall(r"^\| `([a-z_]+)` \| (\d{3}) \| (\w+) \| .+ \|$", page, re.MULTILINE)
    assert len(rows) == len(codes)
    assert {code: (int(status), kind) for code, status, kind in rows} == codes


def test_the_protocol_of_a_path_writes_its_errors() -> None:
    def shape(path: str) -> dict[str, Any]:
        request = Request(scope_of(recorded(path)))
        response = asyncio.run(error_response(request, errors.InvalidRequest("why"), 30.0))
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
    error = errors.InvalidRequest(
        "the windows hold 410 tokens", INPUTS.below(3, "question"), "up to "
    )
    assert str(error) == "up to inputs[3].question the windows hold 410 tokens"
    assert error.at is not None
    moved = error.moved(at(error.at, None))
    assert str(moved) == "up to ids[3].question the windows hold 410 tokens"
    assert type(moved) is errors.InvalidRequest
