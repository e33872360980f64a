"""Fill-mask: which texts, masks and targets are run, and what their outputs mean."""

import math
from typing import Any

import numpy as np
import pytest

from cloze.model_store.heads.masked_lm import MaskedLMResult
from tests.support.task_model import CONTEXT, ID, VOCABULARY, decoded, ids, prepared, tokens


def request_of(encoding: Any) -> Any:
    return encoding.requests["masked_lm"]


def outputs(*results: MaskedLMResult) -> list[dict[str, Any]]:
    return [{"masked_lm": result} for result in results]


def top(*masks: dict[str, float]) -> MaskedLMResult:
    """Return a result with the probabilities of the likeliest tokens of each mask."""
    return MaskedLMResult(
        np.log(np.array([list(mask.values()) for mask in masks], np.float32)) + 2,
        np.array([[ID[token] for token in mask] for mask in masks]),
        np.full(len(masks), 2, np.float32),
        np.zeros((len(masks), 0), np.float32),
    )


def of_targets(*masks: list[float]) -> MaskedLMResult:
    """Return a result with the probabilities of the targets at each mask."""
    return MaskedLMResult(
        np.zeros((len(masks), 0), np.float32),
        np.zeros((len(masks), 0), np.int64),
        np.full(len(masks), 2, np.float32),
        np.log(np.array(masks, np.float32)) + 2,
    )


def test_a_mask_is_predicted_among_the_whole_vocabulary() -> None:
    request = prepared("fill-mask", "the [MASK] door", top_k=2)
    assert tokens(request) == ["[CLS] the [MASK] door [SEP]"]
    asked = request_of(request.encodings[0])
    assert (list(asked.positions), asked.top_k, list(asked.targets)) == ([2], 2, [])
    assert (request.truncated, request.usage) == (0, None)
    assert request_of(prepared("fill-mask", "[MASK]").encodings[0]).top_k == 5, "the default"
    [predictions] = decoded("fill-mask", request, outputs(top({"red": 0.5, "old": 0.25})))
    assert [(p.token, p.token_str, p.sequence) for p in predictions] == [
        (ID["red"], "red", "the red door"),
        (ID["old"], "old", "the old door"),
    ]
    assert [p.score for p in predictions] == pytest.approx([0.5, 0.25], rel=1e-5)


def test_several_masks_keep_the_special_tokens_and_the_other_masks() -> None:
    request = prepared("fill-mask", ["[MASK] red [MASK]"], top_k=1)
    [masks] = decoded("fill-mask", request, outputs(top({"a": 0.5}, {"door": 0.25})))
    assert [mask[0].sequence for mask in masks] == [
        "[CLS] a red [MASK] [SEP]",
        "[CLS] [MASK] red door [SEP]",
    ]
    assert [mask[0].score for mask in masks] == pytest.approx([0.5, 0.25], rel=1e-5)


def test_targets_are_ranked_and_repeated_ones_are_one() -> None:
    request = prepared("fill-mask", "the [MASK]", targets=["moon", "sun", "moon", "red"], top_k=2)
    asked = request_of(request.encodings[0])
    assert (asked.top_k, list(asked.targets)) == (0, ids("moon sun red"))
    assert request.warnings == ()
    [predictions] = decoded("fill-mask", request, outputs(of_targets([0.1, 0.3, 0.2])))
    assert [p.token_str for p in predictions] == ["sun", "red"]
    assert [p.score for p in predictions] == pytest.approx([0.3, 0.2], rel=1e-5)
    assert predictions[0].sequence == "the sun"


def test_a_target_of_several_pieces_stands_for_its_first_with_a_warning() -> None:
    request = prepared("fill-mask", "the [MASK]", targets=["reds", " ", "sun"])
    assert list(request_of(request.encodings[0]).targets) == ids("red sun")
    assert request.warnings == (
        "target 'reds' is not in the vocabulary; 'red' stands for it",
        "target ' ' is not in the vocabulary and was left out",
    )
    alone = prepared("fill-mask", "[MASK]", targets="sun")
    assert list(request_of(alone.encodings[0]).targets) == ids("sun")


def test_words_of_several_pieces_are_scored_piece_by_piece() -> None:
    request = prepared(
        "fill-mask", "the [MASK] door", targets=["reds", "old"], targets_as="words", top_k=1
    )
    assert tokens(request) == [
        "[CLS] the [MASK] [MASK] door [SEP]",
        "[CLS] the red [MASK] door [SEP]",
        "[CLS] the [MASK] door [SEP]",
    ]
    asked = [request_of(encoding) for encoding in request.encodings]
    assert [list(one.positions) for one in asked] == [[2], [3], [2]]
    assert [list(one.targets) for one in asked] == [ids("red"), ids("##s"), ids("old")]
    results = [of_targets([0.5]), of_targets([0.5]), of_targets([0.2])]
    [[best]] = decoded("fill-mask", request, outputs(*results))
    assert (best.tokens, best.token_str, best.sequence) == (ids("red ##s"), "reds", "the reds door")
    assert best.score == pytest.approx(0.25, rel=1e-5)


def test_words_at_several_masks() -> None:
    words = {"targets": ["sun", "moon", "SUN"], "targets_as": "words"}
    request = prepared("fill-mask", ["[MASK] or [MASK]"], **words)
    assert [list(request_of(e).positions) for e in request.encodings] == [[1], [1], [3], [3]]
    results = [of_targets([p]) for p in (0.1, 0.2, 0.4, 0.3)]
    [masks] = decoded("fill-mask", request, outputs(*results))
    assert [[w.token_str for w in mask] for mask in masks] == [["moon", "sun"], ["sun", "moon"]]
    assert masks[1][0].sequence == "[CLS] [MASK] or sun [SEP]"


