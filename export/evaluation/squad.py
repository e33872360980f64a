"""Questions in SQuAD's format, and the official measures of answers. Knows no model.

Sources: Rajpurkar et al. 2016 (1.1) and 2018 (2.0), and their evaluation scripts.
"""

import json
import lzma
import re
import string
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from export.errors import DataError

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True, slots=True)
class Question:
    """One question on one paragraph.

    Attributes:
        title: of the article.
        answers: (first character, text) of each accepted answer; the first is None for one that is not in the paragraph.
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
        """Whether some accepted answer stands in the paragraph."""
        return any(at is not None for at, _ in self.answers)


def read_questions(files: Iterable[Path]) -> list[Question]:
    """All questions of files in SQuAD 1.1 or 2.0 format, also ``.xz``; of an id that comes again, the first.

    An answer whose ``answer_start`` is off is looked for in the paragraph.

    Raises:
        DataError: a file is missing or has another format, or there is no question in any.
    """
    questions: dict[str, Question] = {}
    for file in files:
        for question in _read(file):
            questions.setdefault(question.id, question)
    if not questions:
        raise DataError("there are no questions in " + ", ".join(str(file) for file in files))
    return list(questions.values())


def _read(file: Path) -> Iterable[Question]:
    try:
        data = file.read_bytes()
        articles = json.loads(lzma.decompress(data) if file.suffix == ".xz" else data)["data"]
        return [
            _question(entry, article.get("title", ""), paragraph["context"])
            for article in articles
            for paragraph in article["paragraphs"]
            for entry in paragraph["qas"]
        ]
    except FileNotFoundError:
        raise DataError(f"{file}: no such file") from None
    except (ValueError, KeyError, TypeError, AttributeError, lzma.LZMAError, OSError) as error:
        raise DataError(
            f"{file} is not in SQuAD's format: {type(error).__name__} {error}"
        ) from error


def _question(entry: Mapping[str, Any], title: str, context: str) -> Question:
    given = [] if entry.get("is_impossible") else entry.get("answers", [])
    found = tuple(
        (_place(context, a["text"], int(a["answer_start"])), a["text"]) for a in given if a["text"]
    )
    for text in (title, entry["question"], context, *(text for _, text in found)):
        text.encode()  # a lone surrogate is no text
    return Question(str(entry["id"]), title, entry["question"].strip(), context, found)


def _place(context: str, text: str, start: int) -> int | None:
    """Where the answer stands: at its place, or where it occurs nearest to it."""
    if context[start : start + len(text)] == text:
        return start
    places = [match.start() for match in re.finditer(re.escape(text), context)]
    return min(places, key=lambda place: abs(place - start), default=None)


def normalise_answer(text: str) -> str:
    """Lower case, without punctuation, articles and extra white space, as the official script."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, accepted: str) -> float:
    """1 if equal after normalisation, else 0."""
    return float(normalise_answer(answer) == normalise_answer(accepted))


def f1(answer: str, accepted: str) -> float:
    """Harmonic mean of precision and recall over the words, in [0, 1]; of empty answers: 1 if both are, else 0."""
    ours, theirs = normalise_answer(answer).split(), normalise_answer(accepted).split()
    if not ours or not theirs:
        return float(ours == theirs)
    common = sum((Counter(ours) & Counter(theirs)).values())
    return 0.0 if not common else 2 * common / (len(ours) + len(theirs))


def score(answers: Mapping[str, str], questions: Iterable[Question]) -> dict[str, float]:
    """EM and F1 in percent, the best over each question's accepted answers; a question not answered counts as wrong.

    Args:
        answers: by the question's id; an empty string means that there is no answer.
        questions: all that should be answered.

    Returns:
        ``exact_match`` and ``f1``; if some questions have no answer, also those over each kind alone.
    """
    rows: dict[str, list[tuple[float, float]]] = {"answerable_": [], "unanswerable_": []}
    for question in questions:
        # As the official script: if every accepted answer is empty once normalised, the right one is no answer.
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
