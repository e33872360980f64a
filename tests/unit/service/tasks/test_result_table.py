"""What tasks make of the outputs of a model: `results.txt` has one line per case.

A line names the model with the promise of the line, the request in Python with what the heads give
each encoding per round, and what happens: what the encodings of each round ask of the heads, the
recipe of vectors, the warnings, and the results, with numbers of four digits; or the code of the
error. To accept other lines, run this test with ``REWRITE_WORDING=1`` and read the difference.
"""

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from cloze.model_store.heads.masked_lm import MaskedLMResult
from cloze.model_store.heads.span import SpanOptions
from cloze.model_store.heads.sparse_embedding import SparseEmbeddingResult
from cloze.service.errors import RequestError
from cloze.service.tasks import TASKS, rerank
from tests.support.refusals import check_table
from tests.support.task_model import (
    CONTEXT,
    EMBEDDING,
    ID,
    LABELS,
    LATE,
    classifier,
    context,
    ids,
    limited,
    manifest,
    outputs,
    tokens,
)

ALL = {**TASKS, "rerank": rerank.TASK}
MOOD = {
    "name": "mood",
    "labels": ("bad", "good", "so"),
    "problem_type": "multi_label_classification",
}
INFERENCE = {
    "name": "inference", "labels": ("contradiction", "entailment"),
    "problem_type": "single_label_classification",
}  # fmt: skip


def late(**changes: Any) -> Any:
    return context(tasks=["multi-vector"], embedding=None, heads={"multi_vector": LATE | changes})


def refusing(threshold: float) -> Any:
    """Return a model with a threshold of no answer."""
    heads = {name: one.model_dump() for name, one in manifest().heads.items()}
    return context(heads=heads | {"span": SpanOptions(no_answer_threshold=threshold).model_dump()})


def tagger(*labels: str) -> Any:
    """Return a model with other labels of tokens."""
    heads = {"token_classification": {"labels": labels}}
    return context(tasks=("token-classification",), embedding=None, heads=heads)


SKIPPED = {"skipped_ids": [ID["[CLS]"], ID["[SEP]"]]}
SIXTEEN = {"limits": {"max_tokens": 16}, "embedding": EMBEDDING | {"max_tokens": 16}}
MODELS = {
    "tiny": CONTEXT,
    "not scaled": context(embedding=EMBEDDING | {"normalize": False}),
    "few results": limited(max_results=5),
    "sixteen tokens": context(limited(max_tokens=16).limits, **SIXTEEN),
    "several labels": context(heads=classifier(*LABELS, problem_type="multi_label_classification")),
    "a number": context(heads=classifier(*LABELS, problem_type="regression")),
    "two sets": context(
        heads=classifier() | {"sequence_classification": MOOD | {"further": [INFERENCE]}}
    ),
    "entails": context(heads=classifier("ENTAILMENT", "neutral", "contradiction")),
    "ranks": context(heads=classifier("relevance")),
    "ranks raw": context(heads=classifier("relevance", raw_scores=True)),
    "classes": context(heads=classifier("no", "yes")),
    "late": late(),
    "late attends": late(attends_to_filling=True),
    "late unfilled": late(filling=None, query_marker=None),
    "late skips": late(skips_first=True),
    "late reads more": late(document_tokens=20),
    "late averages": late(averages=True),
    "lexical": context(tasks=["lexical"], embedding=None, heads={"lexical": SKIPPED}),
    "places": tagger(*LABELS[:-1], "LOC"),
    "small places": tagger(*LABELS[:-1], "loc"),
    "places of two words": tagger(*LABELS[:-1], "a b"),
    "marks ends": tagger("O", "B-PER", "I-PER", "E-PER", "S-PER", "S-LOC"),
    "marks no ends": tagger("O", "B-PER", "I-PER", "E-MAIL", "S-BAHN"),
    "answers": refusing(-3.0),
    "rather not": refusing(3.0),
}


def top(*masks: dict[str, float]) -> MaskedLMResult:
    """Return a result with the probabilities of the likeliest tokens of each mask."""
    logits = np.log(np.array([list(mask.values()) for mask in masks], np.float32)) + 2
    found = np.array([[ID[token] for token in mask] for mask in masks])
    return MaskedLMResult(logits, found, np.full(len(masks), 2, np.float32), logits[:, :0])


def of_targets(*masks: list[float]) -> MaskedLMResult:
    """Return a result with the probabilities of the targets at each mask."""
    logits = np.log(np.array(masks, np.float32)) + 2
    nothing = np.zeros((len(masks), 0), np.int64)
    return MaskedLMResult(logits[:, :0], nothing, np.full(len(masks), 2, np.float32), logits)


