"""The data of fine-tuning for labels and tags: which rows are learnt, and which are held out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from cloze.export.errors import DataError, Report, TrainError
from cloze.export.measure.labelled import (
    LabelledText,
    TaggedSentence,
    label_names,
    read_labelled,
    read_tagged,
    tag_names,
)
from cloze.export.train.documents import is_held_out
from cloze.export.train.task_recipe import LabelSettings, TagSettings
from cloze.model_store.heads.label_sets import LabelSet
from cloze.model_store.heads.sequence_classification import SequenceLabelSet

Row = TypeVar("Row", LabelledText, TaggedSentence)


@dataclass(frozen=True, slots=True)
class RowFiles:
    """Files of texts with labels, or of sentences with tags.

    Attributes:
        held_out: files to measure on; empty: a share of the others.
    """

    learnt: Sequence[Path]
    held_out: Sequence[Path]

    @property
    def all(self) -> list[Path]:
        """All files."""
        return [*self.learnt, *self.held_out]


@dataclass(frozen=True, slots=True)
class LabelData:
    """Texts with labels of one set, which were read and checked."""

    learnt: list[LabelledText]
    held_out: list[LabelledText]
    labels: SequenceLabelSet
    settings: LabelSettings


@dataclass(frozen=True, slots=True)
class TagData:
    """Sentences with tags of one set, which were read and checked."""

    learnt: list[TaggedSentence]
    held_out: list[TaggedSentence]
    labels: LabelSet
    settings: TagSettings


def read_label_data(
    files: RowFiles, settings: LabelSettings, report: Report, name: str | None = None
) -> LabelData:
    """Read all texts of a task.

    Raises:
        DataError: a file, its labels, or the settings cannot be used.
    """
    learnt, problem = read_labelled(files.learnt)
    held_out: list[LabelledText] = []
    if files.held_out:
        held_out, other = read_labelled(files.held_out)
        if other != problem:
            raise DataError(
                f"{held_out[0].at}: {held_out[0].text[:60]!r} has another kind of label "
                f"than {learnt[0].at}"
            )
    else:
        learnt, held_out = _split(learnt, settings.held_out, lambda row: row.text)
    least = 2 if problem == "single_label_classification" else 1
    names = label_names(learnt, held_out, report, least=least)
    if problem == "regression" and settings.class_weights != "none":
        raise TrainError(f"{learnt[0].at} has a number, but class_weights are weights of labels")
    _check_weights(settings, names)
    labels = SequenceLabelSet(name=name, labels=names, problem_type=problem)
    return LabelData(learnt, held_out, labels, settings)


def read_tag_data(
    files: RowFiles, settings: TagSettings, report: Report, name: str | None = None
) -> TagData:
    """Read all sentences of a task.

    Raises:
        DataError: a file, its tags, or the settings cannot be used.
    """
    learnt, held_out = read_tagged(files.learnt), []
    if files.held_out:
        held_out = read_tagged(files.held_out)
    else:
        learnt, held_out = _split(learnt, settings.held_out, lambda row: " ".join(row.words))
    names = tag_names(label_names(learnt, held_out, report, least=1))
    _check_weights(settings, names)
    return TagData(learnt, held_out, LabelSet(name=name, labels=names), settings)


def read_rows(
    files: RowFiles, settings: LabelSettings, report: Report, name: str | None = None
) -> LabelData | TagData:
    """Read all rows of a task, whose settings say what the rows are.

    Raises:
        DataError: a file, its labels, or the settings cannot be used.
    """
    if isinstance(settings, TagSettings):
        return read_tag_data(files, settings, report, name)
    return read_label_data(files, settings, report, name)


def _split(rows: list[Row], share: float, key: Callable[[Row], str]) -> tuple[list[Row], list[Row]]:
    """Return the rows to learn from, and the held-out rows."""
    parts: tuple[list[Row], list[Row]] = ([], [])
    for row in rows:
        parts[is_held_out(key(row), share)].append(row)
    if not parts[0]:
        raise TrainError(f"{rows[0].at}: all rows are held out; lower held_out or give more rows")
    return parts


def _check_weights(settings: LabelSettings, labels: Sequence[str]) -> None:
    if isinstance(settings.class_weights, dict):
        for label in settings.class_weights:
            if label not in labels:
                raise TrainError(f"class_weights: no row to learn from has the label {label!r}")
