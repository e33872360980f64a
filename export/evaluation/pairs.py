"""Scored sentence pairs, and how well embeddings rank them (STS-B: Cer et al. 2017)."""

import csv
import io
import lzma
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from export.errors import DataError
from export.evaluation.scorer import Scorer, embeddings, equal_lengths


@dataclass(frozen=True, slots=True)
class ScoredPair:
    """Two sentences and how alike they are, in the file's own unit (STS-B: 0 to 5)."""

    first: str
    second: str
    score: float


def read_pairs(files: list[Path]) -> list[ScoredPair]:
    """Pairs of CSV files without a header (first, second, score), also ``.xz``.

    Raises:
        DataError: a file is missing or a line is no such pair, there is none, or all have one score.
    """
    pairs = []
    for file in files:
        try:
            data = file.read_bytes()
            text = (lzma.decompress(data) if file.suffix == ".xz" else data).decode("utf-8")
            rows = list(csv.reader(io.StringIO(text, newline="")))
        except FileNotFoundError:
            raise DataError(f"{file}: no such file") from None
        except (UnicodeDecodeError, lzma.LZMAError, OSError, EOFError, csv.Error) as error:
            raise DataError(f"{file} cannot be read: {error}") from error
        for number, row in enumerate(rows, 1):
            try:
                first, second, score = row
                pairs.append(ScoredPair(first, second, float(score)))
            except ValueError:
                raise DataError(
                    f"{file}, line {number} is not 'sentence,sentence,score': {','.join(row)[:80]!r}"
                ) from None
            if not math.isfinite(pairs[-1].score):
                raise DataError(f"{file}, line {number}: the score {score} is not a finite number")
    if not pairs:
        raise DataError("there are no pairs in " + ", ".join(str(file) for file in files))
    if len({pair.score for pair in pairs}) == 1:
        raise DataError(
            f"all {len(pairs)} pairs have the score {pairs[0].score:g}: there is nothing to rank"
        )
    return pairs


def _cut(ids: list[int], tokens: int) -> list[int]:
    return ids if len(ids) <= tokens else [*ids[: tokens - 1], ids[-1]]


def tokenize_pairs(
    pairs: Sequence[ScoredPair], tokenizer: Tokenizer, tokens: int
) -> list[tuple[list[int], list[int], float]]:
    encoded = [
        _cut(e.ids, tokens)
        for e in tokenizer.encode_batch([text for p in pairs for text in (p.first, p.second)])
    ]
    return [(encoded[2 * i], encoded[2 * i + 1], pair.score) for i, pair in enumerate(pairs)]


def similarity(
    pairs: Sequence[ScoredPair], tokenizer: Tokenizer, scorer: Scorer, tokens: int
) -> float:
    """Return Spearman's rank correlation of cosine and score, in [-1, 1].

    Args:
        pairs: with scores.
        tokenizer: adds the special tokens.
        scorer: embeds the sentences.
        tokens: longest sequence; longer sentences are cut.
    """
    rows = [
        ids
        for first, second, _ in tokenize_pairs(pairs, tokenizer, tokens)
        for ids in (first, second)
    ]
    vectors: dict[int, NDArray[np.float32]] = {}
    for group in equal_lengths([len(ids) for ids in rows], 64):
        embedded = embeddings(scorer, np.asarray([rows[index] for index in group], np.int64))
        vectors |= zip(group, embedded, strict=True)
    matrix = np.stack([vectors[index] for index in range(len(rows))])
    matrix /= np.linalg.norm(matrix, axis=1, keepdims=True)
    cosines = (matrix[0::2] * matrix[1::2]).sum(1)
    scores = np.asarray([pair.score for pair in pairs])
    return float(np.corrcoef(_ranks(cosines), _ranks(scores))[0, 1])


def _ranks(values: NDArray[np.floating]) -> NDArray[np.float64]:
    """Ranks, equal values sharing the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks: NDArray[np.float64] = (last - (counts - 1) / 2)[inverse]
    return ranks