def whole(best: str, **logits: float) -> MaskedLMResult:
    """Return a result with the likeliest token, and logits of all words; their sum is 4."""
    row = np.zeros((1, len(ID)), np.float32)
    row[0, [ID[token] for token in logits]] = list(logits.values())
    three, four = np.full((1, 1), 3, np.float32), np.full(1, 4, np.float32)
    return MaskedLMResult(three, np.array([ids(best)]), four, row)


def masks(*results: MaskedLMResult) -> list[Any]:
    return [{"masked_lm": result} for result in results]


def words(weights: list[float], text: str) -> list[Any]:
    return [{"sparse_embedding": SparseEmbeddingResult(np.array(weights), np.array(ids(text)))}]


def tags(*windows: list[list[float]]) -> list[Any]:
    """Return outputs whose softmax are the given scores; [CLS] and [SEP] get no sense."""
    other = [1e-9, 1e-9, 1e-9, 1.0]
    rows = (np.log(np.array([other, *window, other])) + 3 for window in windows)
    return outputs("token_classification", *rows)


def tagged(tokens: int, labels: Mapping[int, str], logit: float = 9) -> list[Any]:
    """Return the outputs of a window, of so many tokens with these labels."""
    logits = np.zeros((1 + tokens + 1, len(LABELS)))
    logits[:, 0] = 9
    for token, label in labels.items():
        logits[1 + token] = 0
        logits[1 + token, LABELS.index(label)] = logit
    return outputs("token_classification", logits)


def spans(*tokens: tuple[float, float], cls: tuple[float, float] = (0, 0), plus: int = 0) -> Any:
    """Return logits of [CLS], a question of 1 token, [SEP], the context and [SEP]."""
    other = (50, 50)  # not part of the softmax
    return outputs("span", np.array([cls, other, other, *tokens, other]) + plus)


def both(first: list[Any], second: list[Any]) -> list[Any]:
    """Return the outputs of two heads."""
    return [one | other for one, other in zip(first, second, strict=True)]


NAMES = {
    "both": both,
    "sure": lambda count, *numbers: 9 * np.eye(count)[[0, *numbers, 0]],
    "tagged": tagged, "spans": spans, "LOW": (-9.0, -9.0), "NEVER": (-1000.0, -1000.0),
    "ASKED": {"question": "a", "context": "red doors tree Red"}, "LETTERS": "a b c d e f g h i j k l m n",
    "FEW": {"max_seq_len": 12, "max_answer_len": 3, "max_question_len": 4},
    "np": np, "ids": ids, "of": outputs, "top": top, "of_targets": of_targets, "whole": whole,
    "masks": masks, "words": words, "tags": tags, "NINE": "a b c d e f g h i",
    "O": [0.97, 0.01, 0.01, 0.01], "B": [0.1, 0.7, 0.1, 0.1], "I": [0.1, 0.1, 0.7, 0.1],
    "L": [0.1, 0.1, 0.1, 0.7],
}  # fmt: skip


def plain(value: Any) -> Any:
    """Return a value as JSON has it, without fields of no value."""
    if is_dataclass(value):
        named = {field.name: getattr(value, field.name) for field in fields(value)}
        return {name: plain(each) for name, each in named.items() if each is not None}
    if isinstance(value, (np.ndarray, np.generic)):
        return plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def outcome(model: str, request: str) -> str:
    name, inputs, parameters, *rounds = eval(request, NAMES)
    task, served = ALL[name], MODELS[model.partition(", ")[0]]
    given = task.parameters.model_validate(parameters)
    made = task.prepare(TypeAdapter(task.inputs).validate_python(inputs), given, served)
    parts: list[Any] = [made.vectors, made.warnings or None]
    last: Any = []
    asked = [[tokens(made), [one.requests for one in made.encodings]]]
    for last in rounds:
        if made.advance is None or (following := made.advance(last, served)) is None:
            break
        made = following
        asked.append([tokens(made), [one.requests for one in made.encodings]])
    if rounds:
        try:
            result = task.decode(made.state, last, served)
            parts += [result, str(result.dtype) if isinstance(result, np.ndarray) else None]
        except RequestError as error:
            parts.append(error.code)
    shown = [*asked, *(part for part in parts if part is not None)]
    return " | ".join(json.dumps(plain(part), ensure_ascii=False) for part in shown)


def test_each_result_is_what_the_outputs_say() -> None:
    check_table(Path(__file__).with_name("results.txt"), outcome)
