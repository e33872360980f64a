"""Status, type and shape of every error, in every protocol, from the table of the documents."""

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

PAGE = (Path(__file__).parents[4] / "docs" / "api.md").read_text()
ROWS = re.findall(r"^\| `([a-z_]+)` \| (\d{3}) \| (\w+) \| .+ \|$", PAGE, re.MULTILINE)
DOCUMENTED = {code: (int(status), kind) for code, status, kind in ROWS}
"""Status, and error_type of text-embeddings-inference, of each code."""

KINDS = [kind for kind in vars(errors).values() if isinstance(getattr(kind, "code", None), str)]


def error_of(kind: type[Exception]) -> Exception:
    return kind("why", 3) if issubclass(kind, errors.Overloaded) else kind("why")


PATHS = """/ /predict /vertex /ping /v1/models/bert:predict /v1/ /models /v1/ranking /v1/score /v2
/api/ /api/tags /gliner /v1/rerank /v2/embed /pooling /vectors /rerank /embed /nowhere /v1 *
/embeddings /v1/embeddings /v1/nowhere /v2/models/x/infer /v2/nowhere"""
OPENAI = "/v1/ /models /v1/ranking /v1/score /embeddings /v1/embeddings /v1/nowhere"
SHORT = "/v2 /api/ /api/tags /gliner /v2/models/x/infer /v2/nowhere"


@pytest.mark.parametrize("path", PATHS.split())
@pytest.mark.parametrize("kind", [*KINDS, RuntimeError], ids=lambda kind: kind.__name__)
def test_an_error_has_its_status_and_its_type(kind: type[Exception], path: str) -> None:
    code = getattr(kind, "code", "internal_error")
    status, error_type = DOCUMENTED[code]
    openai_type = "server_error" if status >= 500 else "invalid_request_error"
    openai_type = "rate_limit_error" if status == 429 else openai_type
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
        **dict.fromkeys(OPENAI.split(), (only_400, openai)),
        **dict.fromkeys(SHORT.split(), (only_400, ollama)),
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
    others = {
        code: (status, "Backend" if status == 500 else "Validation")
        for status, code in errors.CODES_OF_STATUSES.items()
    }
    assert len(ROWS) == len(DOCUMENTED)
    assert DOCUMENTED.keys() == others.keys() | {kind.code for kind in KINDS}
    assert DOCUMENTED.items() >= others.items()


def test_an_error_keeps_its_words_in_another_place() -> None:
    at = object.__new__(_Decode).in_body  # its names need no models
    assert str(at(INPUTS, None)) == "ids"
    error = errors.InvalidRequest(
        "the windows hold 410 tokens", INPUTS.below(3, "question"), "up to "
    )
    assert str(error) == "up to inputs[3].question the windows hold 410 tokens"
    moved = error.moved(at(error.at, None))
    assert str(moved) == "up to ids[3].question the windows hold 410 tokens"
    assert type(moved) is errors.InvalidRequest
