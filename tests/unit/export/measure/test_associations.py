"""WEAT and SEAT: effect sizes and p-values by the papers' formulas, word by word."""

import json
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from cloze.export.errors import DataError
from cloze.export.measure.associations import (
    WordSet,
    associate,
    embed_words,
    permutation_p,
    read_word_tests,
)
from cloze.export.measure.audit import WORD_TESTS
from cloze.export.measure.scorer import Subject
from cloze.model_store.heads import ArrayResult
from tests.unit.export.scorers import ByHand, checkpoint_tokenizer


def unit(rng: np.random.Generator, words: int, sentences: int) -> np.ndarray:
    vectors = rng.normal(size=(words, sentences, 6))
    return vectors / np.linalg.norm(vectors, axis=2, keepdims=True)


def association(w: np.ndarray, a: np.ndarray, b: np.ndarray) -> float:
    """s(w, A, B) of Caliskan et al. 2017."""
    return np.mean([w @ v for v in a]) - np.mean([w @ v for v in b])


@pytest.mark.parametrize("sentences", [1, 3])
def test_the_effect_and_the_p_are_those_of_the_definition(sentences: int) -> None:
    rng = np.random.default_rng(7)
    x, y, a, b = (unit(rng, words, sentences) for words in (4, 4, 3, 3))
    flat = [each.reshape(-1, 6) for each in (a, b)]
    values = [[association(w, *flat) for w in word] for word in (*x, *y)]
    first, second = np.ravel(values[:4]), np.ravel(values[4:])
    effect = (first.mean() - second.mean()) / np.std(np.r_[first, second], ddof=1)
    means = np.mean(values, axis=1)
    statistic = means[:4].sum() - means[4:].sum()
    at_least = [
        means[list(chosen)].sum() - np.delete(means, chosen).sum() >= statistic - 1e-12
        for chosen in combinations(range(8), 4)
    ]
    got = associate((x, y), (a, b), np.random.default_rng(1), 200)
    assert got.effect == pytest.approx(effect)
    assert got.p == pytest.approx(np.mean(at_least))
    assert len(at_least) == 70
    assert got.low <= got.effect <= got.high
    again = associate((x, y), (a, b), np.random.default_rng(1), 200)
    assert again == got
    swapped = associate((y, x), (a, b), np.random.default_rng(1), 200)
    assert swapped.effect == pytest.approx(-effect)


def test_separate_groups_have_the_largest_effect_and_the_smallest_p() -> None:
    values = np.r_[np.ones(4), -np.ones(4)]
    assert permutation_p(values, 4, np.random.default_rng(0)) == 1 / 70
    assert permutation_p(-values, 4, np.random.default_rng(0)) == 1
    many = np.r_[np.ones(12), -np.ones(12)]  # 2.7 million regroupings are drawn
    assert permutation_p(many, 12, np.random.default_rng(0)) == 1 / 10_001


def test_words_without_a_difference_have_no_effect() -> None:
    same = np.ones((3, 1, 1))
    got = associate((same, same), (same, same), np.random.default_rng(0), 100)
    assert (got.effect, got.low, got.high, got.p) == (0, 0, 0, 1)


def test_words_stand_alone_or_in_sentences_of_their_kind() -> None:
    scorer = ByHand(lambda e: {"embedding": ArrayResult(np.array([e.input_ids.sum(), 1.0]))})
    tokenizer = checkpoint_tokenizer()
    subject = Subject(scorer, tokenizer, frozenset({"embedding"}), 32)
    alone = embed_words(subject, WordSet("x", "name", ("red", "old")), in_sentences=False)
    assert alone.shape == (2, 1, 2)
    assert np.linalg.norm(alone, axis=2) == pytest.approx(1)
    things = embed_words(subject, WordSet("x", "thing", ("ant", "bee")), in_sentences=True)
    texts = ["This is an ant.", "An ant is there.", "This is a bee."]
    for (word, sentence), text in zip([(0, 0), (0, 5), (1, 0)], texts, strict=True):
        total = sum(tokenizer.tokenizer.encode(text).ids)
        assert things[word, sentence, 0] / things[word, sentence, 1] == pytest.approx(total)


def test_the_package_has_the_lists_of_the_paper() -> None:
    tests = {test.name: test for test in read_word_tests(WORD_TESTS)}
    assert list(tests) == ["1", "2", "5", "6", "7", "8", "9", "10"]
    assert [len(test.targets[0].words) for test in tests.values()] == [25, 25, 16, 8, 8, 8, 6, 8]
    for test in tests.values():
        assert len(test.targets[0].words) == len(test.targets[1].words)
        assert not set(test.targets[0].words) & set(test.targets[1].words)
    assert [test.social for test in tests.values()] == [False, False, *[True] * 6]


SETS = [{"name": "a", "words": ["x", "y"]}, {"name": "b", "words": ["v", "w"]}]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": 3}, "line 2: a name, .* got 3"),
        ({"social": "yes"}, "got 't' and 'yes'"),
        ({"targets": SETS[:1]}, "targets must be a list of two sets"),
        ({"attributes": [SETS[0], {"words": []}]}, "attributes: a set needs a name"),
        ({"targets": [SETS[0], SETS[1] | {"kind": "verb"}]}, "got 'verb'"),
        ({"targets": [SETS[0], SETS[1] | {"words": ["v"]}]}, "b needs at least two words"),
        ({"targets": [SETS[0], SETS[1] | {"words": ["v", " "]}]}, "b has ' ', which is not a word"),
    ],
)
def test_a_wrong_test_names_file_line_and_value(tmp_path: Path, change: dict, message: str) -> None:
    good = {"name": "t", "targets": SETS, "attributes": SETS}
    file = tmp_path / "tests.jsonl"
    file.write_text(f"{json.dumps(good)}\n{json.dumps(good | change)}\n")
    with pytest.raises(DataError, match=message) as caught:
        read_word_tests(file)
    assert f"{file}, line 2" in str(caught.value)
