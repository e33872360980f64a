"""Errors of every protocol: `refusals.txt` has one line per request, with its status and its words.

A line names the service, the path with its body and headers in Python, and the error. To accept
other words, run this test with ``REWRITE_WORDING=1`` and read the difference.
`tests/http/test_parameters.py` has every field of every route.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.refusals import check_shape, check_table
from tests.support.route_service import EMBEDDER, OneLabel, Service
from tests.support.task_model import manifest
from tests.support.tensor_requests import binary, packed, sized, tensor

HEAD = {"labels": ["relevance"], "problem_type": "single_label_classification"}
RANKER = {
    "name": "rank", "tasks": ("text-classification",), "embedding": None,
    "heads": {"sequence_classification": HEAD},
}  # fmt: skip
NAMES = {"binary": binary, "packed": packed, "sized": sized, "tensor": tensor}


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Service]]:
    folder, own = tmp_path_factory.mktemp("bundle"), manifest().embedding
    assert own is not None
    prompts = own.model_dump() | {"prompts": {"query": "who of", "passage": ""}}
    cls: dict[str, Any] = {"name": "cls", "embedding": own.model_dump() | {"pooling": "cls"}}
    with (
        Service(folder, ({}, EMBEDDER, {"version": 2})) as tiny,
        Service(folder, ({}, RANKER)) as ranks,
        Service(folder, ({"embedding": prompts}, cls)) as poolings,
    ):
        ranks.queues[1]._engine = OneLabel()  # type: ignore[attr-defined]
        yield {"tiny": tiny, "ranks": ranks, "poolings": poolings}


def test_every_error_has_its_status_its_words_and_its_shape(services: dict[str, Service]) -> None:
    def outcome(service: str, request: str) -> str:
        path, body, *headers = eval(f"({request})", NAMES)
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = headers[0] if headers else {}
        answer = services[service].ask("POST", path, content=content, headers=sent)
        error = answer.json()
        check_shape(path, error)
        found = error.get("error", error.get("message"))
        message = found["message"] if isinstance(found, dict) else found
        if "detail" in error:
            assert error["detail"] == message
        assert error.get("message", message) == message
        return f"{answer.status_code} {answer.headers['x-error-code']} | {message}"

    check_table(Path(__file__).with_name("refusals.txt"), outcome)
