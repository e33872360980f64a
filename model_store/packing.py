"""How sequences of unlike lengths become the inputs of a packed graph, without padding. Numbers only; no text, no runtime."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from model_store import interface as names

Int32 = NDArray[np.int32]
Feeds = dict[str, NDArray[Any]]

MEAN: Final = "mean"
CLS: Final = "cls"
MAX: Final = "max"
MEAN_SQRT_LENGTH: Final = "mean_sqrt_len_tokens"


def starts_of(lengths: Sequence[int] | Int32) -> Int32:
    """The row of ``hidden`` at which each of B sequences starts, and that after the last: [B + 1]."""
    starts = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=starts[1:])
    return starts


def place(lengths: Int32) -> Feeds:
    """Where each token stands: ``position_ids``, ``cu_seqlens``, ``token_offset``.

    Args:
        lengths: [B], at least one, each at least 1.
    """
    starts = starts_of(lengths)
    longest = int(lengths.max())
    real = np.arange(longest) < lengths[:, None]  # [B, S]
    cells = np.arange(real.size, dtype=np.int32)
    return {
        names.POSITION_IDS: np.arange(starts[-1], dtype=np.int32) - np.repeat(starts[:-1], lengths),
        names.CU_SEQLENS: starts,
        names.TOKEN_OFFSET: np.concatenate([cells[real.ravel()], cells[~real.ravel()]]).reshape(real.shape),
    }


def pool(starts: Int32, lengths: Int32, pooling: str) -> Feeds:
    """Which rows of ``hidden`` make each embedding, and how much each counts.

    Args:
        starts: [E], the first row of each sequence to pool.
        lengths: [E], its tokens.
        pooling: as in `Embedding.pooling`.

    Returns:
        ``pool_rows`` [E, L] and, but for the largest of each column (max), ``pool_weights`` [E, L]. What is beyond a sequence is
        its first row again, with weight 0.
    """
    columns = np.arange(1 if pooling == CLS else int(lengths.max(initial=1)), dtype=np.int32)
    real = columns < lengths[:, None]
    feeds: Feeds = {names.POOL_ROWS: starts[:, None] + np.where(real, columns, np.int32(0))}
    if pooling != MAX:
        by: Mapping[str, NDArray[Any]] = {CLS: np.ones(len(lengths)), MEAN: lengths, MEAN_SQRT_LENGTH: np.sqrt(lengths)}
        feeds[names.POOL_WEIGHTS] = (real / by[pooling][:, None]).astype(np.float32)
    return feeds