@pytest.mark.parametrize("target", ["[MASK]", "\N{SNOWMAN}", " "])
def test_what_is_no_word_of_the_vocabulary_is_left_out_with_a_warning(target: str) -> None:
    request = prepared("fill-mask", "the [MASK]", targets=[target, "sun"], targets_as="words")
    assert [list(request_of(e).targets) for e in request.encodings] == [ids("sun")]
    assert len(request.warnings) == 1


def test_an_original_has_its_probability_and_its_rank() -> None:
    request = prepared("fill-mask", ["the [MASK]"], original=["sun"], top_k=1)
    asked = request_of(request.encodings[0])
    assert (asked.top_k, list(asked.targets)) == (1, list(range(len(VOCABULARY))))
    logits = np.zeros((1, len(VOCABULARY)), np.float32)
    logits[0, ids("sun moon red")] = [1, 2, 3]
    result = MaskedLMResult(
        np.array([[3.0]], np.float32), np.array([ids("red")]), np.array([4.0], np.float32), logits
    )
    [answer] = decoded("fill-mask", request, outputs(result))
    original = answer.original
    assert (original.token, original.token_str, original.rank) == (ID["sun"], "sun", 3)
    assert original.score == pytest.approx(math.exp(1 - 4))
    assert [p.token_str for p in answer.predictions] == ["red"]


NINE = "a b c d e f g h i"


def test_independent_fillings_are_the_best_products() -> None:
    request = prepared("fill-mask", "[MASK] [MASK]", decode="independent", top_k=3)
    assert [list(request_of(e).positions) for e in request.encodings] == [[1, 2]]
    assert request_of(request.encodings[0]).top_k == 3
    result = top({"the": 0.6, "a": 0.3, "an": 0.1}, {"sun": 0.5, "moon": 0.4, "red": 0.05})
    assert request.advance is not None
    assert request.advance(outputs(result), CONTEXT) is None
    [fillings] = decoded("fill-mask", request, [])
    assert [f.token_strs for f in fillings] == [["the", "sun"], ["the", "moon"], ["a", "sun"]]
    assert [f.score for f in fillings] == pytest.approx([0.3, 0.24, 0.15], rel=1e-4)
    assert fillings[0].tokens == ids("the sun")
    assert fillings[0].sequence == "the sun"


def test_left_to_right_takes_the_likeliest_token_after_the_first_mask() -> None:
    request = prepared("fill-mask", ["[MASK] red [MASK]"], decode="left-to-right", top_k=2)
    assert [list(request_of(e).positions) for e in request.encodings] == [[1]]
    assert request_of(request.encodings[0]).top_k == 2
    assert request.advance is not None
    second = request.advance(outputs(top({"the": 0.5, "a": 0.25})), CONTEXT)
    assert second is not None
    assert tokens(second) == ["[CLS] the red [MASK] [SEP]", "[CLS] a red [MASK] [SEP]"]
    assert [list(request_of(e).positions) for e in second.encodings] == [[3], [3]]
    assert [request_of(e).top_k for e in second.encodings] == [1, 1]
    assert second.advance is not None
    assert second.advance(outputs(top({"sun": 0.2}), top({"moon": 0.8})), CONTEXT) is None
    [fillings] = decoded("fill-mask", second, [])
    assert [f.sequence for f in fillings] == ["a red moon", "the red sun"]
    assert [f.score for f in fillings] == pytest.approx([0.2, 0.1], rel=1e-4)


def test_a_beam_keeps_five_hypotheses_and_extends_each() -> None:
    wider = prepared("fill-mask", "[MASK]", decode="beam", top_k=7)
    assert request_of(wider.encodings[0]).top_k == 7
    request = prepared("fill-mask", "[MASK] [MASK]", decode="beam", top_k=1)
    assert request_of(request.encodings[0]).top_k == 5
    assert request.advance is not None
    first = {"the": 0.3, "a": 0.25, "of": 0.2, "and": 0.15, "to": 0.1}
    second = request.advance(outputs(top(first)), CONTEXT)
    assert second is not None
    assert len(second.encodings) == 5
    assert [request_of(e).top_k for e in second.encodings] == [5] * 5
    flat = {"sun": 0.2, "moon": 0.2, "red": 0.2, "tree": 0.2, "door": 0.2}
    peaked = {"sun": 0.9, "moon": 0.025, "red": 0.025, "tree": 0.025, "door": 0.025}
    assert second.advance is not None
    rounds = [top(flat), top(peaked), top(flat), top(flat), top(flat)]
    assert second.advance(outputs(*rounds), CONTEXT) is None
    [[best]] = decoded("fill-mask", second, [])
    assert best.token_strs == ["a", "sun"]
    assert best.score == pytest.approx(0.225, rel=1e-4)


def test_texts_with_fewer_masks_wait_for_the_others() -> None:
    request = prepared("fill-mask", ["[MASK]", "[MASK] [MASK]"], decode="left-to-right", top_k=1)
    assert len(request.encodings) == 2
    assert request.advance is not None
    second = request.advance(outputs(top({"the": 0.5}), top({"a": 0.5})), CONTEXT)
    assert second is not None
    assert tokens(second) == ["[CLS] a [MASK] [SEP]"]
    assert second.advance is not None
    assert second.advance(outputs(top({"sun": 0.5})), CONTEXT) is None
    one, two = decoded("fill-mask", second, [])
    assert [one[0].sequence, two[0].sequence] == ["the", "a sun"]
