"""Answers and errors of every protocol: `wire.txt` has one line per request to a service.

A line names the service, the path with its body and headers in Python, and the answer: its status
with the code of an error, the headers that say something of it, and its body. Numbers are rounded;
what differs per request is left out. To accept other answers, run this test with
``REWRITE_WORDING=1`` and read the difference. `tests/http/test_parameters.py` has every field of
every route.
"""

import json
import re
from collections.abc import Iterator
from importlib.metadata import version
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
ALIASES = {"nomic-embed-text": "small", "all-minilm:33m": "small"}
TELLING = ("x-warning", "x-ranked-by", "x-score-kind", "x-truncated")
DIFFERENT = {"created", "total_duration"}
"""Fields of answers that are times; a model's time of creation is its own."""


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Service]]:
    folder, own = tmp_path_factory.mktemp("bundle"), manifest().embedding
    assert own is not None
    prompts = own.model_dump() | {"prompts": {"query": "who of", "passage": ""}}
    cls: dict[str, Any] = {"name": "cls", "embedding": own.model_dump() | {"pooling": "cls"}}
    with (
        Service(folder, ({}, EMBEDDER, {"version": 2}), aliases=ALIASES) as tiny,
        Service(folder, ({}, RANKER)) as ranks,
        Service(folder, ({"embedding": prompts}, cls)) as poolings,
    ):
        ranks.queues[1]._engine = OneLabel()  # type: ignore[attr-defined]
        yield {"tiny": tiny, "ranks": ranks, "poolings": poolings}


def rounded(value: Any) -> Any:
    """Return a value with the numbers in it rounded."""
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return round(value, 4) if isinstance(value, float) else value


def shown(answer: Any, identity: str) -> str:
    """Return an answer without what differs per request, release or bundle."""
    if isinstance(answer, dict) and answer.get("object") != "model":
        answer = {name: value for name, value in answer.items() if name not in DIFFERENT}
    text = json.dumps(rounded(answer), ensure_ascii=False, separators=(",", ":"))
    text = text.replace(identity, "ID").replace(f'"{version("cloze-server")}"', '"VERSION"')
    return re.sub("[0-9a-f]{64}", "DIGEST", text)


def test_every_request_has_its_answer(services: dict[str, Service]) -> None:
    def outcome(service: str, request: str) -> str:
        path, *rest = eval(f"({request},)", NAMES)
        if rest:
            body, *headers = rest
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            sent = headers[0] if headers else {}
            answer = services[service].ask("POST", path, content=content, headers=sent)
        else:
            answer = services[service].get(path)
        made = answer.json()
        assert answer.headers["content-type"] == "application/json"
        if answer.status_code == 200:
            told = {name: answer.headers[name] for name in TELLING if name in answer.headers}
            identity = services[service].seen.identity.decode()
            return f"200 {told or ''} | {shown(made, identity)}"
        check_shape(path, made)
        found = made.get("error", made.get("message"))
        message = found["message"] if isinstance(found, dict) else found
        if "detail" in made:
            assert made["detail"] == message
        assert made.get("message", message) == message
        return f"{answer.status_code} {answer.headers['x-error-code']} | {message}"

    check_table(Path(__file__).with_name("wire.txt"), outcome)
