"""Answers and errors of every protocol: `wire.txt` has one line per request to a service.

A line names the service, the path with its body and headers in Python, and the answer: its status
with the code of an error, the headers that say something of it, and its body. Numbers are rounded;
what differs per request is left out. To accept other answers, run this test with
``REWRITE_WORDING=1`` and read the difference. `tests/http/test_parameters.py` has every field of
every route.
"""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cloze.model_store.batch import Encoding, HeadOutputs
from cloze.model_store.heads import ArrayResult
from cloze.service.tasks import TASKS
from tests.support.refusals import check_shape, check_table
from tests.support.route_service import CLASSIFIER, EMBEDDER, HandEngine, OneLabel, Service
from tests.support.task_model import EMBEDDING
from tests.support.tensor_requests import binary, packed, sized, tensor

NAMES = {"binary": binary, "packed": packed, "sized": sized, "tensor": tensor}
ALIASES = {"nomic-embed-text": "small", "all-minilm:33m": "small"}
TELLING = ("x-warning", "x-ranked-by", "x-score-kind", "x-truncated")
DIFFERENT = {"created", "total_duration"}
"""Fields of answers that are times; a model's time of creation is its own."""


class TwoLabels(OneLabel):
    """Has two logits: 1, and the length of the sequence."""

    def run(self, batch: Sequence[Encoding], *, alone: bool = False) -> list[HeadOutputs]:
        rows = [np.array([1, len(encoding)], np.float32) for encoding in batch]
        return [{"sequence_classification": ArrayResult(row)} for row in rows]


def ranker(*labels: str, **section: Any) -> dict[str, Any]:
    """Return a model that classifies texts."""
    head = {"labels": labels, "problem_type": "single_label_classification"} | section
    heads = {"sequence_classification": head}
    return {"name": "rank", "tasks": ("text-classification",), "embedding": None, "heads": heads}


MASKS = {"name": "masks", "tasks": ("fill-mask",), "embedding": None, "heads": {}}
PROMPTS = EMBEDDING | {"prompts": {"query": "who of", "passage": ""}}
CLS = {"name": "cls", "embedding": EMBEDDING | {"pooling": "cls"}}
SERVICES: dict[str, tuple[Sequence[dict[str, Any]], HandEngine | None, dict[str, Any]]] = {
    "tiny": (({}, EMBEDDER, {"version": 2}), None, {"aliases": ALIASES}),
    "ranks": (({}, ranker("relevance")), OneLabel(), {}),
    "ranks raw": (({}, ranker("relevance", raw_scores=True)), OneLabel(), {}),
    "two labels": (({}, ranker("no", "yes", reranks=True)), TwoLabels(), {}),
    "classes": (({}, ranker("no", "yes")), TwoLabels(), {}),
    "poolings": (({"embedding": PROMPTS}, CLS), None, {}),
    "classifies": ((EMBEDDER, CLASSIFIER), None, {}),
    "masks first": ((MASKS, {}), None, {}),
    "only classifies": ((CLASSIFIER,), None, {}),
    "only embeds": ((EMBEDDER,), None, {}),
    "few tasks": (({},), None, {"tasks": {name: TASKS[name] for name in ("embed", "qa")}}),
    "only labels": (({},), None, {"tasks": {"text-classification": TASKS["text-classification"]}}),
    "only masks": ((MASKS, {}), None, {"tasks": {"fill-mask": TASKS["fill-mask"]}}),
}
"""Names of services: their models, the engine of the second model, and options."""


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Service]]:
    folder, made = tmp_path_factory.mktemp("bundle"), {}
    with ExitStack() as stack:
        for name, (models, engine, options) in SERVICES.items():
            made[name] = stack.enter_context(Service(folder, models, **options))
            if engine is not None:
                made[name].queues[1]._engine = engine  # type: ignore[attr-defined]
        yield made


def shown(answer: Any, identity: str) -> str:
    """Return an answer without what differs per request, release or bundle."""
    if isinstance(answer, dict) and answer.get("object") != "model":
        answer = {name: value for name, value in answer.items() if name not in DIFFERENT}
    text = json.dumps(answer, ensure_ascii=False, separators=(",", ":"))
    text = re.sub(r"-?\d+\.\d+(e-\d+)?", lambda found: str(round(float(found[0]), 4)), text)
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
