"""Reads texts with labels, and sentences with tags, and checks all of them before any is used.

An error names the file, the line and the value.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from cloze.export.errors import DataError
from cloze.export.measure.data_files import read_objects, read_text
from cloze.model_store.heads.sequence_classification import ProblemType

SCORE = "score"
"""The label of a number that is predicted."""

OUTSIDE = "O"
_SHOWN = 80


@dataclass(frozen=True, slots=True)
class LabelledText:
    """A text, or a pair of texts, with what a model should say about it.

    Attributes:
        labels: its labels; exactly one unless the problem is multi-label; `SCORE` for a number.
        score: the number to predict; 0 for labels.
        at: file and line, for errors.
    """

    text: str
    text_pair: str | None
    labels: tuple[str, ...]
    score: float
    at: str


@dataclass(frozen=True, slots=True)
class TaggedSentence:
    """Words with one IOB2 tag each.

    Attributes:
        at: file and first line, for errors.
    """

    words: tuple[str, ...]
    tags: tuple[str, ...]
    at: str

    @property
    def labels(self) -> tuple[str, ...]:
        """The types of its entities."""
        return tuple(tag[2:] for tag in self.tags if tag.startswith("B-"))


Row = TypeVar("Row", LabelledText, TaggedSentence)


def read_labelled(files: Iterable[Path]) -> tuple[list[LabelledText], ProblemType]:
    """Read JSON Lines: ``text``, perhaps ``text_pair``, and ``label`` or ``labels``.

    ``label`` is a string, or a number for a regression. ``labels`` is a list of strings.

    Raises:
        DataError: a file is missing or holds no text, or a line is not such an object, or is of
            another kind than the lines before it.
    """
    rows: list[LabelledText] = []
    kinds: list[tuple[ProblemType, bool]] = []
    for file in files:
        for at, entry in read_objects(file):
            row, problem = _labelled_text(entry, at)
            kind = (problem, row.text_pair is not None)
            if kinds and kind != kinds[0]:
                raise DataError(
                    f"{at}: {_shown(entry)} is {_described(kind)}, but {rows[0].at} is "
                    f"{_described(kinds[0])}"
                )
            kinds.append(kind)
            rows.append(row)
    return rows, kinds[0][0]


def _described(kind: tuple[ProblemType, bool]) -> str:
    problem, is_pair = kind
    names = {
        "single_label_classification": "one label",
        "multi_label_classification": "a list of labels",
        "regression": "a number",
    }
    return f"a {'pair' if is_pair else 'text'} with {names[problem]}"


def _labelled_text(entry: Mapping[str, Any], at: str) -> tuple[LabelledText, ProblemType]:
    text, second = entry.get("text"), entry.get("text_pair")
    for name, value in (("text", text), ("text_pair", second)):
        if (name == "text" or value is not None) and not _is_text(value):
            raise DataError(f'{at}: "{name}" must be a text, got {_shown(value)}')
    assert isinstance(text, str)
    if ("label" in entry) == ("labels" in entry):
        raise DataError(f'{at} needs either "label" or "labels": {_shown(entry)}')
    if "labels" in entry:
        labels = entry["labels"]
        if not isinstance(labels, list) or not all(map(_is_text, labels)):
            raise DataError(f'{at}: "labels" must be a list of strings, got {_shown(labels)}')
        return LabelledText(text, second, tuple(labels), 0.0, at), "multi_label_classification"
    label = entry["label"]
    if _is_text(label):
        return LabelledText(text, second, (label,), 0.0, at), "single_label_classification"
    if isinstance(label, bool) or not isinstance(label, int | float) or not math.isfinite(label):
        raise DataError(f'{at}: "label" must be a string or a number, got {_shown(label)}')
    return LabelledText(text, second, (SCORE,), float(label), at), "regression"


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip()) and _is_unicode(value)


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def read_tagged(files: Iterable[Path]) -> list[TaggedSentence]:
    """Read sentences with IOB2 tags: JSON Lines, or columns as in CoNLL.

    A line of a ``.jsonl`` file has ``tokens`` and ``tags``. In another file, a line has a word
    first and its tag last, and a blank line ends a sentence.

    Raises:
        DataError: a file is missing or holds no sentence, or a line or its tags are malformed.
    """
    sentences: list[TaggedSentence] = []
    for file in files:
        before = len(sentences)
        read = _from_jsonl if ".jsonl" in file.suffixes else _from_columns
        sentences += read(file)
        if len(sentences) == before:
            raise DataError(f"{file}: there is no tagged sentence in it")
    return sentences


def _from_jsonl(file: Path) -> Iterator[TaggedSentence]:
    for at, entry in read_objects(file):
        words, tags = entry.get("tokens"), entry.get("tags")
        for name, values in (("tokens", words), ("tags", tags)):
            if not isinstance(values, list) or not values or not all(map(_is_text, values)):
                raise DataError(f'{at}: "{name}" must be a list of strings, got {_shown(values)}')
        assert isinstance(words, list)
        assert isinstance(tags, list)
        if len(words) != len(tags):
            raise DataError(f"{at}: {len(words)} tokens have {len(tags)} tags: {_shown(tags)}")
        for word in words:
            if any(character.isspace() for character in word):
                raise DataError(f"{at}: the token {_shown(word)} has white space in it")
        _check_tags([(tag, at) for tag in tags])
        yield TaggedSentence(tuple(words), tuple(tags), at)


def _from_columns(file: Path) -> Iterator[TaggedSentence]:
    rows: list[tuple[str, str, str]] = []
    for number, line in enumerate([*read_text(file).split("\n"), ""], 1):
        columns = line.split()
        if columns and not (columns[0].startswith("#") and not rows and not _is_tag(columns[-1])):
            at = f"{file}, line {number}"
            if len(columns) < 2:
                raise DataError(f"{at} is not a word and its tag: {_shown(line)}")
            if columns[0] != "-DOCSTART-":
                rows.append((columns[0], columns[-1], at))
        elif not columns and rows:
            words, tags, places = zip(*rows, strict=True)
            _check_tags(list(zip(tags, places, strict=True)))
            yield TaggedSentence(words, tags, places[0])
            rows = []


def _is_tag(tag: str) -> bool:
    return tag == OUTSIDE or (tag[:2] in ("B-", "I-") and len(tag) > 2)


def _check_tags(tags: Sequence[tuple[str, str]]) -> None:
    """Raise if the tags of a sentence, each with its place, do not follow IOB2."""
    previous = OUTSIDE
    for tag, at in tags:
        if not _is_tag(tag):
            raise DataError(f"{at}: the tag {_shown(tag)} is none of O, B-TYPE and I-TYPE")
        if tag.startswith("I-") and previous[2:] != tag[2:]:
            raise DataError(
                f"{at}: the tag {_shown(tag)} follows {_shown(previous)}; "
                f"in IOB2 an entity begins with B-{tag[2:]}"
            )
        previous = tag


def _shown(value: object) -> str:
    return repr(value)[:_SHOWN]


def tag_names(types: Iterable[str]) -> tuple[str, ...]:
    """Return the tags of entities of these types."""
    return (OUTSIDE, *(f"{part}-{kind}" for kind in types for part in "BI"))


def label_names(
    learnt: Sequence[Row], held_out: Sequence[Row], report: Callable[[str], None], *, least: int
) -> tuple[str, ...]:
    """Return the labels, or the types of entities, of the rows to learn from, sorted.

    A label that no held-out row has is learnt, but not measured, so it is only reported.

    Raises:
        DataError: a held-out row has a label that no row to learn from has, there are fewer labels
            than ``least``, or more than rows.
    """
    counts: dict[str, str] = {}
    for row in learnt:
        for label in row.labels:
            counts.setdefault(label, row.at)
    if learnt and not counts:
        raise DataError(f"{learnt[0].at}: no row has a label")
    if len(counts) > len(learnt):
        label, at = list(counts.items())[len(learnt)]
        raise DataError(
            f"{at}: {_shown(label)} is one of {len(counts)} labels, but there are only "
            f"{len(learnt)} rows; are the labels numbers or texts?"
        )
    if len(counts) < least:
        label, at = next(iter(counts.items()))
        raise DataError(f"{at}: every row has the label {_shown(label)}: nothing can be learnt")
    for row in held_out:
        for label in row.labels:
            if label not in counts:
                raise DataError(f"{row.at}: no row to learn from has the label {_shown(label)}")
    measured = {label for row in held_out for label in row.labels}
    for label, at in counts.items() if held_out else ():
        if label not in measured:
            report(f"{at}: no held-out row has the label {_shown(label)}; it is not measured")
    return tuple(sorted(counts))


def check_labels(rows: Sequence[LabelledText | TaggedSentence], known: Iterable[str]) -> None:
    """Check that a model has every label of the rows.

    Raises:
        DataError: it lacks one.
    """
    names = frozenset(known)
    for row in rows:
        for label in row.labels:
            if label not in names:
                listed = ", ".join(sorted(names))[:_SHOWN]
                raise DataError(f"{row.at}: the model has no label {_shown(label)} ({listed})")
