"""What fine-tuning gives a text or a token as its target, and how much each label weighs."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from cloze.export.measure.labelled import EncodedRow, LabelledText, TaggedSentence
from cloze.export.train.label_tasks import LabelRows, TagRows, tag_targets
from cloze.export.train.recipe import LabelSettings, TagSettings
from cloze.model_store.heads.label_sets import LabelSet
from cloze.model_store.heads.sequence_classification import SequenceLabelSet
from tests.support.scorers import tokenizer

TOKENIZER = tokenizer()


def _row(problem: Any, labels: tuple[str, ...]) -> LabelledText:
    if problem == "multi_label_classification":
        return LabelledText("the king", labels=labels)
    label = 2.5 if problem == "regression" else labels[0]
    return LabelledText("the king", label=label)


def rows_of(problem: Any, labels: list[tuple[str, ...]], weights: Any = "balanced") -> LabelRows:
    learnt = [_row(problem, each) for each in labels]
    names = SequenceLabelSet(labels=("x", "y", "z"), problem_type=problem)
    return LabelRows(learnt, [], names, LabelSettings(class_weights=weights), TOKENIZER)


def test_targets_of_one_label_are_its_number() -> None:
    labels = [("x",), ("z",), ("x",), ("x",)]
    rows = rows_of("single_label_classification", labels)
    assert np.array_equal(rows.targets, [[0], [2], [0], [0]])
    assert rows.weights.tolist() == pytest.approx([4 / 6, 2, 2])
    given = rows_of("single_label_classification", labels, {"z": 3.0})
    assert given.weights.tolist() == [1, 1, 3]
    logits, targets = torch.zeros(4, 3), torch.tensor(np.array(rows.targets))
    logits[1, 2] = 2.0
    loss, _ = rows.loss(logits, targets)
    torch.testing.assert_close(loss, F.cross_entropy(logits, targets[:, 0], rows.weights))


def test_a_label_among_several_weighs_as_the_rows_without_it_by_those_with_it() -> None:
    labels: list[tuple[str, ...]] = [("x", "z"), ("x",), (), ("x",)]
    rows = rows_of("multi_label_classification", labels)
    assert np.array_equal(rows.targets, [[1, 0, 1], [1, 0, 0], [0, 0, 0], [1, 0, 0]])
    assert rows.weights.tolist() == pytest.approx([1 / 3, 4, 3])
    numbers = rows_of("regression", labels, "none")
    assert np.array_equal(numbers.targets, [[2.5]] * 4)


def test_further_tokens_of_a_word_continue_its_entity() -> None:
    words = np.array([-1, 0, 1, 1, 2, 2, -1])
    row = EncodedRow(np.zeros(7, np.int64), np.zeros(7, np.int64), words)
    sentence = TaggedSentence(("a", "b", "c"), ("O", "B-X", "I-X"), "at")
    number = {"O": 0, "B-X": 1, "I-X": 2}
    first, every = (tag_targets(row, sentence, number, each).tolist() for each in (False, True))
    assert first == [-100, 0, 1, -100, 2, -100, -100]
    assert every == [-100, 0, 1, 2, 2, 2, -100]


def test_the_loss_of_tags_is_the_weighted_mean_of_labelled_tokens() -> None:
    logits = torch.randn(2, 3, 3, generator=torch.Generator().manual_seed(1))
    targets = torch.tensor([[-100, 0, 2], [1, -100, 2]])
    weights = {"O": 0.5, "B-X": 1.0, "I-X": 4.0}
    sentence = TaggedSentence(("the",), ("O",), "at")
    labels, settings = LabelSet(labels=tuple(weights)), TagSettings(class_weights=weights)
    rows = TagRows([sentence], [], labels, settings, TOKENIZER)
    loss, figures = rows.loss(logits, targets)
    expected = F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), torch.tensor(list(weights.values()))
    )
    torch.testing.assert_close(loss, expected)
    right = (logits.argmax(-1) == targets).sum() / 4
    assert figures["accuracy"] == right
