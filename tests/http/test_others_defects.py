"""Defects that users report of other servers: each test fails on a server that has one of them.

int8 vectors that depend on their batch are in `test_int8`, queries of late interaction without marker
or filling in `test_late_interaction`, and vectors of null for numbers that overflow in
`unit/service/engine/test_engine`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from transformers import BertForSequenceClassification

from cloze.export.publish import ExportOptions, export
from cloze.model_store import Store
from cloze.service.service import single_process
from cloze.service.settings import load_settings
from cloze.service.tasks import TASKS, rerank
from cloze.service.tasks.texts import TruncationParameters
from tests.support import late_models, tiny

MODEL_TOKENS, DOCUMENT_TOKENS = 160, 20
CHINESE = {"green": "山", "moon": "京", "sun": "海"}
"""Words of the tiny vocabulary that become Chinese: each character is a token of three bytes."""
LABELS = {
    "classifier": ["contradiction", "neutral", "entailment"],
    "ranker": ["relevance"],
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    made = {"bert": tiny.save_checkpoint(root / "bert", "bert", hidden_act="gelu")}
    for name, labels in LABELS.items():
        kind = f"bert-{name}-of-defects"
        tiny.CLASSES[kind] = BertForSequenceClassification
        sizes = {"id2label": dict(enumerate(labels)), "num_labels": len(labels)}
        made[name] = tiny.save_checkpoint(root / name, kind, **sizes)
    made["late"] = late_models.pylate(root / "late", document_length=DOCUMENT_TOKENS)
    for folder in made.values():
        for file in (folder / "vocab.txt", folder / "tokenizer.json"):
            if file.exists():
                text = file.read_text()
                for word, character in CHINESE.items():
                    text = text.replace(f'"{word}"', f'"{character}"')
                    text = text.replace(f"\n{word}\n", f"\n{character}\n")
                file.write_text(text)
    return made


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, checkpoints: dict[str, Path]) -> Path:
    root = tmp_path_factory.mktemp("store")
    for name, folder in checkpoints.items():
        tasks = ("embed", "embed-all", "sparse") if name == "bert" else ()
        export(str(folder), name, Store(root), ExportOptions(tasks=tasks))
    return root


@pytest.fixture(scope="module")
def client(store: Path) -> Iterator[TestClient]:
    service = single_process(load_settings({"model_store": store}))
    with TestClient(service, base_url="http://localhost") as client:
        yield client


TENSOR = {"name": "text", "shape": [1], "datatype": "BYTES", "data": ["TEXT"]}
LEFT = {"truncation_direction": "left"}
TWO = MODEL_TOKENS - 2
"""Tokens of a text beside the two special tokens."""

# Route, body with TEXT in the place of the long text, and how many tokens of the text are read.
TRUNCATING: dict[str, tuple[str, dict[str, Any], int]] = {
    "embed": ("/embed", {"inputs": "TEXT", "normalize": False, **LEFT}, TWO),
    "embed-all": ("/embed_all", {"inputs": "TEXT", "model": "bert", **LEFT}, TWO),
    "embed-all, late": (
        "/embed_all", {"inputs": "TEXT", "model": "late", **LEFT}, DOCUMENT_TOKENS - 3),
    "embed-sparse": ("/embed_sparse", {"inputs": "TEXT", **LEFT}, TWO),
    "similarity": (
        "/similarity",
        {"inputs": {"source_sentence": "a king", "sentences": ["TEXT"]}, "parameters": LEFT},
        TWO,
    ),
    "text-classification": (
        "/classify", {"inputs": "TEXT", "model": "classifier", "parameters": LEFT}, TWO),
    "text-classification, pair": (
        "/classify",
        {"inputs": {"text": "a king", "text_pair": "TEXT"}, "model": "classifier", "parameters": LEFT},
        TWO - 3,
    ),
    "zero-shot-classification": (
        "/zero-shot-classification",
        {"inputs": "TEXT", "parameters": {
            "candidate_labels": ["the king"], "hypothesis_template": "{}", **LEFT}},
        TWO - 3,
    ),
    "rerank": (
        "/rerank", {"query": "a king", "texts": ["TEXT"], "raw_scores": True, **LEFT}, TWO - 3),
    "rerank, similarity": (
        "/rerank", {"query": "a king", "texts": ["TEXT"], "model": "bert", **LEFT}, TWO),
    "rerank, late": (
        "/rerank", {"query": "a king", "texts": ["TEXT"], "model": "late", **LEFT},
        DOCUMENT_TOKENS - 3),
    "predict": ("/predict", {"inputs": "TEXT", "model": "classifier", **LEFT}, TWO),
    "openai": ("/v1/embeddings", {"input": "TEXT", "model": "bert", "truncate": "START"}, TWO),
    "v2": ("/v2/models/bert.embed/infer", {"inputs": [TENSOR], "parameters": LEFT}, TWO),
    "cohere": (
        "/v2/embed",
        {"texts": ["TEXT"], "model": "bert", "input_type": "query", "truncate": "START"},
        TWO,
    ),
}  # fmt: skip


def with_text(value: Any, text: Any) -> Any:
    """Return a body with a text, or several, in its place."""
    if isinstance(value, dict):
        return {name: with_text(inner, text) for name, inner in value.items()}
    if isinstance(value, list):
        return [with_text(inner, text) for inner in value]
    return text if value in ("TEXT", "TEXTS") else value


def numbers(value: Any) -> list[float]:
    """Return all numbers of an answer, in order."""
    if isinstance(value, dict):
        value = [value[name] for name in sorted(value) if name not in ("usage", "created", "id")]
    if isinstance(value, list):
        return [number for inner in value for number in numbers(inner)]
    return [float(value)] if isinstance(value, int | float) else []


@pytest.mark.parametrize(
    ("filling", "markers"),
    [("the ", ("king", "river")), (CHINESE["green"], (CHINESE["moon"], CHINESE["sun"]))],
    ids=["ASCII", "Chinese"],
)
@pytest.mark.parametrize("name", TRUNCATING)
def test_left_truncation_reads_the_last_tokens(
    client: TestClient, name: str, filling: str, markers: tuple[str, str]
) -> None:
    route, body, room = TRUNCATING[name]

    def ask(text: str) -> list[float]:
        answer = client.post(route, json=with_text(body, text))
        assert answer.status_code == 200, answer.text
        return numbers(answer.json())

    one, other = (ask(f"walked {filling * 400}{marker}") for marker in markers)
    exact = ask(filling * (room - 1) + markers[0])
    assert one == pytest.approx(exact, abs=2e-6), "other tokens than the last ones that fit"
    assert one != pytest.approx(other, abs=1e-5), "the end was cut"


def test_every_task_that_truncates_is_among_them() -> None:
    tasks = (*TASKS.values(), rerank.TASK)
    cutting = {task.name for task in tasks if issubclass(task.parameters, TruncationParameters)}
    others = {"predict", "openai", "v2", "cohere"}
    assert cutting == {name.split(",")[0] for name in TRUNCATING} - others
