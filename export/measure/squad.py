"""Reads questions in SQuAD's format and computes the official metrics of answers.

Sources: Rajpurkar et al. 2016 (1.1) and 2018 (2.0), and their evaluation scripts.
"""

import json
import re
import string
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cloze.export.errors import DataError
from cloze.export.measure.data_files import read_data

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


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
    data = read_data(file)
    try:
        articles = json.loads(data)["data"]
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


def normalise_answer(text: str) -> str:
    """Return an answer in lower case, without punctuation, articles and extra white space.

    Source: the official script.
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, accepted: str) -> float:
    """Return 1 if the answers are equal after normalisation, else 0."""
    return float(normalise_answer(answer) == normalise_answer(accepted))


def f1(answer: str, accepted: str) -> float:
    """Return the harmonic mean of precision and recall over the words, in [0, 1].

    If one answer is empty, the result is 1 if both answers are empty, else 0.
    """
    ours, theirs = normalise_answer(answer).split(), normalise_answer(accepted).split()
    if not ours or not theirs:
        return float(ours == theirs)
    common = sum((Counter(ours) & Counter(theirs)).values())
    return 0.0 if not common else 2 * common / (len(ours) + len(theirs))


def score(answers: Mapping[str, str], questions: Iterable[Question]) -> dict[str, float]:
    """Return exact match and F1 in percent, the best over each question's accepted answers.

    A question that is missing in ``answers`` counts as wrong.

    Args:
        answers: answers by question id; an empty string means "no answer".

    Returns:
        ``exact_match`` and ``f1``. If the questions are of both kinds, also both figures of the
        answerable questions and of the unanswerable questions.
    """
    rows: dict[str, list[tuple[float, float]]] = {"answerable_": [], "unanswerable_": []}
    for question in questions:
        # Like the official script: if all accepted answers are empty after normalisation, the
        # correct answer is "no answer".
        accepted = [text for _, text in question.answers if normalise_answer(text)] or [""]
        answer = answers.get(question.id)
        best = (0.0, 0.0)
        if answer is not None:
            best = (
                max(exact_match(answer, text) for text in accepted),
                max(f1(answer, text) for text in accepted),
            )
        rows["answerable_" if question.answers else "unanswerable_"].append(best)
    everything = [row for kind in rows.values() for row in kind]
    parts = {"": everything} | (rows if all(rows.values()) else {})
    return {
        f"{kind}{name}": 100 * sum(row[column] for row in part) / len(part)
        for kind, part in parts.items()
        if part
        for column, name in enumerate(("exact_match", "f1"))
    }


def best_threshold(
    questions: Sequence[Question], texts: Sequence[str], null_margins: Sequence[float]
) -> tuple[float, float]:
    """Return the highest F1 in percent that a threshold gives, and this threshold.

    An answer is empty where its margin is above the threshold. A model is calibrated if 0 gives as
    good an F1. Source: the official script of SQuAD 2.0, ``find_best_thresh``.

    Args:
        texts: the best span of each question.
        null_margins: score of "no answer" minus the span's, in logits.
    """

    def f1_of(question: Question, text: str) -> float:
        return score({question.id: text}, [question])["f1"]

    order = sorted(range(len(questions)), key=lambda number: null_margins[number])
    total = sum(f1_of(question, "") for question in questions)
    best = (total, null_margins[order[0]] - 1.0)
    for number in order:
        question = questions[number]
        total += f1_of(question, texts[number]) - f1_of(question, "")
        best = max(best, (total, null_margins[number]))
    return best[0] / len(questions), best[1]
