"""Zero-shot classification: what one request may ask for, and what of a text is read."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cloze.model_store.heads import ArrayResult
from cloze.service.tasks.task import PreparedRequest, TaskContext
from tests.support.task_model import LABELS, LIMITS, context, decoded, prepared, tokens

INFERENCES = {
    "sequence_classification": {
        "labels": ["ENTAILMENT", "neutral", "contradiction"],
        "problem_type": "single_label_classification",
    },
    "token_classification": {"labels": LABELS},
}


def limited(**changes: int) -> TaskContext:
    return context(replace(LIMITS, **changes), heads=INFERENCES)


MODEL = limited()


def asked(
    texts: Any, labels: list[str], model: TaskContext = MODEL, template: str = "the {}", **more: Any
) -> PreparedRequest[Any]:
    named = {"candidate_labels": labels, "hypothesis_template": template}
    return prepared("zero-shot-classification", texts, model, **named, **more)


def logits(*rows: list[float]) -> list[Any]:
    return [{"sequence_classification": ArrayResult(np.array(r, np.float32))} for r in rows]


def test_each_text_is_read_with_each_label() -> None:
    request = asked(["a", "b c"], ["red", "moon"])
    assert tokens(request) == [
        f"[CLS] {text} [SEP] the {label} [SEP]"
        for text in ("a", "b c")
        for label in ("red", "moon")
    ]


def test_a_label_alone_is_judged_against_its_contradiction() -> None:
    """The first label entails, so the last one contradicts, as in transformers."""
    request = asked("a", ["red"])
    [[best]] = decoded("zero-shot-classification", request, logits([1, 50, 0]), MODEL)
    assert best.score == pytest.approx(1 / (1 + np.exp(-1)))


def test_the_end_of_a_text_is_read_if_its_start_is_cut() -> None:
    long = "a b c d e f g h i"
    [request] = tokens(asked(long, ["red"], truncation_direction="left"))
    assert request == "[CLS] c d e f g h i [SEP] the red [SEP]"
    [request] = tokens(asked(long, ["red"]))
    assert request == "[CLS] a b c d e f g [SEP] the red [SEP]"


def test_windows_have_room_beside_the_longest_label() -> None:
    request = asked("a b c d e f g", ["red", "old green moon"], long_text="window")
    assert tokens(request)[:4] == [
        "[CLS] a b c d e [SEP] the red [SEP]",
        "[CLS] a b c d e [SEP] the old green moon [SEP]",
        "[CLS] e f g [SEP] the red [SEP]",
        "[CLS] e f g [SEP] the old green moon [SEP]",
    ]


def test_a_label_leaves_room_for_one_token_of_the_text() -> None:
    assert tokens(asked("a b", ["b c d e f g h"])) == ["[CLS] a [SEP] the b c d e f g h [SEP]"]
