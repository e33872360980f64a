"""Measures which words the embeddings of a model associate with which others.

WEAT (Caliskan et al. 2017) compares two sets of target words, for example names of men and of
women, by their cosines with two sets of attribute words, for example career and family. SEAT (May
et al. 2019) does so with the words in sentences that say little else, such as "This is Amy.".

Shapes: W words of T sentences each, D dimensions.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, islice
from math import comb
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cloze.export.errors import DataError
from cloze.export.measure.data_files import read_objects
from cloze.export.measure.scorer import Subject, unit_embeddings

Floats64 = NDArray[np.float64]

_SENTENCES = {
    "name": (
        "This is {}.", "That is {}.", "There is {}.", "Here is {}.", "{} is here.", "{} is there.",
    ),
    "thing": (
        "This is a {}.", "That is a {}.", "There is a {}.", "Here is a {}.", "The {} is here.",
        "A {} is there.",
    ),
    "word": ("This is {}.", "That is {}.", "There is {}.", "Here is {}.", "It is {}."),
}  # fmt: skip
"""Sentences that say little, by the kind of word in them, as in SEAT."""

_EXACT = 50_000
"""Regroupings of the target words up to which all are counted; of more, so many are drawn."""

_DRAWN = 10_000


@dataclass(frozen=True, slots=True)
class WordSet:
    """Words of one meaning; ``kind`` chooses their sentences."""

    name: str
    kind: str
    words: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WordTest:
    """Two sets of target words, and two of attribute words.

    A positive effect associates the first targets with the first attributes.

    Attributes:
        social: whether the sets stand for groups of people; the others show that the test works.
    """

    name: str
    targets: tuple[WordSet, WordSet]
    attributes: tuple[WordSet, WordSet]
    social: bool

    @property
    def hypothesis(self) -> str:
        """Which associations the test looks for, in words."""
        (x, y), (a, b) = self.targets, self.attributes
        return f"{x.name} with {a.name}, {y.name} with {b.name}"


@dataclass(frozen=True, slots=True)
class Association:
    """The result of a test.

    Attributes:
        effect: difference of the targets' mean associations in standard deviations, Cohen's d.
        low: the lower end of the 95 % interval by bootstrap over words.
        p: share of all regroupings of the targets with at least this difference; one-sided.
    """

    effect: float
    low: float
    high: float
    p: float


def associate(
    targets: tuple[Floats64, Floats64],
    attributes: tuple[Floats64, Floats64],
    rng: np.random.Generator,
    resamples: int,
) -> Association:
    """Compare two sets of targets by their cosines with two sets of attributes.

    The words are exchanged and drawn again, not their sentences: sentences of one word are alike.

    Args:
        targets: unit vectors [W, T, D] of each set.
        attributes: unit vectors [W, T, D] of each set.
    """
    (x, y), (a, b) = targets, attributes
    cosines_a, cosines_b = (
        np.concatenate(targets) @ attribute.mean(1).T for attribute in attributes
    )  # [W, T, A] and [W, T, B]
    association = cosines_a.mean(2) - cosines_b.mean(2)  # [W, T]
    effects = []
    for _ in range(resamples):
        words = np.concatenate(
            [rng.integers(len(x), size=len(x)), len(x) + rng.integers(len(y), size=len(y))]
        )
        drawn_a, drawn_b = (rng.integers(len(s), size=len(s)) for s in (a, b))
        drawn = cosines_a[words][..., drawn_a].mean(2) - cosines_b[words][..., drawn_b].mean(2)
        effects.append(_effect(drawn[: len(x)], drawn[len(x) :]))
    low, high = np.percentile(effects, (2.5, 97.5))
    effect = _effect(association[: len(x)], association[len(x) :])
    return Association(
        effect, float(low), float(high), permutation_p(association.mean(1), len(x), rng)
    )


def _effect(x: Floats64, y: Floats64) -> float:
    deviation = float(np.concatenate([x, y]).std(ddof=1))
    return float(x.mean() - y.mean()) / deviation if deviation else 0.0


def permutation_p(values: Floats64, first: int, rng: np.random.Generator) -> float:
    """Return the share of regroupings of the words that differ as much as the real groups or more.

    All regroupings are counted if they are few; else they are drawn, and the real one counts too.

    Args:
        values: the association [W] of each word, those of the first set first.
        first: words in the first set.
    """
    observed = float(values[:first].sum()) - 1e-12  # sums of the same words in another order count
    if comb(len(values), first) <= _EXACT:
        sums = [values[list(chosen)].sum() for chosen in combinations(range(len(values)), first)]
        return float(np.mean(np.asarray(sums) >= observed))
    drawn = [float(rng.permutation(values)[:first].sum()) for _ in range(_DRAWN)]
    return (1 + sum(total >= observed for total in drawn)) / (1 + _DRAWN)


def embed_words(subject: Subject, words: WordSet, *, in_sentences: bool) -> Floats64:
    """Return the unit vectors [W, T, D] of words alone (T = 1), or of their sentences."""
    templates = _SENTENCES[words.kind] if in_sentences else ("{}",)
    texts = [_filled(template, word) for word in words.words for template in templates]
    encoded = subject.tokenizer.tokenizer.encode_batch(texts)
    rows = [encoding.ids[: subject.max_tokens] for encoding in encoded]
    vectors = unit_embeddings(subject.scorer, rows).astype(np.float64)
    return vectors.reshape(len(words.words), len(templates), -1)


def _filled(template: str, word: str) -> str:
    """Return the sentence with the word, after "an" before a vowel."""
    if word[0].lower() in "aeiou":
        template = template.replace(" a {", " an {").replace("A {", "An {")
    return template.format(word)


# ---- files -------------------------------------------------------------------------------------


def read_word_tests(file: Path) -> list[WordTest]:
    """Read JSON lines: ``name``, ``social``, and two ``targets`` and two ``attributes``.

    Each set is an object with ``name``, ``kind`` (name, thing or word) and ``words``.

    Raises:
        DataError: the file is missing, or a line is not such a test.
    """
    tests = []
    for line, row in read_objects(file):
        name, social = row.get("name"), row.get("social", True)
        if not isinstance(name, str) or not name or not isinstance(social, bool):
            raise DataError(
                f"{line}: a name, and true or false for social, got {name!r:.80} and {social!r:.80}"
            )
        targets, attributes = (_sets(row, key, line) for key in ("targets", "attributes"))
        tests.append(WordTest(name, targets, attributes, social))
    return tests


def _sets(row: dict[str, Any], key: str, line: str) -> tuple[WordSet, WordSet]:
    given = row.get(key)
    if not isinstance(given, list) or len(given) != 2:
        raise DataError(f"{line}: {key} must be a list of two sets, got {given!r:.80}")
    first, second = (_set(each, f"{line}, {key}") for each in given)
    return first, second


def _set(given: Any, place: str) -> WordSet:
    row = given if isinstance(given, dict) else {}
    name, kind, words = row.get("name"), row.get("kind", "word"), row.get("words")
    if not isinstance(name, str) or not name:
        raise DataError(f"{place}: a set needs a name, got {given!r:.80}")
    if kind not in _SENTENCES:
        raise DataError(f"{place}: kind must be one of {', '.join(_SENTENCES)}, got {kind!r}")
    if not isinstance(words, list) or len(words) < 2:
        raise DataError(f"{place}: {name} needs at least two words, got {words!r:.80}")
    wrong = list(islice(_no_words(words), 1))
    if wrong:
        raise DataError(f"{place}: {name} has {wrong[0]!r:.80}, which is not a word")
    return WordSet(name, kind, tuple(words))


def _no_words(words: Sequence[Any]) -> Iterator[Any]:
    return (word for word in words if not isinstance(word, str) or not word.strip())
