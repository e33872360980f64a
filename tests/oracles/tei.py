"""The same requests to text-embeddings-inference and to us, and how answers compare.

tests/oracles/tei.json has the requests, with what text-embeddings-inference answered.
"""

import json
from base64 import b64decode
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from transformers import BertForSequenceClassification

from cloze.export.load.tokenizer import load_tokenizer
from tests.support import tiny

RECORDED = Path(__file__).parent / "tei.json"

_SIZES: dict[str, Any] = {
    "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "max_position_embeddings": 40,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "embedder": {},
    "classifier": {
        "id2label": {0: "bad", 1: "fair", 2: "good"},
        "label2id": {"bad": 0, "fair": 1, "good": 2},
    },
    "reranker": {"num_labels": 1, "id2label": {0: "relevance"}, "label2id": {"relevance": 0}},
}
"""text-embeddings-inference serves one kind of model per process."""

_MODULES = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
_SENTENCE_FILES: dict[str, Any] = {
    "modules.json": [
        {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for n, (path, kind) in enumerate(_MODULES)
    ],
    "1_Pooling/config.json": {
        "word_embedding_dimension": 16, "pooling_mode_cls_token": False,
        "pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": False,
        "pooling_mode_mean_sqrt_len_tokens": False,
    },
    "config_sentence_transformers.json": {
        "prompts": {"query": "the question "}, "default_prompt_name": None,
    },
}  # fmt: skip


def save_models(root: Path) -> dict[str, Path]:
    """Write a tiny checkpoint of each kind, which both servers read."""
    folders = {}
    for kind, sizes in KINDS.items():
        name = "bert-plain" if kind == "embedder" else f"bert-{kind}"
        tiny.CLASSES.setdefault(name, BertForSequenceClassification)
        folder = tiny.save_checkpoint(root / kind, name, **_SIZES, **sizes)
        load_tokenizer(folder).tokenizer.save(str(folder / "tokenizer.json"))
        folders[kind] = folder
    for name, settings in _SENTENCE_FILES.items():
        file = folders["embedder"] / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(settings))
    return folders


@dataclass(frozen=True, slots=True)
class Case:
    """A request: a JSON value, or raw bytes.

    Attributes:
        on_purpose: our statuses that may differ from theirs, and why.
    """

    route: str
    body: Any
    on_purpose: dict[str, str]

    @property
    def content(self) -> bytes:
        """The request's body."""
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()

    @property
    def name(self) -> str:
        """The request in one line."""
        return f"{self.route} {self.content.decode(errors='replace')[:150]}"


@dataclass(frozen=True, slots=True)
class Answer:
    """A status, and a JSON value or a text."""

    status: int
    is_json: bool
    value: Any


CASES: dict[str, list[Case]] = {kind: [] for kind in KINDS}
ANSWERS: dict[str, list[Answer]] = {kind: [] for kind in KINDS}
"""What text-embeddings-inference answered to the requests, by kind."""

for _kind, _rows in json.loads(RECORDED.read_text()).items():
    for _route, _body, _status, _is_json, _value, *_on_purpose in _rows:
        # A string is a body that is no object.
        _sent = _body.encode("latin-1") if isinstance(_body, str) else _body
        CASES[_kind].append(Case(_route, _sent, *(_on_purpose or [{}])))
        ANSWERS[_kind].append(Answer(_status, _is_json, _value))


def ask(url: str, kind: str) -> list[Answer]:
    """Send all requests of a kind, and return the answers."""
    headers = {"content-type": "application/json"}
    with httpx.Client(base_url=url, headers=headers, timeout=30) as client:
        return [_answer(client.post(case.route, content=case.content)) for case in CASES[kind]]


def _answer(response: httpx.Response) -> Answer:
    is_json = response.headers.get("content-type", "").startswith("application/json")
    return Answer(response.status_code, is_json, response.json() if is_json else response.text)


def difference(case: Case, theirs: Answer, ours: Answer) -> str | None:
    """Return how our answer differs from theirs; None if it does not, or does so on purpose."""
    if intended(case, theirs, ours):
        return None
    if theirs.status != ours.status:
        return f"status {ours.status}, theirs {theirs.status}: {ours.value} / {theirs.value}"
    if not (theirs.is_json and ours.is_json):
        return f"JSON {ours.is_json}, theirs {theirs.is_json}: {ours.value} / {theirs.value}"
    if theirs.status != 200:
        kinds = [answer.value["error_type"] for answer in (ours, theirs)]
        return None if kinds[0] == kinds[1] else f"error type {kinds[0]}, theirs {kinds[1]}"
    value = ours.value
    if case.route in _OPENAI:  # the keys of OpenAI's newer clients and of Mistral's
        value = {name: part for name, part in value.items() if name not in ("id", "created")}
    return _unequal(value, theirs.value, "the answer")


def _unequal(ours: Any, theirs: Any, where: str) -> str | None:
    """Return where two JSON values differ: in keys, types, lengths, texts or numbers."""
    if type(ours) is not type(theirs):
        return f"{where} is a {type(ours).__name__}, theirs a {type(theirs).__name__}"
    if isinstance(theirs, float):
        return None if abs(ours - theirs) <= TOLERANCE else f"{where} is {ours}, theirs {theirs}"
    if isinstance(theirs, dict):
        if ours.keys() != theirs.keys():
            return f"{where} has {sorted(ours)}, theirs {sorted(theirs)}"
        parts = [(ours[key], theirs[key], f"{where}.{key}") for key in theirs]
    elif isinstance(theirs, list):
        if len(ours) != len(theirs):
            return f"{where} has {len(ours)} elements, theirs {len(theirs)}"
        parts = [(a, b, f"{where}[{i}]") for i, (a, b) in enumerate(zip(ours, theirs, strict=True))]
    elif where.endswith(".embedding"):  # base64 of float32
        vectors = [np.frombuffer(b64decode(text), "<f4").tolist() for text in (ours, theirs)]
        return _unequal(vectors[0], vectors[1], where)
    else:
        return None if ours == theirs else f"{where} is {ours!r}, theirs {theirs!r}"
    return next(filter(None, (_unequal(*part) for part in parts)), None)


TOLERANCE = 1e-3
"""Of every number: theirs are recorded with five digits."""

JSON_ERRORS = "errors are JSON, theirs plain text for a body of the wrong shape"
OPENAI_ERRORS = "OpenAI's routes have OpenAI's errors, with 400 instead of 422"
_OPENAI = ("/v1/embeddings", "/embeddings")


def intended(case: Case, theirs: Answer, ours: Answer) -> str | None:
    """Return why our answer differs on purpose; None if it should not differ."""
    if reason := case.on_purpose.get(str(ours.status)):
        return reason
    if case.route in _OPENAI and theirs.status >= 400 and ours.status >= 400:
        is_envelope = ours.value["error"].keys() == {"message", "type", "param", "code"}
        if is_envelope and ours.status == (400 if theirs.status == 422 else theirs.status):
            return OPENAI_ERRORS
    if theirs.status == ours.status >= 400 and ours.is_json and not theirs.is_json:
        return JSON_ERRORS
    return None
