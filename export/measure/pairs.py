"""Reads scored sentence pairs and measures how well embeddings rank the pairs.

Source: Cer et al. 2017 (STS-B).
"""

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from cloze.export.errors import DataError
from cloze.export.measure.data_files import read_text
from cloze.export.measure.scorer import Scorer, unit_embeddings


@dataclass(frozen=True, slots=True)
class ScoredPair:
    """Two sentences and their similarity, in the unit of the file (STS-B: 0 to 5)."""

    first: str
    second: str
    score: float


def read_pairs(files: list[Path]) -> list[ScoredPair]:
    """Read CSV files without a header (first, second, score); a ``.xz`` file is decompressed.

    Raises:
        DataError: a file is missing, a line is not a pair, the files hold no pair, or all pairs
            have the same score.
    """
    pairs = [
        _parse_pair(row, f"{file}, line {number}")
        for file in files
        for number, row in enumerate(_read_rows(file), 1)
    ]
    if not pairs:
        raise DataError("there are no pairs in " + ", ".join(str(file) for file in files))
    if len({pair.score for pair in pairs}) == 1:
        raise DataError(
            f"all {len(pairs)} pairs have the score {pairs[0].score:g}: there is nothing to rank"
        )
    return pairs


def _read_rows(file: Path) -> list[list[str]]:
    try:
        return list(csv.reader(io.StringIO(read_text(file), newline="")))
    except csv.Error as error:
        raise DataError(f"{file} cannot be read: {error}") from error


def _parse_pair(row: list[str], line: str) -> ScoredPair:
    try:
        first, second, score = row
        pair = ScoredPair(first, second, float(score))
    except ValueError:
        raise DataError(
            f"{line} is not 'sentence,sentence,score': {','.join(row)[:80]!r}"
        ) from None
    if not math.isfinite(pair.score):
        raise DataError(f"{line}: the score {score} is not a finite number")
    return pair


def _truncate(ids: list[int], tokens: int) -> list[int]:
    """Cut a sequence to so many tokens; keep the last token, which is ``[SEP]``."""
    return ids if len(ids) <= tokens else [*ids[: tokens - 1], ids[-1]]


def tokenize_pairs(
    pairs: Sequence[ScoredPair], tokenizer: Tokenizer, tokens: int
) -> list[tuple[list[int], list[int], float]]:
    """Tokenize pairs; longer sentences are truncated.

    Args:
        tokens: the longest sequence.

    Returns:
        For each pair, the ids of both sentences and the score.
    """
    encoded = [
        _truncate(e.ids, tokens)
        for e in tokenizer.encode_batch([text for p in pairs for text in (p.first, p.second)])
    ]
    return [(encoded[2 * i], encoded[2 * i + 1], pair.score) for i, pair in enumerate(pairs)]


def similarity(
    pairs: Sequence[ScoredPair], tokenizer: Tokenizer, scorer: Scorer, tokens: int
) -> float:
    """Return Spearman's rank correlation of cosine and score, in [-1, 1].

    Args:
        tokens: the longest sequence; longer sentences are truncated.
    """
    # scipy is of the extra `train`; an export that ranks no pairs does without it.
    from cloze.export.measure.metrics import spearman

    rows = [
        ids
        for first, second, _ in tokenize_pairs(pairs, tokenizer, tokens)
        for ids in (first, second)
    ]
    matrix = unit_embeddings(scorer, rows)
    cosines = (matrix[0::2] * matrix[1::2]).sum(1)
    scores = np.asarray([pair.score for pair in pairs])
    return spearman(cosines, scores)
