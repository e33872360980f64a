"""The choice among spans that overlap, against the rules one after another."""

import numpy as np
import pytest

from cloze.model_store.entity_spans import Candidates, choose, count_candidates, find_candidates
from cloze.model_store.heads.entities import EntityKind


def clash(a: tuple[int, int], b: tuple[int, int], *, flat: bool, multi_label: bool) -> bool:
    if a == b:
        return not multi_label
    if a[1] < b[0] or b[1] < a[0]:
        return False
    is_nested = (a[0] <= b[0] and b[1] <= a[1]) or (b[0] <= a[0] and a[1] <= b[1])
    return flat or not is_nested


@pytest.mark.parametrize("kind", EntityKind)
@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("multi_label", [True, False])
def test_the_best_span_that_does_not_clash_is_next(
    kind: EntityKind, *, flat: bool, multi_label: bool
) -> None:
    """Of more candidates than one block has, of 1 to 90 words."""
    sizes = []
    for words in (1, 2, 90):
        shape = (words, 3 if kind is EntityKind.TOKEN else 12, 3)
        logits = np.random.default_rng(words).normal(size=shape).astype(np.float32)
        found: Candidates = find_candidates(logits, 0.0, kind)
        spans = list(zip(found.starts.tolist(), found.ends.tolist(), strict=True))
        kept: list[int] = []
        for number in np.argsort(-found.scores, kind="stable").tolist():
            if not any(
                clash(spans[number], spans[other], flat=flat, multi_label=multi_label)
                for other in kept
            ):
                kept.append(number)
        chosen = choose(found, words, flat=flat, multi_label=multi_label)
        assert chosen == sorted(kept, key=lambda number: spans[number][0])
        sizes.append(len(spans))
    assert sizes[-1] > 2048


def test_candidates_of_words_are_counted_as_they_are_listed() -> None:
    logits = np.random.default_rng(7).normal(size=(40, 3, 5)).astype(np.float32)
    counts = set()
    for threshold in (0.0, 0.3, 0.5, 0.9):
        count = count_candidates(logits, threshold, EntityKind.TOKEN)
        assert count == len(find_candidates(logits, threshold, EntityKind.TOKEN).starts)
        counts.add(count)
    assert len(counts) > 2
