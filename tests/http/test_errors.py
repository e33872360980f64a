"""The status and the type of every error, in every protocol, from a table of this test."""

import asyncio
import json

import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request

from cloze.service import errors
from cloze.service.http.errors import describe_error
from cloze.service.protocols import PROTOCOLS, WireProtocol, error_response
from tests.support.records import recorded, scope_of

TABLE: dict[type[Exception], tuple[int, str, str]] = {
    errors.MalformedRequest: (400, "Validation", "invalid_request_error"),
    errors.EmptyRequest: (400, "Empty", "invalid_request_error"),
    errors.Unauthorized: (401, "Validation", "invalid_request_error"),
    errors.Forbidden: (403, "Validation", "invalid_request_error"),
    errors.UnknownModel: (404, "Validation", "invalid_request_error"),
    errors.SlowRequest: (408, "Validation", "invalid_request_error"),
    errors.ReloadRefused: (409, "Backend", "invalid_request_error"),
    errors.OtherEmbeddingSpace: (412, "Validation", "invalid_request_error"),
    errors.RequestTooLarge: (413, "Validation", "invalid_request_error"),
    errors.UnsupportedEncoding: (415, "Validation", "invalid_request_error"),
    errors.InvalidRequest: (422, "Validation", "invalid_request_error"),
    errors.WrongTask: (424, "Backend", "invalid_request_error"),
    errors.Overloaded: (429, "Overloaded", "rate_limit_error"),
    errors.ClientGone: (499, "Validation", "invalid_request_error"),
    errors.EngineFailed: (500, "Backend", "server_error"),
    errors.AdapterUnavailable: (503, "Unhealthy", "server_error"),
    errors.ShuttingDown: (503, "Unhealthy", "server_error"),
    errors.EngineDead: (503, "Unhealthy", "server_error"),
    errors.DeadlineExceeded: (504, "Overloaded", "server_error"),
    RuntimeError: (500, "Backend", "server_error"),
}
"""Status, error_type of text-embeddings-inference, and type of OpenAI."""


def error_of(kind: type[Exception]) -> Exception:
    return errors.Overloaded("why", 3) if kind is errors.Overloaded else kind("why")


def leaves(kind: type[Exception]) -> set[type[Exception]]:
    below = [leaf for child in kind.__subclasses__() for leaf in leaves(child)]
    return set(below) or {kind}


def request() -> Request:
    scope = {"type": "http", "method": "POST", "path": "/embed", "headers": [], "query_string": b""}
    return Request(scope | {"server": ("localhost", 80), "scheme": "http"})


def test_the_table_has_every_error() -> None:
    ours = {kind for kind in leaves(errors.ServiceError) if kind.__module__.startswith("cloze.")}
    assert ours == TABLE.keys() - {RuntimeError}


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.prefixes[0])
@pytest.mark.parametrize("kind", TABLE, ids=lambda kind: kind.__name__)
def test_an_error_has_its_status_and_its_type(
    kind: type[Exception], protocol: WireProtocol
) -> None:
    status, error_type, openai_type = TABLE[kind]
    asked = Request(scope_of(recorded(protocol.prefixes[0])))
    response = asyncio.run(error_response(asked, error_of(kind), 30.0))
    message = "an internal error; it was logged" if kind is RuntimeError else "why"
    only_400 = 400 if status == 422 else status
    expected = {
        "/v1/": (
            only_400,
            {
                "error": {
                    "message": message,
                    "type": openai_type,
                    "param": None,
                    "code": "model_not_found" if kind is errors.UnknownModel else None,
                },
                "detail": message,
            },
        ),
        "/v2/embed": (only_400, {"message": message}),
        "/v2": (only_400, {"error": message}),
    }
    usual = (status, {"error": message, "error_type": error_type})
    assert (response.status_code, json.loads(response.body)) == expected.get(
        protocol.prefixes[0], usual
    )


@pytest.mark.parametrize("status", [404, 405])
def test_an_error_of_the_router_is_the_client_s(status: int) -> None:
    info = describe_error(request(), HTTPException(status))
    assert (info.status, info.kind) == (status, "Validation")
