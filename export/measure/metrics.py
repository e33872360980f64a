"""Measures of predicted labels, numbers and entities, as scikit-learn and seqeval define them."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Entity = tuple[int, int, int, str]
"""Number of the sentence, first word, end, and type."""


def accuracy(predicted: ArrayLike, gold: ArrayLike) -> float:
    """Return the share of rows whose labels are all equal, in [0, 1]."""
    same = np.asarray(predicted) == np.asarray(gold)
    return float(same.reshape(len(same), -1).all(1).mean())


def macro_f1(predicted: NDArray[np.bool_], gold: NDArray[np.bool_]) -> float:
    """Return the mean F1 of the labels that occur, in [0, 1].

    Args:
        predicted: bool [N, L], whether each row has each label.
        gold: bool [N, L].
    """
    both = (predicted & gold).sum(0)
    total = predicted.sum(0) + gold.sum(0)
    return float((2 * both[total > 0] / total[total > 0]).mean()) if total.any() else 0.0


def micro_f1(predicted: NDArray[np.bool_], gold: NDArray[np.bool_]) -> float:
    """Return the F1 over all labels of all rows, in [0, 1]; see `macro_f1`."""
    total = int(predicted.sum() + gold.sum())
    return 2 * int((predicted & gold).sum()) / total if total else 0.0


def matthews(predicted: NDArray[np.int64], gold: NDArray[np.int64]) -> float:
    """Return Matthews' correlation in [-1, 1], for any number of labels (Gorodkin 2004).

    Args:
        predicted: [N], the number of each row's label.
        gold: [N].
    """
    labels = int(max(predicted.max(), gold.max())) + 1
    table = np.zeros((labels, labels))
    np.add.at(table, (gold, predicted), 1.0)
    golds, guesses, rows = table.sum(1), table.sum(0), float(len(gold))
    covariance = np.trace(table) * rows - golds @ guesses
    spread = (rows**2 - golds @ golds) * (rows**2 - guesses @ guesses)
    return float(covariance / np.sqrt(spread)) if spread > 0 else 0.0


def pearson(one: ArrayLike, other: ArrayLike) -> float:
    """Return Pearson's correlation in [-1, 1]; 0 if one side is constant."""
    rows = np.asarray([one, other], np.float64)
    if (np.ptp(rows, axis=1) == 0).any():
        return 0.0
    centred = rows - rows.mean(1, keepdims=True)
    lengths = np.sqrt((centred**2).sum(1))
    return float(centred[0] @ centred[1] / (lengths[0] * lengths[1]))


def spearman(one: ArrayLike, other: ArrayLike) -> float:
    """Return Spearman's rank correlation in [-1, 1]; 0 if one side is constant."""
    return pearson(_ranks(np.asarray(one)), _ranks(np.asarray(other)))


def _ranks(values: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return the rank of each value; equal values get the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks: NDArray[np.float64] = (last - (counts - 1) / 2)[inverse]
    return ranks


def entities(tags: Sequence[Sequence[str]]) -> set[Entity]:
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


def entity_scores(predicted: set[Entity], gold: set[Entity]) -> dict[str, float]:
    """Return precision, recall and F1 of entities with the right words and type, in [0, 1].

    Predicted types that ``gold`` never has are not counted, because the data does not mark them.
    """
    marked = {kind for *_, kind in gold}
    counted = {entity for entity in predicted if entity[3] in marked}
    right = len(counted & gold)
    precision, recall = right / max(len(counted), 1), right / max(len(gold), 1)
    f1 = 2 * right / max(len(counted) + len(gold), 1)
    return {"entity_precision": precision, "entity_recall": recall, "entity_f1": f1}
