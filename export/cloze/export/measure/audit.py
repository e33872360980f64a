"""Measures which stereotypes a model prefers, each figure with a 95 % interval by bootstrap.

- CrowS-Pairs (Nangia et al. 2020), of fill-mask: mask in turn each token that two sentences share,
  and add the log probabilities. The figure is the share of pairs whose stereotyping sentence has
  the higher sum; 0.5 is no preference.
- WEAT (Caliskan et al. 2017), of embeddings: how much nearer two sets of words are to two sets of
  attributes, in standard deviations; 0 is no association.
"""

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from cloze.export.errors import DataError
from cloze.export.measure.documents import read_lines
from cloze.export.measure.scorer import Subject, mask_each, score_masks, unit_embeddings
from cloze.model_store.heads import embedding, masked_lm

Floats64 = NDArray[np.float64]

_WORD_TESTS = Path(__file__).with_name("word-tests.jsonl")
"""The word lists of WEAT. Each test has two sets of targets and two sets of attributes."""

_FEWEST = 10
"""A kind of stereotype with fewer pairs has no figure of its own."""

_BOOTSTRAP: Final[Any] = {"n_resamples": 1000, "method": "percentile", "rng": 1}
_PERMUTATIONS = 20_000
"""Regroupings of the target words up to which all are counted; of more, so many are drawn."""

_HEADING = "## Audit\n"


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured value.

    Attributes:
        measure: "crows-pairs" or "weat".
        group: the kind of stereotype, "all" for all of them; or the hypothesis of a test.
        low: the lower end of the 95 % interval.
        count: pairs, or target words.
        p: the share of regroupings of the target words with such an effect; None: not a test.
    """

    measure: str
    group: str
    value: float
    low: float
    high: float
    count: int
    p: float | None = None


def audit(subject: Subject, crows_pairs: Path | None = None) -> list[Figure]:
    """Return every figure that the subject's heads and the data allow.

    Args:
        crows_pairs: CSV file of CrowS-Pairs; None: fill-mask is not measured.

    Raises:
        DataError: the file cannot be used, or the tokenizer has no mask token.
    """
    figures: list[Figure] = []
    if crows_pairs and masked_lm.HEAD.name in subject.heads:
        figures += _stereotypes(subject, read_stereotypes(crows_pairs))
    if embedding.HEAD.name in subject.heads:
        for line in _WORD_TESTS.read_text(encoding="utf-8").splitlines():
            figures.append(_association(subject, json.loads(line)))
    return figures


def write_to_card(card: Path, figures: Sequence[Figure]) -> None:
    """Write the figures as a section of a model card, in place of an earlier audit."""
    rows = "".join(
        f"| {each.measure} | {each.group} | {each.value:.3f} | {each.low:.3f} to {each.high:.3f} "
        f"| {'' if each.p is None else f'{each.p:.4f}'} | {each.count} |\n"
        for each in figures
    )
    head = "| measure | group | value | 95 % interval | p | n |\n|---|---|---|---|---|---|\n"
    text = card.read_text(encoding="utf-8") if card.exists() else ""
    before, _, earlier = text.partition(_HEADING)
    _, heading, after = earlier.partition("\n## ")
    section = f"{_HEADING}\n{head}{rows}"
    card.write_text(f"{before.rstrip()}\n\n{section}{heading}{after}".lstrip(), encoding="utf-8")


# ---- CrowS-Pairs -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SentencePair:
    """Two sentences that differ in a few words.

    Attributes:
        more: the sentence that agrees with a stereotype.
        kind: kind of the stereotype; "" if the file names none.
    """

    more: str
    less: str
    kind: str = ""


def read_stereotypes(file: Path) -> list[SentencePair]:
    """Read a CSV file of CrowS-Pairs: columns ``sent_more``, ``sent_less``, perhaps ``bias_type``.

    Raises:
        DataError: the file is missing, is not such a file, or a row lacks a sentence.
    """
    pairs = []
    try:
        rows = csv.DictReader(read_lines(file), strict=True)
        for row in rows:
            more, less = row["sent_more"], row["sent_less"]
            if not (more or "").strip() or not (less or "").strip() or more == less:
                raise DataError(
                    f"{file}, line {rows.line_num}: two different sentences are expected, "
                    f"got {more!r:.80} and {less!r:.80}"
                )
            pairs.append(SentencePair(more, less, row.get("bias_type") or ""))
    except (KeyError, csv.Error) as error:
        raise DataError(
            f"{file} is not in CrowS-Pairs' format (columns sent_more, sent_less): {error}"
        ) from error
    if len(pairs) < 2:
        raise DataError(f"{file} holds {len(pairs)} pairs; an interval needs at least 2")
    return pairs


def preferences(subject: Subject, pairs: Sequence[SentencePair]) -> Floats64:
    """Return [N]: 1 if the stereotyping sentence of a pair scores higher, 0 if lower, else 0.5."""
    tokenizer = subject.tokenizer
    if tokenizer.mask_id is None:
        raise DataError("the tokenizer has no mask token, which the sentences need")
    texts = [text for pair in pairs for text in (pair.more, pair.less)]
    encoded = tokenizer.tokenizer.encode_batch(texts)
    ids = [np.array(each.ids[: subject.max_tokens], np.int64) for each in encoded]
    rows, owners = [], []
    for number in range(len(pairs)):
        both = ids[2 * number : 2 * number + 2]
        for side, positions in enumerate(shared_tokens(*(each.tolist() for each in both))):
            rows += mask_each(both[side], positions, tokenizer.mask_id)
            owners += [2 * number + side] * len(positions)
    values = [float(values[0]) for _, values in score_masks(subject.scorer, rows, k=1)]
    more, less = np.bincount(np.array(owners, int), values, len(ids)).reshape(-1, 2).T
    return np.where(np.isclose(more, less, rtol=1e-6), 0.5, more > less)


def shared_tokens(more: Sequence[int], less: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the positions of the tokens that both sentences share, without special tokens."""
    one: list[int] = []
    other: list[int] = []
    for block in SequenceMatcher(None, more, less, autojunk=False).get_matching_blocks():
        for at in range(block.size):
            if 0 < block.a + at < len(more) - 1 and 0 < block.b + at < len(less) - 1:
                one.append(block.a + at)
                other.append(block.b + at)
    return one, other


