"""Figures of predictions beside the right answers: arrays and strings in, figures by name out.

scikit-learn and scipy compute the figures that they have. Shapes: N rows, L labels.
"""

import re
import string
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats
from scipy.optimize import minimize_scalar
from scipy.special import expit, log_expit, log_softmax, softmax
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

from cloze.export.measure.squad import Question

Entity = tuple[int, int, int, str]
"""Number of the sentence, first word, end, and type."""


def classification(logits: NDArray[np.floating], gold: NDArray[np.integer]) -> dict[str, float]:
    """Return accuracy, macro F1 and Matthews' correlation of one label per row.

    Args:
        logits: [N, L].
        gold: [N], the number of each row's label.
    """
    predicted = logits.argmax(1)
    varies = len(np.union1d(gold, predicted)) > 1
    return {
        "accuracy": float(accuracy_score(gold, predicted)),
        "macro_f1": float(f1_score(gold, predicted, average="macro")),
        "matthews": float(matthews_corrcoef(gold, predicted)) if varies else 0.0,
    }


def multi_label(logits: NDArray[np.floating], gold: NDArray[np.bool_]) -> dict[str, float]:
    """Return the share of rows whose labels are all right, macro and micro F1.

    Args:
        logits: [N, L]; a row has the labels whose logits are above 0.
        gold: [N, L], whether each row has each label.
    """
    predicted = logits > 0
    # scikit-learn takes a single column for two classes. A column that nothing has prevents this.
    columns = [np.pad(each, ((0, 0), (0, 1))) for each in (gold, predicted)]
    macro = f1_score(*columns, average="macro", zero_division=np.nan)
    return {
        "accuracy": float(accuracy_score(*columns)),
        "macro_f1": float(np.nan_to_num(macro)),
        "micro_f1": float(f1_score(*columns, average="micro", zero_division=0)),
    }


def regression(predicted: ArrayLike, gold: ArrayLike) -> dict[str, float]:
    """Return Pearson's and Spearman's correlation of numbers [N]."""
    return {
        "pearson": _correlation(stats.pearsonr, predicted, gold),
        "spearman": spearman(predicted, gold),
    }


def spearman(one: ArrayLike, other: ArrayLike) -> float:
    """Return Spearman's rank correlation in [-1, 1]; 0 if one side is constant."""
    return _correlation(stats.spearmanr, one, other)


def _correlation(measure: Any, one: ArrayLike, other: ArrayLike) -> float:
    constant = min(np.ptp(np.asarray(one)), np.ptp(np.asarray(other))) == 0
    return 0.0 if constant else float(measure(one, other).statistic)


# ---- calibration: Guo et al. 2017, "On Calibration of Modern Neural Networks", sections 2 and 4.2

_BINS = 15
"""Number of bins of confidence, as in the paper."""

