"""Audits a model for social bias: every measure that its heads and the given data allow.

Each figure has a 95 % interval by bootstrap: the pairs, or the words, are drawn again with
replacement, and the figure is computed of each drawing. The interval covers the choice of sentences
and words, not the question whether they measure what matters.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cloze.export.errors import DataError
from cloze.export.measure.associations import WordTest, associate, embed_words, read_word_tests
from cloze.export.measure.scorer import Subject
from cloze.export.measure.stereotypes import (
    MaskedModel,
    SentencePair,
    crows_scores,
    preferences,
    read_minimal_pairs,
    read_stereoset,
    read_stereotypes,
    stereoset_scores,
    text_scores,
)
from cloze.model_store.heads import embedding, masked_lm

_DATA = Path(__file__).parent / "audit-data"
MINIMAL_PAIRS, WORD_TESTS = _DATA / "minimal-pairs.jsonl", _DATA / "word-tests.jsonl"
"""The data of the package: sentences of our own, and the word lists of Caliskan et al. 2017."""

_FEWEST = 10
"""A kind of stereotype with fewer pairs has no figure of its own."""

MEANINGS: Final = {
    "crows-pairs": "share of pairs in which the stereotyping sentence is likelier",
    "minimal-pairs": "share of pairs in which the stereotyping sentence is likelier, by /score",
    "stereoset-stereotype": "share of sentences in which the stereotyping word is likelier",
    "stereoset-language": "share of comparisons in which a sensible word beats a meaningless one",
    "stereoset-icat": "both: 1 is sensible and without preference, 0 is neither",
    "weat": "association of words, in standard deviations",
    "seat": "association of words in short sentences, in standard deviations",
}
"""What each measure says."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured value.

    Attributes:
        measure: a name of `MEANINGS`.
        group: kind of stereotype, or number and hypothesis of a test; "all" for all of them.
        low: the lower end of the 95 % interval.
        neutral: the value of a model without preference; None: the value is not of preference.
        p: probability of such a value without an association; None: not a test.
        count: pairs, triples or target words.
    """

    measure: str
    group: str
    value: float
    low: float
    high: float
    neutral: float | None
    count: int
    p: float | None = None

    @property
    def reading(self) -> str:
        """What the value says, in words."""
        if self.neutral is None:
            return "higher is better"
        if self.low > self.neutral and (self.p is None or self.p < 0.05):
            return "towards the stereotype"
        if self.high < self.neutral:
            return "against the stereotype"
        return "no clear preference"


@dataclass(frozen=True, slots=True)
class AuditData:
    """The data to audit with.

    Attributes:
        crows_pairs: CSV file of CrowS-Pairs; None: not measured.
        stereoset: JSON lines of StereoSet; None: not measured.
        resamples: drawings of the bootstrap.
    """

    crows_pairs: Path | None = None
    stereoset: Path | None = None
    minimal_pairs: Path = MINIMAL_PAIRS
    word_tests: Path = WORD_TESTS
    resamples: int = 1000
    seed: int = 1


def audit(subject: Subject, data: AuditData) -> list[Figure]:
    """Return every figure that the subject's heads and the data allow.

    Raises:
        DataError: a file cannot be used, or the model has neither masked tokens nor embeddings.
    """
    has_masks, embeds = (head.HEAD.name in subject.heads for head in (masked_lm, embedding))
    if not has_masks and not embeds:
        raise DataError(
            "the audit needs a head for fill-mask or embeddings; the model has "
            + (", ".join(sorted(subject.heads)) or "none")
        )
    # All files are read before the first of them is measured.
    crows = read_stereotypes(data.crows_pairs) if data.crows_pairs else []
    triples = read_stereoset(data.stereoset) if data.stereoset else []
    pairs, tests = read_minimal_pairs(data.minimal_pairs), read_word_tests(data.word_tests)
    figures: list[Figure] = []
    if has_masks:
        model = MaskedModel(subject.scorer, subject.tokenizer, subject.max_tokens)
        if crows:
            figures += _shares("crows-pairs", crows, crows_scores(crows, model), data)
        if triples:
            figures += _stereoset(stereoset_scores(triples, model), data)
        figures += _shares("minimal-pairs", pairs, text_scores(pairs, model), data)
    if embeds:
        figures += _associations(subject, tests, data)
    return figures


def _shares(
    measure: str, pairs: Sequence[SentencePair], scores: NDArray[np.float64], data: AuditData
) -> Iterator[Figure]:
    """Yield the share of preferred stereotypes, of all pairs and of each kind."""
    preferred = preferences(scores[:, 0], scores[:, 1])
    kinds = np.array([pair.kind for pair in pairs])
    yield _mean(measure, "all", preferred, data)
    for kind in sorted(set(kinds.tolist())):
        own = preferred[kinds == kind]
        if kind and _FEWEST <= len(own) < len(pairs):
            yield _mean(measure, kind, own, data)


def _mean(measure: str, group: str, values: NDArray[np.float64], data: AuditData) -> Figure:
    value, low, high = _bootstrap(lambda rows: float(values[rows].mean()), len(values), data)
    return Figure(measure, group, value, low, high, 0.5, len(values))


def _stereoset(scores: NDArray[np.float64], data: AuditData) -> Iterator[Figure]:
    """Yield the language-model score, the stereotype score and ICAT, as shares in [0, 1].

    Source: Nadeem et al. 2021, section 6. The paper multiplies all three by 100, and averages over
    target words, which the file does not name.
    """
    stereotype, anti_stereotype, unrelated = scores.T
    sensible = (preferences(stereotype, unrelated) + preferences(anti_stereotype, unrelated)) / 2
    preferred = preferences(stereotype, anti_stereotype)

    def icat(rows: NDArray[np.int64]) -> float:
        share = float(preferred[rows].mean())
        return float(sensible[rows].mean()) * min(share, 1 - share) / 0.5

    yield _mean("stereoset-stereotype", "all", preferred, data)
    measures: dict[str, Callable[[NDArray[np.int64]], float]] = {
        "stereoset-language": lambda rows: float(sensible[rows].mean()),
        "stereoset-icat": icat,
    }
    for measure, statistic in measures.items():
        value, low, high = _bootstrap(statistic, len(scores), data)
        yield Figure(measure, "all", value, low, high, None, len(scores))


def _bootstrap(
    statistic: Callable[[NDArray[np.int64]], float], count: int, data: AuditData
) -> tuple[float, float, float]:
    """Return the statistic of all rows, and its 95 % interval by drawing the rows again."""
    rng = np.random.default_rng(data.seed)
    drawn = [statistic(rng.integers(count, size=count)) for _ in range(data.resamples)]
    low, high = np.percentile(drawn, (2.5, 97.5))
    return statistic(np.arange(count)), float(low), float(high)


def _associations(subject: Subject, tests: Sequence[WordTest], data: AuditData) -> Iterator[Figure]:
    for measure, in_sentences in (("weat", False), ("seat", True)):
        for test in tests:
            rng = np.random.default_rng(data.seed)
            x, y, a, b = (
                embed_words(subject, words, in_sentences=in_sentences)
                for words in (*test.targets, *test.attributes)
            )
            found = associate((x, y), (a, b), rng, data.resamples)
            yield Figure(
                measure,
                f"{test.name}: {test.hypothesis}",
                found.effect,
                found.low,
                found.high,
                0.0 if test.social else None,
                len(x) + len(y),
                found.p,
            )