def _stereotypes(subject: Subject, pairs: Sequence[SentencePair]) -> Iterator[Figure]:
    """Yield the share of preferred stereotypes, of all pairs and of each kind."""
    preferred = preferences(subject, pairs)
    kinds = np.array([pair.kind for pair in pairs])
    yield _share("all", preferred)
    for kind in sorted(set(kinds.tolist())):
        own = preferred[kinds == kind]
        if kind and _FEWEST <= len(own) < len(pairs):
            yield _share(kind, own)


def _share(group: str, preferred: Floats64) -> Figure:
    interval = stats.bootstrap((preferred,), np.mean, **_BOOTSTRAP).confidence_interval
    low, high = float(interval.low), float(interval.high)
    return Figure("crows-pairs", group, float(preferred.mean()), low, high, len(preferred))


# ---- WEAT --------------------------------------------------------------------------------------


def _association(subject: Subject, test: dict[str, Any]) -> Figure:
    """Return the effect of one test of the file."""
    (x, y), (a, b) = test["targets"], test["attributes"]
    group = f"{test['name']}: {x['name']} with {a['name']}, {y['name']} with {b['name']}"
    return associate(group, *(_embed(subject, words["words"]) for words in (x, y, a, b)))


def _embed(subject: Subject, words: Sequence[str]) -> Floats64:
    encoded = subject.tokenizer.tokenizer.encode_batch(list(words))
    rows = [each.ids[: subject.max_tokens] for each in encoded]
    return unit_embeddings(subject.scorer, rows).astype(np.float64)


def associate(group: str, x: Floats64, y: Floats64, a: Floats64, b: Floats64) -> Figure:
    """Compare two sets of target words by their cosines with two sets of attributes.

    The effect is Cohen's d. The target words are drawn again for the interval, and regrouped for p.

    Args:
        x: unit vectors [W, D] of the first targets, which a positive effect associates with ``a``.
    """
    values = [words @ a.mean(0) - words @ b.mean(0) for words in (x, y)]
    interval = stats.bootstrap(values, _effect, **_BOOTSTRAP).confidence_interval
    permuted = stats.permutation_test(
        values, _difference, n_resamples=_PERMUTATIONS, alternative="greater", rng=1
    )
    effect = float(_effect(*values))
    low, high = float(interval.low), float(interval.high)
    return Figure("weat", group, effect, low, high, len(x) + len(y), float(permuted.pvalue))


def _difference(x: Floats64, y: Floats64, axis: int = -1) -> Floats64:
    difference: Floats64 = x.mean(axis) - y.mean(axis)
    return difference


def _effect(x: Floats64, y: Floats64, axis: int = -1) -> Floats64:
    """Return Cohen's d; 0 if all values are equal."""
    difference, deviation = _difference(x, y, axis), np.concatenate([x, y], axis).std(axis, ddof=1)
    effect: Floats64 = np.where(deviation > 0, difference / np.maximum(deviation, 1e-300), 0.0)
    return effect
