"""Chooses how often each part of a corpus is sampled: weights by source or by file."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from cloze.export.errors import TrainError
from cloze.export.train.corpus import Corpus, Origin

_NAMES_SHOWN = 6


def sampling_shares(
    corpus: Corpus, weights: Mapping[str, float]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Assign each document to a group, and each group its share of the sampled sequences.

    The last group holds the documents that no weight names. These documents are sampled in
    proportion to their size.

    Args:
        weights: shares in (0, 1] by the ``source`` of a document or by the name of its file.

    Returns:
        int64 [D], the group of each document; float64 [G], the share of each group, with sum 1.

    Raises:
        TrainError: a weight names no source and no file of the corpus, or the sum of the weights
            is wrong.
    """
    names = list(weights)
    groups = np.asarray([_group(origin, names) for origin in corpus.origins], np.int64)
    group_of = groups[corpus.origin_of]  # [D]
    for number, name in enumerate(names):
        if not (group_of == number).any():
            raise TrainError(
                f"the corpus weight of {name!r} names no source and no file of the text; "
                f"{_describe_origins(corpus.origins)}"
            )
    total = sum(weights.values())
    others = bool((group_of == len(names)).any())
    if others and total >= 1:
        raise TrainError(
            f"the corpus weights sum to {total:g}, which leaves nothing to the other sources; "
            "make them less than 1"
        )
    if not others and abs(total - 1) > 1e-6:
        raise TrainError(
            "the corpus weights name every source, so they must sum to 1, "
            f"but they sum to {total:g}"
        )
    return group_of, np.asarray([*weights.values(), max(0.0, 1 - total)])


def weights_of_part(part: Corpus, weights: Mapping[str, float]) -> dict[str, float]:
    """Return the weights of a text for a part of it, which may lack some of the sources.

    If the weights name every source of the part, they are scaled to the sum 1.
    """
    names = list(weights)
    present = {_group(origin, names) for origin in part.origins}
    kept = {name: weights[name] for number, name in enumerate(names) if number in present}
    if len(names) in present:
        return kept  # text without a weight shares the rest
    total = sum(kept.values())
    return {name: weight / total for name, weight in kept.items()}


def _group(origin: Origin, names: list[str]) -> int:
    """Return the index in ``names`` of the origin's source, or else of its file.

    The result is ``len(names)`` if ``names`` holds neither.
    """
    name = origin.source if origin.source in names else origin.file
    return names.index(name) if name in names else len(names)


def _describe_origins(origins: tuple[Origin, ...]) -> str:
    """List the first names that a weight can use."""
    names = sorted({name for origin in origins for name in origin if name})
    rest = len(names) - _NAMES_SHOWN
    return f"it has {', '.join(names[:_NAMES_SHOWN])}" + (f" and {rest} more" if rest > 0 else "")


def sampled_order(
    group_of: NDArray[np.int64], shares: NDArray[np.float64], rng: np.random.Generator
) -> NDArray[np.int64]:
    """Draw the order of one epoch in which each group has its share.

    The group with the fewest sequences per share is read once. Of each other group the epoch reads
    a random part, which differs from epoch to epoch. No sequence is read twice.

    Args:
        group_of: int64 [N], the group of each sequence.
        shares: float64 [G], the share of each group.

    Returns:
        int64 [M], M at most N: indices of sequences.
    """
    counts = np.bincount(group_of, minlength=len(shares))
    nonzero = shares > 0
    length = float((counts[nonzero] / shares[nonzero]).min())
    chosen = [
        rng.permutation(np.flatnonzero(group_of == group))[: max(1, round(length * share))]
        for group, share in enumerate(shares)
        if share > 0
    ]
    return rng.permutation(np.concatenate(chosen))
