"""Vectors of labels are computed once, and the memory for them is bounded."""

from pathlib import Path

import numpy as np
import pytest

from cloze.model_store.heads import ArrayResult
from cloze.service.core import Float32
from cloze.service.tasks.label_vectors import LabelCache
from cloze.service.text.tokenizer import Tokenizer
from tests.support.task_model import bundle


@pytest.fixture
def cache(tmp_path: Path) -> LabelCache:
    """A cache with room for the vectors of two labels."""
    made = bundle(tmp_path)
    return LabelCache(made.manifest, Tokenizer(made), 2 * (4 * 4 + 512))


def read(cache: LabelCache, *labels: str, client: str = "a") -> Float32:
    """Return vectors; the encoder of labels repeats the first id of a label."""
    found = cache.look_up(client, labels)
    vectors = (np.full(4, one.input_ids[1], np.float32) for one in found.missing_encodings)
    cache.fill(found, [{"embedding": ArrayResult(vector)} for vector in vectors])
    return found.array


def test_known_labels_are_not_computed_again(cache: LabelCache) -> None:
    first = read(cache, "the", "house")
    assert first.shape == (2, 4)
    assert first[0, 0] != first[1, 0]
    again = cache.look_up("a", ["house", "the"])
    assert not again.missing
    np.testing.assert_array_equal(again.array, first[::-1])
    again.array[:] = 0  # what a request does to its vectors changes no other's
    np.testing.assert_array_equal(cache.look_up("a", ["the", "house"]).array, first)


def test_no_client_finds_the_labels_of_another(cache: LabelCache) -> None:
    first = read(cache, "the", "house")
    for client in ("b", "", "athe"):
        assert len(cache.look_up(client, ["the", "house"]).missing) == 2, client
    np.testing.assert_array_equal(read(cache, "the", "house", client="b"), first)
    assert not cache.look_up("b", ["the"]).missing


def test_the_labels_that_were_not_used_for_longest_are_forgotten(cache: LabelCache) -> None:
    for labels in (["the"], ["house"], ["the"], ["old"]):  # "house" is the oldest now
        read(cache, *labels)
    found = cache.look_up("a", ["the", "house", "old"])
    assert [row for row, _ in found.missing.values()] == [1]
    assert found.tokens == 3
