"""Chooses how often each part of a corpus is read: sampling weights by source or by file."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from export.train.corpus import Corpus, Origin
from export.train.errors import TrainError


def sampling_shares(
    corpus: Corpus, weights: Mapping[str, float]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Assign each document to a group, and each group its share of the sampled sequences.

    The last group holds the documents that no weight names. They are sampled in proportion to their size.

    Args:
        corpus: the text; its origins are recorded.
        weights: shares in (0, 1] by the ``source`` of a document or by the name of its file.

    Returns:
        int64 [D], the group of each document; float64 [G], the share of each group, which sum to 1.

    Raises:
        TrainError: a weight names no source and no file of the corpus, or the weights do not add up.
    """
    names = list(weights)
    groups = np.asarray([_group(origin, names) for origin in corpus.origins], np.int64)
    group_of = groups[corpus.origin_of]  # [D]
    for number, name in enumerate(names):
        if not (group_of == number).any():
            raise TrainError(
                f"the corpus weight of {name!r} names no source and no file of the text; {_known(corpus.origins)}"
            )
    total = sum(weights.values())
    others = bool((group_of == len(names)).any())
    if others and total >= 1:
        raise TrainError(
            f"the corpus weights sum to {total:g}, which leaves nothing to the other sources; make them less than 1"
        )
    if not others and abs(total - 1) > 1e-6:
        raise TrainError(
            f"the corpus weights name every source, so they must sum to 1, but they sum to {total:g}"
        )
    return group_of, np.asarray([*weights.values(), max(0.0, 1 - total)])


def _group(origin: Origin, names: list[str]) -> int:
    """Return the number of the weight that names the source, or else the file; ``len(names)`` if none does."""
    name = origin.source if origin.source in names else origin.file
    return names.index(name) if name in names else len(names)


def _known(origins: tuple[Origin, ...]) -> str:
    """Describe what a weight can name, in short."""
    known = sorted({name for origin in origins for name in origin if name})
    shown = ", ".join(known[:6])
    return f"it has {shown}" + (f" and {len(known) - 6} more" if len(known) > 6 else "")


def sampled_order(
    group_of: NDArray[np.int64], shares: NDArray[np.float64], rng: np.random.Generator
) -> NDArray[np.int64]:
    """Draw the order of one epoch, in which each group has its share.

    The epoch ends when the group that is scarcest for its share has been read once. Of each other group the epoch reads a random
    part, another one in each epoch, and no sequence twice.

    Args:
        group_of: int64 [N], the group of each sequence.
        shares: float64 [G], the share of each group.
        rng: of the epoch.

    Returns:
        int64 [M], M at most N: indices of sequences.
    """
    counts = np.bincount(group_of, minlength=len(shares))
    wanted = shares > 0
    length = float((counts[wanted] / shares[wanted]).min())
    chosen = [
        rng.permutation(np.flatnonzero(group_of == group))[: max(1, round(length * share))]
        for group, share in enumerate(shares)
        if share > 0
    ]
    return rng.permutation(np.concatenate(chosen))