_MOST = 10.0
"""Bound of a temperature and of its inverse: without an error in the rows, the best one is 0."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """A temperature, and the expected calibration error in [0, 1] without and with it."""

    temperature: float
    error_before: float
    error_after: float

    def __str__(self) -> str:
        return (
            f"temperature {self.temperature:.3f}, expected calibration error "
            f"{self.error_before:.4f} before and {self.error_after:.4f} after"
        )


def calibrate(
    logits: NDArray[np.floating], gold: NDArray[np.bool_], *, independent: bool
) -> Calibration:
    """Return the temperature with the least negative log-likelihood, from 0.1 to 10.

    Args:
        logits: float [N, L], at least one row.
        gold: bool [N, L], whether each row has each label.
        independent: whether a row may have any number of labels.
    """
    scores = logits.astype(np.float64)

    def probabilities(log_scale: float) -> NDArray[np.float64]:
        scaled = scores * np.exp(log_scale)
        likely: NDArray[np.float64] = expit(scaled) if independent else softmax(scaled, axis=1)
        return likely

    def loss(log_scale: float) -> float:
        scaled = scores * np.exp(log_scale)
        if independent:
            return float(-log_expit(np.where(gold, scaled, -scaled)).sum())
        return float(-log_softmax(scaled, axis=1)[gold].sum())

    # The loss is convex in the inverse of the temperature.
    bounds, options = (-np.log(_MOST), np.log(_MOST)), {"xatol": 1e-9}
    found = float(minimize_scalar(loss, bounds=bounds, method="bounded", options=options).x)
    before, after = (
        calibration_error(probabilities(log_scale), gold, independent) for log_scale in (0.0, found)
    )
    return Calibration(float(np.exp(-found)), before, after)


def calibration_error(
    probabilities: NDArray[np.floating], gold: NDArray[np.bool_], independent: bool = False
) -> float:
    """Return the expected calibration error: confidence against accuracy in 15 equal bins.

    A choice is the label with the highest probability, or of independent labels each yes or no.
    """
    if independent:
        confidence = np.maximum(probabilities, 1 - probabilities).ravel()
        right = ((probabilities > 0.5) == gold).ravel()
    else:
        confidence = probabilities.max(1)
        right = gold[np.arange(len(gold)), probabilities.argmax(1)]
    gaps, _, _ = stats.binned_statistic(confidence, confidence - right, "sum", _BINS, range=(0, 1))
    return float(np.abs(gaps).sum() / len(confidence))


# ---- tags --------------------------------------------------------------------------------------


def entity_tags(
    predicted: Sequence[Sequence[str]], gold: Sequence[Sequence[str]]
) -> dict[str, float]:
    """Return precision, recall and F1 of the entities of sentences, and the share of right tags.

    The figures of entities are seqeval's: an entity is right if its words and its type are, and
    every predicted entity counts.
    """
    guesses, marked = _entities(predicted), _entities(gold)
    right = len(guesses & marked)
    flat = [[tag for sentence in tags for tag in sentence] for tags in (gold, predicted)]
    return {
        "entity_precision": right / max(len(guesses), 1),
        "entity_recall": right / max(len(marked), 1),
        "entity_f1": 2 * right / max(len(guesses) + len(marked), 1),
        "accuracy": float(accuracy_score(*flat)),
    }


def _entities(tags: Sequence[Sequence[str]]) -> set[Entity]:
    """Return the entities of sentences.

    As in conlleval, a tag ``I-X`` that follows no ``B-X`` or ``I-X`` begins an entity.
    """
    found: set[Entity] = set()
    for number, sentence in enumerate(tags):
        start, kind = 0, ""
        for at, tag in enumerate([*sentence, "O"]):
            if kind and tag != f"I-{kind}":
                found.add((number, start, at, kind))
                kind = ""
            if tag != "O" and not kind:
                start, kind = at, tag[2:]
    return found


# ---- answers: the official scripts of SQuAD 1.1 and 2.0 ------------------------------------------

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise_answer(text: str) -> str:
    """Return an answer in lower case, without punctuation, articles and extra white space."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def _exact_and_f1(answer: str, accepted: str) -> tuple[float, float]:
    """Return whether two normalised answers are equal, and the F1 of their words, in [0, 1]."""
    ours, theirs = answer.split(), accepted.split()
    exact = float(ours == theirs)
    if not ours or not theirs:
        return exact, exact
    common = sum((Counter(ours) & Counter(theirs)).values())
    return exact, 2 * common / (len(ours) + len(theirs))


def _best_match(question: Question, answer: str) -> tuple[float, float]:
    """Return exact match and F1 of an answer, each the best over the accepted answers.

    If all accepted answers are empty after normalisation, the right answer is "no answer".
    """
    accepted = [text for _, given in question.answers if (text := normalise_answer(given))]
    pairs = [_exact_and_f1(normalise_answer(answer), text) for text in accepted or [""]]
    exact, f1 = np.max(pairs, axis=0)
    return float(exact), float(f1)


def squad_answers(answers: Mapping[str, str], questions: Iterable[Question]) -> dict[str, float]:
    """Return exact match and F1 in percent. A question without an entry counts as wrong.

    Args:
        answers: answers by question id; an empty string means "no answer".

    Returns:
        ``exact_match`` and ``f1``. If the questions are of both kinds, also both figures of the
        answerable questions and of the unanswerable questions.
    """
    rows: dict[str, list[tuple[float, float]]] = {"answerable_": [], "unanswerable_": []}
    for question in questions:
        answer = answers.get(question.id)
        best = (0.0, 0.0) if answer is None else _best_match(question, answer)
        rows["unanswerable_" if question.impossible else "answerable_"].append(best)
    parts = {"": [row for kind in rows.values() for row in kind]}
    parts |= rows if all(rows.values()) else {}
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
    pairs = zip(questions, texts, strict=True)
    gains = [_best_match(each, text)[1] - _best_match(each, "")[1] for each, text in pairs]
    unanswered = sum(_best_match(question, "")[1] for question in questions)
    order = sorted(range(len(questions)), key=lambda number: null_margins[number])
    best = (unanswered, null_margins[order[0]] - 1.0)
    for total, number in zip(np.cumsum([gains[i] for i in order]), order, strict=True):
        best = max(best, (unanswered + float(total), null_margins[number]))
    return 100 * best[0] / len(questions), best[1]
