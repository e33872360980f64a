"""Texts with labels and sentences with tags: reads and checks them, and measures a model's logits.

All rows are checked before any is used. An error names the file, the line and the value.
Shapes: N texts, L labels of one set, S tokens.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PlainValidator, StringConstraints, ValidationError, model_validator
from pydantic.dataclasses import dataclass
from tokenizers import Encoding, Tokenizer

from cloze.export.errors import DataError
from cloze.export.measure.documents import (
    STRICT,
    Text,
    describe_error,
    read_entries,
    read_lines,
    read_table,
)
from cloze.export.measure.metrics import classification, entity_tags, multi_label, regression
from cloze.model_store.heads.label_sets import LabelSet
from cloze.model_store.heads.sequence_classification import ProblemType, SequenceLabelSet
from cloze.model_store.heads.token_classification import as_iob2
from cloze.model_store.sequences import without_space

SCORE = "score"
"""The label of a number that is predicted."""

OUTSIDE = "O"
_SHOWN = 80
Floats = NDArray[np.float32]
Word = Annotated[str, StringConstraints(pattern=r"^\S+$")]

_KINDS: Mapping[ProblemType, str] = {
    "single_label_classification": "one label",
    "multi_label_classification": "a list of labels",
    "regression": "a number",
}


def _label(value: object) -> str | float | None:
    if value is None or (isinstance(value, str) and value.strip()):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    raise ValueError("a text or a number is expected")


@dataclass(frozen=True, slots=True, config=STRICT)
class LabelledText:
    """A text, or a pair of texts, with what a model should say about it.

    Attributes:
        label: its class, or the number to predict.
        labels: any number of labels, in place of ``label``.
        at: file and line, for errors.
    """

    text: Text
    text_pair: Text | None = None
    label: Annotated[str | float | None, PlainValidator(_label)] = None
    labels: tuple[Text, ...] | None = None
    at: str = ""

    @model_validator(mode="after")
    def _has_one_kind(self) -> Self:
        if (self.label is None) == (self.labels is None):
            raise ValueError('needs either "label" or "labels"')
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """Its labels; `SCORE` for a number."""
        if self.labels is not None:
            return self.labels
        return (self.label,) if isinstance(self.label, str) else (SCORE,)

    @property
    def problem(self) -> ProblemType:
        """What a model of such rows is."""
        if self.labels is not None:
            return "multi_label_classification"
        return "single_label_classification" if isinstance(self.label, str) else "regression"

    @property
    def kind(self) -> str:
        """What all rows of a set have in common, in words."""
        return f"a {'text' if self.text_pair is None else 'pair'} with {_KINDS[self.problem]}"


@dataclass(frozen=True, slots=True, config=STRICT)
class TaggedSentence:
    """Words with one IOB2 tag each.

    Attributes:
        at: file and first line, for errors.
    """

    words: Annotated[tuple[Word, ...], Field(alias="tokens", min_length=1)]
    tags: tuple[str, ...]
    at: str = ""

    @model_validator(mode="after")
    def _tags_are_of_words(self) -> Self:
        if len(self.words) != len(self.tags):
            raise ValueError(f"{len(self.words)} tokens have {len(self.tags)} tags")
        return self

    @property
    def text(self) -> str:
        """The words, joined by spaces."""
        return " ".join(self.words)

    @property
    def text_pair(self) -> None:
        """A sentence is no pair."""

    @property
    def names(self) -> tuple[str, ...]:
        """The types of its entities."""
        return tuple(tag[2:] for tag in self.tags if tag.startswith("B-"))


Row = LabelledText | TaggedSentence


def read_labelled(files: Iterable[Path]) -> list[LabelledText]:
    """Read JSON Lines: ``text``, perhaps ``text_pair``, and ``label`` or ``labels``.

    ``label`` is a string, or a number for a regression. ``labels`` is a list of strings. A CSV or
    TSV file has columns of these names: ``label`` is a class there, and ``score`` a number.

    Raises:
        DataError: a file is missing or holds no text, or a line is not such an object, or is of
            another kind than the lines before it.
    """
    rows: list[LabelledText] = []
    for file in files:
        before = len(rows)
        is_table = {".csv", ".tsv"} & {*file.suffixes}
        for at, entry in _from_table(file) if is_table else read_entries(file, LabelledText):
            rows.append(row := dataclasses.replace(entry, at=at))
            if row.kind != rows[0].kind:
                raise DataError(
                    f"{at}: {_shown(row.text)} is {row.kind}, but {rows[0].at} is {rows[0].kind}"
                )
        if len(rows) == before:
            raise DataError(f"{file} is empty")
    return rows


def _from_table(file: Path) -> Iterator[tuple[str, LabelledText]]:
    for at, row in read_table(file):
        if "text" not in row or ("label" in row) == (SCORE in row):
            columns = ", ".join(row)
            raise DataError(
                f'{at}: needs the columns "text" and either "label" or "{SCORE}", got {columns}'
            )
        label: str | float = row.get("label", "")
        try:
            if SCORE in row:
                label = float(row[SCORE])
            pair = row.get("text_pair") or None
            entry = LabelledText(text=row["text"], text_pair=pair, label=label)
        except ValidationError as error:
            raise DataError(f"{at}: {describe_error(error)}") from None
        except ValueError:
            raise DataError(f"{at}: {SCORE} is not a number: {_shown(row[SCORE])}") from None
        yield at, entry


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
    for at, entry in read_entries(file, TaggedSentence):
        _check_tags([(tag, at) for tag in entry.tags])
        yield TaggedSentence(entry.words, entry.tags, at)


def _from_columns(file: Path) -> Iterator[TaggedSentence]:
    rows: list[tuple[str, str, str]] = []
    for number, line in enumerate(chain(read_lines(file), [""]), 1):
        columns = line.split()
        if columns and not (columns[0].startswith("#") and not rows and not _is_tag(columns[-1])):
            at = f"{file}, line {number}"
            if len(columns) < 2:
                raise DataError(f"{at} is not a word and its tag: {_shown(line.strip())}")
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
        for label in row.names:
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
    check_labels(held_out, counts, "no row to learn from has")
    measured = {label for row in held_out for label in row.names}
    for label, at in counts.items() if held_out else ():
        if label not in measured:
            report(f"{at}: no held-out row has the label {_shown(label)}; it is not measured")
    return tuple(sorted(counts))


def check_labels(
    rows: Sequence[Row], known: Iterable[str], lacking: str = "the model lacks"
) -> None:
    """Raise if a label of the rows is not known; ``lacking`` is what the error says of it."""
    names = frozenset(known)
    for row in rows:
        for label in row.names:
            if label not in names:
                listed = ", ".join(sorted(names))[:_SHOWN]
                raise DataError(f"{row.at}: {lacking} the label {_shown(label)} ({listed})")


# ---- as a model reads them -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class EncodedRow:
    """A text, a pair or a sentence as a model reads it.

    Attributes:
        input_ids: int64 [S].
        token_type_ids: int64 [S].
        word_of: int64 [S], the number of each token's word in a sentence; -1 outside of words, and
            for texts.
    """

    input_ids: NDArray[np.int64]
    token_type_ids: NDArray[np.int64]
    word_of: NDArray[np.int64]

    def first_tokens(self) -> NDArray[np.int64]:
        """Return the index of the first token of each word that has one."""
        before = np.concatenate([[-1], self.word_of[:-1]])
        return np.flatnonzero((self.word_of >= 0) & (self.word_of != before))


def encode_rows(
    rows: Sequence[Row], text: Tokenizer, tokens: int, *, cut: bool = True
) -> list[EncodedRow]:
    """Return the sequences of rows of at most ``tokens`` tokens, special tokens included.

    Of a long pair, the longer text is cut. Without ``cut``, a longer text is an error.

    Raises:
        DataError: a text is too long and must not be cut, or has no token.
    """
    sources = [row.text if row.text_pair is None else (row.text, row.text_pair) for row in rows]
    text.enable_truncation(tokens)
    encodings = text.encode_batch(sources)
    text.no_truncation()
    for row, source, encoding in zip(rows, sources, encodings, strict=True):
        if encoding.overflowing and not cut:
            raise DataError(
                f"{row.at}: {row.text[:60]!r} has {len(text.encode_batch([source])[0])} tokens, "
                f'the limit is {tokens}; shorten it, or set long_text = "truncate"'
            )
        if 0 not in encoding.sequence_ids:
            raise DataError(f"{row.at}: {row.text[:60]!r} has no token of the vocabulary")
    return [_row(row, encoding) for row, encoding in zip(rows, encodings, strict=True)]


def _row(row: Row, encoding: Encoding) -> EncodedRow:
    word_of = np.full(len(encoding.ids), -1)
    if isinstance(row, TaggedSentence):
        ends = np.cumsum([len(word) + 1 for word in row.words])
        is_text = np.array([number == 0 for number in encoding.sequence_ids])
        starts = np.array(without_space(row.text, encoding.offsets))[:, 0]
        word_of[is_text] = np.searchsorted(ends, starts[is_text], "right")
    ids, types = (np.array(each, np.int64) for each in (encoding.ids, encoding.type_ids))
    return EncodedRow(ids, types, word_of)


def label_matrix(rows: Sequence[LabelledText], labels: Sequence[str]) -> NDArray[np.bool_]:
    """Return bool [N, L], whether each row has each label."""
    return np.array([[label in row.names for label in labels] for row in rows], bool)


def measure_labels(
    rows: Sequence[LabelledText], logits: Sequence[Floats], labels: SequenceLabelSet
) -> dict[str, float]:
    """Return the figures of a label set on texts, from the logits [L] of each."""
    scores = np.stack(logits)
    match labels.problem_type:
        case "regression":
            return regression(scores[:, 0], np.array([row.label for row in rows], np.float64))
        case "multi_label_classification":
            return multi_label(scores, label_matrix(rows, labels.labels))
        case "single_label_classification":
            return classification(scores, label_matrix(rows, labels.labels).argmax(1))


def measure_tags(
    rows: Sequence[TaggedSentence],
    encoded: Sequence[EncodedRow],
    logits: Sequence[Floats],
    labels: LabelSet,
) -> dict[str, float]:
    """Return precision, recall and F1 of entities, and the share of right tags, of logits [S, L].

    The first token of a word decides its tag. A word that is cut off, or has no token, is outside.
    """
    predicted: list[Sequence[str]] = []
    for row, sequence, scores in zip(rows, encoded, logits, strict=True):
        tags = [OUTSIDE] * len(row.words)
        for token in sequence.first_tokens():
            tags[sequence.word_of[token]] = labels.labels[scores[token].argmax()]
        predicted.append(as_iob2(tags, labels.labels))
    return entity_tags(predicted, [row.tags for row in rows])
