"""What fine-tuning gives a text or a token as its target, and how much each label weighs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from cloze.export.errors import DataError
from cloze.export.measure.labelled import LabelledText, TaggedSentence
from cloze.export.train.label_data import LabelData, RowFiles, read_label_data
from cloze.export.train.label_tasks import (
    LabelObjective,
    RowBatch,
    TagObjective,
    _balanced,
    _tag_targets,
)
from cloze.export.train.rows import Row
from cloze.export.train.task_recipe import LabelSettings
from cloze.model_store.heads.sequence_classification import SequenceLabelSet


def data(problem: Any, rows: list[tuple[str, ...]], weights: Any = "balanced") -> LabelData:
    learnt = [LabelledText("a", None, labels, 2.5, "at") for labels in rows]
    labels = SequenceLabelSet(labels=("x", "y", "z"), problem_type=problem)
    return LabelData(learnt, [], labels, LabelSettings(class_weights=weights))


class Labels(LabelObjective):
    """An objective without a model."""

    def __init__(self, data: LabelData) -> None:
        self._data = data


def label_targets(data: LabelData, labels: tuple[str, ...]) -> tuple[Any, Any]:
    return Labels(data).targets([], labels)


def test_held_out_rows_are_of_the_kind_that_is_learnt(tmp_path: Path) -> None:
    learnt, held_out = tmp_path / "learnt.jsonl", tmp_path / "held-out.jsonl"
    learnt.write_text('{"text": "a", "label": "x"}\n{"text": "b", "label": "y"}\n')
    held_out.write_text('{"text": "a", "label": 1.5}\n')
    with pytest.raises(DataError, match="has another kind of label"):
        read_label_data(RowFiles([learnt], [held_out]), LabelSettings(), print)


def test_balanced_weights_are_1_per_row_on_average() -> None:
    counts = np.array([6, 3, 0, 1])
    weights = _balanced(counts)
    assert weights[:3].tolist() == pytest.approx([10 / 18, 10 / 9, 10 / 3])
    assert (counts * weights).sum() / counts.sum() == pytest.approx(1)


def test_targets_of_one_label_are_its_number() -> None:
    rows = [("x",), ("z",), ("x",), ("x",)]
    targets, weights = label_targets(data("single_label_classification", rows), ("x", "y", "z"))
    assert targets == [0, 2, 0, 0]
    assert weights.tolist() == pytest.approx([4 / 6, 2, 2])
    given = data("single_label_classification", rows, {"z": 3.0})
    assert label_targets(given, ("x", "y", "z"))[1].tolist() == [1, 1, 3]


def test_a_label_among_several_weighs_as_the_rows_without_it_by_those_with_it() -> None:
    rows: list[tuple[str, ...]] = [("x", "z"), ("x",), (), ("x",)]
    targets, weights = label_targets(data("multi_label_classification", rows), ("x", "y", "z"))
    assert np.array_equal(targets, [[1, 0, 1], [1, 0, 0], [0, 0, 0], [1, 0, 0]])
    assert weights.tolist() == pytest.approx([1 / 3, 4, 3])
    numbers, weights = label_targets(data("regression", rows, "none"), ("score",))
    assert np.array_equal(numbers, [[2.5]] * 4)
    assert weights.tolist() == [1]


@pytest.mark.parametrize(
    ("all_tokens", "expected"),
    [
        (False, [-100, 0, 1, -100, 2, -100, -100]),
        (True, [-100, 0, 1, 2, 2, 2, -100]),
    ],
)
def test_further_tokens_of_a_word_continue_its_entity(
    all_tokens: bool, expected: list[int]
) -> None:
    words = np.array([-1, 0, 1, 1, 2, 2, -1])
    row = Row(np.zeros(7, np.int64), np.zeros(7, np.int64), words)
    sentence = TaggedSentence(("a", "b", "c"), ("O", "B-X", "I-X"), "at")
    number = {"O": 0, "B-X": 1, "I-X": 2}
    assert _tag_targets(row, sentence, number, all_tokens).tolist() == expected


class Tags(TagObjective):
    """An objective whose logits are given."""

    def __init__(self, logits: torch.Tensor, weights: torch.Tensor) -> None:
        self._logits, self._weights = logits, weights

    def logits(self, _: RowBatch) -> torch.Tensor:
        return self._logits


def test_the_loss_of_tags_is_the_weighted_mean_of_labelled_tokens() -> None:
    logits = torch.randn(2, 3, 3, generator=torch.Generator().manual_seed(1))
    targets = torch.tensor([[-100, 0, 2], [1, -100, 2]])
    weights = torch.tensor([0.5, 1.0, 4.0])
    nothing = torch.zeros(2, 3, dtype=torch.long)
    batch = RowBatch(nothing, nothing, nothing.bool(), targets)
    loss, figures = Tags(logits, weights).loss(batch)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), weights)
    torch.testing.assert_close(loss, expected)
    right = (logits.argmax(-1) == targets).sum() / 4
    assert figures["accuracy"] == right
