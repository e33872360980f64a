"""Reads questions in the formats of SQuAD 1.1 and 2.0 (Rajpurkar et al. 2016 and 2018)."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cloze.export.errors import DataError
from cloze.export.measure.data_files import read_lines


@dataclass(frozen=True, slots=True)
class Question:
    """One question on one paragraph.

    Attributes:
        answers: (first character, text) of each accepted answer; the first character is None if
            the paragraph does not contain the text.
    """

    id: str
    title: str
    question: str
    context: str
    answers: tuple[tuple[int | None, str], ...]

    @property
    def impossible(self) -> bool:
        """Whether no answer is accepted."""
        return not self.answers

    @property
    def is_placed(self) -> bool:
        """Whether the paragraph contains an accepted answer."""
        return any(at is not None for at, _ in self.answers)


def read_questions(files: Iterable[Path]) -> list[Question]:
    """Read files in SQuAD 1.1 or 2.0 format; a ``.xz`` file is decompressed.

    Of several questions with one id, the first is kept. If an ``answer_start`` is wrong, the
    answer is searched in the paragraph.

    Raises:
        DataError: a file is missing or has another format, or the files hold no question.
    """
    questions: dict[str, Question] = {}
    for file in files:
        for question in _read(file):
            questions.setdefault(question.id, question)
    if not questions:
        raise DataError("there are no questions in " + ", ".join(str(file) for file in files))
    return list(questions.values())


def _read(file: Path) -> Iterable[Question]:
    text = "".join(read_lines(file))
    try:
        articles = json.loads(text)["data"]
        return [
            _question(entry, article.get("title", ""), paragraph["context"])
            for article in articles
            for paragraph in article["paragraphs"]
            for entry in paragraph["qas"]
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{file} is not in SQuAD's format: {type(error).__name__} {error}"
        ) from error


def _question(entry: Mapping[str, Any], title: str, context: str) -> Question:
    entries = [] if entry.get("is_impossible") else entry.get("answers", [])
    answers = tuple(
        (_find_answer(context, answer["text"], int(answer["answer_start"])), answer["text"])
        for answer in entries
        if answer["text"]
    )
    for text in (title, entry["question"], context, *(text for _, text in answers)):
        text.encode()  # raises ValueError on a lone surrogate
    return Question(str(entry["id"]), title, entry["question"].strip(), context, answers)


def _find_answer(context: str, text: str, start: int) -> int | None:
    """Return the position of an answer: ``start``, or else the occurrence nearest to ``start``."""
    if context[start : start + len(text)] == text:
        return start
    positions = [match.start() for match in re.finditer(re.escape(text), context)]
    return min(positions, key=lambda position: abs(position - start), default=None)
