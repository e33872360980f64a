"""The same requests to text-embeddings-inference and to us: the requests, and how answers compare.

As a program, record what text-embeddings-inference answers:
``python -m tests.oracles.tei BINARY``, which writes tests/oracles/tei.json.
"""

import json
import sys
import tempfile
import warnings
from base64 import b64decode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from transformers import BertForSequenceClassification

from cloze.bench.peers import plain_onnx
from cloze.bench.processes import running
from cloze.export.load.tokenizer import load_tokenizer
from tests.support import tiny
from tests.support.ports import free_port

RECORDED = Path(__file__).parent / "tei.json"

_SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 40,
}
KINDS: dict[str, dict[str, Any]] = {
    "embedder": {},
    "classifier": {
        "id2label": {0: "bad", 1: "fair", 2: "good"},
        "label2id": {"bad": 0, "fair": 1, "good": 2},
    },
    "reranker": {"num_labels": 1, "id2label": {0: "relevance"}, "label2id": {"relevance": 0}},
}
"""text-embeddings-inference serves one kind of model per process."""

_SENTENCE_FILES: dict[str, Any] = {
    "modules.json": [
        {
            "idx": index,
            "name": str(index),
            "path": path,
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, (path, kind) in enumerate(
            [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
        )
    ],
    "1_Pooling/config.json": {
        "word_embedding_dimension": 16,
        "pooling_mode_cls_token": False,
        "pooling_mode_mean_tokens": True,
        "pooling_mode_max_tokens": False,
        "pooling_mode_mean_sqrt_len_tokens": False,
    },
    "config_sentence_transformers.json": {
        "prompts": {"query": "the question "},
        "default_prompt_name": None,
    },
}


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


@contextmanager
def running_tei(binary: str, checkpoint: Path, kind: str) -> Iterator[str]:
    """Run text-embeddings-inference on loopback, and yield its address."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain_onnx.write(checkpoint)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [binary, "--model-id", str(checkpoint), "--served-model-name", kind]
    with running([*command, "--hostname", "127.0.0.1", "--port", str(port)], url, "/health"):
        yield url


# ---- the requests --------------------------------------------------------------------------------

_LONG = "the king was in the old house " * 8
_TEXTS = ["the king", "who was the king of france?", "wörld ünd 日本 🙂", _LONG]
_BAD_TYPES: list[Any] = [None, 5, 1.5, True, {}, {"text": "a"}, [None], [True], [1.5], [{}]]
_EMPTY: list[Any] = ["", [], [""], ["the king", ""], [[]], [[5], []]]


@dataclass(frozen=True, slots=True)
class Case:
    """A request: a JSON value, or raw bytes."""

    route: str
    body: Any

    @property
    def content(self) -> bytes:
        """The request's body."""
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()

    @property
    def name(self) -> str:
        """The request in one line."""
        return f"{self.route} {self.content.decode(errors='replace')[:150]}"


def _with(base: dict[str, Any], **options: list[Any]) -> list[dict[str, Any]]:
    """Return the base with one value of one option at a time."""
    return [base | {name: value} for name, values in options.items() for value in values]


_TRUNCATION: dict[str, list[Any]] = {
    "truncate": [True, False, None, "yes", 1],
    "truncation_direction": ["left", "right", "Left", "Right", "up", 5],
}
_PROMPT: dict[str, list[Any]] = {"prompt_name": ["query", "nobody", None, 5]}
_UNKNOWN: dict[str, list[Any]] = {"colour": ["red"], "normalise": [True]}


def _embedder() -> Iterator[Case]:
    ids = [5, 60, 61]
    good: list[Any] = [*_TEXTS, _TEXTS[:2], _TEXTS, ids, [ids, [7]], ["the king", ids], [2, 5, 3]]
    for route in ("/embed", "/embed_all"):
        for inputs in [*good, *_EMPTY, *_BAD_TYPES, [-1], [10**6], [10**30], ["a"] * 33]:
            yield Case(route, {"inputs": inputs})
        for base in ({"inputs": "the king"}, {"inputs": ["red", _LONG]}, {"inputs": [[5, 6], "a"]}):
            for body in _with(base, **_TRUNCATION, **_PROMPT, **_UNKNOWN):
                yield Case(route, body)
        combinations = product([True, False], ["Left", "Right"], [None, "query"])
        for truncate, direction, prompt in combinations:
            options = {"truncate": truncate, "truncation_direction": direction}
            yield Case(route, {"inputs": [_LONG, "a"], "prompt_name": prompt} | options)
    vectors: dict[str, list[Any]] = {
        "normalize": [True, False, None, "yes", 1],
        "dimensions": [1, 8, 16, 17, 0, -1, "8", None, 1.5],
    }
    for inputs in ("the king", ["red", "green"]):
        for body in _with({"inputs": inputs}, **vectors):
            yield Case("/embed", body)
    for normalize, dimensions in product([True, False], [4, 16]):
        yield Case("/embed", {"inputs": "a", "normalize": normalize, "dimensions": dimensions})

    pair = {"source_sentence": "the king", "sentences": ["the old king", "a ship", "walk"]}
    for inputs in (
        pair,
        pair | {"sentences": []},
        pair | {"sentences": ["a", ""]},
        pair | {"sentences": "a"},
        pair | {"sentences": [5]},
        pair | {"sentences": ["a"] * 33},
        pair | {"source_sentence": ""},
        pair | {"source_sentence": 5},
        pair | {"source_sentence": _LONG, "sentences": [_LONG, "the king"]},
        pair | {"colour": "red"},
        {"source_sentence": "a"},
        {"sentences": ["a"]},
        *_BAD_TYPES,
    ):
        yield Case("/similarity", {"inputs": inputs})
    for parameters in [*_with({}, **_TRUNCATION, **_PROMPT, **_UNKNOWN), None, {}, 5]:
        yield Case("/similarity", {"inputs": pair, "parameters": parameters})
    long = pair | {"sentences": [_LONG]}
    yield Case("/similarity", {"inputs": long, "parameters": {"truncate": False}})

    yield from _tokenizer()
    for route in ("/v1/embeddings", "/embeddings"):
        for inputs in [*good, *_EMPTY, *_BAD_TYPES, ["a"] * 33]:
            yield Case(route, {"input": inputs, "model": "embedder"})
        openai: dict[str, list[Any]] = {
            "encoding_format": ["float", "base64", None, "binary"],
            "dimensions": [4, 16, 17, 0, None, "4"],
            "user": ["me", None],
        }
        for body in _with({"input": ["the king", "red"], "model": "embedder"}, **openai):
            yield Case(route, body)
        yield Case(route, {"model": "embedder"})
    yield from _malformed("/embed", "/embed_all", "/similarity", "/tokenize", "/v1/embeddings")
    yield Case("/embed_sparse", {"inputs": "the king"})
    for route, body in (
        ("/predict", {"inputs": "the king"}),
        ("/rerank", {"query": "the king", "texts": ["a"]}),
    ):
        yield Case(route, body)


def _tokenizer() -> Iterator[Case]:
    good: list[Any] = [
        *_TEXTS,
        _TEXTS[:3],
        "paris's cafés",
        "[CLS] the [MASK] [SEP]",
        "unknown ☃ snow",
    ]
    for inputs in [*good, *_EMPTY, *_BAD_TYPES, ["a"] * 33, " ", "\n\t"]:
        yield Case("/tokenize", {"inputs": inputs})
    options: dict[str, list[Any]] = {"add_special_tokens": [True, False, None, "yes"]}
    for inputs in ("the wörld", ["the king", "red"]):
        for body in _with({"inputs": inputs}, **options, **_PROMPT, **_UNKNOWN):
            yield Case("/tokenize", body)
    ids = [2, 60, 61, 3]
    for values in (
        ids,
        [ids, [7, 8]],
        [],
        [[]],
        [ids, []],
        [-1],
        [10**6],
        [[10**6]],
        [2**32],
        [2**31],
        ["a"],
        "a",
        [1.5],
        None,
        {},
        5,
        [[5]] * 33,
    ):
        yield Case("/decode", {"ids": values})
    skip: dict[str, list[Any]] = {"skip_special_tokens": [True, False, None, "yes"]}
    for body in _with({"ids": ids}, **skip, **_UNKNOWN):
        yield Case("/decode", body)
    yield Case("/decode", {})
    yield Case("/tokenize", {})


def _malformed(*routes: str) -> Iterator[Case]:
    bodies = (b"", b"{", b"[]", b"null", b'"text"', b"{}", b"\xff\xfe", b'{"inputs": "a",}', b"  ")
    for route in routes:
        for body in bodies:
            yield Case(route, body)


def _classifier() -> Iterator[Case]:
    pairs = [["the king"], ["the king", "red"], [_LONG, "a"], ["a", _LONG], [_LONG, _LONG]]
    good: list[Any] = [*_TEXTS, *pairs, pairs, [["a"], ["b"]]]
    bad: list[Any] = [
        ["a", "b", "c"],
        [["a", "b", "c"]],
        ["a", 5],
        [["a"], "b"],
        [["a", ""]],
        ["a", ""],
    ]
    for inputs in [*good, *bad, *_EMPTY, *_BAD_TYPES, [["a"]] * 33]:
        yield Case("/predict", {"inputs": inputs})
    raw: dict[str, list[Any]] = {"raw_scores": [True, False, None, "yes"]}
    for inputs in ("the king", ["the king", _LONG], [["red"], ["the", "green"]]):
        for body in _with({"inputs": inputs}, **raw, **_TRUNCATION, **_UNKNOWN):
            yield Case("/predict", body)
    yield from _malformed("/predict")
    for route, body in (
        ("/embed", {"inputs": "the king"}),
        ("/embed_all", {"inputs": "the king"}),
        ("/rerank", {"query": "the king", "texts": ["a"]}),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": ["b"]}}),
        ("/v1/embeddings", {"input": "the king", "model": "classifier"}),
        ("/tokenize", {"inputs": "the king"}),
        ("/decode", {"ids": [5, 6]}),
    ):
        yield Case(route, body)


def _reranker() -> Iterator[Case]:
    texts = ["the king", "red green", "who was the king?", _LONG]
    base = {"query": "who was the king", "texts": texts}
    yield Case("/rerank", base)
    for query in ("", 5, None, _LONG, "🙂"):
        yield Case("/rerank", base | {"query": query})
    for values in ([], [""], ["a", ""], "a", [5], None, {}, ["a"], ["a"] * 33, ["same", "same"]):
        yield Case("/rerank", base | {"texts": values})
    options: dict[str, list[Any]] = {
        "raw_scores": [True, False, None, "yes"],
        "return_text": [True, False, None, "yes"],
    }
    for start in (base, base | {"query": _LONG}):
        for body in _with(start, **options, **_TRUNCATION, **_UNKNOWN):
            yield Case("/rerank", body)
    yield Case("/rerank", base | {"raw_scores": True, "return_text": True})
    yield Case("/rerank", {"query": "a"})
    yield Case("/rerank", {"texts": ["a"]})
    for inputs in ("the king", ["the king", "red"], [["a"], ["b", "c"]]):
        for body in _with({"inputs": inputs}, raw_scores=[True, False]):
            yield Case("/predict", body)
    yield from _malformed("/rerank")
    yield Case("/embed", {"inputs": "the king"})
    yield Case("/nowhere", {"inputs": "the king"})


CASES: dict[str, list[Case]] = {
    "embedder": list(_embedder()),
    "classifier": list(_classifier()),
    "reranker": list(_reranker()),
}


# ---- the answers ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answer:
    """A status, and a JSON value or a text."""

    status: int
    is_json: bool
    value: Any


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
    return _unequal(ours.value, theirs.value, "the answer")


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
_LIMIT = 32


def intended(case: Case, theirs: Answer, ours: Answer) -> str | None:
    """Return why our answer differs on purpose; None if it should not differ."""
    both = (theirs.status, ours.status)
    for reason, (statuses, applies) in INTENDED.items():
        if both in statuses and applies(case):
            return reason
    if case.route in _OPENAI and theirs.status >= 400 and ours.status >= 400:
        is_envelope = ours.value["error"].keys() == {"message", "type", "param", "code"}
        if is_envelope and ours.status == (400 if theirs.status == 422 else theirs.status):
            return OPENAI_ERRORS
    if theirs.status == ours.status >= 400 and ours.is_json and not theirs.is_json:
        return JSON_ERRORS
    return None


def _fields(case: Case) -> dict[str, Any]:
    """Return the fields of a request, those of ``parameters`` included."""
    body = case.body if isinstance(case.body, dict) else {}
    parameters = body.get("parameters")
    return body | (parameters if isinstance(parameters, dict) else {})


def _texts(case: Case) -> list[Any]:
    """Return the texts, or ids, of a request."""
    body = _fields(case)
    values = next((body[f] for f in ("inputs", "input", "texts", "ids") if f in body), [])
    if isinstance(values, dict):
        values = values.get("sentences")
    return values if isinstance(values, list) else [values]


def _has_ids(case: Case) -> bool:
    return any(isinstance(text, int | list) for text in _texts(case))


def _wrong_choice(case: Case) -> bool:
    return _fields(case).get("truncation_direction") == 5 or (
        _fields(case).get("encoding_format", "float") is None
    )


INTENDED: dict[str, tuple[set[tuple[int, int]], Callable[[Case], bool]]] = {
    "a request may have 2,048 texts, theirs 32": (
        {(422, 200), (413, 200)},
        lambda case: len(_texts(case)) > _LIMIT,
    ),
    "token ids get [CLS] and [SEP] unless they have them; theirs run bare": (
        {(200, 200)},
        lambda case: case.route in ("/embed", "/embed_all", *_OPENAI) and _has_ids(case),
    ),
    "ids outside the vocabulary are the client's error, not one of the backend": (
        {(424, 422)},
        lambda case: [10**6] in (_texts(case), *_texts(case)),
    ),
    "a value of the wrong type is 422 in every field, theirs 400 for a choice": (
        {(400, 422)},
        _wrong_choice,
    ),
    "null stands for the default in every field": (
        {(422, 200), (400, 200)},
        lambda case: None in _fields(case).values(),
    ),
    "unknown fields inside inputs are refused": (
        {(200, 422)},
        lambda case: isinstance(_fields(case)["inputs"], dict),
    ),
    "a body that is not JSON is 400, also after a wrong type": (
        {(422, 400)},
        lambda case: isinstance(case.body, bytes),
    ),
    "a model for embeddings ranks by similarity": (
        {(424, 200)},
        lambda case: case.route == "/rerank",
    ),
    "an empty text of a pair is refused, as any empty text is": (
        {(200, 400)},
        lambda case: b'""' in case.content and case.route in ("/rerank", "/predict"),
    ),
    "an empty list is the error Empty on every route": (
        {(422, 400)},
        lambda case: case.route == "/predict" and case.body["inputs"] == [],
    ),
    "equal scores keep the order of the request": (
        {(200, 200)},
        lambda case: case.route == "/rerank" and case.body["texts"] == ["same", "same"],
    ),
}
"""Why an answer differs on purpose: in which (their, our) statuses, and for which requests."""


def recorded() -> dict[str, list[Answer]]:
    """Return the answers that text-embeddings-inference gave to all requests, by kind."""
    answers = json.loads(RECORDED.read_text())
    return {kind: [Answer(*answer) for answer in answers[kind]] for kind in CASES}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return {k: _rounded(v) for k, v in value.items()} if isinstance(value, dict) else value


def main() -> None:
    """Record the answers of text-embeddings-inference."""
    answers: dict[str, list[list[Any]]] = {}
    with tempfile.TemporaryDirectory() as root:
        for kind, checkpoint in save_models(Path(root)).items():
            with running_tei(sys.argv[1], checkpoint, kind) as url:
                replies = ask(url, kind)
            answers[kind] = [[a.status, a.is_json, _rounded(a.value)] for a in replies]
    rows = {kind: ",\n".join(json.dumps(row) for row in rows) for kind, rows in answers.items()}
    body = ",\n".join(f'"{kind}": [\n{text}\n]' for kind, text in rows.items())
    RECORDED.write_text(f"{{\n{body}\n}}\n")


if __name__ == "__main__":
    main()
