"""Reads scored sentence pairs and measures how well embeddings rank the pairs.

Source: Cer et al. 2017 (STS-B).
"""

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from cloze.export.errors import DataError
from cloze.export.measure.documents import read_lines
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
    pairs: list[ScoredPair] = []
    for file in files:
        rows = csv.reader(read_lines(file))
        try:
            pairs += [_pair(row, f"{file}, line {rows.line_num}") for row in rows]
        except csv.Error as error:
            raise DataError(f"{file} cannot be read: {error}") from error
    if not pairs:
        raise DataError("there are no pairs in " + ", ".join(str(file) for file in files))
    if len({pair.score for pair in pairs}) == 1:
        raise DataError(
            f"all {len(pairs)} pairs have the score {pairs[0].score:g}: there is nothing to rank"
        )
    return pairs


def _pair(row: list[str], line: str) -> ScoredPair:
    try:
        first, second, number = row
        score = float(number)
    except ValueError:
        raise DataError(
            f"{line} is not 'sentence,sentence,score': {','.join(row)[:80]!r}"
        ) from None
    if not math.isfinite(score):
        raise DataError(f"{line}: the score {number} is not a finite number")
    return ScoredPair(first, second, score)


def tokenize_pairs(
    pairs: Sequence[ScoredPair], tokenizer: Tokenizer, tokens: int
) -> list[tuple[list[int], list[int], float]]:
    """Return the ids of both sentences of each pair, truncated, and its score."""
    texts = [text for pair in pairs for text in (pair.first, pair.second)]
    rows = [each.ids for each in tokenizer.encode_batch(texts)]
    # A cut sequence keeps its last token, which is `[SEP]`.
    rows = [ids if len(ids) <= tokens else [*ids[: tokens - 1], ids[-1]] for ids in rows]
    sides = zip(rows[::2], rows[1::2], pairs, strict=True)
    return [(first, second, pair.score) for first, second, pair in sides]


def similarity(
    pairs: Sequence[ScoredPair], tokenizer: Tokenizer, scorer: Scorer, tokens: int
) -> float:
    """Return Spearman's rank correlation of cosine and score, in [-1, 1]; see `tokenize_pairs`."""
    # scipy is of the extra `train`; an export that ranks no pairs does without it.
    from cloze.export.measure.metrics import spearman

    tokenized = tokenize_pairs(pairs, tokenizer, tokens)
    matrix = unit_embeddings(scorer, [ids for *both, _ in tokenized for ids in both])
    cosines = (matrix[0::2] * matrix[1::2]).sum(1)
    return spearman(cosines, [score for *_, score in tokenized])
