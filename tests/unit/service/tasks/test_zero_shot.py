"""Zero-shot classification: what one request may ask for, and what of a text is read."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cloze.model_store.heads import ArrayResult
from cloze.service.tasks.task import PreparedRequest, TaskContext
from tests.support.refusals import refused
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
    with refused("text_too_long", 9, at="candidate_labels[0]"):
        asked("a b", ["b c d e f g h i"])


def test_scores_and_tokens_of_a_request_are_limited() -> None:
    texts, labels = ["a", "b"], ["red", "moon", "sun"]
    asked(texts, labels, limited(max_results=6))
    with refused("limit_exceeded", 6, 5):
        asked(texts, labels, limited(max_results=5))
    asked(texts, labels, limited(max_request_tokens=36))  # 6 pairs of 6 tokens
    with refused("limit_exceeded", 36, 35, at="inputs[1]"):
        asked(texts, labels, limited(max_request_tokens=35))
    # A text is cut before its tokens count, and divided before they do.
    long = "a b c d e f g h i j k l m"
    asked(long, labels, limited(max_request_tokens=36))
    asked(long, labels, limited(max_request_tokens=72), long_text="window")  # 6 pairs of 12
    with refused("limit_exceeded", 72, 71, at="inputs"):
        asked(long, labels, limited(max_request_tokens=71), long_text="window")


def test_labels_and_templates_are_limited() -> None:
    wide = limited(max_text_characters=5000)
    asked("a", ["b" * 1000], wide)
    with refused("text_too_long", 1001, 1000, at="candidate_labels[0]"):
        asked("a", ["b" * 1001], wide)
    template = "{}" + " " * 48
    asked("a", ["b", "c", "d", "e"], template=template)
    with refused("text_too_long", 4, 204, 200, at="hypothesis_template"):
        asked("a", ["b", "c", "d", "e"], template=template + " ")
    with refused("text_too_long", 202, at="hypothesis_template"):
        asked("a", ["b"], template="{}" + " " * 200)
